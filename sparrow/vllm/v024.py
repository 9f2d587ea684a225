"""vLLM 0.24: a block holds keys and values as two planes, and backends are not told which rows are in prefill.

Shapes: N block tokens, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def key_value(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """``[blocks, 2, N, K, D]`` to two views ``[blocks, K, N, D]``."""
    keys, values = kv_cache.transpose(2, 3).unbind(1)
    return keys, values


def with_prefill(prepare_attn: Callable[..., Any]) -> Callable[..., Any]:
    """Makes ``DefaultModelState.prepare_attn`` tell the batch's builders which rows are in prefill."""

    def prepared(
        self: Any, input_batch: Any, mode: Any, tables: Any, slots: Any, attn_groups: Any, *args: Any, **kwargs: Any
    ) -> Any:
        is_prefilling = torch.from_numpy(input_batch.is_prefilling_np)
        for group in (group for groups in attn_groups for group in groups):
            group.get_metadata_builder(0).is_prefilling = is_prefilling
        return prepare_attn(self, input_batch, mode, tables, slots, attn_groups, *args, **kwargs)

    return prepared
