"""How far the sparse actor is from the dense policy: acceptance per token, its tail by length, intervals, a report."""

from sparrow.mismatch.acceptance import AcceptanceBounds, acceptance, acceptance_bounds
from sparrow.mismatch.bootstrap import (
    BinMismatch,
    Histogram,
    Interval,
    MismatchReport,
    PercentileInterval,
    mismatch_report,
    percentile_by_bin_interval,
    sequence_bootstrap,
    weighted_mean,
    weighted_percentile,
)
from sparrow.mismatch.sampled import sampled_acceptance, tail_floor_by_bin
from sparrow.mismatch.tail import DEFAULT_BIN_TOKENS, BetaTail, TailBin, beta_tail_fit, bin_index, tail_by_bin

__all__ = [
    "DEFAULT_BIN_TOKENS",
    "AcceptanceBounds",
    "BetaTail",
    "BinMismatch",
    "Histogram",
    "Interval",
    "MismatchReport",
    "PercentileInterval",
    "TailBin",
    "acceptance",
    "acceptance_bounds",
    "beta_tail_fit",
    "bin_index",
    "mismatch_report",
    "percentile_by_bin_interval",
    "sampled_acceptance",
    "sequence_bootstrap",
    "tail_by_bin",
    "tail_floor_by_bin",
    "weighted_mean",
    "weighted_percentile",
]
