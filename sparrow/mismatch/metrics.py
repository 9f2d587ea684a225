"""A mismatch report as scalars for trackers, under the same names wherever it is logged.

sparrow/p5                     the lowest 5th percentile of acceptance (lower bound) over all length
                               bins
sparrow/p5/START-END           that of one bin; /low and /high are its 95 % interval, resampled by
                               sequence, where at least two sequences reach the bin; /upper is the
                               percentile of the upper bound; where dense rollouts were measured,
                               /ceiling is their p5, with /ceiling/low and /ceiling/high, and
                               /relative is the relative p5 (``mismatch.tau``)
sparrow/acceptance_mean        mean acceptance (lower bound)
sparrow/sequences              responses measured
"""

from math import isnan

from sparrow.mismatch.bootstrap import MismatchReport
from sparrow.mismatch.tau import relative


def mismatch_metrics(report: MismatchReport) -> dict[str, float]:
    """A report as flat scalars; unknown values (nan) are left out."""
    name = f"sparrow/p{report.percentile:g}"
    metrics = {
        name: min(b.lower_bound for b in report.bins),
        "sparrow/acceptance_mean": report.mean,
        "sparrow/sequences": float(report.n_sequences),
    }
    for b in report.bins:
        at = f"{name}/{b.start}-{b.end}"
        metrics |= {
            at: b.lower_bound,
            f"{at}/low": b.interval_low,
            f"{at}/high": b.interval_high,
            f"{at}/upper": b.upper_bound,
            f"{at}/ceiling": b.ceiling,
            f"{at}/ceiling/low": b.ceiling_low,
            f"{at}/ceiling/high": b.ceiling_high,
            f"{at}/relative": relative(b).lower_bound,
        }
    return {name: value for name, value in metrics.items() if not isnan(value)}
