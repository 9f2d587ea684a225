"""The p5 target, absolute or relative to the ceiling, and how to correct a measured p5 for the
ceiling.

Errors from numerics and from sparsity are independent, so their effects on the rejected share add
in quadrature. If c is the ceiling, i.e. the p5 of dense rollouts, the **relative p5** is what
sparsity alone would give:

    1 - relative = sqrt((1 - p5)^2 - (1 - c)^2)

Short top-n lists miss some of the actor's and policy's mass. The relative p5 then comes out too
low, which errs on the side of more pages. For the derivation and a comparison with alternatives,
see docs/calibration.md.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import nan, sqrt
from typing import Literal, NamedTuple

import numpy as np

from sparrow.mismatch.bootstrap import BinMismatch

Span = tuple[float, float, float]
"""An estimate, followed by the lower and upper ends of its 95 % interval. Unknown values are nan.
"""


class Tau(NamedTuple):
    """A p5 target, in (0, 1)."""

    value: float
    relative: bool = False  # whether it's for p5 relative to each bin's ceiling

    @classmethod
    def chosen(cls, absolute: float | None, relative: float | None) -> Tau:
        """Build tau from the setting that isn't None."""
        if relative is not None:
            return cls(relative, relative=True)
        assert absolute is not None, "settings.choose sets one of the two"
        return cls(absolute)

    def __str__(self) -> str:
        return f"relative tau {self.value:g}" if self.relative else f"tau {self.value:g}"

    @property
    def statistic(self) -> str:
        """Name of the statistic compared with ``value``."""
        return "relative p5" if self.relative else "p5"

    def scale(self, bins: Iterable[BinMismatch]) -> tuple[BinMismatch, ...]:
        """Convert every bin's p5, upper bound and their intervals to the scale of ``value``. If tau
        is relative, these values become nan in bins without a ceiling.

        Ceilings stay the same.
        """
        return tuple(map(relative, bins)) if self.relative else tuple(bins)

    def level(self, ceiling: float) -> float:
        """Return the measured p5 needed to reach tau, given the p5 of dense rollouts."""
        if not self.relative:
            return self.value
        return 1 - sqrt((1 - self.value) ** 2 + (1 - ceiling) ** 2)

    def verdict(self, b: BinMismatch) -> Literal["holds", "below", "undecided"]:
        """Compare a bin with tau (see ``BinMismatch.verdict``). The verdict is "undecided" if tau
        is relative and the bin has no ceiling.
        """
        (scaled,) = self.scale([b])
        return scaled.verdict(self.value)

    def out_of_reach(self, bins: Iterable[BinMismatch]) -> str | None:
        """Return a message naming the lengths at which even dense rollouts don't reach tau, or
        can't be shown to reach it. Return None if there are no such lengths.

        Dense rollouts have a relative p5 of 1, which meets any relative tau. But if the ceiling is
        imprecise, so is an actor's measured distance from the ceiling.
        """

        def best(b: BinMismatch) -> float:
            """Return the highest p5 that any actor could be shown to reach."""
            if not self.relative:
                return b.ceiling_high
            _, low, _ = relative_span(_ceiling(b), _ceiling(b))
            return low

        b = min((b for b in bins if best(b) < self.value), key=best, default=None)
        if b is None:
            return None

        what = f"so no schedule can be shown to reach {self.value:g}; lower tau"
        if self.relative:
            what = (
                f"and {self} lets p5 fall to {self.level(b.ceiling):.3f}, which is not "
                "significantly lower; lower relative tau, sample more responses"
            )
        return (
            f"at lengths {b.start}-{b.end} dense rollouts of this engine have p5 {b.ceiling:.3f} "
            f"[{b.ceiling_low:.3f}, {b.ceiling_high:.3f}], {what}, or make engine and trainer "
            "agree more closely (precision, longer lists)"
        )


def relative_p5(p5: float, ceiling: float) -> float:
    """Compute the p5 that sparsity alone would give; 1 if p5 is at or above the ceiling."""
    return 1 - sqrt(max((1 - p5) ** 2 - (1 - ceiling) ** 2, 0.0))


def relative_span(p5: Span, ceiling: Span) -> Span:
    """Compute the relative p5 and its interval, assuming that the intervals of ``p5`` and
    ``ceiling`` are independent.

    The interval for a difference (here, of two squares) is derived from the intervals of both terms
    (Zou and Donner, "Construction of confidence limits about effect measures: a general approach",
    Statistics in Medicine 2008). The result is too wide if ``p5`` and ``ceiling`` were measured on
    the same tokens.
    """
    # (1 - p5)^2 falls as p5 rises, so the low end of p5 becomes the high end of the square.
    (x, x_high, x_low), (c, c_high, c_low) = (1 - np.array([p5, ceiling])) ** 2

    # Clamp to 0 in case a bootstrap interval doesn't contain its estimate.
    more = np.hypot(np.maximum(x_high - x, 0), np.maximum(c - c_low, 0))
    less = np.hypot(np.maximum(x - x_low, 0), np.maximum(c_high - c, 0))
    squares = x - c + np.array([0, more, -less])
    estimate, lower, upper = (1 - np.sqrt(np.maximum(squares, 0))).tolist()
    return estimate, lower, upper


def relative(b: BinMismatch) -> BinMismatch:
    """Convert a bin's p5, upper bound and their intervals to values relative to the bin's ceiling.
    If the bin has no ceiling, the values are nan.
    """
    p5, low, high = relative_span((b.lower_bound, b.interval_low, b.interval_high), _ceiling(b))
    upper, _, upper_high = relative_span((b.upper_bound, nan, b.upper_bound_high), _ceiling(b))
    return replace(
        b,
        lower_bound=p5,
        interval_low=low,
        interval_high=high,
        upper_bound=upper,
        upper_bound_high=upper_high,
    )


def _ceiling(b: BinMismatch) -> Span:
    return b.ceiling, b.ceiling_low, b.ceiling_high
