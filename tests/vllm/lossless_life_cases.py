"""Test lossless mode during the life of an engine: sleep, a new cache, new weights, a resumed run,
and thousands of requests. The engine is a real vLLM; see ``test_lossless.py``.
"""

import gc
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.vllm import lossless_cases as cases  # isort: skip  before vLLM is imported
from vllm import logger

from sparrow.rollout import Sampling
from sparrow.vllm.lossless.chooser import DraftChooser
from tests.vllm.lossless_cases import (
    Landmarks,
    assert_greedy_and_dense,
    generate,
    logprobs_of,
    parameters,
    tokens_of,
)
from tests.vllm.tiny_vllm import engine, prompts

ASKED = prompts(150, 17, 64, 33, seed=31)
SIZES = (100, 1500, 1500)


# --- sleep ---


def lose(worker, level):
    """Overwrite the worker memory that vLLM drops during sleep: the KV cache and, at level 2, the
    weights.
    """
    for layer in worker.vllm_config.compilation_config.static_forward_context.values():
        whole = torch.empty(0, dtype=layer.kv_cache.dtype).set_(layer.kv_cache.untyped_storage())
        whole.normal_(std=30.0)
    if level == 2:
        for weight in worker.model_runner.model.parameters():
            weight.data.fill_(float("nan"))


@pytest.mark.parametrize("level", [1, 2])
def test_memory_dropped_by_sleep_is_never_read(old_and_new, monkeypatch, level):
    """vLLM does not sleep on a CPU. The test instead overwrites the memory that vLLM's allocator
    would drop.
    """
    folder, model, new, weights = old_and_new
    found = Landmarks(monkeypatch)
    with cases.engine(folder, cases.lossless(4)) as llm:
        assert_greedy_and_dense(model, ASKED, generate(llm, ASKED, 12))
        llm.collective_rpc(lose, args=(level,))
        llm.reset_prefix_cache()  # like ``LLM.sleep``
        if level == 2:
            llm.collective_rpc("sparrow_load_weights", args=(weights,))
        assert_greedy_and_dense(model if level == 1 else new, ASKED, generate(llm, ASKED, 24))
        counts = cases.counters(llm)
    assert counts["accepted"] > 0 and found.pages > 100 and found.worst < 1e-4


# --- vLLM's passes before the first request ---


def tune(worker):
    """Run the pass in which vLLM tunes FlashInfer's kernels. vLLM skips this pass on a CPU."""
    runner = worker.model_runner
    with torch.inference_mode():
        runner._dummy_run(
            num_tokens=runner.max_num_tokens, skip_eplb=True, is_profile=True, randomize_inputs=True
        )


def test_tuning_flashinfer_changes_neither_tokens_nor_counts(old_and_new, monkeypatch):
    folder, model, *_ = old_and_new
    found = Landmarks(monkeypatch)
    with cases.engine(folder, cases.lossless(4)) as llm:
        llm.collective_rpc(tune)
        assert not any(cases.counters(llm).values())
        assert_greedy_and_dense(model, ASKED, generate(llm, ASKED, 24))
        assert cases.counters(llm)["accepted"] > 0 and found.worst < 1e-4


# --- a reinitialised cache ---


class StaleGraph:
    """A draft step captured with an earlier cache, which must never be replayed."""

    def replay(self):
        raise AssertionError("a graph over a freed cache was replayed")


def initialise_again(worker):
    """Create a new cache, as vLLM does after measuring the memory of CUDA graphs. Return whether
    any layer still has a view of the old cache.
    """
    runner = worker.model_runner
    runner.speculator.drafter._graphs[False].update({rows: StaleGraph() for rows in range(1, 65)})
    before = weakref.ref(runner.kv_caches[0].untyped_storage())
    runner.kv_caches.clear()
    layers = worker.vllm_config.compilation_config.static_forward_context.values()
    for layer in layers:
        layer.kv_cache = torch.empty(0)

    runner.initialize_kv_cache(runner.kv_cache_config)
    gc.collect()
    return before() is not None


