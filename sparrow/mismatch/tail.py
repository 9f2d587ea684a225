"""Split positions into bins for measuring the tail of the acceptance rate, and check rates and
percentiles.

Mean acceptance barely differs between a stable and a collapsing run, but the 5th percentile of
acceptance in 2,000-token bins does (Sparrow, arXiv 2606.08446, section 3). Positions are 0-based
indices of the scored tokens. They can be counted from the start of the response or of the whole
sequence, as long as the choice is consistent.

Shapes: T tokens.
"""

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

DEFAULT_BIN_TOKENS = 2000


def check_acceptance(alpha: ArrayLike, **aligned: ArrayLike | None) -> FloatArray:
    """Return the acceptance rates as float64 [T].

    Raises ValueError if they aren't a flat array, a rate is outside [0, 1], or an array in
    `aligned` has a different shape.
    """
    values = np.asarray(alpha, np.float64)
    if values.ndim != 1:
        raise ValueError(
            f"Acceptance rates have shape {values.shape}; "
            "pass a flat array [T] without masked tokens."
        )
    if not np.all((values >= 0) & (values <= 1)):
        raise ValueError(
            f"Acceptance rates range from {values.min():g} to {values.max():g}, but must be in "
            "[0, 1]."
        )
    for name, array in aligned.items():
        if array is not None and np.shape(array) != values.shape:
            raise ValueError(
                f"{name} has shape {np.shape(array)}, but there are {values.size} acceptance rates;"
                " pass one entry per rate."
            )
    return values


def between(low: float, high: float, digits: int = 3) -> str:
    """Format two bounds, or just one number if they round to the same value."""
    ends = [f"{x:.{digits}f}" if np.isfinite(x) else "n/a" for x in (low, high)]
    return ends[0] if ends[0] == ends[1] else f"between {ends[0]} and {ends[1]}"


def check_percentile(percentile: float) -> float:
    """Return the percentile. Raises ValueError if it's outside 0..100."""
    if not 0 <= percentile <= 100:
        raise ValueError(
            f"Percentile {percentile} is outside 0..100; the published statistic uses 5."
        )
    return percentile


def split_by_bin(
    position: ArrayLike, bin_tokens: int = DEFAULT_BIN_TOKENS
) -> list[tuple[int, IntArray]]:
    """Return (bin, token indices) pairs for the non-empty bins, in ascending order. A token's bin
    is position // bin_tokens.

    Raises ValueError if positions are negative or not integers, or bin_tokens is below 1.
    """
    positions = np.asarray(position)
    if bin_tokens < 1:
        raise ValueError(
            f"bin_tokens is {bin_tokens}; a bin needs at "
            "least 1 token (the published width is 2000)."
        )
    if positions.size and not np.issubdtype(positions.dtype, np.integer):
        raise ValueError(
            f"Positions have dtype {positions.dtype}; pass 0-based integer token indices."
        )
    if np.any(positions < 0):
        raise ValueError(f"The lowest position is {positions.min()}; pass 0-based token indices.")
    bins = positions.astype(np.int64) // bin_tokens
    order = np.argsort(bins, kind="stable")
    present, starts = np.unique(bins[order], return_index=True)
    return list(zip(present.tolist(), np.split(order, starts[1:]), strict=False))
