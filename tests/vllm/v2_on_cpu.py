"""Run vLLM's V2 model runner on a CPU, with its Triton kernels in Triton's interpreter. This runner
is the default on GPUs. Import this module before vLLM. vLLM only checks whether Triton has a
backend for the device, so nothing is compiled.
"""

import os
from types import SimpleNamespace

os.environ.update(TRITON_INTERPRET="1", VLLM_USE_V2_MODEL_RUNNER="1")

import triton.language as tl
import triton.language.extra.libdevice as libdevice
from triton.backends import backends
from triton.runtime import interpreter

backends.setdefault(
    "cpu", SimpleNamespace(driver=SimpleNamespace(is_active=lambda: False), compiler=None)
)

_patch_tensor = interpreter._patch_lang_tensor


def _patched_tensor(tensor, scope):
    """Convert an array with one element to a number. Triton 3.6's interpreter relies on this
    conversion, which numpy 2.4 no longer supports.
    """
    _patch_tensor(tensor, scope)
    for name in ("__index__", "__int__"):
        scope.set_attr(tensor, name, lambda self: int(self.handle.data.reshape(-1)[0]))


interpreter._patch_lang_tensor = _patched_tensor
libdevice.log1p = lambda x, _semantic=None: tl.log(1.0 + x)  # the interpreter has no libdevice

from tests.vllm import kernels_in_numpy  # noqa: E402  the code above must run first

kernels_in_numpy.install()
