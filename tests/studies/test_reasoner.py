"""Test the stability study's engine against the reference, and its statistics against hand
calculations.
"""

import ast
import importlib
import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from sparrow.cost import MACHINES, SHAPES, decode_step
from sparrow.errors import ConfigError
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from tests.conftest import VOCAB, tiny_model
from tests.train.test_distill import ON, SCHEDULE, run

sys.path.insert(0, str(Path(__file__).parents[2] / "studies" / "common"))
sys.path.insert(0, str(Path(__file__).parents[2] / "studies" / "reasoner"))
import draft_acceptance
import drafter_invariance
from common import read_result
from graph_engine import GraphEngine
from stability_statistics import (
    against_dense,
    arrival,
    last_reward,
    late_outcome,
    outcome,
    tau,
    threshold,
)
from stability_study import Arm, Options, as_if_large, fail, find_schedule, quantized, train
from stability_summary import MODELS, PAGE, RESULTS, kept, load, render, tables

LAYOUT = dict(bin_tokens=16, page_size=4, dense_layers=(0,))


def engine(schedule, **changes) -> GraphEngine:
    return GraphEngine(tiny_model(), schedule, [7], batch_size=4, max_length=72, **changes)


def prompts():
    return [np.random.default_rng(i).integers(0, VOCAB, 20 + 3 * i).tolist() for i in range(3)]


@pytest.mark.parametrize("top_k", [(10**6,), (0,), (1, 2, 3)])
def test_the_graph_engines_log_probs_match_the_reference(top_k):
    schedule = SparsitySchedule(top_k, **LAYOUT)
    graph = engine(schedule)
    rollouts = graph.generate(prompts(), Sampling(40, 1.0, 20, seed=3))
    counted = graph.counters()
    assert any(len(r) > 20 for r in rollouts)
    for rollout, scores in zip(rollouts, graph.score(rollouts, schedule, 1.0), strict=True):
        assert np.abs(rollout.logprobs - scores.logprobs).max() < 2e-4
        assert np.abs(rollout.top_logprobs - scores.top_logprobs).max() < 2e-4
        assert (rollout.finish_reason == "stop") == (rollout.response_ids[-1] == 7)
    lengths = [np.arange(len(r.prompt_ids) + 1, len(r.prompt_ids) + len(r)) for r in rollouts]
    assert counted.tokens_held == 4 * sum(int(n.sum()) for n in lengths)


def test_the_graph_engine_refuses_head_budgets():
    with pytest.raises(
        ConfigError, match="GraphEngine keeps the same number of pages in all kv heads"
    ):
        engine(SparsitySchedule((2,), **LAYOUT, head_budgets=((1, 1),) * 4))


def test_the_graph_engine_is_dense_up_to_the_verified_length_and_sparse_afterwards():
    schedule = SparsitySchedule((1,), **LAYOUT)
    graph = engine(schedule)
    graph.verify_up_to(48)
    rollouts = graph.generate(prompts(), Sampling(40, 1.0, VOCAB, seed=3))
    # At lengths up to 44, the current page ends before 48.
    ends = [min(len(r), 45 - len(r.prompt_ids)) for r in rollouts]
    assert [r.verification.tokens for r in rollouts] == ends and any(
        len(r) > n for r, n in zip(rollouts, ends, strict=True)
    )
    dense = graph.score(rollouts, SparsitySchedule.dense(), 1.0)
    for r, scores, end in zip(rollouts, dense, ends, strict=True):
        assert np.abs(r.top_logprobs - scores.top_logprobs)[:end].max() < 2e-4
        assert len(r) == end or np.abs(r.top_logprobs - scores.top_logprobs)[end:].max() > 0.01
    # A sparse actor measures the acceptance of verified tokens, but only for one response in four.
    assert [np.isfinite(r.verification.acceptance).all() for r in rollouts] == [True, False, False]
    first = rollouts[0]
    cut = replace(
        first,
        **{
            n: getattr(first, n)[: ends[0]]
            for n in ("response_ids", "logprobs", "top_ids", "top_logprobs")
        },
    )
    sparse = graph.score([cut], schedule, 1.0)[0]
    expected = np.minimum(np.exp(sparse.top_logprobs), np.exp(cut.top_logprobs)).sum(1)
    assert (
        first.verification.acceptance == pytest.approx(expected, abs=1e-4) and expected.min() < 0.99
    )
    graph.verify_up_to(float("inf"))
    again = engine(SparsitySchedule.dense(**LAYOUT)).generate(
        prompts(), Sampling(40, 1.0, VOCAB, seed=3)
    )
    for r, other in zip(
        graph.generate(prompts(), Sampling(40, 1.0, VOCAB, seed=3)), again, strict=True
    ):
        assert r.verification.tokens == len(r) and np.array_equal(
            r.response_ids, other.response_ids
        )


