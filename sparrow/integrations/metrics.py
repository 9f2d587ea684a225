"""What the adapters log beside ``sparrow.mismatch.mismatch_metrics``, under the same names in every trainer.

sparrow/tokens_read            share of the cached tokens that decode steps have read since the last log
"""

from collections.abc import Mapping, Sequence

from sparrow.mismatch import mismatch_metrics as mismatch_metrics


def read_fraction(counters: Sequence[Mapping[str, int]]) -> dict[str, float]:
    """``sparrow/tokens_read`` from what the workers counted; nothing if none of them decoded."""
    read, held = (sum(c[name] for c in counters) for name in ("tokens_read", "tokens_held"))
    return {"sparrow/tokens_read": read / held} if held else {}
