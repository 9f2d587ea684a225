"""Test ``sparrow tune``. The search is tested with simulated times. Complete runs, which compare
every configuration with the reference, are tested on a GPU or in Triton's interpreter.

``test_interpreted.py`` runs this file in the interpreter.
"""

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
if INTERPRETED:
    from tests.attention.triton import triton_interpreter  # noqa: F401

from triton.runtime.errors import OutOfResources  # noqa: E402

from sparrow.attention.decode import H200, fp8_lacking  # noqa: E402
from sparrow.attention.triton import search  # noqa: E402
from sparrow.attention.triton.saved import Target  # noqa: E402
from sparrow.attention.triton.search import (  # noqa: E402
    Bench,
    Grid,
    Pool,
    Problem,
    check_target,
    fastest,
    measured_again,
    tune,
)
from sparrow.attention.triton.variants import ATTEND, FACTORS, RANK, Variant  # noqa: E402
from sparrow.errors import ConfigError  # noqa: E402

TARGET = Target("a GPU", 132, H200.shared_memory, "3", 1, 2, 64, "float16", 16)
GRID = Grid(batches=(1, 2), pages=(2, 3), tokens=128)
ONE = Grid(batches=(2,), pages=(3,), tokens=128)
SHIPPED = Variant()


# --- the search ---


def test_search_combines_all_changes_that_make_a_variant_faster():
    def times(variant):
        us = 100.0 - 20 * (variant.attend == ATTEND[4]) - 10 * (variant.rank == RANK[1])
        return [us - 5 * (variant.extra == 2.0) - 4 * (variant.splits == 0.5)]

    assert fastest(times) == Variant(ATTEND[4], RANK[1], 2.0, 0.5)


def test_shipped_configuration_is_kept_unless_another_is_faster():
    assert fastest(lambda variant: [100.0, 50.0]) == SHIPPED
    assert fastest(lambda variant: [100.0 if variant == SHIPPED else 101.0]) == SHIPPED
    # Half a percent may be noise.
    assert fastest(lambda variant: [100.0 if variant == SHIPPED else 99.5]) == SHIPPED


def test_variant_that_is_slower_for_some_page_counts_is_not_chosen():
    def times(variant):
        return [50.0, 100.1] if variant.attend == ATTEND[0] else [100.0, 100.0]

    assert fastest(times) == SHIPPED


def test_unusable_variants_are_skipped():
    def times(variant):
        if variant.attend == ATTEND[0]:
            return None
        return [90.0 if variant.attend == ATTEND[1] else 100.0]

    assert fastest(times) == Variant(ATTEND[1])


def test_gpu_that_cannot_run_the_shipped_configuration_is_reported():
    with pytest.raises(ConfigError, match=r"shipped configuration .* does not run on this GPU"):
        fastest(lambda variant: None)


def test_number_of_measurements_is_bounded():
    seen = []

    def times(variant):
        seen.append(variant)
        return [100.0]

    fastest(times)
    assert len(seen) == 1 + len(ATTEND) + len(RANK) + 2 * len(FACTORS) <= 25


def test_final_times_are_medians_of_alternating_measurements():
    given = iter([[1.0], [10.0], [3.0], [30.0], [2.0], [20.0]])
    order = []

    def times(variant):
        order.append(variant)
        return next(given)

    other = Variant(extra=2.0)
    assert measured_again(times, other) == ([2.0], [20.0])
    assert order == [SHIPPED, other] * 3


@pytest.mark.parametrize(
    "target, grid, message",
    [
        (replace(TARGET, head_dim=100), GRID, "head dim 100, expected one of"),
        (replace(TARGET, group=17), GRID, "group 17"),
        (replace(TARGET, page_size=24), GRID, "page size 24"),
        (TARGET, replace(GRID, pages=(5,)), r"8 pages of 16 tokens, .* at most 4 .* \(got 5\)"),
        (TARGET, replace(GRID, tokens=2**19), "at most 16383 pages"),
    ],
)
def test_unsupported_shapes_and_lengths_raise_an_error(target, grid, message):
    with pytest.raises(ConfigError, match=message):
        check_target(target, grid, torch.device("cpu"))


def test_8_bit_cache_raises_an_error_on_a_gpu_that_cannot_convert_it(monkeypatch):
    monkeypatch.setattr(search, "fp8_lacking", lambda *_: "fp8 needs a newer GPU")
    with pytest.raises(ConfigError, match="newer GPU"):
        check_target(replace(TARGET, cache_dtype="float8_e4m3fn"), GRID, torch.device("cpu"))
    assert fp8_lacking(torch.device("cpu"), torch.float16, "auto") is None


# --- whole runs ---


