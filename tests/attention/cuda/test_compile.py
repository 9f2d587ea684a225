"""Test, without a GPU, that the CUDA kernel compiles and that unsupported devices are reported with
the reason.
"""

import ctypes
import itertools
import re
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")
from sparrow.attention.cuda import CudaConfig, launch, unsupported_reason
from sparrow.attention.cuda.compile import compiled
from sparrow.attention.decode import H200
from sparrow.attention.pages import FP8

DEFINES = dict(
    D=128,
    G=2,
    K=8,
    NEW_TOKENS=1,
    PER_BLOCK=1,
    SINK=1,
    RECENT=2,
    BF16=1,
    FP8_CACHE=0,
    INT8_CACHE=0,
    FP8_LANDMARKS=0,
    WARPS=4,
    STAGES=3,
    RESIDENT=2,
    EACH_RANKS=0,
    BINS=1024,
    CANDIDATES=256,
)


@pytest.mark.parametrize("FP8_LANDMARKS", [0, 1])
@pytest.mark.parametrize(
    "cache", [{}, dict(FP8_CACHE=1), dict(INT8_CACHE=1)], ids=["16 bits", "fp8", "int8"]
)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(D=64, G=8, BF16=0, PER_BLOCK=4, WARPS=8, STAGES=1, SINK=0, RECENT=3),
        dict(D=256, G=9, WARPS=2, EACH_RANKS=1),
        dict(G=4, NEW_TOKENS=8, STAGES=4, EACH_RANKS=1),
    ],
)
def test_source_compiles_for_hopper(changes, cache, FP8_LANDMARKS):
    pytest.importorskip("cuda.bindings.nvrtc")
    defines = DEFINES | changes | cache | dict(FP8_LANDMARKS=FP8_LANDMARKS)
    code, _ = compiled("decode.cu", tuple(defines.items()), "sm_90")
    assert code.startswith(b"\x7fELF") and b"attend" in code
    assert [bytes([n])[0] for n in range(256)] == list(range(256)), (
        "the compiler overwrote byte objects that Python caches"
    )


@pytest.mark.parametrize(
    "D, G, cache, FP8_LANDMARKS",
    [
        *(
            (D, G, torch.bfloat16, 0)
            for D, groups in ((64, (2, 8, 16)), (128, (1, 2, 4, 8, 16)), (256, (1, 8, 16)))
            for G in groups
        ),
        (128, 4, torch.bfloat16, 1),
        (64, 8, torch.bfloat16, 1),
        (256, 16, torch.bfloat16, 1),
        *(
            (D, G, in_8_bits, marks)
            for D, G, marks in ((128, 4, 0), (64, 8, 0), (128, 8, 1), (128, 16, 0), (256, 16, 1))
            for in_8_bits in (FP8, torch.int8)
        ),
    ],
)
@pytest.mark.parametrize("items", [8, 512])
def test_shipped_configurations_do_not_spill_registers(items, D, G, cache, FP8_LANDMARKS):
    assert spilled(items, D, G, 1, cache, FP8_LANDMARKS) == 0


@pytest.mark.parametrize(
    "D, G, tokens, cache, FP8_LANDMARKS",
    [
        *(
            (D, G, T, torch.bfloat16, 0)
            for D, G, T in (
                (64, 4, 8),
                (128, 2, 4),
                (128, 2, 8),
                (128, 5, 4),
                (128, 4, 8),
                (128, 8, 4),
                (256, 2, 8),
                (256, 8, 2),
            )
        ),
        (128, 8, 4, torch.bfloat16, 1),
        *(
            (D, G, T, in_8_bits, marks)
            for D, G, T, marks in ((128, 5, 4, 0), (128, 8, 4, 0), (128, 4, 8, 1), (256, 4, 4, 1))
            for in_8_bits in (FP8, torch.int8)
        ),
    ],
)
@pytest.mark.parametrize("items", [8, 512])
def test_kernels_for_several_tokens_spill_at_most_four_registers(
    items, D, G, tokens, cache, FP8_LANDMARKS
):
    # Only the kernel for 32 queries and an int8 cache spills registers.
    most = 16 if G * tokens == 32 and cache == torch.int8 else 0
    assert spilled(items, D, G, tokens, cache, FP8_LANDMARKS) <= most


