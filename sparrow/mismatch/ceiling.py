"""The p5 of dense rollouts: the ceiling of p5.

It is below 1, since sampler and trainer round differently and lists of likely tokens leave
something out. A p5 shows the effect of sparsity only when it is compared with that of dense
rollouts from the same engines, with the same lists and at the same lengths.

Shapes: T tokens, n entries of the actor's top-n list.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import isnan
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sparrow.mismatch.bootstrap import BinMismatch, MismatchReport
from sparrow.mismatch.tail import FloatArray

# the most responses that are sampled densely where nothing else gives the ceiling; never more than
# are measured
CEILING_RESPONSES = 64

ENOUGH = 8  # the fewest responses that a bin's ceiling should come from
RESOLVED = 1e-6  # a left-over mass below this is float32 rounding
LEAST = -100.0  # the log-prob given to impossible tokens, including padding


class Ceiling:
    """The tail of dense rollouts by length, as last measured."""

    def __init__(self) -> None:
        # by the lengths at which bins start and end
        self._bins: dict[tuple[int, int], dict[str, float]] = {}

    def measure(self, dense: MismatchReport, up_to: float = float("inf")) -> None:
        """Take over the bins of a report that end at ``up_to`` tokens or before; up to there the
        actor read everything.

        A measurement from fewer than ``ENOUGH`` responses does not replace one from more.
        """
        for b in dense.bins:
            if b.end > up_to:
                continue
            before = self._bins.get((b.start, b.end))
            if before is not None and b.n_sequences < min(before["n_sequences"], ENOUGH):
                continue
            self._bins[b.start, b.end] = {
                "ceiling": b.lower_bound,
                "ceiling_low": b.interval_low,
                "ceiling_high": b.interval_high,
                "n_sequences": b.n_sequences,
            }

    def beside(self, bins: Iterable[BinMismatch]) -> tuple[BinMismatch, ...]:
        """The bins, each with the ceiling of the measured lengths nearest to its own; unchanged if
        nothing is measured.

        Lengths that fewer than ``ENOUGH`` responses reached are used only if there are no others.
        """
        reached = {at: stats for at, stats in self._bins.items() if stats["n_sequences"] >= ENOUGH}
        measured = reached or self._bins
        if not measured:
            return tuple(bins)

        def nearest(b: BinMismatch) -> dict[str, Any]:
            at = min(measured, key=lambda at: abs(sum(at) - b.start - b.end))
            return {name: value for name, value in measured[at].items() if name != "n_sequences"}

        return tuple(replace(b, **nearest(b)) for b in bins)

    def on(self, report: MismatchReport) -> MismatchReport:
        """The report with the ceiling beside every p5."""
        return replace(report, bins=self.beside(report.bins))

    def __bool__(self) -> bool:
        """True once anything has been measured."""
        return bool(self._bins)

    def state(self) -> list[dict[str, Any]]:
        """The state that ``load`` takes; it may go through JSON in between."""
        return [
            {
                "start": start,
                "end": end,
                **{name: None if isnan(x) else x for name, x in stats.items()},
            }
            for (start, end), stats in self._bins.items()
        ]

    def load(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Add the bins that ``state`` gave."""
        for row in state:
            stats = {
                name: float("nan") if x is None else x
                for name, x in row.items()
                if name not in ("start", "end")
            }
            self._bins[row["start"], row["end"]] = stats


def engine_noise(sampled_Tn: ArrayLike, scored_Tn: ArrayLike) -> FloatArray:
    """Measure by how much a sampler's numerics shift log-probs, float64 ``[T, n + 1]``; the last
    column is for all other tokens.

    Args:
        sampled_Tn: natural log-probs of the listed tokens from the sampler; -inf is padding.
        scored_Tn: log-probs of the same tokens in the same contexts under the same schedule from
            the scorer.
    """
    return _with_rest(sampled_Tn) - _with_rest(scored_Tn)


def with_noise(scored_Tn: ArrayLike, noise: FloatArray) -> FloatArray:
    """Turn scored log-probs, under any schedule, into those that the sampler would have had,
    float64 ``[T, n]``.

    The noise is assumed to be the same under every schedule. It is noise of logits, so
    probabilities are normalized again.
    """
    disturbed = _with_rest(scored_Tn) + noise
    normalized = disturbed - np.logaddexp.reduce(disturbed, axis=-1, keepdims=True)
    return normalized[..., :-1]


def _with_rest(logprobs_Tn: ArrayLike) -> FloatArray:
    """Log-probs and the log of the left-over mass, which is at least what float32 log-probs
    resolve.
    """
    logprobs = np.maximum(np.asarray(logprobs_Tn, np.float64), LEAST)
    rest = 1 - np.exp(logprobs).sum(axis=-1, keepdims=True)
    return np.concatenate([logprobs, np.log(np.maximum(rest, RESOLVED))], axis=-1)
