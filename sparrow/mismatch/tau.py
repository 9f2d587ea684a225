"""The target for p5, absolute or relative to the ceiling, and how to remove the effect of the
ceiling from a measured p5.

Numerical errors and errors due to sparsity are independent, so their effects on the rejected share
add in quadrature. If c is the ceiling, the p5 of dense rollouts, the **relative p5** is the p5 that
sparsity alone would cause:

    1 - relative = sqrt((1 - p5)^2 - (1 - c)^2)

If short top-n lists omit probability mass of actor and policy, the relative p5 is too low, which
leads to more pages, never to fewer. docs/calibration.md derives the formula and compares it with
alternatives.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from math import isnan, nan, sqrt
from typing import Literal, NamedTuple

import numpy as np

from sparrow.mismatch.bootstrap import BinMismatch

Span = tuple[float, float, float]
"""An estimate and the ends of its 95 % interval; unknown values are nan."""


class Tau(NamedTuple):
    """A target for p5, in (0, 1)."""

    value: float
    relative: bool = False  # whether the target is for p5 relative to each bin's ceiling

    @classmethod
    def chosen(cls, absolute: float | None, relative: float | None) -> Tau:
        """Build tau from the setting that is not None."""
        if relative is not None:
            return cls(relative, relative=True)
        assert absolute is not None, "settings.choose sets one of the two"
        return cls(absolute)

    def __str__(self) -> str:
        return f"relative tau {self.value:g}" if self.relative else f"tau {self.value:g}"

    @property
    def statistic(self) -> str:
        """The name of the statistic that has to reach ``value``."""
        return "relative p5" if self.relative else "p5"

    def scale(self, bins: Iterable[BinMismatch]) -> tuple[BinMismatch, ...]:
        """Convert p5, its interval and its upper bound in every bin to the scale of ``value``. If
        tau is relative, they are nan in bins without a ceiling.

        Ceilings are not changed.
        """
        return tuple(map(relative, bins)) if self.relative else tuple(bins)

    def level(self, ceiling: float) -> float:
        """Return the measured p5 needed to reach tau, where ``ceiling`` is the p5 of dense
        rollouts.
        """
        if not self.relative:
            return self.value
        return 1 - sqrt((1 - self.value) ** 2 + (1 - ceiling) ** 2)

    def verdict(self, b: BinMismatch) -> Literal["holds", "below", "undecided"]:
        """Compare a bin with tau (see ``BinMismatch.verdict``); undecided if tau is relative and
        the bin has no ceiling.
        """
        (scaled,) = self.scale([b])
        return scaled.verdict(self.value)

    def out_of_reach(self, bins: Iterable[BinMismatch]) -> str | None:
        """Return a message naming lengths at which even dense rollouts do not reach tau or cannot
        be shown to reach it, or None if there are none.

        The relative p5 of dense rollouts is 1, which reaches any relative tau, but an actor's
        distance from the ceiling is known no more precisely than the ceiling itself.
        """

        def best(b: BinMismatch) -> float:
            """Return the highest p5 that any actor can be shown to have."""
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
    """Compute the p5 that sparsity alone would cause; 1 if p5 is at or above the ceiling."""
    return 1 - sqrt(max((1 - p5) ** 2 - (1 - ceiling) ** 2, 0.0))


def relative_span(p5: Span, ceiling: Span) -> Span:
    """Compute the relative p5 and its interval, assuming that the intervals of ``p5`` and
    ``ceiling`` are independent.

    The interval of a difference (here, of two squares) is computed from the intervals of both terms
    (Zou and Donner, "Construction of confidence limits about effect measures: a general approach",
    Statistics in Medicine 2008). The result is too wide if both terms come from the same tokens.
    """
    # Squaring the rejected shares 1 - p5 turns the low end of a p5 into the high end of its square.
    (x, x_high, x_low), (c, c_high, c_low) = (1 - np.array([p5, ceiling])) ** 2

    # The maxima are needed because a bootstrap interval may not contain its estimate.
    more = np.hypot(np.maximum(x_high - x, 0), np.maximum(c - c_low, 0))
    less = np.hypot(np.maximum(x - x_low, 0), np.maximum(c_high - c, 0))
    squares = x - c + np.array([0, more, -less])
    estimate, lower, upper = (1 - np.sqrt(np.maximum(squares, 0))).tolist()
    return estimate, lower, upper


def relative(b: BinMismatch) -> BinMismatch:
    """Make a bin's p5, interval and upper bound relative to its ceiling; nan if that was not
    measured.
    """
    p5, low, high = relative_span((b.lower_bound, b.interval_low, b.interval_high), _ceiling(b))
    upper = nan if isnan(b.ceiling) else relative_p5(b.upper_bound, b.ceiling)
    return replace(b, lower_bound=p5, interval_low=low, interval_high=high, upper_bound=upper)


def _ceiling(b: BinMismatch) -> Span:
    return b.ceiling, b.ceiling_low, b.ceiling_high
