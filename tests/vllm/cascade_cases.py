"""Test lossless mode with guesses from history in a real vLLM; ``test_lossless.py`` runs this file
in its own process.
"""

import time

import pytest
import torch

from tests.vllm import lossless_cases as cases  # isort: skip  before vLLM is imported
from types import SimpleNamespace

import numpy as np
from vllm import logger

from sparrow import attention
from sparrow.errors import ConfigError
from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.model.history import guess
from sparrow.rollout import Sampling
from sparrow.vllm.lossless import cascade, cascade_kernels, scheduler
from sparrow.vllm.lossless.chooser import DraftChooser
from sparrow.vllm.lossless.plan import DraftPlan, Guessed
from sparrow.vllm.lossless.setup import passes_of
from sparrow.vllm.runtime import layers_of
from sparrow.vllm.selfcheck import engine as engine_check
from sparrow.vllm.selfcheck import layers as layer_checks
from sparrow.vllm.selfcheck import steps as step_checks
from tests.vllm import tiny_vllm as tiny

lossless = cases.lossless
cascade_kernels.AT_ONCE = 128  # so that the contexts of these tests take several blocks


def in_turn(monkeypatch, seed=0):
    """Make every step use a random one of the engine's draft choices."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(
        DraftChooser, "choose", lambda self, *_: self.choices[rng.integers(len(self.choices))]
    )


def hold(monkeypatch, choice):
    """Make every step draft like this."""
    monkeypatch.setattr(DraftChooser, "choose", lambda *_: choice)


def repetitive(*lengths, words=3, seed=0):
    """Return prompts in which short phrases recur, so that history has guesses."""
    rng = np.random.default_rng(seed)
    asked = []
    for length in lengths:
        phrases = rng.integers(0, tiny.VOCAB, (words, 7))
        text = phrases[rng.integers(0, words, -(-length // 7))].reshape(-1)
        asked.append(text[:length].tolist())
    return asked


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, tiny.checkpoint(folder, num_hidden_layers=2, initializer_range=0.1)


# --- kernels ---


def longest_repeated_suffix(tokens, longest=8):
    """Return the length of the longest suffix of ``tokens``, up to ``longest``, that also occurs
    earlier.
    """
    for length in range(min(longest, len(tokens) - 1), 0, -1):
        suffix = tokens[-length:]
        if any(tokens[at : at + length] == suffix for at in range(len(tokens) - length)):
            return length
    return 0


@pytest.mark.parametrize("at_once", [16, 256])
def test_guesses_match_the_reference(at_once):
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, words, length) for words in (2, 3, 50) for length in (1, 2, 9, 77, 200)]
    rows += [np.resize(np.arange(1, period + 1), 40) for period in range(1, 8)]
    N, m, B = 256, 6, len(rows)
    history = torch.zeros(B, N, dtype=torch.int32)
    for b, row in enumerate(rows):
        history[b, : len(row)] = torch.from_numpy(row)
    length = torch.tensor([len(row) for row in rows])
    made = torch.arange(B) % 8 * (length > 8)  # drafts among these tokens
    expected = guess(history.long()[:, None], length[:, None], m)

    found = torch.full((B, m), -7)
    matched = torch.full((B,), -7, dtype=torch.int32)
    cascade_kernels.look_up_kernel[(B,)](
        (length - made).int(),
        made.int(),
        torch.tensor(8, dtype=torch.int32),
        history,
        N,
        found,
        matched,
        m,
        GP=8,
        BLOCK=at_once,
    )
    assert torch.equal(found, expected)
    assert matched.tolist() == [longest_repeated_suffix(row.tolist()) for row in rows]
    assert {0, 1, 8} <= {*matched.tolist()}
    assert (expected[-7:] > 0).all()  # the periods of 1 to 7 continue
    assert len(expected.unique()) > 8


def test_drafts_are_topped_up_with_guesses():
    guesses = torch.arange(40).view(5, 8)
    drafts = torch.full((5, 6), -7)
    drawn, counts = torch.full((9,), -7), torch.zeros(2, dtype=torch.int64)
    made = torch.tensor([0, 2, 4, 5, 3], dtype=torch.int32)
    cascade_kernels.fill_kernel[(5,)](
        torch.tensor([3, 4, 1, 8, -1]), made, guesses, 8, drafts, 6, drawn, counts, 5, KP=8
    )
    assert drafts.tolist() == [
        [0, 1, 2, 3, 4, -7],
        [-7, -7, 8, 9, 10, -7],
        [-7, -7, -7, -7, 16, -7],
        [-7] * 6,
        [-7] * 6,
    ]
    assert drawn.tolist() == [-7, 4, -7, 0, 2, -7, -7, -7, 5]
    assert counts.tolist() == [4 * 5, 5 + 3 + 1]


# --- greedy ---


@pytest.mark.parametrize("m", [1, 3])
def test_greedy_tokens_match_stock_vllm(made, m):
    folder, model = made
    asked = [*repetitive(300, 17, 150, 64, seed=1), *tiny.prompts(33, 15, seed=2)]
    with cases.engine(folder) as llm:
        expected = cases.generate(llm, asked, 40)
    for k, pages in ((4, 1), (8, 12), (5, 4)):
        decoding = lossless(k, pages=pages, guess_tokens=m)
        with cases.engine(folder, decoding, checks_itself=True) as llm:
            got = cases.generate(llm, asked, 40)
            counts = cases.counters(llm)
        assert cases.tokens_of(got) == cases.tokens_of(expected), (k, pages)
        cases.assert_greedy_and_dense(model, asked, got)
        assert 0 < counts["accepted"] < counts["drafted"]
        drawn = counts["drafted"] - counts["guessed"]
        assert counts["passes"] < drawn < counts["drafted"]


def test_greedy_tokens_match_stock_vllm_with_guesses_alone(made, monkeypatch):
    """There are no sparse passes, so nothing is written to the cache before verification."""
    folder, model = made
    asked = [*repetitive(300, 17, 150, 64, seed=1), *tiny.prompts(33, 15, seed=2)]
    with cases.engine(folder) as llm:
        expected = cases.generate(llm, asked, 120)
    hold(monkeypatch, Guessed(4, alone=True))
    found = cases.Landmarks(monkeypatch)
    decoding = lossless(12, adapt=True, pages=4, guess_tokens=2)
    with cases.engine(folder, decoding, checks_itself=True) as llm:
        got = cases.generate(llm, asked, 120)
        counts, told = cases.counters(llm), llm.collective_rpc("sparrow_acceptance")[0]
    assert cases.tokens_of(got) == cases.tokens_of(expected)
    cases.assert_greedy_and_dense(model, asked, got)
    assert found.worst < 1e-5 and found.pages > 500
    assert counts["passes"] == 0 < counts["accepted"] < counts["guessed"] == counts["drafted"]
    assert set(told["cycles"]) == {0, 4} and told["cycles_with_guesses"] == {}
    assert told["cycles_with_guesses_alone"] == {4: told["cycles"][4]}
    assert not told["bins"]  # no draft is drawn from the actor


def test_greedy_tokens_of_64_ragged_prompts_match_stock_vllm(made):
    folder, _ = made
    asked = [
        *repetitive(*cases.RAGGED * 2, words=4, seed=6),
        *tiny.prompts(*cases.RAGGED * 2, seed=6),
    ]
    with cases.engine(folder) as llm:
        expected = cases.tokens_of(cases.generate(llm, asked, 64, logprobs=None))
    with cases.engine(folder, lossless(8, pages=4, guess_tokens=3)) as llm:
        assert cases.tokens_of(cases.generate(llm, asked, 64, logprobs=None)) == expected
        counts = cases.counters(llm)
    drawn = counts["drafted"] - counts["guessed"]
    assert 1.05 * counts["passes"] < drawn < counts["drafted"]


@pytest.mark.parametrize(
    "m, pages, weights", [(1, 2, "auto"), (3, 4, "auto"), (3, 12, "auto"), (3, 4, "fp8")]
)
def test_greedy_tokens_match_stock_vllm_while_stages_change(made, monkeypatch, m, pages, weights):
    """Cycles without drafts, with drafts, with drafts from guesses, and with guesses alone alternate
    at random.
    """
    folder, model = made
    asked = [*repetitive(300, 17, 150, 64, seed=1), *tiny.prompts(33, 15, seed=2)]
    with cases.engine(folder) as llm:
        expected = cases.generate(llm, asked, 120)
    found = cases.Landmarks(monkeypatch)
    in_turn(monkeypatch)
    decoding = lossless(8, adapt=True, pages=pages, guess_tokens=m, draft_weights=weights)
    with cases.engine(folder, decoding, checks_itself=True) as llm:
        got = cases.generate(llm, asked, 120)
        counts, told = cases.counters(llm), llm.collective_rpc("sparrow_acceptance")[0]
    assert cases.tokens_of(got) == cases.tokens_of(expected)
    cases.assert_greedy_and_dense(model, asked, got)
    assert found.worst < 1e-5 and found.pages > 500
    assert set(told["cycles"]) == {0, 3, 5, 8} and set(told["cycles_with_guesses"]) == {3, 5, 8}
    assert set(told["cycles_with_guesses_alone"]) == {3}
    assert all(n < told["cycles"][k] for k, n in told["cycles_with_guesses"].items())
    assert 0 < counts["guessed"] < counts["drafted"] and 0 < counts["accepted"] < counts["drafted"]


def mean_acceptance(llm):
    """Sample new responses, and return the mean acceptance of their drafts."""
    llm.reset_prefix_cache()
    llm.collective_rpc("sparrow_acceptance")
    asked = [*repetitive(300, 17, 150, 64, seed=1), *tiny.prompts(33, 15, seed=2)]
    cases.generate(llm, asked, 40, temperature=1.0, seed=3)
    report = llm.collective_rpc("sparrow_acceptance")[0]
    assert report["cycles_with_guesses"]
    return DraftAcceptance.from_dict(report["acceptance"]).mean


def test_passes_over_guesses_use_the_fp8_copy_of_the_newest_weights(old_and_new):
    """Drafts read every page, so they are only rejected because of their weights."""
    folder, _, _, weights = old_and_new
    accepted = {}
    for kind in ("auto", "fp8"):
        decoding = lossless(4, pages=40, guess_tokens=3, draft_weights=kind)
        with cases.engine(folder, decoding) as llm:
            before = mean_acceptance(llm)
            llm.collective_rpc("sparrow_load_weights", args=(weights,))
            accepted[kind] = before, mean_acceptance(llm)
    assert min(accepted["auto"]) > 0.9999
    assert min(accepted["fp8"]) > 0.8 and max(accepted["fp8"]) < 0.99, accepted


def test_weights_loaded_while_guesses_draft_alone_reach_the_fp8_copy(old_and_new, monkeypatch):
    """Cycles with guesses alone don't read the copy. The next sparse pass does."""
    folder, _, new, weights = old_and_new
    asked = repetitive(300, 150, 64, seed=1)
    decoding = lossless(12, adapt=True, pages=40, guess_tokens=3, draft_weights="fp8")
    hold(monkeypatch, Guessed(4, alone=True))
    with cases.engine(folder, decoding) as llm:
        cases.generate(llm, asked, 20)
        llm.collective_rpc("sparrow_load_weights", args=(weights,))
        llm.reset_prefix_cache()
        cases.assert_greedy_and_dense(new, asked, cases.generate(llm, asked, 20))
        assert cases.counters(llm)["passes"] == 0
        hold(monkeypatch, Guessed(8))
        assert 0.8 < mean_acceptance(llm) < 0.99


