"""Summarise the study of reward against wall-clock time in a JSON file for
``wall_clock_figure.py``.

    python studies/text/wall_clock_summary.py runs/wall --checkpoint runs/text \\
        --out benchmarks/results/text_wall_clock.json [--earlier EARLIER.json]

With ``--earlier``, the runs are added to those of an earlier summary. The new runs have another
seed, and either the same model or one that was trained again. The clock adds up the seconds of
steps: rollout, scoring, update, and the transfer of new weights to vLLM. vLLM's start-up and
evaluations on held-out problems are not included.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "studies/common")]
from common import read_result, save  # noqa: E402
from stability_statistics import Run, logged_rows  # noqa: E402

PHASES = ("rollout", "score", "update", "sync")
HERE = ("checkpoint", "out")
"""Options that only name files."""
RESAMPLES = 2000
"""Number of resamples for a speed-up's interval."""


@dataclass(frozen=True)
class Options:
    """Which runs to summarise."""

    runs: tyro.conf.Positional[Path]  # Folder with logs of arms.
    checkpoint: Path  # Folder written by train.py, with the model that the runs started from.
    out: Path = Path("text_wall_clock.json")  # The JSON file of results.
    earlier: Path | None = None  # The result of an earlier call, whose runs had other seeds.


def arm(path: Path) -> dict[str, Any]:
    """Summarise a run: its seconds by phase, and its rewards against the clock.

    Raises ValueError if the run has only one step, because kernels are still compiled in that step.
    """
    rows = logged_rows(path)
    steps = [row for row in rows if "reward" in row]
    if len(steps) < 2:
        raise ValueError(f"{path} has only {len(steps)} steps, but at least two are needed")
    seconds = np.array([row["seconds"] for row in steps])
    clock = np.cumsum(seconds.sum(1))
    at = {0: 0.0} | {row["step"]: end for row, end in zip(steps, clock.tolist(), strict=True)}
    cycles = [row["tokens_per_cycle"] for row in steps if "tokens_per_cycle" in row]
    profile = json.loads(path.with_suffix(".profile.json").read_text(encoding="utf-8"))
    return {
        **{name: rows[0][name] for name in ("arm", "seed", "top_k", "device", "token_bytes")},
        "options": {name: value for name, value in rows[0]["options"].items() if name not in HERE},
        "steps": len(steps),
        "tokens": float(np.mean([row["length"] for row in steps])),  # per response
        "seconds": dict(
            zip(PHASES, seconds[1:].mean(0).round(3).tolist(), strict=True)
        ),  # over all steps except the first
        "step_s": float(seconds[1:].sum(1).mean()),
        "tokens_per_cycle": float(np.mean(cycles)) if cycles else None,
        "profile": profile,
        "reward": [
            [round(end, 1), row["reward"]] for row, end in zip(steps, clock.tolist(), strict=True)
        ],
        "held_out": [
            [round(at[row["step"]], 1), row["held_out"]["policy"]]
            for row in rows
            if "held_out" in row
        ],
    }


def dense_of(run: Run, arms: Sequence[Run]) -> Run:
    """Return the dense run with the same model and seed."""
    return next(
        d
        for d in arms
        if d["arm"] == "dense" and (d["model"], d["seed"]) == (run["model"], run["seed"])
    )


def rollout_share(run: Run) -> list[float]:
    """Return the rollout's share of a step's time, with a 95 % interval. The first step is left
    out.

    The interval comes from resampling steps' clock times. The other phases do the same work in
    every step, so their means are used.
    """
    seconds = np.diff([end for end, _ in run["reward"]])
    others = sum(run["seconds"][phase] for phase in PHASES if phase != "rollout")
    drawn = np.random.default_rng(0).integers(0, len(seconds), (RESAMPLES, len(seconds)))
    low, high = np.quantile(1 - others / seconds[drawn].mean(1), [0.025, 0.975])
    return [float(1 - others / seconds.mean()), float(low), float(high)]


