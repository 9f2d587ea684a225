"""README's first picture: what each mode gives in tokens per second, and what it asks to be trusted.

python benchmarks/figure_modes.py            # writes docs/figures/modes.png from benchmarks/results
"""

from __future__ import annotations

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from common import ROOT, load

from sparrow.report.theme import INK, MATPLOTLIB, MUTED, SERIES

POINTS = [(64, 15000), (32, 30000)]
MODES = {
    "dense": "what stock vLLM does",
    "lossless": "samples are the dense policy's, exactly: nothing to trust",
    "lossy": "samples are a sparse actor's: p5 of acceptance about 0.86,\nto be held and watched while training",
}


def gains(batch: int, length: int) -> dict[str, float]:
    """Tokens per second over stock vLLM's, each in its own run beside stock on one H200."""

    def step(rows: list[dict], **wanted: object) -> dict:
        return next(r for r in rows if r["batch"] == batch and r["length"] == length and wanted.items() <= r.items())

    lossless = step(load("lossless_qwen3-1.7b")["points"], rate=0.95, drafts="adapt")["tokens_per_s"]
    lossless /= step(load("lossless_qwen3-1.7b_stock")["points"])["tokens_per_s"]
    lossy = step(load("rollout_qwen3-1.7b_stock")["points"], logprobs="none")["ms"]
    lossy /= step(load("rollout_qwen3-1.7b_sparse")["points"], logprobs="none", schedule="published")["ms"]
    return {"dense": 1.0, "lossless": lossless, "lossy": lossy}


def main() -> None:
    with plt.rc_context(MATPLOTLIB):
        figure, axes = plt.subplots(1, 2, figsize=(9.2, 2.5), layout="constrained", sharey=True)
        for ax, (batch, length) in zip(axes, POINTS, strict=True):
            found = gains(batch, length)
            ax.barh(list(MODES), [found[mode] for mode in MODES], color=[MUTED, SERIES[0], SERIES[1]], height=0.62)
            for i, (mode, gain) in enumerate(found.items()):
                ax.text(
                    gain + 0.05, i, f"{gain:.2f}x" if mode != "dense" else "1", va="center", color=INK, weight="bold"
                )
            ax.set_title(f"{batch} sequences of {length:,} tokens", loc="left", fontsize=9)
            ax.set(xlim=(0, 4.6), xlabel="tokens per second over stock vLLM")
            ax.grid(axis="y", visible=False)
        axes[0].invert_yaxis()  # shared
        axes[0].set_yticks(range(3), [f"{mode}\n{why}" for mode, why in MODES.items()], fontsize=8, color=INK)
        figure.savefig(ROOT / "docs" / "figures" / "modes.png", dpi=160)


if __name__ == "__main__":
    main()
