"""Shorten the logs of training runs, and compute statistics over runs.

A run's outcome is the policy's accuracy on longer, held-out problems, decoded densely and averaged
over the last two evaluations. It shows what the run did to the policy, whichever actor was used. A
run has collapsed if its outcome is below half of the policy's initial accuracy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import t

from sparrow.train.schedules import FALLEN

Run = dict[str, Any]
TAIL = ("p1", "p5", "p10")
STATISTICS = (*TAIL, "mean", "KL")
SERIES = ("reward", "length", "mean", "kl", "read")
BAND = 0.02 + 1e-9
"""A bin is near tau if its p5 differs from tau by at most this much."""
LAST = 10
"""The reward is averaged over this many steps at the end of a run."""
FEWEST_STEPS = 25
"""A run cut off by the deadline still counts if it completed this many steps."""
EARLY = 5
"""A run's mismatch is measured from this many steps at its start."""
RESAMPLES = 2000


def shortened(path: Path, fewest: int = FEWEST_STEPS) -> Run | None:
    """Return a run's settings and series, with rounded numbers. Return None if the run ended before
    ``fewest`` steps.
    """
    rows = logged_rows(path)
    steps = [row for row in rows if "reward" in row]
    ended = rows[-1].get("ended", "killed") if rows and "step" not in rows[-1] else "killed"
    cut_off = ended in ("time is over", "killed")
    if not (
        ended == "done"
        or ended.startswith("TrainingDiverged")
        or (cut_off and len(steps) >= fewest)
    ):
        return None
    run = {k: v for k, v in rows[0].items() if k != "options"}
    run |= {name: [float(f"{row[name]:.4g}") for row in steps] for name in SERIES}
    for i, name in enumerate(TAIL):
        run[name] = [row["tail"][i] for row in steps]
    run["lowest_p5"] = [round(min(b[1] for b in _whole_bins(row)), 4) for row in steps]
    if run["schedule"].startswith("auto"):
        run["bins"] = [[[b[0], round(b[1], 3)] for b in _whole_bins(row)] for row in steps]
    if run["schedule"].startswith("dial"):
        dial = [row["dial"] for row in steps]
        run["unverified"] = [round(step["unverified_fraction"], 4) for step in dial]
        run["speedup"] = [round(step["speedup"], 4) for step in dial]
        run["returns"] = sum(any(b["verdict"] == "fails" for b in step["bins"]) for step in dial)
    run["held_out"] = [
        [row["step"], row["held_out"]["policy"]] for row in rows if "held_out" in row
    ]
    run["ended"] = ended
    return run


def logged_rows(path: Path) -> list[Run]:
    """Return the lines of a log, except a last line that was cut off when the run was killed."""
    text = path.read_text(encoding="utf-8")
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def _whole_bins(row: Run) -> list[list[float]]:
    """Return the bins with at least a tenth as many tokens as the fullest one, with p5 and its
    interval.
    """
    tokens = {b[0]: b[1] for b in row["bins"]}
    return [b for b in row["p5_interval"] if 10 * tokens[b[0]] >= max(tokens.values())]


def early(run: Run) -> dict[str, float]:
    """Return the statistics at the first step, before any update. Signs are chosen so that higher
    is better. A stale actor isn't stale yet at the first step, so average steps 2 to 5 instead.
    """
    when = slice(1, EARLY) if run["actor"].startswith("stale") else slice(0, 1)
    statistics = {name: float(np.mean(run[name][when])) for name in (*TAIL, "mean")}
    return {**statistics, "KL": -float(np.mean(run["kl"][when]))}


def outcome(run: Run, steps: int | None = None) -> float:
    """Return the policy's held-out accuracy at the end or after ``steps`` steps, averaged over the
    last two evaluations.
    """
    seen = [accuracy for step, accuracy in run["held_out"] if steps is None or step <= steps]
    return float(np.mean(seen[-2:]))


def late_outcome(run: Run, steps: int | None = None) -> float:
    """Like ``outcome``, but averaged over all evaluations in the last 20 steps."""
    end = steps or len(run["reward"])
    return float(
        np.mean([accuracy for step, accuracy in run["held_out"] if end - 20 < step <= end])
    )


def collapsed(run: Run) -> bool:
    return outcome(run) < 0.5 * run["held_out"][0][1]


def last_reward(run: Run, steps: int | None = None, last: int = LAST) -> float:
    """Return the actor's mean reward over the last ``last`` steps. If ``steps`` is given, leave out
    all later steps.
    """
    return float(np.mean(run["reward"][:steps][-last:]))


