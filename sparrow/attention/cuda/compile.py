"""Compile CUDA C++ at run time with the NVRTC that ships with torch, and launch kernels on torch's
current stream.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from sparrow.errors import ConfigError


class Kernel:
    """A function from a source file in this folder, compiled for a device.

    Args:
        file: the source file; it may include other files in this folder.
        name: the function to compile.
        defines: macros expected by the source.
        shared_bytes: dynamic shared memory per launch, in bytes.
        device: a CUDA device.

    Raises ConfigError if NVRTC's Python bindings are missing, or RuntimeError if the compiler or
    the driver reports an error.
    """

    def __init__(
        self,
        file: str,
        name: str,
        defines: Mapping[str, int],
        shared_bytes: int,
        device: torch.device,
    ) -> None:
        driver, _ = _bindings()
        with torch.cuda.device(device):
            torch.cuda.current_stream()  # make sure torch has created the CUDA context
            target = "sm_{}{}".format(*torch.cuda.get_device_capability(device))
            code, _ = compiled(file, tuple(defines.items()), target)
            self._module = _call(driver.cuModuleLoadData, code)
            self._function = _call(driver.cuModuleGetFunction, self._module, name.encode())
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _call(driver.cuFuncSetAttribute, self._function, limit, shared_bytes)

        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        self._config = driver.CUlaunchConfig()
        self._config.gridDimY = 1
        self._config.gridDimZ = 1
        self._config.blockDimY = 1
        self._config.blockDimZ = 1
        self._config.sharedMemBytes = shared_bytes
        self._config.attrs = [attribute]
        self._config.numAttrs = 1
        self._launch = driver.cuLaunchKernelEx

    def __call__(self, programs: int, threads: int, arguments: ctypes.Structure) -> None:
        """Launch on the current stream. The kernel may start before the previous one has ended."""
        config = self._config
        config.gridDimX = programs
        config.blockDimX = threads
        config.hStream = torch.cuda.current_stream().cuda_stream
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(arguments))
        _call(self._launch, config, self._function, ctypes.addressof(pointers), 0)


@cache
def compiled(
    file: str, defines: tuple[tuple[str, int], ...], target: str, *options: str
) -> tuple[bytes, str]:
    """Compile ``file`` for ``target`` (such as ``sm_90``). Return the machine code and the compiler
    log. This doesn't need a GPU.
    """
    _, nvrtc = _bindings()
    folder = Path(__file__).parent
    given = [
        f"--gpu-architecture={target}",
        f"--include-path={folder}",
        *options,
        *(f"-D{name}={value}" for name, value in defines),
    ]
    encoded = [option.encode() for option in given]
    program = _call(
        nvrtc.nvrtcCreateProgram, (folder / file).read_bytes(), file.encode(), 0, [], []
    )
    (result,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)

    # NVRTC writes into this bytes object. It has to be longer than 1 byte, because Python shares
    # 1-byte objects.
    log = bytes(cast(int, _call(nvrtc.nvrtcGetProgramLogSize, program)) + 1)
    _call(nvrtc.nvrtcGetProgramLog, program, log)
    said = log.partition(b"\0")[0].decode()
    if result != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise RuntimeError(f"{file} did not compile: {said}")

    code = bytes(cast(int, _call(nvrtc.nvrtcGetCUBINSize, program)))
    _call(nvrtc.nvrtcGetCUBIN, program, code)
    return code, said


@cache
def _bindings() -> tuple[ModuleType, ModuleType]:
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        raise ConfigError(
            "compiling the CUDA kernel needs cuda-bindings and NVRTC, which torch's CUDA builds "
            "include; run pip install cuda-bindings nvidia-cuda-nvrtc, or use "
            "implementation='triton'"
        ) from error
    return driver, nvrtc


def _call(function: Callable[..., tuple[Any, ...]], *arguments: object) -> object:
    result, *values = function(*arguments)
    if int(result):
        raise RuntimeError(f"{function.__name__}: {result.name}")
    return values[0] if values else None
