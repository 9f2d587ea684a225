"""Which vLLM this is, and how it differs from the others.

Shapes: N block tokens, K kv heads, D head dim.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor

from sparrow.errors import ConfigError

SUPPORTED = ">=0.26,<0.34"
"""What Sparrow runs in; the extra ``vllm`` of pyproject.toml installs the same."""
OLDEST_ON_CPU = "0.32"
LOSSLESS_ON_CUDA = ("0.26", "0.29", "0.30", "0.31", "0.33")
"""Versions that lossless mode was run with on a GPU."""
UNTESTED_ENVIRONMENT = "SPARROW_UNTESTED_VLLM"


def check(on_cpu: bool) -> None:
    """Check that Sparrow runs in the vLLM of this process.

    Raises ConfigError: a version that it does not run in, or not on a CPU.
    """
    import vllm

    if not SpecifierSet(SUPPORTED).contains(vllm.__version__, prereleases=True):
        raise ConfigError(
            f"Sparrow does not run in vLLM {vllm.__version__}; install 'vllm{SUPPORTED}', "
            "or drop the schedule"
        )
    if on_cpu and Version(vllm.__version__).release < Version(OLDEST_ON_CPU).release:
        raise ConfigError(
            f"Sparrow runs on CPU from vLLM {OLDEST_ON_CPU} on, not with {vllm.__version__}; "
            "use a GPU"
        )


def check_lossless(on_cpu: bool) -> None:
    """Check that lossless mode can run in the vLLM of this process.

    Raises ConfigError: see ``check``; or on a GPU a version that was never run there, unless
    ``SPARROW_UNTESTED_VLLM`` is 1.
    """
    import vllm

    check(on_cpu)
    major, minor = Version(vllm.__version__).release[:2]
    tries_untested = os.environ.get(UNTESTED_ENVIRONMENT, "").strip() == "1"
    if not on_cpu and not tries_untested and f"{major}.{minor}" not in LOSSLESS_ON_CUDA:
        raise ConfigError(
            f"mode 'lossless' was never run on a GPU with vLLM {vllm.__version__}, only with {LOSSLESS_ON_CUDA}; "
            f"install one of those, or set {UNTESTED_ENVIRONMENT}=1 to try it"
        )


def drafts_have_own_noise() -> bool:
    """Whether vLLM draws drafts from other noise than the tokens that replace rejected ones (from
    0.30 on).
    """
    return "is_drafting" in _parameters_of_gumbel_sample()


def draft_logits_argument() -> str:
    """The parameter of ``gumbel_sample`` that says where it stores the logits it draws from.

    vLLM 0.28 and later store the model's logits (``logits_cache``), earlier versions divide by the
    temperature first.
    """
    name = "logits_cache"
    return name if name in _parameters_of_gumbel_sample() else "output_processed_logits"


def _parameters_of_gumbel_sample() -> Mapping[str, Any]:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    return signature(gumbel_sample).parameters


def key_value(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's cache on CUDA, ``[blocks, K, N, 2 D]`` in any order in memory, as two views
    ``[blocks, K, N, D]``.
    """
    keys, values = kv_cache.chunk(2, dim=-1)
    return keys, values


def cpu_key_value(kv_cache: Tensor, isa: str) -> tuple[Tensor, Tensor]:
    """The same two views of a layer's cache on CPU, where vLLM stores a block's keys transposed,
    ``[D, N]``.

    Raises ConfigError: an instruction set that packs keys in another order.
    """
    if isa not in ("vec", "vec16"):
        raise ConfigError(
            f"Sparrow cannot read the cache of vLLM's {isa!r} kernels for CPU; set dtype='float32'"
        )
    blocks, K, N, D = *kv_cache.shape[:3], kv_cache.shape[3] // 2
    block_stride, offset = kv_cache.stride(0), kv_cache.storage_offset()
    keys = torch.as_strided(kv_cache, (blocks, K, N, D), (block_stride, 2 * N * D, 1, N), offset)
    values = torch.as_strided(
        kv_cache, (blocks, K, N, D), (block_stride, 2 * N * D, D, 1), offset + N * D
    )
    return keys, values
