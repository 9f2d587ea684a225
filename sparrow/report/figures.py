"""The figures of a run. Loads matplotlib when one is rendered.

Shapes: S steps, N length bins.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from scipy import special

from sparrow.mismatch import BetaTail, Histogram
from sparrow.report import theme
from sparrow.report.log import FloatArray, RunLog
from sparrow.report.summary import bin_name, verdict

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_LINES = len(theme.BINS)
"""More length bins than this are drawn as a heat map."""

HALF, WIDE = 6.4, 13.2
"""Widths of figures in inches: two to a row of the page, or one."""

UNSMOOTHED_STEPS = 60
"""Longer runs also show a rolling mean."""


@dataclass(frozen=True)
class Plot:
    """One figure; ``name`` is also that of its file, ``size`` is in inches."""

    name: str
    title: str
    caption: str
    size: tuple[float, float]
    draw: Callable[[Figure, RunLog], None]


def plots(log: RunLog) -> list[Plot]:
    """The figures that a run gives rise to."""
    steps, last = len(log.metrics), log.steps[-1]
    rolling = f" Bold: mean of {_window(steps)} steps." if steps > UNSMOOTHED_STEPS else ""
    heat_map = log.tail_by_step().shape[1] > MOST_LINES
    found = [
        Plot(
            "reward",
            "Reward and response length",
            f"Mean reward of a step's responses; mean and longest response.{rolling}",
            (HALF, 4.2),
            draw_reward,
        ),
        Plot(
            "cost",
            "KV read and time",
            f"Share of the cached tokens that decoding read; seconds of each phase.{rolling}",
            (HALF, 4.2),
            draw_cost,
        ),
        Plot(
            "tail",
            "Tail of acceptance: p5 by length",
            "The p5 of the acceptance rate in each bin of sequence length, which predicts whether "
            f"training stays stable. Left: by step.{' Blank: no response was that long.' if heat_map else rolling} "
            f"Right: at step {last}; dots are the lower bound and bars its 95 % interval from resampling sequences, "
            "triangles the upper bound; blue holds τ, orange is below, grey undecided.",
            (WIDE, 4.2),
            draw_tail,
        ),
        Plot(
            "acceptance",
            "Distribution of acceptance",
            f"Share of the tokens of step {last}, on a log scale, as most tokens are accepted almost surely; on the "
            "right, so is the distance from 1. The Beta distribution is fitted to the tokens below 0.999.",
            (WIDE, 3.8),
            draw_acceptance,
        ),
        Plot(
            "correction",
            "Importance correction",
            "Effective sample size; share of the tokens whose weight was cut (clipped) or that were left out (masked); "
            f"KL divergence KL(actor ‖ policy) by the estimators k1 and k3.{rolling}",
            (WIDE, 3.5),
            draw_correction,
        ),
        Plot(
            "schedule",
            "Schedule",
            "What a sparse layer reads at each length, the always-kept pages included: in pages, and as a share of the "
            "cache.",
            (WIDE, 3.5),
            draw_schedule,
        ),
    ]
    if len(set(log.schedules)) > 1:
        caption = "What a sparse layer reads at the end of each length bin, as a share of the cache, by step."
        found.append(Plot("pages", "Schedule by step", caption, (WIDE, 3.5), draw_pages))
    return found


def render(plot: Plot, log: RunLog) -> tuple[bytes, bytes]:
    """The figure as PNG, for documents, and as SVG, for the page; the same run gives the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context({**theme.MATPLOTLIB, "svg.hashsalt": plot.name}):
        figure = Figure(figsize=plot.size, layout="constrained")
        plot.draw(figure, log)
        png, svg = io.BytesIO(), io.BytesIO()
        figure.savefig(png, format="png", dpi=160)
        figure.savefig(svg, format="svg", dpi=200, metadata={"Date": None})
    return png.getvalue(), svg.getvalue()


def draw_reward(figure: Figure, log: RunLog) -> None:
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _line(top, log, log.series("reward", "mean"), theme.SERIES[0], "all")
    for name, colour in zip(log.sources(), theme.SERIES[1:], strict=False):
        _line(top, log, log.series("reward", "sources", name), colour, name)
    top.set_ylabel("reward")
    _legend(top)
    _line(bottom, log, log.series("response", "max"), theme.MUTED, "longest")
    _line(bottom, log, log.series("response", "mean"), theme.SERIES[1], "mean")
    bottom.set_ylabel("response tokens")
    _from_zero(bottom)
    _legend(bottom)
    _step_axis(bottom, log)


