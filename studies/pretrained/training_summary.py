"""Summarise the runs of ``training_arms.py``, as far as they got, in a JSON file and a printed
table.

    python studies/pretrained/training_summary.py runs/story \\
        --out benchmarks/results/pretrained_training_story.json
    python studies/pretrained/training_summary.py runs/clock --clock \\
        --out benchmarks/results/pretrained_training_clock.json

Arms are compared over the steps that all runs completed. Differences from dense rollouts and their
95 % intervals come from a linear model with an effect per arm and per seed, so they compare runs
with the same seed. The model assumes that all runs scatter equally around it.

With ``--clock``, for runs that had a GPU to themselves, the summary says how long steps and their
parts take, and leaves out p5, the length of each step's responses, and the fraction of the KV cache
read in each step.

With ``--steps``, only the first steps of every run count. Responses change during training, so runs
that got further than others are then compared over the same steps.

With ``--earlier``, the summary also covers the runs of an earlier summary of the same kind. If both
have a run with the same arm and seed, the one in the folder counts. All runs must have been
performed on the same machine.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from scipy.stats import t

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "studies/common")]
from common import machine, read_result, save, table  # noqa: E402
from stability_statistics import Run, by_arm, logged_rows  # noqa: E402

WARM_UP = 3
"""How many steps at the start of a run are not timed."""


@dataclass(frozen=True)
class Options:
    """The runs to summarise."""

    runs: tyro.conf.Positional[Path]  # The folder of run directories.
    out: Path  # The JSON file of results.
    clock: bool = False  # Report the times of steps instead of p5 and series by step.
    steps: int | None = None  # Only the first steps of each run count; by default, all.
    earlier: Path | None = None  # An earlier summary, whose runs are kept.
    trained_on: str | None = None  # The machine that performed the runs, if not this one.


def rounded(values: Iterable[float | None], digits: int = 3) -> list[float | None]:
    """Round values that are not None."""
    return [value if value is None else round(value, digits) for value in values]


def read(folder: Path, limit: int | None = None) -> Run:
    """Return the series of the run ARM-SEED, over its first ``limit`` steps. The clock doesn't
    count evaluations.
    """
    arm, _, seed = folder.name.rpartition("-")
    steps = logged_rows(folder / "metrics.jsonl")[:limit]
    path = folder / "evaluations.jsonl"
    evaluations = logged_rows(path) if path.exists() else []
    fractions = [row["kv"]["read_fraction"] for row in steps]
    return {
        "arm": arm,
        "seed": int(seed),
        "reward": rounded(row["reward"]["mean"] for row in steps),
        "clock": [round(s) for s in accumulate(sum(row["seconds"].values()) for row in steps)],
        "tokens": [round(row["response"]["mean"]) for row in steps],
        "read": round(float(np.mean(fractions)), 3),
        "read_by_step": rounded(fractions),
        **drafts(steps),
        "held_out": [
            [row["step"], *rounded((score["mean"][name] for name in ("value", "low", "high")), 4)]
            for row in evaluations
            if limit is None or row["step"] <= limit
            for score in row["eval"].values()
        ],
        "bins": whole_bins(folder, steps),
    }


def drafts(steps: Sequence[Run]) -> dict[str, Any]:
    """Return a lossless run's tokens per cycle, averaged over steps, and the fraction of drafts
    that were accepted. Return nothing for other runs.
    """
    found = [row["drafts"] for row in steps if "drafts" in row]
    if not found:
        return {}
    accepted, drafted = (sum(row[name] for row in found) for name in ("accepted", "drafted"))
    return {
        "tokens_per_cycle": round(float(np.mean([row["tokens_per_cycle"] for row in found])), 2),
        "accepted": round(accepted / drafted, 3),
    }


def times(folder: Path, limit: int | None = None) -> dict[str, Any]:
    """Return how long a run's steps took, from the first after ``WARM_UP`` to ``limit``. Seconds
    are medians, for whole steps with the 10th and the 90th percentile. Tokens are those of
    responses, over all these steps. ``timed`` has the seconds and tokens of each step.

    Raises ValueError if there are no such steps.
    """
    steps = logged_rows(folder / "metrics.jsonl")[WARM_UP:limit]
    if not steps:
        raise ValueError(f"{folder} has no step after the first {WARM_UP}; let it run for longer")
    spent = [row["seconds"] for row in steps]
    parts = {name: np.array([seconds[name] for seconds in spent]) for name in ("rollout", "update")}
    whole = np.array([sum(seconds.values()) for seconds in spent])
    parts["other"] = whole - parts["rollout"] - parts["update"]
    tokens = sum(row["response"]["tokens"] for row in steps)
    return {
        "seconds": {
            "step": rounded(np.percentile(whole, (50, 10, 90)).tolist(), 2),
            **{name: round(float(np.median(part)), 2) for name, part in parts.items()},
        },
        "tokens_per_response": round(float(np.mean([row["response"]["mean"] for row in steps]))),
        "rollout_tokens_per_s": round(tokens / float(parts["rollout"].sum())),
        "seconds_per_1000_tokens": round(1000 * float(whole.sum()) / tokens, 4),
        "timed": {
            "seconds": rounded(whole.tolist()),
            "tokens": [round(row["response"]["tokens"]) for row in steps],
        },
    }


def whole_bins(folder: Path, steps: Sequence[Run]) -> list[dict[str, Any]]:
    """Return p5 by length: what calibration measured, all steps, and the last step that has the
    length, with p5's interval and the ceiling. Leave out lengths with less than a tenth as many
    tokens as the fullest bin.
    """
    rows = [{bin_["start"]: bin_ for bin_ in row["mismatch"]["bins"]} for row in steps]
    starts = sorted({start for row in rows for start in row})
    tokens = {
        start: sum(row[start]["n_tokens"] for row in rows if start in row) for start in starts
    }
    found = []
    for start in starts:
        if 10 * tokens[start] >= max(tokens.values()):
            series = [row.get(start, {}) for row in rows]
            last = next(bin_ for bin_ in reversed(series) if bin_)
            found.append(
                {
                    "start": start,
                    "end": last["end"],
                    **calibrated(folder, start),
                    "p5": rounded(bin_.get("lower_bound") for bin_ in series),
                    "last": rounded(
                        last.get(name) for name in ("lower_bound", "interval_low", "interval_high")
                    ),
                    "ceiling": rounded(
                        last.get(name) for name in ("ceiling", "ceiling_low", "ceiling_high")
                    ),
                }
            )
    return found


def calibrated(folder: Path, start: int) -> dict[str, Any]:
    """Return the p5 that calibration measured for the schedule at this length. Return nothing for
    runs without a calibrated schedule, and if the budget was borrowed from other lengths.
    """
    path = folder / "config.json"
    schedule = json.loads(path.read_text(encoding="utf-8"))["schedule"] if path.exists() else {}
    return next(
        (
            {"calibrated": rounded(bin_[name] for name in ("p5", "lower", "upper"))}
            for bin_ in (schedule or {}).get("provenance", {}).get("bins", ())
            if bin_["start"] == start and not bin_["borrowed"]
        ),
        {},
    )


def mean_reward(run: Run, steps: int) -> float:
    """Return the actor's mean reward over the first ``steps`` steps."""
    return float(np.mean(run["reward"][:steps]))


