"""Compare the predicted break-even points of drafters with hand calculations and measurements."""

import numpy as np
import pytest

from sparrow.cost import MACHINES, SHAPES, Machine, ModelShape, Overheads, predict
from sparrow.cost.drafters import DSPARK, EAGLE3, TrainedDrafter, break_even, rows
from sparrow.cost.drafters import sparse_break_even as sparse
from sparrow.cost.lossless import CycleOverheads, DraftSetup, predict_lossless
from sparrow.schedule import SparsitySchedule

H200 = MACHINES["h200"]
# Ten layers of 10 weights and an output layer of 20; 4 bytes of cache per token and layer.
SMALL = ModelShape("small", 10, 1, 1, 1, 120, output=20)
# This machine reads 100 bytes and computes 1,000 FLOPs per second.
SLOW = Machine("slow", 100.0, 100.0, 1000.0, 1e9)


def test_drafter_break_even_point_matches_a_hand_calculation():
    drafter = TrainedDrafter("two layers", 3, 3, 2, 0.5)
    # A dense step reads 240 bytes of weights and 5 x 40 bytes of cache. A pass of the drafter reads
    # 60 and 5 x 8. Verifying three drafts takes 2 x 120 x 3 FLOPs, at half the peak.
    found = break_even(SMALL, SLOW, [5], drafter, Overheads(), CycleOverheads(0.0, 0.5))
    assert found == pytest.approx((4.4 + 3 * 1.0 + 1.44) / 4.4)


def test_drafting_a_block_reads_the_layers_once_and_computes_every_token():
    drafter = TrainedDrafter("block", 3, 1, 2, 0.5)
    # Two more tokens through 30 weights take 120 FLOPs, at half the peak.
    found = break_even(SMALL, SLOW, [5], drafter, Overheads(), CycleOverheads(0.0, 0.5))
    assert found == pytest.approx((4.4 + 1.0 + 0.24 + 1.44) / 4.4)


def test_layer_overheads_apply_to_each_pass_and_sequence_overheads_once_per_cycle():
    drafter = TrainedDrafter("two layers", 3, 3, 2, 0.5)
    overheads = Overheads(layer_s=1.0, row_s=7.0, lists_s=5.0, host_s=100.0)
    found = break_even(SMALL, SLOW, [5], drafter, overheads, CycleOverheads(0.0, 0.5))
    dense = 4.4 + 10 + 7
    assert found == pytest.approx((dense + 3 * (1.0 + 2) + 1.44) / dense)


@pytest.mark.parametrize(
    "shape, batch, length, eagle3, dspark",
    [
        ("qwen3-1.7b", 32, 15_000, 1.15, 1.30),
        ("qwen3-1.7b", 64, 4_096, 1.21, 1.58),
        ("qwen3-8b", 16, 15_000, 1.13, 1.28),
        ("qwen3-8b", 8, 30_000, 1.12, 1.22),
    ],
)
def test_trained_drafters_are_predicted_within_7_percent_of_long_steps_on_an_h200(
    shape, batch, length, eagle3, dspark
):
    setting = SHAPES[shape], H200, [length] * batch
    assert break_even(*setting, EAGLE3) == pytest.approx(eagle3, rel=0.07)
    assert break_even(*setting, DSPARK) == pytest.approx(dspark, rel=0.07)


@pytest.mark.parametrize(
    "shape, batch, length, six, twelve",
    [
        ("qwen3-1.7b", 32, 15_000, 2.29, 3.61),
        ("qwen3-1.7b", 64, 4_096, 3.71, 6.48),
        ("qwen3-8b", 16, 15_000, 3.57, 6.16),
        ("qwen3-8b", 64, 4_096, 4.64, 8.54),
        ("qwen3-30b-a3b", 32, 15_000, 4.85, 8.46),
        ("qwen3-30b-a3b", 8, 15_000, 6.48, 11.34),
    ],
)
def test_sparse_actor_is_predicted_within_7_percent_of_long_steps_on_an_h200(
    shape, batch, length, six, twelve
):
    for drafts, measured in ((6, six), (12, twelve)):
        drafting = DraftSetup(drafts, SparsitySchedule.fixed(61, dense_layers=()), 0.945)
        found = sparse(SHAPES[shape], H200, [length] * batch, drafting)
        assert found == pytest.approx(measured, rel=0.07)


def test_lossless_decoding_pays_off_if_cycles_yield_more_tokens_than_the_break_even_point():
    shape = SHAPES["qwen3-4b"]
    for length in (500, 16_000):
        responses = np.full(64, length)
        lossy = predict(shape, H200, responses, SparsitySchedule.preset("qwen3-4b"))
        lossless = predict_lossless(shape, H200, responses, lossy.dense, 0.94)
        needed = sparse(shape, H200, np.full(64, 256 + length // 2), lossless.drafting)
        pays = needed < lossless.drafting.tokens_per_cycle
        assert pays == (lossless.speedup > 1.05)


def test_sparrow_cost_prints_a_row_for_each_drafter(capsys):
    from sparrow.cli import main

    main(["cost", "--model", "qwen3-4b", "--schedule", "qwen3-4b-0.86", "--responses", "8"])
    printed = capsys.readouterr().out
    assert all(f"break-even, {name}" in printed for name in ("EAGLE-3", "DSpark", "sparse actor"))


def compared_with_lossless(length: int) -> dict[str, str]:
    """Return the rows' remarks on trained drafters for 32 responses of this length."""
    shape = SHAPES["qwen3-1.7b"]
    responses = np.full(32, length)
    lossy = predict(shape, H200, responses, SparsitySchedule.preset("qwen3-1.7b"))
    lossless = predict_lossless(shape, H200, responses, lossy.dense, 0.94)
    found = rows(shape, H200, responses, lossy.dense, lossless)
    return {name: value.partition("; ")[2] for name, value in found}


def test_a_trained_drafter_must_yield_more_tokens_the_faster_lossless_mode_is():
    suffix = " to be faster than lossless mode"
    short, long = (compared_with_lossless(length) for length in (1_000, 15_000))
    for name in ("break-even, EAGLE-3", "break-even, DSpark"):
        few, many = (float(each[name].removesuffix(suffix)) for each in (short, long))
        assert 1 < few < many


def test_drafter_that_drafts_too_few_tokens_is_never_faster_than_lossless_mode():
    found = compared_with_lossless(200_000)
    assert found["break-even, EAGLE-3"] == "never faster than lossless mode with 3 drafts"
    assert found["break-even, sparse actor"] == ""


def test_break_even_rows_use_the_batch_size_and_length_of_the_rollout():
    shape = SHAPES["qwen3-1.7b"]
    found = []
    for length in (1_000, 30_000):
        responses = np.full(32, length)
        lossy = predict(shape, H200, responses, SparsitySchedule.preset("qwen3-1.7b"))
        lossless = predict_lossless(shape, H200, responses, lossy.dense, 0.94)
        table = dict(rows(shape, H200, responses, lossy.dense, lossless))
        found.append(float(table["break-even, DSpark"].split()[0]))
    assert found[0] > found[1] > 1
