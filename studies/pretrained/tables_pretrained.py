"""Tables for the pretrained model in ``studies/pretrained``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from math import exp, log
from pathlib import Path
from statistics import fmean

from common import Row, interval, load, table

sys.path.append(str(Path(__file__).parents[1] / "common"))
from stability_statistics import by_arm, t_interval

LAST = 10
"""The number of steps at the end of training over which rewards are averaged."""


def _where(b: Row) -> str:
    return f"{b['start']:,} to {b['end']:,}"


def _mean_and_p5(b: Row) -> str:
    return f"{interval(b['mean'], 3)} / {interval(b['p5'], 2)}"


def _tokens_per_cycle(row: Row, digits: int) -> str:
    """Format the tokens per cycle with 8 drafts, with its interval."""
    return interval([row["tokens_a_cycle"]["8"][0], *row["tokens_a_cycle_interval"]["8"]], digits)


def _rows(mode: str) -> list[Row]:
    return [row for row in load("pretrained_acceptance")["rows"] if row["mode"] == mode]


def acceptance() -> str:
    """Tabulate the acceptance of drafts at temperature 1 by domain, budget and length: mean, p5 and
    tokens per cycle.
    """
    rows, bins = [], []
    for row in _rows("lossless"):
        if row["temperature"] == 1:
            bins = [_where(b) for b in row["bins"]]
            cells = [f"{_mean_and_p5(b)} / {_tokens_per_cycle(b, 1)}" for b in row["bins"]]
            rows.append([row["domain"], f"{row['budget']:,}", *cells])
    return table(["domain", "tokens read", *bins], rows)


def lossy() -> str:
    """Tabulate the lossy actor's acceptance at temperature 1 by domain, budget and length: mean and
    p5.
    """
    rows, bins = [], []
    for row in _rows("lossy"):
        if row["temperature"] == 1:
            bins = [_where(b) for b in row["bins"]]
            cells = [_mean_and_p5(b) for b in row["bins"]]
            rows.append([row["domain"], f"{row['budget']:,}", *cells])
    return table(["domain", "tokens read", *bins], rows)


def tail() -> str:
    """Tabulate the lossy actor's statistics that test the paper's claims about the tail."""
    rows = []
    for row in sorted(_rows("lossy"), key=lambda row: row["domain"]):
        if fit := row.get("beta_tail"):
            share = [1 - x for x in (fit["n"] / row["n"], *reversed(fit["fraction_interval"]))]
            correlation = row["correlation"]
            r = [
                interval(correlation[of], 2) if of in correlation else "not measured"
                for of in ("p5 of bins", "tokens")
            ]
            shape = f"Beta({fit['a']:.2f}, {fit['b']:.2f})"
            distance = interval([fit["ks"], *fit["ks_interval"]], 3)
            cells = [row["domain"], f"{row['temperature']:g}", f"{row['budget']:,}"]
            cells += [interval(share, 0, "%"), shape, distance]
            rows.append([*cells, *r])
    head = [
        "domain",
        "temperature",
        "tokens read",
        "above 0.999",
        "fit to all other tokens",
        "KS distance",
    ]
    return table([*head, "r of p5 with length", "r of tokens with length"], rows)


def temperatures() -> str:
    """Tabulate acceptance in chat mathematics by temperature and budget."""
    chat = {
        (row["temperature"], row["budget"]): row
        for row in _rows("lossy")
        if row["domain"] == "chat mathematics"
    }
    rows = []
    for row in sorted(_rows("lossless"), key=lambda row: (row["temperature"], row["budget"])):
        if row["domain"] == "chat mathematics":
            other = chat[row["temperature"], row["budget"]]
            cells = [f"{row['temperature']:g}", f"{row['budget']:,}"]
            for each in (row, other):
                cells += [interval(each["mean"], 3), interval(each["p5"], 2)]
            rows.append([*cells, _tokens_per_cycle(row, 2)])
    head = ["temperature", "tokens read", "drafts: mean", "p5", "lossy actor: mean", "p5"]
    return table([*head, "tokens per cycle, k = 8"], rows)


def reading() -> str:
    """Tabulate acceptance for variants that differ in what drafts read. Each variant is compared
    with pages of 16 without dense layers, at equal bytes.
    """
    rows = []
    for row in load("pretrained_reading")["rows"]:
        what = {
            "page size": f"pages of {row['page_size']}",
            "quest": f"Quest, pages of {row['page_size']}",
            "landmarks": f"landmarks in {row['landmarks']}",
        }.get(row["study"], row["study"])
        cells = [what, f"{row['budget']:,}", f"{row['tokens_read']:,.0f}"]
        cells += [interval(row["mean"], 3), interval(row["p5"], 3)]
        cells.append(_tokens_per_cycle(row, 2))
        less = row.get("minus_even")
        gains = [interval(less[name], 3) for name in ("mean", "p5")] if less else []
        rows.append([*cells, *(gains or ["", ""])])
    head = ["drafts read", "tokens read", "bytes, in KV tokens", "mean", "p5"]
    return table(
        [*head, "tokens per cycle, k = 8", "mean at equal bytes", "p5 at equal bytes"], rows
    )


def calibrated() -> str:
    """Tabulate the pages chosen by calibration on each domain and on all domains, by length."""
    result = load("pretrained_schedules")
    width = result["settings"]["bin_tokens"]
    names = {"mixture": "all domains"}
    rows = [
        [names.get(found["on"], found["on"]), *found["pages"][:-1]]
        for found in result["calibrations"]
    ]
    ends = [f"up to {(i + 1) * width:,}" for i in range(len(rows[0]) - 1)]
    return table(["calibrated on", *ends], rows)


def schedules() -> str:
    """Tabulate every schedule's p5 on held-out sequences of every domain."""
    result = load("pretrained_schedules")
    domains = list(dict.fromkeys(row["domain"] for row in result["rows"]))
    by_schedule: dict[str, dict[str, Row]] = {}
    for row in result["rows"]:
        by_schedule.setdefault(row["on"], {})[row["domain"]] = row
    rows = []
    for on, found in by_schedule.items():
        cells = [
            f"{interval(found[d]['p5'], 3)} / {interval(_worst(found[d]), 3)} / {found[d]['below']}"
            for d in domains
        ]
        rows.append([on, f"{found[domains[0]]['tokens_read']:,.0f}", *cells])
    return table(["calibrated on", "tokens read", *domains], rows)