class ReplayedAlone(cases.Replayed):
    """A stand-in for a CUDA graph that makes guesses for a cycle without sparse passes."""

    def replay(self):
        self.count += 1
        self.drafter.source.guess_alone(self.rows)


def test_each_stage_replays_its_own_graphs(made, monkeypatch):
    """Graphs are captured before the first cycle. A graph serves any number of drafts."""
    folder, _ = made
    asked = [*repetitive(300, 17, 150, 64, seed=1), *tiny.prompts(33, 15, seed=2)]
    with cases.engine(folder) as llm:
        expected = cases.tokens_of(cases.generate(llm, asked, 60))
    in_turn(monkeypatch)
    decoding = lossless(8, adapt=True, pages=4, guess_tokens=3)
    with cases.engine(folder, decoding, max_num_seqs=8) as llm:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        drafter = worker.model_runner.speculator.drafter
        graphs = [cases.Replayed(each) for each in (drafter._plain, drafter._guessing)]
        with torch.inference_mode():
            for graph in graphs:
                graph.drafter._draft(graph.rows)
                graph.drafter._graphs[False][graph.rows] = graph
        drafter._plain._step_index.zero_()
        alone = ReplayedAlone(drafter._guessing)
        drafter._guessing._alone_graphs[alone.rows] = alone
        got = cases.generate(llm, asked, 60)
        told = llm.collective_rpc("sparrow_acceptance")[0]
    assert cases.tokens_of(got) == expected
    guessed = told["cycles_with_guesses"]
    of_alone = told["cycles_with_guesses_alone"]
    plain = {k: n - guessed.get(k, 0) - of_alone.get(k, 0) for k, n in told["cycles"].items()}
    assert graphs[0].count == sum(k * n for k, n in plain.items()) > 0
    assert graphs[1].count == sum(passes_of(k) * n for k, n in guessed.items()) > 0
    assert alone.count == sum(of_alone.values()) > 0


