"""The tail of the acceptance rate: bins of position, and a Beta distribution fitted to the tail.

The mean acceptance hardly differs between a stable and a collapsing run, but its 5th percentile per 2,000-token bin
does (Sparrow, arXiv 2606.08446, section 3). Positions are 0-based indices of the scored tokens. The caller chooses
whether they count from the start of the response or of the sequence, and must do so consistently.

Shapes: T tokens.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import optimize, special

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

DEFAULT_BIN_TOKENS = 2000

# A Beta's likelihood is not finite at the ends of its range; float32 log-probs resolve nothing finer than this.
_RESOLUTION = 1e-6
_MIN_TAIL_TOKENS = 10


@dataclass(frozen=True)
class BetaTail:
    """Beta(a, b) scaled to [0, cut], fitted to the tokens with acceptance at most `cut`."""

    a: float
    b: float
    ks: float  # Kolmogorov-Smirnov statistic: largest distance between the empirical and the fitted distribution
    n: int  # tokens in the tail
    fraction_in_tail: float  # n over all tokens
    cut: float = 0.999

    @property
    def variance(self) -> float:
        """Variance of the fitted tail; published: 0.19 at a KV budget of 512 tokens, 0.05 at 16384."""
        total = self.a + self.b
        return self.cut**2 * self.a * self.b / (total**2 * (total + 1))


def beta_tail_fit(alpha: ArrayLike, cut: float = 0.999) -> BetaTail | None:
    """Fit a Beta distribution scaled to [0, cut] to the tokens with acceptance at most `cut`.

    Maximum likelihood in (log a, log b), started from the moments. For the fit, values within 1e-6 of either end of the
    range, including exact zeros, are moved to that distance, where the likelihood is finite; the KS statistic is
    computed from the unchanged values. Published: KS below 0.04 (Sparrow, arXiv 2606.08446, section 3).

    Returns None if there is nothing to fit: fewer than 10 tokens in the tail, or all equal to within 1e-6.

    Raises ValueError: alpha or cut is out of range.
    """
    values = check_acceptance(np.ravel(alpha))
    if not 0 < cut <= 1:
        raise ValueError(f"cut is {cut}; the tail must end in (0, 1] (the published value is 0.999).")
    scaled = np.sort(values[values <= cut]) / cut
    inner = np.clip(scaled, _RESOLUTION, 1 - _RESOLUTION)
    if inner.size < _MIN_TAIL_TOKENS or inner[-1] - inner[0] <= _RESOLUTION:
        return None

    mean_log, mean_log1m = np.log(inner).mean(), np.log1p(-inner).mean()

    def loss_and_gradient(log_ab: FloatArray) -> tuple[float, FloatArray]:
        a, b = np.exp(log_ab)
        loss = special.betaln(a, b) - (a - 1) * mean_log - (b - 1) * mean_log1m
        gradient = special.digamma([a, b]) - special.digamma(a + b) - np.array([mean_log, mean_log1m])
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


def check_acceptance(alpha: ArrayLike, **aligned: ArrayLike | None) -> FloatArray:
    """Acceptance rates as float64 [T]; ValueError unless all lie in [0, 1] and `aligned` arrays have the same shape."""
    values = np.asarray(alpha, np.float64)
    if values.ndim != 1:
        raise ValueError(f"Acceptance rates have shape {values.shape}; pass a flat array [T] without masked tokens.")
    if not np.all((values >= 0) & (values <= 1)):
        raise ValueError(f"Acceptance rates reach from {values.min():g} to {values.max():g}, outside [0, 1].")
    for name, array in aligned.items():
        if array is not None and np.shape(array) != values.shape:
            raise ValueError(f"{name} has shape {np.shape(array)} for {values.size} acceptance rates.")
    return values


def check_percentile(percentile: float) -> float:
    """The percentile itself; ValueError unless it is in 0..100."""
    if not 0 <= percentile <= 100:
        raise ValueError(f"Percentile {percentile} is outside 0..100; the published statistic is the 5th.")
    return percentile


def split_by_bin(position: ArrayLike, bin_tokens: int = DEFAULT_BIN_TOKENS) -> list[tuple[int, IntArray]]:
    """(bin, indices of its tokens) for each bin that holds a token, by rising bin; a bin is position // bin_tokens.

    Raises ValueError: positions are not integers or are negative, or bin_tokens is below 1.
    """
    positions = np.asarray(position)
    if bin_tokens < 1:
        raise ValueError(f"bin_tokens is {bin_tokens}; a bin needs at least 1 token (the published width is 2000).")
    if positions.size and not np.issubdtype(positions.dtype, np.integer):
        raise ValueError(f"Positions have dtype {positions.dtype}; pass 0-based integer token indices.")
    if np.any(positions < 0):
        raise ValueError(f"Positions reach down to {positions.min()}; pass 0-based token indices.")
    bins = positions.astype(np.int64) // bin_tokens
    order = np.argsort(bins, kind="stable")
    present, starts = np.unique(bins[order], return_index=True)
    return list(zip(present.tolist(), np.split(order, starts[1:]), strict=False))
