"""What the adapters log, under the same names in every trainer.

sparrow/p5                     the least 5th percentile of acceptance (lower bound) of any length bin
sparrow/p5/START-END           that of one bin; /low and /high are its 95 % interval, resampled by sequence, where at
                               least two sequences reach the bin; /upper is the percentile of the upper bound
sparrow/acceptance_mean        mean acceptance (lower bound)
sparrow/sequences              responses measured
sparrow/tokens_read            share of the cached tokens that decode steps have read since the last log
"""

from collections.abc import Mapping, Sequence
from math import isnan

from sparrow.mismatch import MismatchReport


def mismatch_metrics(report: MismatchReport) -> dict[str, float]:
    """A report as flat scalars; what is not known (nan) is left out."""
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
        }
    return {name: value for name, value in metrics.items() if not isnan(value)}


def read_fraction(counters: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """``sparrow/tokens_read`` from what the workers counted; nothing if none of them decoded."""
    read, held = (sum(c[name] for c in counters) for name in ("tokens_read", "tokens_held"))
    return {"sparrow/tokens_read": read / held} if held else {}
