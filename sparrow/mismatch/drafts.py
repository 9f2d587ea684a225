"""Draft acceptance by length, stored as counts. Counts are small enough to stay on the device, and
can be summed over engines and steps.

A draft's acceptance, sum_v min(p(v), q(v)), is exact, since verification has both distributions.
Drafts read a cache written by the dense policy. In lossy rollouts, the actor reads its own cache
instead, and acceptance is slightly lower.

Shapes: T drafts, N length bins (the first starts at length 0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sparrow.mismatch.tail import FloatArray, IntArray, check_acceptance, check_percentile

BUCKETS = 1000
"""Acceptance is counted in this many equal buckets of [0, 1]; the last one includes 1. Percentiles
are accurate to 1 / BUCKETS.
"""


@dataclass(frozen=True)
class DraftBin:
    """Drafts at lengths in [start, end)."""

    start: int
    end: int
    drafts: int
    mean: float
    p5: float


@dataclass(frozen=True, eq=False)
class DraftAcceptance:
    """Draft counts by length and acceptance."""

    bin_tokens: int
    counts: IntArray  # [N, BUCKETS]
    sums: FloatArray  # [N], summed acceptance rates

    @classmethod
    def empty(cls) -> DraftAcceptance:
        """Return empty counts, which can be added to counts with any bin width."""
        return cls(0, np.zeros((0, BUCKETS), np.int64), np.zeros(0))

    @classmethod
    def of(cls, alpha: ArrayLike, position: ArrayLike, bin_tokens: int) -> DraftAcceptance:
        """Count drafts with acceptance rates ``alpha`` ``[T]`` at lengths ``position`` ``[T]``.

        Raises ValueError if a rate is outside [0, 1], or the shapes differ.
        """
        values = check_acceptance(alpha, position=position)
        bins = np.asarray(position, np.int64) // bin_tokens
        n_bins = int(bins.max(initial=-1)) + 1
        buckets = np.minimum((values * BUCKETS).astype(np.int64), BUCKETS - 1)
        counts = np.bincount(bins * BUCKETS + buckets, minlength=n_bins * BUCKETS)
        sums = np.bincount(bins, weights=values, minlength=n_bins).astype(np.float64)
        return cls(bin_tokens, counts.reshape(n_bins, BUCKETS), sums)

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> DraftAcceptance:
        """Restore counts from ``to_dict``."""
        counts = np.zeros((len(plain["sums"]), BUCKETS), np.int64)
        for i, filled in enumerate(plain["counts"]):
            for bucket, count in filled:
                counts[i, bucket] = count
        return cls(plain["bin_tokens"], counts, np.asarray(plain["sums"], np.float64))

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain JSON types, leaving out empty buckets."""

        def filled(row: IntArray) -> list[list[int]]:
            return [[int(bucket), int(row[bucket])] for bucket in np.flatnonzero(row)]

        counts = [filled(row) for row in self.counts]
        return {"bin_tokens": self.bin_tokens, "counts": counts, "sums": self.sums.tolist()}

    def __add__(self, other: DraftAcceptance) -> DraftAcceptance:
        if not len(self.sums) or not len(other.sums):
            return self if len(self.sums) else other
        if self.bin_tokens != other.bin_tokens:
            raise ValueError(
                f"cannot add acceptance counts in bins of {self.bin_tokens} tokens to counts in bins "
                f"of {other.bin_tokens} tokens; use the same bin width"
            )
        n_bins = max(len(self.sums), len(other.sums))
        counts = np.zeros((n_bins, BUCKETS), np.int64)
        sums = np.zeros(n_bins)
        for part in (self, other):
            counts[: len(part.sums)] += part.counts
            sums[: len(part.sums)] += part.sums
        return DraftAcceptance(self.bin_tokens, counts, sums)

    @property
    def drafts(self) -> int:
        return int(self.counts.sum())

    @property
    def mean(self) -> float:
        """Mean acceptance; nan if there are no drafts."""
        return float(self.sums.sum() / self.drafts) if self.drafts else float("nan")

    def percentile(self, percentile: float = 5) -> float:
        """Compute an acceptance percentile over all drafts, assuming a uniform distribution within
        each bucket; nan if there are no drafts.
        """
        return _percentile(self.counts.sum(0), percentile)

    def bins(self) -> list[DraftBin]:
        """List the non-empty length bins, in ascending order."""
        drafts = self.counts.sum(1).tolist()
        sums = self.sums.tolist()
        return [
            DraftBin(
                start=i * self.bin_tokens,
                end=(i + 1) * self.bin_tokens,
                drafts=int(drafts[i]),
                mean=sums[i] / drafts[i],
                p5=_percentile(self.counts[i], 5),
            )
            for i in range(len(sums))
            if drafts[i]
        ]


def _percentile(counts: IntArray, percentile: float) -> float:
    n = int(counts.sum())
    if not n:
        return float("nan")
    target = check_percentile(percentile) / 100 * n
    through = np.cumsum(counts)
    bucket = min(int(np.searchsorted(through, target)), BUCKETS - 1)
    inside = (target - (through[bucket] - counts[bucket])) / max(int(counts[bucket]), 1)
    return (bucket + float(inside)) / BUCKETS
