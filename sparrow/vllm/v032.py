"""vLLM 0.32 and 0.33: the layout of 0.26 on CUDA, and a CPU backend that Sparrow can share.

Shapes: N block tokens, K kv heads, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.errors import ConfigError
from sparrow.vllm.v026 import key_value

__all__ = ["cpu_key_value", "key_value"]


def cpu_key_value(kv_cache: Tensor, isa: str) -> tuple[Tensor, Tensor]:
    """The same two views of a layer's cache on CPU, where vLLM stores a block's keys transposed, ``[D, N]``.

    Raises ConfigError: an instruction set that packs keys in another order.
    """
    if isa not in ("vec", "vec16"):
        raise ConfigError(f"Sparrow cannot read the cache of vLLM's {isa!r} kernels for CPU; set dtype='float32'")
    blocks, K, N, D = *kv_cache.shape[:3], kv_cache.shape[3] // 2
    block_stride, offset = kv_cache.stride(0), kv_cache.storage_offset()
    keys = torch.as_strided(kv_cache, (blocks, K, N, D), (block_stride, 2 * N * D, 1, N), offset)
    values = torch.as_strided(kv_cache, (blocks, K, N, D), (block_stride, 2 * N * D, D, 1), offset + N * D)
    return keys, values
