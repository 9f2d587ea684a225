"""What can be held about the CUDA kernel without a GPU: it compiles, and says why where it cannot serve."""

import itertools

import pytest
import torch

pytest.importorskip("triton")
from sparrow.attention.cuda import CudaConfig, launch, refusal
from sparrow.attention.cuda.compile import compiled
from sparrow.attention.triton.tuning import H200

DEFINES = dict(
    D=128, G=2, K=8, PER_BLOCK=1, SINK=1, RECENT=2, BF16=1, WARPS=4, STAGES=3, RESIDENT=2, BINS=1024, CANDIDATES=256
)  # fmt: skip


@pytest.mark.parametrize("changes", [{}, dict(D=64, G=8, BF16=0, PER_BLOCK=4, WARPS=8, STAGES=1, SINK=0, RECENT=3)])
def test_the_source_compiles_for_hopper(changes):
    pytest.importorskip("cuda.bindings.nvrtc")
    code = compiled("decode.cu", tuple((DEFINES | changes).items()), "sm_90")
    assert code.startswith(b"\x7fELF") and b"attend" in code


def test_the_compilers_words_reach_the_user():
    pytest.importorskip("cuda.bindings.nvrtc")
    with pytest.raises(RuntimeError, match=r'decode\.cu did not compile.*"WARPS" is undefined'):
        compiled("decode.cu", tuple((name, value) for name, value in DEFINES.items() if name != "WARPS"), "sm_90")


def test_a_gpu_that_is_not_there_is_named():
    assert "for Hopper GPUs" in refusal(16, 128, 2, torch.bfloat16, torch.device("cpu"))


@pytest.mark.parametrize(
    "items, D, capacity", list(itertools.product([1, 132, 140, 512], [64, 128], [32, 2560, 16384]))
)
def test_every_configuration_fits_the_device_and_the_workspace(items, D, capacity):
    config = launch.choose(items, D, capacity, H200)
    assert config.resident * (config.shared_bytes(D, capacity) + 1024) <= H200.shared_memory + 1024
    division = launch._division(config, items, 1, H200.multiprocessors)
    assert 1 <= division.shares <= 5 * H200.multiprocessors
    assert config.parts == 1 or division.shares == (config.parts - 1) * items


def test_the_shared_memory_holds_what_the_source_lays_out():
    ring, bins, candidates, words = 4 * 3 * 2 * 16 * 256, 4 * 1024, 8 * 256, 4 * (3 * 4 + 2)
    assert CudaConfig(4, 3, 2).shared_bytes(128, 2560) >= ring + bins + candidates + words + 4 * 2560 + 2560 // 4
