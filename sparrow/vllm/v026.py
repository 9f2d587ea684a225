"""vLLM 0.26 to 0.31: a token's key and value lie side by side.

Shapes: N block tokens, K kv heads, D head dim.
"""

from __future__ import annotations

from torch import Tensor


def key_value(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """``[blocks, K, N, 2 D]``, in any order in memory, to two views ``[blocks, K, N, D]``."""
    keys, values = kv_cache.chunk(2, dim=-1)
    return keys, values
