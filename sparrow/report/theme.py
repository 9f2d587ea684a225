"""Colours for the report and its figures. Colours that are shown together are colour-blind safe."""

from __future__ import annotations

from typing import Any

import numpy as np

INK = "#1f2328"
MUTED = "#5d6670"
GRID = "#e3e6ea"
PAGE = "#ffffff"
DARK = {
    "page": "#14171b",
    "ink": "#e4e7eb",
    "muted": "#9aa4ae",
    "grid": "#323840",
    "above": "#6db3f2",
    "below": "#f2955b",
}
"""The page's colours in dark mode, where figures are inverted."""
# tails below and above tau
BELOW = "#c2500a"
ABOVE = "#1f6fb5"
SERIES = ("#1f6fb5", "#d9730d", "#16826b", "#a14690")
# length bins, darker for longer ones
BINS = (
    "#c28400",
    "#cf4a5a",
    "#8f3f97",
    "#2d2a7a",
)

# Lower ends of the acceptance ranges used to colour tokens. They get narrower towards 1, where most
# acceptance rates are. All colours share a hue; the lower the acceptance, the more they stand out
# from the background.
LEVELS = (
    0.999,
    0.99,
    0.97,
    0.9,
    0.8,
    0.6,
    0.3,
    0.0,
)
LEVEL_COLORS = (
    "#ffffff",
    "#fff3e4",
    "#ffe2c2",
    "#fdc791",
    "#f7a35c",
    "#e67a2e",
    "#b4490a",
    "#742a02",
)
LEVEL_INKS = (*[INK] * 6, *["#ffffff"] * 2)

MATPLOTLIB: dict[Any, Any] = {
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": GRID,
    "xtick.color": GRID,
    "ytick.color": GRID,
    "xtick.labelcolor": MUTED,
    "ytick.labelcolor": MUTED,
    "axes.grid": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "axes.formatter.useoffset": False,
    "figure.constrained_layout.wspace": 0.04,
    "font.size": 9,
}
"""matplotlib ``rcParams`` for figures in these colours."""


def bin_colors(count: int) -> list[str]:
    """Choose colours for ``count`` length bins, shortest first, evenly spaced along ``BINS``."""
    stops = np.array([[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in BINS])
    places = np.linspace(0, len(BINS) - 1, count)
    channels = np.stack(
        [np.interp(places, range(len(BINS)), channel) for channel in stops.T], axis=1
    )
    return ["#" + "".join(f"{round(x):02x}" for x in color) for color in channels.tolist()]
