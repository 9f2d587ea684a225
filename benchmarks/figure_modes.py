"""README's first picture: what each mode gives in tokens per second, and what it asks the user to trust.

python benchmarks/figure_modes.py            # writes docs/figures/modes.png from benchmarks/results
"""

from __future__ import annotations

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from common import ROOT, load
from tables_lossless import rollout_seconds
from tables_speed import trace_seconds

from sparrow.report.theme import INK, MATPLOTLIB, MUTED, SERIES

SHAPES = {"qwen3-1.7b": "1.7B", "qwen3-8b": "8B"}
MODES = {
    "dense": "what stock vLLM does",
    "lossless": "samples are the dense policy's, exactly: nothing to trust",
    "lossy": "samples are a sparse actor's: p5 of acceptance about 0.86,\nto be held and watched while training",
}


def gains(shape: str) -> dict[str, float]:
    """Each mode's speed over stock vLLM's in a rollout of 240 responses, each beside its own stock run on one H200."""
    (_, stock), (_, ours) = rollout_seconds(f"lossless_{shape}_stock"), rollout_seconds(f"lossless_{shape}")
    dense, lossy = (trace_seconds(load(f"rollout_{shape}_{variant}"), "240", "none") for variant in ("stock", "sparse"))
    return {"dense": 1.0, "lossless": stock / ours, "lossy": dense / lossy}


def main() -> None:
    with plt.rc_context(MATPLOTLIB):
        figure, axes = plt.subplots(1, 2, figsize=(9.2, 2.5), layout="constrained", sharey=True)
        for ax, (shape, label) in zip(axes, SHAPES.items(), strict=True):
            speedups = gains(shape)
            ax.barh(list(MODES), [speedups[mode] for mode in MODES], color=[MUTED, SERIES[0], SERIES[1]], height=0.62)
            for i, (mode, gain) in enumerate(speedups.items()):
                ax.text(
                    gain + 0.05, i, f"{gain:.2f}x" if mode != "dense" else "1", va="center", color=INK, weight="bold"
                )
            ax.set_title(f"{label}: 240 responses, mean 14,268 tokens", loc="left", fontsize=9)
            ax.set(xlim=(0, 3.2), xlabel="rollout speed over stock vLLM")
            ax.grid(axis="y", visible=False)
        axes[0].invert_yaxis()  # shared
        axes[0].set_yticks(range(3), [f"{mode}\n{why}" for mode, why in MODES.items()], fontsize=8, color=INK)
        figure.savefig(ROOT / "docs" / "figures" / "modes.png", dpi=160)


if __name__ == "__main__":
    main()
