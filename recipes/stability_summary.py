"""What the stability study found: one JSON file, figures and tables, from the runs' logs or from that JSON file alone.

    python recipes/stability_summary.py --runs runs/stability
    python recipes/stability_summary.py

Runs from logs join those in the JSON file, in the place of a run of the same arm and seed.

The outcome of a run is the policy's accuracy on held-out, longer programs, decoded densely, the mean of the last two
evaluations: what the run has made of the policy, whatever its actor was. A run has collapsed if that is below half of
what the policy started with.
Statistics are taken at the first step, before any update, and over steps 2 to 5.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from scipy.stats import spearmanr, t

from sparrow.report import theme
from sparrow.train.controller import FALLEN

WHEN = ("step 1", "steps 2 to 5")
STATISTICS = ("p1", "p5", "p10", "mean", "KL", "ESS", "reward")
SERIES = ("reward", "length", "entropy", "mean", "kl", "ess", "grad_norm", "read")
PAGES = ("fixed4", "p75", "p80", "p86", "p89", "p92", "p95", "p97", "dense")
LOOPS = ("auto92 (first rule)", "auto95", "auto97", "auto98")
"""Arms of the figure."""
RESAMPLES = 2000
LAST = 10
"""Steps at the end over which the reward is averaged."""
FEWEST_STEPS = 25
"""A run that the clock has cut off counts if it came this far."""


@dataclass(frozen=True)
class Options:
    """Where from and where to."""

    runs: tuple[Path, ...] = ()
    """Folders with the logs of runs that join the JSON file; without one, it is read as it is."""

    json: Path = Path("benchmarks/results/stability/study.json")
    """The runs in short."""

    first_rule: Path = Path("benchmarks/results/stability/first_rule.json")
    """Runs of the closed loop under its first rule, which had no floor."""

    figures: Path = Path("docs/figures")
    """Where the figures go."""

    tables: Path = Path("benchmarks/results/stability/tables.md")
    """Where the tables go."""


def main(options: Options) -> None:
    """Shorten the logs if there are any, then draw and tabulate."""
    runs = json.loads(options.json.read_text(encoding="utf-8")) if options.json.exists() else []
    if options.runs:
        logs = sorted(path for folder in options.runs for path in folder.glob("*.jsonl"))
        found = {(run["arm"], run["seed"]): run for run in [*runs, *filter(None, map(shortened, logs))]}
        runs = [found[key] for key in sorted(found)]
        options.json.parent.mkdir(parents=True, exist_ok=True)
        rows = ",\n".join(json.dumps(run) for run in runs)
        options.json.write_text(f"[\n{rows}\n]\n", encoding="utf-8")
    first = json.loads(options.first_rule.read_text(encoding="utf-8"))
    runs += [run | {"arm": f"{run['arm']} (first rule)"} for run in first]
    for run in runs:
        # At the first step a stale actor is not stale yet.
        first_seen = slice(1, 5) if run["actor"].startswith("stale") else slice(0, 1)
        run["step 1"], run["steps 2 to 5"] = statistics(run, first_seen), statistics(run, slice(1, 5))
    options.figures.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        save(options.figures / f"stability-{name}.png", draw, runs)
    text = "\n\n".join(table(runs) for table in TABLES) + "\n"
    options.tables.write_text(text, encoding="utf-8")
    print(text)


def shortened(path: Path) -> dict[str, Any] | None:
    """A run's settings and series, every number with the digits it is good for; None for one cut off early."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    steps = [row for row in rows if "reward" in row]
    ended = rows[-1].get("ended", "killed")
    cut_off = ended in ("time is over", "killed")
    if not (ended == "done" or ended.startswith("TrainingDiverged") or (cut_off and len(steps) >= FEWEST_STEPS)):
        return None
    run = {k: v for k, v in rows[0].items() if k != "options"}
    run |= {name: [float(f"{row[name]:.4g}") for row in steps] for name in SERIES}
    run["tail"] = [row["tail"] for row in steps]
    # By bin, where it is used: p5, its lower limit, and the pages.
    run["lowest_p5"] = [round(min(b[1] for b in _whole_bins(row)), 4) for row in steps]
    if run["schedule"].startswith("auto"):
        run["bins"] = [[[b[0], round(b[1], 3), b[2] and round(b[2], 3)] for b in _whole_bins(row)] for row in steps]
        run["tables"] = [row["top_k"] for row in steps]
    run["held_out"] = [[row["step"], row["held_out"]["policy"]] for row in rows if "held_out" in row]
    run["ended"] = ended
    return run


