"""Summarise the runs of ``training_arms.py``, as far as they got, in a JSON file and a printed
table.

    python studies/pretrained/training_summary.py runs/story \\
        --out benchmarks/results/pretrained_training_story.json

Intervals over seeds are 95 % t-intervals. Differences are between runs with the same seed, after
equally many steps.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import tyro

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "studies/common")]
from common import save, table  # noqa: E402
from stability_statistics import (  # noqa: E402
    Run,
    against_dense,
    by_arm,
    last_reward,
    logged_rows,
    t_interval,
)


@dataclass(frozen=True)
class Options:
    """The runs to summarise."""

    runs: tyro.conf.Positional[Path]  # The folder of run directories.
    out: Path  # The JSON file of results.
    trained_on: str | None = None  # The machine that performed the runs, if not this one.


def read(folder: Path) -> Run:
    """Return the series of the run ARM-SEED. The clock doesn't count evaluations."""
    arm, _, seed = folder.name.rpartition("-")
    steps = logged_rows(folder / "metrics.jsonl")
    path = folder / "evaluations.jsonl"
    evaluations = logged_rows(path) if path.exists() else []
    return {
        "arm": arm,
        "seed": int(seed),
        "reward": [row["reward"]["mean"] for row in steps],
        "clock": [round(s, 2) for s in accumulate(sum(row["seconds"].values()) for row in steps)],
        "rollout_s": [round(row["seconds"]["rollout"], 3) for row in steps],
        "tokens": [row["response"]["mean"] for row in steps],
        "read": [row["kv"]["read_fraction"] for row in steps],
        "held_out": [
            [row["step"], *(score["mean"][name] for name in ("value", "low", "high"))]
            for row in evaluations
            for score in row["eval"].values()
        ],
        "first_bins": list(map(shortened, steps[0]["mismatch"]["bins"])),
        "last_bins": list(map(shortened, steps[-1]["mismatch"]["bins"])),
    }


def shortened(row: dict[str, Any]) -> dict[str, Any]:
    """Return a length bin's p5 and ceiling with their intervals."""
    names = ("lower_bound", "interval_low", "interval_high")
    ceiling = ("ceiling", "ceiling_low", "ceiling_high")
    return {
        "start": row["start"],
        "end": row["end"],
        "p5": [row.get(name) for name in names],
        "ceiling": [row.get(name) for name in ceiling],
    }


def whole_reward(run: Run, steps: int | None = None) -> float:
    """Return the actor's mean reward over all steps, up to ``steps``."""
    return float(np.mean(run["reward"][:steps]))


def lowest_p5(run: Run) -> float:
    """Return the lowest p5 of any length bin in the last step."""
    return float(min(row["p5"][0] for row in run["last_bins"]))


def limits(mean: float, half: float) -> list[float | None]:
    """Return a mean with the ends of its interval; for a single seed, the ends are None."""
    return [mean, None, None] if np.isnan(half) else [mean, mean - half, mean + half]


def minus_dense(
    some: Sequence[Run], runs: Sequence[Run], value: Callable[..., float]
) -> list[float | None] | None:
    """Return the mean difference from the dense runs with the same seeds, and its interval. Return
    None if there are no such dense runs.
    """
    seeds = {run["seed"] for run in runs if run["arm"] == "dense"}
    pairs = [run for run in some if run["seed"] in seeds]
    return limits(*against_dense(pairs, runs, value)) if pairs else None


def row(some: Sequence[Run], runs: Sequence[Run]) -> dict[str, Any]:
    """Summarise an arm, given its runs and all runs."""
    evaluated = [run["held_out"] for run in some if run["held_out"]]
    return {
        "arm": some[0]["arm"],
        "seeds": sorted(run["seed"] for run in some),
        "steps": sorted(len(run["reward"]) for run in some),
        "minutes": [run["clock"][-1] / 60 for run in some],
        "reward_end": limits(*t_interval([last_reward(run) for run in some])),
        "reward_minus_dense": minus_dense(some, runs, whole_reward),
        "held_out_start": float(np.mean([e[0][1] for e in evaluated])) if evaluated else None,
        "held_out_end": limits(*t_interval([e[-1][1] for e in evaluated])) if evaluated else None,
        "lowest_p5": limits(*t_interval([lowest_p5(run) for run in some])),
        "read": float(np.mean([np.mean(run["read"]) for run in some])),
    }


def summary(folder: Path) -> dict[str, Any]:
    """Return a row per arm, and all runs that finished a step. Raises ValueError if none did."""
    logs = sorted(folder.glob("*-*/metrics.jsonl"))
    runs = [read(path.parent) for path in logs if logged_rows(path)]
    if not runs:
        raise ValueError(f"no run in {folder} has finished a step; run training_arms.py first")
    runs.sort(key=lambda run: (run["arm"] != "dense", run["arm"], run["seed"]))
    return {"rows": [row(some, runs) for some in by_arm(runs).values()], "runs": runs}


def shown(value: list[float | None] | None) -> str:
    """Format a value with its interval."""
    if value is None:
        return ""
    mean, low, high = value
    return f"{mean:.3f}" if low is None else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def main(options: Options) -> None:
    """Write the summary, and print the table."""
    found = summary(options.runs)
    where = {"machine": options.trained_on} if options.trained_on else {}
    save(options.out, {**where, **found})
    values = ("reward_end", "reward_minus_dense", "held_out_end", "lowest_p5")
    cells = [
        [r["arm"], len(r["seeds"]), max(r["steps"]), *(shown(r[name]) for name in values)]
        for r in found["rows"]
    ]
    print(table(["arm", "seeds", "steps", *values], cells))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