def test_number_of_drafts_and_use_of_guesses_adapt_to_measurements(made, monkeypatch):
    """The chooser compares measured times, which mean little in Triton's interpreter. The test
    therefore does not check which choice wins.
    """
    folder, model = made
    said, init = [], logger.init_logger
    ours = SimpleNamespace(
        info=lambda text, *values: said.append(text % values if values else text)
    )
    monkeypatch.setattr(
        logger, "init_logger", lambda name: ours if name == "vllm.sparrow" else init(name)
    )
    monkeypatch.setattr(scheduler, "init_logger", logger.init_logger)
    monkeypatch.setattr(scheduler, "LOG_EVERY", 1)
    asked = [*repetitive(300, 17, 150, 64, seed=1), *tiny.prompts(33, 15, seed=2)]
    with cases.engine(folder, lossless(6, adapt=True, pages=4, guess_tokens=3)) as llm:
        cases.assert_greedy_and_dense(model, asked, cases.generate(llm, asked, 200))
        chooser = llm.llm_engine.engine_core.engine_core.scheduler.chooser
        # On a busy machine, the sequences may end before the chooser has settled on anything.
        deadline = time.monotonic() + 120
        while not chooser.in_use() and time.monotonic() < deadline:
            cases.generate(llm, asked, 200)
        described = llm.collective_rpc("sparrow_describe")[0]
    alone = Guessed(2, alone=True)
    assert chooser.choices == (0, 2, 4, 6, Guessed(2), Guessed(4), Guessed(6), alone)
    [line] = [each for each in said if "Sparrow is lossless" in each]
    assert ": sparse steps, one sparse pass over 3 guesses from history (" in line
    assert ") for every 2.5 drafts, or guesses alone draft 0 to 6 tokens (" in line
    assert any(each.startswith("numbers of drafts in use") for each in said)
    assert described["drafts_have_guesses"] in (True, False)
    timed = set().union(*(case.seconds for case in chooser.measured.cases.values()))
    assert {0, 2, alone} <= timed


