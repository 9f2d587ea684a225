"""Compute confidence intervals for token statistics by resampling sequences, and build the mismatch
report from them.

Tokens of the same sequence are correlated, so resampling individual tokens would make the intervals
far too narrow. The cluster bootstrap (Davison and Hinkley, "Bootstrap Methods and their
Application", 1997, section 3.8) draws whole sequences with replacement. Tokens are never copied.
Instead, a resample is represented by one weight per sequence, which is the number of times that the
sequence was drawn. A statistic receives the weights of all resamples at once.

As in numpy, percentiles interpolate linearly between order statistics, counting each token as often
as its sequence was drawn.

Shapes: T tokens, B sequences, R resamples.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from functools import partial
from math import ceil, isnan, isqrt, nan
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sparrow.mismatch.tail import (
    DEFAULT_BIN_TOKENS,
    FloatArray,
    IntArray,
    between,
    check_acceptance,
    check_percentile,
    split_by_bin,
)

MIN_SEQUENCES = 20
"""With fewer sequences, intervals are too narrow."""

Statistic = Callable[[FloatArray, IntArray, FloatArray], FloatArray]
"""Computes a statistic for each resample, [R]. The arguments are the tokens' values [T], their
sequence indices [T] in 0..B-1, and the sequences' weights [R, B].
"""


class Interval(NamedTuple):
    """An estimate and its 95 % interval. With a single sequence, there is nothing to resample, so
    lower and upper are nan.
    """

    estimate: float
    lower: float
    upper: float
    n_sequences: int


@dataclass(frozen=True)
class PercentileInterval:
    """A statistic of the tokens with start <= position < end, and its 95 % interval (see
    `Interval`).
    """

    bin: int
    start: int
    end: int
    n_tokens: int
    n_sequences: int
    estimate: float
    lower: float
    upper: float


@dataclass(frozen=True)
class BinMismatch:
    """Mismatch of the tokens with start <= position < end. The true percentile lies between
    `lower_bound` and `upper_bound`.
    """

    bin: int
    start: int
    end: int
    n_tokens: int
    n_sequences: int
    mean: float  # mean of the lower bound on acceptance
    # percentile of the lower bound on acceptance, and its 95 % interval
    lower_bound: float
    interval_low: float
    interval_high: float
    # percentile of the upper bound on acceptance
    upper_bound: float
    # ``lower_bound`` and its interval for dense rollouts at these lengths (see
    # ``ceiling.Ceiling``); nan if no dense rollouts were measured
    ceiling: float = nan
    ceiling_low: float = nan
    ceiling_high: float = nan
    # upper end of the 95 % interval of ``upper_bound``; nan if there is one sequence, and in files
    # that older versions wrote
    upper_bound_high: float = nan

    @property
    def p5(self) -> str:
        """The two bounds on the percentile, as text."""
        return between(self.lower_bound, self.upper_bound)

    @property
    def interval_end(self) -> float:
        """Upper end of the interval to show: that of the upper bound's interval or, in files that
        lack it, of the lower bound's.
        """
        return self.interval_high if isnan(self.upper_bound_high) else self.upper_bound_high

    def verdict(self, tau: float) -> Literal["holds", "below", "undecided"]:
        """Compare the percentile with ``tau``. It holds if the lower bound and its interval reach
        tau, and is below if the upper bound and its interval don't. Unknown ends (nan) leave it
        undecided.
        """
        if self.lower_bound >= tau and self.interval_low >= tau:
            return "holds"
        if self.upper_bound < tau and self.upper_bound_high < tau:
            return "below"
        return "undecided"


@dataclass(frozen=True)
class Histogram:
    """counts[i] is the number of tokens with edges[i] <= x < edges[i + 1]; the last bin includes
    its upper edge.
    """

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class MismatchReport:
    """Mismatch over a set of rollouts. Everything except `upper_bound`, `upper_bound_high` and
    `p1_upper` is based on the lower bound on acceptance.
    """

    n_tokens: int
    n_sequences: int
    bin_tokens: int
    percentile: float
    mean: float
    p1: float  # 1st percentile over all tokens
    p1_upper: float  # 1st percentile of the upper bound
    bins: tuple[BinMismatch, ...]
    histogram: Histogram  # acceptance in 50 equal bins

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain JSON types; nan becomes None."""
        return {name: plain(value) for name, value in asdict(self).items()}


def few_sequences(counts: Iterable[int]) -> str | None:
    """Return a warning if a bin is too small for its interval, given each bin's number of
    sequences. Return None if all bins are large enough.
    """
    least = min(counts, default=MIN_SEQUENCES)
    if least >= MIN_SEQUENCES:
        return None
    responses = "response" if least == 1 else "responses"
    return (
        f"the smallest bin has {least} {responses}; "
        f"intervals from fewer than {MIN_SEQUENCES} are too narrow"
    )


