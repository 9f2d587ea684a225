"""An fp8 KV cache: the scales of its layers, and the 16-bit copy of it that prefill reads.

Queries stay in 16 bits. Decode steps of all layers run the kernels of ``sparrow.attention``, which take the cache as it
is. vLLM's own attention would round the queries to fp8 as well; in prefill it is given a 16-bit copy of the blocks that
it reads instead, so that prefill and decoding see the same keys and values. Scales are powers of 2: the copy is exact.

Shapes: T tokens, K kv heads, N block tokens, D head dim, R rows in prefill, M blocks of the longest sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparrow.attention import CacheScales
from sparrow.attention.pages import FP8, FP8_MAX
from sparrow.errors import ConfigError

CACHE_DTYPES = ("fp8", "fp8_e4m3")
"""What vLLM calls such a cache."""
MARGIN = 4.0
"""Scales leave room for keys and values this many times as large as any of the prefill that sets them."""
COPIED_TOKENS = 65_536
"""Tokens of the cache that are copied at once for prefill, or one sequence if it is longer."""


class LayerScales:
    """The scales of one layer, set by the first prefill after ``Fp8Cache.renew``; graphs hold their addresses.

    Args:
        kv_heads: K.
        cache: what the layers of a worker share.
    """

    def __init__(self, kv_heads: int, cache: Fp8Cache) -> None:
        self.values = CacheScales(*(torch.ones(kv_heads, device=cache.clipped.device) for _ in "kv"))
        self.cache, self.is_set = cache, False
        cache.layers.append(self)

    def settle(self, key_TKD: Tensor, value_TKD: Tensor, slot_mapping_T: Tensor) -> None:
        """Set scales that are not set, from the tokens that have a slot; but not in the steps of vLLM's warm-up.

        Raises ConfigError: tokens are cached that other scales were used for.
        """
        if self.is_set or not self.cache.is_serving:
            return
        has_slot_T = slot_mapping_T >= 0
        if not has_slot_T.any():
            return
        if self.cache.reads_beyond(slot_mapping_T[has_slot_T]):
            raise ConfigError(
                "the scales of an fp8 KV cache can change only while nothing is cached; let all requests end and reset "
                "the prefix cache before sparrow_renew_kv_scales"
            )
        for new_TKD, scale_K in ((key_TKD, self.values.k), (value_TKD, self.values.v)):
            largest_K = new_TKD[: len(slot_mapping_T)][has_slot_T].float().abs().amax((0, 2))
            scale_K.copy_(power_of_two(largest_K, new_TKD.dtype))
        self.is_set = True


class Fp8Cache:
    """What the layers of one worker share: their scales, and a count of what was clipped."""

    def __init__(self, device: torch.device) -> None:
        self.layers: list[LayerScales] = []
        self.clipped = torch.zeros(1, dtype=torch.int64, device=device)  # tokens with a key or value beyond its range
        self.is_serving = False  # false while vLLM warms up, with prompts of its own
        self._cached: tuple[Tensor, np.ndarray, int] | None = None  # what ``begin_step`` was told

    def renew(self) -> None:
        """Have the next prefill set the scales again; nothing may be cached by then."""
        for layer in self.layers:
            layer.is_set = False

    @property
    def is_set(self) -> bool:
        return all(layer.is_set for layer in self.layers)

    def begin_step(self, one_token_prefills: int, table: Tensor, computed: np.ndarray, block_tokens: int) -> None:
        """Note what a step will read, in case it sets scales.

        Args:
            one_token_prefills: sequences in prefill with one query token.
            table: blocks of every sequence, int32 [R, M].
            computed: tokens that each had in the cache before the step.
            block_tokens: N.

        Raises ConfigError: the first prompts of all have one token each, too few to set scales from.
        """
        if one_token_prefills and self.is_serving and not self.is_set:
            raise ConfigError(
                "an fp8 KV cache takes its scales from the first prompts, which must have two tokens or more"
            )
        self._cached = (table, computed, block_tokens)

    def reads_beyond(self, slots: Tensor) -> bool:
        """Whether the step reads tokens that it does not store itself, that is, that an earlier step stored.

        Prompts that share a prefix may be prefilled in one step, and then read each other's blocks.
        """
        assert self._cached is not None
        table, computed, block_tokens = self._cached
        token = torch.arange(int(computed.max()), device=table.device)
        slot_RT = table[:, token // block_tokens].long() * block_tokens + token % block_tokens
        read = slot_RT[token < torch.from_numpy(computed).to(table.device)[:, None]]
        return not bool(torch.isin(read, slots).all())

    def describe(self) -> dict[str, Any]:
        """The dtype and the range of scales, None before they are set."""
        scales = [x for layer in self.layers for x in (layer.values.k, layer.values.v)]
        low_high = [float(f(torch.stack(scales))) for f in (torch.min, torch.max)] if self.is_set else None
        return {"kv_cache": "fp8_e4m3", "kv_scales": low_high}


def power_of_two(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """The least power of 2 that brings ``MARGIN * largest`` within e4m3's range, 1 for 0; products fit ``dtype``."""
    limits, least = torch.finfo(dtype), torch.finfo(FP8).smallest_normal * torch.finfo(FP8).eps
    most = np.floor(np.log2(limits.max / FP8_MAX))
    fewest = np.ceil(np.log2(limits.smallest_normal * limits.eps / least))
    exponent = (largest.clamp(min=2.0**-60) * (MARGIN / FP8_MAX)).log2().ceil().clamp(max(-60, fewest), most)
    return torch.where(largest > 0, exponent.exp2(), torch.ones_like(exponent))


@dataclass(frozen=True)
class CopiedBlocks:
    """Blocks of some rows in prefill, and where they lie in the copy."""

    blocks: Tensor  # int64, by place in the copy
    table: Tensor  # int32 [R, M], a block table of the copy


def copied_blocks(block_table: Tensor, lengths: np.ndarray, block_tokens: int) -> CopiedBlocks:
    """The blocks that rows of these lengths (tokens, at least what is cached) have in ``block_table``, int32 [R, M]."""
    counts = -(-lengths // block_tokens)
    row, first = np.repeat(np.arange(len(lengths)), counts), np.cumsum(counts) - counts
    place = np.arange(len(row)) - first[row]
    at = torch.from_numpy(row * block_table.stride(0) + place).to(block_table.device)
    most = int(counts.max())
    table = torch.from_numpy(first[:, None] + np.minimum(np.arange(most), counts[:, None] - 1)).int()
    flat = block_table.as_strided((block_table.stride(0) * len(lengths),), (1,))
    return CopiedBlocks(flat[at].long(), table.to(block_table.device))


def groups(lengths: np.ndarray) -> Iterator[tuple[int, int]]:
    """Consecutive rows, first and last plus one, that have up to ``COPIED_TOKENS`` tokens together."""
    first = total = 0
    for row, length in enumerate(lengths.tolist()):
        if row > first and total + length > COPIED_TOKENS:
            yield first, row
            first, total = row, 0
        total += length
    yield first, len(lengths)


def copy_blocks(cache: Tensor, blocks: Tensor, scale_K: Tensor, out: Tensor) -> None:
    """Writes keys or values ``[blocks, K, N, D]`` of some blocks, times their scales, to ``out`` in 16 or 32 bits."""
    codes = cache.view(torch.uint8).index_select(0, blocks).view(FP8)
    torch.mul(codes.to(out.dtype), scale_K.to(out.dtype)[:, None, None], out=out)
