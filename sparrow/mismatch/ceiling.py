"""The ceiling of p5: the p5 that dense rollouts have.

The ceiling is below 1 because the sampler and the trainer round differently and because top-n lists
do not cover the vocabulary. To isolate the effect of sparsity, a p5 must be compared with that of
dense rollouts from the same engine and trainer, with the same n and at the same lengths.

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

# maximum number of responses sampled densely when nothing else measures the ceiling
CEILING_RESPONSES = 64

ENOUGH = 8  # minimum number of responses in a bin for a reliable ceiling
RESOLVED = 1e-6  # a remaining mass below this is only float32 rounding
LEAST = -100.0  # the log-prob given to impossible tokens, including padding


class Ceiling:
    """The tail of dense rollouts by length, as last measured."""

    def __init__(self) -> None:
        # maps the (start, end) of a bin to its statistics
        self._bins: dict[tuple[int, int], dict[str, float]] = {}

    def measure(self, dense: MismatchReport, up_to: float = float("inf")) -> None:
        """Record the bins of a report that end at or before ``up_to`` tokens, the length up to
        which the actor read everything.

        A measurement from fewer than ``ENOUGH`` responses does not replace one from more responses.
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
        """Give each bin the ceiling of the measured bin nearest in length, and return the bins;
        unchanged if nothing has been measured.

        Bins measured from fewer than ``ENOUGH`` responses are used only if there are no others.
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
        """Return the report with a ceiling added to every p5."""
        return replace(report, bins=self.beside(report.bins))

    def __bool__(self) -> bool:
        """Return whether anything has been measured."""
        return bool(self._bins)

    def state(self) -> list[dict[str, Any]]:
        """Return the state for ``load``, as plain JSON types."""
        return [
            {
                "start": start,
                "end": end,
                **{name: None if isnan(x) else x for name, x in stats.items()},
            }
            for (start, end), stats in self._bins.items()
        ]

    def load(self, state: Iterable[Mapping[str, Any]]) -> None:
        """Add the bins that ``state`` returned."""
        for row in state:
            stats = {
                name: float("nan") if x is None else x
                for name, x in row.items()
                if name not in ("start", "end")
            }
            self._bins[row["start"], row["end"]] = stats


def engine_noise(sampled_Tn: ArrayLike, scored_Tn: ArrayLike) -> FloatArray:
    """Measure how much a sampler's numerics shift log-probs, float64 ``[T, n + 1]``. The last
    column is the shift of the total mass outside the list.

    Args:
        sampled_Tn: the sampler's natural log-probs of the listed tokens; -inf is padding.
        scored_Tn: the scorer's log-probs of the same tokens, in the same contexts and under the
            same schedule.
    """
    return _with_rest(sampled_Tn) - _with_rest(scored_Tn)


def with_noise(scored_Tn: ArrayLike, noise: FloatArray) -> FloatArray:
    """Convert log-probs that were scored under any schedule to the log-probs that the sampler would
    have computed, float64 ``[T, n]``.

    The noise is assumed to be the same under every schedule and to act on logits, so the
    probabilities are renormalised.
    """
    disturbed = _with_rest(scored_Tn) + noise
    normalized = disturbed - np.logaddexp.reduce(disturbed, axis=-1, keepdims=True)
    return normalized[..., :-1]


def _with_rest(logprobs_Tn: ArrayLike) -> FloatArray:
    """Append the log of the remaining mass to log-probs as a column. The mass is taken to be at
    least the resolution of float32 log-probs.
    """
    logprobs = np.maximum(np.asarray(logprobs_Tn, np.float64), LEAST)
    rest = 1 - np.exp(logprobs).sum(axis=-1, keepdims=True)
    return np.concatenate([logprobs, np.log(np.maximum(rest, RESOLVED))], axis=-1)
