"""Figures for a report on one run, or on two runs drawn with shared axes or scales. matplotlib is
imported only when something is drawn.

Shapes: S steps, N length bins.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from sparrow.mismatch import Tau
from sparrow.report import theme
from sparrow.report.curves import DASHES, MARKERS, PANELS, RUNS, line, step_axis
from sparrow.report.summary import bin_name
from sparrow.run.log import RunLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Logs = Sequence[RunLog]


@dataclass(frozen=True)
class Figure:
    """A figure on the page, drawn on demand."""

    title: str
    draw: Callable[[Axes], None]
    meaning: str = ""  # a caption, if the title isn't enough

    def image(self) -> str:
        """Encode the figure as a data URL. The result is deterministic."""
        import matplotlib
        from matplotlib import figure

        with (
            matplotlib.rc_context({**theme.MATPLOTLIB, "svg.hashsalt": self.title}),
            io.BytesIO() as file,
        ):
            canvas = figure.Figure(figsize=(4.9, 2.75), layout="constrained")
            self.draw(canvas.subplots())
            canvas.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
            return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


def figures(logs: Logs) -> dict[str, list[Figure]]:
    """Collect the figures for one or two runs, grouped by heading."""
    first, *others = PANELS
    sections = {
        heading: [
            Figure(p.title, partial(p.draw, logs=logs), p.meaning)
            for p in PANELS[heading]
            if p.recorded(logs)
        ]
        for heading in (first, *others)
    }
    found = {
        first: sections.pop(first),
        "Acceptance": _acceptance(logs),
        **sections,
        "Schedule": _schedule(logs),
    }
    return {heading: some for heading, some in found.items() if some}


def _of_run(logs: Logs, i: int) -> str:
    return f", run {RUNS[i]}" if len(logs) > 1 else ""


def _acceptance(logs: Logs) -> list[Figure]:
    by_step = [
        Figure(
            f"{log.tau.statistic} of acceptance by length{_of_run(logs, i)}",
            partial(draw_tail, logs=logs, log=log),
            "5th percentile of the acceptance rate by length, over tokens sampled by a sparse "
            "actor; shaded: from lower to upper bound; dashed: the run's target",
        )
        for i, log in enumerate(logs)
        if np.isfinite(log.tail_by_step()).any()
    ]
    if not any(log.sparse_bins() for log in logs):
        return by_step
    last = Figure(
        "p5 by length at the last step",
        partial(draw_last_tail, logs=logs),
        "dots (diamonds for a second run): lower bounds with their 95 % interval from resampling "
        "responses; triangles: upper bounds; grey: the ceiling (p5 of dense rollouts with the "
        "same engine and trainer)",
    )
    distribution = Figure(
        "Distribution of acceptance",
        partial(draw_acceptance, logs=logs),
        "share of tokens by acceptance rate (lower bound), on a log scale, because most tokens "
        "are accepted almost surely",
    )
    return [*by_step, last, distribution]


def _bin_lines(ax: Axes, logs: Logs, log: RunLog, values_SN: np.ndarray) -> None:
    """Draw one line per bin over steps. A bin has the same colour in every figure."""
    width = log.bin_tokens
    colors = _colors(logs)
    for n in np.flatnonzero(np.isfinite(values_SN).any(0)).tolist():
        line(ax, log.steps, values_SN[:, n], colors[n], label=bin_name(n * width, (n + 1) * width))
    step_axis(ax)
    ax.legend(bbox_to_anchor=(1.01, 1), loc="upper left", borderaxespad=0)


def _colors(logs: Logs) -> list[str]:
    """Return the length bins' colours."""
    return theme.bin_colors(max(x.tail_by_step().shape[1] for x in logs))


def draw_tail(ax: Axes, logs: Logs, log: RunLog) -> None:
    """Draw the p5 of ``log`` by step and bin, on a scale shared by all ``logs``."""
    lower_SN = log.tail_by_step()
    upper_SN = log.upper_tail_by_step()
    _bin_lines(ax, logs, log, lower_SN)
    colors = _colors(logs)
    for n in np.flatnonzero(np.isfinite(upper_SN).any(0)).tolist():
        ax.fill_between(
            log.steps, lower_SN[:, n], upper_SN[:, n], color=colors[n], alpha=0.15, linewidth=0
        )
    sparse = [x for x in logs if x.is_sparse]
    bounds = [tail() for x in sparse for tail in (x.tail_by_step, x.upper_tail_by_step)]
    shown = np.concatenate([[x.tau.value for x in sparse], *(tail.ravel() for tail in bounds)])
    low = np.nanmin(shown)
    high = np.nanmax(shown)
    ax.set_ylim(low - 0.06 * (high - low) - 1e-3, high + 0.06 * (high - low) + 1e-3)
    ax.set_ylabel(f"{log.tau.statistic} of acceptance")
    _tau_line(ax, log.tau)