def _whole_bins(row: dict[str, Any]) -> list[list[float]]:
    """Bins, p5 and interval, that hold a tenth of the tokens of the fullest one."""
    tokens = {b[0]: b[1] for b in row["bins"]}
    return [b for b in row["p5_interval"] if 10 * tokens[b[0]] >= max(tokens.values())]


# --- what a run comes to ---


def statistics(run: dict[str, Any], when: slice) -> dict[str, float]:
    """The statistics over some steps, so turned that more is better."""
    p1, p5, p10 = np.mean(run["tail"][when], axis=0)
    kl, ess, mean, reward = (float(np.mean(run[name][when])) for name in ("kl", "ess", "mean", "reward"))
    return {"p1": p1, "p5": p5, "p10": p10, "mean": mean, "KL": -kl, "ESS": ess, "reward": reward}


def outcome(run: dict[str, Any], steps: int | None = None) -> float:
    """Held-out accuracy of the policy at the end, or after so many steps: the mean of the last two evaluations."""
    seen = [accuracy for step, accuracy in run["held_out"] if steps is None or step <= steps]
    return float(np.mean(seen[-2:]))


def last_reward(run: dict[str, Any], steps: int | None = None) -> float:
    """Reward of the actor in the last steps, or in those up to a step."""
    return float(np.mean(run["reward"][:steps][-LAST:]))


def against_dense(
    some: Sequence[dict[str, Any]], runs: Sequence[dict[str, Any]], value: Callable[..., float]
) -> tuple[float, float]:
    """A run's value minus that of the dense run of its seed after as many steps: the mean over seeds, and the half
    width of its 95 % t-interval (nan for a single seed)."""
    dense = {run["seed"]: run for run in runs if run["arm"] == "dense"}
    pairs = [(run, dense[run["seed"]]) for run in some if run["seed"] in dense]
    differences = []
    for pair in pairs:
        steps = min(len(run["reward"]) for run in pair)
        differences.append(value(pair[0], steps) - value(pair[1], steps))
    n = len(differences)
    half = t.ppf(0.975, n - 1) * np.std(differences, ddof=1) / np.sqrt(n) if n > 1 else np.nan
    return float(np.mean(differences)) if n else np.nan, float(half)


def collapsed(run: dict[str, Any]) -> bool:
    return outcome(run) < 0.5 * run["held_out"][0][1]


def is_page_arm(run: dict[str, Any]) -> bool:
    """Only the pages read, and how the mismatch is corrected, set the run apart."""
    plain = (run["advantage"], run["normalization"], run["learning_rate"], run["samples"], run["actor"])
    return plain == ("grpo", "dapo", 5e-4, 8, "") and not run["schedule"].startswith("auto")


def threshold(statistic: Sequence[float], bad: Sequence[bool]) -> float:
    """The cut with the fewest runs on the wrong side: collapsed above, or not collapsed below; in the gap's middle."""
    order = np.argsort(statistic)
    x, y = np.asarray(statistic)[order], np.asarray(bad)[order]
    wrong = np.append(0, np.cumsum(~y)) + np.append(np.cumsum(y[::-1])[::-1], 0)
    edges = np.concatenate([[x[0]], (x[1:] + x[:-1]) / 2, [x[-1]]])
    return float(np.mean(edges[wrong == wrong.min()]))


