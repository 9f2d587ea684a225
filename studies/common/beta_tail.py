"""Fit a Beta distribution to the tail of the acceptance rate, as the paper does (Sparrow, arXiv
2606.08446, section 3).

For our models, the fit is worse than the published one, except for one model at its largest budget
(docs/evidence.md). That is why the package itself only measures percentiles.

Shapes: T tokens, B sequences, R resamples.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import nan

import numpy as np
from numpy.typing import ArrayLike
from scipy import optimize, special

from sparrow.mismatch.tail import FloatArray, IntArray, check_acceptance

# A Beta's likelihood isn't finite at the ends of its range, and float32 log-probs resolve nothing
# finer than this.
_RESOLUTION = 1e-6
_MIN_TAIL_TOKENS = 10


@dataclass(frozen=True)
class BetaTail:
    """A Beta(a, b) distribution scaled to [0, cut], fitted to the tokens with acceptance at most
    `cut`.
    """

    a: float
    b: float
    # Kolmogorov-Smirnov statistic: largest distance between the empirical and the fitted
    # distribution
    ks: float
    n: int  # tokens in the tail
    fraction_in_tail: float  # n over all tokens
    cut: float = 0.999

    @property
    def variance(self) -> float:
        """Return the fitted tail's variance. The published values are 0.19 for a budget of 512
        tokens and 0.05 for 16,384.
        """
        total = self.a + self.b
        return self.cut**2 * self.a * self.b / (total**2 * (total + 1))


def beta_tail_fit(alpha: ArrayLike, cut: float = 0.999) -> BetaTail | None:
    """Fit a Beta distribution scaled to [0, cut] to the tokens with acceptance at most `cut`.

    The likelihood is maximised over (log a, log b), starting from the moments. Values closer than
    1e-6 to either end of the range, including exact zeros, are moved to a distance of 1e-6, where
    the likelihood is finite. The KS statistic is computed from the unchanged values; the published
    one is below 0.04.

    Returns None if there is nothing to fit: fewer than 10 tokens in the tail, or all of them equal
    to within 1e-6.

    Raises ValueError if alpha or cut is out of range.
    """
    values = check_acceptance(np.ravel(alpha))
    if not 0 < cut <= 1:
        raise ValueError(f"cut is {cut}, but must be in (0, 1] (the published value is 0.999).")
    scaled = np.sort(values[values <= cut]) / cut
    inner = np.clip(scaled, _RESOLUTION, 1 - _RESOLUTION)
    if inner.size < _MIN_TAIL_TOKENS or inner[-1] - inner[0] <= _RESOLUTION:
        return None

    mean_log, mean_log1m = np.log(inner).mean(), np.log1p(-inner).mean()

    def loss_and_gradient(log_ab: FloatArray) -> tuple[float, FloatArray]:
        a, b = np.exp(log_ab)
        loss = special.betaln(a, b) - (a - 1) * mean_log - (b - 1) * mean_log1m
        gradient = (
            special.digamma([a, b]) - special.digamma(a + b) - np.array([mean_log, mean_log1m])
        )
        return float(loss), gradient * (a, b)

    mean = inner.mean()
    concentration = mean * (1 - mean) / inner.var() - 1
    start = np.log([mean * concentration, (1 - mean) * concentration])
    fit = optimize.minimize(loss_and_gradient, start, jac=True, method="BFGS")
    a, b = np.exp(fit.x).tolist()

    fitted = special.betainc(a, b, scaled)
    rank = np.arange(scaled.size + 1) / scaled.size
    ks = max(np.max(rank[1:] - fitted), np.max(fitted - rank[:-1]))
    return BetaTail(a, b, float(ks), scaled.size, scaled.size / values.size, cut)


def weighted_beta_ks(values: FloatArray, sequence: IntArray, weights_RB: FloatArray) -> FloatArray:
    """Fit a Beta distribution to each resample's tail, and return the KS distances, float64 [R];
    nan where there is no fit.

    This is a ``sparrow.mismatch.bootstrap.Statistic``.

    Resamples are less smooth than the sample they are drawn from, so the interval is too high if
    the fit is close.
    """
    fits = (
        beta_tail_fit(np.repeat(values, weights[sequence].astype(int))) for weights in weights_RB
    )
    return np.array([fit.ks if fit else nan for fit in fits])
