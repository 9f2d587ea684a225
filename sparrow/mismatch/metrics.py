"""Convert a mismatch report to scalars for trackers. All trainers log them under the same names.

sparrow/p5                     the 5th percentile of the lower bound on acceptance, in the length
                               bin where it is lowest. sparrow/p5/upper is the same for the upper
                               bound
sparrow/p5/START-END           the 5th percentile of the lower bound in one bin. /low and /high are
                               its 95 % interval from resampling sequences, if at least two
                               sequences reach the bin. /upper is the 5th percentile of the upper
                               bound, and /upper/high the upper end of its interval. If dense
                               rollouts were measured, /ceiling is their p5, /ceiling/low and
                               /ceiling/high are the interval of this p5, and /relative is the
                               relative p5 (``mismatch.tau``). For samples from the dense policy
                               itself, only /upper, /upper/high and /ceiling are logged, because the
                               lower bound depends on the list length rather than on mismatch
sparrow/acceptance_mean        mean acceptance (lower bound)
sparrow/sequences              responses measured
"""

from math import isnan

import numpy as np

from sparrow.mismatch.bootstrap import MismatchReport
from sparrow.mismatch.tau import relative


def mismatch_metrics(report: MismatchReport, dense_up_to: float = 0) -> dict[str, float]:
    """Convert a report to flat scalars, leaving out unknown values (nan).

    Up to length ``dense_up_to``, samples come from the dense policy; pass infinity if they all do.
    """
    name = f"sparrow/p{report.percentile:g}"
    metrics = {"sparrow/sequences": float(report.n_sequences)}
    sparse = [b for b in report.bins if b.end > dense_up_to]
    if sparse:
        tokens = [b.n_tokens for b in sparse]
        metrics |= {
            name: min(b.lower_bound for b in sparse),
            f"{name}/upper": min(b.upper_bound for b in sparse),
            "sparrow/acceptance_mean": float(np.average([b.mean for b in sparse], weights=tokens)),
        }
    for b in report.bins:
        at = f"{name}/{b.start}-{b.end}"
        if b.end > dense_up_to:
            metrics |= {
                at: b.lower_bound,
                f"{at}/low": b.interval_low,
                f"{at}/high": b.interval_high,
                f"{at}/relative": relative(b).lower_bound,
            }
        metrics |= {
            f"{at}/upper": b.upper_bound,
            f"{at}/upper/high": b.upper_bound_high,
            f"{at}/ceiling": b.ceiling,
            f"{at}/ceiling/low": b.ceiling_low,
            f"{at}/ceiling/high": b.ceiling_high,
        }
    return {name: value for name, value in metrics.items() if not isnan(value)}
