"""The report of a run: figures as PNG files, and one HTML page that needs no other file and no network."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping
from itertools import groupby
from math import isfinite, nan
from pathlib import Path

import jinja2
import numpy as np

from sparrow.mismatch import BinMismatch
from sparrow.report import theme
from sparrow.report.figures import plots, render
from sparrow.report.summary import bin_name, number, result_rows, setup_rows
from sparrow.run.directory import LoggedResponse
from sparrow.run.log import RunLog, nan_mean

MOST_TOKENS = 40_000  # more tokens than this make a page slow to open; longer responses then lose their middle

Span = tuple[str, str, str]  # style class, title and text of one token


def write_report(run_dir: str | Path, out: str | Path | None = None) -> Path:
    """Write the figures (PNG) and the page of a run, finished or not, to ``out`` or ``run_dir/report``.

    Returns:
        The page, ``out/index.html``.

    Raises ConfigError: not a run directory, a run without a finished step, or a damaged file.
    """
    log = RunLog.load(run_dir)
    folder = Path(out) if out is not None else log.run_dir / "report"
    folder.mkdir(parents=True, exist_ok=True)
    figures = {name: render(name, log) for name in plots(log)}
    for name, png in figures.items():
        (folder / f"{name}.png").write_bytes(png)
    page = folder / "index.html"
    # A tokenizer may decode half a character to what UTF-8 cannot hold.
    page.write_text(html_page(log, figures), encoding="utf-8", errors="replace")
    return page


def html_page(log: RunLog, figures: Mapping[str, bytes]) -> str:
    """The whole page, with these figures (PNG by name) in it."""
    loader = jinja2.PackageLoader("sparrow.report", ".")
    pages = jinja2.Environment(loader=loader, autoescape=True, trim_blocks=True, undefined=jinja2.StrictUndefined)
    most = max(MOST_TOKENS // max(len(log.rollouts), 1), 2)
    by_step = groupby(log.rollouts, key=lambda response: response.step)
    return pages.get_template("page.html").render(
        theme=theme,
        name=log.run_dir.resolve().name,
        run=[*setup_rows(log), *result_rows(log)],
        last=log.steps[-1],
        tau=f"{log.tau:g}",
        tail=[_tail_row(b, log.tau) for b in log.bins()],
        figures={name: b64encode(png).decode() for name, png in figures.items()},
        steps=[(step, [_response(row, most) for row in rows]) for step, rows in by_step],
    )


def _tail_row(b: BinMismatch, tau: float) -> tuple[str, ...]:
    interval = f"[{number(b.interval_low)}, {number(b.interval_high)}]" if isfinite(b.interval_low) else "one response"
    counts = f"{b.n_tokens:,}", f"{b.n_sequences:,}"
    return bin_name(b.start, b.end), *counts, number(b.lower_bound), interval, number(b.upper_bound), b.verdict(tau)


def _response(row: LoggedResponse, most: int) -> tuple[str, list[str], str, list[Span]]:
    """Problem, facts, prompt and tokens of one response."""
    accepted = np.array(row.acceptance, dtype=float)
    lowest = min(accepted[np.isfinite(accepted)], default=nan)
    spans = [_span(text, rate) for text, rate in zip(row.tokens, accepted, strict=True)]
    left_out = len(spans) - most
    if left_out > 0:
        spans[most // 2 : most // 2 + left_out] = [("gap", "", f"{left_out:,} tokens are not shown")]
    facts = [
        f"reward {row.reward:.3g}", f"{len(accepted):,} tokens", f"ended by {row.finish_reason}",
        f"mean acceptance {number(nan_mean(accepted))}", f"lowest {number(lowest)}",
    ]  # fmt: skip
    return row.problem, facts, row.prompt, spans


def _span(text: str, rate: float) -> Span:
    if not isfinite(rate):
        return "none", "not measured", text
    level = next((i for i, low in enumerate(theme.LEVELS) if rate >= low), len(theme.LEVELS) - 1)
    return f"a{level} n" if "\n" in text else f"a{level}", f"{rate:.4f}", text