def draw_cost(figure: Figure, log: RunLog) -> None:
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    _line(top, log, 100 * log.series("kv", "read_fraction"), theme.SERIES[0])
    top.set_ylim(0, 105)
    top.set_ylabel("KV read, %")
    phases = list(log.metrics[-1]["seconds"])
    seconds = np.array([log.series("seconds", name) for name in phases])
    # Each step is as wide as its distance to the next, so that a run of one step shows, too.
    edges = np.append(log.steps, log.steps[-1] + 1) - 0.5
    stacked = np.append(seconds, seconds[:, -1:], axis=1)
    bottom.stackplot(edges, stacked, labels=phases, colors=theme.SERIES, step="post", linewidth=0, alpha=0.85)
    bottom.set_ylabel("seconds")
    _legend(bottom)
    _step_axis(bottom, log)


def draw_tail(figure: Figure, log: RunLog) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(5, 4))
    tail_SN, width = log.tail_by_step(), log.bin_tokens
    count = tail_SN.shape[1]
    if count > MOST_LINES:
        _heat_map(figure, left, log, tail_SN, width)
    else:
        for n in range(count):
            color = theme.BINS[(n + 1) * MOST_LINES // count - 1]
            _line(left, log, tail_SN[:, n], color, f"{bin_name(n * width, (n + 1) * width)} tokens")
        left.set_ylabel("p5 of acceptance")
        _tau_line(left, log)
        _legend(left)
    _step_axis(left, log)

    colors = {"holds": theme.ABOVE, "below": theme.BELOW, "undecided": theme.MUTED}
    for b in log.bins():
        color = colors[verdict(b, log.tau)]
        # Not error bars: a bootstrap interval need not hold its estimate.
        right.vlines(b.bin, b.interval_low, b.interval_high, color=color, linewidth=4, alpha=0.4)
        right.plot(b.bin, b.lower_bound, "o", color=color, markersize=5)
        right.plot(b.bin, b.upper_bound, "^", color=theme.MUTED, markersize=5, fillstyle="none")
    _tau_line(right, log)
    _bin_axis(right.xaxis, count, width, most=7)
    right.set_xlim(-0.6, max(count, 1) - 0.4)
    right.set_xlabel("sequence length, tokens")
    right.set_ylabel(f"p5 at step {log.steps[-1]}")
    right.grid(visible=False, axis="x")


def _heat_map(figure: Figure, ax: Axes, log: RunLog, tail_SN: FloatArray, width: int) -> None:
    from matplotlib.colors import LinearSegmentedColormap, TwoSlopeNorm

    count = tail_SN.shape[1]
    # The colours end where few cells lie beyond: one response alone in its bin would otherwise pale all others.
    low, high = np.nanpercentile(tail_SN, [2, 98]).tolist()
    # Each arm has a length of its own, so that noise about tau does not take the strongest colours.
    low, high = min(low, log.tau - 0.05), max(high, log.tau + 0.05)
    mesh = ax.pcolormesh(
        np.append(log.steps, log.steps[-1] + 1) - 0.5,
        np.arange(count + 1) - 0.5,
        tail_SN.T,
        cmap=LinearSegmentedColormap.from_list("tail", [theme.BELOW, theme.NEUTRAL, theme.ABOVE]),
        norm=TwoSlopeNorm(log.tau, low, high),
        rasterized=True,
    )
    bar = figure.colorbar(mesh, ax=ax, pad=0.02, aspect=30, extend="both")
    bar.set_ticks([low, log.tau, high], labels=[f"{low:.2f}", f"τ {log.tau:g}", f"{high:.2f}"])
    bar.outline.set_visible(False)
    _bin_axis(ax.yaxis, count, width, most=10)
    ax.set_ylabel("sequence length, tokens")
    ax.grid(visible=False)


def draw_acceptance(figure: Figure, log: RunLog) -> None:
    left, right = figure.subplots(1, 2)
    fit, found = log.beta_tail(), log.histogram("histogram")
    edges = np.array(found.edges)
    _shares(left, log, found, log.histogram("histogram", 0), edges)
    found = log.histogram("log_histogram")
    distance = np.array(found.edges)
    drawn = distance.copy()
    drawn[0] = distance[1] / 3  # 0 has no place on a log scale
    _shares(right, log, found, log.histogram("log_histogram", 0), drawn)
    if fit:
        style = {"color": theme.SERIES[1], "linewidth": 1.6}
        label = f"Beta({fit.a:.2g}, {fit.b:.2g}) below {fit.cut:g}, KS {fit.ks:.3f}"
        left.stairs(_beta_shares(fit, edges), edges, label=label, **style)
        right.stairs(_beta_shares(fit, 1 - distance[::-1])[::-1], drawn, **style)
    left.set_xlabel("acceptance rate")
    _legend(left)
    right.set_xscale("log")
    right.set_xlabel("1 - acceptance rate (first bin: all below $10^{-6}$)")
    for ax in (left, right):
        ax.set_yscale("log")
        ax.yaxis.set_major_formatter(lambda share, _: f"{100 * share:g} %")
        ax.set_ylabel("share of tokens")


def _shares(ax: Axes, log: RunLog, last: Histogram, first: Histogram, edges: FloatArray) -> None:
    total = sum(last.counts)
    floor = 0.5 / total
    ax.stairs(
        np.array(last.counts) / total, edges, fill=True, baseline=floor, color=theme.SERIES[0], alpha=0.45,
        label=f"step {log.steps[-1]}",
    )  # fmt: skip
    if len(log.metrics) > 1:
        shares = np.array(first.counts) / sum(first.counts)
        ax.stairs(shares, edges, color=theme.MUTED, linewidth=1, label=f"step {log.steps[0]}", baseline=None)
    ax.set_ylim(floor, 2)


def _beta_shares(fit: BetaTail, edges: FloatArray) -> FloatArray:
    """Share of all tokens that the fit puts between rising ``edges`` of acceptance, one fewer than the edges."""
    return fit.fraction_in_tail * np.diff(special.betainc(fit.a, fit.b, np.clip(edges / fit.cut, 0, 1)))


def draw_correction(figure: Figure, log: RunLog) -> None:
    size, share, divergence = figure.subplots(1, 3)
    sizes = {"tokens": "ess_token", "sequences": "ess_sequence", "sequences, uncorrected": "ess_sequence_ratio"}
    lowest = 0.95
    for (label, key), color in zip(sizes.items(), (*theme.SERIES[:2], theme.MUTED), strict=True):
        values = log.series("correction", key)
        lowest = np.nanmin(values, initial=lowest)
        _line(size, log, values, color, label)
    size.set_ylim(lowest - 0.05 * (1 - lowest), 1 + 0.05 * (1 - lowest))
    size.set_ylabel("effective sample size, share")
    highest = 1.0
    shares = {"clipped": "clipped", "masked": "masked", "sequences dropped": "dropped_sequence"}
    for (label, key), color in zip(shares.items(), (*theme.SERIES[:2], theme.MUTED), strict=True):
        values = 100 * log.series("correction", f"{key}_fraction")
        highest = np.nanmax(values, initial=highest)
        _line(share, log, values, color, label)
    share.set_ylim(-0.03 * highest, 1.08 * highest)
    share.set_ylabel("share, %")
    for label, key, color in (("k1", "kl_k1", theme.SERIES[1]), ("k3", "kl_k3", theme.SERIES[0])):
        _line(divergence, log, log.series("correction", key), color, label)
    divergence.set_ylabel("KL(actor ‖ policy), nats per token")
    divergence.yaxis.set_major_formatter("{x:g}")
    for ax in (size, share, divergence):
        _legend(ax)
        _step_axis(ax, log)


def draw_schedule(figure: Figure, log: RunLog) -> None:
    start, schedule = log.schedules[0], log.schedules[-1]
    pages, share = figure.subplots(1, 2)
    longest = max([len(schedule.top_k) * schedule.bin_tokens, *(b.end for b in log.bins())])
    lengths = np.unique(np.linspace(1, longest, 2000).astype(np.int64))
    everything = lengths / schedule.page_size
    pages.plot(lengths, everything, color=theme.MUTED, linestyle="--", linewidth=1, label="whole cache")
    drawn = [(schedule, theme.SERIES[0], "read")]
    if start != schedule:
        drawn.append((start, theme.SERIES[1], "read at the start of the run"))
    for table, color, label in drawn:
        read = table.tokens_read(lengths)
        pages.plot(lengths, read / schedule.page_size, color=color, label=label)
        share.plot(lengths, 100 * read / lengths, color=color, label=label)
    pages.set_ylabel(f"pages of {schedule.page_size} tokens")
    share.set_ylabel("share of the cache, %")
    for ax in (pages, share):
        ax.set_xlim(0, longest)
        _from_zero(ax)
        ax.set_xlabel("sequence length, tokens")
        _legend(ax)


def draw_pages(figure: Figure, log: RunLog) -> None:
    ax = figure.subplots()
    width = log.schedules[0].bin_tokens
    seen = sorted({b.bin for index in range(len(log.metrics)) for b in log.bins(index)})
    shown = seen[:: -(-len(seen) // MOST_LINES)]
    for i, n in enumerate(shown):
        # The last length in the bin: the next token would begin a page of the bin after it.
        length = (n + 1) * width - log.schedules[0].page_size
        share = np.array([100 * s.tokens_read(length) / length for s in log.schedules])
        color = theme.BINS[(i + 1) * MOST_LINES // len(shown) - 1]
        _line(ax, log, share, color, f"{bin_name(n * width, (n + 1) * width)} tokens")
    ax.set_ylim(0, 105)
    ax.set_ylabel("share of the cache, %")
    _legend(ax)
    _step_axis(ax, log)


def _window(steps: int) -> int:
    return max(3, steps // 40)


def _rolling_mean(values: FloatArray, window: int) -> FloatArray:
    """Centred mean over the finite of ``window`` values, fewer at the ends; nan where there are none."""
    finite = np.isfinite(values)
    ones = np.ones(window)
    count = np.convolve(finite, ones, "same")
    total = np.convolve(np.where(finite, values, 0), ones, "same")
    return np.where(count, total / np.maximum(count, 1), np.nan)


def _line(ax: Axes, log: RunLog, values: FloatArray, color: str, label: str | None = None) -> None:
    if not np.isfinite(values).any():
        return
    if len(values) > UNSMOOTHED_STEPS:
        ax.plot(log.steps, values, color=color, linewidth=0.7, alpha=0.3)
        values = _rolling_mean(values, _window(len(values)))
    marker = "o" if len(values) <= 12 else None
    ax.plot(log.steps, values, color=color, label=label, linewidth=1.8, marker=marker, markersize=4)


def _tau_line(ax: Axes, log: RunLog) -> None:
    ax.axhline(log.tau, color=theme.INK, linewidth=1, linestyle=(0, (4, 3)))
    where = ax.get_yaxis_transform()
    ax.text(0.995, log.tau, f"τ {log.tau:g}", transform=where, ha="right", va="bottom", color=theme.INK, fontsize=8)


def _step_axis(ax: Axes, log: RunLog) -> None:
    ax.set_xlabel("step")
    if len(log.metrics) == 1:
        ax.set_xticks(log.steps)
        ax.set_xlim(log.steps[0] - 1, log.steps[0] + 1)
    else:
        ax.locator_params(axis="x", integer=True)
        ax.set_xlim(log.steps[0] - 0.5, log.steps[-1] + 0.5)


def _bin_axis(axis, count: int, width: int, most: int) -> None:
    every = max(-(-count // most), 1)
    ticks = range(0, count, every)
    axis.set_ticks(ticks, [bin_name(n * width, (n + 1) * width) for n in ticks])


def _from_zero(ax: Axes) -> None:
    ax.set_ylim(0, 1.05 * ax.get_ylim()[1])


def _legend(ax: Axes) -> None:
    """Above the axes, where it hides nothing; one line needs none."""
    if len(ax.get_legend_handles_labels()[1]) > 1:
        spacing = {"borderaxespad": 0.2, "columnspacing": 1.2, "handlelength": 1.4}
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, **spacing)