def test_tokens_are_priced_at_the_length_they_represent():
    schedule = SparsitySchedule((13, 21), bin_tokens=64, page_size=4, dense_layers=(0,))
    lossless, lossy = as_if_large(schedule, 192)(160, 0.99)
    # 64 tokens represent 2,000. 24 pages of 4 tokens therefore represent 3,000 tokens, which is 187
    # pages of 16 tokens at a length of 5,000.
    large = SparsitySchedule((100, 187 - 2), dense_layers=(0, 1))
    expected = decode_step(SHAPES["qwen3-1.7b"], MACHINES["h200"], [5000] * 192, large).seconds
    assert lossy == pytest.approx(expected, rel=0.01) and 1.05 < lossless / lossy < 1.15


def test_eviction_respects_the_budget_and_never_restores_a_token():
    graph = engine(SparsitySchedule((2,), **LAYOUT), evict=True)
    graph.generate(prompts(), Sampling(10, 1.0, 5, seed=3))
    before = graph._alive[1:].clone()
    assert before.sum(-1).max() == (2 + 1 + 2) * 4
    written = np.arange(72) < graph._position[:, None].numpy()
    graph._decode_step()
    assert not ((graph._alive[1:] & ~before).numpy() & written[:, None]).any()
    full = engine(SparsitySchedule.dense(**LAYOUT), evict=True)
    rollouts = full.generate(prompts(), Sampling(30, 1.0, 5, seed=3))
    for rollout, scores in zip(
        rollouts, full.score(rollouts, SparsitySchedule.dense(), 1.0), strict=True
    ):
        assert np.abs(rollout.logprobs - scores.logprobs).max() < 2e-4


def test_noise_is_added_to_the_configured_share_of_tokens():
    graph = engine(SparsitySchedule.dense(**LAYOUT), noise=(0.3, 0.5))
    rollouts = graph.generate(prompts() * 4, Sampling(40, 1.0, VOCAB, seed=3))
    scores = graph.score(rollouts, SparsitySchedule.dense(), 1.0)
    dense = np.concatenate([s.top_logprobs[:, 0] for s in scores])
    found = np.exp(np.concatenate([r.top_logprobs[:, 0] for r in rollouts]))
    noisy = np.abs(found - np.exp(dense)) > 1e-3
    assert noisy.mean() == pytest.approx(0.3, abs=0.08)
    assert np.allclose(found[noisy], 0.5 * np.exp(dense[noisy]) + 0.5 / VOCAB, atol=1e-3)


def test_quantization_matches_a_hand_calculation():
    weight = torch.tensor([[1.0, 0.4, -0.2], [3.0, -3.0, 1.4]])
    assert torch.allclose(quantized(weight, 2), torch.tensor([[1.0, 0.0, 0.0], [3.0, -3.0, 0.0]]))
    assert torch.allclose(
        quantized(weight, 3), torch.tensor([[1.0, 1 / 3, -1 / 3], [3.0, -3.0, 1.0]])
    )
    assert torch.equal(quantized(weight[0], 2), weight[0])


def test_collapse_threshold_matches_a_hand_calculation():
    assert threshold([0.7, 0.8, 0.9, 1.0], [True, True, False, False]) == pytest.approx(0.85)
    assert threshold([0.9, 0.8, 1.0, 0.7], [False, True, False, True]) == pytest.approx(0.85)
    assert threshold([0.6, 0.7, 0.8, 0.9], [True, False, True, False]) == pytest.approx(
        (0.65 + 0.85) / 2
    )


def made_up_run(arm, seed, reward, held_out):
    return {"arm": arm, "seed": seed, "reward": reward, "held_out": held_out, "schedule": "auto:92"}


