"""Summarise the control study in a JSON file: one row per arm with 95 % intervals over seeds, how
well each acceptance statistic ranks the runs, and the data for the figure.

    python studies/text/control_summary.py runs/control --checkpoint runs/text \\
        --out benchmarks/results/text_control.json

``tables_text_training.py`` makes tables from it.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from scipy.stats import spearmanr

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "studies/common")]
from common import save  # noqa: E402
from stability_statistics import (  # noqa: E402
    EARLY,
    STATISTICS,
    TAIL,
    Run,
    against,
    against_dense,
    by_arm,
    collapsed,
    early,
    last_reward,
    late_read,
    logged_rows,
    over_arms,
    shortened,
    t_interval,
)

LAST = 5
"""The actor's reward is averaged over this many steps at the end of a run."""
ENOUGH = 0.6
"""A run that was cut off still counts if it completed this fraction of its steps."""


@dataclass(frozen=True)
class Options:
    """Which runs to summarise."""

    runs: tyro.conf.Positional[tuple[Path, ...]]  # Folders with logs of runs.
    checkpoint: Path  # Folder written by train.py, with the model that the runs started from.
    out: Path = Path("text_control.json")  # The JSON file of results.


end_reward = partial(last_reward, last=LAST)


def whole_reward(run: Run, steps: int | None = None) -> float:
    """Return the actor's mean reward over the run, or over its first ``steps``."""
    return float(np.mean(run["reward"][:steps]))


def held_out_end(run: Run, steps: int | None = None) -> float:
    """Return the policy's last held-out reward, or the last one up to step ``steps``."""
    return float([reward for step, reward in run["held_out"] if steps is None or step <= steps][-1])


def held_out_start(run: Run) -> float:
    return float(run["held_out"][0][1])


def p5(run: Run) -> float:
    """Return p5 of acceptance, averaged over steps."""
    return float(np.mean(run["p5"]))


def limits(mean: float, half: float) -> list[float | None]:
    """Return a mean with the ends of its interval; for a single seed, the ends are None."""
    return [mean, None, None] if np.isnan(half) else [mean, mean - half, mean + half]


def over_seeds(values: Iterable[float]) -> list[float | None]:
    """Return the mean with its 95 % t-interval."""
    return limits(*t_interval(list(values)))


def minus(
    some: Sequence[Run], arm: str, runs: Sequence[Run], value: Callable[..., float]
) -> list[float | None]:
    """Compare runs with the runs of ``arm`` that have the same seeds, after equally many steps.
    Return the mean difference with its 95 % t-interval.
    """
    others = [run for run in runs if run["arm"] == arm]
    pairs = [run for run in some if run["seed"] in {other["seed"] for other in others}]
    return limits(*against(pairs, others, value)) if pairs else [None, None, None]


def row(some: Sequence[Run], runs: Sequence[Run]) -> dict[str, Any]:
    """Summarise an arm, given its runs and all runs.

    ``whole_reward_minus_plain`` compares the arm with the plain arm, which has the same schedule,
    the study's default correction and no adapter.
    """
    arm = some[0]["arm"]
    plain = arm.partition("-")[0]
    return {
        "arm": arm,
        "seeds": sorted(run["seed"] for run in some),
        "steps": sorted({len(run["reward"]) for run in some}),
        "top_k": some[0]["top_k"],
        "p5": over_seeds(map(p5, some)),
        "mean": over_seeds(float(np.mean(run["mean"])) for run in some),
        "kl": over_seeds(float(np.mean(run["kl"])) for run in some),
        "read": late_read(some),
        "reward_start": over_seeds(run["reward"][0] for run in some),
        "reward_end": over_seeds(map(end_reward, some)),
        "reward_minus_dense": minus(some, "dense", runs, end_reward),
        "whole_reward_minus_dense": minus(some, "dense", runs, whole_reward),
        "whole_reward_minus_plain": minus(some, plain, runs, whole_reward)
        if plain != arm
        else None,
        "held_out_start": over_seeds(map(held_out_start, some)),
        "held_out_end": over_seeds(map(held_out_end, some)),
        "held_out_minus_dense": minus(some, "dense", runs, held_out_end),
        "collapsed": sum(map(collapsed, some)),
    }


def ranking(runs: Sequence[Run], value: Callable[..., float]) -> dict[str, list[float]]:
    """Return Spearman's correlation between each statistic at the first step and the reward lost,
    over sparse runs. The loss is relative to the dense run with the same seed. The 95 % intervals
    come from resampling arms.
    """
    dense = {run["seed"] for run in runs if run["arm"] == "dense"}
    sparse = [run for run in runs if run["arm"] != "dense" and run["seed"] in dense]
    start = {id(run): early(run) for run in sparse}
    lost = {id(run): against_dense([run], runs, value)[0] for run in sparse}

    def rank(name: str, some: Sequence[Run]) -> float:
        first = [start[id(run)][name] for run in some]
        return float(spearmanr(first, [lost[id(run)] for run in some]).statistic)

    return {name: list(over_arms(sparse, partial(rank, name))) for name in STATISTICS}


def drawn(run: Run) -> Run:
    """Return a run's data for the figure: its rewards and its initial mismatch."""
    first = {name: run[name][:EARLY] for name in (*TAIL, "mean", "kl")}
    return {name: run[name] for name in ("arm", "seed", "actor", "reward")} | first


def counted(path: Path) -> Run | None:
    """Return a shortened run, or None if it ended too early."""
    first = next(iter(logged_rows(path)), {})
    return (
        shortened(path, math.ceil(ENOUGH * first["options"]["steps"]))
        if "options" in first
        else None
    )


def summary(folders: Sequence[Path], checkpoint: Path) -> dict[str, Any]:
    """Return settings, rows and shortened runs, leaving out runs that ended early.

    Raises ValueError if there are no runs.
    """
    logs = sorted(path for folder in folders for path in folder.glob("*.jsonl"))
    by_log = {path: counted(path) for path in logs}
    runs = [run for run in by_log.values() if run]
    if not runs:
        raise ValueError(
            f"no finished run among {len(logs)} logs in {', '.join(map(str, folders))}"
        )
    # Dense first, then by increasing p5.
    runs.sort(key=lambda run: (run["arm"] != "dense", run["arm"], run["seed"]))
    settings = logged_rows(next(path for path, run in by_log.items() if run))[0]["options"]
    kept = (
        "steps",
        "learning_rate",
        "correction",
        "prompts",
        "samples",
        "max_new_tokens",
        "temperature",
        "top_n",
    )
    return {
        "model": json.loads((checkpoint / "card.json").read_text(encoding="utf-8")),
        "settings": {name: settings[name] for name in (*kept, "held_out", "held_out_every")},
        "rows": [row(some, runs) for some in by_arm(runs).values()],
        "ranking": {
            name: ranking(runs, value)
            for name, value in {"reward": whole_reward, "held_out": held_out_end}.items()
            if len({run["arm"] for run in runs} - {"dense"}) > 2
        },
        "runs": [drawn(run) for run in runs],
    }


def main(options: Options) -> None:
    """Write the summary, and print its rows."""
    found = summary(options.runs, options.checkpoint)
    save(options.out, found)
    for each in found["rows"]:
        print(json.dumps(each))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