def limits(mean: float, half: float) -> list[float | None]:
    """Return a mean with the ends of its interval; for a single seed, the ends are None."""
    return rounded([mean, None, None] if np.isnan(half) else [mean, mean - half, mean + half])


def minus_dense(runs: Sequence[Run], steps: int) -> dict[str, list[float | None]]:
    """Return each arm's mean reward over ``steps`` steps minus dense rollouts', with its interval.
    Leave out arms that share no seed with the dense runs.
    """
    dense = {run["seed"] for run in runs if run["arm"] == "dense"}
    others = {run["arm"] for run in runs if run["arm"] != "dense" and run["seed"] in dense}
    kept = [run for run in runs if run["arm"] in {"dense", *others}]
    seeds = sorted({run["seed"] for run in kept})
    columns = [("arm", arm) for arm in sorted(others)] + [("seed", seed) for seed in seeds]
    design = np.array([[float(run[name] == value) for name, value in columns] for run in kept])
    reward = np.array([mean_reward(run, steps) for run in kept])
    spare = len(kept) - len(columns)
    if not others:
        return {}
    effects = np.linalg.lstsq(design, reward, rcond=None)[0]
    variance = np.sum((reward - design @ effects) ** 2) / spare if spare else np.nan
    halves = t.ppf(0.975, spare) * np.sqrt(variance * np.diag(np.linalg.inv(design.T @ design)))
    return {
        arm: limits(*pair)
        for arm, *pair in zip(sorted(others), effects.tolist(), halves.tolist(), strict=False)
    }


