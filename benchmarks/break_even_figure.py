"""Draw the figure in docs/which-drafter.md: break-even tokens per cycle by context and drafter.

python benchmarks/break_even_figure.py        # writes docs/figures/which-drafter.png from results
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from common import ROOT, Row, load, parser
from tables_drafters import called, cases, gpu, ratios, tokens_per_cycle

from sparrow.report.theme import MATPLOTLIB, MUTED

PATH = ROOT / "docs/figures/which-drafter.png"
SHAPE = "qwen3-1.7b"
TICKS = (1, 2, 3, 5, 10, 20)  # tokens per cycle
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")


def draw(result: Row, path: Path) -> None:
    """Draw one panel per batch size. The same result always gives an identical file.

    Lines are break-even points. Bars to the right of the lines show how many tokens per cycle a
    drafter yields, as far as ``tokens_per_cycle`` has numbers.
    """
    rows = [row for row in ratios(result) if row["drafter"] != "none_v1"]
    drawn = cases(rows)
    known = {case: span for case, span in tokens_per_cycle().items() if case in drawn}
    batches = sorted({row["batch"] for row in rows})
    lengths = sorted({row["length"] for row in rows})
    with plt.rc_context(MATPLOTLIB):
        figure, panels = plt.subplots(
            1, len(batches), figsize=(11, 5), sharey=True, layout="constrained", squeeze=False
        )
        for panel, batch in zip(panels[0], batches, strict=True):
            bar = lengths[-1]
            for i, (case, by_point) in enumerate(drawn.items()):
                color = plt.get_cmap("tab10")(i)
                line = sorted(
                    (length, row["break_even"])
                    for (sequences, length), row in by_point.items()
                    if sequences == batch
                )
                if line:
                    first = next(iter(by_point.values()))
                    label = f"{called(first)}, {case[1]} drafts"
                    panel.plot(*zip(*line, strict=True), f"{MARKS[i]}-", color=color, label=label)
                if case in known:
                    bar *= 1.25
                    panel.plot([bar, bar], known[case], "_-", color=color, ms=7, mew=2, lw=3)
            panel.axhline(1, color=MUTED, lw=0.8, ls=":")
            panel.set(xscale="log", yscale="log", xlabel="tokens in the cache of each sequence")
            panel.set_xticks(lengths, [f"{length:,}" for length in lengths])
            panel.set_yticks(TICKS, [str(tick) for tick in TICKS])
            panel.minorticks_off()
            panel.set_title(f"{batch} sequences")
        panels[0][0].set_ylabel(f"tokens per cycle ({gpu(result)})")
        handles = {
            label: handle
            for panel in panels[0]
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=3)
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
