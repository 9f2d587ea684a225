"""Test the predicted cost of lossless decoding: cycles (against hand calculations), 8-bit landmarks
and weights, and recommendations.
"""

from dataclasses import astuple, replace

import numpy as np
import pytest

from sparrow.cli import main
from sparrow.cost import (
    MACHINES,
    SHAPES,
    VLLM_H200,
    Machine,
    ModelShape,
    Overheads,
    decode_step,
    predict,
    response_lengths,
)
from sparrow.cost.lossless import (
    CYCLE_H200,
    CycleOverheads,
    DraftSetup,
    choices,
    lossless_step,
    predict_lossless,
    rows,
)
from sparrow.schedule import SparsitySchedule

H200 = MACHINES["h200"]
ENGINE = VLLM_H200.without_lists  # the measurements returned no lists


def drafts(k, acceptance, pages=61):
    return DraftSetup(k, SparsitySchedule.fixed(pages, dense_layers=()), acceptance)


def cycle_seconds(shape, batch, drafting):
    """Return the seconds of a full cycle over sequences of 15,000 tokens."""
    step = lossless_step(SHAPES[shape], H200, [15_000] * batch, drafting, ENGINE)
    return step.seconds * drafting.tokens_per_cycle


def test_tokens_per_cycle_match_a_hand_calculation():
    assert drafts(3, 0.5).tokens_per_cycle == 1 + 0.5 + 0.25 + 0.125
    assert drafts(8, 0.95).tokens_per_cycle == pytest.approx((1 - 0.95**9) / 0.05)
    assert drafts(8, 1.0).tokens_per_cycle == 9 and drafts(8, 0.0).tokens_per_cycle == 1
    assert drafts(0, 0.7).tokens_per_cycle == 1


def test_cycle_time_matches_a_hand_calculation():
    # With one layer and one head of 4, a cached token takes 16 bytes and a landmark 8. The weights
    # are 500 parameters, or 1,000 bytes.
    shape, machine = ModelShape("tiny", 1, 1, 1, 4, 500), Machine("toy", 1e3, 1e3, 1e6, 1e12)
    schedule = SparsitySchedule.fixed(
        1, page_size=10, bin_tokens=10, sink_pages=1, recent_pages=1, dense_layers=()
    )
    overheads = Overheads(0.5, 0.25, 0.125, 1.0, 1.0, 0.0)
    found = lossless_step(
        shape,
        machine,
        [100, 200],
        DraftSetup(2, schedule, 0.5),
        overheads,
        CycleOverheads(0.375, 0.5),
    )
    # A draft takes 1 s for weights, the time to read 2 x 30 tokens and 10 + 20 landmarks, and
    # 0.375 s of overhead. Verification takes 1 s for weights, the time to compute 4 more tokens at
    # half the peak and to read 300 tokens, and 0.5 + 2 x 0.125 s of overhead. Each of the two
    # sequences returns lists for 1.75 tokens.
    draft = (1.0, (60 * 16 + 30 * 8) / 1e3, 0.375)
    verify = (1.0 + 4 * 2 * 500 / (0.5 * 1e6), 300 * 16 / 1e3, 0.75)
    weight, attention, overhead = (2 * d + v for d, v in zip(draft, verify, strict=True))
    overhead += 2 * 1.75
    assert found.weight_s == pytest.approx(weight / 1.75) and found.attention_s == pytest.approx(
        attention / 1.75
    )
    assert found.overhead_s == pytest.approx(overhead / 1.75)
    assert found.seconds == pytest.approx((weight + attention + overhead) / 1.75)
    assert found.kv_bytes == pytest.approx((2 * 60 + 300) * 16 / 1.75)


def test_cycle_without_drafts_costs_as_much_as_a_dense_step():
    for overheads in (VLLM_H200, ENGINE, Overheads(host_s=1.0)):
        dense = decode_step(SHAPES["qwen3-4b"], H200, [3000, 9000], None, overheads)
        found = lossless_step(SHAPES["qwen3-4b"], H200, [3000, 9000], drafts(0, 0.9), overheads)
        assert astuple(found) == pytest.approx(astuple(dense))


