"""On CPU: vLLM's CPU attention, and the reference implementation for sparse decode. For tests and small models."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from sparrow.attention.api import Implementation
from sparrow.engines.vllm.backend import SparseBuilder, SparseImpl, is_requested
from sparrow.engines.vllm.config import KERNELS_KEY
from sparrow.engines.vllm.versions import installed
from sparrow.errors import ConfigError


class CpuBuilder(SparseBuilder, CPUAttentionMetadataBuilder):
    pass


class CpuImpl(SparseImpl, CPUAttentionBackendImpl):
    def choose(self, asked: str | None, dtype: torch.dtype, page_size: int, device: torch.device) -> Implementation:
        """The reference implementation, whatever the model."""
        if asked is not None:
            raise ConfigError(f"there are no {asked} kernels on a CPU; leave {KERNELS_KEY} out")
        return "reference"

    def key_value(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        return installed(on_cpu=True).cpu_key_value(kv_cache, layer.isa)


class CpuBackend(CPUAttentionBackend):
    """Registered over ``CPU_ATTN``, the one backend vLLM takes on CPU; stock where no schedule was asked for."""

    @staticmethod
    def get_impl_cls() -> type:
        if not is_requested():
            return CPUAttentionBackendImpl
        installed(on_cpu=True).keep_cpu_weights()
        return CpuImpl

    @staticmethod
    def get_builder_cls() -> type:
        return CpuBuilder
