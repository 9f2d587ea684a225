"""Test that the kernels of the cascade's draft loop compile for a Hopper GPU. This needs no GPU,
and catches invalid kernels that the interpreter would accept.
"""

import importlib.util
import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

triton = pytest.importorskip("triton")
backends = pytest.importorskip("triton.backends")
if "nvidia" not in backends.backends:
    pytest.skip("needs Triton's NVIDIA backend", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile kernels", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from tests import own_process  # noqa: E402

pytestmark = pytest.mark.slow

KERNELS = (
    "begin",
    "begin_history",
    "look_up",
    "extend_history",
    "head_step",
    "set_up",
    "advance",
    "fill",
    "count_drawn",
    "one_hot",
)
CONSTANTS = {"T": 4, "TP": 4, "GP": 16, "KP": 16, "TOKENS": 16, "BLOCK": 4096}
WIDE = {"index_R", "positions_RT", "slots_RT", "index_RT", "place_RT", "drawn_RT", "drafts_SK"}
WIDE |= {"guesses_RG", "positions_R", "slots_R", "decoded", "drawn_S", "counts"}
NUMBERS = {"G", "K", "M", "V", "limit", "step"}


def type_of(argument: str) -> str:
    if argument in CONSTANTS:
        return "constexpr"
    if argument in NUMBERS or argument.startswith("stride") or argument.endswith("stride"):
        return "i32"
    if argument == "logits_SKV":
        return "*bf16"
    return "*i64" if argument in WIDE else "*i32"


@pytest.fixture
def kernels(monkeypatch):
    """Load the kernels with the real Triton, which vLLM replaces if it finds no GPU."""
    stub = SimpleNamespace(tl=triton.language, triton=triton)
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.triton_utils", stub)
    path = own_process.ROOT / "sparrow" / "vllm" / "lossless" / "cascade_kernels.py"
    spec = importlib.util.spec_from_file_location("kernels_of_the_cascade", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile(kernels, name):
    kernel = getattr(kernels, f"{name}_kernel")
    types = {argument: type_of(argument) for argument in kernel.arg_names}
    constants = {key: value for key, value in CONSTANTS.items() if key in types}
    source = ASTSource(kernel, types, constants)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert "cubin" in compiled.asm