def test_drafts_do_not_reduce_the_host_time_per_token():
    found = lossless_step(
        SHAPES["qwen3-4b"], H200, [3000, 9000], drafts(4, 0.9), Overheads(host_s=1.0)
    )
    assert found.seconds == pytest.approx(2.0), "one second for each of two sequences"


def test_acceptance_is_given_at_1024_tokens_and_rises_with_the_budget():
    by_pages = {c.schedule.top_k[0]: c.acceptance for c in choices(0.9)}
    assert by_pages[61] == pytest.approx(0.9)
    assert 1 - by_pages[253] == pytest.approx(0.1 * 4**-0.7) and 1 - by_pages[29] == pytest.approx(
        0.1 * 2**0.7
    )


def test_eight_bit_landmarks_shorten_draft_steps_in_proportion_to_the_bytes_saved():
    plain = drafts(12, 1.0)
    in_8_bits = replace(plain, schedule=plain.schedule.replace(landmark_dtype="fp8_e4m3"))
    whole, halved = (cycle_seconds("qwen3-1.7b", 64, drafting) for drafting in (plain, in_8_bits))
    saved = 12 * 28 * 64 * 938 * 8 * 128  # 12 drafts, 28 layers, 64 x 938 pages
    assert whole - halved == pytest.approx(saved / (H200.read_bytes_s * VLLM_H200.read_fraction))
    shape, responses = SHAPES["qwen3-1.7b"], np.full(64, 12_000)
    dense = predict(shape, H200, responses, SparsitySchedule.preset("qwen3-1.7b")).dense
    faster = predict_lossless(shape, H200, responses, dense, 0.94, landmark_dtype="fp8_e4m3")
    assert faster.drafting.schedule.landmark_dtype == "fp8_e4m3"
    assert faster.speedup > predict_lossless(shape, H200, responses, dense, 0.94).speedup


def test_eight_bit_draft_weights_halve_weight_reads_and_shrink_the_cache():
    shape = SHAPES["qwen3-14b"]
    whole, halved = (
        cycle_seconds("qwen3-14b", 32, replace(drafts(5, 1.0), weights=kind))
        for kind in ("auto", "fp8")
    )
    linear_layers = 40 * (5120 * 128 * (40 + 8 + 8) + 40 * 128 * 5120 + 3 * 5120 * 17408)
    half_s = linear_layers / (H200.read_bytes_s * VLLM_H200.read_fraction)
    saved = 5 * (half_s * (2 - 1 / CYCLE_H200.fp8_share) - 40 * CYCLE_H200.fp8_layer_s)
    assert whole - halved == pytest.approx(saved, rel=1e-3)  # only linear layers have an FP8 copy
    responses = np.full(200, 30_000)
    dense = predict(shape, H200, responses, SparsitySchedule.preset("qwen3-8b")).dense
    plain, copied = (
        predict_lossless(shape, H200, responses, dense, 0.95, draft_weights=kind)
        for kind in ("auto", "fp8")
    )
    assert copied.drafting.weights == "fp8" and copied.speedup > plain.speedup
    assert copied.rollout.mean_batch < plain.rollout.mean_batch


def predicted(shape, responses, acceptance=0.94, **options):
    lossy = predict(SHAPES[shape], H200, responses, SparsitySchedule.preset(shape), **options)
    return lossy, predict_lossless(
        SHAPES[shape], H200, responses, lossy.dense, acceptance, **options
    )