def test_replayed_stages_reproduce_samples(made, monkeypatch):
    folder, _ = made
    asked, sampling = repetitive(150, 17, 64, seed=4) * 2, Sampling(24, top_n=2, seed=4)
    answers, kept = [], []
    for seed, replayed in ((9, False), (2, False), (3, True)):
        in_turn(monkeypatch, seed)
        decoding = lossless(4, adapt=True, pages=4, guess_tokens=3)
        with tiny.engine(folder, decoding, max_num_seqs=4) as made_engine:
            made_engine.generate(asked[:2], sampling)
            made_engine.counters()
            made_engine.drop_prefixes()
            if replayed:
                made_engine.replay(kept[0])
            rollouts = made_engine.generate(asked, sampling)
            answers.append([rollout.response_ids.tolist() for rollout in rollouts])
            kept.append(made_engine.counters().choices)
    assert answers[2] == answers[0] != answers[1]
    assert kept[2] == kept[0] != kept[1]
    assert {(multiple, guesses) for _, multiple, guesses, _ in kept[0]} == {(1, 0), (1, 3), (0, 3)}


def test_drafts_are_counted_in_every_stage(made, monkeypatch):
    """Drafts read everything, so all are accepted. In cycles without guesses, every draft is
    judged.
    """
    folder, _ = made
    in_turn(monkeypatch)
    decoding = lossless(6, adapt=True, pages=1000, guess_tokens=2)
    with cases.engine(folder, decoding) as llm:
        cases.counters(llm), llm.collective_rpc("sparrow_acceptance")
        cases.generate(llm, repetitive(150, 64, 90, seed=3), 120, temperature=0.3, seed=5)
        told, counts = llm.collective_rpc("sparrow_acceptance")[0], cases.counters(llm)
        monkeypatch.setattr(DraftChooser, "choose", lambda *_: 4)
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        scheduler._plan = DraftPlan(4, budget=0)  # for the first step, which has no predecessor
        llm.reset_prefix_cache()
        cases.generate(llm, repetitive(150, 64, 90, seed=3), 60, temperature=1.0, seed=5)
        of_plain, plain = llm.collective_rpc("sparrow_acceptance")[0], cases.counters(llm)
    judged = sum(each["drafts"] for each in told["bins"])
    assert sum(each["drafts"] * each["mean"] for each in told["bins"]) > 0.999 * judged
    drawn = counts["drafted"] - counts["guessed"]
    assert 100 < judged <= drawn and counts["guessed"] > 20 and counts["passes"] < drawn
    assert plain["guessed"] == 0 and plain["passes"] == plain["drafted"]
    assert of_plain["cycles_with_guesses"] == {}
    assert sum(each["drafts"] for each in of_plain["bins"]) > 0.8 * plain["drafted"]