def test_drafts_use_the_new_cache_after_it_is_reinitialised(old_and_new):
    folder, model, *_ = old_and_new
    with cases.engine(folder, cases.lossless(4)) as llm:
        assert_greedy_and_dense(model, ASKED, generate(llm, ASKED, 12))
        assert llm.collective_rpc(initialise_again) == [False]
        llm.reset_prefix_cache()
        assert_greedy_and_dense(model, ASKED, generate(llm, ASKED, 24))
        assert cases.counters(llm)["accepted"] > 0


# --- drafts chosen by speed ---


def test_replaying_another_engines_choices_reproduces_its_samples(old_and_new, monkeypatch):
    """Even with a seed, samples depend on the number of drafts, which in turn depends on measured
    times.
    """
    folder, *_ = old_and_new
    asked, sampling = prompts(150, 17, 64, 33, 90, seed=32) * 2, Sampling(24, top_n=2, seed=4)
    decoding = cases.lossless(4, adapt=True, pages=4, adapt_draft_budget=True)
    answers, kept = [], []
    for seed, replayed in ((1, False), (2, False), (3, True)):
        clock = np.random.default_rng(seed)  # in place of the clock
        monkeypatch.setattr(
            DraftChooser, "choose", lambda *_, clock=clock: int(clock.choice((0, 1, 3, 4)))
        )
        monkeypatch.setattr(
            DraftChooser, "choose_budget", lambda *_, clock=clock: int(clock.integers(3))
        )
        with engine(folder, decoding, max_num_seqs=4) as made:
            made.generate(asked[:2], sampling)  # different requests came first
            made.counters()
            made.drop_prefixes()
            if replayed:
                made.replay(kept[0])
            answers.append([r.response_ids.tolist() for r in made.generate(asked, sampling)])
            counters = made.counters()
        kept.append(counters.choices)
        assert counters.to_dict()["drafts"]["choices"] == [
            list(choice) for choice in counters.choices
        ]
    assert answers[2] == answers[0] != answers[1]
    assert kept[2] == kept[0] != kept[1] and len(kept[0]) > 5


# --- weight updates during a rollout ---


def tokens_cached(worker):
    states = worker.model_runner.req_states
    return {
        name.split("-")[0]: int(states.num_computed_tokens.gpu[i])
        for name, i in states.req_id_to_index.items()
    }


@torch.no_grad()
def mixed(old, new, ids, cached):
    """Return the log-probs ``[T, V]`` after each token. One model processes the first ``cached``
    tokens, and another model processes the rest.
    """
    first = old(torch.tensor([ids[:cached]]), use_cache=True)
    rest = new(torch.tensor([ids[cached:]]), past_key_values=first.past_key_values)
    return torch.cat([first.logits[0], rest.logits[0]]).double().log_softmax(-1).numpy()


def test_drafts_made_with_old_weights_are_verified_with_new_weights(old_and_new):
    folder, old, new, weights = old_and_new
    done, cached = {}, None
    with cases.engine(folder, cases.lossless(4)) as llm:
        for i, prompt in enumerate(ASKED):
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, parameters(40))
        for turn in range(200):
            if not llm.llm_engine.has_unfinished_requests():
                break
            if turn == 4:
                [cached] = llm.collective_rpc(tokens_cached)
                llm.collective_rpc("sparrow_load_weights", args=(weights,))
            for output in llm.llm_engine.step():
                if output.finished:
                    done[output.request_id.split("-")[0]] = output.outputs[0]
    assert len(cached) == len(done) == len(ASKED)
    for i, prompt in enumerate(ASKED):
        completion, n = done[str(i)], cached[str(i)]
        ids = [*prompt, *completion.token_ids]
        assert len(prompt) < n < len(ids) - 10
        log_p = mixed(old, new, ids[:-1], n)[len(prompt) - 1 :]
        own = log_p[np.arange(len(log_p)), completion.token_ids]
        assert (log_p.max(1) - own).max() < 1e-4
        assert np.abs(own - logprobs_of(completion)).max() < 1e-4
        of_old = cases.dense(old, prompt, completion.token_ids)[
            np.arange(len(own)), completion.token_ids
        ]
        assert np.abs(own - of_old).max() > 0.1  # the new weights were in use


# --- resumed runs ---


