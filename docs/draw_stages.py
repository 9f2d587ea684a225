"""Draw the picture of one cycle with guesses in docs/lossless.md.

python docs/draw_stages.py        # writes docs/figures/three-stages.png
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyBboxPatch

from sparrow.report.theme import MATPLOTLIB, MUTED

PATH = Path(__file__).parent / "figures/three-stages.png"
KNOWN = "#e4e4e8"
GUESSED = "#fff3c4"
KEPT = "#cfeed6"
DRAWN = "#cfe0fb"
REPLACED = "#fbd3cd"
WIDTH = 0.9
HEIGHT = 0.62
LABELS = 4.6
"""Width of the space for a row's label."""

History = Sequence[tuple[str, str]]
TEXT: History = [(token, KNOWN) for token in ("6", "x", "7", "=", "42", ",", "so")]
GUESSES: tuple[History, ...] = (
    [(token, GUESSED) for token in ("6", "x", "7")],
    [(token, GUESSED) for token in ("42", ",", "so")],
)
DRAFTS: tuple[History, ...] = (
    [("6", KEPT), ("x", KEPT), ("7", KEPT), ("=", DRAWN)],
    [("42", KEPT), (".", REPLACED)],
)
VERIFIED: History = [
    ("6", KEPT),
    ("x", KEPT),
    ("7", KEPT),
    ("=", KEPT),
    ("42", KEPT),
    ("and", REPLACED),
]
ROWS = (
    ("1. History guesses", "what followed earlier"),
    ("2. The sparse actor drafts", "one pass for every three guesses"),
    ("3. The policy verifies", "one dense pass over all drafts"),
)
LEGEND = (
    (0.0, GUESSED, "guessed"),
    (2.6, KEPT, "kept or accepted"),
    (6.2, DRAWN, "drawn after the guesses"),
    (10.6, REPLACED, "replaced"),
)
"""For each entry: horizontal position, color and meaning."""


def boxes(panel: Axes, x: float, y: float, tokens: History) -> float:
    """Draw tokens in a row that starts at ``x``, and return where the row ends."""
    for token, color in tokens:
        panel.add_patch(
            FancyBboxPatch(
                (x, y),
                WIDTH - 0.12,
                HEIGHT,
                boxstyle="round,pad=0,rounding_size=0.1",
                facecolor=color,
                edgecolor=MUTED,
                linewidth=0.6,
            )
        )
        panel.text(
            x + (WIDTH - 0.12) / 2,
            y + HEIGHT / 2 - 0.02,
            token,
            ha="center",
            va="center",
            fontsize=10,
            color="#202024",
        )
        x += WIDTH
    return x


def label(panel: Axes, y: float, title: str, detail: str) -> None:
    """Write a row's title and detail to the left of it."""
    panel.text(0, y + 0.42, title, va="center", fontsize=10, weight="bold")
    panel.text(0, y + 0.1, detail, va="center", fontsize=8.5, color=MUTED)


def arrow(panel: Axes, x: float, upper: float, lower: float) -> None:
    """Draw an arrow from a box at ``x`` in the upper row to the one below it."""
    middle = x + (WIDTH - 0.12) / 2
    panel.annotate(
        "",
        (middle, lower + HEIGHT + 0.05),
        (middle, upper - 0.05),
        arrowprops={"arrowstyle": "->", "color": MUTED},
    )


def draw(path: Path) -> None:
    """Draw the picture. Every run writes the same bytes."""
    with plt.rc_context(MATPLOTLIB):
        figure = plt.figure(figsize=(10, 4.1))
        panel = figure.add_axes((0.02, 0.02, 0.96, 0.96))
        panel.set(xlim=(0, 18), ylim=(-0.9, 5.6))
        panel.axis("off")

        label(panel, 4.8, "The sequence so far", "prompt, response")
        begin = boxes(panel, LABELS, 4.8, TEXT) + 0.3
        second = begin + len(DRAFTS[0]) * WIDTH
        for (title, detail), y in zip(ROWS, (3.5, 2.2, 0.9), strict=True):
            label(panel, y, title, detail)
        for x, guesses, drafts in zip((begin, second), GUESSES, DRAFTS, strict=True):
            boxes(panel, x, 3.5, guesses)
            boxes(panel, x, 2.2, drafts)
            arrow(panel, x, 3.5, 2.2)
        boxes(panel, begin, 0.9, VERIFIED)
        arrow(panel, begin, 2.2, 0.9)

        for x, color, meaning in LEGEND:
            boxes(panel, LABELS + x, -0.7, [("", color)])
            panel.text(LABELS + x + WIDTH, -0.7 + HEIGHT / 2, meaning, va="center", fontsize=8.5)
        figure.savefig(path, dpi=130)
        plt.close(figure)


if __name__ == "__main__":
    draw(PATH)