@pytest.mark.parametrize("everything", [True, False])
def test_guesses_used_as_drafts_without_a_pass_do_not_count_toward_draft_acceptance(
    made, everything
):
    """Drafts read everything, so all of them are accepted. Only guesses that were never compared
    with a draft may be rejected.
    """
    folder, _ = made
    with cases.engine(folder, lossless(6, pages=1000 if everything else 1, guess_tokens=2)) as llm:
        cases.counters(llm), llm.collective_rpc("sparrow_acceptance")
        cases.generate(llm, repetitive(150, 64, 90, seed=3), 60, temperature=1.0, seed=5)
        told, counts = llm.collective_rpc("sparrow_acceptance")[0], cases.counters(llm)
    judged = sum(each["drafts"] for each in told["bins"])
    mean = sum(each["drafts"] * each["mean"] for each in told["bins"]) / judged
    assert judged > 100 and counts["guessed"] > 50
    assert mean > 0.999 if everything else mean < 0.99
    assert counts["accepted"] < counts["drafted"]
    # Each of a cycle's two passes drafts up to three of its six tokens.
    cycles = told["cycles"][6]
    assert counts["passes"] <= 2 * 3 * cycles and counts["drafted"] <= 6 * 3 * cycles
    assert counts["drafted"] - counts["guessed"] >= counts["passes"]


def test_requests_may_be_chunked_preempted_or_cut_off_at_the_context_length(made, monkeypatch):
    folder, model = made
    preempted = []
    stock = cases.Scheduler._preempt_request
    monkeypatch.setattr(
        cases.Scheduler,
        "_preempt_request",
        lambda self, *a, **kw: preempted.append(1) or stock(self, *a, **kw),
    )
    asked = repetitive(90, 17, 70, 64, 33, 100, seed=3)
    small = dict(
        num_gpu_blocks_override=12, max_model_len=128, max_num_batched_tokens=48, max_num_seqs=6
    )
    with cases.engine(folder, lossless(4, guess_tokens=3), **small) as llm:
        got = cases.generate(llm, asked, 60)
    assert len(preempted) > 0
    assert [len(c.token_ids) for c in got] == [min(60, 128 - len(p)) for p in asked]
    cases.assert_greedy_and_dense(model, asked, got)


@pytest.mark.parametrize("is_directed, adapts", [(True, False), (True, True), (False, False)])
def test_passes_write_only_to_blocks_of_their_own_sequences(made, monkeypatch, is_directed, adapts):
    """The last tokens of a pass may lie beyond the blocks that vLLM has reserved. They must be
    written to the null block, or they would overwrite blocks of other sequences.
    """
    folder, _ = made
    foreign, checked = [], []
    stock = cascade.CascadeDrafter._run
    begin = cascade_kernels.begin_kernel

    class Undirected:
        def __getitem__(self, grid):
            def launch(*args, **named):
                table = args[2].clone()
                begin[grid](*args, **named)
                args[2].copy_(table)

            return launch

    if not is_directed:
        monkeypatch.setattr(cascade_kernels, "begin_kernel", Undirected())

    def run(drafter, plan, B):
        vllm = drafter._vllm
        table = drafter._blocks_SM
        reserved = vllm.block_tables.num_blocks.gpu[0]
        own = {0}
        for row, index in enumerate(vllm.idx_mapping[:B].tolist()):
            count = int(reserved[index])
            own |= set(table[row, :count].tolist())
            table[row, count:] = len(layers[0].kv_cache) - 1  # a block of another sequence
        before = [layer_checks.bytes_of(layer).clone() for layer in layers]
        stock(drafter, plan, B)
        for layer, old in zip(layers, before, strict=True):
            changed = (layer_checks.bytes_of(layer) != old).any(1).nonzero()[:, 0].tolist()
            foreign.extend(set(changed) - own)
            checked.append(len(changed))

    # All drafts are accepted, so with these lengths, some cycles end exactly at the end of a block.
    if adapts:
        in_turn(monkeypatch)
    decoding = lossless(4, adapt=adapts, pages=1000, guess_tokens=3)
    with cases.engine(folder, decoding, max_num_seqs=4) as llm:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        layers = layers_of(worker.vllm_config)
        monkeypatch.setattr(cascade.CascadeDrafter, "_run", run)
        cases.generate(llm, repetitive(60, 55, 50, 45, seed=4), 90 if adapts else 30)
    assert sum(checked) > 50
    assert not foreign if is_directed else foreign


