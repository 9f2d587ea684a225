"""The study of reward against wall-clock as one JSON file and one figure.

    python studies/text/wall_clock_summary.py runs/wall --out benchmarks/results/text_wall_clock.json \\
        --figure docs/figures/wall-clock.png

The clock is the sum of the seconds of the steps: rollout, scoring, update and the new weights on their way to vLLM.
Starting vLLM and evaluating on held-out problems are not on it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import tyro

matplotlib.use("agg")
import matplotlib.pyplot as plt

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "studies/reasoner")]
from common import save  # noqa: E402
from stability_statistics import Run, logged_rows  # noqa: E402

from sparrow.report.theme import INK, MATPLOTLIB, SERIES  # noqa: E402

PHASES = ("rollout", "score", "update", "sync")
SMOOTH = 3
"""Steps that the figure's rewards are averaged over."""


@dataclass(frozen=True)
class Options:
    """Which runs to summarise."""

    runs: tyro.conf.Positional[Path]  # Folder with logs of arms.
    out: Path = Path("text_wall_clock.json")  # Where the result goes.
    figure: Path | None = None  # Where the figure goes; none is drawn if unset.


def arm(path: Path) -> dict[str, Any]:
    """One run: where its seconds went, and its rewards by the clock.

    Raises ValueError: it did no step after the first, in which kernels are still compiled.
    """
    rows = logged_rows(path)
    steps = [row for row in rows if "reward" in row]
    if len(steps) < 2:
        raise ValueError(f"{path} has {len(steps)} steps; two are needed")
    seconds = np.array([row["seconds"] for row in steps])
    clock = np.cumsum(seconds.sum(1))
    at = {0: 0.0} | {row["step"]: end for row, end in zip(steps, clock.tolist(), strict=True)}
    profile = json.loads(path.with_suffix(".profile.json").read_text(encoding="utf-8"))
    return {
        **{name: rows[0][name] for name in ("arm", "seed", "top_k", "device", "token_bytes", "options")},
        "steps": len(steps),
        "tokens": float(np.mean([row["length"] for row in steps])),  # a response
        "seconds": dict(zip(PHASES, seconds[1:].mean(0).round(3).tolist(), strict=True)),  # of a step but the first
        "step_s": float(seconds[1:].sum(1).mean()),
        "profile": profile,
        "reward": [[round(end, 1), row["reward"]] for row, end in zip(steps, clock.tolist(), strict=True)],
        "held_out": [[round(at[row["step"]], 1), row["held_out"]["policy"]] for row in rows if "held_out" in row],
    }


def compared(arms: Sequence[Run]) -> list[dict[str, Any]]:
    """A row for each arm: its speed over the dense arm's, a step and a rollout, and what attention gave of it.

    ``attention_share``: of a decode step's time on the clock, in the profile. ``saved_by_attention``: of the time that
    a token takes less than in the dense arm, the part that attention takes less; the rest is the host's and the other
    kernels'.
    """
    dense = next(run for run in arms if run["arm"] == "dense")
    rows = []
    for run in arms:
        saved = dense["profile"]["clock_ms"] - run["profile"]["clock_ms"]
        attention = dense["profile"]["attention_ms"] - run["profile"]["attention_ms"]
        rows.append(
            {
                "arm": run["arm"],
                "seed": run["seed"],
                "steps": run["steps"],
                "step_speedup": dense["step_s"] / run["step_s"],
                "rollout_speedup": dense["seconds"]["rollout"] / run["seconds"]["rollout"],
                "attention_share": run["profile"]["attention_ms"] / run["profile"]["clock_ms"],
                "saved_by_attention": None if run is dense else attention / saved,
                "last_held_out": run["held_out"][-1],
            }
        )
    return rows


def draw(arms: Sequence[Run], path: Path) -> None:
    """The actor's reward and the policy's held-out reward against the clock."""
    with plt.rc_context(MATPLOTLIB):
        figure, axes = plt.subplots(1, 2, figsize=(9.2, 3.2), layout="constrained", sharex=True)
        for run, color in zip(arms, (INK, *SERIES), strict=False):
            seconds, reward = np.array(run["reward"]).T
            smooth = np.convolve(reward, np.ones(SMOOTH) / SMOOTH, "valid")
            axes[0].plot(seconds[SMOOTH - 1 :] / 60, smooth, color=color, label=run["arm"])
            seconds, held_out = np.array(run["held_out"]).T
            axes[1].plot(seconds / 60, held_out, "o-", ms=4, color=color, label=run["arm"])
        axes[0].set(xlabel="minutes on one GPU", ylabel=f"actor's reward, mean of {SMOOTH} steps")
        axes[1].set(xlabel="minutes on one GPU", ylabel="policy's held-out reward")
        axes[0].legend()
        figure.savefig(path, dpi=160)


def main(options: Options) -> None:
    """Write the summary, print its rows, and draw."""
    arms = [arm(path) for path in sorted(options.runs.glob("*.jsonl"))]
    arms.sort(key=lambda run: (run["arm"] != "dense", run["arm"] != "lossless", run["arm"], run["seed"]))
    rows = compared(arms)
    save(options.out, {"rows": rows, "arms": arms})
    for row in rows:
        print(json.dumps(row))
    if options.figure:
        draw(arms, options.figure)


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
