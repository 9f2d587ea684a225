"""Figures as SVG whose colours are the page's variables, so that one figure suits a light page and a dark one."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from sparrow.report import theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = (4.9, 2.75)  # inches; three fit in a row of a wide page, and one fills a row on a telephone


def render(name: str, draw: Callable[[Axes], None], colors: Mapping[str, str]) -> str:
    """What ``draw`` draws into a pair of axes, as an ``<svg>`` element; the same drawing gives the same text.

    Args:
        name: name of the figure, which keeps its element ids apart from those of other figures in the page.
        draw: draws the figure, in the light colours of ``theme`` and in no others.
        colors: each of these colours -> what replaces it in the page, such as ``var(--ink)``.
    """
    import matplotlib
    from matplotlib.figure import Figure

    text = io.StringIO()
    # Text stays text: it is drawn by the reader's fonts, can be searched, and takes the page's colours.
    options = {**theme.MATPLOTLIB, "svg.fonttype": "none", "svg.hashsalt": name, "font.size": 10}
    with matplotlib.rc_context(options):
        figure = Figure(figsize=SIZE, layout="constrained")
        draw(figure.subplots())
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    body = text.getvalue()
    # A style sheet inside an element of the page would apply to the whole page.
    body = re.sub(r"<(metadata|style)\b.*?</\1>", "", body[body.index("<svg") :], flags=re.S)
    body = re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{name}-", body)
    body = re.sub(r' (width|height)="[\d.]+pt"', "", body, count=2)
    return re.sub(r"#[0-9a-f]{6}\b", lambda match: colors[match[0]], body)
