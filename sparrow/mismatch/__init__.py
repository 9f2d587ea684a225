"""Measure how far the sparse actor is from the dense policy. This package computes per-token
acceptance, the tail of acceptance at each length, confidence intervals, and a report.
"""

from sparrow.mismatch.acceptance import AcceptanceBounds, acceptance, acceptance_bounds
from sparrow.mismatch.bootstrap import (
    MIN_SEQUENCES,
    BinMismatch,
    Histogram,
    Interval,
    MismatchReport,
    PercentileInterval,
    few_sequences,
    mismatch_report,
    percentile_by_bin_interval,
    plain,
    sequence_bootstrap,
    weighted_mean,
    weighted_percentile,
)
from sparrow.mismatch.ceiling import Ceiling, engine_noise, with_noise
from sparrow.mismatch.metrics import mismatch_metrics
from sparrow.mismatch.sampled import sampled_acceptance, tail_floor_by_bin
from sparrow.mismatch.tail import split_by_bin
from sparrow.mismatch.tau import Tau, relative_p5, relative_span
