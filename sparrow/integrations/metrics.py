"""Metrics the adapters log on top of ``sparrow.mismatch.mismatch_metrics``, under the same names in
every trainer.

All values cover the time since the last log. ``sparrow/drafts/*`` is logged only in lossless mode.

sparrow/tokens_read              share of cached tokens read by decode steps; above 1 if drafts
                                 cost more reads than they save
sparrow/dense_tokens             share of sampled tokens for which a lossy actor read every page
sparrow/drafts/drafted           number of drafted tokens
sparrow/drafts/accepted          share of drafted tokens that were accepted
sparrow/drafts/tokens_per_cycle  mean tokens per verification of a sequence: accepted drafts plus
                                 one
sparrow/drafts/acceptance        mean exact acceptance of each cycle's drafts, up to and
                                 including the first rejected draft
sparrow/drafts/p5                the 5th percentile of this acceptance
sparrow/drafts/p5/START-END      the p5 of one length bin
"""

from sparrow.engines.base import Counters


def counter_metrics(counters: Counters) -> dict[str, float]:
    """Flatten the counts of vLLM's workers to scalars. The result is empty if no worker has
    decoded.
    """
    metrics = {}
    if counters.tokens_held:
        metrics["sparrow/tokens_read"] = counters.read_fraction
    if counters.rows:
        metrics["sparrow/dense_tokens"] = counters.dense_fraction
    if counters.drafted:
        metrics["sparrow/drafts/drafted"] = counters.drafted
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
