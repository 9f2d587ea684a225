"""The figures of a report: of one run, or of two on the same axes or the same scale. Only drawing loads matplotlib.

Shapes: S steps, N length bins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from sparrow.mismatch import BetaTail
from sparrow.report import svg, theme
from sparrow.report.curves import DASHES, PANELS, Key, line, step_axis
from sparrow.report.summary import bin_name, tau_name
from sparrow.run.log import FloatArray, RunLog
from sparrow.schedule import SparsitySchedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Logs = Sequence[RunLog]
RUNS = "AB"  # what two runs are called


@dataclass(frozen=True)
class Figure:
    """A figure of the page, drawn on demand."""

    name: str
    title: str
    meaning: str  # what is shown, in a sentence or two
    keys: Sequence[Key]  # the legend
    draw: Callable[[Axes], None]

    def svg(self, colors: dict[str, str]) -> str:
        return svg.render(self.name, self.draw, colors)


def figures(logs: Logs) -> dict[str, list[Figure]]:
    """The figures of one run or of two, by heading."""
    curves = {
        heading: [
            Figure(name, panel.title, panel.meaning, panel.keys(logs), partial(panel.draw, logs=logs))
            for name, panel in panels.items()
            if panel.recorded(logs)
        ]
        for heading, panels in PANELS.items()
    }
    first, *rest = curves
    sections = {first: curves[first], "Acceptance": _acceptance(logs), **{heading: curves[heading] for heading in rest}}
    return {heading: some for heading, some in {**sections, "Schedule": _schedule(logs)}.items() if some}


def bin_count(logs: Logs) -> int:
    """The number of length bins up to the longest that any step of any run reached."""
    return max(log.tail_by_step().shape[1] for log in logs)


def bin_keys(logs: Logs) -> list[Key]:
    """The colours of the length bins that were reached, the same in every figure."""
    count, width = bin_count(logs), logs[0].bin_tokens
    reached = {b.bin for log in logs for index in range(len(log.metrics)) for b in log.bins(index)}
    colors = enumerate(theme.bin_colors(count))
    return [Key(bin_name(n * width, (n + 1) * width), color) for n, color in colors if n in reached]


def _acceptance(logs: Logs) -> list[Figure]:
    several = len(logs) > 1
    by_step = [
        Figure(
            f"tail-{i}" if i else "tail",
            f"{log.tau.statistic} of acceptance by length{f', run {RUNS[i]}' if several else ''}",
            "The 5th percentile of the acceptance rate over the tokens sampled at a length"
            f"{', relative to its ceiling' if log.tau.relative else ''}; dashed, τ, what the run was to hold.",
            bin_keys(logs),
            partial(draw_tail, logs=logs, log=log),
        )
        for i, log in enumerate(logs)
    ]
    runs = [Key(f"run {name}", color) for name, color in zip(RUNS, theme.SERIES, strict=False)] if several else []
    ceiling = any(np.isfinite(log.ceiling()[:, 0]).any() for log in logs)
    marks = "dots are lower bounds with their 95 % interval from resampling responses, open triangles upper bounds"
    if ceiling:
        marks += ", grey bars the ceiling: the p5 of dense rollouts with the same pair of engines, the noise floor"
    steps = " and ".join(dict.fromkeys(f"step {log.steps[-1]}" for log in logs))
    last = Figure(
        "tail-last", f"p5 by length at {steps}", f"{marks[0].upper()}{marks[1:]}.", runs or bin_keys(logs),
        partial(draw_last_tail, logs=logs),
    )  # fmt: skip
    shown = [Key("last step", theme.SERIES[0]), Key("first step", theme.MUTED)]
    if not several and logs[0].beta_tail():
        shown.append(Key("Beta fit of the last", theme.SERIES[1]))
    acceptance = Figure(
        "acceptance", "Distribution of acceptance",
        "Share of tokens by acceptance rate, the mass that actor and policy share at a token; on a log scale, as most "
        "are accepted almost surely.",
        runs or shown, partial(draw_acceptance, logs=logs, name="histogram"),
    )  # fmt: skip
    distance = Figure(
        "distance", "Distance from certain acceptance",
        "Share of tokens by 1 - acceptance rate; the first bin holds all below 10⁻⁶.",
        runs or shown, partial(draw_acceptance, logs=logs, name="log_histogram"),
    )  # fmt: skip
    return [*by_step, last, acceptance, distance]


def draw_tail(ax: Axes, logs: Logs, log: RunLog) -> None:
    """Draw the p5 of ``log`` by step and bin, on a scale that all ``logs`` share."""
    tail_SN = log.tail_by_step()
    for n, color in zip(range(tail_SN.shape[1]), theme.bin_colors(bin_count(logs)), strict=False):
        line(ax, log.steps, tail_SN[:, n], color)
    shown = np.concatenate([[x.tau.value for x in logs], *(x.tail_by_step().ravel() for x in logs)])
    low, high = np.nanmin(shown), np.nanmax(shown)
    ax.set_ylim(low - 0.06 * (high - low) - 1e-3, high + 0.06 * (high - low) + 1e-3)
    ax.set_ylabel(f"{log.tau.statistic} of acceptance")
    _tau_line(ax, log)
    step_axis(ax, [step for x in logs for step in x.steps.tolist()])


def draw_last_tail(ax: Axes, logs: Logs) -> None:
    """Draw the bounds, interval and ceiling of each bin at the last step; two runs are drawn side by side."""
    colors = theme.bin_colors(bin_count(logs))
    for i, log in enumerate(logs):
        aside = 0.0 if len(logs) == 1 else 0.3 * i - 0.15
        ceiling = log.ceiling()
        for b in log.bins():
            x, color = b.bin + aside, theme.SERIES[i] if len(logs) > 1 else colors[b.bin]
            best, low, high = ceiling[b.bin]
            ax.fill_between([x - 0.13, x + 0.13], low, high, color=theme.MUTED, alpha=0.25, linewidth=0)
            ax.hlines(best, x - 0.2, x + 0.2, color=theme.MUTED, linewidth=1.5)
            # Not error bars: a bootstrap interval need not contain its estimate.
            ax.vlines(x, b.interval_low, b.interval_high, color=color, linewidth=4, alpha=0.4)
            ax.plot(x, b.lower_bound, "o", color=color, markersize=5)
            ax.plot(x, b.upper_bound, "^", color=theme.MUTED, markersize=4.5, fillstyle="none")
            if log.tau.relative:
                ax.hlines(log.tau.level(best), x - 0.4, x + 0.4, color=theme.INK, linewidth=1, linestyle=(0, (4, 3)))
        if not log.tau.relative:
            _tau_line(ax, log)
    width = logs[0].bin_tokens
    bins = [b.bin for log in logs for b in log.bins()]
    shown = range(min(bins), max(bins) + 1)
    ticks = shown[:: -(-len(shown) // 6)]
    ax.set_xticks(ticks, [bin_name(n * width, (n + 1) * width) for n in ticks])
    ax.set_xlim(shown[0] - 0.6, shown[-1] + 0.6)
    ax.set_xlabel("tokens in the sequence")
    ax.set_ylabel("p5 of acceptance")
    ax.grid(visible=False, axis="x")


def draw_acceptance(ax: Axes, logs: Logs, name: str) -> None:
    """Draw the ``histogram`` of acceptance, or the ``log_histogram`` of 1 - acceptance."""
    of_distance = name == "log_histogram"
    edges = np.array(logs[0].histogram(name).edges)
    drawn = np.append(edges[1] / 3, edges[1:]) if of_distance else edges  # 0 has no place on a log scale
    floors = []
    for i, log in enumerate(logs):
        last, first = (np.array(log.histogram(name, index).counts) for index in (-1, 0))
        floors.append(0.5 / last.sum())
        ax.stairs(last / last.sum(), drawn, fill=True, baseline=floors[-1], color=theme.SERIES[i], alpha=0.35)
        if len(logs) > 1:
            ax.stairs(last / last.sum(), drawn, baseline=None, color=theme.SERIES[i], linewidth=1.2)
        elif len(log.metrics) > 1:
            ax.stairs(first / first.sum(), drawn, color=theme.MUTED, linewidth=1, baseline=None)
    if len(logs) == 1 and (fit := logs[0].beta_tail()):
        shares = _beta_shares(fit, 1 - edges[::-1])[::-1] if of_distance else _beta_shares(fit, edges)
        ax.stairs(shares, drawn, color=theme.SERIES[1], linewidth=1.6, baseline=None)
    ax.set_ylim(min(floors), 2)
    ax.set_yscale("log")
    ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
    ax.set_ylabel("share of tokens")
    ax.set_xlabel("1 - acceptance rate" if of_distance else "acceptance rate")
    if of_distance:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter(lambda x, _: f"{x:g}")
        ax.set_xticks([1e-6, 1e-4, 1e-2, 1])


def _beta_shares(fit: BetaTail, edges: FloatArray) -> FloatArray:
    """Share of all tokens that the fit puts between each two neighbours of ``edges``, which are rising acceptances."""
    return fit.fraction_in_tail * np.diff(special.betainc(fit.a, fit.b, np.clip(edges / fit.cut, 0, 1)))


def _schedule(logs: Logs) -> list[Figure]:
    names = [
        f"{when}, run {RUNS[i]}" if len(logs) > 1 else when
        for i, log in enumerate(logs)
        for when, _ in zip(("at the last step", "at the start"), _start_and_end(log), strict=False)
    ]
    keys = [Key(name, color) for name, color in zip(names, theme.SERIES, strict=False)]
    result = [
        Figure(
            "schedule", "What a sparse layer reads",
            "Share of the cached tokens that one decode step of a sparse layer reads at each length, always-kept pages "
            "included.",
            keys if len(keys) > 1 else [], partial(draw_schedule, logs=logs),
        )
    ]  # fmt: skip
    for i, log in enumerate(logs):
        if len(set(log.schedules)) > 1:
            title = f"Schedule by step{f', run {RUNS[i]}' if len(logs) > 1 else ''}"
            meaning = "Share of the cache that a sparse layer reads at the end of each length bin."
            draw = partial(draw_pages, logs=logs, log=log)
            result.append(Figure(f"pages-{i}" if i else "pages", title, meaning, bin_keys(logs), draw))
    return result


def _start_and_end(log: RunLog) -> list[SparsitySchedule]:
    """The last schedule, then the first one if it differs."""
    return list(dict.fromkeys((log.schedules[-1], log.schedules[0])))


def draw_schedule(ax: Axes, logs: Logs) -> None:
    """Draw the share of the cache read, by length; for a run whose schedule moved, that at its start as well."""
    schedules = [table for log in logs for table in _start_and_end(log)]
    last_bins = [log.bins()[-1].end for log in logs]
    longest = max([len(s.top_k) * s.bin_tokens for s in schedules] + last_bins)
    lengths = np.unique(np.linspace(1, longest, 600).astype(np.int64))
    for table, color in zip(schedules, theme.SERIES, strict=False):
        ax.plot(lengths, 100 * table.tokens_read(lengths) / lengths, color=color, linewidth=1.7)
    ax.set_xlim(0, longest)
    ax.set_ylim(0, 105)
    ax.set_xlabel("tokens in the sequence")
    ax.set_ylabel("share read, %")


def draw_pages(ax: Axes, logs: Logs, log: RunLog) -> None:
    """Draw the share of the cache read at the end of each bin, by step."""
    width = log.bin_tokens  # of the bins that p5 is reported in, which need not be the schedule's
    reached = sorted({b.bin for index in range(len(log.metrics)) for b in log.bins(index)})
    colors = theme.bin_colors(bin_count(logs))
    for n in reached:
        # The last length in the bin: the next token would begin a page of the bin after it.
        length = max((n + 1) * width - log.schedules[0].page_size, 1)
        share = np.array([100 * s.tokens_read(length) / length for s in log.schedules])
        line(ax, log.steps, share, colors[n], DASHES[0])
    ax.set_ylim(0, 105)
    ax.set_ylabel("share read, %")
    step_axis(ax, [step for x in logs for step in x.steps.tolist()])


def _tau_line(ax: Axes, log: RunLog) -> None:
    tau = log.tau.value
    ax.axhline(tau, color=theme.INK, linewidth=1, linestyle=(0, (4, 3)))
    where = ax.get_yaxis_transform()
    ax.text(0.995, tau, tau_name(log.tau), transform=where, ha="right", va="bottom", color=theme.INK, fontsize=8)