def test_higher_acceptance_leads_to_more_drafts_and_never_to_a_slowdown():
    responses = np.full(240, 12_000)
    speedups, counts = zip(
        *(
            (found.speedup, found.drafting.tokens)
            for a in (0.0, 0.8, 0.94, 0.99)
            for found in [predicted("qwen3-1.7b", responses, a)[1]]
        ),
        strict=True,
    )
    assert speedups[0] >= 1, "nothing should be drafted where drafts do not pay"
    assert list(speedups) == sorted(speedups) and list(counts[1:]) == sorted(counts[1:])
    assert counts[-1] == 16 and speedups[-1] > 2.5
    with pytest.raises(ValueError, match=r"acceptance is 1\.5, expected a probability"):
        predicted("qwen3-1.7b", responses, 1.5)


def test_larger_models_gain_less_from_lossless_mode():
    responses = np.full(240, 12_000)
    dense = ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")
    found = [predicted(shape, responses)[1].speedup for shape in dense]
    assert found == sorted(found, reverse=True) and found[0] > 1.3 * found[3]


LONG = response_lengths(14_000, 32_768, 240)


def test_each_row_recommends_the_fastest_mode():
    lossy, lossless = predicted("qwen3-1.7b", LONG, 0.9)
    table = dict(rows(lossy, lossless))
    spent = {"dense": lossy.dense, "lossy": lossy.sparse, "lossless": lossless.rollout}
    for name, run in spent.items():
        attention, draining = (
            round(100 * part / run.seconds) for part in (run.attention_s, run.drain_s)
        )
        assert table[f"{name} rollout"].endswith(f"{attention}% attention, {draining}% draining")
    whole = [run.seconds + lossy.train_s for run in spent.values()]
    for name, seconds in zip(("lossy", "lossless"), whole[1:], strict=True):
        assert table[f"{name} speed-up"].endswith(f"{whole[0] / seconds:.2f}x on the step")
    assert list(table) == [
        "dense rollout",
        "lossy rollout",
        "lossless rollout",
        "lossy speed-up",
        "lossless speed-up",
        "drafts",
        "verdict",
    ]
    assert table["drafts"].startswith("8 that read 1,024 tokens each; 6.1")
    both = table["verdict"]
    assert both.startswith("Both pay off (") and "lossy mode gains more" in both
    surer = dict(rows(*predicted("qwen3-1.7b", LONG, 0.99)))["verdict"]
    assert surer.startswith("Lossless rollouts gain the most (") and "need no correction" in surer
    wrong = dict(rows(*predicted("qwen3-8b", LONG, 0.1)))["verdict"]
    assert wrong.startswith("Lossy rollouts pay off and lossless ones do not (")
    short = dict(rows(*predicted("qwen3-14b", np.full(16, 500))))["verdict"]
    assert short.startswith("Neither pays off (") and "decode densely. " in short
    assert "weights" in short
    lone = dict(rows(*predicted("qwen3-1.7b", np.full(2, 500))))["verdict"]
    assert lone.startswith("Neither pays off (")
    assert "fixed overheads: responses are few or short" in lone


def test_lossless_decoding_is_not_predicted_for_unsupported_models(capsys):
    main(["cost", "--model", "qwen3-next-80b-a3b", "--schedule", "fixed:256", "--gpu", "b200"])
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    assert "lossless mode needs full attention in every layer" in printed
    assert "lossless rollout" not in printed and "drafts" not in printed


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--acceptance 0.94", "acceptance is 0.94, but must be left out"),
        ("--gpus 8 --acceptance 0.9", "acceptance is 0.9, but must be left out"),
        ("--draft-weights fp8", "draft_weights is 'fp8', but must be auto"),
    ],
)
@pytest.mark.parametrize("model", ["qwen3-next-80b-a3b", "olmo-3-7b"])
def test_options_for_lossless_decoding_are_refused_for_unsupported_models(
    model, options, message, capsys
):
    with pytest.raises(SystemExit):
        main(["cost", "--model", model, "--schedule", "fixed:256", *options.split()])
    reason = "because lossless mode needs full attention in all layers"
    assert " ".join(capsys.readouterr().err.split()) == f"sparrow: {message} for {model}, {reason}"
