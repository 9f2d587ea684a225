"""Test that variants of the shipped launch configurations suit the kernels, the workspace and the
device. Nothing is launched.
"""

from dataclasses import replace

import pytest

pytest.importorskip("triton")

from sparrow.attention import DecodeWorkspace
from sparrow.attention.decode import H200, MOST_EXTRA, DeviceLimits
from sparrow.attention.triton import tuning as shipped_tables
from sparrow.attention.triton.variants import ATTEND, FACTORS, RANK, Variant, fits

A100 = DeviceLimits(108, 163 * 1024)


def test_unchanged_variant_is_the_shipped_configuration():
    config = shipped_tables.choose(32, 8, 256, A100)
    assert Variant().of(config, 8, 256, A100) == config
    assert str(Variant()) == "as shipped"


@pytest.mark.parametrize("kv_heads", [1, 3, 8])
@pytest.mark.parametrize("rows", [1, 7, 64, 300])
@pytest.mark.parametrize("head_bytes", [64, 128, 256, 512])
def test_every_variant_suits_the_tensor_cores_and_the_workspace(kv_heads, rows, head_bytes):
    config = shipped_tables.choose(rows * kv_heads, kv_heads, head_bytes, A100)
    variants = [
        Variant(attend, rank, extra, splits)
        for attend in ATTEND
        for rank in RANK
        for extra in FACTORS
        for splits in FACTORS
    ]
    for variant in variants:
        made = variant.of(config, kv_heads, head_bytes, A100)
        assert 16 <= made.attend_tokens <= 128 and 16 <= made.score_pages <= 128
        assert made.extra_programs % kv_heads == 0
        assert 0 < made.extra_programs <= MOST_EXTRA * A100.multiprocessors
        assert made.rank_splits >= 1
        assert made.registers * 32 * made.attend_warps <= 65536


def test_workspace_has_room_for_the_maximum_number_of_extra_programs():
    for rows in (1, 5, 64):
        workspace = DecodeWorkspace(rows, 8, 2, 64, 100, "cpu")  # without a GPU, an H200's limits
        config = shipped_tables.choose(rows * 8, 8, 256, H200)
        extra = Variant(extra=1e9).of(config, 8, 256, H200).extra_programs
        assert extra == MOST_EXTRA * H200.multiprocessors // 8 * 8
        assert len(workspace.partial) >= rows * 8 + extra
        assert len(workspace.plan) >= rows + extra // 8


def test_some_variants_fit_the_smallest_shared_memory_with_the_widest_heads():
    l40s = DeviceLimits(142, 99 * 1024)
    config = shipped_tables.choose(64, 8, 512, l40s)
    sizes = [Variant(attend=tile).of(config, 8, 512, l40s) for tile in ATTEND]
    fitting = [made for made in sizes if fits(made, 512, l40s)]
    assert 1 < len(fitting) < len(sizes)
    assert not fits(replace(fitting[0], attend_stages=9), 512, l40s)