def weighted_mean(values: FloatArray, sequence: IntArray, weights_RB: FloatArray) -> FloatArray:
    """Compute the mean of each resample's tokens, float64 [R]. This function is a Statistic."""
    n_sequences = weights_RB.shape[1]
    sums = np.bincount(sequence, values, minlength=n_sequences)
    counts = np.bincount(sequence, minlength=n_sequences)
    return (weights_RB @ sums) / (weights_RB @ counts)


def weighted_percentile(
    values: FloatArray, sequence: IntArray, weights_RB: FloatArray, percentile: float = 5
) -> FloatArray:
    """Compute the exact percentile of each resample, float64 [R]. To get a Statistic, fix
    `percentile` with functools.partial.

    The result equals that of np.percentile if each value is repeated as many times as its
    sequence's weight says. Weights must be whole numbers. Values are sorted once and split into
    blocks. An order statistic of a resample is found in two steps. First, the sequences' weights
    and their token counts in each block show which block contains the order statistic. Then this
    block is searched. Memory is O(T + R (B + sqrt T)).

    Raises ValueError if the percentile is out of range, or a resample contains no tokens.
    """
    order = np.argsort(values)
    ordered = values[order]
    owner = sequence[order]
    n_tokens = values.size
    n_sequences = weights_RB.shape[1]

    # Use at least B tokens per block, so that the count table [blocks, B] has at most about T
    # entries.
    block_tokens = max(isqrt(n_tokens), n_sequences)
    n_blocks = max(ceil(n_tokens / block_tokens), 1)
    nobody = n_sequences  # owns the padding in the last block, with weight 0
    owner = np.append(owner, np.full(n_blocks * block_tokens - n_tokens, nobody))
    owner_blocks = owner.reshape(n_blocks, block_tokens)

    # Count the tokens of each sequence in each block, then the tokens of each resample up to the
    # end of each block.
    n_owners = n_sequences + 1
    cells = owner_blocks + np.arange(n_blocks)[:, None] * n_owners
    counts = np.bincount(cells.ravel(), minlength=n_blocks * n_owners)
    tokens_of = counts.reshape(n_blocks, n_owners)
    weights = np.append(weights_RB, np.zeros((len(weights_RB), 1)), axis=1)
    # Counts are whole numbers, so float64 is exact.
    through_block = np.cumsum(weights @ tokens_of.T.astype(np.float64), axis=1)

    def order_statistic(rank: FloatArray) -> FloatArray:
        block = np.sum(through_block <= rank[:, None], axis=1)
        previous = np.maximum(block - 1, 0)[:, None]
        through_previous = np.take_along_axis(through_block, previous, 1)[:, 0]
        before = np.where(block > 0, through_previous, 0)

        within = np.cumsum(np.take_along_axis(weights, owner_blocks[block], axis=1), axis=1)
        place = np.sum(before[:, None] + within <= rank[:, None], axis=1)
        return ordered[block * block_tokens + place]

    total = through_block[:, -1]
    if np.any(total < 1):
        raise ValueError(
            "A resample contains no tokens; each row of weights needs a positive weight for at least "
            "one sequence with tokens."
        )

    rank = (total - 1) * (check_percentile(percentile) / 100)
    below = np.floor(rank)
    low = order_statistic(below)
    high = order_statistic(np.minimum(below + 1, total - 1))
    return low + (high - low) * (rank - below)


def sequence_bootstrap(
    values: ArrayLike,
    sequence: ArrayLike,
    statistic: Statistic,
    *,
    resamples: int = 1000,
    seed: int | np.random.Generator = 0,
) -> Interval:
    """Compute a statistic of `values` [T] and its 95 % interval. `sequence` [T] has the sequence id
    of each token. T must be at least 1.

    Whole sequences are resampled with replacement. The interval is the middle 95 % of the resampled
    statistics (percentile bootstrap). With fewer than about ``MIN_SEQUENCES`` sequences, the
    interval is too narrow.

    Raises ValueError if the shapes differ, or there are no tokens.
    """
    tokens = np.asarray(values, np.float64)
    if tokens.ndim != 1 or tokens.size == 0 or np.shape(sequence) != tokens.shape:
        raise ValueError(
            f"values have shape {tokens.shape} and sequence has "
            f"{np.shape(sequence)}; pass two arrays [T] with T >= 1."
        )
    ids, owner = np.unique(np.asarray(sequence), return_inverse=True)
    n_sequences = ids.size

    rng = np.random.default_rng(seed)
    draws = rng.multinomial(n_sequences, np.full(n_sequences, 1 / n_sequences), size=resamples)
    as_measured = np.ones((1, n_sequences))
    weights = np.concatenate([as_measured, draws])
    estimate, *resampled = statistic(tokens, owner, weights).tolist()
    if n_sequences == 1:
        return Interval(estimate, nan, nan, n_sequences)
    lower, upper = np.quantile(resampled, [0.025, 0.975])
    return Interval(estimate, float(lower), float(upper), n_sequences)


