"""Colours of the report and its figures, for light and dark pages. Colour-blind readers can tell apart the colours
that are drawn together."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

INK, MUTED, GRID, PAGE, CARD = "#1f2328", "#5d6670", "#e3e6ea", "#f5f6f8", "#ffffff"
BELOW, ABOVE = "#c2500a", "#1f6fb5"  # where the tail is below tau, above it
SERIES = ("#1f6fb5", "#d9730d", "#16826b", "#a14690")
BINS = ("#c28400", "#cf4a5a", "#8f3f97", "#2d2a7a")  # from the shortest length to the longest, ever darker

DARK = {
    INK: "#e6e9ed", MUTED: "#9aa4af", GRID: "#30363d", PAGE: "#0d1117", CARD: "#161b22",
    BELOW: "#f0883e", ABOVE: "#6cb0f0",
    **dict(zip(SERIES, ("#6cb0f0", "#f0a04b", "#4fc3a5", "#d58bc8"), strict=True)),
    **dict(zip(BINS, ("#ffd88a", "#f58f83", "#c274cf", "#7b78e8"), strict=True)),
}  # fmt: skip
"""Each colour's counterpart on a dark page."""

# One hue, ever further from the background; the ranges become narrower towards 1, as acceptance is skewed.
LEVELS = (0.999, 0.99, 0.97, 0.9, 0.8, 0.6, 0.3, 0.0)  # lower ends of the acceptance ranges that tokens are coloured by
LEVEL_COLORS = ("#ffffff", "#fff3e4", "#ffe2c2", "#fdc791", "#f7a35c", "#e67a2e", "#b4490a", "#742a02")
LEVEL_INKS = (*["#1f2328"] * 6, *["#ffffff"] * 2)
DARK_LEVEL_COLORS = ("#161b22", "#2a2119", "#3c2a18", "#573616", "#7d4611", "#c46c1e", "#ee8f45", "#ffc48f")
DARK_LEVEL_INKS = (*["#e6e9ed"] * 5, *["#0d1117"] * 3)

MATPLOTLIB: dict[Any, Any] = {
    "text.color": INK, "axes.labelcolor": INK, "axes.edgecolor": GRID,
    "xtick.color": GRID, "ytick.color": GRID, "xtick.labelcolor": MUTED, "ytick.labelcolor": MUTED,
    "axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.7, "axes.axisbelow": True,
    "axes.spines.top": False, "axes.spines.right": False, "legend.frameon": False, "legend.fontsize": 8,
    "axes.formatter.useoffset": False, "figure.constrained_layout.wspace": 0.04, "font.size": 9,
}  # fmt: skip
"""The ``rcParams`` that draw in these colours."""


def bin_colors(count: int) -> list[str]:
    """Colours for ``count`` length bins on a light page, from the shortest to the longest."""
    return _ramp(BINS, count)


def palette(bins: int) -> dict[str, tuple[str, str]]:
    """Every colour of a page with ``bins`` length bins: name in style sheets -> (on a light page, on a dark page)."""
    fixed = {"ink": INK, "muted": MUTED, "grid": GRID, "page": PAGE, "card": CARD, "below": BELOW, "above": ABOVE}
    named = {**fixed, **{f"series-{i}": color for i, color in enumerate(SERIES)}}
    colors = {name: (color, DARK[color]) for name, color in named.items()}
    ramps = zip(bin_colors(bins), _ramp([DARK[color] for color in BINS], bins), strict=True)
    levels = zip(LEVEL_COLORS, DARK_LEVEL_COLORS, strict=True)
    inks = zip(LEVEL_INKS, DARK_LEVEL_INKS, strict=True)
    return {
        **colors,
        **{f"bin-{i}": pair for i, pair in enumerate(ramps)},
        **{f"level-{i}": pair for i, pair in enumerate(levels)},
        **{f"level-ink-{i}": pair for i, pair in enumerate(inks)},
    }


def _ramp(stops: Any, count: int) -> list[str]:
    """``count`` colours, spread evenly over the straight lines between ``stops``."""
    colors = []
    channels = [[int(color[i : i + 2], 16) for i in (1, 3, 5)] for color in stops]
    for n in range(count):
        place = n / max(count - 1, 1) * (len(stops) - 1)
        low, high = list(pairwise(channels))[min(int(place), len(stops) - 2)]
        part = place - min(int(place), len(stops) - 2)
        colors.append("#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(low, high, strict=True)))
    return colors
