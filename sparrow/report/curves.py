"""Curves by step: how a series of a run is drawn, which series there are, and one line on what each of them means.

One run has a colour for each series. With two runs, the second is dashed; in a panel with a single series, each run
has its own colour.

Shapes: S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from sparrow.report import theme
from sparrow.run.log import FloatArray, RunLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes

UNSMOOTHED_STEPS = 60  # longer runs also show a rolling mean, in bold
DASHES = ("-", (0, (4, 1.6)))  # line styles of the first and of the second run

Series = Callable[[RunLog], FloatArray]


@dataclass(frozen=True)
class Key:
    """One entry of a figure's legend."""

    label: str
    color: str  # on a light page
    dashed: bool = False


@dataclass(frozen=True)
class Panel:
    """Series that share an axis."""

    title: str
    meaning: str  # one line
    axis: str
    series: Callable[[RunLog], Mapping[str, FloatArray]]  # label -> [S]; nan where a run did not record it
    floor: float | None = None  # where the axis begins; if None, where the curves do
    at: Callable[[RunLog], NDArray[np.int64]] = attrgetter("steps")  # the steps of its series

    def draw(self, ax: Axes, logs: Sequence[RunLog]) -> None:
        """Draw the series of one run or two."""
        for log, label, color, dash in self._lines(logs):
            line(ax, self.at(log), self.series(log)[label], color, dash)
        ax.set_ylabel(self.axis)
        ax.yaxis.set_major_formatter("{x:g}")
        if self.floor is not None:
            headroom = self.floor + 1.06 * (ax.dataLim.y1 - self.floor)  # a flat curve has no margin of its own
            ax.set_ylim(self.floor, max(ax.get_ylim()[1], headroom, self.floor + 1e-9))
        step_axis(ax, [step for log in logs for step in self.at(log).tolist()])

    def keys(self, logs: Sequence[RunLog]) -> list[Key]:
        """The panel's legend. A single line needs none; the legend that tells two runs apart is above all figures."""
        labels = {label: Key(label, color) for _, label, color, _ in self._lines(logs)}
        return list(labels.values()) if len(labels) > 1 else []

    def recorded(self, logs: Sequence[RunLog]) -> bool:
        return bool(self._lines(logs))

    def _lines(self, logs: Sequence[RunLog]) -> list[tuple[RunLog, str, str, Any]]:
        by_run = {i: [k for k, v in self.series(log).items() if np.isfinite(v).any()] for i, log in enumerate(logs)}
        labels = list(dict.fromkeys(label for some in by_run.values() for label in some))
        colors = dict(zip(labels, (theme.SERIES * 9), strict=False))
        return [
            (logs[i], label, theme.SERIES[i] if len(labels) == 1 else colors[label], DASHES[i])
            for i, some in by_run.items()
            for label in some
        ]


def of(scale: float = 1, **keys: str) -> Callable[[RunLog], dict[str, FloatArray]]:
    """Series by label; each is found by its dotted name in ``metrics.jsonl`` and multiplied by ``scale``."""
    return lambda log: {label.replace("_", " "): scale * log.series(*at.split(".")) for label, at in keys.items()}


def _rewards(log: RunLog) -> dict[str, FloatArray]:
    sources = log.sources()
    return {"all": log.series("reward", "mean"), **{name: log.series("reward", "sources", name) for name in sources}}


def _seconds(log: RunLog) -> dict[str, FloatArray]:
    return {name: log.series("seconds", name) for name in log.metrics[-1]["seconds"]}


def _throughput(log: RunLog) -> dict[str, FloatArray]:
    return {"rollout": log.throughput()}


def _evaluated(log: RunLog) -> dict[str, FloatArray]:
    return {name: 100 * log.scores(name, "mean", "value") for name in log.benchmarks()}


def _evaluated_length(log: RunLog) -> dict[str, FloatArray]:
    return {name: log.scores(name, "tokens") for name in log.benchmarks()}


