"""Fit the overheads of ``sparrow.cost`` to measured decode steps, and report how well the fitted
overheads predict these steps.

    python benchmarks/fit_roofline.py                       # refits the H200's constants

``roofline_h200.json`` contains a ``machine`` (a key of ``sparrow.cost.MACHINES``) and ``steps``. A
step is a whole decode step with ``shape``, ``batch``, ``length`` and ``ms``. Sparse steps also have
a ``schedule`` (anything ``SparsitySchedule.load`` accepts), and steps that return top-20 lists have
``lists``. The dense and sparse steps measured by ``rollout.py`` are added. The fit minimises the
squared relative errors with non-negative constants. The last column has each point's error in a fit
to the other model shapes. No fit uses steps from the rollout traces, in which sequences differ in
length. The errors of these steps come after the table. The host's seconds per sequence are fitted
to the rollouts of ``grpo_step.py``: their first steps are so large that the host can't keep up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any

import numpy as np
from common import RESULTS, load
from numpy.typing import NDArray
from rollout_trace import PROMPT, responses, simulate, states
from scipy.optimize import nnls

from sparrow.cost import MACHINES, SHAPES, Overheads, decode_step
from sparrow.schedule import SparsitySchedule

STEADY = 1.5
"""A step has two clusters of times if its 90th percentile is more than this multiple of its 10th.
Which cluster a time falls into depends on whether the host keeps up.
"""


@dataclass(frozen=True)
class Point:
    """A measured step. To predict its time, multiply each constant by its entry in ``features``,
    and add up the products. For read_fraction, use the inverse of the constant.
    """

    name: str
    shape: str
    features: tuple[float, ...]
    seconds: float


def measured() -> dict[str, Any]:
    """Read the H200's file, and add the decode steps measured by ``rollout.py``. Steps from rollout
    traces go under ``ragged``.
    """
    rows = load("roofline_h200") | {
        "ragged": [],
        "rollouts": [load(f"grpo_step_{run}") for run in ("sparse", "ddp2")],
    }
    for path in sorted(RESULTS.glob("rollout_*.json")):
        run = load(path.stem)
        sparse = {"schedule": f"{run['shape']}-0.86"} if run["variant"] == "sparse" else {}
        for row in run["points"]:
            is_one_step = row["p90"] <= STEADY * row["p10"]
            if row["schedule"] != "dense" and row["logprobs"] != "sampled" and is_one_step:
                uniform = {key: row[key] for key in ("batch", "length", "ms")} | {
                    "lists": row["logprobs"] == "top 20"
                }
                rows["steps"].append({"shape": run["shape"], **uniform, **sparse})
        for requests, trace in run["traces"].items():
            spans = simulate([PROMPT] * int(requests), responses(int(requests)), run["slots"])
            for (step, lengths), row in zip(
                states(spans, len(trace["states"])), trace["states"], strict=True
            ):
                assert (step, lengths.sum()) == (row["step"], row["tokens"]), (
                    f"{path} was measured on a different trace"
                )
                ragged = {
                    "shape": run["shape"],
                    "lengths": lengths,
                    "ms": row["top 20"]["ms"],
                    "lists": True,
                    **sparse,
                }
                rows["ragged"].append(ragged | {"trace": requests})
    return rows


def point(row: Mapping[str, Any], machine: str) -> Point:
    """Return a measured step as a ``Point``."""
    shape, spec = SHAPES[row["shape"]], row.get("schedule")
    schedule = None if spec is None else SparsitySchedule.load(spec)
    lengths = row["lengths"] if "lengths" in row else [row["length"]] * row["batch"]
    step = decode_step(shape, MACHINES[machine], lengths, schedule, Overheads(sparse_layer_s=1.0))
    lists = len(lengths) * bool(row.get("lists"))
    name = f"{row['shape']} {len(lengths)} x {round(float(np.mean(lengths)))}"
    name += " top 20" * bool(lists) + " sparse" * (spec is not None)
    features = (
        shape.layers,
        step.overhead_s,
        len(lengths),
        lists,
        step.weight_s + step.attention_s,
    )
    return Point(name, row["shape"], features, row["ms"] * 1e-3)


def fit(points: list[Point]) -> Overheads:
    """Return the constants that minimise the sum of squared relative errors."""
    features, seconds = arrays(points)
    *constants, slowness = nnls(features / seconds[:, None], np.ones(len(points)))[0].tolist()
    return Overheads(*[*constants, 1 / slowness])


def scaled(run: Mapping[str, Any]) -> tuple[NDArray[np.int64], SparsitySchedule]:
    """Return the response lengths and the schedule of a ``grpo_step.py`` step."""
    preset = SparsitySchedule.preset(run["shape"])
    pages = tuple(run["schedule"] or preset.top_k)
    schedule = preset.replace(top_k=pages, bin_tokens=preset.bin_tokens // run["scale"])
    return np.maximum(np.array(responses(run["responses"])) // run["scale"], 1), schedule


def fit_host(overheads: Overheads, runs: list[dict[str, Any]]) -> Overheads:
    """Fit the host's seconds per sequence to parts of rollouts, minimising squared relative errors.
    Return ``overheads`` with the fitted value.
    """
    rows, device, seconds = [], [], []
    for run in runs:
        lengths, schedule = scaled(run)
        mine = lengths[:: run["gpus"]]
        parts = np.array_split(np.arange(run["engine"]["steps"]), len(run["engine"]["ms"]))
        for part, ms in zip(parts, run["engine"]["ms"], strict=True):
            now = int(part[len(part) // 2])
            running = int((mine > now).sum())
            cached = [64 + now] * running  # 64-token prompts
            rows.append(running)
            device.append(
                decode_step(
                    SHAPES[run["shape"]], MACHINES["h200"], cached, schedule, overheads
                ).seconds
            )
            seconds.append(ms / 1e3)
    candidates = 1e-6 * np.arange(0, 100)
    errors = [
        ((np.maximum(device, host_s * np.array(rows)) / seconds - 1) ** 2).sum()
        for host_s in candidates
    ]
    return replace(overheads, host_s=float(candidates[np.argmin(errors)]))


def predicted(points: list[Point], overheads: Overheads) -> NDArray[np.float64]:
    """Predict each point's seconds."""
    *constants, read_fraction, _ = astuple(overheads)
    return arrays(points)[0] @ np.array([*constants, 1 / read_fraction])