def test_a_new_engine_reproduces_samples_only_with_the_same_number_of_drafts(
    old_and_new, monkeypatch
):
    folder, *_ = old_and_new
    first, second = (dict(tokens=10, temperature=1.0, seed=seed) for seed in (7, 8))
    with cases.engine(folder, cases.lossless(4)) as llm:
        generate(llm, ASKED, **first)
        wanted = generate(llm, ASKED, **second)
    with cases.engine(folder, cases.lossless(4)) as llm:
        again = generate(llm, ASKED, **second)
    with cases.engine(folder, cases.lossless(4, adapt=True)) as llm:
        monkeypatch.setattr(DraftChooser, "choose", lambda *_: 1)
        other = generate(llm, ASKED, **second)
    for a, b in zip(wanted, again, strict=True):
        assert list(a.token_ids) == list(b.token_ids) and np.array_equal(
            logprobs_of(a), logprobs_of(b)
        )
    # A different number of drafts uses different random numbers.
    assert tokens_of(other) != tokens_of(wanted)


# --- thousands of requests ---


def idle(llm):
    """Check that no request has left any state behind. Return the number of tensors in memory."""
    generate(llm, [[1, 2, 3]], 1)  # a worker forgets requests when it receives others
    core = llm.llm_engine.engine_core.engine_core
    scheduler = core.scheduler
    assert not scheduler.requests and not scheduler.running and not scheduler.waiting
    pool = scheduler.kv_cache_manager.block_pool
    assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1  # one belongs to vLLM
    [states] = llm.collective_rpc(lambda worker: worker.model_runner.req_states)
    assert len(states.req_id_to_index) <= 1 and len(states.free_indices) >= states.max_num_reqs - 1
    del states
    gc.collect()
    return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())


def metrics(llm):
    return {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}


def test_memory_use_is_logged_at_start(old_and_new, monkeypatch):
    said, init = [], logger.init_logger
    ours = SimpleNamespace(info=said.append)
    monkeypatch.setattr(
        logger, "init_logger", lambda name: ours if name == "vllm.sparrow" else init(name)
    )
    stock = 2 * 32 * 2 * 32 * 4  # bytes of a block of 32 tokens
    padded, in_8_bits = stock + 2 * 2 * 32 * 4, stock + 2 * 2 * 32  # with two landmarks
    assert 1 - stock / padded == pytest.approx(0.0303, abs=1e-4)
    assert 1 - stock / in_8_bits == pytest.approx(0.0078, abs=1e-4)
    blocks = []
    for decoding in (None, cases.lossless(2), cases.lossless(2, landmark_dtype="fp8_e4m3")):
        with cases.engine(old_and_new[0], decoding) as llm:
            blocks.append(llm.llm_engine.vllm_config.cache_config.num_gpu_blocks)
    assert blocks == [2**26 // (2 * size) for size in (stock, padded, in_8_bits)]
    line, other = (each for each in said if "lossless" in each)
    assert "landmarks (fp8_e4m3) take 0.8% of the KV cache" in other
    assert line.endswith(
        "landmarks (auto) take 3.0% of the KV cache, and drafts take cache space for up to 2 "
        "tokens per sequence"
    )


def test_thousands_of_requests_leave_no_state_behind(old_and_new):
    folder, *_ = old_and_new
    rng = np.random.default_rng(33)
    tensors = []
    with cases.engine(folder, cases.lossless(2), max_num_seqs=128, disable_log_stats=False) as llm:
        cases.counters(llm)
        for n in SIZES:
            asked = prompts(*rng.integers(1, 40, n).tolist(), seed=n)
            lengths = rng.integers(1, 8, n).tolist()
            wanted = [
                parameters(t, temperature=1.0, seed=i, logprobs=None) for i, t in enumerate(lengths)
            ]
            before = metrics(llm)
            outputs = llm.generate([{"prompt_token_ids": p} for p in asked], wanted, use_tqdm=False)
            assert [len(o.outputs[0].token_ids) for o in outputs] == lengths
            del outputs
            theirs = {name: count - before.get(name, 0) for name, count in metrics(llm).items()}
            ours = cases.counters(llm)
            assert theirs["vllm:generation_tokens"] == sum(lengths)
            # vLLM does not count drafts after the end of a response.
            assert 0 < theirs["vllm:spec_decode_num_draft_tokens"] <= ours["drafted"]
            assert 0 < theirs["vllm:spec_decode_num_accepted_tokens"] <= ours["accepted"]
            tensors.append(idle(llm))
    assert tensors[1] == tensors[2]