def _worst(row: Row) -> list[float]:
    """Return the lowest p5 of any length bin, with this bin's own interval."""
    limits: list[list[float]] = [b[1:] for b in row["bins"]]
    return min(limits, key=lambda p5: p5[0])


def longer_loss() -> str:
    """Tabulate the held-out loss by position of the model whose context was extended, in nats per
    token, with its interval: as it was, with the larger rotary base, and after training.
    """
    losses: dict[str, list[Row]] = load("pretrained_longer")["model"]["held_out_loss"]
    rows = [[name, *(interval(b["nats"], 2) for b in bins)] for name, bins in losses.items()]
    return table(["model", *map(_where, next(iter(losses.values())))], rows)


def longer() -> str:
    """Tabulate acceptance on sources with the extended context: mean, p5 and, for drafts, tokens
    per cycle.
    """
    rows = []
    bins = []
    names = {"lossless": "drafts", "lossy": "lossy actor"}
    for row in load("pretrained_longer")["rows"]:
        if row["reuse"] == 1:
            bins = [_where(b) for b in row["bins"]]
            cells = []
            for b in row["bins"]:
                drafts = b["tokens_a_cycle"]
                tokens = f" / {drafts['8'][0]:.1f}" if drafts else ""
                cells.append(_mean_and_p5(b) + tokens)
            rows.append([names[row["mode"]], f"{row['budget']:,}", *cells])
    return table(["actor", "tokens read", *bins], rows)


def training(task: str) -> str:
    """Tabulate the comparison of a task's arms by seed: mean reward over the steps that all runs
    completed, the difference from dense rollouts, and held-out scores.
    """
    result = load(f"pretrained_training_{task}")
    dense, *_ = (row for row in result["rows"] if row["arm"] == "dense")
    dense_reward = dict(zip(dense["seeds"], dense["reward"], strict=True))
    rows = []
    for row in result["rows"]:
        runs = [run for run in result["runs"] if run["arm"] == row["arm"]]
        cells = [row["arm"], _listed(row["steps"], "d")]
        cells.append(_listed([run["read"] for run in runs], ".0%"))
        cells.append(_listed([run.get("tokens_per_cycle") for run in runs], ".1f"))
        cells.append(_listed(row["reward"], ".3f"))
        less = row["reward_minus_dense"]
        paired = zip(row["seeds"], row["reward"], strict=True)
        cells.append(_listed([x - dense_reward[seed] for seed, x in paired] if less else [], ".3f"))
        cells.append(interval(less, 3) if less else "")
        cells += [_listed([_score(run, step) for run in runs], ".2f") for step in (10, 20)]
        rows.append(cells)
    head = ["rollouts", "steps", "KV read", "tokens per cycle"]
    head += [f"mean reward of steps 1 to {result['compared_steps']}", "minus dense, same seed"]
    head += ["mean difference", "held-out score after 10 steps", "after 20 steps"]
    return table(head, rows)


