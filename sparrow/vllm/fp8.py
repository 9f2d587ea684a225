"""Scales of the fp8 KV cache. Each layer has one key scale and one value scale per kv head, set
from the first prompts.

They are powers of 2, so the 16-bit copy read by prefill (``sparrow.vllm.kv_cache``) is exact.

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
"""Headroom: keys and values may get this many times larger than in the prefill that sets the
scales.
"""


class LayerScales:
    """One layer's scales. The first prefill sets the scales, and so does the first prefill after
    ``Fp8Cache.renew``. The tensors are updated in place, because CUDA graphs refer to them by
    address.

    Args:
        kv_heads: K.
        cache: the state shared by a worker's layers.
        layer: vLLM's attention layer, whose scales are used if Sparrow doesn't set its own.
    """

    def __init__(self, kv_heads: int, cache: Fp8Cache, layer: Any = None) -> None:
        self.values = CacheScales(
            *(torch.ones(kv_heads, device=cache.clipped.device) for _ in "kv")
        )
        self.cache = cache
        self.is_set = not cache.sets_scales
        if not cache.sets_scales:  # vLLM has one scale per layer or per KV head
            self.values.k.copy_(layer._k_scale)
            self.values.v.copy_(layer._v_scale)
        cache.layers.append(self)

    def set_once(self, key_TKD: Tensor, value_TKD: Tensor, slot_mapping_T: Tensor) -> None:
        """Set the scales from the tokens that have a slot. This is a no-op if they are already set,
        or if vLLM is still warming up.

        Raises ConfigError if the step reads cached tokens that were stored with different scales.
        """
        if self.is_set or not self.cache.is_serving:
            return
        has_slot_T = slot_mapping_T >= 0
        if not has_slot_T.any():
            return
        if self.cache.reads_beyond(slot_mapping_T[has_slot_T]):
            raise ConfigError(
                "the scales of an fp8 KV cache can change only while the cache is empty; wait for "
                "all requests to finish, reset the prefix cache, then call sparrow_renew_kv_scales"
            )
        for new_TKD, scale_K in ((key_TKD, self.values.k), (value_TKD, self.values.v)):
            largest_K = new_TKD[: len(slot_mapping_T)][has_slot_T].float().abs().amax((0, 2))
            scale_K.copy_(power_of_two(largest_K, new_TKD.dtype))
        self.is_set = True


class Fp8Cache:
    """State shared by a worker's layers: their scales, and a count of clipped tokens.

    Args:
        sets_scales: whether Sparrow sets the scales. In lossless mode, vLLM sets them, because it
            stores the tokens from dense passes itself.
    """

    def __init__(self, device: torch.device, sets_scales: bool = True) -> None:
        self.sets_scales = sets_scales
        self.layers: list[LayerScales] = []
        # number of tokens with a key or value outside the range of its scale
        self.clipped = torch.zeros(1, dtype=torch.int64, device=device)
        self.is_serving = False  # False during vLLM's warm-up, which uses dummy prompts
        # table, computed and block_tokens from the latest ``begin_step``
        self._cached: tuple[Tensor, np.ndarray, int] | None = None

    def renew(self) -> None:
        """Let the next prefill set the scales again. The cache must be empty by then."""
        for layer in self.layers:
            layer.is_set = False

    @property
    def is_set(self) -> bool:
        return all(layer.is_set for layer in self.layers)

    def begin_step(
        self, one_token_prefills: int, table: Tensor, computed: np.ndarray, block_tokens: int
    ) -> None:
        """Record what a step will read, in case the step sets scales.

        Args:
            one_token_prefills: number of sequences in prefill with a single query token.
            table: block table, int32 [R, M].
            computed: number of tokens each sequence had in the cache before the step.
            block_tokens: N.

        Raises ConfigError if the scales are not set yet and a prompt has only one token.
        """
        if one_token_prefills and self.is_serving and not self.is_set:
            raise ConfigError(
                "the scales of an fp8 KV cache are set from the first prompts, but one of "
                "these prompts has only one token; start with prompts of two tokens or more"
            )
        self._cached = (table, computed, block_tokens)

    def reads_beyond(self, slots: Tensor) -> bool:
        """Return whether the step reads any tokens stored by an earlier step.

        Prompts with a shared prefix may be prefilled in the same step and read each other's blocks.
        Such reads don't count.
        """
        assert self._cached is not None
        table, computed, block_tokens = self._cached
        token = torch.arange(int(computed.max()), device=table.device)
        slot_RT = table[:, token // block_tokens].long() * block_tokens + token % block_tokens
        read = slot_RT[token < torch.from_numpy(computed).to(table.device)[:, None]]
        return not bool(torch.isin(read, slots).all())

    def describe(self) -> dict[str, Any]:
        """Report the range of the scales, if Sparrow sets them. The range is None until they have
        been set.
        """
        if not self.sets_scales:
            return {}
        scales = [x for layer in self.layers for x in (layer.values.k, layer.values.v)]
        low_high = (
            [float(f(torch.stack(scales))) for f in (torch.min, torch.max)] if self.is_set else None
        )
        return {"kv_scales": low_high}


def power_of_two(largest: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the smallest power of 2 that brings ``MARGIN * largest`` into e4m3's range and keeps
    products with e4m3 values representable in ``dtype``. Where ``largest`` is 0, return 1.
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