def kernels(test):
    """Mark a test as needing a GPU, unless Triton's interpreter runs its kernels."""
    if INTERPRETED:
        return test
    absent = not torch.cuda.is_available()
    return pytest.mark.gpu(pytest.mark.skipif(absent, reason="needs a CUDA device")(test))


@pytest.fixture
def few_variants(monkeypatch):
    """Limit the search to one ranking tile, one factor, and two attention tiles, one of which
    uses 8 warps.
    """
    monkeypatch.setattr(search, "ATTEND", (ATTEND[2], ATTEND[4]))
    monkeypatch.setattr(search, "RANK", RANK[:1])
    monkeypatch.setattr(search, "FACTORS", FACTORS[1:2])


def run(target=TARGET, grid=GRID, time=lambda launches: 100.0, notes=None):
    torch.manual_seed(0)
    note = (notes if notes is not None else []).append
    return tune(target, grid, DEVICE, 1e12, time, note, pool_bytes=2**19)


@kernels
def test_every_variant_matches_the_reference():
    notes = []
    choices = run(grid=ONE, notes=notes)
    assert notes == ["2 sequences: as shipped"]  # no variant was excluded
    assert choices.target == TARGET and choices.cells[0].variant == SHIPPED


@kernels
@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn", "int8"])
def test_every_cache_format_matches_the_reference(few_variants, cache_dtype):
    notes = []
    run(replace(TARGET, cache_dtype=cache_dtype), ONE, notes=notes)
    assert notes == ["2 sequences: as shipped"]


@kernels
def test_tuned_file_lists_measured_times_and_the_read_limit(few_variants):
    configs = []

    def time(launches):
        config = launches[0].args[0].config
        configs.append(config)
        return 80.0 if config.attend_warps == 8 else 100.0

    choices = run(time=time)
    assert [cell.batch for cell in choices.cells] == [1, 2]
    for cell in choices.cells:
        assert cell.variant.attend.warps == 8
        assert [(m.pages, m.shipped_us, m.tuned_us) for m in cell.measured] == [
            (2, 100.0, 80.0),
            (3, 100.0, 80.0),
        ]
    # One row of 113 tokens has 8 pages. Of its 5 ranked pages, 3 are left out.
    read = 5 * 64 * 2 + (113 - 3 * 16) * 2 * 64 * 2
    assert choices.cells[0].measured[0].limit_us == pytest.approx(read / 1e6)
    assert len(set(configs)) > 4


@kernels
def test_chosen_variant_is_dropped_if_the_final_measurement_does_not_confirm_it(few_variants):
    lucky = set()

    def time(launches):
        config = launches[0].args[0].config
        if config.attend_warps == 8 and config not in lucky:
            lucky.add(config)
            return 50.0
        return 150.0 if config.attend_warps == 8 else 100.0

    (cell,) = run(grid=ONE, time=time).cells
    assert cell.variant == SHIPPED and lucky
    assert cell.measured[0].tuned_us == cell.measured[0].shipped_us == 100.0


@kernels
def test_variant_with_wrong_results_is_excluded_and_reported(few_variants, monkeypatch):
    launch = search._rank_and_attend

    def broken(step):
        launch(step)
        if step.config.attend_warps == 8:
            step.batch.out_BHD[-1, 0] *= 1.05

    monkeypatch.setattr(search, "_rank_and_attend", broken)
    notes = []

    def time(launches):
        return 1.0 if launches[0].args[0].config.attend_warps == 8 else 100.0

    (cell,) = run(grid=ONE, time=time, notes=notes).cells
    assert cell.variant == SHIPPED
    assert [note for note in notes if "left out 2 x 128 tokens, 8 warps" in note]


@kernels
@pytest.mark.parametrize("change", ["pages", "nothing written"])
def test_wrong_pages_and_missing_results_are_detected(change, monkeypatch):
    pool = Pool(TARGET, DEVICE, 2**19)
    problem = Problem(pool, 2, 3, 128)
    bench = Bench([problem], lambda launches: 1.0, lambda note: None)
    assert bench.times(SHIPPED) == [1.0]
    launch = search._rank_and_attend

    def broken(step):
        if change == "pages":
            step.batch.landmark_cache.neg_()
            launch(step)
            step.batch.landmark_cache.neg_()

    monkeypatch.setattr(search, "_rank_and_attend", broken)
    assert bench.times(SHIPPED) is None


@kernels
def test_variant_that_the_gpu_cannot_run_is_excluded(few_variants):
    def time(launches):
        if launches[0].args[0].config.attend_stages == 3:
            raise OutOfResources(2, 1, "shared memory")
        return 100.0

    notes = []
    (cell,) = run(grid=ONE, time=time, notes=notes).cells
    assert cell.variant == SHIPPED and notes == ["2 sequences: as shipped"]