def row(some: Sequence[Run], steps: int) -> dict[str, Any]:
    """Summarise an arm, given its runs and the number of steps over which arms are compared. Runs
    end after different numbers of steps, so nothing is averaged over their ends.
    """
    first = [run["held_out"][0][1] for run in some if run["held_out"]]
    return {
        "arm": some[0]["arm"],
        "seeds": [run["seed"] for run in some],
        "steps": [len(run["reward"]) for run in some],
        "minutes": rounded((run["clock"][-1] / 60 for run in some), 1),
        "reward": rounded(mean_reward(run, steps) for run in some),
        "held_out_start": round(float(np.mean(first)), 3) if first else None,
        "read": round(float(np.mean([run["read"] for run in some])), 3),
    }


def summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Return a row per arm, and all runs."""
    ordered = sorted(runs, key=lambda run: (run["arm"] != "dense", run["arm"], run["seed"]))
    steps = min(len(run["reward"]) for run in ordered)
    differences = minus_dense(ordered, steps)
    rows = [
        {**row(some, steps), "reward_minus_dense": differences.get(arm)}
        for arm, some in by_arm(ordered).items()
    ]
    return {"compared_steps": steps, "rows": rows, "runs": ordered}


def finished(folder: Path, clock: bool = False, limit: int | None = None) -> list[Run]:
    """Return the runs in ``folder`` that finished a step, over their first ``limit`` steps, as
    ``read`` or, if ``clock``, as ``timed`` returns them. Raises ValueError if there are none.
    """
    folders = [path.parent for path in folder.glob("*-*/metrics.jsonl") if logged_rows(path)]
    if not folders:
        raise ValueError(f"no run in {folder} has finished a step; run training_arms.py first")
    runs = []
    for path in folders:
        run = read(path, limit)
        runs.append(timed(run, path, limit) if clock else run)
    return runs


def joined(runs: Sequence[Run], where: str, path: Path) -> list[Run]:
    """Return ``runs``, performed on the machine ``where``, and those of the summary ``path`` that
    have another arm or seed. Raises ValueError if the machines differ, or if only one of them is a
    clock summary.
    """
    summarised = read_result(path)
    if summarised["machine"] != where:
        raise ValueError(
            f"the runs in {path} were performed on {summarised['machine']}, but the new ones on "
            f"{where}; summarise them without --earlier, or correct --trained-on"
        )
    earlier: list[Run] = summarised["runs"]
    if ("bins" in earlier[0]) != ("bins" in runs[0]):
        kind = "without" if "bins" in earlier[0] else "with"
        raise ValueError(f"{path} was written {kind} --clock; summarise the new runs {kind} it too")
    replaced = {(run["arm"], run["seed"]) for run in runs}
    return [*runs, *(run for run in earlier if (run["arm"], run["seed"]) not in replaced)]


def shown(value: list[float | None] | None) -> str:
    """Format a value with its interval."""
    if value is None:
        return ""
    mean, low, high = value
    return f"{mean:.3f}" if low is None else f"{mean:.3f} [{low:.3f}, {high:.3f}]"


def timed(run: Run, folder: Path, limit: int | None = None) -> Run:
    """Return a run's series with the times of its steps instead of p5 and series by step."""
    left_out = ("bins", "tokens", "read_by_step")
    kept = {name: value for name, value in run.items() if name not in left_out}
    return kept | times(folder, limit)


def main(options: Options) -> None:
    """Write the summary, and print the table."""
    runs = finished(options.runs, options.clock, options.steps)
    where = options.trained_on or machine()
    if options.earlier:
        runs = joined(runs, where, options.earlier)
    found = summary(runs)
    save(options.out, {"machine": where, **found})
    cells = [
        [r["arm"], len(r["seeds"]), max(r["steps"]), shown(r["reward_minus_dense"])]
        for r in found["rows"]
    ]
    print(table(["arm", "seeds", "steps", "reward minus dense"], cells))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
