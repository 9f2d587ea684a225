"""The CPU attention backend, meant for tests and small models. It uses vLLM's CPU attention, and
the reference implementation for sparse decode steps.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from sparrow.attention import reference
from sparrow.vllm import patches, versions
from sparrow.vllm.backend import SparseBuilder, SparseImpl, is_requested


class CpuBuilder(SparseBuilder, CPUAttentionMetadataBuilder):
    """A builder that keeps vLLM from using its AMX kernels for bfloat16. These kernels store keys
    in tiles, which the reference implementation can't read.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        if self.runtime is not None and self.isa == "amx":
            self.isa = "vec"
            self._set_isa_to_layers(layer_names)


class CpuImpl(SparseImpl, CPUAttentionBackendImpl):
    def key_value(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        return versions.cpu_key_value(kv_cache, layer.isa)

    def do_kv_cache_update(
        self, layer: Any, key: Tensor, value: Tensor, kv_cache: Tensor, slot_mapping: Tensor
    ) -> None:
        """Store keys and values, using Sparrow's code for an 8-bit cache and vLLM's otherwise."""
        if not self.is_in_8_bits:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        self.store(layer, key, value, kv_cache, slot_mapping, reference.store_tokens)


class CpuBackend(CPUAttentionBackend):
    """Replaces ``CPU_ATTN``, the only backend vLLM accepts on a CPU. Without a schedule, it behaves
    like vLLM's own backend.
    """

    @staticmethod
    def get_impl_cls() -> type:
        if not is_requested():
            return CPUAttentionBackendImpl
        patches.apply(patches.ATTENTION + patches.CPU_WEIGHTS)
        return CpuImpl

    @staticmethod
    def get_builder_cls() -> type:
        return CpuBuilder
