"""Draw the figure in docs/pretrained.md: reward by wall-clock time and by training step, and the
acceptance tail by length.

python studies/pretrained/pretrained_figure.py    # writes docs/figures/pretrained.png from results
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from numpy.typing import ArrayLike, NDArray

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "studies/common")]
from common import Row, load  # noqa: E402
from stability_statistics import by_arm  # noqa: E402

from sparrow.report.theme import INK, MATPLOTLIB, SERIES  # noqa: E402

Floats = NDArray[np.float64]
PATH = ROOT / "docs/figures/pretrained.png"
READ = 1024
"""Budget, in tokens, of the lossy actor in the tail plot."""
DOMAINS = ("#8c564b", "#d6336c", "#1899a8", "#7f7f7f")
"""Colors of the kinds of text, which differ from those of the training arms."""
STYLES = {
    "dense": (INK, "-"),
    "lossless": (SERIES[0], "-"),
    "p80": (SERIES[1], "-"),
    "p80-distill": (SERIES[1], "--"),
    "p86": (SERIES[2], "-"),
    "auto86": (SERIES[2], "--"),
    "p92": (SERIES[3], "-"),
}
"""The color and line of each arm, in the order of the legend. The color shows the p5 aimed for."""
SMOOTH = 5
"""How many steps to smooth rewards over."""


def smoothed(values: ArrayLike) -> Floats:
    """Return the mean of every ``SMOOTH`` successive values."""
    return np.convolve(values, np.ones(SMOOTH) / SMOOTH, "valid")


def label(arm: str, runs: Sequence[Row]) -> str:
    """Return an arm's label in the legend, with the number of seeds."""
    return f"{arm} ({len(runs)} seed{'s' if len(runs) > 1 else ''})"


def draw_clock(ax: Axes, runs: Sequence[Row]) -> None:
    """Draw the actor's reward by minutes of training: a thin line per run, and each arm's mean over
    seeds, smoothed, for as long as all of its runs lasted.
    """
    arms = by_arm(runs)
    for arm in sorted(arms, key=list(STYLES).index):
        color, line = STYLES[arm]
        smooth = []
        for run in arms[arm]:
            minutes = np.array(run["clock"]) / 60
            ax.plot(minutes, run["reward"], line, color=color, lw=0.7, alpha=0.45)
            smooth.append((smoothed(minutes), smoothed(run["reward"])))
        name = label(arm, arms[arm])
        ax.plot(*mean_curve(smooth), line, color=color, lw=2.2, label=name)
    ax.set(xlabel="minutes of training", ylabel="reward of the rollouts", ylim=(0, 1.03))
    ax.set_xlim(0, None)
    ax.legend(loc="lower right", fontsize=7)


def mean_curve(curves: Sequence[tuple[Floats, Floats]]) -> tuple[Floats, Floats]:
    """Return the mean of curves, each given as x and y, where all of them have values. Curves are
    linear between their points.
    """
    every = np.unique(np.concatenate([x for x, _ in curves]))
    first = max(x[0] for x, _ in curves)
    last = min(x[-1] for x, _ in curves)
    shared = every[(every >= first) & (every <= last)]
    return shared, np.mean([np.interp(shared, x, y) for x, y in curves], axis=0)


def draw_rewards(ax: Axes, runs: Sequence[Row]) -> None:
    """Draw the actor's reward by step: a thin line per run, and each arm's mean over seeds,
    smoothed, for as many steps as all of its runs completed.
    """
    arms = by_arm(runs)
    for arm in sorted(arms, key=list(STYLES).index):
        some = arms[arm]
        color, line = STYLES[arm]
        for run in some:
            steps = np.arange(1, len(run["reward"]) + 1)
            ax.plot(steps, run["reward"], line, color=color, lw=0.5, alpha=0.3)
        fewest = min(len(run["reward"]) for run in some)
        smooth = smoothed(np.mean([run["reward"][:fewest] for run in some], axis=0))
        middle = np.arange(len(smooth)) + (SMOOTH + 1) / 2
        ax.plot(middle, smooth, line, color=color, lw=1.8, label=label(arm, some))
    ax.set(xlabel="training step", ylabel="reward of the rollouts", ylim=(0, 1.03), xlim=(0, None))
    ax.legend(loc="lower right", fontsize=7)


def draw_tail(ax: Axes, rows: Sequence[Row]) -> None:
    """Draw the p5 of the lossy actor's acceptance by position and domain, with 95 % intervals."""
    kept = {"mode": "lossy", "budget": READ, "temperature": 1}
    shown = [row for row in rows if all(row[name] == value for name, value in kept.items())]
    for row, color in zip(shown, DOMAINS, strict=True):
        middle = [(b["start"] + b["end"]) / 2000 for b in row["bins"]]
        p5 = np.array([b["p5"] for b in row["bins"]])
        bars = np.abs(p5[:, 1:] - p5[:, :1]).T
        style = {"fmt": "o-", "ms": 3.5, "lw": 1.8, "capsize": 2}
        ax.errorbar(middle, p5[:, 0], bars, color=color, label=row["domain"], **style)
    ax.axhline(1, color=INK, lw=1.8, label="lossless: by construction, ignoring rounding")
    ax.set(
        xlabel="position, in thousands of tokens",
        ylabel=f"p5 of acceptance, {READ:,} tokens read",
        ylim=(0.6, 1.03),
    )
    ax.legend(loc="lower left", fontsize=7)


def main() -> None:
    """Draw the figure. The same results always produce an identical file."""
    timed = load("pretrained_training_clock")["runs"]
    runs = load("pretrained_training_story")["runs"]
    with plt.rc_context(MATPLOTLIB):
        figure, (left, middle, right) = plt.subplots(1, 3, figsize=(12, 3.1), layout="constrained")
        draw_clock(left, timed)
        draw_rewards(middle, runs)
        draw_tail(right, load("pretrained_acceptance")["rows"])
        left.set_title("What training earns by the clock", loc="left", fontsize=10)
        middle.set_title("What training earns by step", loc="left", fontsize=10)
        right.set_title("A lossy actor on fixed texts", loc="left", fontsize=10)
        figure.savefig(PATH, dpi=130)
        plt.close(figure)


if __name__ == "__main__":
    main()
