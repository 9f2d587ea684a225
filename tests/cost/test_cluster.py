"""Compare plans for a cluster with hand calculations, measurements and the published 14B run, and
test that a plan that does not fit raises an error.
"""

import importlib
from dataclasses import replace
from pathlib import Path

import pytest

from sparrow.cli import main
from sparrow.cost import (
    MACHINES,
    SHAPES,
    Machine,
    ModelShape,
    cluster,
    drafters,
    response_lengths,
    simulate_rollout,
)
from sparrow.cost.cluster import Cluster, fit, plan, sync_seconds, train_seconds
from sparrow.cost.lossless import DraftSetup, lossless_step
from sparrow.cost.roofline import VLLM_H200, decode_step
from sparrow.errors import ConfigError
from sparrow.schedule import SparsitySchedule

TINY = ModelShape("tiny", layers=2, heads=4, kv_heads=2, head_dim=8, weights=1_000_000)
GPU = Machine("box", hbm_bytes_s=1e9, read_bytes_s=1e9, flops=1e9, memory_bytes=100e9)
H200 = MACHINES["h200"]
ROOT = Path(__file__).parents[2]


def test_memory_matches_a_hand_calculation():
    # Each of the 1e6 parameters takes 12 bytes between steps, and its gradient takes 4. Both are
    # spread over 4 GPUs. The model is 32 wide and has two layers.
    found = fit(TINY, Cluster(GPU, 4, tensor_parallel=2), longest=1000, token_budget=5000)
    assert (found.state, found.gradients, found.engine_weights) == (3e6, 1e6, 1e6)
    assert found.activations == 5000 * 32 * (4 + 34) + 7.5e9 + 3e6
    # An engine on two GPUs can use 170e9 bytes, less 2 x 3e6 of state and 2e6 of weights. A token
    # takes 64 elements of 2 bytes.
    held = int((0.85 * 200e9 - 6e6 - 2e6) // 128)
    assert found.kv == held * 128 / 2 and found.full_responses == held // 1000
    apart = fit(
        TINY, Cluster(GPU, 4, tensor_parallel=2), longest=1000, token_budget=5000, colocated=False
    )
    assert apart.kv > found.kv


def test_engines_with_more_gpus_than_kv_heads_cache_each_head_several_times():
    schedule = SparsitySchedule.fixed(2, dense_layers=(), landmark_dtype="fp8_e4m3")
    few, many = ((TINY, Cluster(GPU, 4, n)) for n in (2, 4))
    # On four GPUs, each of the two kv heads is stored twice, so the cache holds 64 x 2 elements per
    # token.
    memory = fit(*many, longest=1000, token_budget=5000)
    held = int((0.85 * 400e9 - 4 * 3e6 - 2e6) // 256)
    assert memory.full_responses == held // 1000 and memory.kv == held * 256 / 4
    # Each GPU reads as many bytes as in an engine of two GPUs, so all four read twice as many.
    single, twice = (cluster.engine_shape(*engine) for engine in (few, many))
    one, two = (decode_step(shape, GPU, [5000], schedule) for shape in (single, twice))
    assert (two.kv_bytes, two.landmark_bytes) == (2 * one.kv_bytes, 2 * one.landmark_bytes)
    assert train_seconds(twice, many[1], [100]) == train_seconds(TINY, many[1], [100])
    rollout = plan(*many, [5000] * 4, schedule, acceptance=0.9)
    machine = cluster.engine_machine(many[1], memory.state)
    simulated = simulate_rollout(twice, machine, [5000] * 4)
    gather = cluster.GATHER_S * 20_000
    assert rollout.dense.rollout == simulated.seconds + gather
    with pytest.raises(ConfigError, match=r"4 query heads and 2 kv heads of tiny .* the 3 GPUs"):
        fit(TINY, Cluster(GPU, 3, 3), longest=1000)


def test_every_pass_of_a_tensor_parallel_engine_makes_two_all_reduces_per_layer():
    one, two = (cluster.engine_machine(Cluster(GPU, n, n)) for n in (1, 2))
    silent = replace(two, all_reduce_s=0.0)
    assert one.all_reduce_s == 0 and two.all_reduce_s == 2 * cluster.ALL_REDUCE_S
    schedule = SparsitySchedule.fixed(2, dense_layers=())

    def all_reduces(seconds):
        return (seconds(two) - seconds(silent)) / (TINY.layers * two.all_reduce_s)

    for kind in (None, schedule):
        assert all_reduces(lambda m, kind=kind: decode_step(TINY, m, [5000], kind).seconds) == (
            pytest.approx(1)
        )
    drafting = DraftSetup(4, schedule, acceptance=0.0)  # a token per cycle of four drafts
    assert all_reduces(lambda m: lossless_step(TINY, m, [5000], drafting).seconds) == (
        pytest.approx(5)
    )
    dense_s = decode_step(TINY, silent, [5000], None, VLLM_H200.without_lists).seconds
    reduced_s = dense_s + TINY.layers * two.all_reduce_s
    passes_s = drafters.break_even(TINY, two, [5000], drafters.EAGLE3) * reduced_s
    silent_s = drafters.break_even(TINY, silent, [5000], drafters.EAGLE3) * dense_s
    # EAGLE-3 makes three passes over one layer.
    assert (passes_s - silent_s) / two.all_reduce_s == pytest.approx(TINY.layers + 3)


def test_training_time_matches_a_hand_calculation():
    # For two sequences of 100 and 300 tokens, the forward pass takes 2 x 1e6 x 400 FLOPs, plus 64 x
    # 2 x (1e4 + 9e4) for attention.
    forward = 2e6 * 400 + 128 * 1e5
    alone = train_seconds(TINY, Cluster(GPU, 1), [100, 300])
    assert alone == pytest.approx((forward / 0.24e9, 4 * forward / 0.28e9))
    assert train_seconds(TINY, Cluster(GPU, 4), [100, 300]) == pytest.approx(
        tuple(s / 4 for s in alone)
    )
    # On a fast GPU, communication dominates. Each GPU lacks 3 / 4 of the weights, and exchanges 2
    # bytes per missing weight for log-probs and 8 for the update.
    fast = replace(GPU, flops=1e18)
    gathered = train_seconds(TINY, Cluster(fast, 4), [100, 300])
    assert gathered == pytest.approx((2 * 0.75e6 / 350e9, 8 * 0.75e6 / 350e9))
    assert sync_seconds(TINY, Cluster(GPU, 4)) == pytest.approx(4 * 0.75e6 / 350e9 + 4e6 / 13e9)
    assert sync_seconds(TINY, Cluster(GPU, 16), colocated=False) == pytest.approx(
        4 * 15 / 16 * 1e6 / 40e9
    )


def test_step_is_as_slow_as_its_slowest_engine():
    responses = [4000, 10, 4000, 10]  # assigned round-robin, so one engine gets both long responses
    found = plan(TINY, Cluster(GPU, 2), responses, SparsitySchedule.dense(dense_layers=(0,)))
    machine = cluster.engine_machine(Cluster(GPU, 2), found.memory.state)
    times = [simulate_rollout(TINY, machine, r).seconds for r in ([4000, 4000], [10, 10])]
    gather = cluster.GATHER_S * sum(responses)
    assert found.dense.rollout == max(times) + gather
    score, _ = train_seconds(TINY, Cluster(GPU, 2), [256 + n for n in responses])
    assert found.dense.score == score + gather
    assert found.dense.imbalance == pytest.approx(2 * max(times) / sum(times))
    assert (
        found.dense.seconds
        == found.dense.rollout + found.dense.score + found.dense.update + found.dense.sync
    )


def measured(name, monkeypatch):
    """Return the seconds per phase of a step measured by ``benchmarks/grpo_step.py``, and the
    prediction for it.
    """
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    run = importlib.import_module("common").load(f"grpo_step_{name}")
    lengths, schedule = importlib.import_module("fit_roofline").scaled(run)
    gpus = Cluster(H200, run.get("gpus", 1))
    found = plan(
        SHAPES[run["shape"]],
        gpus,
        lengths,
        schedule,
        prompt=64,
        max_batch=lengths.size,
        token_budget=65536,
    )
    return run["seconds"], found.sparse if run["schedule"] else found.dense


@pytest.mark.parametrize("name", ["stock", "one", "ddp", "sparse"])
def test_predictions_match_each_phase_of_a_measured_step(name, monkeypatch):
    seconds, step = measured(name, monkeypatch)
    assert step.seconds == pytest.approx(sum(seconds.values()), rel=0.05)
    for phase in ("rollout", "score", "update"):
        assert getattr(step, phase) == pytest.approx(seconds[phase], rel=0.12)


@pytest.mark.parametrize("name", ["ddp2", "fsdp2", "ddp4", "fsdp2_4"])
def test_predictions_match_measured_training_on_several_gpus(name, monkeypatch):
    """Rollouts are excluded, because at these lengths they wait for the host, which was slowed down
    by other work.
    """
    seconds, step = measured(name, monkeypatch)
    for phase in ("score", "update"):
        assert getattr(step, phase) == pytest.approx(seconds[phase], rel=0.12)


def test_plan_that_does_not_fit_raises_an_error():
    with pytest.raises(
        ConfigError,
        match=r"training Qwen3-14B on 2 H200 needs 1\d\d GiB per GPU, .* use more GPUs",
    ):
        fit(SHAPES["qwen3-14b"], Cluster(H200, 2), 33000)
    little = replace(H200, memory_bytes=40e9)
    with pytest.raises(
        ConfigError,
        match=r"engine of 1 H200 has room for [12]\d,\d+ tokens .*; set tensor_parallel to 2$",
    ):
        fit(SHAPES["qwen3-14b"], Cluster(little, 64), 33000)
    with pytest.raises(ConfigError, match="6 GPUs cannot be split into engines of 4"):
        Cluster(H200, 6, 4)
    with pytest.raises(ConfigError, match="2 responses leave some of the 4 engines idle"):
        plan(TINY, Cluster(GPU, 4), [5, 5], SparsitySchedule.dense())


def test_error_names_the_smallest_engine_that_has_room():
    shape = replace(TINY, weights=100_000_000_000, heads=16, kv_heads=4, head_dim=2)
    gpus = Cluster(GPU, 24)

    def refusal(cluster):
        with pytest.raises(ConfigError) as refused:
            fit(shape, cluster, 1000, trains=False)
        return str(refused.value).rpartition("; ")[2]

    # An engine's weights take 200e9 bytes, more than the 170e9 of two GPUs. Three GPUs would be
    # enough, but do not divide the heads.
    assert refusal(gpus) == refusal(replace(gpus, tensor_parallel=2)) == "set tensor_parallel to 4"
    fit(shape, replace(gpus, tensor_parallel=4), 1000, trains=False)
    assert refusal(Cluster(GPU, 2)) == "use more GPUs or shorter responses"


def test_rollouts_are_predicted_without_training():
    """Engines get the training state's memory, and a step takes as long as its rollout."""
    gpus = Cluster(replace(GPU, memory_bytes=12e6), 2)
    with pytest.raises(ConfigError, match=r"training tiny on 2 box needs .* use more GPUs"):
        fit(TINY, gpus, 1000)
    alone = plan(TINY, gpus, [1000] * 4, SparsitySchedule.fixed(2, dense_layers=()), trains=False)
    memory = alone.memory
    assert (memory.state, memory.gradients, memory.activations) == (0, 0, 0)
    assert memory.kv == pytest.approx(0.85 * 12e6 - 2e6, rel=1e-3)
    engine = simulate_rollout(TINY, gpus.machine, [1000] * 2)
    assert alone.dense.rollout == engine.seconds + cluster.GATHER_S * 4000
    assert alone.dense.seconds == alone.dense.rollout
    names = [name for name, _ in cluster.rollout_rows(alone)]
    assert names == ["engine, GiB per GPU", "dense rollout", "lossy rollout", "rollout speed-up"]


def test_published_duration_falls_within_the_predicted_range():
    """The dense run took about 190 hours for 53,000 examples on 32 H200s. Neither the prompts per
    step nor the lengths were published.
    """
    schedule = SparsitySchedule.preset("qwen3-14b")

    def hours(prompts: int, median: float) -> float:
        responses = response_lengths(median, 32_768, 8 * prompts)
        found = plan(SHAPES["qwen3-14b"], Cluster(H200, 32), responses, schedule)
        return found.dense.seconds * 53_000 / prompts / 3600

    found = {(n, median): hours(n, median) for n in (16, 32, 64, 128) for median in (8_000, 14_000)}
    assert (
        found[128, 8_000]
        < found[64, 8_000]
        < found[32, 8_000]
        < 190
        < found[32, 14_000]
        < found[16, 8_000]
    )


def test_sparrow_cost_plans_a_cluster(capsys):
    main(
        [
            "cost",
            "--model",
            "qwen3-14b",
            "--schedule",
            "qwen3-14b-0.86",
            "--gpus",
            "32",
            "--examples",
            "53000",
        ]
    )
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "32 H200" in printed
        and "training, GiB" in printed
        and "h per run" in printed
        and "step speed-up" in printed
    )


def test_hours_of_a_run_assume_eight_responses_per_prompt_by_default(capsys):
    arguments = "cost --model qwen3-14b --schedule fixed:64 --gpus 32 --responses 64 --examples 800"

    def printed(*options):
        main([*arguments.split(), *options])
        return capsys.readouterr().out

    assert printed() == printed("--samples", "8") != printed("--samples", "4")


def test_run_with_too_few_examples_for_a_step_takes_one_step(capsys):
    arguments = "cost --model qwen3-14b --schedule fixed:64 --gpus 32 --responses 64"
    main([*arguments.split(), "--median", "1000", "--examples", "1"])
    assert " h per run" in " ".join(capsys.readouterr().out.split())


def test_gain_from_sparse_rollouts_is_limited_by_their_share_of_the_step():
    responses = response_lengths(14_000, 32_768, 512)
    found = plan(
        SHAPES["qwen3-4b"], Cluster(H200, 8), responses, SparsitySchedule.preset("qwen3-4b")
    )
    assert found.dense.rollout / found.sparse.rollout > 1.8
    assert found.dense.update == found.sparse.update