def by_arm(runs: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Runs by arm, in the order in which arms first come."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for run in runs:
        groups.setdefault(run["arm"], []).append(run)
    return groups


def over_arms(runs: list[dict[str, Any]], statistic: Callable[[list[dict[str, Any]]], float]) -> tuple[float, ...]:
    """A statistic of runs and its 95 % interval, resampling arms and with them all their seeds."""
    groups = list(by_arm(runs).values())
    rng = np.random.default_rng(0)
    drawn = []
    for _ in range(RESAMPLES):
        sample = [run for i in rng.integers(0, len(groups), len(groups)) for run in groups[i]]
        value = statistic(sample)
        if np.isfinite(value):
            drawn.append(value)
    return (statistic(runs), *np.percentile(drawn, [2.5, 97.5]).tolist())


def interval(values: Sequence[float]) -> str:
    """Mean and range of a few seeds."""
    return f"{np.mean(values):.2f} ({min(values):.2f}-{max(values):.2f})"


# --- tables ---


def rank_table(runs: list[dict[str, Any]]) -> str:
    """How well each statistic, seen early, ranks the outcomes."""
    arms = [run for run in runs if is_page_arm(run)]
    others = [run for run in runs if run["learning_rate"] == 5e-4 and not run["schedule"].startswith("auto")]
    lines = [
        "| statistic | pages and corrections, step 1 | steps 2 to 5 | every mismatch and loss, step 1 | steps 2 to 5 |",
        "|---|---|---|---|---|",
    ]
    for name in STATISTICS:
        cells = []
        for chosen in (arms, others):
            for when in WHEN:

                def rank(some: list[dict[str, Any]], name: str = name, when: str = when) -> float:
                    return spearmanr([r[when][name] for r in some], [outcome(r) for r in some])[0]

                rho = over_arms(chosen, rank)
                cells.append(f"{rho[0]:.2f} [{rho[1]:.2f}, {rho[2]:.2f}]")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return f"Spearman correlation with the outcome ({len(arms)} and {len(others)} runs)\n\n" + "\n".join(lines)


def threshold_table(runs: list[dict[str, Any]]) -> str:
    """Where collapse begins, by each statistic, and how many runs that cut gets wrong."""
    lines = [
        "| runs | statistic | threshold, step 1 | wrong side | steps 2 to 5 | wrong side |",
        "|---|---|---|---|---|---|",
    ]
    groups = {"pages, every correction": [r for r in runs if is_page_arm(r)]}
    for correction in dict.fromkeys(r["correction"] for r in runs):
        groups[f"pages, {correction}"] = [r for r in runs if is_page_arm(r) and r["correction"] == correction]
    for title, chosen in groups.items():
        bad = [collapsed(r) for r in chosen]
        if not any(bad) or all(bad):
            lines.append(f"| {title} ({len(chosen)}) | {'all' if any(bad) else 'none'} collapsed | | | | |")
            continue
        for name in STATISTICS if title == "pages, every correction" else ("p5", "mean"):
            cells = []
            for when in WHEN:

                def cut(some: list[dict[str, Any]], name: str = name, when: str = when) -> float:
                    bad = [collapsed(r) for r in some]
                    return threshold([r[when][name] for r in some], bad) if 0 < sum(bad) < len(bad) else np.nan

                found = over_arms(chosen, cut)
                wrong = sum((r[when][name] < found[0]) != collapsed(r) for r in chosen)
                cells.append(f"{found[0]:.3f} [{found[1]:.3f}, {found[2]:.3f}] | {wrong}")
            lines.append(f"| {title} ({len(chosen)}, {sum(bad)} collapsed) | {name} | {' | '.join(cells)} |")
    return "Where collapse begins\n\n" + "\n".join(lines)


def arm_table(runs: list[dict[str, Any]]) -> str:
    """Every arm: early tail, outcome by seed."""
    lines = [
        "| arm | seeds | steps | p5, step 1 | mean, step 1 | p5, steps 2-5 | KV read | last reward | held-out accuracy "
        "| collapsed |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for arm, some in by_arm(runs).items():
        steps = sorted({len(run["reward"]) for run in some})
        cells = (
            arm, len(some), f"{steps[0]}-{steps[-1]}" if len(steps) > 1 else steps[0],
            f"{np.mean([r['step 1']['p5'] for r in some]):.3f}",
            f"{np.mean([r['step 1']['mean'] for r in some]):.4f}",
            f"{np.mean([r['steps 2 to 5']['p5'] for r in some]):.3f}",
            f"{np.mean([np.mean(r['read']) for r in some]):.2f}",
            interval([float(np.mean(r["reward"][-5:])) for r in some]), interval([outcome(r) for r in some]),
            f"{sum(map(collapsed, some))} of {len(some)}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "Every arm; means over seeds, and in brackets the range\n\n" + "\n".join(lines)


def arrival(run: dict[str, Any]) -> tuple[int | None, np.ndarray, np.ndarray]:
    """The first step, from 0, with 9 of 10 bins within 0.02 of tau; the share of such bins, and of bins not below."""
    tau = float(f"0.{run['schedule'][5:]}")
    band = 0.02 + 1e-9
    near = np.array([np.mean([abs(b[1] - tau) <= band for b in bins]) for bins in run["bins"]])
    holds = np.array([np.mean([b[1] >= tau - band for b in bins]) for bins in run["bins"]])
    return next((i for i, share in enumerate(near) if share >= 0.9), None), near, holds


def loop_table(runs: list[dict[str, Any]]) -> str:
    """The closed loop: when it is there, how well it stays, what it costs."""
    lines = [
        "| arm | seed | 9 of 10 bins within 0.02 at step | bins within 0.02 from then on | bins at tau - 0.02 or above "
        "| KV read within 0.05 of its last half's from step | KV read, last half | p5 by bin, last half | last reward "
        "| held-out accuracy |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for run in runs:
        if not run["schedule"].startswith("auto"):
            continue
        arrived, near, holds = arrival(run)
        half = len(near) // 2
        shares = ("", "") if arrived is None else (f"{np.mean(x[arrived:]):.0%}" for x in (near, holds))
        read = np.array(run["read"])
        unsettled = np.flatnonzero(abs(read - read[half:].mean()) > 0.05)
        p5 = [b[1] for bins in run["bins"][half:] for b in bins]
        cells = (
            run["arm"], run["seed"], "never" if arrived is None else arrived + 1, *shares,
            "never" if unsettled[-1] == len(read) - 1 else unsettled[-1] + 2, f"{read[half:].mean():.2f}",
            f"{min(p5):.3f}-{max(p5):.3f}", f"{last_reward(run):.2f}", f"{outcome(run):.2f}",
        )  # fmt: skip
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "The closed loop\n\n" + "\n".join(lines)


def fault_table(runs: list[dict[str, Any]]) -> str:
    """The schedule halved by hand: the lowest p5 of a bin in the last step before, and in the steps after."""
    lines = ["| arm | seed | before | 1 step after | 2 | 3 | 4 |", "|---|---|---|---|---|---|---|"]
    for run in runs:
        kind, _, step = run["actor"].partition(":")
        if kind == "halved":
            p5 = run["lowest_p5"][int(step) - 1 : int(step) + 4]
            lines.append(f"| {run['arm']} | {run['seed']} | " + " | ".join(f"{x:.3f}" for x in p5) + " |")
    return "The schedule halved by hand: the lowest p5 of a bin\n\n" + "\n".join(lines)


def price_table(runs: list[dict[str, Any]]) -> str:
    """What fewer pages cost: every arm of two seeds or more against the dense runs of its seeds."""
    lines = [
        "| arm | seeds | KV read, last half | reward of the actor | minus dense | held-out accuracy | minus dense |",
        "|---|---|---|---|---|---|---|",
    ]
    rows = []
    for some in by_arm(runs).values():
        if len(some) < 2 or not (some[0]["actor"] in ("", "evict") or some[0]["schedule"].startswith("auto")):
            continue
        cells = [some[0]["arm"], str(len(some)), f"{late_read(some):.2f}"]
        for value in (last_reward, outcome):
            difference, half = against_dense(some, runs, value)
            cells += [interval([value(run) for run in some]), f"{difference:+.3f} ± {half:.3f}"]
        rows.append((late_read(some), "| " + " | ".join(cells) + " |"))
    return (
        f"What fewer pages cost: reward over the last {LAST} steps, held-out accuracy of the policy, and their mean "
        "difference to the dense runs of the same seeds after as many steps, with its 95 % t-interval\n\n"
        + "\n".join([*lines, *(row for _, row in sorted(rows))])
    )


def late_read(some: Sequence[dict[str, Any]]) -> float:
    return float(np.mean([np.mean(run["read"][len(run["read"]) // 2 :]) for run in some]))


def first_run_of(found: np.ndarray, patience: int = 3) -> int | None:
    """The step, from 1, at which something has been so for ``patience`` steps; None if it never is."""
    return next((i + 1 for i in range(patience - 1, len(found)) if found[i + 1 - patience : i + 1].all()), None)


def signs(run: dict[str, Any]) -> tuple[int | None, int | None, int | None, int | None]:
    """When the guard's two signs act, the reward halves (against the best mean of 5 steps) and the policy does."""
    p1, reward = np.array(run["tail"])[:, 0], np.array(run["reward"])
    smooth = np.array([reward[max(0, i - 4) : i + 1].mean() for i in range(len(reward))])
    tau = float(f"0.{run['schedule'][5:]}") if run["schedule"].startswith("auto") else 0.86
    half = 0.5 * run["held_out"][0][1]
    return (
        first_run_of(np.array(run["lowest_p5"]) < tau - 0.02),
        first_run_of(p1 < FALLEN * np.maximum.accumulate(p1)),
        first_run_of(smooth < 0.5 * np.maximum.accumulate(smooth), 1),
        next((step for step, policy in run["held_out"] if policy < half), None),
    )


def guard_table(runs: list[dict[str, Any]]) -> str:
    """When each of the guard's signs comes, and when the damage is done."""
    lines = [
        "| run | p5 below tau - 0.02 | p1 below half of its best | reward halved | held-out accuracy halved |",
        "|---|---|---|---|---|",
    ]
    quiet = []
    for run in runs:
        steps = signs(run)
        if any(steps):
            name = f"{run['arm']}, seed {run['seed']}{'' if collapsed(run) else ' (not collapsed)'}"
            lines.append(f"| {name} | " + " | ".join("never" if step is None else str(step) for step in steps) + " |")
        else:
            quiet.append(run)
    return (
        "The guard's signs: the step at which each has been so for three steps, in every run with a sign, or in which "
        f"reward or accuracy halved; none of this was so in {len(quiet)} other runs\n\n" + "\n".join(lines)
    )


def drift_table(runs: list[dict[str, Any]]) -> str:
    """p5 early and late in runs that did not collapse, under an unchanged schedule."""
    lines = ["| schedule | runs | p5, steps 2-5 | p5, last 5 steps |", "|---|---|---|---|"]
    for schedule in PAGES[:-1]:
        name = schedule.replace("fixed4", "fixed:4")
        some = [r for r in runs if is_page_arm(r) and r["schedule"] == name and not collapsed(r)]
        if some:
            last = np.mean([np.mean(r["tail"][-5:], axis=0)[1] for r in some])
            lines.append(
                f"| {schedule} | {len(some)} | {np.mean([r['steps 2 to 5']['p5'] for r in some]):.3f} | {last:.3f} |"
            )
    return "p5 and the training step\n\n" + "\n".join(lines)


TABLES = (threshold_table, rank_table, guard_table, drift_table, loop_table, fault_table, price_table, arm_table)


# --- figures ---


def draw_threshold(figure: Any, runs: list[dict[str, Any]]) -> None:
    left, right = figure.subplots(1, 2, sharey=True)
    groups = {
        "pages": [r for r in runs if is_page_arm(r)],
        "eviction": [r for r in runs if r["actor"] == "evict"],
        "weights of fewer bits": [r for r in runs if r["actor"].startswith("bits")],
        "stale actor": [r for r in runs if r["actor"].startswith("stale")],
        "noise": [r for r in runs if r["actor"].startswith("noise")],
    }
    groups = {label: some for label, some in groups.items() if some}
    for (label, some), color in zip(groups.items(), (*theme.SERIES, theme.INK), strict=False):
        for ax, name in ((left, "p5"), (right, "mean")):
            # A logarithmic axis of what is rejected spreads out the crowded end; dense runs are at its edge.
            rejected = [max(1 - r["step 1"][name], 3e-3) for r in some]
            ax.plot(rejected, [outcome(r) for r in some], "o", ms=4, alpha=0.7, color=color, label=label)
    for ax, name in ((left, "5th percentile"), (right, "mean")):
        ax.set_xscale("log")
        ax.invert_xaxis()
        ax.set_xlabel(f"1 - {name} of acceptance at step 1")
        if runs:
            ax.axhline(0.5 * runs[0]["held_out"][0][1], color=theme.MUTED, lw=0.8, ls=":")
    left.set_ylabel("held-out accuracy of the policy at the end")
    left.axvline(1 - 0.86, color=theme.INK, lw=1, ls="--")
    left.text(1 - 0.86, 1.0, " published tau 0.86", fontsize=8, va="top")
    left.legend(loc="center right")


def draw_training(figure: Any, runs: list[dict[str, Any]]) -> None:
    axes = figure.subplots(1, 3)
    names = [name for name in PAGES[::-1] if any(r["arm"] == name for r in runs)]
    from matplotlib import colormaps

    for i, name in enumerate(names):
        some = [r for r in runs if r["arm"] == name]
        color = colormaps["turbo"](0.05 + 0.9 * i / max(len(names) - 1, 1))
        for run in some:
            axes[0].plot(run["reward"], color=color, lw=1, alpha=0.8, label=name if run is some[0] else None)
            axes[1].plot([row[1] for row in run["tail"]], color=color, lw=1, alpha=0.8)
            axes[2].plot(run["length"], color=color, lw=1, alpha=0.8)
    for ax, label in zip(axes, ("reward of the actor", "p5 of acceptance", "response tokens"), strict=True):
        ax.set_xlabel("step")
        ax.set_ylabel(label)
    axes[0].legend(ncols=2)


def draw_collapse(figure: Any, runs: list[dict[str, Any]]) -> None:
    """A run that collapses while its p5 rises."""
    late = next(r for r in runs if (r["arm"], r["seed"]) == ("p86", 0))
    left, right = figure.subplots(1, 2)
    step = np.arange(1, len(late["reward"]) + 1)
    left.plot(step, late["reward"], color=theme.SERIES[1], label="reward of the actor")
    left.plot(*zip(*late["held_out"], strict=True), "o", color=theme.INK, ms=4, label="held-out accuracy of the policy")
    for i, (name, color) in enumerate(zip(("p1", "p5", "p10"), theme.SERIES, strict=False)):
        right.plot(step, np.array(late["tail"])[:, i], color=color, label=name)
    right.plot(step, late["mean"], color=theme.MUTED, label="mean")
    for ax in (left, right):
        ax.set_xlabel("step")
        ax.legend()
    left.set_title(f"{late['arm']}, seed {late['seed']}")
    right.set_ylabel("acceptance")


def draw_loop(figure: Any, runs: list[dict[str, Any]]) -> None:
    loops = by_arm([r for r in runs if r["arm"] in LOOPS])
    axes = figure.subplots(3, len(LOOPS), sharex="col", sharey="row")
    dense = [r for r in runs if r["arm"] == "dense"]
    for column, arm in zip(axes.T, LOOPS, strict=True):
        some = loops[arm]
        tau = float(f"0.{some[0]['schedule'][5:]}")
        for run in some:
            for n in sorted({b[0] for bins in run["bins"] for b in bins}):
                p5 = [next((b[1] for b in bins if b[0] == n), np.nan) for bins in run["bins"]]
                color = theme.BINS[min(max(n - 2, 0), 3)]
                column[0].plot(p5, color=color, lw=0.8)
            column[1].plot(100 * np.array(run["read"]), color=theme.SERIES[1], lw=1)
            column[2].plot(run["reward"], color=theme.SERIES[1], lw=1, label="closed loop" if run is some[0] else None)
        for run in dense:
            column[2].plot(run["reward"], color=theme.MUTED, lw=0.8, label="dense" if run is dense[0] else None)
        column[0].axhspan(tau - 0.02, tau + 0.02, color=theme.ABOVE, alpha=0.12)
        column[0].set_ylim(0.795, 1.005)
        column[0].set_title(arm)
        column[1].set_ylim(0, 102)
        column[2].set_xlabel("step")
    for ax, label in zip(axes[:, 0], ("p5 by length bin", "KV read, %", "reward"), strict=True):
        ax.set_ylabel(label)
    axes[2, 1].legend()


def draw_price(figure: Any, runs: list[dict[str, Any]]) -> None:
    """Reward and accuracy at the end, run by run, against what was read."""
    left, right = figure.subplots(1, 2, sharey=True)
    loops = [r for r in runs if r["schedule"].startswith("auto")]
    groups = {
        "fixed schedule": [r for r in runs if is_page_arm(r) and r["correction"] == "token_tis"],
        "fixed schedule, other corrections": [r for r in runs if is_page_arm(r) and r["correction"] != "token_tis"],
        "closed loop": [r for r in loops if r["arm"] == r["schedule"].replace(":", "")],
        "closed loop, first rule": [r for r in loops if r["arm"].endswith("(first rule)")],
    }
    for (label, some), color in zip(groups.items(), theme.SERIES, strict=True):
        for ax, value in ((left, last_reward), (right, outcome)):
            read = [100 * late_read([r]) for r in some]
            ax.plot(read, [value(r) for r in some], "o", ms=4, alpha=0.7, color=color, label=label)
    left.set_ylabel("at the end")
    left.set_title("reward of the actor")
    right.set_title("held-out accuracy of the policy")
    for ax in (left, right):
        ax.set_xlabel("KV read in the last half, %")
    right.legend(loc="lower right")


FIGURES = {
    "threshold": draw_threshold,
    "training": draw_training,
    "collapse": draw_collapse,
    "closed-loop": draw_loop,
    "price": draw_price,
}
SIZES = {"closed-loop": (11, 6.5)}


def save(path: Path, draw: Callable[[Any, list[dict[str, Any]]], None], runs: list[dict[str, Any]]) -> None:
    """Draw one figure; the same runs give the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    size = SIZES.get(path.stem.removeprefix("stability-"), (11, 4))
    with matplotlib.rc_context(theme.MATPLOTLIB):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, runs)
        figure.savefig(path, dpi=130)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