def test_the_difference_from_dense_runs_matches_a_hand_calculation():
    """Runs are compared with the dense run that has the same seed, after the same number of
    steps.
    """
    runs = [
        made_up_run(
            "dense",
            0,
            [0.0] * 10 + [0.8] * 10 + [1.0] * 10,
            [[0, 0.1], [10, 0.5], [20, 0.7], [30, 0.9]],
        ),
        made_up_run("dense", 1, [0.5] * 20, [[10, 0.5], [20, 0.5]]),
        made_up_run("a", 0, [0.0] * 10 + [0.7] * 10, [[0, 0.1], [10, 0.4], [20, 0.6]]),
        made_up_run("a", 1, [0.0] * 10 + [0.6] * 10, [[10, 0.5], [20, 0.5]]),
    ]
    assert last_reward(runs[0]) == 1.0 and outcome(runs[0]) == pytest.approx(0.8)
    # The differences are -0.1 and 0.1. Their standard deviation, divided by the root of 2, is 0.1.
    # t(0.975, 1) is 12.706.
    assert against_dense(runs[2:], runs, last_reward) == pytest.approx((0.0, 1.2706), abs=1e-4)
    assert against_dense(runs[2:], runs, outcome) == pytest.approx((-0.05, 0.6353), abs=1e-4)
    assert late_outcome(runs[0]) == pytest.approx(0.8) and late_outcome(
        runs[0], 20
    ) == pytest.approx(0.6)
    alone = against_dense(runs[2:3], runs, outcome)
    assert alone[0] == pytest.approx(-0.1) and np.isnan(alone[1])


def test_the_step_at_which_a_run_reaches_tau_matches_a_hand_calculation():
    run = made_up_run("auto92", 0, [], [])
    run["bins"] = [[[2, 1.0], [3, 0.93]], [[2, 0.935], [3, 0.91]], [[2, 0.95], [3, 0.89]]]
    first, near, holds = arrival(run)
    assert first == 1 and near.tolist() == [0.5, 1.0, 0.0] and holds.tolist() == [1.0, 1.0, 0.5]


def test_a_closed_loop_starts_from_the_given_schedule(tmp_path):
    (tmp_path / "schedules.json").write_text('{"p86": [1, 2]}')
    dense, fixed, table = (
        find_schedule(Arm(schedule), tmp_path / "schedules.json")
        for schedule in ("auto:90", "fixed:4", "auto:86:p86")
    )
    assert dense.is_dense and fixed.top_k == (4,) and table.top_k == (1, 2)
    assert [tau({"schedule": name}) for name in ("auto:98", "auto:86:p86", "p92", "dial:985")] == [
        0.98,
        0.86,
        0.86,
        0.985,
    ]


def test_faults_affect_the_actor_and_persist_after_a_weight_update(tmp_path):
    trainer = run(tmp_path, ON, schedule=SCHEDULE.replace(top_k=(6,)))
    ids = torch.randint(0, 151, (1, 50))
    policy, actor = (model(input_ids=ids).logits for model in (trainer.model, trainer.engine.model))
    assert not torch.equal(actor, policy)
    fail(trainer, "unworn")
    trainer.sync()
    assert torch.equal(trainer.engine.model(input_ids=ids).logits, policy)
    fail(trainer, "halved")
    assert trainer.schedule.top_k == trainer.engine.schedule.top_k == (3,)


def test_training_step_is_recorded(tmp_path):
    path = tmp_path / "dense-0.jsonl"
    options = Options(
        out=tmp_path,
        steps=1,
        prompts=2,
        lines=2,
        held_out_lines=2,
        held_out=2,
        held_out_every=1,
        calibration=2,
    )
    train(options, "dense", 0, torch.device("cpu"), float("inf"), path)
    start, before, step = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert start["arm"] == "dense" and before["step"] == 0 and step["step"] == 1
    assert 0.99 < step["tail"][0] <= step["tail"][2] <= 1 and step["mean"] > 0.99, (
        "actor and policy must be the same"
    )
    assert sum(n for _, n, *_ in step["bins"]) == pytest.approx(16 * step["length"])


