"""Draw the stability study's figures and write the tables on its page, from JSON files of shortened
runs.

    python studies/reasoner/stability_summary.py
    python studies/reasoner/stability_summary.py --runs runs/stability --into study

With ``--runs``, runs are read from logs and added to a JSON file, replacing runs with the same arm
and seed.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from scipy.stats import spearmanr

from sparrow.report import theme

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "studies/common")]
from common import render, table  # noqa: E402
from stability_statistics import (  # noqa: E402
    BAND,
    EARLY,
    STATISTICS,
    TAIL,
    Run,
    against_dense,
    arrival,
    by_arm,
    collapsed,
    early,
    is_loop,
    is_page_arm,
    last_reward,
    late_outcome,
    late_read,
    outcome,
    over_arms,
    settled,
    shortened,
    signs,
    t_interval,
    tau,
    threshold,
)

RESULTS, PAGE, FIGURES = (
    ROOT / "benchmarks/results/stability",
    ROOT / "docs/stability.md",
    ROOT / "docs/figures",
)
PAGES = ("p80", "p86", "p89", "p92", "p95", "dense")
MODELS = {
    "first_rule": "3 layers",
    "study": "3 layers",
    "deep": "6 layers",
    "deep_again": "6 layers, again",
    "dial": "3 layers",
    "dial_deep": "6 layers, a third time",
}
"""The JSON files, each with a name for the model of its runs."""
FAULTS = {"halved": "schedule halved", "unworn": "LoRA lost"}
LOOPS = (
    ("first_rule", "auto92 (first rule)"),
    ("study", "auto97"),
    ("study", "auto98"),
    ("deep", "auto97"),
    ("deep", "auto98"),
    ("deep_again", "auto99"),
)
"""Columns in the closed loop's figure."""
Study = dict[str, list[Run]]


@dataclass(frozen=True)
class Options:
    """Which runs to add to which file; without runs, only figures and tables are written."""

    runs: tuple[Path, ...] = ()  # Folders with logs of runs.
    # The JSON file to add the runs to: study, or dial, which has its own dense runs. Runs of another
    # model go to deep, deep_again or dial_deep.
    into: str = "study"


def main(options: Options) -> None:
    """Add runs if there are any, and write figures and tables."""
    if options.runs:
        path = RESULTS / f"{options.into}.json"
        runs = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
        logs = sorted(path for folder in options.runs for path in folder.glob("*.jsonl"))
        merged = {
            (run["arm"], run["seed"]): run for run in [*runs, *filter(None, map(shortened, logs))]
        }
        rows = ",\n".join(
            json.dumps(kept(merged[key], options.into), separators=(",", ":"))
            for key in sorted(merged)
        )
        path.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    study = load()
    for name, draw in DRAWINGS.items():
        save(FIGURES / f"stability-{name}.png", draw, study)
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), tables(study)), encoding="utf-8")


def kept(run: Run, file: str) -> Run:
    """Return a run without the data that no table or figure uses."""
    drawn = file == "study" and run["arm"] in PAGES
    unread = set() if drawn else {"length"}
    if not is_loop(run):
        unread.add("bins")
    if file.startswith("dial"):
        unread |= {*TAIL, "mean", "kl", "lowest_p5", "read"}
    initial = {"kl"} if drawn else {"p10", "mean", "kl"}  # used only in the first steps
    return {
        name: value[:EARLY] if name in initial else value
        for name, value in run.items()
        if name not in unread
    }


def load() -> Study:
    """Load every file's runs, by file name."""
    files = {
        path.stem: json.loads(path.read_text(encoding="utf-8")) for path in RESULTS.glob("*.json")
    }
    for run in files["first_rule"]:
        run["arm"] += " (first rule)"
    return {name: files[name] for name in MODELS}


# --- tables ---


