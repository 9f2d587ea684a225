"""Tables of docs/distill.md."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
from common import Row, load, table

ARMS = {
    "none": "no adapter",
    "full": "PPO and KL",
    "kl": "KL only",
    "half": "half of the responses",
    "expensive": "PPO and KL, more expensive schedule",
}


def distilled() -> tuple[dict[str, list[Row]], list[int]]:
    """Return the study's runs by kind of training, and the start of each bin that most responses
    reach.
    """
    runs = load("distill")["runs"].items()
    arms = {
        label: [run for name, run in runs if name.startswith(arm)] for arm, label in ARMS.items()
    }
    start = [
        {"without": run["start"], "dense": run["dense at the start"]} for run in arms[ARMS["none"]]
    ]
    bins = start[0]["without"]["bins"]
    return {"before training": start, **arms}, [
        b[0] for b in bins if 2 * b[5] >= max(b[5] for b in bins)
    ]


def with_adapter(run: Row) -> Row:
    """Return the actor's measurements, with its adapter if it has one."""
    return run["with"] if "with" in run else run["without"]


def by_bin(measured: Row, reached: list[int]) -> Any:
    """Return p5 with the ends of its interval, ``[bins, 3]``."""
    return np.array([b[2:5] for b in measured["bins"] if b[0] in reached])


def distill_tail() -> str:
    """Tabulate the actor's p5 by length on held-out problems, before and after training."""
    arms, reached = distilled()
    rows = []
    for name, runs in arms.items():
        cells = np.mean([by_bin(with_adapter(run), reached) for run in runs], axis=0)
        mean = f"{statistics.mean(with_adapter(run)['mean'] for run in runs):.3f}"
        rows.append([name, *("{:.3f} [{:.3f}, {:.3f}]".format(*cell) for cell in cells), mean])
    return table(
        ["trained with", *(f"tokens {b}-{b + 63}" for b in reached), "mean acceptance"], rows
    )


def distill_runs() -> str:
    """Tabulate each run's lowest p5, the gain from the adapter, and the step that ``first_holding``
    returns. The result has only the last ten steps' lowest p5 and rewards.
    """
    arms, reached = distilled()
    rows = []
    for name, runs in arms.items():
        lowest = [by_bin(with_adapter(run), reached)[:, 0].min() for run in runs]
        lifts = [
            (by_bin(run["with"], reached) - by_bin(run["without"], reached))[:, 0].mean()
            for run in runs
            if "with" in run
        ]
        trained = [run for run in runs if "steps" in run]
        last = [float(np.mean(run["lowest_p5"])) for run in trained]
        steps = [first_holding(run["lowest_p5_low"]) for run in trained]
        rows.append(
            [
                name,
                each(lowest),
                each(lifts, "+"),
                each(last),
                ", ".join(str(s or "never") for s in steps),
            ]
        )
    head = [
        "lowest p5, held out",
        "gain from the adapter, mean of bins",
        "lowest p5, last 10 steps",
        "above 0.86 from step",
    ]
    return table(["trained with", *head], rows)


def distill_rewards() -> str:
    """Tabulate each run's mean rewards."""
    rows = []
    for name, runs in distilled()[0].items():
        last = [np.mean(run["reward"]) for run in runs if "steps" in run]
        held_out = (
            [with_adapter(run)["reward"] for run in runs],
            [run["dense"]["reward"] for run in runs],
        )
        rows.append([name, *map(each, (last, *held_out))])
    return table(["trained with", "last 10 steps", "actor, held out", "policy, held out"], rows)


def each(values: Sequence[float], sign: str = "") -> str:
    """Format the mean and each run's value. The result is empty if there are no runs."""
    return (
        f"{np.mean(values):{sign}.3f} ({', '.join(f'{x:{sign}.3f}' for x in values)})"
        if values
        else ""
    )


def first_holding(low: Sequence[float]) -> int | None:
    """Return the first of three consecutive steps where the lowest bin's interval starts at 0.86 or
    above.
    """
    return next((i + 1 for i in range(len(low) - 2) if min(low[i : i + 3]) >= 0.86), None)


def distill_overhead() -> str:
    result = load("distill_overhead")
    names = {
        "dense_update": "the policy's own update",
        "everything": "PPO and KL on everything",
        "kl_alone": "KL only",
        "half_of_the_responses": "PPO and KL on half of the responses",
        "a_quarter_of_the_responses": "PPO and KL on a quarter of the responses",
    }
    rows = []
    for key, name in names.items():
        row = [name]
        for text in ("runs", "random"):
            run = result[text][key]
            row.append(f"{statistics.median(run['seconds']):.2f}")
            low, high = run["added_range"]
            row.append(
                "" if key == "dense_update" else f"{run['added']:.0%} ({low:.0%}-{high:.0%})"
            )
        rows.append([*row, f"{result['runs'][key]['peak_gib']:.0f}"])
    reads = [f"tiles read {result[text]['read']:.1f}" for text in ("runs", "random")]
    head = [
        "update",
        f"seconds, {reads[0]}",
        "added time",
        f"seconds, {reads[1]}",
        "added time",
        "peak GiB",
    ]
    return table(head, rows)


TABLES = {
    "distill overhead": distill_overhead,
    "distill tail": distill_tail,
    "distill runs": distill_runs,
    "distill rewards": distill_rewards,
}