def _score(run: Row, step: int) -> float | None:
    """Return the held-out score after ``step`` steps, if it was measured."""
    return next((score[1] for score in run["held_out"] if score[0] == step), None)


def _listed(values: list[float | None], form: str) -> str:
    """Format the values of an arm's seeds, without missing ones."""
    return ", ".join(f"{x:{form}}" for x in values if x is not None)


def long_training() -> str:
    """Tabulate the long training runs: reward, and the held-out score before and after."""
    compared = load("pretrained_training_story")["compared_steps"]
    rows = []
    for run in load("pretrained_training_story_long")["runs"]:
        before, after = (interval(run["held_out"][i][1:], 2) for i in (0, -1))
        steps = len(run["reward"])
        first = sum(run["reward"][:compared]) / compared
        rewards = [f"{first:.3f}", f"{_last(run, steps):.2f}"]
        rows.append([run["arm"], steps, *rewards, before, after])
    head = ["rollouts", "steps", f"mean reward of steps 1 to {compared}"]
    head += [f"of the last {LAST} steps", "held-out score before", "after"]
    return table(head, rows)


def training_clock() -> str:
    """Tabulate the training runs that had a GPU to themselves, by arm: how long their steps take,
    and the reward after the same time, by seed. Ratios are geometric means over seeds, with
    intervals.
    """
    runs = load("pretrained_training_clock")["runs"]
    dense = {run["seed"]: run for run in runs if run["arm"] == "dense"}
    ends = {seed: min(run["clock"][-1] for run in runs if run["seed"] == seed) for seed in dense}
    rows = []
    for arm, some in by_arm(runs).items():
        seconds = [run["seconds"] for run in some]
        cells = [arm, _listed([len(run["reward"]) for run in some], "d")]
        cells.append(_listed([spent["step"][0] for spent in seconds], ".1f"))
        for part in ("rollout", "update", "other"):
            cells.append(_listed([spent[part] for spent in seconds], ".1f"))
        cells.append(_listed([run["tokens_per_response"] for run in some], "d"))
        cells.append(_listed([run["rollout_tokens_per_s"] for run in some], "d"))
        cells.append(_relative(some, dense, lambda run: run["rollout_tokens_per_s"]))
        cells.append(_listed([run["seconds_per_1000_tokens"] for run in some], ".3f"))
        cells.append(_relative(some, dense, lambda run: 1 / run["seconds_per_1000_tokens"]))
        by_then = [sum(time <= ends[run["seed"]] for time in run["clock"]) for run in some]
        cells.append(_listed(list(map(_last, some, by_then)), ".3f"))
        rows.append(cells)
    minutes = " and ".join(f"{end / 60:.1f}" for end in ends.values())
    head = ["rollouts", "steps", "seconds per step", "of which rollout", "update", "other"]
    head += ["tokens per response", "rollout, tokens/s", "relative to dense"]
    head += ["step, seconds per 1,000 tokens", "speed relative to dense"]
    head += [f"mean reward of the last {LAST} steps within {minutes} minutes"]
    return table(head, rows)


def training_clock_lossy() -> str:
    """Tabulate short runs of the lossy arms and a dense one that had a GPU to themselves, all with
    the same seed. Speeds relative to dense are geometric means over steps, with intervals.
    """
    runs = load("pretrained_training_clock_lossy")["runs"]
    (dense,) = [run["timed"] for run in runs if run["arm"] == "dense"]
    rows = []
    for run in runs:
        seconds = run["seconds"]
        cells = [run["arm"], f"{run['read']:.0%}", f"{seconds['step'][0]:.1f}"]
        cells += [f"{seconds[part]:.1f}" for part in ("rollout", "update", "other")]
        cells += [str(run["tokens_per_response"]), _faster(run, dense, per_token=False)]
        cells += [f"{run['seconds_per_1000_tokens']:.3f}", _faster(run, dense, per_token=True)]
        rows.append(cells)
    head = ["rollouts", "KV read", "seconds per step", "of which rollout", "update", "other"]
    head += ["tokens per response", "speed of steps relative to dense"]
    return table([*head, "seconds per 1,000 tokens", "speed per token relative to dense"], rows)


def _faster(run: Row, dense: Row, per_token: bool) -> str:
    """Format the speed of a run's steps relative to the dense run's, with an interval over steps.
    Return nothing for the dense run itself.
    """
    if run["arm"] == "dense":
        return ""
    logs = []
    for step, spent in enumerate(run["timed"]["seconds"]):
        ratio = dense["seconds"][step] / spent
        if per_token:
            ratio *= run["timed"]["tokens"][step] / dense["tokens"][step]
        logs.append(log(ratio))
    return interval([exp(x) for x in _mean_interval(logs)], 2)