def interval_by_bin(
    alpha: ArrayLike,
    position: ArrayLike,
    sequence: ArrayLike,
    bin_tokens: int,
    statistic: Statistic,
    seed: int | np.random.Generator,
) -> list[PercentileInterval]:
    """Like `percentile_by_bin_interval`, but for any statistic of acceptance."""
    values = check_acceptance(alpha, position=position, sequence=sequence)
    sequences = np.asarray(sequence)
    rng = np.random.default_rng(seed)
    bins = []
    for index, tokens in split_by_bin(position, bin_tokens):
        estimate, lower, upper, count = sequence_bootstrap(
            values[tokens], sequences[tokens], statistic, seed=rng
        )
        start = index * bin_tokens
        end = (index + 1) * bin_tokens
        bins.append(
            PercentileInterval(index, start, end, tokens.size, count, estimate, lower, upper)
        )
    return bins


def percentile_by_bin_interval(
    alpha: ArrayLike,
    position: ArrayLike,
    sequence: ArrayLike,
    bin_tokens: int = DEFAULT_BIN_TOKENS,
    percentile: float = 5,
    *,
    seed: int | np.random.Generator = 0,
) -> list[PercentileInterval]:
    """Compute a percentile of acceptance for each position bin. Each percentile has a 95 % interval
    from resampling sequences. Bins are in ascending order.

    Each bin only resamples the sequences that reach it, so expect wide intervals at lengths that
    few responses reach.

    Args:
        alpha: acceptance rates in [0, 1], [T].
        position: 0-based token positions, [T].
        sequence: sequence id of each token, [T].
        percentile: the percentile, in 0..100.
        seed: an int, or a Generator to draw from.

    Raises ValueError if the shapes differ, or an argument is out of range.
    """
    statistic = partial(weighted_percentile, percentile=check_percentile(percentile))
    return interval_by_bin(alpha, position, sequence, bin_tokens, statistic, seed)


def mismatch_report(
    lower: ArrayLike,
    upper: ArrayLike,
    position: ArrayLike,
    sequence: ArrayLike,
    bin_tokens: int = DEFAULT_BIN_TOKENS,
    percentile: float = 5,
    seed: int | np.random.Generator = 0,
) -> MismatchReport:
    """Compute mismatch statistics over a set of rollouts (Sparrow, arXiv 2606.08446, section 3).

    Args:
        lower: lower bounds on the tokens' acceptance rates, [T], T >= 1.
        upper: upper bounds on the same rates, [T]. If you have exact rates, pass them as both
            ``lower`` and ``upper``.
        position, sequence, bin_tokens, percentile, seed: see `percentile_by_bin_interval`.

    Raises ValueError if there are no tokens, the shapes differ, a lower bound exceeds its upper
    bound, or an argument is out of range.
    """
    low = check_acceptance(lower, upper=upper, position=position, sequence=sequence)
    high = check_acceptance(upper)
    if low.size == 0:
        raise ValueError("There are no tokens to report on; pass at least one acceptance rate.")
    if np.any(low > high):
        raise ValueError(
            "A lower bound exceeds its upper bound by "
            f"{np.max(low - high):g}; pass lower bounds first."
        )
    layout = (position, sequence, bin_tokens, percentile)
    low_intervals = percentile_by_bin_interval(low, *layout, seed=seed)
    high_intervals = low_intervals
    if not np.array_equal(low, high):
        high_intervals = percentile_by_bin_interval(high, *layout, seed=seed)
    by_bin = split_by_bin(position, bin_tokens)
    bins = tuple(
        BinMismatch(
            below.bin,
            below.start,
            below.end,
            below.n_tokens,
            below.n_sequences,
            mean=float(low[tokens].mean()),
            lower_bound=below.estimate,
            interval_low=below.lower,
            interval_high=below.upper,
            upper_bound=above.estimate,
            upper_bound_high=above.upper,
        )
        for below, above, (_, tokens) in zip(low_intervals, high_intervals, by_bin, strict=True)
    )
    counts, edges = np.histogram(low, np.linspace(0, 1, 51))
    return MismatchReport(
        n_tokens=low.size,
        n_sequences=np.unique(np.asarray(sequence)).size,
        bin_tokens=bin_tokens,
        percentile=percentile,
        mean=float(low.mean()),
        p1=float(np.percentile(low, 1)),
        p1_upper=float(np.percentile(high, 1)),
        bins=bins,
        histogram=Histogram(tuple(edges.tolist()), tuple(counts.tolist())),
    )


def plain(value: Any) -> Any:
    """Convert `value` to strict JSON types; nan becomes None."""
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return None if isinstance(value, float) and isnan(value) else value