def arrays(points: list[Point]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    return np.array([point.features for point in points]), np.array(
        [point.seconds for point in points]
    )


def errors(rows: Mapping[str, Any]) -> tuple[Overheads, list[tuple[Point, float, float, float]]]:
    """Return the fitted constants and, for each point, its predicted seconds, its relative error,
    and its error in a fit that leaves its shape out.
    """
    points = [point(row, rows["machine"]) for row in rows["steps"]]
    overheads = fit_host(fit(points), rows["rollouts"])
    others = {
        shape: fit([p for p in points if p.shape != shape]) for shape in {p.shape for p in points}
    }
    table = []
    for p, seconds in zip(points, predicted(points, overheads), strict=True):
        held_out = predicted([p], others[p.shape])[0] / p.seconds - 1
        table.append((p, float(seconds), float(seconds / p.seconds - 1), float(held_out)))
    return overheads, table


def ragged_errors(rows: Mapping[str, Any], overheads: Overheads) -> dict[str, list[float]]:
    """Return the relative errors for the trace steps, by shape and kind."""
    by_kind: dict[str, list[float]] = {}
    for row in rows["ragged"]:
        p = point(row, rows["machine"])
        kind = (
            f"{row['shape']} {'sparse' if 'schedule' in row else 'dense'}, {row['trace']} requests"
        )
        by_kind.setdefault(kind, []).append(float(predicted([p], overheads)[0] / p.seconds - 1))
    return by_kind


def report(rows: Mapping[str, Any]) -> list[str]:
    """Format the constants and all errors as lines of text; errors are in percent."""
    overheads, table = errors(rows)
    lines = [f"{'point':42} {'measured ms':>12} {'predicted':>10} {'error':>8} {'left out':>9}"]
    for p, seconds, error, held_out in table:
        lines.append(
            f"{p.name:42} {p.seconds * 1e3:12.3f} {seconds * 1e3:10.3f} {error:8.1%} {held_out:9.1%}"
        )
    for kind, off in ragged_errors(rows, overheads).items():
        lines.append(
            f"trace, {kind}: mean error {np.mean(off):.1%}, from {min(off):.1%} to {max(off):.1%}"
        )
    return [*lines, str(overheads)]


if __name__ == "__main__":
    print("\n".join(report(measured())))