def _relative(some: Sequence[Row], dense: dict[int, Row], speed: Callable[[Row], float]) -> str:
    """Format an arm's speed relative to the dense runs with the same seeds: the geometric mean over
    seeds, with its interval. Return nothing for the dense arm itself.
    """
    if some[0]["arm"] == "dense":
        return ""
    logs = [log(speed(run) / speed(dense[run["seed"]])) for run in some]
    return interval([exp(x) for x in _mean_interval(logs)], 2)


def _mean_interval(values: Sequence[float]) -> list[float]:
    """Return the mean with its 95 % t-interval, or without one for a single value."""
    mean, half = t_interval(values)
    return [mean, mean - half, mean + half] if len(values) > 1 else [mean]


def _last(run: Row, steps: int) -> float:
    """Return the mean reward of the last ``LAST`` of a run's first ``steps`` steps."""
    some: list[float] = run["reward"][:steps][-LAST:]
    return sum(some) / len(some)


def training_p5(task: str) -> str:
    """Tabulate p5 by length in a task's training: the means of the first and last three steps that
    arms are compared over, and the lowest p5 of any of these steps. The dense and lossless arms
    have an interval over seeds for the last three steps, or the values if there are only one or two
    seeds. Single runs also have p5 in their own last step, with its interval, if they measured it.
    Only lengths that all runs have in all compared steps are shown. Each schedule also has the p5
    that calibration found, above the first arm that uses it.
    """
    result = load(f"pretrained_training_{task}")
    steps = result["compared_steps"]
    shown = _lengths_of_all(result["runs"], steps)
    rows: list[list[str]] = []
    calibrations: list[list[str]] = []

    def over_seeds(runs: list[Row]) -> list[str]:
        cells = []
        for same in zip(*(_bins(run, shown) for run in runs), strict=True):
            series = [bin_["p5"][:steps] for bin_ in same]
            first = fmean(fmean(x[:3]) for x in series)
            last = [fmean(x[-3:]) for x in series]
            seeds = interval(_mean_interval(last), 3) if len(last) > 2 else _listed(last, ".3f")
            cells.append(f"{first:.3f} / {seeds} / {min(map(min, series)):.3f}")
        return cells

    def of_one_run(run: Row) -> list[str]:
        cells = []
        for bin_ in _bins(run, shown):
            series = bin_["p5"][:steps]
            cell = f"{fmean(series[:3]):.3f} / {fmean(series[-3:]):.3f} / {min(series):.3f}"
            if bin_["p5"][-1] is not None:
                cell += f" / {interval([x for x in bin_['last'] if x is not None], 3)}"
            cells.append(cell)
        return cells

    for row in result["rows"]:
        runs = [run for run in result["runs"] if run["arm"] == row["arm"]]
        if row["arm"] in ("dense", "lossless"):
            rows.append([row["arm"], "all seeds", *over_seeds(runs)])
            continue
        measured = [bin_.get("calibrated") for bin_ in _bins(runs[0], shown)]
        found = [interval(x, 3) if x else "" for x in measured]
        if any(found) and found not in calibrations:
            calibrations.append(found)
            rows.append([row["arm"], "calibration", *found])
        rows += [[row["arm"], f"seed {run['seed']}", *of_one_run(run)] for run in runs]
    return table(["rollouts", "runs", *map(_where, _bins(result["runs"][0], shown))], rows)


def _lengths_of_all(runs: list[Row], steps: int) -> list[int]:
    """Return the starts of the length bins that every run has in each of the first ``steps``
    steps.
    """
    measured = [
        [bin_["start"] for bin_ in run["bins"] if None not in bin_["p5"][:steps]] for run in runs
    ]
    return [start for start in measured[0] if all(start in starts for starts in measured)]


def _bins(run: Row, starts: list[int]) -> list[Row]:
    """Return a run's length bins with these starts."""
    return [bin_ for bin_ in run["bins"] if bin_["start"] in starts]


TABLES = {
    "pretrained acceptance": acceptance,
    "pretrained lossy": lossy,
    "pretrained tail": tail,
    "pretrained temperatures": temperatures,
    "pretrained reading": reading,
    "pretrained calibrated": calibrated,
    "pretrained schedules": schedules,
    "pretrained longer loss": longer_loss,
    "pretrained longer": longer,
    "pretrained training": partial(training, "story"),
    "pretrained training clock": training_clock,
    "pretrained training clock lossy": training_clock_lossy,
    "pretrained long training": long_training,
    "pretrained training p5": partial(training_p5, "story"),
    "pretrained ledger": partial(training, "ledger"),
    "pretrained ledger p5": partial(training_p5, "ledger"),
}
