"""Test that launch configurations fit the device, cover every batch, and depend only on shapes.
Nothing is launched.
"""

import importlib
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("triton")

from sparrow.attention import CachedLayers, DecodeWorkspace, PageLayout, cuda, update_landmarks
from sparrow.attention.decode import H200, DeviceLimits
from sparrow.attention.triton.tuning import attend_bytes, choose, extra_programs

# multiprocessors, and bytes of shared memory per program: H100 and H200, A100, L40S, B200
DEVICES = [
    H200,
    DeviceLimits(108, 163 * 1024),
    DeviceLimits(142, 99 * 1024),
    DeviceLimits(148, 227 * 1024),
]
BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@given(
    st.integers(1, 2_500),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([64, 128, 256, 512]),
    st.sampled_from(DEVICES),
)
def test_buffers_fit_in_shared_memory_and_tiles_suit_the_tensor_cores(
    rows, kv_heads, head_bytes, limits
):
    items = rows * kv_heads
    config = choose(items, kv_heads, head_bytes, limits)
    assert config.attend_stages * config.attend_tokens * 2 * head_bytes <= limits.shared_memory
    assert config.score_stages * config.score_pages * head_bytes <= limits.shared_memory
    assert config.attend_stages >= 1 and config.score_stages >= 1
    assert (
        16 <= config.attend_tokens <= 128 and config.attend_tokens & (config.attend_tokens - 1) == 0
    )
    assert 16 <= config.score_pages <= 128 and config.score_pages & (config.score_pages - 1) == 0
    assert config.extra_programs == extra_programs(items, kv_heads, limits.multiprocessors) > 0
    assert config.extra_programs % kv_heads == 0
    assert 1 <= config.rank_splits <= 16
    assert config.registers % 8 == 0 or config.registers == 255


@given(
    st.integers(1, 2_500),
    st.sampled_from([64, 128, 256]),
    st.sampled_from([1, 2]),
    st.sampled_from([16, 32, 64]),
    st.sampled_from(DEVICES),
)
def test_multi_token_queries_fit_in_shared_memory_with_keys_and_values(
    items, D, itemsize, queries, limits
):
    config = choose(items, 1, D * itemsize, limits, queries, 2 * D)
    assert attend_bytes(config, D * itemsize, queries, 2 * D) <= limits.shared_memory
    assert config.attend_tokens >= 16 and config.attend_stages >= 1
    if queries == 16:
        assert config == choose(items, 1, D * itemsize, limits)


def test_only_one_tile_fits_on_an_a100_with_the_most_queries_and_widest_heads():
    # With two tiles in flight, the kernel compiled for an A100 needs 172,544 bytes.
    a100 = DEVICES[1]
    two = replace(choose(4, 4, 512, a100, 64, 512), attend_stages=2)
    assert a100.shared_memory < 172_544 <= attend_bytes(two, 512, 64, 512)
    assert choose(4, 4, 512, a100, 64, 512) == replace(two, attend_stages=1)
    assert choose(4, 4, 512, a100).attend_stages == 2


@pytest.mark.parametrize(
    "items, splits, extra",
    [
        (8, 16, 120),
        (64, 2, 64),
        (96, 1, 32),
        (128, 1, 8),
        (192, 1, 256),
        (256, 1, 256),
        (512, 1, 256),
    ],
)
def test_small_batches_use_several_ranking_programs_per_item_and_extra_attention_programs(
    items, splits, extra
):
    config = choose(items, 8, 256, H200)
    assert (config.rank_splits, config.extra_programs) == (splits, extra)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
def test_capturing_vllm_batch_sizes_compiles_every_kernel(kv_heads):
    def compiled(rows):  # keep only the fields that affect compilation
        return replace(
            choose(rows * kv_heads, kv_heads, 256, H200), extra_programs=0, rank_splits=0
        )

    captured = {compiled(rows) for rows in (1, 2, 4, *range(8, 257, 8))}
    assert captured == {compiled(rows) for rows in range(1, 257)}


@pytest.mark.parametrize(
    "items, stages", [(400, 1), (512, 1), (768, 2), (1024, 1), (1056, 1), (1188, 2)]
)
def test_tile_with_the_fuller_last_wave_is_chosen(items, stages):
    # With 4 programs per multiprocessor, 512 items fill 97 % of one wave, and 768 items fill 73 %
    # of two waves. With 3 programs, 512 items fill 65 % of two waves, and 768 items fill 97 %.
    assert choose(items, 8, 256, H200).attend_stages == stages


def test_published_measurements_used_the_shipped_configurations(monkeypatch):
    """Also check the CUDA kernel's table, if it is shipped."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    for case in importlib.import_module("common").load("kernels")["cases"]:
        items = case["B"] * 8
        few = case["B"] <= cuda.few_rows(
            8, torch.device("cpu")
        )  # without a GPU, the limits of an H200
        shipped = (
            choose(items, 8, 256, H200)
            if few
            else cuda.launch.choose_config(items, 128, 2560, H200)
        )
        assert case["config"].items() <= asdict(shipped).items()  # ignores fields added later


@given(st.integers(1, 40), st.sampled_from([1, 2, 8]))
def test_workspace_has_room_for_every_batch_up_to_its_maximum(max_batch, kv_heads):
    workspace = DecodeWorkspace(max_batch, kv_heads, 2, 64, 100, "cpu")
    for batch in range(1, max_batch + 1):
        assert (
            batch * kv_heads + extra_programs(batch * kv_heads, kv_heads, H200.multiprocessors)
            <= workspace.partial.shape[0]
        )
    assert workspace.rows.shape == (max_batch * kv_heads, 112)
    assert not workspace.counters.any()
    parts = (
        workspace.partial.shape[0] * 2 * (64 + 2) * 4
        + workspace.partial.shape[0] // kv_heads * 8 * 4
    )
    assert workspace.nbytes == max_batch * kv_heads * (112 + 2) * 4 + parts


def test_cpu_tensors_raise_an_error():
    k, marks = (
        torch.zeros(1, 1, 16, 64, dtype=torch.float16),
        torch.zeros(1, 1, 1, 64, dtype=torch.float16),
    )
    with pytest.raises(ValueError, match="got tensors on the CPU"):
        update_landmarks(
            CachedLayers([(k, marks)]),
            torch.tensor([15]),
            layout=PageLayout(),
            implementation="triton",
        )
