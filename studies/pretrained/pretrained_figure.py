"""Draw the figure in docs/pretrained.md: reward by training step, and the acceptance tail by length.

python studies/pretrained/pretrained_figure.py    # writes docs/figures/pretrained.png from results
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
from common import Row, load  # noqa: E402

from sparrow.report.theme import INK, MATPLOTLIB, SERIES  # noqa: E402

PATH = ROOT / "docs/figures/pretrained.png"
READ = 1024
"""Budget, in tokens, of the lossy actor in the tail plot."""
SMOOTH = 5
"""How many steps to smooth rewards over."""


def draw_rewards(ax: Axes, runs: Sequence[Row]) -> None:
    """Draw the actor's reward by step, raw and smoothed. All runs of an arm share a color."""
    arms = list(dict.fromkeys(run["arm"] for run in runs))
    colors = dict(zip(arms, (INK, *SERIES), strict=False))
    for i, run in enumerate(runs):
        color = colors[run["arm"]]
        reward = np.array(run["reward"])
        steps = np.arange(1, len(reward) + 1)
        is_first = run["arm"] not in [earlier["arm"] for earlier in runs[:i]]
        smooth = np.convolve(reward, np.ones(SMOOTH) / SMOOTH, "valid")
        middle = steps[SMOOTH // 2 : SMOOTH // 2 + len(smooth)]
        ax.plot(steps, reward, "o", ms=2.5, alpha=0.5, color=color)
        ax.plot(middle, smooth, color=color, lw=1.8, label=run["arm"] if is_first else None)
    ax.set(xlabel="training step", ylabel="reward of the rollouts", ylim=(0, 1.03), xlim=(0, None))
    ax.legend(loc="lower right", fontsize=7)


def draw_tail(ax: Axes, rows: Sequence[Row]) -> None:
    """Draw the p5 of the lossy actor's acceptance by position and domain, with 95 % intervals."""
    kept = {"mode": "lossy", "budget": READ, "temperature": 1}
    shown = [row for row in rows if all(row[name] == value for name, value in kept.items())]
    for row, color in zip(shown, SERIES, strict=True):
        middle = [(b["start"] + b["end"]) / 2000 for b in row["bins"]]
        p5 = np.array([b["p5"] for b in row["bins"]])
        bars = np.abs(p5[:, 1:] - p5[:, :1]).T
        style = {"fmt": "o-", "ms": 3.5, "lw": 1.8, "capsize": 2}
        ax.errorbar(middle, p5[:, 0], bars, color=color, label=row["domain"], **style)
    ax.axhline(1, color=INK, lw=1.8, label="lossless: verified")
    ax.set(
        xlabel="position, in thousands of tokens",
        ylabel=f"p5 of acceptance, {READ:,} tokens read",
        ylim=(0.6, 1.03),
    )
    ax.legend(loc="lower left", fontsize=7)


def main() -> None:
    """Draw the figure. The same results always produce an identical file."""
    with plt.rc_context(MATPLOTLIB):
        figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.1), layout="constrained")
        draw_rewards(left, load("pretrained_training_story")["runs"])
        draw_tail(right, load("pretrained_acceptance")["rows"])
        left.set_title("What training earns", loc="left", fontsize=10)
        right.set_title("How far the lossy actor is from the policy", loc="left", fontsize=10)
        figure.savefig(PATH, dpi=130)
        plt.close(figure)


if __name__ == "__main__":
    main()
