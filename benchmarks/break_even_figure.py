"""Draw the figure in docs/which-drafter.md: break-even tokens per cycle by context and drafter.

python benchmarks/break_even_figure.py        # writes docs/figures/which-drafter.png from results
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from common import ROOT, Row, load, parser
from tables_drafters import NAMES, PUBLISHED, gpu, ratios

from sparrow.report.theme import MATPLOTLIB, MUTED

PATH = ROOT / "docs/figures/which-drafter.png"
SHAPE = "qwen3-1.7b"
TICKS = (1, 2, 3, 5, 10, 20)  # tokens per cycle
MARKS = ("o", "s", "^", "D", "v", "P", "X")


def draw(result: Row, path: Path) -> None:
    """Draw one panel per batch size. The same result always gives an identical file."""
    rows = [row for row in ratios(result) if row["drafter"] != "none_v1"]
    order = list(NAMES)
    cases = sorted(
        {(row["drafter"], row["drafts"]) for row in rows},
        key=lambda case: (order.index(case[0]), case[1]),
    )
    batches = sorted({row["batch"] for row in rows})
    lengths = sorted({row["length"] for row in rows})
    with plt.rc_context(MATPLOTLIB):
        figure, panels = plt.subplots(
            1, len(batches), figsize=(11, 4), sharey=True, layout="constrained", squeeze=False
        )
        for panel, batch in zip(panels[0], batches, strict=True):
            for i, (drafter, drafts) in enumerate(cases):
                color = plt.get_cmap("tab10")(i)
                line = sorted(
                    (row["length"], row["break_even"])
                    for row in rows
                    if (row["batch"], row["drafter"], row["drafts"]) == (batch, drafter, drafts)
                )
                label = f"{NAMES[drafter]}, {drafts} drafts"
                if line:
                    panel.plot(*zip(*line, strict=True), f"{MARKS[i]}-", color=color, label=label)
                if (drafter, drafts) in PUBLISHED:
                    low, high = PUBLISHED[drafter, drafts]
                    x = lengths[-1] * 1.25 * 1.12**i
                    panel.plot([x, x], [low, high], "_-", color=color, ms=9, lw=3)
            panel.axhline(1, color=MUTED, lw=0.8, ls=":")
            panel.set(xscale="log", yscale="log", xlabel="tokens in the cache of each sequence")
            panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
            panel.set_yticks(TICKS, [str(tick) for tick in TICKS])
            panel.minorticks_off()
            panel.set_title(f"{batch} sequences")
        panels[0][0].set_ylabel(f"tokens per cycle to break even ({gpu(result)})")
        handles = {
            label: handle
            for panel in panels[0]
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=4)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", default=SHAPE)
    options.add_argument("--out", type=Path, default=PATH)
    arguments = options.parse_args()
    draw(load(f"break_even_{arguments.shape}"), arguments.out)


if __name__ == "__main__":
    main()
