"""The report of a run: figures as PNG files, and one HTML page that needs no other file and no network."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from html import escape
from itertools import groupby
from math import isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np

from sparrow.mismatch import BinMismatch
from sparrow.report.figures import WIDE, Plot, plots, render
from sparrow.report.log import RunLog, nan_mean
from sparrow.report.style import LEVELS, style_sheet
from sparrow.report.summary import bin_name, number, plural, result_rows, setup_rows, verdict

PAGE = "index.html"

MOST_TOKENS = 40_000
"""More tokens than this make a page slow to open; longer responses then lose their middle."""


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the figures (PNG) and the page of a run, finished or not.

    Args:
        run_dir: a run directory (``config.json``, ``metrics.jsonl``, ``rollouts.jsonl``).
        out: folder to write to; ``run_dir/report`` if not given.

    Returns:
        The page, ``out/index.html``.

    Raises:
        ConfigError: not a run directory, a run without a finished step, or a damaged file.
    """
    log = RunLog.load(run_dir)
    folder = Path(out) if out is not None else log.run_dir / "report"
    folder.mkdir(parents=True, exist_ok=True)
    figures = []
    for plot in plots(log):
        png, svg = render(plot, log)
        (folder / f"{plot.name}.png").write_bytes(png)
        figures.append(_figure(plot, svg))
    page = folder / PAGE
    # A tokenizer may decode half a character to what UTF-8 cannot hold.
    page.write_text(html_page(log, "".join(figures)), encoding="utf-8", errors="replace")
    return page


def html_page(log: RunLog, figures: str) -> str:
    """The whole page."""
    name = escape(log.run_dir.resolve().name)
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{name} · Sparrow report</title>
<style>{style_sheet()}</style>
</head>
<body>
<header><p>Sparrow run report</p><h1>{name}</h1></header>
<section class="cards">
{_run_table(log)}
{_tail_table(log)}
{figures}</section>
{_token_view(log)}
</body>
</html>
"""


def _run_table(log: RunLog) -> str:
    rows = "".join(
        f'<tr><th scope="row">{escape(name)}</th><td>{escape(value)}</td></tr>\n'
        for name, value in (*setup_rows(log), *result_rows(log))
    )
    return f'<div class="card"><h2>Run</h2>\n<table id="run">\n{rows}</table></div>'


def _tail_table(log: RunLog) -> str:
    rows = "".join(_tail_row(b, log.tau) for b in log.bins())
    return f"""<div class="card"><h2>Tail of acceptance at step {log.steps[-1]}</h2>
<table id="tail">
<tr><th scope="col">length</th><th scope="col">tokens</th><th scope="col">responses</th>
<th scope="col">p5</th><th scope="col">95 % interval</th><th scope="col">upper bound</th>
<th scope="col">against τ {log.tau:g}</th></tr>
{rows}</table>
<p class="note">holds: the whole interval reaches τ; below: neither it nor the upper bound does</p></div>"""


def _tail_row(b: BinMismatch, tau: float) -> str:
    interval = f"[{number(b.interval_low)}, {number(b.interval_high)}]" if isfinite(b.interval_low) else "one response"
    found = verdict(b, tau)
    cells = (
        f"{b.n_tokens:,}", f"{b.n_sequences:,}", f"<b>{number(b.lower_bound)}</b>", interval, number(b.upper_bound),
        f'<span class="{found}">{found}</span>',
    )  # fmt: skip
    return f'<tr><th scope="row">{bin_name(b.start, b.end)}</th>{"".join(f"<td>{c}</td>" for c in cells)}</tr>\n'


def _figure(plot: Plot, svg: bytes) -> str:
    kind = "card wide" if plot.size[0] == WIDE else "card"
    source = f"data:image/svg+xml;base64,{b64encode(svg).decode()}"
    return f"""<figure id="{plot.name}" class="{kind}"><h2>{escape(plot.title)}</h2>
<img src="{source}" alt="{escape(f"{plot.title}. {plot.caption}")}">
<figcaption>{escape(plot.caption)}</figcaption></figure>
"""


def _token_view(log: RunLog) -> str:
    if not log.rollouts:
        return ""
    most = max(MOST_TOKENS // len(log.rollouts), 2)
    steps = [(step, list(rows)) for step, rows in groupby(log.rollouts, key=lambda row: row["step"])]
    parts = []
    for step, rows in steps:
        opened = " open" if step == steps[-1][0] else ""
        responses = "".join(_response(row, most) for row in rows)
        count = plural(len(rows), "response") if len(rows) > 1 else "1 response"
        parts.append(f'<details class="step"{opened}><summary>Step {step}: {count}</summary>\n{responses}</details>\n')
    names = [f"≥ {low:g}" for low in LEVELS[:-1]] + [f"< {LEVELS[-2]:g}"]
    legend = "".join(f'<span class="a{level}">{name}</span>' for level, name in enumerate(names))
    return f"""<section id="responses" class="card"><h2>Sampled responses</h2>
<p class="note">Each token is coloured by its acceptance rate (lower bound); point at one for the number.</p>
<p class="legend">{legend}</p>
{"".join(parts)}</section>"""


def _response(row: Mapping[str, Any], most: int) -> str:
    accepted = np.array(row["acceptance"], dtype=float)
    lowest = min(accepted[np.isfinite(accepted)], default=nan)
    tokens = [_token(text, rate) for text, rate in zip(row["tokens"], accepted, strict=True)]
    left_out = len(tokens) - most
    if left_out > 0:
        gap = f'<span class="gap">{left_out:,} tokens are not shown</span>'
        tokens = [*tokens[: most // 2], gap, *tokens[most // 2 + left_out :]]
    facts = [
        f"reward {row['reward']:.3g}", f"{len(accepted):,} tokens", f"ended by {row['finish_reason']}",
        f"mean acceptance {number(nan_mean(accepted))}", f"lowest {number(lowest)}",
    ]  # fmt: skip
    return f"""<article><h3>{escape(str(row["problem"]))}</h3>
<p class="facts">{"".join(f"<span>{escape(fact)}</span>" for fact in facts)}</p>
<details><summary>Prompt</summary><div class="prompt">{escape(row["prompt"])}</div></details>
<div class="tokens">{"".join(tokens)}</div></article>
"""


def _token(text: str, rate: float) -> str:
    if not isfinite(rate):
        return f'<span class="none" title="not measured">{escape(text)}</span>'
    level = next((i for i, low in enumerate(LEVELS) if rate >= low), len(LEVELS) - 1)
    ends_line = " n" if "\n" in text else ""
    return f'<span class="a{level}{ends_line}" title="{rate:.4f}">{escape(text)}</span>'
