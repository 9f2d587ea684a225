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
from sparrow.errors import ConfigError
from sparrow.vllm import patches
from sparrow.vllm.backend import SparseBuilder, SparseImpl, is_requested
from sparrow.vllm.config import KERNELS_KEY
from sparrow.vllm.versions import installed


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
        patches.apply(patches.ATTENTION + patches.CPU_WEIGHTS)
        return CpuImpl

    @staticmethod
    def get_builder_cls() -> type:
        return CpuBuilder
