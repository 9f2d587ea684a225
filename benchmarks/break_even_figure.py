"""Draw the figure in docs/which-drafter.md: break-even tokens per cycle by shape, batch size,
context and drafter.

python benchmarks/break_even_figure.py        # writes docs/figures/which-drafter.png from results
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from common import ROOT, Row, parser
from tables_drafters import about, cases, name_of, ratios, results, tokens_per_cycle

from sparrow.report.theme import MATPLOTLIB, MUTED

PATH = ROOT / "docs/figures/which-drafter.png"
TICKS = (1, 2, 3, 5, 10, 20)  # tokens per cycle
MARKS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
BETWEEN = 0.6  # space between batch sizes, and before the bars, in points
BAR = 0.5  # space between bars

Cases = dict[tuple[str, int], dict[tuple[int, int], Row]]


def places(drawn: Cases) -> dict[tuple[int, int], float]:
    """Return each point's place on the x axis: in order, with space between batch sizes."""
    points = {point for by_point in drawn.values() for point in by_point}
    batches = sorted({batch for batch, _ in points})
    return {point: i + BETWEEN * batches.index(point[0]) for i, point in enumerate(sorted(points))}


def draw(measured: Sequence[Row], path: Path) -> None:
    """Draw one panel per result. The same results always give an identical file.

    Lines are break-even points. Bars to the right of the lines show how many tokens per cycle a
    drafter yields, as far as ``tokens_per_cycle`` has numbers.
    """
    timed = [[row for row in ratios(result) if row["drafter"] != "none_v1"] for result in measured]
    drawn = [cases(rows) for rows in timed]
    known = tokens_per_cycle()
    looks = {
        case: (plt.get_cmap("tab10")(i), MARKS[i])
        for i, case in enumerate(cases([row for rows in timed for row in rows]))
    }
    spots = [places(each) for each in drawn]
    widths = [
        max(placed.values()) + BETWEEN + BAR * sum(case in known for case in each) + 1
        for placed, each in zip(spots, drawn, strict=True)
    ]
    with plt.rc_context(MATPLOTLIB):
        figure, panels = plt.subplots(
            1,
            len(measured),
            figsize=(13, 5.8),
            width_ratios=widths,
            sharey=True,
            layout="constrained",
            squeeze=False,
        )
        for result, each, placed, panel in zip(measured, drawn, spots, panels[0], strict=True):
            draw_panel(panel, each, placed, looks)
            bar = max(placed.values()) + BETWEEN
            for case in each:
                if case in known:
                    bar += BAR
                    color, _ = looks[case]
                    panel.plot([bar, bar], known[case], "_-", color=color, ms=7, mew=2, lw=3)
            panel.set(title=about(result), xlabel="tokens per sequence x sequences")
        panels[0][0].set_ylabel("tokens per cycle")
        handles = {
            label: handle
            for panel in panels[0]
            for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
        }
        figure.legend(handles.values(), handles, loc="outside lower center", ncols=3)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def draw_panel(
    panel: Any,
    drawn: Cases,
    placed: dict[tuple[int, int], float],
    looks: dict[tuple[str, int], tuple[Any, str]],
) -> None:
    """Draw the lines of a result's drafters, one per batch size, and label the x axis."""
    batches = sorted({batch for batch, _ in placed})
    for case, by_point in drawn.items():
        color, mark = looks[case]
        label = f"{name_of(by_point)}, {case[1]} drafts"
        for batch in batches:
            line = [point for point in sorted(by_point) if point[0] == batch]
            if line:
                panel.plot(
                    [placed[point] for point in line],
                    [by_point[point]["break_even"] for point in line],
                    f"{mark}-",
                    color=color,
                    label=label,
                )
    panel.axhline(1, color=MUTED, lw=0.8, ls=":")
    panel.set_yscale("log")
    panel.set_yticks(TICKS, [str(tick) for tick in TICKS])
    panel.set_xticks(
        list(placed.values()), [f"{length:,}" for _, length in placed], rotation=90, fontsize=8
    )
    panel.minorticks_off()
    for batch in batches:
        inside = [x for (sequences, _), x in placed.items() if sequences == batch]
        middle = sum(inside) / len(inside)
        where = panel.get_xaxis_transform()
        panel.text(middle, 0.01, f"x {batch}", transform=where, ha="center", color=MUTED)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--out", type=Path, default=PATH)
    arguments = options.parse_args()
    draw(results(), arguments.out)


if __name__ == "__main__":
    main()
