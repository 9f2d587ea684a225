"""The p5 ceiling: the p5 you get with dense rollouts.

It's below 1 because the sampler and the trainer round differently, and because top-n lists don't
cover the vocabulary. To isolate the effect of sparsity, compare p5 with that of dense rollouts from
the same engine and trainer, with the same n and at the same lengths.

Shapes: T tokens, n entries in the actor's top-n list.
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

# maximum number of responses to sample densely if the ceiling can't be measured any other way
CEILING_RESPONSES = 64

ENOUGH = 8  # minimum number of responses per bin for a reliable ceiling
RESOLVED = 1e-6  # leftover mass below this is just float32 rounding
LEAST = -100.0  # log-prob of impossible tokens, including padding


class Ceiling:
    """The tail of dense rollouts, as last measured in each length bin."""

    def __init__(self) -> None:
        # (start, end) of a bin -> its statistics
        self._bins: dict[tuple[int, int], dict[str, float]] = {}

    def measure(self, dense: MismatchReport, up_to: float = float("inf")) -> None:
        """Record a report's bins. Bins that end after ``up_to`` tokens are left out, because the
        actor is no longer dense there.

        A measurement from fewer than ``ENOUGH`` responses doesn't replace one from more responses.
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
        """Return the bins with ceilings filled in. Each bin gets the ceiling of the measured bin
        closest in length. If nothing has been measured, the bins are returned unchanged.

        Bins measured from fewer than ``ENOUGH`` responses are only used if there are no others.
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
        """Return the report with ceilings filled in for all bins."""
        return replace(report, bins=self.beside(report.bins))

    def __bool__(self) -> bool:
        """True if anything has been measured."""
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
        """Add the bins returned by ``state``."""
        for row in state:
            stats = {
                name: float("nan") if x is None else x
                for name, x in row.items()
                if name not in ("start", "end")
            }
            self._bins[row["start"], row["end"]] = stats


def engine_noise(sampled_Tn: ArrayLike, scored_Tn: ArrayLike) -> FloatArray:
    """Measure how much the sampler's numerics shift log-probs, float64 ``[T, n + 1]``. The last
    column is for the total mass outside the list.

    Args:
        sampled_Tn: the sampler's natural log-probs of the listed tokens; -inf is padding.
        scored_Tn: the scorer's log-probs of the same tokens, with the same contexts and schedule.
    """
    return _with_rest(sampled_Tn) - _with_rest(scored_Tn)


def with_noise(scored_Tn: ArrayLike, noise: FloatArray) -> FloatArray:
    """Estimate the log-probs that the sampler would have computed, float64 ``[T, n]``.
    ``scored_Tn`` has the scorer's log-probs, under any schedule.

    The numerical noise is assumed not to depend on the schedule. The noise is added to the logits,
    so the probabilities are renormalised.
    """
    disturbed = _with_rest(scored_Tn) + noise
    normalized = disturbed - np.logaddexp.reduce(disturbed, axis=-1, keepdims=True)
    return normalized[..., :-1]


def _with_rest(logprobs_Tn: ArrayLike) -> FloatArray:
    """Append a column with the log of the leftover mass, clamped to the resolution of float32
    log-probs.
    """
    logprobs = np.maximum(np.asarray(logprobs_Tn, np.float64), LEAST)
    rest = 1 - np.exp(logprobs).sum(axis=-1, keepdims=True)
    return np.concatenate([logprobs, np.log(np.maximum(rest, RESOLVED))], axis=-1)