def late_read(some: Sequence[Run]) -> float:
    """Return the fraction of the KV cache read in the second half of a run, averaged over runs."""
    return float(np.mean([np.mean(run["read"][len(run["read"]) // 2 :]) for run in some]))


def tau(run: Run) -> float:
    """Return the closed loop's or the dial's tau, or the published tau if the run has neither."""
    kind, _, rest = run["schedule"].partition(":")
    return float(f"0.{rest.split(':')[0]}") if kind in ("auto", "dial") else 0.86


def is_page_arm(run: Run) -> bool:
    """Return whether the run has the usual settings. Only the pages read and the correction may
    differ.
    """
    plain = (
        run["advantage"],
        run["normalization"],
        run["learning_rate"],
        run["samples"],
        run["actor"],
    )
    return plain == ("grpo", "dapo", 5e-4, 8, "") and not run["schedule"].startswith(
        ("auto", "dial")
    )


def is_loop(run: Run) -> bool:
    """Return whether the run uses the closed loop with an otherwise ordinary actor."""
    return run["schedule"].startswith("auto:") and not run["actor"]


def settled(run: Run) -> int:
    """Return the step, counting from 1, after which the fraction of KV read stays within 0.05 of
    its mean over the second half.
    """
    read = np.array(run["read"])
    return int(np.flatnonzero(abs(read - read[len(read) // 2 :].mean()) > 0.05)[-1]) + 2


def by_arm(runs: Iterable[Run]) -> dict[str, list[Run]]:
    """Group runs by arm, with arms in order of first appearance."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run["arm"], []).append(run)
    return groups


def over_arms(runs: list[Run], statistic: Callable[[list[Run]], float]) -> tuple[float, ...]:
    """Return a statistic of runs, with a 95 % interval from resampling whole arms."""
    groups = list(by_arm(runs).values())
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(RESAMPLES):
        sample = [run for i in rng.integers(0, len(groups), len(groups)) for run in groups[i]]
        value = statistic(sample)
        if np.isfinite(value):
            drawn.append(value)
    return (statistic(runs), *np.percentile(drawn, [2.5, 97.5]).tolist())


def threshold(statistic: Sequence[float], bad: Sequence[bool]) -> float:
    """Return the threshold that misclassifies the fewest runs. A run is misclassified if it
    collapsed above the threshold or did not collapse below it. The threshold lies in the middle of
    a gap between runs.
    """
    order = np.argsort(statistic)
    x, y = np.asarray(statistic)[order], np.asarray(bad)[order]
    wrong = np.append(0, np.cumsum(~y)) + np.append(np.cumsum(y[::-1])[::-1], 0)
    edges = np.concatenate([[x[0]], (x[1:] + x[:-1]) / 2, [x[-1]]])
    return float(np.mean(edges[wrong == wrong.min()]))


def against(
    some: Sequence[Run], others: Sequence[Run], value: Callable[..., float]
) -> tuple[float, float]:
    """Compare runs with other runs that have the same seeds, after equally many steps. Return the
    mean difference in ``value`` over seeds, and the half-width of its 95 % t-interval (nan for a
    single seed).
    """
    other = {run["seed"]: run for run in others}
    differences = []
    for run in some:
        steps = min(len(run["reward"]), len(other[run["seed"]]["reward"]))
        differences.append(value(run, steps) - value(other[run["seed"]], steps))
    return t_interval(differences)


def against_dense(
    some: Sequence[Run], runs: Sequence[Run], value: Callable[..., float]
) -> tuple[float, float]:
    """Compare runs with the dense runs among ``runs``; see ``against``."""
    return against(some, [run for run in runs if run["arm"] == "dense"], value)


def t_interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean and the half-width of its 95 % t-interval (nan for a single value)."""
    n = len(values)
    half = t.ppf(0.975, n - 1) * np.std(values, ddof=1) / np.sqrt(n) if n > 1 else np.nan
    return float(np.mean(values)), float(half)


def arrival(run: Run) -> tuple[int | None, np.ndarray, np.ndarray]:
    """Return the first step, counting from 0, where 90 % of the bins are within 0.02 of tau. For
    each step, also return the fraction of bins within 0.02 of tau, and the fraction of bins that
    are no more than 0.02 below tau.
    """
    near = np.array([np.mean([abs(b[1] - tau(run)) <= BAND for b in bins]) for bins in run["bins"]])
    holds = np.array([np.mean([b[1] >= tau(run) - BAND for b in bins]) for bins in run["bins"]])
    return next((i for i, share in enumerate(near) if share >= 0.9), None), near, holds


def first_run_of(found: np.ndarray, patience: int = 3) -> int | None:
    """Return the step, counting from 1, where ``found`` has been true for ``patience`` steps in a
    row, or None.
    """
    return next(
        (i + 1 for i in range(patience - 1, len(found)) if found[i + 1 - patience : i + 1].all()),
        None,
    )


def signs(run: Run) -> tuple[int | None, int | None, int | None, int | None]:
    """Return the steps of four events: the guard's two warning signs, the smoothed reward dropping
    below half of its best value, and the policy's accuracy dropping below half of its initial
    value.
    """
    p1 = np.array(run["p1"])
    reward = np.array(run["reward"])
    smooth = np.array([reward[max(0, i - 4) : i + 1].mean() for i in range(len(reward))])
    half = 0.5 * run["held_out"][0][1]
    return (
        first_run_of(np.array(run["lowest_p5"]) < tau(run) - 0.02),
        first_run_of(p1 < FALLEN * np.maximum.accumulate(p1)),
        first_run_of(smooth < 0.5 * np.maximum.accumulate(smooth), 1),
        next((step for step, policy in run["held_out"] if policy < half), None),
    )