def arms(runs: list[Run], study: list[Run]) -> str:
    """Tabulate how much each arm read, its outcome, and the difference from dense runs with the
    same seeds.
    """
    head = ["arm", "seeds", "p5, step 1", "mean, step 1", "KV read", "actor's reward minus dense"]
    head += ["held-out accuracy", "minus dense", "collapsed"]
    rows = []
    for arm, some in by_arm(runs).items():
        p5, mean = (np.mean([early(run)[name] for run in some]) for name in ("p5", "mean"))
        reward, accuracy = (
            "{:+.3f} ± {:.3f}".format(*against_dense(some, study, f))
            for f in (last_reward, outcome)
        )
        cells = [
            f"`{arm}`",
            len(some),
            f"{p5:.3f}",
            f"{mean:.4f}",
            f"{late_read(some):.2f}",
            reward,
        ]
        rows.append(
            [
                *cells,
                ranged(map(outcome, some)),
                accuracy,
                f"{sum(map(collapsed, some))} of {len(some)}",
            ]
        )
    return table(head, rows).replace(" ± nan", "")


def ranged(values: Iterable[float]) -> str:
    """Format the mean and the range over a few seeds."""
    numbers = list(values)
    return f"{np.mean(numbers):.2f} ({min(numbers):.2f} to {max(numbers):.2f})"


def thresholds(runs: list[Run]) -> str:
    """Tabulate, for each statistic at the first step, the collapse threshold and how many runs it
    misclassifies.
    """
    rows = []
    start = {id(run): early(run) for run in runs}
    bad = {id(run): collapsed(run) for run in runs}
    groups = {
        "token TIS": [r for r in runs if r["correction"] == "token_tis"],
        "every correction": runs,
    }
    for title, chosen in groups.items():
        for name in STATISTICS:

            def cut(some: list[Run], name: str = name) -> float:
                fell = [bad[id(run)] for run in some]
                if all(fell) or not any(fell):
                    return np.nan
                return threshold([start[id(run)][name] for run in some], fell)

            estimate = over_arms(chosen, cut)
            wrong = sum((start[id(run)][name] < estimate[0]) != bad[id(run)] for run in chosen)
            count = f"{title}: {len(chosen)} runs, {sum(bad[id(run)] for run in chosen)} collapsed"
            rows.append([count, name, "{:.3f} [{:.3f}, {:.3f}]".format(*estimate), wrong])
    return table(
        ["fixed schedules with", "statistic", "threshold, step 1", "runs misclassified"], rows
    )


def ranks(groups: dict[str, list[Run]]) -> str:
    """Tabulate how well each statistic at the first step ranks the outcomes."""
    rows = []
    runs = [run for some in groups.values() for run in some]
    start = {id(run): early(run) for run in runs}
    end = {id(run): outcome(run) for run in runs}
    for name in STATISTICS:

        def rank(some: list[Run], name: str = name) -> float:
            return spearmanr(
                [start[id(run)][name] for run in some], [end[id(run)] for run in some]
            )[0]

        rows.append(
            [
                name,
                *(
                    "{:.2f} [{:.2f}, {:.2f}]".format(*over_arms(some, rank))
                    for some in groups.values()
                ),
            ]
        )
    return table(
        ["statistic", *(f"{title} ({len(some)} runs)" for title, some in groups.items())], rows
    )


def drift(runs: list[Run]) -> str:
    """Tabulate p5 at the start and end of runs with a constant schedule that did not collapse."""
    rows = []
    for schedule in PAGES[:-1]:
        tails = [run["p5"] for run in runs if run["schedule"] == schedule and not collapsed(run)]
        if tails:
            begin, end = (
                np.array([np.mean(tail[when]) for tail in tails])
                for when in (slice(1, 5), slice(-5, None))
            )
            p5 = [f"{x.mean():.3f}" for x in (begin, end)]
            rows.append(
                [
                    f"`{schedule}`",
                    len(tails),
                    *p5,
                    "{:+.3f} ± {:.3f}".format(*t_interval(list(end - begin))),
                ]
            )
    return table(["schedule", "runs", "p5, steps 2 to 5", "p5, last 5 steps", "rise"], rows)


