"""The plugin's entry point. vLLM calls it at the start of every process."""

from __future__ import annotations

from typing import Any

from sparrow.vllm import config

# group and name of the package's entry point
GROUP = "vllm.general_plugins"
NAME = "sparrow"
CUDA = "sparrow.vllm.cuda.CudaBackend"
CUDA_FLASH = "sparrow.vllm.cuda.CudaFlashBackend"
CPU = "sparrow.vllm.cpu.CpuBackend"


def register() -> None:
    """Register Sparrow's backends with vLLM, and add Sparrow's controls to vLLM's workers. Calling
    this again is harmless.

    Without a schedule in ``additional_config`` or the environment, vLLM behaves as if the plugin
    weren't there.

    Raises ConfigError if the schedule in the environment cannot be read, or if Sparrow does not
    support this version of vLLM.
    """
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    from sparrow.vllm import patches, versions

    on_cpu = current_platform.is_cpu()
    everywhere = config.from_environment() is not None
    if everywhere:
        versions.check(on_cpu)
    if on_cpu:
        _claim(AttentionBackendEnum.CPU_ATTN, CPU)
    else:
        _claim(AttentionBackendEnum.CUSTOM, CUDA)
        if everywhere:
            _claim(AttentionBackendEnum.FLASH_ATTN, CUDA_FLASH)
    patches.add_controls()
    patches.apply(patches.ALWAYS)


def _claim(slot: Any, path: str) -> None:
    """Register a backend in a slot, unless another plugin has already taken the slot. In that case,
    ``control.check`` refuses to start engines with a schedule. Other engines are not affected.
    """
    from vllm.v1.attention.backends.registry import register_backend

    if not slot.is_overridden():
        register_backend(slot, path)