PANELS: dict[str, dict[str, Panel]] = {
    "Reward and responses": {
        "reward": Panel(
            "Reward", "Mean reward of a step's responses; by dataset where there are several.", "reward", _rewards
        ),
        "length": Panel(
            "Response length",
            "Tokens of the step's responses: mean, and the longest.",
            "tokens",
            of(mean="response.mean", longest="response.max"),
            0,
        ),
        "ended": Panel(
            "Ended",
            "Share of responses that ended by themselves and were not cut at the longest length.",
            "%",
            of(100, ended="response.ended_fraction"),
        ),
        "level": Panel(
            "Prompts of equal rewards",
            "Share of prompts whose responses all earned the same, which teaches nothing.",
            "%",
            of(100, level="advantage.zero_variance_fraction"),
            0,
        ),
    },
    "Evaluation": {
        "eval": Panel(
            "Benchmarks",
            "Mean reward of the dense policy's responses (mean@k), by benchmark, before the first step at 0.",
            "%",
            _evaluated,
            at=attrgetter("evaluated"),
        ),
        "eval-length": Panel(
            "Response length on benchmarks",
            "Mean tokens of these responses.",
            "tokens",
            _evaluated_length,
            0,
            attrgetter("evaluated"),
        ),
    },
    "Optimisation": {
        "entropy": Panel(
            "Entropy",
            "Mean entropy of the dense policy's distribution of the next token.",
            "nats per token",
            of(entropy="entropy"),
            0,
        ),
        "loss": Panel(
            "Loss",
            "The clipped policy loss that the update minimised, normalised as the run has it.",
            "loss",
            of(loss="loss.loss"),
        ),
        "gradient": Panel(
            "Gradient norm",
            "Euclidean norm of the policy's gradient, before it is clipped.",
            "norm",
            of(norm="loss.grad_norm"),
            0,
        ),
        "clipped": Panel(
            "Clipped tokens",
            "Share of tokens where the policy had moved so far that the lower or upper clip held it.",
            "%",
            of(100, lower="loss.clip_low_fraction", upper="loss.clip_high_fraction"),
            0,
        ),
        "distil": Panel(
            "Distillation",
            "KL(dense ‖ sparse) of the adapter on the tokens it was trained on.",
            "nats per token",
            of(kl="distill.kl"),
            0,
        ),
    },
    "Importance correction": {
        "ess": Panel(
            "Effective sample size",
            "How many tokens (or sequences) of equal weight the weighted ones are worth, as a share.",
            "share",
            of(
                tokens="correction.ess_token",
                sequences="correction.ess_sequence",
                sequences_uncorrected="correction.ess_sequence_ratio",
            ),
            0,
        ),
        "weights": Panel(
            "Cut and left out",
            "Share of tokens whose weight was cut (clipped) or that were left out (masked), and of "
            "sequences left out (dropped).",
            "%",
            of(
                100,
                clipped="correction.clipped_fraction",
                masked="correction.masked_fraction",
                dropped="correction.dropped_sequence_fraction",
            ),
            0,
        ),
        "kl": Panel(
            "KL(actor ‖ policy)",
            "How far the actor is from the policy on its own samples, by the estimators k1 "
            "(mean of log q/p) and k3 (no negative terms).",
            "nats per token",
            of(k1="correction.kl_k1", k3="correction.kl_k3"),
        ),
    },
    "Speed": {
        "throughput": Panel(
            "Rollout throughput",
            "Response tokens per second of the rollout phase, of all engines together.",
            "tokens/s",
            _throughput,
            0,
        ),
        "seconds": Panel(
            "Time by phase",
            "Seconds of each phase of a step; sync hands the weights to the engine.",
            "seconds",
            _seconds,
            0,
        ),
        "kv": Panel(
            "KV read",
            "Share of the cached tokens that decoding read; dense decoding reads all.",
            "%",
            of(100, read="kv.read_fraction"),
            0,
        ),
        "dial": Panel(
            "Unverified tokens",
            "Share of the response tokens that mode auto sampled without verification.",
            "%",
            of(100, unverified="dial.unverified_fraction"),
            0,
        ),
        "cycle": Panel(
            "Tokens per cycle",
            "Tokens that one verification of a sequence yields: accepted drafts and one more.",
            "tokens",
            of(tokens="drafts.tokens_per_cycle"),
            0,
        ),
    },
}
"""The panels, by heading and name."""


def line(ax: Axes, steps: NDArray[np.int64], values: FloatArray, color: str, dash: Any = "-") -> None:
    """Draw one series ``[S]`` by step; a long one also gets its rolling mean, in bold over the series itself."""
    if not np.isfinite(values).any():
        return
    if len(values) > UNSMOOTHED_STEPS:
        ax.plot(steps, values, color=color, linewidth=0.6, alpha=0.3)
        values = _rolling_mean(values, _window(len(values)))
    marker = "o" if len(values) <= 12 else None
    ax.plot(steps, values, color=color, linewidth=1.7, linestyle=dash, marker=marker, markersize=3.5)


def step_axis(ax: Axes, steps: Sequence[int]) -> None:
    """Label the axis with whole steps, from the first step of all runs to the last."""
    ax.set_xlabel("step")
    first, last = min(steps), max(steps)
    if first == last:
        ax.set_xticks([first])
        ax.set_xlim(first - 1, first + 1)
    else:
        ax.locator_params(axis="x", integer=True, nbins=7)
        ax.set_xlim(first - 0.5, last + 0.5)


def _window(steps: int) -> int:
    return max(3, steps // 40)


def _rolling_mean(values: FloatArray, window: int) -> FloatArray:
    """Centred mean of the finite values among ``window`` values (fewer at the ends); nan where none is finite."""
    finite = np.isfinite(values)
    ones = np.ones(window)
    count = np.convolve(finite, ones, "same")
    total = np.convolve(np.where(finite, values, 0), ones, "same")
    return np.where(count, total / np.maximum(count, 1), np.nan)