def compared(arms: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each run, with the rollout's share of a step, its speed relative to dense
    rollouts, and how much of the gain comes from attention.

    ``reward`` is the actor's mean reward over the number of steps that every run completed, and
    ``minutes`` is how long these steps took.

    ``attention_share`` is attention's share of a decode step's clock time, in the profile. Relative
    to the dense run, a run saves some time per token. ``saved_by_attention`` is the fraction of
    this time that is saved in attention; the host and other kernels save the rest.
    """
    steps = min(run["steps"] for run in arms)
    rows = []
    for run in arms:
        dense = dense_of(run, arms)
        saved = dense["profile"]["clock_ms"] - run["profile"]["clock_ms"]
        attention = dense["profile"]["attention_ms"] - run["profile"]["attention_ms"]
        rows.append(
            {
                "arm": run["arm"],
                "seed": run["seed"],
                "steps": run["steps"],
                "first_steps": steps,
                "reward": float(np.mean([reward for _, reward in run["reward"][:steps]])),
                "minutes": run["reward"][steps - 1][0] / 60,
                "rollout_share": rollout_share(run),
                "rollout_speedup": dense["seconds"]["rollout"] / run["seconds"]["rollout"],
                "attention_share": run["profile"]["attention_ms"] / run["profile"]["clock_ms"],
                "saved_by_attention": None if run is dense else attention / saved,
                "last_held_out": run["held_out"][-1],
            }
        )
    return rows


def paired(arms: Sequence[Run]) -> list[dict[str, Any]]:
    """Return a row for each arm except dense. An arm's steps are paired with the dense arm's steps
    that have the same problems and the same number of preceding updates.

    ``step_speedup`` is the ratio of dense's seconds to the arm's, summed over all steps except the
    first of each run, with a 95 % interval from resampling pairs. ``reward_minus_dense`` is the
    mean over each run's pairs. A run's steps are not independent, so an interval would require
    several runs.
    """
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in arms if run["arm"] != "dense"):
        seconds, rewards = [], []
        runs = [run for run in arms if run["arm"] == arm]
        for run in runs:
            dense = dense_of(run, arms)
            pair = [
                np.array(of["reward"][: min(run["steps"], dense["steps"])]) for of in (dense, run)
            ]
            seconds.append([np.diff(of[:, 0]) for of in pair])
            rewards.append(float((pair[1][:, 1] - pair[0][:, 1]).mean()))
        theirs, ours = np.concatenate(seconds, axis=1)
        drawn = np.random.default_rng(0).integers(0, len(ours), (RESAMPLES, len(ours)))
        low, high = np.quantile(theirs[drawn].sum(1) / ours[drawn].sum(1), [0.025, 0.975])
        rows.append(
            {
                "arm": arm,
                "seeds": [run["seed"] for run in runs],
                "pairs": len(ours) + len(runs),
                "step_speedup": [float(theirs.sum() / ours.sum()), float(low), float(high)],
                "reward_minus_dense": rewards,
            }
        )
    return rows


def main(options: Options) -> None:
    """Write the summary, and print its rows."""
    known = read_result(options.earlier) if options.earlier else {"models": [], "arms": []}
    card = json.loads((options.checkpoint / "card.json").read_text(encoding="utf-8"))
    models = [*known["models"], *([] if card in known["models"] else [card])]
    model = models.index(card)
    arms = [
        *known["arms"],
        *({**arm(path), "model": model} for path in sorted(options.runs.glob("*.jsonl"))),
    ]
    arms.sort(
        key=lambda run: (
            run["arm"] != "dense",
            run["arm"] != "lossless",
            run["arm"],
            run["model"],
            run["seed"],
        )
    )
    rows, pairs = compared(arms), paired(arms)
    save(options.out, {"models": models, "rows": rows, "paired": pairs, "arms": arms})
    for row in (*rows, *pairs):
        print(json.dumps(row))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