def test_the_self_check_covers_passes_over_guesses(made, monkeypatch):
    folder, _ = made
    stock = attention.paged_decode
    with cases.engine(folder, lossless(4, guess_tokens=3), checks_itself=True) as llm:
        assert set(cases.counters(llm).values()) == {0}
        worker = llm.llm_engine.model_executor.driver_worker.worker
        runtime = worker.model_runner.speculator.runtime
        for layer in layers_of(worker.vllm_config):
            assert not layer_checks.bytes_of(layer).any()

        @cases.wraps(stock)
        def decode(*args, tokens=1, **named):
            out = stock(*args, tokens=tokens, **named)
            return out.mul_(1.01) if tokens > 1 else out

        monkeypatch.setattr(attention, "paged_decode", decode)
        refused = pytest.raises(ConfigError, match=r"\(new tokens per row: 4, rows: 1, ")
        with torch.inference_mode(), refused:
            layer_checks.check_layers(
                layers_of(worker.vllm_config), runtime, worker.vllm_config.model_config
            )


class SkippedKernel:
    """A stand-in for a Triton kernel that does nothing."""

    def __getitem__(self, grid):
        return lambda *args, **named: None


def test_the_self_check_covers_guesses_alone(made, monkeypatch):
    folder, _ = made
    plans = []
    stock = step_checks.check_steps

    @cases.wraps(stock)
    def check_steps(worker, runtime, speculator, layers):
        plans.append((speculator.plan.guesses, speculator.plan.alone))
        return stock(worker, runtime, speculator, layers)

    monkeypatch.setattr(step_checks, "check_steps", check_steps)
    decoding = lossless(4, adapt=True, guess_tokens=3)
    with cases.engine(folder, decoding, checks_itself=True) as llm:
        assert plans == [(False, False), (True, False), (True, True)]
        worker = llm.llm_engine.model_executor.driver_worker.worker
        speculator = worker.model_runner.speculator
        assert not speculator.plan.alone
        monkeypatch.setattr(cascade.kernels, "one_hot_kernel", SkippedKernel())
        with pytest.raises(ConfigError, match="does not have all its mass on the guess"):
            engine_check.check_engine(worker, speculator.runtime)


@pytest.mark.parametrize("alone", [True, False], ids=["no passes", "passes"])
def test_drafts_of_another_kind_than_planned_fail_the_self_check(made, monkeypatch, alone):
    """In every cycle with guesses, the guesses alone are the drafts, or they never are."""
    folder, _ = made
    decoding = lossless(4, adapt=True, guess_tokens=3)
    with cases.engine(folder, decoding, checks_itself=True) as llm:
        worker = llm.llm_engine.model_executor.driver_worker.worker
        stock = cascade.CascadeDrafter._run
        monkeypatch.setattr(
            cascade.CascadeDrafter,
            "_run",
            lambda drafter, plan, B: stock(drafter, plan._replace(alone=alone), B),
        )
        refused = "has 0 drafts of the sparse actor" if alone else "alone=True"
        with pytest.raises(ConfigError, match=refused):
            engine_check.check_engine(worker, worker.model_runner.speculator.runtime)


# --- sampling ---


