"""Estimate mean acceptance, and a lower bound on its tail, from just the sampled tokens' log-probs.

For a token y drawn from the actor q, let s = min(1, p(y) / q(y)). The expectation of s over y is
sum_v min(p(v), q(v)), the acceptance rate alpha at that position. The mean of s therefore estimates
the mean of alpha. This doesn't work for percentiles, because s scatters around alpha. But scatter
can only make the tail look lower. For any level z and c = percentile / 100, Jensen's inequality for
the convex function (z - x)+ gives

    z - E (z - s)+ / c  <=  z - E (z - alpha)+ / c
                        <=  mean of the lowest c of alpha
                        <=  percentile of alpha

(for the second step see Rockafellar and Uryasev, "Optimization of conditional value-at-risk",
2000). The left side is largest when z is the percentile of s. It then equals the mean of the lowest
c of s. Sampled tokens are therefore enough to show that a tail is above a target. To show that a
tail is below a target, you need top-n lists (`acceptance.py`).

Shapes: T tokens.
"""

import numpy as np
from numpy.typing import ArrayLike

from sparrow.mismatch.bootstrap import PercentileInterval, interval_by_bin, weighted_mean
from sparrow.mismatch.tail import DEFAULT_BIN_TOKENS, FloatArray, IntArray, check_percentile


def sampled_acceptance(policy_logprobs: ArrayLike, actor_logprobs: ArrayLike) -> FloatArray:
    """Compute min(1, p/q) for sampled tokens, float64 in [0, 1], from natural log-probs at the same
    temperature.

    Raises ValueError if the shapes differ, a log-prob is NaN, or an actor's log-prob is infinite.
    """
    p = np.asarray(policy_logprobs, np.float64)
    q = np.asarray(actor_logprobs, np.float64)
    if p.shape != q.shape:
        raise ValueError(
            f"The policy's log-probs have shape {p.shape}, "
            f"but the actor's have {q.shape}; pass log-probs of the same tokens."
        )
    if np.isnan(p).any() or not np.isfinite(q).all():
        raise ValueError(
            "A sampled token's log-prob is NaN, or infinite under the actor; leave out such tokens."
        )
    return np.exp(np.minimum(p - q, 0.0))


def tail_floor_by_bin(
    sampled: ArrayLike,
    position: ArrayLike,
    sequence: ArrayLike,
    bin_tokens: int = DEFAULT_BIN_TOKENS,
    percentile: float = 5,
    *,
    seed: int | np.random.Generator = 0,
) -> list[PercentileInterval]:
    """For each position bin, compute a lower bound on a percentile of acceptance. The bound has a
    95 % interval from resampling sequences.

    `sampled` [T] comes from `sampled_acceptance`. The estimate is the mean of the lowest
    `percentile` % of `sampled`, so the percentile must be above 0. Everything else is as in
    `percentile_by_bin_interval`.
    """
    share = check_percentile(percentile) / 100
    if not share:
        raise ValueError("The percentile is 0; choose a percentile above 0.")

    def floor(values: FloatArray, owner: IntArray, weights_RB: FloatArray) -> FloatArray:
        z = np.percentile(values, percentile)
        shortfall = z - np.maximum(z - values, 0) / share
        return np.maximum(weighted_mean(shortfall, owner, weights_RB), 0.0)

    return interval_by_bin(sampled, position, sequence, bin_tokens, floor, seed)
