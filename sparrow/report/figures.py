"""The figures of a run. Loads matplotlib when one is rendered.

Shapes: S steps, N length bins.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import special

from sparrow.mismatch import BetaTail
from sparrow.report import theme
from sparrow.report.summary import bin_name
from sparrow.run.log import FloatArray, RunLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HALF, WIDE = 6.4, 13.2  # widths of figures in inches: two to a row of the page, or one

UNSMOOTHED_STEPS = 60  # longer runs also show a rolling mean, in bold


Draw = Callable[["Figure", RunLog], None]


def plots(log: RunLog) -> list[str]:
    """Names of the figures that a run gives rise to; what they show is explained in ``page.html``."""
    return [name for name in PLOTS if name != "pages" or len(set(log.schedules)) > 1]


def render(name: str, log: RunLog) -> bytes:
    """The figure as PNG; the same run gives the same bytes."""
    import matplotlib
    from matplotlib.figure import Figure

    size, draw = PLOTS[name]
    with matplotlib.rc_context(theme.MATPLOTLIB):
        figure = Figure(figsize=size, layout="constrained")
        draw(figure, log)
        png = io.BytesIO()
        figure.savefig(png, dpi=160)
    return png.getvalue()


def draw_reward(figure: Figure, log: RunLog) -> None:
    sources = {name: ("reward", "sources", name) for name in log.sources()}
    rewards = {"all": ("reward", "mean"), **sources}
    lengths = {"mean": ("response", "mean"), "longest": ("response", "max")}
    axes = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    _panels(axes, log, {"reward": (1, rewards), "response tokens": (1, lengths)})


def draw_cost(figure: Figure, log: RunLog) -> None:
    phases = {name: ("seconds", name) for name in log.metrics[-1]["seconds"]}
    axes = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    _panels(axes, log, {"KV read, %": (100, {"read": ("kv", "read_fraction")}), "seconds": (1, phases)})
    axes[0].set_ylim(0, 105)


def draw_correction(figure: Figure, log: RunLog) -> None:
    sizes = {"tokens": "ess_token", "sequences": "ess_sequence", "sequences, uncorrected": "ess_sequence_ratio"}
    shares = {"clipped": "clipped_fraction", "masked": "masked_fraction", "dropped": "dropped_sequence_fraction"}
    divergences = {"k1": "kl_k1", "k3": "kl_k3"}
    size, share, divergence = (
        {label: ("correction", key) for label, key in keys.items()} for keys in (sizes, shares, divergences)
    )
    names = "effective sample size, share", "share, %", "KL(actor ‖ policy), nats per token"
    _panels(figure.subplots(1, 3), log, dict(zip(names, ((1, size), (100, share), (1, divergence)), strict=True)))


def _panels(axes: Any, log: RunLog, panels: Mapping[str, tuple[float, Mapping[str, Sequence[str]]]]) -> None:
    """Series by step; each panel, by its axis label, has a scale and the keys of its series by their label."""
    for ax, (name, (scale, series)) in zip(axes, panels.items(), strict=True):
        for (label, keys), colour in zip(series.items(), (*theme.SERIES, theme.MUTED), strict=False):
            _line(ax, log, scale * log.series(*keys), colour, label)
        ax.set_ylabel(name)
        ax.yaxis.set_major_formatter("{x:g}")
        _legend(ax)
        _step_axis(ax, log)


def draw_tail(figure: Figure, log: RunLog) -> None:
    left, right = figure.subplots(1, 2, width_ratios=(5, 4))
    tail_SN, width = log.tail_by_step(), log.bin_tokens
    count = tail_SN.shape[1]
    names = [bin_name(n * width, (n + 1) * width) for n in range(count)]
    for n, colour in enumerate(_by_length(count)):
        _line(left, log, tail_SN[:, n], colour, names[n])
    left.set_ylabel("p5 of acceptance")
    _tau_line(left, log)
    _legend(left)
    _step_axis(left, log)

    colors = {"holds": theme.ABOVE, "below": theme.BELOW, "undecided": theme.MUTED}
    for b in log.bins():
        color = colors[b.verdict(log.tau)]
        # Not error bars: a bootstrap interval need not hold its estimate.
        right.vlines(b.bin, b.interval_low, b.interval_high, color=color, linewidth=4, alpha=0.4)
        right.plot(b.bin, b.lower_bound, "o", color=color, markersize=5)
        right.plot(b.bin, b.upper_bound, "^", color=theme.MUTED, markersize=5, fillstyle="none")
    _tau_line(right, log)
    every = max(-(-count // 7), 1)
    right.set_xticks(range(0, count, every), names[::every])
    right.set_xlim(-0.6, max(count, 1) - 0.4)
    right.set_xlabel("sequence length, tokens")
    right.set_ylabel(f"p5 at step {log.steps[-1]}")
    right.grid(visible=False, axis="x")


def draw_acceptance(figure: Figure, log: RunLog) -> None:
    left, right = figure.subplots(1, 2)
    fit, edges = log.beta_tail(), np.array(log.histogram("histogram").edges)
    distance = np.array(log.histogram("log_histogram").edges)
    drawn = np.append(distance[1] / 3, distance[1:])  # 0 has no place on a log scale
    _shares(left, log, "histogram", edges)
    _shares(right, log, "log_histogram", drawn)
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


def _shares(ax: Axes, log: RunLog, name: str, edges: FloatArray) -> None:
    last, first = (np.array(log.histogram(name, index).counts) for index in (-1, 0))
    floor = 0.5 / last.sum()
    style = {"fill": True, "baseline": floor, "color": theme.SERIES[0], "alpha": 0.45}
    ax.stairs(last / last.sum(), edges, label=f"step {log.steps[-1]}", **style)
    if len(log.metrics) > 1:
        label = f"step {log.steps[0]}"
        ax.stairs(first / first.sum(), edges, color=theme.MUTED, linewidth=1, label=label, baseline=None)
    ax.set_ylim(floor, 2)


def _beta_shares(fit: BetaTail, edges: FloatArray) -> FloatArray:
    """Share of all tokens that the fit puts between rising ``edges`` of acceptance, one fewer than the edges."""
    return fit.fraction_in_tail * np.diff(special.betainc(fit.a, fit.b, np.clip(edges / fit.cut, 0, 1)))


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
    bins = sorted({b.bin for index in range(len(log.metrics)) for b in log.bins(index)})
    for n, colour in zip(bins, _by_length(len(bins)), strict=True):
        # The last length in the bin: the next token would begin a page of the bin after it.
        length = (n + 1) * width - log.schedules[0].page_size
        share = np.array([100 * s.tokens_read(length) / length for s in log.schedules])
        _line(ax, log, share, colour, bin_name(n * width, (n + 1) * width))
    ax.set_ylim(0, 105)
    ax.set_ylabel("share of the cache, %")
    _legend(ax)
    _step_axis(ax, log)


PLOTS: dict[str, tuple[tuple[float, float], Draw]] = {
    "reward": ((HALF, 4.2), draw_reward),
    "cost": ((HALF, 4.2), draw_cost),
    "tail": ((WIDE, 4.2), draw_tail),
    "acceptance": ((WIDE, 3.8), draw_acceptance),
    "correction": ((WIDE, 3.5), draw_correction),
    "schedule": ((WIDE, 3.5), draw_schedule),
    "pages": ((WIDE, 3.5), draw_pages),
}
"""By name: size in inches, and how it is drawn."""


def _by_length(count: int) -> FloatArray:
    """Colours for so many length bins, from the shortest to the longest."""
    from matplotlib.colors import LinearSegmentedColormap

    return LinearSegmentedColormap.from_list("length", theme.BINS)(np.linspace(0, 1, count))


def _window(steps: int) -> int:
    return max(3, steps // 40)


def _rolling_mean(values: FloatArray, window: int) -> FloatArray:
    """Centred mean over the finite of ``window`` values, fewer at the ends; nan where there are none."""
    finite = np.isfinite(values)
    ones = np.ones(window)
    count = np.convolve(finite, ones, "same")
    total = np.convolve(np.where(finite, values, 0), ones, "same")
    return np.where(count, total / np.maximum(count, 1), np.nan)


def _line(ax: Axes, log: RunLog, values: FloatArray, color: Any, label: str | None = None) -> None:
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
    if (place := ax.get_subplotspec()) and place.is_last_row():
        ax.set_xlabel("step")
    if len(log.metrics) == 1:
        ax.set_xticks(log.steps)
        ax.set_xlim(log.steps[0] - 1, log.steps[0] + 1)
    else:
        ax.locator_params(axis="x", integer=True)
        ax.set_xlim(log.steps[0] - 0.5, log.steps[-1] + 0.5)


def _from_zero(ax: Axes) -> None:
    ax.set_ylim(0, 1.05 * ax.get_ylim()[1])


def _legend(ax: Axes) -> None:
    """Above the axes, where it hides nothing; one line needs none."""
    if len(ax.get_legend_handles_labels()[1]) > 1:
        spacing = {"borderaxespad": 0.2, "columnspacing": 1.2, "handlelength": 1.4}
        ax.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4, **spacing)
