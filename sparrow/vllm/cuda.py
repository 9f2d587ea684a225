"""The CUDA attention backend. It uses vLLM's FlashAttention for prefill and dense layers, and
Sparrow's kernels for sparse decode steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.flash_attn import (
    FlashAttentionBackend,
    FlashAttentionImpl,
    FlashAttentionMetadataBuilder,
)

from sparrow.attention import DecodeWorkspace
from sparrow.attention.triton import store_tokens
from sparrow.errors import ConfigError
from sparrow.vllm import patches, versions
from sparrow.vllm.backend import SparseBuilder, SparseImpl, is_requested
from sparrow.vllm.config import requested
from sparrow.vllm.kv_cache import INT8

versions.check(on_cpu=False)


class CudaBuilder(SparseBuilder, FlashAttentionMetadataBuilder):
    # With one token per sequence, the whole model is captured in a graph. With prefill, attention
    # runs outside the graph.
    _cudagraph_support = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> AttentionCGSupport:
        """In lossless mode, allow CUDA graphs for verification, because vLLM itself only runs dense
        passes. Engines without Sparrow have the same graphs as in stock vLLM.
        """
        decoding = requested(vllm_config)
        if decoding is None:
            return FlashAttentionMetadataBuilder.get_cudagraph_support(vllm_config, kv_cache_spec)
        return AttentionCGSupport.UNIFORM_BATCH if decoding.is_lossless else cls._cudagraph_support


class CudaImpl(SparseImpl, FlashAttentionImpl):
    def key_value(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        return versions.key_value(kv_cache)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store keys and values.

        Sparrow's kernel writes to an 8-bit cache. It also writes to any cache that Sparrow's decode
        kernel reads next, because the decode kernel may start before the write is complete.
        Otherwise, and in every dense pass in lossless mode, vLLM's kernel does the writing.
        """
        if self.decodes_next or self.is_in_8_bits:
            self.store(layer, key, value, kv_cache, slot_mapping, store_tokens)
        else:
            super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)

    def make_workspace(
        self, max_rows: int, max_pages: int, tokens: int, device: torch.device
    ) -> DecodeWorkspace:
        return DecodeWorkspace(
            max_rows,
            self.num_kv_heads,
            self.num_queries_per_kv,
            self.head_size,
            max_pages,
            device,
            tokens,
        )


class CudaBackend(FlashAttentionBackend):
    """The backend registered as ``CUSTOM``."""

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        """Support FlashAttention's dtypes, plus int8. FlashAttention reads a 16-bit copy of an int8
        cache.
        """
        return kv_cache_dtype == INT8 or super().supports_kv_cache_dtype(kv_cache_dtype)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *args: Any, **kwargs: Any
    ) -> str | None:
        """Return the reason FlashAttention cannot run a model, or None if it can. An int8 cache is
        fine, because FlashAttention reads a 16-bit copy of it.
        """
        seen: Any = "auto" if kv_cache_dtype == INT8 else kv_cache_dtype
        return super().supports_combination(head_size, dtype, seen, *args, **kwargs)

    @staticmethod
    def get_impl_cls() -> type:
        if not is_requested():
            raise ConfigError(
                "attention_backend='CUSTOM' selects Sparrow, but no schedule was given; pass "
                "additional_config={'sparrow': 'qwen3-4b-0.86'} or set SPARROW_SCHEDULE"
            )
        patches.apply(patches.ATTENTION)
        return CudaImpl

    @staticmethod
    def get_builder_cls() -> type:
        return CudaBuilder


class CudaFlashBackend(CudaBackend):
    """Replaces ``FLASH_ATTN`` if the environment sets a schedule. Engines started after the
    schedule is unset use vLLM's own backend.
    """

    @staticmethod
    def get_name() -> str:
        return "FLASH_ATTN"

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: Any) -> bool:
        stock = CudaBackend if is_requested() else FlashAttentionBackend
        return stock.supports_kv_cache_dtype(kv_cache_dtype)

    @classmethod
    def supports_combination(
        cls, head_size: int, dtype: torch.dtype, kv_cache_dtype: Any, *args: Any, **kwargs: Any
    ) -> str | None:
        stock = CudaBackend if is_requested() else FlashAttentionBackend
        return stock.supports_combination(head_size, dtype, kv_cache_dtype, *args, **kwargs)

    @staticmethod
    def get_impl_cls() -> type:
        return CudaBackend.get_impl_cls() if is_requested() else FlashAttentionImpl
