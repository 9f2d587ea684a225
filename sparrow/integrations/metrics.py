"""Metrics that the adapters log in addition to ``sparrow.mismatch.mismatch_metrics``, under the
same names in every trainer.

All values cover the time since the last log; ``sparrow/drafts/*`` is there in lossless mode only:

sparrow/tokens_read              share of the cached tokens that decode steps have read; above 1 if
                                 drafts do not pay
sparrow/drafts/accepted          share of the drafted tokens that verification kept
sparrow/drafts/tokens_per_cycle  tokens that one verification of a sequence gave: accepted drafts
                                 and one more
sparrow/drafts/acceptance        mean acceptance of the drafts that verification looked at, exact
sparrow/drafts/p5                its 5th percentile
sparrow/drafts/p5/START-END      the p5 of one length bin
"""

from sparrow.engines.base import Counters


def counter_metrics(counters: Counters) -> dict[str, float]:
    """Counts of vLLM's workers as flat scalars; none if no worker decoded."""
    metrics = {}
    if counters.tokens_held:
        metrics["sparrow/tokens_read"] = counters.read_fraction
    if counters.drafted:
        metrics["sparrow/drafts/accepted"] = counters.accepted / counters.drafted
    if counters.cycles:
        metrics["sparrow/drafts/tokens_per_cycle"] = counters.tokens_per_cycle
    if counters.acceptance.drafts:
        metrics["sparrow/drafts/acceptance"] = counters.acceptance.mean
        metrics["sparrow/drafts/p5"] = counters.acceptance.percentile(5)
        metrics |= {
            f"sparrow/drafts/p5/{b.start}-{b.end}": b.p5 for b in counters.acceptance.bins()
        }
    return metrics
