"""Fit the lossless cycle constants to all points that ``benchmarks/lossless.py`` wrote to
``benchmarks/results``.

    python benchmarks/fit_lossless.py

Prints the fitted constants, the shipped constants (from ``sparrow.cost.lossless``), and each
shape's errors with the shipped constants.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from common import RESULTS, load, table
from scipy.optimize import nnls

from sparrow.cost import MACHINES, SHAPES, VLLM_H200, Machine
from sparrow.cost.lossless import CYCLE_H200, CycleOverheads, DraftSetup, lossless_step
from sparrow.schedule import SparsitySchedule

H200 = MACHINES["h200"]


def measured() -> list[dict[str, Any]]:
    """Return the cycles measured on an H200 with a fixed draft length and a 16-bit cache.
    Acceptance doesn't affect cycle time.
    """
    points = []
    for path in sorted(RESULTS.glob("lossless_*.json")):
        result = load(path.stem)
        in_16_bits = "kv_cache_dtype" not in result.get("settings", {})
        if result.get("variant") == "lossless" and "H200" in result["device"] and in_16_bits:
            decoding = result["decoding"]
            stored = decoding["draft_schedule"].get("landmark_dtype", "auto")
            for point in result.get("points", ()):
                if isinstance(point["drafts"], int) and point["drafts"]:
                    what = {"shape": result["shape"], "landmark_dtype": stored}
                    points.append(
                        {**what, "draft_weights": decoding.get("draft_weights", "auto"), **point}
                    )
    return points


def fit_cycles(cycles: Iterable[Mapping[str, Any]], machine: Machine) -> CycleOverheads:
    """Fit non-negative constants by least squares on the relative errors of ``cycle_seconds``.

    Args:
        cycles: measured cycles without top lists, each with ``shape`` (from ``SHAPES``), ``batch``,
            ``length``, ``pages``, ``drafts`` (at least 1) and ``ms``, plus ``landmark_dtype`` and
            ``draft_weights`` if these are not ``auto``.
        machine: the machine they ran on. Its dense steps are assumed to have an H200's overheads.
    """
    rows, left = [], []
    for cycle in cycles:
        shape, took = SHAPES[cycle["shape"]], cycle["ms"] / 1e3
        free = cycle_seconds(cycle, machine, CycleOverheads(0.0, np.inf))
        layers = cycle["drafts"] * shape.layers * 1e-6
        in_fp8 = cycle.get("draft_weights", "auto") == "fp8"
        copied = cycle["drafts"] * (shape.weights - shape.output)
        copy_s = copied / (machine.read_bytes_s * VLLM_H200.read_fraction)
        flops_s = 2 * shape.weights * cycle["drafts"] * cycle["batch"] / machine.flops
        rows.append([layers / took, in_fp8 * layers / took, in_fp8 * copy_s / took, flops_s / took])
        left.append((took - free) / took)
    (layer_us, fp8_us, slower, inverse), _ = nnls(np.array(rows), np.array(left))
    return CycleOverheads(layer_us * 1e-6, 1 / inverse, fp8_us * 1e-6, 1 / (1 + slower))


def cycle_seconds(cycle: Mapping[str, Any], machine: Machine, constants: CycleOverheads) -> float:
    """Predict a cycle's seconds; ``cycle`` is in the format of ``fit_cycles``."""
    stored = cycle.get("landmark_dtype", "auto")
    schedule = SparsitySchedule.fixed(cycle["pages"], dense_layers=(), landmark_dtype=stored)
    drafting = DraftSetup(cycle["drafts"], schedule, 1.0, cycle.get("draft_weights", "auto"))
    lengths = [cycle["length"]] * cycle["batch"]
    plain = VLLM_H200.without_lists
    step = lossless_step(SHAPES[cycle["shape"]], machine, lengths, drafting, plain, constants)
    return step.seconds * drafting.tokens_per_cycle


def errors(cycles: list[dict[str, Any]]) -> list[float]:
    """Return the relative errors with the shipped constants."""
    return [cycle_seconds(cycle, H200, CYCLE_H200) / (cycle["ms"] / 1e3) - 1 for cycle in cycles]


def fitted() -> str:
    """Tabulate each shape's errors with the shipped constants and with a fit to other shapes."""
    rows = []
    everything = measured()
    cycles = [cycle for cycle in everything if cycle["draft_weights"] == "auto"]
    in_fp8 = [cycle for cycle in everything if cycle["draft_weights"] == "fp8"]
    for shape in sorted({cycle["shape"] for cycle in cycles}):
        own = [cycle for cycle in cycles if cycle["shape"] == shape]
        others = fit_cycles([cycle for cycle in cycles if cycle["shape"] != shape], H200)
        left_out = [cycle_seconds(cycle, H200, others) / (cycle["ms"] / 1e3) - 1 for cycle in own]
        off = errors(own)
        cells = [
            f"{np.abs(off).mean():.1%}",
            f"{max(off, key=abs):+.1%}",
            f"{max(left_out, key=abs):+.1%}",
        ]
        rows.append([shape, len(own), *cells])
    for shape in sorted(
        {cycle["shape"] for cycle in in_fp8}
    ):  # with two shapes and two constants, neither shape can be left out
        off = errors([cycle for cycle in in_fp8 if cycle["shape"] == shape])
        name = f"{shape}, drafts with weights in fp8"
        rows.append([name, len(off), f"{np.abs(off).mean():.1%}", f"{max(off, key=abs):+.1%}", ""])
    return table(
        [
            "shape",
            "cycles",
            "mean absolute error",
            "largest error",
            "largest error if the shape is left out of the fit",
        ],
        rows,
    )


if __name__ == "__main__":
    print(fit_cycles(measured(), H200), CYCLE_H200, sep="\n")
    print(fitted())