def test_a_seed_reproduces_samples_with_dense_log_probs(made):
    folder, model = made
    asked = repetitive(64, 133, seed=8)
    with cases.engine(folder, lossless(6, pages=4, guess_tokens=3)) as llm:
        answers = []
        for _ in range(2):
            llm.reset_prefix_cache()
            answers.append(cases.generate(llm, asked, 24, temperature=0.8, seed=11))
    first, second = answers
    assert cases.tokens_of(first) == cases.tokens_of(second)
    for prompt, completion in zip(asked, first, strict=True):
        ids = list(completion.token_ids)
        log_p = cases.dense(model, prompt, ids)[np.arange(len(ids)), ids]
        assert np.abs(log_p - cases.logprobs_of(completion)).max() < 1e-4


SAMPLES = {
    "exact": 20_000,
    "any stage": 20_000,
    "drafts in 8 bits": 20_000,
    "guesses alone": 4_000,
    "guesses become drafts without being judged": 4_000,
    "guesses used as drafts keep an earlier pass's distribution": 4_000,
    "guesses alone are verified as if drawn from another distribution": 2_000,
    "rejected drafts are kept": 4_000,
}


def drafting_guesses(monkeypatch):
    """Turn every guess into a draft, whatever the sparse actor sampled at its position."""
    stock = cascade.CascadeDrafter._sample

    def sample(self, *args):
        drawn = stock(self, *args)
        ids = self._vllm.input_buffers.input_ids[: len(drawn)].view(-1, self.tokens)
        return torch.cat([ids[:, 1:], drawn.view(ids.shape)[:, -1:]], 1).flatten().long()

    monkeypatch.setattr(cascade.CascadeDrafter, "_sample", sample)


class NoKernel:
    def __getitem__(self, grid):
        return lambda *args, **named: None


@pytest.mark.parametrize("variant", SAMPLES)
def test_continuations_follow_the_dense_distribution(tmp_path, monkeypatch, variant):
    """The test also detects defects in how guesses or drafts are verified, and a wrong distribution
    of guesses that are used as drafts without a pass.
    """
    V, T = 6, 4
    model = tiny.checkpoint(
        tmp_path, vocab_size=V, num_hidden_layers=2, initializer_range=0.35, seed=7
    )
    k = T - 1
    if variant == "any stage":
        in_turn(monkeypatch)
    elif variant.startswith("guesses alone"):
        k = 3 * (T - 1)  # so that T - 1 is the smallest number of drafts
        hold(monkeypatch, Guessed(T - 1, alone=True))
    phrase = np.random.default_rng(1).integers(0, V, 30)
    prompt = np.tile(phrase, 5).tolist()
    if variant == "guesses become drafts without being judged":
        drafting_guesses(monkeypatch)
    elif variant in (
        "guesses used as drafts keep an earlier pass's distribution",
        "guesses alone are verified as if drawn from another distribution",
    ):
        monkeypatch.setattr(cascade_kernels, "one_hot_kernel", NoKernel())
    elif variant == "rejected drafts are kept":
        cases.keep_rejected(monkeypatch)
    layout = dict(max_model_len=256, max_num_seqs=256, max_num_batched_tokens=4096)
    adapts = variant == "any stage" or variant.startswith("guesses alone")
    weights = "fp8" if variant == "drafts in 8 bits" else "auto"
    decoding = lossless(k, adapt=adapts, guess_tokens=2, draft_weights=weights)
    with cases.engine(tmp_path, decoding, **layout) as llm:
        wanted = [
            cases.parameters(T, temperature=1.0, seed=10**6 + i, logprobs=None)
            for i in range(SAMPLES[variant])
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt}] * len(wanted), wanted, use_tqdm=False)
        counts = cases.counters(llm)
    if variant.startswith("guesses alone"):
        assert 0 < counts["guessed"] == counts["drafted"]
    elif variant != "guesses become drafts without being judged":  # so all drafts come from passes
        assert 0 < counts["guessed"] < counts["drafted"]
    assert 0 < counts["accepted"] < counts["drafted"]
    code = np.array([o.outputs[0].token_ids for o in outputs]) @ (V ** np.arange(T - 1, -1, -1))
    p_value = cases.likelihood(
        np.bincount(code, minlength=V**T), cases.enumerated(model, prompt, T, 1.0)
    )
    print(variant, p_value, counts)  # shown if the test fails
    is_exact = variant in ("exact", "any stage", "drafts in 8 bits", "guesses alone")
    assert p_value > 1e-3 if is_exact else p_value < 1e-4
