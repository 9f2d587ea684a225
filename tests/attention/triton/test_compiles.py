"""Test that the decode kernels compile for a Hopper GPU. This needs no GPU, and catches invalid
kernels that the interpreter would accept. The launchers choose arguments and launch options as
usual, but Triton compiles the kernels instead of launching them.
"""

import os
from dataclasses import replace

import pytest
import torch

triton = pytest.importorskip("triton")
backends = pytest.importorskip("triton.backends")
if "nvidia" not in backends.backends:
    pytest.skip("needs Triton's NVIDIA backend", allow_module_level=True)
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter does not compile kernels", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime import driver  # noqa: E402

from sparrow.attention import CacheScales, DecodeWorkspace, PageLayout  # noqa: E402
from sparrow.attention.decode import (  # noqa: E402
    H200,
    DecodeBatch,
    DeviceLimits,
    check_for_kernels,
)
from sparrow.attention.triton import launch  # noqa: E402
from sparrow.attention.triton.forced import Call  # noqa: E402
from sparrow.attention.triton.tuning import attend_bytes  # noqa: E402
from sparrow.attention.triton.variants import ATTEND, RANK, Variant, fits  # noqa: E402

pytestmark = pytest.mark.slow

E4M3 = torch.float8_e4m3fn
KV_HEADS = 4
BLOCKS = 8
A100 = DeviceLimits(multiprocessors=108, shared_memory=163 * 1024)


class Device:
    """A stand-in for Triton's driver on a machine without a GPU."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self):
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self):
        return f"sm_{self.capability} without a GPU"  # Triton caches kernels per device

    def get_current_stream(self, device):
        return 0


@pytest.fixture
def compiled(monkeypatch):
    """Compile kernels instead of launching them, and return the compiled kernels by name."""
    kernels = {}
    run = triton.JITFunction.run

    def compile_only(self, *args, grid, warmup, **kwargs):
        kernels[self.fn.__name__] = run(self, *args, grid=grid, warmup=True, **kwargs)

    monkeypatch.setattr(triton.JITFunction, "run", compile_only)
    monkeypatch.setattr(driver, "_active", Device(90))
    monkeypatch.setattr(launch, "_can_overlap", lambda x: True)
    return kernels


def make_batch(
    sequences: int, G: int, D: int, page_size: int, dtype: torch.dtype, tokens: int
) -> DecodeBatch:
    q = torch.empty(sequences * tokens, KV_HEADS * G, D, dtype=torch.bfloat16)
    k, v = torch.empty(BLOCKS, KV_HEADS, page_size, 2 * D, dtype=dtype).split(D, dim=-1)
    scales = None
    if dtype == E4M3:
        scales = CacheScales(torch.ones(KV_HEADS), torch.ones(KV_HEADS))
    if dtype == torch.int8:
        exponents = torch.zeros(BLOCKS, KV_HEADS, 2, page_size, dtype=torch.uint8)
        scales = CacheScales(exponents[:, :, 0], exponents[:, :, 1])
    return DecodeBatch(
        q,
        k,
        v,
        torch.empty(BLOCKS, 1, KV_HEADS, D, dtype=E4M3),
        torch.zeros(sequences, 256, dtype=torch.int32),
        torch.full((sequences,), 100, dtype=torch.int32),
        torch.full((sequences,), 4, dtype=torch.int32),
        torch.empty_like(q),
        PageLayout(page_size=page_size, landmark_dtype="fp8_e4m3"),
        D**-0.5,
        scales,
        tokens=tokens,
    )


@pytest.mark.parametrize(
    "sequences, G, D, page_size, dtype, tokens",
    [
        pytest.param(1, 5, 128, 16, torch.bfloat16, 1, id="one token"),
        pytest.param(64, 8, 128, 16, E4M3, 2, id="two tokens, fp8 cache"),
        pytest.param(64, 2, 64, 8, torch.int8, 4, id="four tokens, int8 cache"),
        pytest.param(1, 8, 256, 8, torch.bfloat16, 8, id="most columns, widest heads"),
    ],
)
def test_decode_kernels_compile_and_fit_in_shared_memory(
    compiled, sequences, G, D, page_size, dtype, tokens
):
    batch = make_batch(sequences, G, D, page_size, dtype, tokens)
    pages = batch.max_pages
    workspace = DecodeWorkspace(sequences, KV_HEADS, G, D, pages, "cpu", tokens)
    check_for_kernels(batch, workspace)
    launch.run(batch, workspace)
    assert {"plan_kernel", "rank_kernel", "attend_kernel"} == compiled.keys()
    for name, kernel in compiled.items():
        assert kernel.metadata.shared <= H200.shared_memory, name


@pytest.mark.parametrize(
    "capability, limits",
    [
        pytest.param(80, A100, id="A100"),
        pytest.param(89, DeviceLimits(142, 99 * 1024), id="L40S"),
        pytest.param(100, DeviceLimits(148, 227 * 1024), id="B200"),
    ],
)
def test_shipped_and_tuned_kernels_compile_for_gpus_other_than_hopper(
    compiled, capability, limits, monkeypatch
):
    monkeypatch.setattr(driver, "_active", Device(capability))
    monkeypatch.setattr(launch, "_can_overlap", lambda x: capability >= 90)
    monkeypatch.setattr(launch, "device_limits", lambda device: limits)
    batch = make_batch(64, 8, 128, 16, torch.bfloat16, 1)
    batch = replace(batch, landmark_cache=torch.empty(BLOCKS, 1, KV_HEADS, 128).bfloat16())
    workspace = DecodeWorkspace(64, KV_HEADS, 8, 128, batch.max_pages, "cpu")
    shipped = launch.Launches(batch, workspace).config
    for variant in (Variant(), Variant(attend=ATTEND[7], rank=RANK[-1])):
        config = variant.of(shipped, KV_HEADS, 256, limits)
        assert fits(config, 256, limits)
        launch.run(batch, workspace, config=config)
        for name, kernel in compiled.items():
            assert kernel.metadata.shared <= limits.shared_memory, name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8])
def test_most_queries_with_the_widest_heads_fit_on_an_a100(compiled, monkeypatch, dtype):
    monkeypatch.setattr(driver, "_active", Device(80))
    monkeypatch.setattr(launch, "_can_overlap", lambda x: False)
    monkeypatch.setattr(launch, "device_limits", lambda device: A100)
    batch = make_batch(1, 8, 256, 16, dtype, 8)
    launches = launch.Launches(batch, DecodeWorkspace(1, KV_HEADS, 8, 256, 256, "cpu", 8))
    launches.attend()
    needed = compiled["attend_kernel"].metadata.shared
    queries = launches.constants["CP"]
    bound = attend_bytes(launches.config, 256 * dtype.itemsize, queries, 512)
    assert needed <= bound <= A100.shared_memory


@pytest.mark.parametrize("tokens", [1, 4])
def test_selection_kernels_for_teacher_forcing_compile(compiled, tokens):
    q, k = (torch.empty(1, heads, 256, 128, dtype=torch.bfloat16) for heads in (10, 2))
    start, length, prompt = (torch.tensor([n]) for n in (0, 256, 16))
    layout = PageLayout(landmark_dtype="fp8_e4m3")
    call = Call(q, k, k, start, length, layout, 128**-0.5)
    call.select(prompt, torch.full((1, 256), 4), tokens=tokens)
    assert {"landmark_kernel", "score_kernel", "select_kernel", "tile_kernel"} == compiled.keys()
    for name, kernel in compiled.items():
        assert kernel.metadata.shared <= H200.shared_memory, name
