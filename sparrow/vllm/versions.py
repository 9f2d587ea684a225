"""Which vLLM this is, and the adapter that knows how it differs from the others."""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import import_module
from inspect import signature
from types import ModuleType
from typing import Any

from packaging.version import Version

from sparrow.errors import ConfigError

LOSSLESS_ON_CUDA = ("0.26",)
"""Versions that lossless mode was run with on a GPU."""
UNTESTED_ENVIRONMENT = "SPARROW_UNTESTED_VLLM"


def adapter(version: str) -> ModuleType:
    """The adapter module for a version of vLLM.

    Every adapter has ``key_value(kv_cache)``: a layer's keys and values on CUDA as views
    ``[blocks, kv heads, block tokens, head dim]``. The newest also has what the CPU backend needs.

    Raises ConfigError: a version that no adapter was written for.
    """
    release = Version(version).release[:2]
    if (0, 26) <= release <= (0, 31):
        name = "v026"
    elif (0, 32) <= release <= (0, 33):
        name = "v032"
    else:
        raise ConfigError(f"no adapter for vLLM {version}; install vllm 0.26 to 0.33, or drop the schedule")
    return import_module(f"sparrow.vllm.{name}")


def check_lossless(on_cpu: bool) -> None:
    """Check that lossless mode can run in the vLLM of this process.

    Raises ConfigError: no adapter, or on a GPU a version that was never run there, unless ``SPARROW_UNTESTED_VLLM`` is
    1.
    """
    import vllm

    installed(on_cpu)
    major, minor = Version(vllm.__version__).release[:2]
    tries_untested = os.environ.get(UNTESTED_ENVIRONMENT, "").strip() == "1"
    if not on_cpu and not tries_untested and f"{major}.{minor}" not in LOSSLESS_ON_CUDA:
        raise ConfigError(
            f"mode 'lossless' was never run on a GPU with vLLM {vllm.__version__}, only with {LOSSLESS_ON_CUDA}; "
            f"install one of those, or set {UNTESTED_ENVIRONMENT}=1 to try it"
        )


def drafts_have_own_noise() -> bool:
    """Whether vLLM draws drafts from other noise than the tokens that replace rejected ones (from 0.30 on)."""
    return "is_drafting" in _parameters_of_gumbel_sample()


def draft_logits_argument() -> str:
    """The parameter of ``gumbel_sample`` that says where it stores the logits it draws from.

    vLLM 0.28 and later store the model's logits (``logits_cache``), earlier versions divide by the temperature first.
    """
    name = "logits_cache"
    return name if name in _parameters_of_gumbel_sample() else "output_processed_logits"


def _parameters_of_gumbel_sample() -> Mapping[str, Any]:
    from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

    return signature(gumbel_sample).parameters


def installed(on_cpu: bool = False) -> ModuleType:
    """The adapter for the vLLM of this process. Raises ConfigError: no adapter, or none that runs on CPU."""
    import vllm

    module = adapter(vllm.__version__)
    if on_cpu and not hasattr(module, "cpu_key_value"):
        raise ConfigError(f"Sparrow runs on CPU with vLLM 0.32 and 0.33, not with {vllm.__version__}; use a GPU")
    return module