def draw_last_tail(ax: Axes, logs: Logs) -> None:
    """Draw each bin's bounds, interval and ceiling at the last step, with two runs side by side."""
    for i, log in enumerate(logs):
        for b in log.sparse_bins():
            x = b.bin + (0.3 * i - 0.15 if len(logs) > 1 else 0.0)
            color = theme.SERIES[i]
            ax.fill_between(
                [x - 0.13, x + 0.13],
                b.ceiling_low,
                b.ceiling_high,
                color=theme.MUTED,
                alpha=0.25,
                lw=0,
            )
            ax.hlines(b.ceiling, x - 0.2, x + 0.2, color=theme.MUTED, linewidth=1.5)
            # Lines, not error bars, because a bootstrap interval may not contain its estimate.
            ax.vlines(x, b.interval_low, b.interval_end, color=color, linewidth=4, alpha=0.4)
            ax.plot(x, b.lower_bound, MARKERS[i], color=color, markersize=5)
            ax.plot(x, b.upper_bound, "^", color=theme.MUTED, markersize=4.5, fillstyle="none")
            if log.tau.relative:
                level = log.tau.level(b.ceiling)
                ax.hlines(
                    level, x - 0.4, x + 0.4, color=theme.INK, linewidth=1, linestyle=(0, (4, 3))
                )
        if not log.tau.relative and log.is_sparse:
            _tau_line(ax, log.tau)
    width = logs[0].bin_tokens
    bins = [b.bin for log in logs for b in log.sparse_bins()]
    shown = range(min(bins), max(bins) + 1)
    ticks = shown[:: -(-len(shown) // 6)]
    ax.set_xticks(ticks, [bin_name(n * width, (n + 1) * width) for n in ticks])
    ax.set_xlim(shown[0] - 0.6, shown[-1] + 0.6)
    ax.set_xlabel("tokens in the sequence")
    ax.set_ylabel("p5 of acceptance")


def draw_acceptance(ax: Axes, logs: Logs) -> None:
    """Draw each run's acceptance histogram at the last step and, for a single run, at the first
    step too. Steps without a sparse actor are skipped.
    """
    steps = [
        (log, -1, f"last step{_of_run(logs, i)}", theme.SERIES[i], DASHES[i])
        for i, log in enumerate(logs)
    ]
    if len(logs) == 1:
        steps.append((logs[0], 0, "first step", theme.MUTED, DASHES[0]))
    for log, index, label, color, dash in steps:
        if not log.sparse_bins(index):
            continue
        counts, edges = log.histogram(index)
        ax.stairs(
            counts / counts.sum(), edges, color=color, linewidth=1.2, linestyle=dash, label=label
        )
    ax.set_yscale("log")
    ax.set_xlabel("acceptance rate")
    ax.set_ylabel("share of tokens")
    ax.legend(loc="upper left")


def _schedule(logs: Logs) -> list[Figure]:
    read = Figure(
        "What a sparse layer reads",
        partial(draw_schedule, logs=logs),
        "share of the cached tokens that one decode step reads at each length, "
        "including the pages that are always kept",
    )
    moved = [
        Figure(
            f"Schedule by step{_of_run(logs, i)}",
            partial(draw_pages, logs=logs, log=log),
            "share of the cache that a sparse layer reads at the end of each length bin",
        )
        for i, log in enumerate(logs)
        if len(set(log.schedules)) > 1
    ]
    return [read, *moved]


def draw_schedule(ax: Axes, logs: Logs) -> None:
    """Draw the share of the cache that is read at each length. If a run's schedule changed, draw
    one line for the start of the run and one for the last step.
    """
    lines = [
        (table, f"at the {when}{_of_run(logs, i)}", DASHES[i])
        for i, log in enumerate(logs)
        for table, when in {log.schedules[0]: "start", log.schedules[-1]: "last step"}.items()
    ]
    longest = max(
        [len(table.top_k) * table.bin_tokens for table, _, _ in lines]
        + [log.bins()[-1].end for log in logs]
    )
    lengths = np.unique(np.linspace(1, longest, 600).astype(np.int64))
    # Each line has its own colour, so that both runs are visible where they read the same share.
    for (table, label, dash), color in zip(lines, theme.SERIES, strict=False):
        ax.plot(
            lengths,
            100 * table.tokens_read(lengths) / lengths,
            color=color,
            linewidth=1.7,
            linestyle=dash,
            label=label,
        )
    ax.set_ylim(0, 105)
    ax.set_xlabel("tokens in the sequence")
    ax.set_ylabel("share read, %")
    if len(lines) > 1:
        ax.legend()


def draw_pages(ax: Axes, logs: Logs, log: RunLog) -> None:
    """Draw the share of the cache that is read at the end of each bin, over steps."""
    tail_SN = log.tail_by_step()
    # The last length of each bin: one more token would start a page of the next bin.
    ends = np.maximum(
        log.bin_tokens * np.arange(1, tail_SN.shape[1] + 1) - log.schedules[0].page_size, 1
    )
    share_SN = np.stack([100 * s.tokens_read(ends) / ends for s in log.schedules])
    _bin_lines(ax, logs, log, np.where(np.isfinite(tail_SN).any(0), share_SN, np.nan))
    ax.set_ylim(0, 105)
    ax.set_ylabel("share read, %")


def _tau_line(ax: Axes, tau: Tau) -> None:
    ax.axhline(tau.value, color=theme.INK, linewidth=1, linestyle=(0, (4, 3)))
    where = ax.get_yaxis_transform()
    ax.text(
        0.995,
        tau.value,
        str(tau),
        transform=where,
        ha="right",
        va="bottom",
        color=theme.INK,
        fontsize=8,
    )
