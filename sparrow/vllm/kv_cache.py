"""The 8-bit KV cache (fp8 or int8): its names in vLLM, and the 16-bit copy that prefill reads.

Prefill reads a copy because vLLM's own attention would round the queries to fp8 as well, and
doesn't support int8. The copy is exact, so prefill and decode steps see the same keys and values.
In decode steps, all layers run the ``sparrow.attention`` kernels.

Shapes: K kv heads, N block tokens, D head dim, R rows in prefill, M blocks of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparrow.attention.int8 import scale_of
from sparrow.attention.pages import FP8

STORED: dict[str, torch.dtype] = {"fp8": FP8, "fp8_e4m3": FP8, "int8_per_token_head": torch.int8}
"""vLLM's names for 8-bit caches, with the dtype in which Sparrow stores keys and values."""
INT8 = "int8_per_token_head"
NAMES = {FP8: "fp8_e4m3", torch.int8: INT8}
"""Names for 8-bit caches in Sparrow's reports."""
SCALES = {FP8: "scales per layer and kv head", torch.int8: "scales per token and kv head"}
COPIED_TOKENS = 65_536
"""Maximum number of cached tokens to copy at once for prefill. A longer sequence is still copied in
one go.
"""


@dataclass(frozen=True)
class CopiedBlocks:
    """The KV blocks of some rows in prefill, and where these blocks are in the copy."""

    blocks: Tensor  # int64, block ids in the cache, in copy order
    table: Tensor  # int32 [R, M], block table for the copy


def copied_blocks(block_table: Tensor, lengths: np.ndarray, block_tokens: int) -> CopiedBlocks:
    """List these rows' blocks.

    Args:
        block_table: int32 [R, M].
        lengths: tokens per row, or an upper bound.
    """
    counts = -(-lengths // block_tokens)
    row = np.repeat(np.arange(len(lengths)), counts)
    first = np.cumsum(counts) - counts
    place = np.arange(len(row)) - first[row]
    at = torch.from_numpy(row * block_table.stride(0) + place).to(block_table.device)
    most = int(counts.max())
    table = torch.from_numpy(
        first[:, None] + np.minimum(np.arange(most), counts[:, None] - 1)
    ).int()
    flat = block_table.as_strided((block_table.stride(0) * len(lengths),), (1,))
    return CopiedBlocks(flat[at].long(), table.to(block_table.device))


def groups(lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Split rows into runs of at most ``COPIED_TOKENS`` tokens. A longer row gets a run of its own.
    For each run, yield the index of its first row and the index after its last row.
    """
    first = total = 0
    for row, length in enumerate(lengths.tolist()):
        if row > first and total + length > COPIED_TOKENS:
            yield first, row
            first = row
            total = 0
        total += length
    yield first, len(lengths)


def copy_blocks(cache: Tensor, blocks: Tensor, scales: Tensor, out: Tensor) -> None:
    """Dequantise the keys or values in some blocks, using their scales (see ``CacheScales``). Write
    them to ``out`` ``[blocks, K, N, D]``, which has a 16-bit or 32-bit dtype.
    """
    codes = cache.view(torch.uint8).index_select(0, blocks).view(cache.dtype)
    is_int8 = cache.dtype == torch.int8
    scale = (
        scale_of(scales.index_select(0, blocks))[..., None] if is_int8 else scales[:, None, None]
    )
    torch.mul(codes.to(out.dtype), scale.to(out.dtype), out=out)


def with_tail(
    spec: Any, page_size: int, landmark_dtype: torch.dtype, stored: torch.dtype | None
) -> tuple[Any, float]:
    """Pad the blocks in a layer's KV cache spec for landmarks and int8 scales. Return the padded
    spec, and the fraction of a block that landmarks take up. In a hybrid model, vLLM pads the
    blocks of linear layers to the same size.

    Args:
        stored: float8_e4m3fn, int8, or None for a cache in the model's dtype.
    """
    scales = 0
    if stored == torch.int8:
        # Otherwise, some of vLLM's backends leave room for float32 scales among the keys and
        # values.
        spec = replace(spec, kv_quant_mode=type(spec.kv_quant_mode).NONE)
        scales = 2 * spec.block_size * spec.num_kv_heads
    marks = (
        spec.block_size // page_size * spec.num_kv_heads * spec.head_size * landmark_dtype.itemsize
    )
    marks = -(-marks // spec.dtype.itemsize) * spec.dtype.itemsize
    block = spec.page_size_bytes + scales + marks
    return replace(spec, page_size_padded=block), marks / block


def tail_of_blocks(
    kv_cache: Tensor, first: int, dtype: torch.dtype, shape: tuple[int, ...]
) -> Tensor:
    """View the same part of every block in a layer's cache as a tensor with this dtype and shape.
    The part starts at byte ``first`` of the block, and is contiguous within the block.
    """
    of_block = torch.empty(shape[1:], device="meta").stride()
    begin, block = (
        n * kv_cache.itemsize // dtype.itemsize
        for n in (kv_cache.storage_offset(), kv_cache.stride(0))
    )
    return torch.empty(0, dtype=dtype, device=kv_cache.device).set_(
        kv_cache.untyped_storage(), begin + first // dtype.itemsize, shape, (block, *of_block)
    )
