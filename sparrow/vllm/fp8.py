"""The scales of an fp8 KV cache, one for each layer and kv head, set by the first prompts.

Scales are powers of 2: the 16-bit copy that prefill reads (``sparrow.vllm.kv_cache``) is exact.

Shapes: T tokens, K kv heads, N block tokens, D head dim, R rows in prefill, M blocks of the longest
sequence.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparrow.attention import CacheScales
from sparrow.attention.pages import FP8, FP8_MAX
from sparrow.errors import ConfigError

MARGIN = 4.0
"""Scales leave room for keys and values this many times as large as the largest of the prefill that
sets them.
"""


class LayerScales:
    """The scales of one layer, set by the first prefill after ``Fp8Cache.renew``. Their addresses
    stay the same, as CUDA graphs hold them.

    Args:
        kv_heads: K.
        cache: shared by the layers of a worker.
        layer: vLLM's attention layer, whose scales are taken if they are not Sparrow's to set.
    """

    def __init__(self, kv_heads: int, cache: Fp8Cache, layer: Any = None) -> None:
        self.values = CacheScales(
            *(torch.ones(kv_heads, device=cache.clipped.device) for _ in "kv")
        )
        self.cache = cache
        self.is_set = not cache.sets_scales
        if not cache.sets_scales:  # vLLM has one for the layer, or one for each kv head
            self.values.k.copy_(layer._k_scale)
            self.values.v.copy_(layer._v_scale)
        cache.layers.append(self)

    def settle(self, key_TKD: Tensor, value_TKD: Tensor, slot_mapping_T: Tensor) -> None:
        """Set the scales, unless they are set or vLLM is warming up, from the tokens that have a
        slot.

        Raises ConfigError: tokens are still cached that were stored with other scales.
        """
        if self.is_set or not self.cache.is_serving:
            return
        has_slot_T = slot_mapping_T >= 0
        if not has_slot_T.any():
            return
        if self.cache.reads_beyond(slot_mapping_T[has_slot_T]):
            raise ConfigError(
                "the scales of an fp8 KV cache can change only while nothing is cached; let all "
                "requests end and reset the prefix cache before sparrow_renew_kv_scales"
            )
        for new_TKD, scale_K in ((key_TKD, self.values.k), (value_TKD, self.values.v)):
            largest_K = new_TKD[: len(slot_mapping_T)][has_slot_T].float().abs().amax((0, 2))
            scale_K.copy_(power_of_two(largest_K, new_TKD.dtype))
        self.is_set = True


class Fp8Cache:
    """State shared by the layers of one worker: their scales, and a count of clipped tokens.

    Args:
        sets_scales: whether Sparrow sets the scales; in lossless mode vLLM does, as it stores the
            tokens of dense passes itself.
    """

    def __init__(self, device: torch.device, sets_scales: bool = True) -> None:
        self.sets_scales = sets_scales
        self.layers: list[LayerScales] = []
        # tokens with a key or value beyond its range
        self.clipped = torch.zeros(1, dtype=torch.int64, device=device)
        self.is_serving = False  # false while vLLM warms up with made-up prompts
        # the arguments of ``begin_step``: table, computed, block_tokens
        self._cached: tuple[Tensor, np.ndarray, int] | None = None

    def renew(self) -> None:
        """Have the next prefill set the scales again; the cache must be empty by then."""
        for layer in self.layers:
            layer.is_set = False

    @property
    def is_set(self) -> bool:
        return all(layer.is_set for layer in self.layers)

    def begin_step(
        self, one_token_prefills: int, table: Tensor, computed: np.ndarray, block_tokens: int
    ) -> None:
        """Note what a step will read, in case it sets scales.

        Args:
            one_token_prefills: sequences in prefill with one query token.
            table: blocks of every sequence, int32 [R, M].
            computed: tokens that each had in the cache before the step.
            block_tokens: N.

        Raises ConfigError: the first prompts of all have one token each, too few to set scales
        from.
        """
        if one_token_prefills and self.is_serving and not self.is_set:
            raise ConfigError(
                "an fp8 KV cache takes its scales from the first prompts, "
                "which must have two tokens or more"
            )
        self._cached = (table, computed, block_tokens)

    def reads_beyond(self, slots: Tensor) -> bool:
        """Return whether the step reads tokens that an earlier step stored.

        Prompts that share a prefix may be prefilled in one step and then read each other's blocks;
        those tokens do not count.
        """
        assert self._cached is not None
        table, computed, block_tokens = self._cached
        token = torch.arange(int(computed.max()), device=table.device)
        slot_RT = table[:, token // block_tokens].long() * block_tokens + token % block_tokens
        read = slot_RT[token < torch.from_numpy(computed).to(table.device)[:, None]]
        return not bool(torch.isin(read, slots).all())

    def describe(self) -> dict[str, Any]:
        """Report the range of the scales that Sparrow sets; None before they are set."""
        if not self.sets_scales:
            return {}
        scales = [x for layer in self.layers for x in (layer.values.k, layer.values.v)]
        low_high = (
            [float(f(torch.stack(scales))) for f in (torch.min, torch.max)] if self.is_set else None
        )
        return {"kv_scales": low_high}


def power_of_two(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the least power of 2 that brings ``MARGIN * largest`` within e4m3's range, and whose
    products with e4m3 values fit ``dtype``; 1 where ``largest`` is 0.
    """
    limits = torch.finfo(dtype)
    least = torch.finfo(FP8).smallest_normal * torch.finfo(FP8).eps
    most = np.floor(np.log2(limits.max / FP8_MAX))
    fewest = np.ceil(np.log2(limits.smallest_normal * limits.eps / least))
    exponent = (
        (largest.clamp(min=2.0**-60) * (MARGIN / FP8_MAX))
        .log2()
        .ceil()
        .clamp(max(-60, fewest), most)
    )
    return torch.where(largest > 0, exponent.exp2(), torch.ones_like(exponent))
