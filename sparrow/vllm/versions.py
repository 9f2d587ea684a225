"""The supported vLLM versions, and the differences between them.

Shapes: N block tokens, K kv heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

import torch
from packaging.specifiers import SpecifierSet
from packaging.version import Version
from torch import Tensor

from sparrow.errors import ConfigError

SUPPORTED = ">=0.26"
"""Supported vLLM versions. Keep in sync with the ``vllm`` extra in pyproject.toml. Earlier versions
use a different cache layout, and their rejection sampling is slightly biased.
"""
OLDEST_ON_CPU = "0.32"
OLDEST_WITH_HEAD = "0.32"
OLDEST_WITH_HYBRID = "0.32"
PROVEN = {
    "0.26": "2.11",
    "0.28": "2.11",
    "0.29": "2.11",
    "0.30": "2.11",
    "0.31": "2.11",
    "0.32": "2.11",
    "0.33": "2.11",
}
"""vLLM versions with which Sparrow was found to be exact on GPUs in both modes, and the torch
version used with each (``benchmarks/results/vllm_versions``). Other supported versions also start
if the self-check passes.
"""


def check(on_cpu: bool) -> None:
    """Check that Sparrow supports this process's vLLM.

    Raises ConfigError if Sparrow does not support this version, or supports it only on GPUs.
    """
    import vllm

    if not SpecifierSet(SUPPORTED).contains(vllm.__version__, prereleases=True):
        raise ConfigError(
            f"Sparrow does not run in vLLM {vllm.__version__}; "
            f"install 'vllm{SUPPORTED}', or start vLLM without a schedule"
        )
    if on_cpu:
        _check_oldest(OLDEST_ON_CPU, "on CPUs, Sparrow needs", "use a GPU")


def check_head() -> None:
    """Check that a head can guess in this process's vLLM.

    Raises ConfigError if the version is too old, because its EAGLE-3 heads work differently.
    """
    _check_oldest(OLDEST_WITH_HEAD, "guess_head needs", "leave guess_head out")


def check_hybrid() -> None:
    """Check that Sparrow supports hybrid models in this process's vLLM.

    Raises ConfigError if the version is older than those tested with a hybrid model.
    """
    _check_oldest(OLDEST_WITH_HYBRID, "hybrid models need", "start vLLM without a schedule")


def _check_oldest(oldest: str, who_needs: str, otherwise: str) -> None:
    """Check that this process's vLLM is not older than ``oldest``.

    Raises ConfigError if it is. The message starts with ``who_needs`` and ends with ``otherwise``,
    what to do instead of installing a later version.
    """
    import vllm

    if Version(vllm.__version__).release < Version(oldest).release:
        raise ConfigError(
            f"{who_needs} vLLM {oldest} or later, got {vllm.__version__}; "
            f"install a later version, or {otherwise}"
        )


def known() -> str:
    """Describe this process's vLLM and torch versions, and the versions with which Sparrow was
    found to be exact.
    """
    import vllm

    torches = sorted(set(PROVEN.values()))
    return (
        f"vLLM {vllm.__version__} and torch {torch.__version__}; known to be exact on GPUs: vLLM "
        f"{', '.join(PROVEN)} with torch {', '.join(torches)}"
    )


def drafts_have_own_noise() -> bool:
    """Return whether vLLM uses different noise for drafts and for the tokens that replace rejected
    drafts. It has done so since 0.30.
    """
    return "is_drafting" in _parameters_of_gumbel_sample()


def draft_logits_argument() -> str:
    """Return the name of the ``gumbel_sample`` parameter for the tensor that stores the logits.

    vLLM 0.28 and later store the model's raw logits (``logits_cache``). Earlier versions divide
    them by the temperature first.
    """
    name = "logits_cache"
    return name if name in _parameters_of_gumbel_sample() else "output_processed_logits"


def _parameters_of_gumbel_sample() -> Mapping[str, Any]:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    return signature(gumbel_sample).parameters


def key_value(kv_cache: Tensor) -> tuple[Tensor, Tensor]:
    """Split a layer's cache on CUDA into key and value views, each ``[blocks, K, N, D]``. The cache
    is ``[blocks, K, N, 2 D]`` with any strides.
    """
    keys, values = kv_cache.chunk(2, dim=-1)
    return keys, values


def cpu_key_value(kv_cache: Tensor, isa: str) -> tuple[Tensor, Tensor]:
    """Like ``key_value``, but on a CPU, where vLLM stores each block's keys transposed, ``[D, N]``.

    Raises ConfigError if the kernels for this instruction set store keys in another order.
    """
    if isa not in ("vec", "vec16"):
        raise ConfigError(
            f"Sparrow cannot read the KV cache of vLLM's {isa!r} CPU kernels; set dtype='float32'"
        )
    blocks, K, N, D = *kv_cache.shape[:3], kv_cache.shape[3] // 2
    block_stride = kv_cache.stride(0)
    offset = kv_cache.storage_offset()
    keys = torch.as_strided(kv_cache, (blocks, K, N, D), (block_stride, 2 * N * D, 1, N), offset)
    values = torch.as_strided(
        kv_cache, (blocks, K, N, D), (block_stride, 2 * N * D, D, 1), offset + N * D
    )
    return keys, values
