"""Which vLLM this is, and the adapter that knows how it differs from the others."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from packaging.version import Version

from sparrow.errors import ConfigError


def adapter(version: str) -> ModuleType:
    """The adapter module for a version of vLLM.

    Every adapter has ``key_value(kv_cache)``: a layer's keys and values on CUDA as views
    ``[blocks, kv heads, block tokens, head dim]``. The newest also has what the CPU backend needs.

    Raises ConfigError: a version none was written for.
    """
    release = Version(version).release[:2]
    if release == (0, 24):
        name = "v024"
    elif (0, 26) <= release <= (0, 31):
        name = "v026"
    elif (0, 32) <= release <= (0, 33):
        name = "v032"
    else:
        raise ConfigError(f"no adapter for vLLM {version}; install vllm 0.24 or 0.26 to 0.33, or drop the schedule")
    return import_module(f"sparrow.vllm.{name}")


def installed(on_cpu: bool = False) -> ModuleType:
    """The adapter for the vLLM of this process. Raises ConfigError: no adapter, or none that runs on CPU."""
    import vllm

    found = adapter(vllm.__version__)
    if on_cpu and not hasattr(found, "cpu_key_value"):
        raise ConfigError(f"Sparrow runs on CPU with vLLM 0.32 and 0.33, not with {vllm.__version__}; use a GPU")
    return found
