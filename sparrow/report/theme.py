"""Colours of the report and its figures; those drawn together stay apart for colour-blind readers."""

from typing import Any

INK, MUTED, GRID, PAGE, CARD = "#1f2328", "#5d6670", "#e3e6ea", "#f5f6f8", "#ffffff"
BELOW, ABOVE = "#c2500a", "#1f6fb5"  # where the tail is below tau, above it
SERIES = ("#1f6fb5", "#d9730d", "#16826b", "#a14690")
BINS = ("#8bbce6", "#4a90cf", "#1a62a5", "#082f57")  # from the shortest length to the longest

# One hue, ever further from the background; the ranges are closer together towards 1, as acceptance is skewed.
LEVELS = (0.999, 0.99, 0.97, 0.9, 0.8, 0.6, 0.3, 0.0)  # lower ends of the acceptance ranges that tokens are coloured by
LEVEL_COLORS = ("#ffffff", "#fff3e4", "#ffe2c2", "#fdc791", "#f7a35c", "#e67a2e", "#b4490a", "#742a02")
LEVEL_INKS = (*["#1f2328"] * 6, *["#ffffff"] * 2)

MATPLOTLIB: dict[Any, Any] = {
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID,
    "xtick.color": GRID, "ytick.color": GRID, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 8,
    "axes.formatter.useoffset": False, "figure.constrained_layout.wspace": 0.04, "font.size": 9,
}  # fmt: skip
"""The ``rcParams`` that draw in these colours."""