def spilled(items: int, D: int, G: int, tokens: int, cache: torch.dtype, FP8_LANDMARKS: int) -> int:
    """Compile a shipped configuration, check that its thread blocks fit on a multiprocessor, and
    return how many bytes it spills.
    """
    pytest.importorskip("cuda.bindings.nvrtc")
    config = launch.choose_config(items, D, 2560, H200, cache, G * tokens)
    defines = DEFINES | dict(
        D=D,
        G=G,
        NEW_TOKENS=tokens,
        FP8_CACHE=int(cache == FP8),
        INT8_CACHE=int(cache == torch.int8),
        FP8_LANDMARKS=FP8_LANDMARKS,
        WARPS=config.warps,
        STAGES=config.stages,
        RESIDENT=config.resident,
    )
    _, log = compiled("decode.cu", tuple(defines.items()), "sm_90", "--ptxas-options=-v")
    registers = -(-int(re.search(r"Used (\d+) registers", log)[1]) // 8) * 8
    assert 64 < registers * 32 * config.warps * config.resident <= 65536
    return max(map(int, re.findall(r"(\d+) bytes (?:stack frame|spill stores|spill loads)", log)))


def test_launcher_passes_the_fields_declared_in_the_source():
    source = Path(launch.__file__).with_name("program.cuh").read_text()
    declared = re.search(r"struct Args \{(.*?)\};", source, re.DOTALL)[1]
    kinds = {"float": ctypes.c_float, "int": ctypes.c_int, "i64": ctypes.c_longlong}
    fields = []
    for line in declared.strip().split(";")[:-1]:
        kind, names = re.fullmatch(r"\s*(?:const )?(\w+\*?) (.*)", line, re.DOTALL).groups()
        for name in names.split(", "):
            pointer = kind.endswith("*") or name.startswith("*")
            fields.append((name.lstrip("*"), ctypes.c_void_p if pointer else kinds[kind]))
    assert tuple(fields) == launch._Arguments._fields_


def test_compiler_errors_reach_the_user():
    pytest.importorskip("cuda.bindings.nvrtc")
    with pytest.raises(RuntimeError, match=r'decode\.cu did not compile.*"WARPS" is undefined'):
        compiled(
            "decode.cu",
            tuple((name, value) for name, value in DEFINES.items() if name != "WARPS"),
            "sm_90",
        )


@pytest.mark.parametrize(
    "changed, reason",
    [
        (dict(D=96), "rows of 4, 8, 16 or 32 chunks"),
        (dict(G=17), "columns of one or two tiles"),
        (dict(G=1, NEW_TOKENS=17), "new tokens are in the two newest pages"),
        (dict(G=5, NEW_TOKENS=7), "sums and queries of up to four tiles fit in registers"),
        (dict(D=256, G=2, NEW_TOKENS=9), "sums and queries of up to four tiles fit in registers"),
        (dict(NEW_TOKENS=2, WARPS=1), "two warps begin with the two newest pages"),
        (dict(BINS=512), "each of 32 lanes counts 32 bins"),
        (dict(RECENT=0), "the newest page, filled in part, is never ranked"),
        (dict(FP8_CACHE=1, INT8_CACHE=1), "the cache has one format"),
    ],
)
def test_unsupported_macro_values_fail_to_compile_with_a_reason(changed, reason):
    pytest.importorskip("cuda.bindings.nvrtc")
    with pytest.raises(RuntimeError, match=reason):
        compiled("decode.cu", tuple((DEFINES | changed).items()), "sm_90")


@pytest.mark.parametrize("D", launch.HEAD_DIMS)
def test_launcher_and_source_agree_on_the_maximum_number_of_queries(D):
    pytest.importorskip("cuda.bindings.nvrtc")
    most = launch.MAX_QUERIES[D]
    defines = DEFINES | dict(D=D, G=most // 8, NEW_TOKENS=8, STAGES=2)
    compiled("decode.cu", tuple(defines.items()), "sm_90")
    defines |= dict(G=1 + most // 8)
    with pytest.raises(RuntimeError, match="sums and queries"):
        compiled("decode.cu", tuple(defines.items()), "sm_90")


def test_cuda_kernel_is_unsupported_without_a_hopper_gpu():
    assert "needs a Hopper GPU" in unsupported_reason(
        16, 128, 2, torch.bfloat16, torch.device("cpu")
    )


@pytest.mark.parametrize("several", [False, True], ids=["one token", "most queries"])
@pytest.mark.parametrize(
    "items, D, capacity, dtype",
    list(
        itertools.product(
            [1, 132, 140, 512], [64, 128, 256], [32, 2560, 16384], [torch.int8, FP8, torch.bfloat16]
        )
    ),
)
def test_every_configuration_fits_the_device_and_the_workspace(items, D, capacity, dtype, several):
    queries = launch.MAX_QUERIES[D] if several else launch.MAX_GROUP
    config = launch.choose_config(items, D, capacity, H200, dtype, queries)
    if not several:  # with one token per row, the group size does not matter
        assert config == launch.choose_config(items, D, capacity, H200, dtype)
    size = config.shared_bytes(launch.key_bytes(D, dtype), capacity)
    assert config.resident * (size + 1024) <= H200.shared_memory + 1024
    # A warp writes its results over the pages that it read, so the results must fit there.
    results = queries * D * 4
    assert results <= config.stages * 2 * 16 * launch.key_bytes(D, dtype)
    division = config.division(items, 1, H200.multiprocessors)
    assert 1 <= division.extra_programs <= 5 * H200.multiprocessors
    assert config.parts == 1 or division.extra_programs == (config.parts - 1) * items


def test_shared_memory_size_covers_every_kernel_buffer():
    ring, bins, candidates, words = 4 * 3 * 2 * 16 * 256, 4 * 1024, 8 * 256, 4 * (3 * 4 + 2)
    assert (
        CudaConfig(4, 3, 2).shared_bytes(256, 2560)
        >= ring + bins + candidates + words + 4 * 2560 + 2560 // 4
    )
    exponents = 4 * 3 * 2 * 16
    assert CudaConfig(4, 3, 2).shared_bytes(
        launch.key_bytes(128, torch.int8), 2560
    ) - exponents == CudaConfig(4, 3, 2).shared_bytes(128, 2560)
