"""Draw the README's figure: seconds per training step, reward against wall-clock time, and the
acceptance tail.

python studies/text/wall_clock_figure.py        # writes docs/figures/wall-clock.png from benchmarks/results
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
from common import load  # noqa: E402

from sparrow.report.theme import INK, MATPLOTLIB, MUTED, SERIES  # noqa: E402

PATH = ROOT / "docs/figures/wall-clock.png"
PHASES = {"rollout": "rollout", "score": "scoring", "update": "update and new weights"}
READ = 1024
"""Budget, in tokens, of the lossy actor in the tail plot."""
SMOOTH = 3
"""How many steps to smooth rewards over."""


def named(arm: str) -> str:
    """Return the name used for an arm in the figure."""
    return arm if arm in ("dense", "lossless") else f"lossy (p5 0.{arm[1:]})"


def over_seeds(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Average each arm's runs. Return the seconds per step by phase, and the clock and reward by
    step.
    """
    rows = []
    for arm in dict.fromkeys(run["arm"] for run in runs):
        some = [run for run in runs if run["arm"] == arm]
        steps = min(run["steps"] for run in some)
        seconds = {
            name: np.mean([run["seconds"][name] for run in some]) for name in some[0]["seconds"]
        }
        rows.append(
            {
                "arm": arm,
                "seconds": seconds,
                "reward": np.mean([r["reward"][:steps] for r in some], axis=0),
            }
        )
    return rows


def draw_steps(ax: Axes, arms: Sequence[dict[str, Any]], gains: Mapping[str, float]) -> None:
    """Draw one bar per arm with the seconds of a step by phase. ``gains`` are the arms' speed-ups
    over dense.
    """
    for i, (run, color) in enumerate(zip(arms, (INK, *SERIES), strict=False)):
        begin, seconds = 0.0, run["seconds"]
        spent = {**seconds, "update": seconds["update"] + seconds["sync"]}
        for phase, alpha in zip(PHASES, (1.0, 0.55, 0.3), strict=True):
            ax.barh(i, spent[phase], left=begin, height=0.62, color=color, alpha=alpha)
            begin += spent[phase]
        gain = gains.get(run["arm"])
        ax.text(begin + 0.4, i, f"{gain:.2f}x" if gain else "1", va="center", weight="bold")
    for phase, alpha in zip(PHASES, (1.0, 0.55, 0.3), strict=True):
        ax.barh(0, 0, color=MUTED, alpha=alpha, label=PHASES[phase])
    longest = sum(arms[0]["seconds"].values())
    ax.set_yticks(range(len(arms)), [named(run["arm"]) for run in arms], color=INK)
    ax.set(
        xlabel="seconds of a training step", xlim=(0, 1.15 * longest), ylim=(len(arms) + 0.35, -0.5)
    )
    ax.grid(axis="y", visible=False)
    ax.legend(loc="lower center", ncol=3, fontsize=7, handlelength=1, columnspacing=1)


def draw_rewards(ax: Axes, arms: Sequence[dict[str, Any]]) -> None:
    """Draw the actor's reward against the clock, both at each step and smoothed."""
    for run, color in zip(arms, (INK, *SERIES), strict=False):
        seconds, reward = run["reward"].T
        smooth = np.convolve(reward, np.ones(SMOOTH) / SMOOTH, "valid")
        ax.plot(seconds / 60, reward, "o", ms=2.5, alpha=0.5, color=color)
        ax.plot(seconds[SMOOTH - 1 :] / 60, smooth, color=color, lw=1.8, label=named(run["arm"]))
    ax.set(
        xlabel="minutes on one GPU",
        ylabel="reward of the rollouts",
        ylim=(0.2, None),
        xlim=(0, None),
    )
    ax.legend(loc="lower right", fontsize=7)


def draw_tail(ax: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Draw the mean and 5th percentile of a lossy actor's acceptance by position, with 95 %
    intervals.
    """
    kept = {"mode": "lossy", "budget": READ, "reuse": 1, "dense_layers": []}
    (row,) = (row for row in rows if all(row[name] == value for name, value in kept.items()))
    middle = [(b["start"] + b["end"]) / 2048 for b in row["bins"]]
    for name, label, color in (
        ("mean", "lossy: mean", MUTED),
        ("p5", "lossy: 5th percentile", SERIES[1]),
    ):
        values = np.array([b[name] for b in row["bins"]])
        bars = np.abs(values[:, 1:] - values[:, :1]).T
        ax.errorbar(
            middle,
            values[:, 0],
            bars,
            fmt="o-",
            ms=3.5,
            lw=1.8,
            capsize=2,
            color=color,
            label=label,
        )
    ax.axhline(1, color=SERIES[0], lw=1.8, label="lossless: verified")
    ax.set(
        xlabel="position, in thousands of tokens",
        ylabel=f"acceptance, {READ:,} tokens read",
        ylim=(0.6, 1.03),
    )
    ax.legend(loc="lower left", fontsize=7)


def main() -> None:
    """Draw the figure. The same results always give an identical file."""
    result = load("text_wall_clock")
    arms, gains = (
        over_seeds(result["arms"]),
        {row["arm"]: row["step_speedup"][0] for row in result["paired"]},
    )
    with plt.rc_context(MATPLOTLIB):
        figure, axes = plt.subplots(1, 3, figsize=(12, 3.1), layout="constrained")
        draw_steps(axes[0], arms, gains)
        draw_rewards(axes[1], arms)
        draw_tail(axes[2], load("text_acceptance")["rows"])
        for ax, title in zip(
            axes,
            ("Time of a training step", "What is earned", "How far from the policy"),
            strict=True,
        ):
            ax.set_title(title, loc="left", fontsize=10)
        figure.savefig(PATH, dpi=130)


if __name__ == "__main__":
    main()