def guard(runs: list[Run]) -> str:
    """Tabulate when each warning sign appeared, and when reward and accuracy had halved. Runs
    without any of these events share a row.
    """
    head = [
        "run",
        "p5 below tau - 0.02",
        "p1 below half of its highest",
        "reward halved",
        "held-out accuracy halved",
    ]
    rows = []
    for run in runs:
        if any(signs(run)):
            name = f"`{run['arm']}`, seed {run['seed']}{'' if collapsed(run) else ' (did not collapse)'}"
            rows.append([name, *("never" if step is None else step for step in signs(run))])
    return table(head, [*rows, [f"{len(runs) - len(rows)} other runs", *["never"] * 4]])


def loops(study: Study) -> str:
    """Tabulate when the closed loop reaches tau, how well it stays there, and what it costs. Steps
    count from 1, and ranges are over seeds.
    """
    head = [
        "model",
        "arm",
        "seeds",
        "steps",
        "9 of 10 bins within 0.02 at step",
        "share within 0.02 after that step",
    ]
    head += [
        "share at tau - 0.02 or above",
        "KV read settled at step",
        "p5 by bin, last half",
        "KV read, last half",
    ]
    head += ["actor's reward minus dense", "held-out accuracy minus dense"]
    rows = []
    for model, runs in study.items():
        for arm, some in by_arm(filter(is_loop, runs)).items():
            came, near, holds = zip(*map(arrival, some), strict=True)
            after = [
                (n[i:].mean(), h[i:].mean())
                for i, n, h in zip(came, near, holds, strict=True)
                if i is not None
            ]
            p5 = [
                b[1] for run in some for bins in run["bins"][len(run["bins"]) // 2 :] for b in bins
            ]
            dense = study["study"] if model == "first_rule" else runs
            rows.append(
                [
                    MODELS[model],
                    f"`{arm}`",
                    len(some),
                    span(len(run["reward"]) for run in some),
                    span("never" if i is None else i + 1 for i in came),
                    *(f"{x:.0%}" for x in np.mean(after, axis=0)),
                    span(map(settled, some)),
                    f"{min(p5):.3f} to {max(p5):.3f}",
                    f"{late_read(some):.2f}",
                    *(
                        "{:+.3f} ± {:.3f}".format(*against_dense(some, dense, f))
                        for f in (last_reward, outcome)
                    ),
                ]
            )
    return table(head, rows)


def span(values: Iterable[Any]) -> str:
    """Format sorted values as a range, or as a single number if they're all equal."""
    ordered = sorted(set(values), key=lambda x: (isinstance(x, str), x))
    return f"{ordered[0]}" if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def dials(study: Study) -> str:
    """Tabulate the dial's fraction of unverified tokens, predicted gain, and cost."""
    head = [
        "model",
        "tau",
        "seeds",
        "tokens unverified",
        "tokens unverified by seed",
        "returns",
        "predicted speed, last half",
    ]
    head += [
        "actor's reward minus dense",
        "held-out accuracy minus dense",
        "held-out accuracy minus dense, last 20 steps",
    ]
    rows = []
    for model in ("dial", "dial_deep"):
        for some in by_arm(
            run for run in study[model] if run["schedule"].startswith("dial:")
        ).values():
            # All steps sample about the same number of tokens.
            share = [np.mean(run["unverified"]) for run in some]
            gain = [x for run in some for x in run["speedup"][len(run["speedup"]) // 2 :]]
            returns = sum(run["returns"] for run in some)
            minus = (
                against_dense(some, study[model], f) for f in (last_reward, outcome, late_outcome)
            )
            rows.append(
                [
                    MODELS[model],
                    f"{tau(some[0]):g}",
                    len(some),
                    f"{np.mean(share):.0%}",
                    f"{min(share):.0%} to {max(share):.0%}",
                    returns,
                    f"{np.mean(gain):.3f}x",
                    *("{:+.3f} ± {:.3f}".format(*difference) for difference in minus),
                ]
            )
    return table(head, rows)


def faults(runs: list[Run]) -> str:
    """Tabulate the lowest p5 of any bin and the fraction of KV read, in the last step before a
    fault and in the steps after it.
    """
    rows = []
    for run in runs:
        fault, _, step = run["actor"].partition(":")
        if fault in FAULTS:
            when = range(int(step) - 1, int(step) + 4)
            name = [FAULTS[fault], f"{tau(run):.2f}", run["seed"]]
            rows.append(
                [*name, *(f"{run['lowest_p5'][i]:.3f} ({run['read'][i]:.2f})" for i in when)]
            )
    return table(["fault", "tau", "seed", "before", "1 step after", "2", "3", "4"], rows)


def tables(study: Study) -> dict[str, Callable[[], str]]:
    """Return the page's tables by name."""
    runs = study["study"]
    pages = [run for run in runs if is_page_arm(run)]
    plain = [run for run in pages if run["correction"] == "token_tis"]
    fixed = [
        run
        for run in runs
        if run["learning_rate"] == 5e-4 and not run["schedule"].startswith("auto:")
    ]
    corrected = [
        run for run in fixed if run["schedule"] != "dense" and not run["actor"] and run not in plain
    ]
    return {
        "schedules": lambda: arms(plain, runs),
        "threshold": lambda: thresholds(pages),
        "ranks": lambda: ranks({"page selection": pages, "every mismatch and loss": fixed}),
        "mismatches": lambda: arms([run for run in fixed if run["actor"]], runs),
        "corrections": lambda: arms(corrected, runs),
        "drift": lambda: drift(pages),
        "guard": lambda: guard([*runs, *study["first_rule"], *study["deep"], *study["deep_again"]]),
        "loop": lambda: loops(study),
        "faults": lambda: faults(runs),
        "dial": lambda: dials(study),
    }


# --- figures ---


def draw_threshold(figure: Any, study: Study) -> None:
    runs = study["study"]
    left, right = figure.subplots(1, 2, sharey=True)
    groups = {"pages": [run for run in runs if is_page_arm(run)]}
    kinds = {
        "eviction": "evict",
        "weights of fewer bits": "bits",
        "stale actor": "stale",
        "noise": "noise",
    }
    groups |= {
        label: [run for run in runs if run["actor"].startswith(kind)]
        for label, kind in kinds.items()
    }
    for (label, some), color in zip(groups.items(), (*theme.SERIES, theme.INK), strict=True):
        for ax, name in ((left, "p5"), (right, "mean")):
            # A log axis of the rejected fraction makes acceptance rates near 1 easier to tell
            # apart. Dense runs are at the edge of the axis.
            rejected = [max(1 - early(run)[name], 3e-3) for run in some]
            ax.plot(
                rejected,
                [outcome(run) for run in some],
                "o",
                ms=4,
                alpha=0.7,
                color=color,
                label=label,
            )
    for ax, name in ((left, "5th percentile"), (right, "mean")):
        ax.set_xscale("log")
        ax.invert_xaxis()
        ax.set_xlabel(f"1 - {name} of acceptance at step 1")
        ax.axhline(
            0.5 * by_arm(runs)["dense"][0]["held_out"][0][1], color=theme.MUTED, lw=0.8, ls=":"
        )
    left.set_ylabel("held-out accuracy of the policy at the end")
    left.axvline(1 - 0.86, color=theme.INK, lw=1, ls="--")
    left.text(1 - 0.86, 1.0, " published tau 0.86", fontsize=8, va="top")
    left.legend(loc="center right")


def draw_training(figure: Any, study: Study) -> None:
    from matplotlib import colormaps

    axes = figure.subplots(1, 3)
    for i, arm in enumerate(PAGES[::-1]):
        color = colormaps["turbo"](0.05 + 0.9 * i / (len(PAGES) - 1))
        for j, run in enumerate(by_arm(study["study"])[arm]):
            for ax, name in zip(axes, ("reward", "p5", "length"), strict=True):
                ax.plot(run[name][:50], color=color, lw=1, alpha=0.8, label=None if j else arm)
    for ax, label in zip(
        axes, ("reward of the actor", "p5 of acceptance", "response tokens"), strict=True
    ):
        ax.set_xlabel("step")
        ax.set_ylabel(label)
    axes[0].legend(ncols=2)


def draw_collapse(figure: Any, study: Study) -> None:
    """Draw a run that collapses while its p5 rises."""
    late = by_arm(study["study"])["p86"][0]
    left, right = figure.subplots(1, 2)
    step = np.arange(1, len(late["reward"]) + 1)
    left.plot(step, late["reward"], color=theme.SERIES[1], label="reward of the actor")
    left.plot(
        *zip(*late["held_out"], strict=True),
        "o",
        color=theme.INK,
        ms=4,
        label="held-out accuracy of the policy",
    )
    for name, color in zip(TAIL, theme.SERIES, strict=False):
        right.plot(step, late[name], color=color, label=name)
    right.plot(step, late["mean"], color=theme.MUTED, label="mean")
    for ax in (left, right):
        ax.set_xlabel("step")
        ax.legend()
    left.set_title(f"{late['arm']}, seed {late['seed']}")
    right.set_ylabel("acceptance")


def draw_loop(figure: Any, study: Study) -> None:
    axes = figure.subplots(3, len(LOOPS), sharey="row")
    for column, (model, arm) in zip(axes.T, LOOPS, strict=True):
        some = by_arm(study[model])[arm]
        steps = max(len(run["reward"]) for run in some)
        low, high = tau(some[0]) - BAND, tau(some[0]) + BAND
        dense = by_arm(study["study" if model == "first_rule" else model])["dense"]
        for run in dense:
            column[2].plot(
                run["reward"][:steps],
                color=theme.MUTED,
                lw=0.8,
                label="dense" if run is dense[0] else None,
            )
        for run in some:
            label = "closed loop" if run is some[0] else None
            numbers = sorted({b[0] for bins in run["bins"] for b in bins})
            for i, n in enumerate(numbers):
                p5 = [next((b[1] for b in bins if b[0] == n), np.nan) for bins in run["bins"]]
                column[0].plot(p5, color=theme.BINS[min(i, 3)], lw=0.8)
            column[1].plot(100 * np.array(run["read"]), color=theme.SERIES[1], lw=1)
            column[2].plot(run["reward"], color=theme.SERIES[1], lw=1, label=label)
        column[0].axhspan(low, high, color=theme.ABOVE, alpha=0.12)
        column[0].set_ylim(0.795, 1.005)
        column[0].set_title(f"{MODELS[model]}\n{arm}")
        column[1].set_ylim(0, 102)
        column[2].set_xlabel("step")
    for ax, label in zip(axes[:, 0], ("p5 by length bin", "KV read, %", "reward"), strict=True):
        ax.set_ylabel(label)
    axes[2, 1].legend()


def draw_price(figure: Any, study: Study) -> None:
    """Draw each arm's difference from dense runs in actor reward and policy accuracy, against the
    fraction of KV read.
    """
    left, right = figure.subplots(1, 2, sharey=True)
    groups = {
        "fixed schedule": ("study", [run for run in study["study"] if run["arm"] in PAGES[:-1]]),
        "closed loop": ("study", list(filter(is_loop, study["study"]))),
        "closed loop, 6 layers": ("deep", list(filter(is_loop, study["deep"]))),
    }
    for (label, (model, some)), color in zip(groups.items(), theme.SERIES, strict=False):
        for ax, value in ((left, last_reward), (right, outcome)):
            for i, arm in enumerate(by_arm(some).values()):
                mean, half = against_dense(arm, study[model], value)
                point = dict(yerr=half, fmt="o", ms=4, color=color, label=None if i else label)
                ax.errorbar(100 * late_read(arm), mean, **point)
    left.set_ylabel("minus dense, at the end")
    left.set_title("reward of the actor")
    right.set_title("held-out accuracy of the policy")
    left.set_ylim(-0.9, 0.25)
    for ax in (left, right):
        ax.set_xlabel("KV read in the last half, %")
        ax.axhline(0, color=theme.MUTED, lw=0.8)
    right.legend(loc="lower right")


DRAWINGS: dict[str, Callable[[Any, Study], None]] = {
    "threshold": draw_threshold,
    "training": draw_training,
    "collapse": draw_collapse,
    "closed-loop": draw_loop,
    "price": draw_price,
}


def save(path: Path, draw: Callable[[Any, Study], None], study: Study) -> None:
    """Save a figure. The same runs always give an identical file."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(theme.MATPLOTLIB):
        figure = Figure(figsize=(11, 6.5 if draw is draw_loop else 4), layout="constrained")
        draw(figure, study)
        figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