def test_training_step_with_the_dial_is_recorded(tmp_path):
    path = tmp_path / "dial98-0.jsonl"
    options = Options(
        out=tmp_path,
        steps=1,
        prompts=2,
        lines=2,
        held_out_lines=2,
        held_out=2,
        held_out_every=1,
        calibration=2,
    )
    train(options, "dial98", 0, torch.device("cpu"), float("inf"), path)
    start, _, step = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    assert start["schedule"] == "dial:98" and step["dial"]["unverified_fraction"] == 0
    assert step["dial"]["bins"] and all(b["mode"] == "lossless" for b in step["dial"]["bins"])


@pytest.mark.parametrize("script", ["train_reasoner", "stability_study", "distill_study"])
def test_names_imported_inside_functions_exist(script):
    source = (Path(__file__).parents[2] / "studies" / "reasoner" / f"{script}.py").read_text(
        encoding="utf-8"
    )
    wanted = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
    ours = [node for node in wanted if node.module.startswith("sparrow")]
    assert ours
    for node in ours:
        module = importlib.import_module(node.module)
        assert [name.name for name in node.names if not hasattr(module, name.name)] == []


def test_tables_on_the_page_match_the_result_files():
    page, made = PAGE.read_text(encoding="utf-8"), tables(load())
    assert render(page, made) == page, "run python studies/reasoner/stability_summary.py"
    assert all(page.count(f"<!-- table: {name} -->") == 1 for name in made)


def test_result_files_contain_only_what_tables_and_figures_read():
    for file in MODELS:
        for stored in json.loads((RESULTS / f"{file}.json").read_text(encoding="utf-8")):
            assert kept(stored, file) == stored, (
                f"{file}.json, {stored['arm']}, seed {stored['seed']}"
            )


def test_acceptance_is_one_only_if_drafts_read_everything(checkpoint, tmp_path):
    out = tmp_path / "acceptance.json"
    few = dict(pages=(1, 20), drafts=(2,), problems=2, max_new_tokens=40)
    small = draft_acceptance.Options(out, models=(checkpoint,), lines=(4,), **few)
    draft_acceptance.main(small)
    (model,) = read_result(out)["models"]
    little, everything = model["rows"]
    assert [row["pages"] for row in (little, everything)] == [1, 20] and model["lines"] == 4
    assert little["lossy"]["read_fraction"] < everything["lossy"]["read_fraction"] == 1
    assert little["lossy"]["mean"][0] < 0.99 < everything["lossy"]["p5"][0]
    fewer, most = (row["lossless"]["2"]["tokens_per_cycle"] for row in (little, everything))
    assert fewer < 2.9 < most <= 3
    with pytest.raises(SystemExit, match="2 program lengths for 1 models"):
        draft_acceptance.main(replace(small, lines=(4, 5)))


def test_probabilities_of_drawing_the_same_token_match_a_hand_calculation():
    p, q = (
        torch.tensor([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]),
        torch.tensor([[0.25, 0.25, 0.5], [1.0, 0.0, 0.0]]),
    )
    # In p, the first two tokens have the intervals [0, 0.5] and [0.5, 1]. In q, they have [0, 0.25]
    # and [0.25, 0.5]. Only the first token's intervals overlap, by 0.25.
    assert drafter_invariance.inverse_match(p, q) == pytest.approx((0.25 + 1) / 2)
    # P(same) = sum over v of 1 / sum over w of max(p(w) / p(v), q(w) / q(v)) = 2 / (1 + 1 + 2).
    generator = torch.Generator().manual_seed(0)
    many = (x.repeat(200, 1) for x in (p, q))
    assert drafter_invariance.gumbel_match(*many, generator) == pytest.approx(
        (0.5 + 1) / 2, abs=0.01
    )


def test_drafter_invariant_sampling_yields_the_same_tokens_as_dense_decoding(checkpoint, tmp_path):
    out = tmp_path / "invariance.json"
    few = dict(pages=(1, 20), drafts=(2,), problems=2, max_new_tokens=40)
    drafter_invariance.main(drafter_invariance.Options(out, model=checkpoint, lines=4, **few))
    little, everything = read_result(out)["rows"]
    for row in (little, everything):
        assert row["cycles"]["drafter invariant, k = 2"]["as_dense"] == 2
        assert (
            row["kept"]["inverse"]
            <= row["kept"]["gumbel"] + 0.01
            <= row["kept"]["rejection"] + 0.02
        )
    assert little["kept"]["rejection"] < 0.99 < everything["kept"]["inverse"]
    assert little["cycles"]["rejection, k = 2"]["as_dense"] < 2
