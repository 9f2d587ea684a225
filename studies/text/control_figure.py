"""Draw the control study's figure: the actor's reward by step, and how the reward relative to the
dense run depends on p5.

python studies/text/control_figure.py        # writes docs/figures/text-control.png from benchmarks/results
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import matplotlib
import numpy as np

matplotlib.use("agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "studies/common"), str(Path(__file__).parent)]
from common import RESULTS, load  # noqa: E402
from control_summary import LAST, end_reward  # noqa: E402
from stability_statistics import Run, by_arm, early, is_page_arm, last_reward  # noqa: E402

from sparrow.report.theme import INK, MATPLOTLIB, MUTED, SERIES  # noqa: E402

PATH = ROOT / "docs/figures/text-control.png"


def shares(runs: Sequence[Run], value: Callable[..., float]) -> list[tuple[float, float]]:
    """Return, for each sparse run, p5 at the first step and the reward relative to the dense run
    with the same seed.
    """
    dense = {run["seed"]: run for run in runs if run["arm"] == "dense"}
    pairs = []
    for run in runs:
        if run["arm"] != "dense" and run["seed"] in dense:
            steps = min(len(run["reward"]), len(dense[run["seed"]]["reward"]))
            pairs.append((early(run)["p5"], value(run, steps) / value(dense[run["seed"]], steps)))
    return pairs


def main() -> None:
    """Draw the figure. The same results always give an identical file."""
    runs = load("text_control")["runs"]
    study = json.loads((RESULTS / "stability/study.json").read_text(encoding="utf-8"))
    reasoner = [run for run in study if is_page_arm(run) and run["correction"] == "token_tis"]
    arms = by_arm(runs)
    with plt.rc_context(MATPLOTLIB):
        figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), layout="constrained")
        for i, (arm, some) in enumerate(arms.items()):
            color = (
                INK
                if arm == "dense"
                else plt.get_cmap("turbo")(0.05 + 0.9 * (i - 1) / (len(arms) - 2))
            )
            reward = np.mean(
                [run["reward"][: min(len(r["reward"]) for r in some)] for run in some], axis=0
            )
            smooth = np.convolve(reward, np.ones(LAST) / LAST, "valid")
            width = 2.5 if arm == "dense" else 1.5
            left.plot(np.arange(LAST, len(reward) + 1), smooth, color=color, lw=width, label=arm)
        left.set(
            xlabel="step",
            ylabel=f"actor's reward, mean of {LAST} steps and {len(arms['dense'])} seeds",
        )
        left.legend()
        for label, pairs, color in (
            ("natural text, graded reward", shares(runs, end_reward), SERIES[0]),
            ("look-ups, one digit decides", shares(reasoner, last_reward), SERIES[1]),
        ):
            right.plot(*zip(*pairs, strict=True), "o", ms=5, alpha=0.8, color=color, label=label)
        right.axhline(1, color=MUTED, lw=0.8, ls=":")
        right.axvline(0.86, color=INK, lw=1, ls="--")
        right.text(0.86, 0.02, " published tau 0.86", fontsize=8)
        right.set(xlabel="p5 of acceptance at step 1 (on text a lower bound)", ylim=(0, 1.25))
        right.set_ylabel("actor's reward over dense's, at the end")
        right.legend(loc="center left")
        figure.savefig(PATH, dpi=130)


if __name__ == "__main__":
    main()
