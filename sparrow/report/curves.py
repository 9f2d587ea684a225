"""Draw the series that a run logs at every step, as explained in docs/run-directory.md.

Shapes: S steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sparrow.report import theme
from sparrow.run.log import FloatArray, RunLog

if TYPE_CHECKING:
    from matplotlib.axes import Axes

RUNS = "AB"  # letters that name the two runs
DASHES = ("-", (0, (2.2, 1.4)))  # line styles for the runs
# markers for the runs; the second run's markers are hollow, so that its dashes stay visible
MARKERS = ("o", "D")
MARKS = 12  # maximum number of markers per curve
UNSMOOTHED_STEPS = 60  # longer runs also get a rolling mean, in bold


class Panel(NamedTuple):
    """A set of series that share an axis. A series has the same colour in both runs, and is dashed
    in the second.
    """

    title: str
    axis: str
    # label -> values [S]; nan where nothing was recorded
    series: Callable[[RunLog], Mapping[str, FloatArray]]
    floor: float | None = None  # lower end of the axis; None to fit the curves
    at: Callable[[RunLog], NDArray[np.int64]] = attrgetter("steps")  # the steps of the series
    meaning: str = ""  # a caption, if title and labels aren't enough

    def draw(self, ax: Axes, logs: Sequence[RunLog]) -> None:
        recorded = self.recorded(logs)
        labels = list(dict.fromkeys(label for _, label in recorded))
        for i, label in recorded:
            color = theme.SERIES[labels.index(label) % len(theme.SERIES)]
            named = label if len(logs) == 1 else f"{label}, run {RUNS[i]}"
            values = self.series(logs[i])[label]
            line(ax, self.at(logs[i]), values, color, i, named, marked=len(logs) > 1)
        ax.set_ylabel(self.axis)
        ax.yaxis.set_major_formatter("{x:g}")
        if self.floor is not None:
            ax.set_ylim(bottom=self.floor)
        step_axis(ax)
        if len(recorded) > 1:
            ax.legend(handlelength=3.2)

    def recorded(self, logs: Sequence[RunLog]) -> list[tuple[int, str]]:
        """List the recorded series as (run index, label) pairs."""
        return [
            (i, k)
            for i, log in enumerate(logs)
            for k, v in self.series(log).items()
            if np.isfinite(v).any()
        ]


def of(scale: float = 1, **keys: str) -> Callable[[RunLog], dict[str, FloatArray]]:
    """Build a function that returns a run's series by label. Values are multiplied by ``scale``.
    ``keys`` maps labels to dotted series names in ``metrics.jsonl``.
    """
    return lambda log: {
        label.replace("_", " "): scale * log.series(*at.split(".")) for label, at in keys.items()
    }


def _rewards(log: RunLog) -> dict[str, FloatArray]:
    sources = log.sources()
    return {
        "all responses": log.series("reward", "mean"),
        **{name: log.series("reward", "sources", name) for name in sources},
    }


def _seconds(log: RunLog) -> dict[str, FloatArray]:
    return {name: log.series("seconds", name) for name in log.metrics[-1]["seconds"]}


def _throughput(log: RunLog) -> dict[str, FloatArray]:
    return {"rollout": log.throughput()}


def _evaluated(scale: float, *keys: str) -> Callable[[RunLog], dict[str, FloatArray]]:
    return lambda log: {name: scale * log.scores(name, *keys) for name in log.benchmarks()}


SIZES = of(
    tokens="correction.ess_token",
    sequences="correction.ess_sequence",
    sequences_uncorrected="correction.ess_sequence_ratio",
)
LEFT_OUT = of(
    100,
    clipped="correction.clipped_fraction",
    masked="correction.masked_fraction",
    dropped="correction.dropped_sequence_fraction",
)

PANELS: dict[str, list[Panel]] = {
    "Reward and responses": [
        Panel(
            "Reward",
            "reward",
            _rewards,
            meaning=(
                "mean over the responses sampled in a step, including those that were replaced; "
                "with several datasets, also the mean of each"
            ),
        ),
        Panel("Response length", "tokens", of(mean="response.mean", longest="response.max"), 0),
        Panel("Responses that ended by themselves", "%", of(100, ended="response.ended_fraction")),
        Panel(
            "Prompts whose rewards are all equal",
            "%",
            of(100, prompts_without_advantage="advantage.zero_variance_fraction"),
            0,
            meaning="such prompts teach nothing, because no response is better than another",
        ),
    ],
    "Evaluation": [
        Panel(
            "Benchmarks, mean@k", "%", _evaluated(100, "mean", "value"), at=attrgetter("evaluated")
        ),
        Panel(
            "Response length on benchmarks",
            "tokens",
            _evaluated(1, "tokens"),
            0,
            attrgetter("evaluated"),
        ),
    ],
    "Optimisation": [
        Panel("Entropy", "nats per token", of(entropy="entropy"), 0),
        Panel("Loss", "loss", of(loss="loss.loss")),
        Panel("Gradient norm", "norm", of(norm="loss.grad_norm"), 0),
        Panel(
            "Clipped tokens",
            "%",
            of(100, lower="loss.clip_low_fraction", upper="loss.clip_high_fraction"),
            0,
        ),
        Panel("KL(dense ‖ sparse) of the adapter", "nats per token", of(kl="distill.kl"), 0),
    ],
    "Importance correction": [
        Panel("Effective sample size", "share", SIZES, 0),
        Panel("Tokens clipped, tokens masked, sequences dropped", "%", LEFT_OUT, 0),
        Panel(
            "KL(actor ‖ policy)", "nats per token", of(k1="correction.kl_k1", k3="correction.kl_k3")
        ),
    ],
    "Speed": [
        Panel("Rollout throughput", "tokens/s", _throughput, 0),
        Panel("Time by phase", "seconds", _seconds, 0),
        Panel("Share of the KV cache read", "%", of(100, read="kv.read_fraction"), 0),
        Panel("Unverified tokens", "%", of(100, unverified="dial.unverified_fraction"), 0),
        Panel("Tokens per cycle", "tokens", of(tokens="drafts.tokens_per_cycle"), 0),
        Panel(
            "Acceptance of drafts",
            "acceptance rate",
            of(mean="drafts.acceptance", p5="drafts.p5"),
            meaning=(
                "probability that the dense policy accepts a draft; "
                "exact, because verification has both distributions"
            ),
        ),
    ],
}


def line(
    ax: Axes,
    steps: NDArray[np.int64],
    values: FloatArray,
    color: str,
    run: int = 0,
    label: str | None = None,
    marked: bool = False,
) -> None:
    """Draw one series ``[S]`` over steps. ``run`` is the index of the run, which sets the line
    style.

    Long series also get a rolling mean, in bold. Short or ``marked`` series get markers.
    """
    if len(values) > UNSMOOTHED_STEPS:
        ax.plot(steps, values, color=color, linewidth=0.6, alpha=0.3)
        values = _rolling_mean(values, max(3, len(values) // 40))
    marker = MARKERS[run] if marked or len(values) <= MARKS else None
    ax.plot(
        steps,
        values,
        color=color,
        linewidth=1.7,
        linestyle=DASHES[run],
        marker=marker,
        markersize=5 if run else 3.5,
        markerfacecolor="none" if run else color,
        markevery=-(-len(values) // MARKS),
        label=label,
    )


def step_axis(ax: Axes) -> None:
    ax.set_xlabel("step")
    ax.locator_params(axis="x", integer=True, nbins=7)


def _rolling_mean(values: FloatArray, window: int) -> FloatArray:
    """Average the finite values in a centred window, which is cut off at the ends of the series.
    The average is nan if the window has no finite values.
    """
    finite = np.isfinite(values)
    ones = np.ones(window)
    count = np.convolve(finite, ones, "same")
    total = np.convolve(np.where(finite, values, 0), ones, "same")
    return np.where(count, total / np.maximum(count, 1), np.nan)
