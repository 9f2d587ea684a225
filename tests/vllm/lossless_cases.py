"""Test lossless mode in a real vLLM on the V2 model runner; ``test_lossless.py`` runs this file in
its own processes.
"""

import contextlib
import gc
from collections import Counter
from functools import wraps
from itertools import cycle
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
from scipy import stats

from tests.vllm import (
    kernels_in_numpy,
    v2_on_cpu,  # noqa: F401  before vLLM is imported
)

from tests.vllm import tiny_vllm as tiny  # isort: skip
from vllm import LLM, SamplingParams
from vllm.model_executor.layers.attention import attention
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu.buffer_utils import _apply_write_kernel
from vllm.v1.worker.gpu.input_batch import post_update
from vllm.v1.worker.gpu.sample import sampler
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample
from vllm.v1.worker.gpu.sample.logprob import compute_token_logprobs

from sparrow import SparsitySchedule
from sparrow.attention.pages import landmarks
from sparrow.decoding import DRAFT_BUDGETS, Decoding
from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.vllm.cpu import CpuImpl
from sparrow.vllm.lossless import plan, setup, sparse_drafter, speculator
from sparrow.vllm.lossless.chooser import DraftChooser
from sparrow.vllm.lossless.meter import overlap
from sparrow.vllm.lossless.plan import DraftPlan
from sparrow.vllm.runtime import layers_of
from sparrow.vllm.selfcheck import engine as engine_check
from tests.vllm.tiny_vllm import prompts

topk_topp_sampler.HAS_TRITON = (
    False  # the interpreter cannot run this kernel, but vLLM has a torch version
)
DRAFTS = SparsitySchedule(top_k=(1,), bin_tokens=100, recent_pages=1, dense_layers=())
RAGGED = [300, 17, 150, 511, 64, 33, 400, 90, 16, 15, 31, 222, 275, 128, 47, 350]
FEW = [300, 17, 150, 64, 33, 15]


def lossless(k=4, adapt=False, pages=1, **options):
    layout = {name: options.pop(name) for name in list(options) if hasattr(DRAFTS, name)}
    schedule = DRAFTS.replace(top_k=(pages,), **layout)
    return Decoding.lossless(schedule, draft_tokens=k, adapt_draft_tokens=adapt, **options)


@contextlib.contextmanager
def engine(folder, decoding=None, checks_itself=False, **options):
    """Yield an engine, and shut it down afterwards, because all vLLM engines of a process share the
    same process groups. The engine starts without its self-check, whose steps would interfere with
    tests that record steps.
    """
    given = {} if decoding is None else {"additional_config": {"sparrow": decoding.to_dict()}}
    run = engine_check.check_engine if checks_itself else lambda worker, runtime: None
    with mock.patch.object(engine_check, "check_engine", run):
        llm = LLM(
            model=str(folder), skip_tokenizer_init=True, **{**tiny.OPTIONS, **given, **options}
        )
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()


def parameters(tokens, **sampling):
    common = dict(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
    return SamplingParams(**{**common, **sampling})


def generate(llm, asked, tokens, **sampling):
    wanted = parameters(tokens, **sampling)
    return [
        o.outputs[0]
        for o in llm.generate([{"prompt_token_ids": p} for p in asked], wanted, use_tqdm=False)
    ]


def tokens_of(completions):
    return [list(c.token_ids) for c in completions]


def logprobs_of(completion):
    return np.array(
        [
            at[token].logprob
            for at, token in zip(completion.logprobs, completion.token_ids, strict=True)
        ]
    )


def counters(llm):
    return llm.collective_rpc("sparrow_counters")[0]


@torch.no_grad()
def dense(model, prompt, response):
    """Return the dense policy's log-probs ``[T, V]`` for each token of a response, computed by
    transformers.
    """
    logits = model(torch.tensor([[*prompt, *response]])).logits[0, len(prompt) - 1 : -1]
    return logits.double().log_softmax(-1).numpy()


def assert_greedy_and_dense(model, asked, completions):
    """Check that each token is the dense policy's most likely one, up to rounding, and has the
    dense policy's log-prob.
    """
    for prompt, completion in zip(asked, completions, strict=True):
        ids = list(completion.token_ids)
        log_p = dense(model, prompt, ids)
        own = log_p[np.arange(len(ids)), ids]
        assert (log_p.max(1) - own).max() < 1e-4
        assert np.abs(own - logprobs_of(completion)).max() < 1e-4


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, tiny.checkpoint(folder, num_hidden_layers=2)


@pytest.fixture(scope="module")
def folder(made):
    return made[0]


@pytest.fixture(scope="module")
def model(made):
    return made[1]


# --- kernels ---


def reference_overlap(target, draft, temperature):
    p, q = target.double().softmax(-1), (draft.double() / temperature).softmax(-1)
    return torch.minimum(p, q).sum(-1)


@pytest.mark.parametrize("temper", [True, False])
def test_computed_overlaps_match_a_double_precision_reference(temper):
    generator = torch.Generator().manual_seed(1)
    target, draft = (torch.randn(*n, 5000, generator=generator) * 3 for n in ((7,), (4, 3)))
    target[0, :4000] = draft[1, 1, 3:2500] = -float("inf")
    heat = torch.tensor([1.0, 0.5, 2.0, 0.0])
    sequence, place = torch.tensor([0, 0, 1, 1, 2, 3, 2]), torch.tensor([0, 1, 0, 1, 2, 0, -1])
    found = overlap(target, draft, sequence, place, heat, temper)
    for row in range(5):
        t = float(heat[sequence[row]]) if temper else 1.0
        assert float(found[row]) == pytest.approx(
            float(reference_overlap(target[row], draft[sequence[row], place[row]], t)), abs=1e-6
        )
    assert found[5:].isnan().all()  # a greedy sequence, and a sequence without drafts
    assert float(
        overlap(draft[:1, 0], draft, sequence[:1], place[:1], heat, True)
    ) == pytest.approx(1.0, abs=1e-6)


def test_kernels_run_in_numpy_match_the_triton_interpreter(monkeypatch):
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(12, 97, generator=generator)
    rows, heat = torch.arange(12, dtype=torch.int32), torch.tensor([0.0, 1.0, 0.5] * 4)
    seeds, places = torch.arange(12) * 12345678901, torch.arange(12) * 7
    drafts = torch.randn(4, 2, 97, generator=generator)

    tokens = torch.randint(0, 97, (12, 3), generator=generator)
    tokens[3::4] = tokens[3::4, :1]  # reads each repeated token's count after writing it, twice
    numbers = torch.tensor([0, 1, 2, 3] * 3, dtype=torch.int32)
    starts = torch.arange(0, 39, 3, dtype=torch.int32)

    def updated():
        counts, computed, written, lengths = (
            torch.zeros(n, dtype=torch.int32) for n in ((12, 97), 12, (12, 9), 12)
        )
        newest = torch.zeros(12, dtype=torch.int64)
        post_update(
            rows, computed, newest, counts, tokens, numbers, 3 - numbers, starts, written, lengths
        )
        return counts, computed, written, lengths, newest

    def copied():
        """Copy rows of different lengths. Some take several steps of the kernel's loop."""
        lengths = rows % 3 * 150 + rows + 1
        ends = lengths.cumsum(0, dtype=torch.int32)
        table = torch.zeros(12, 400, dtype=torch.int32)
        contents = torch.arange(1, ends[-1] + 1, dtype=torch.int32)
        _apply_write_kernel[(12,)](
            table, 400, rows, rows, contents, ends, None, BLOCK_SIZE=1024, MULTI_GROUP=False
        )
        assert table.count_nonzero() == ends[-1]
        return table

    def run():
        drawn = [
            gumbel_sample(logits, rows, heat, seeds, places, True, is_drafting)
            for is_drafting in (False, True)
        ]
        scores = compute_token_logprobs(logits, drawn[0][:, None])
        return [
            *drawn,
            scores,
            overlap(logits, drafts, rows // 3, rows % 2, heat, True).nan_to_num(),
            *updated(),
            copied(),
        ]

    monkeypatch.setattr(kernels_in_numpy, "AT_ONCE", 5 * 128)
    ours = run()
    monkeypatch.setattr(
        kernels_in_numpy.interpreter.InterpretedFunction, "run", kernels_in_numpy._interpreted
    )
    theirs = run()
    assert (ours[0] != ours[1]).any()
    assert ours[4].max() == 3
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-6)


# --- greedy ---


def assert_as_stock(folder, model, sizes, tokens, combinations, budgets=()):
    asked = prompts(*sizes, seed=1)
    with engine(folder) as llm:
        expected = generate(llm, asked, tokens)
    for k, pages in combinations:
        with engine(folder, lossless(k, pages=pages, head_budgets=budgets)) as llm:
            got = generate(llm, asked, tokens)
            counts = counters(llm)
        assert tokens_of(got) == tokens_of(expected), (k, pages)
        assert_greedy_and_dense(model, asked, got)
        assert 0 < counts["accepted"] < counts["drafted"]


def test_greedy_tokens_match_stock_vllm(folder, model):
    assert_as_stock(folder, model, FEW, 24, [(k, pages) for k in (1, 4, 8) for pages in (1, 4, 12)])


def test_greedy_tokens_match_stock_vllm_with_head_budgets_for_drafts(folder, model):
    assert_as_stock(folder, model, FEW, 24, [(4, 2), (8, 4)], budgets=((0, 2), (1.5, 0.5)))


@pytest.fixture(scope="module")
def stock(tmp_path_factory):
    """Return a folder with a model, 64 ragged prompts, and the answers of stock vLLM."""
    folder = tmp_path_factory.mktemp("stock")
    tiny.checkpoint(
        folder, num_hidden_layers=2, initializer_range=0.1
    )  # with these weights, a few pages are enough for some drafts to be accepted
    asked = prompts(*RAGGED * 4, seed=1)
    with engine(folder) as llm:
        return folder, asked, tokens_of(generate(llm, asked, 256, logprobs=None))


@pytest.mark.parametrize("pages", [1, 4, 12])
def test_greedy_tokens_of_64_ragged_prompts_match_stock_vllm(stock, monkeypatch, pages):
    """Check with 1, 4 and 8 drafts at a time, in one engine."""
    folder, asked, expected = stock
    monkeypatch.setattr(setup, "draft_choices", lambda decoding: (1, 4, 8))
    with engine(folder, lossless(8, adapt=True, pages=pages)) as llm:
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        for k in (1, 4, 8):
            monkeypatch.setattr(DraftChooser, "choose", lambda *_, k=k: k)
            scheduler._plan = scheduler._plan._replace(
                tokens=k
            )  # for the first step, which has no predecessor
            llm.reset_prefix_cache()
            counters(llm)
            assert tokens_of(generate(llm, asked, 256, logprobs=None)) == expected, k
            counts, cycles = counters(llm), llm.collective_rpc("sparrow_acceptance")[0]["cycles"]
            assert set(cycles) == {k} and 0 < counts["accepted"] < counts["drafted"]


# --- landmarks ---


class Replayed:
    """A stand-in for a CUDA graph. It runs a draft step with padding, and counts replays."""

    rows = 8
    count = 0

    def __init__(self, drafter):
        self.drafter = drafter

    def replay(self):
        self.count += 1
        self.drafter._draft(self.rows)


class Landmarks:
    """Checks, whenever drafting begins, that the landmarks of all full pages are the means of the
    cached keys.
    """

    def __init__(self, monkeypatch):
        from sparrow.vllm.lossless.speculator import SparseSpeculator

        self.worst, self.pages, self.calls = 0.0, 0, 0
        stock = SparseSpeculator.propose

        def propose(speculator, input_batch, *args, dummy_run=False, **kwargs):
            if not dummy_run:
                self.calls += 1
                rejected = kwargs["num_rejected"] if "num_rejected" in kwargs else args[5]
                self.check(speculator, input_batch, rejected)
            return stock(speculator, input_batch, *args, dummy_run=dummy_run, **kwargs)

        monkeypatch.setattr(SparseSpeculator, "propose", propose)

    def check(self, speculator, batch, rejected_B):
        table = speculator.block_tables.input_block_tables[0]
        cached = (batch.seq_lens[: batch.num_reqs] - rejected_B[: batch.num_reqs]).tolist()
        for layer in layers_of(speculator.vllm_config):
            keys, _, marks, _ = layer.impl.cache_views(layer, layer.kv_cache)
            keys = keys if keys.dtype == marks.dtype else keys.float()
            P, N = layer.impl.runtime.layout.page_size, keys.shape[2]
            for b, length in enumerate(cached):
                page = torch.arange(length // P)
                if len(page):
                    block, begin = table[b, page * P // N].long(), page * P % N
                    own = keys[block[:, None], :, begin[:, None] + torch.arange(P)]
                    fresh = landmarks(own.transpose(1, 2), layer.impl.runtime.layout.landmark_dtype)
                    gap = (marks[block, page % (N // P)].float() - fresh.float()).abs().max()
                    self.worst = max(self.worst, float(gap))
                    self.pages += len(page)


@pytest.mark.parametrize("landmark_dtype", ["auto", "fp8_e4m3"])
def test_landmarks_are_up_to_date_after_every_cycle(folder, monkeypatch, landmark_dtype):
    found = Landmarks(monkeypatch)
    with engine(folder, lossless(8, landmark_dtype=landmark_dtype)) as llm:
        generate(llm, prompts(*FEW, seed=2), 40)
        counts = counters(llm)
    assert found.pages > 500
    assert counts["accepted"] < counts["drafted"]
    assert found.worst < 1e-5


def test_stale_landmarks_of_rejected_tokens_would_be_detected(folder, monkeypatch):
    from sparrow import attention

    stock = attention.update_landmarks

    def of_prompts_only(layers, slot_mapping, **options):
        if (
            len(slot_mapping) > 100
        ):  # all prompts are read in one pass; verification reads 9 tokens per sequence
            stock(layers, slot_mapping, **options)

    found = Landmarks(monkeypatch)
    monkeypatch.setattr(attention, "update_landmarks", of_prompts_only)
    with engine(folder, lossless(8)) as llm:
        generate(llm, prompts(*FEW, seed=2), 40)
    assert found.worst > 1e-2


def test_only_draft_steps_store_tokens_for_the_next_decode_kernel(folder, monkeypatch):
    stores, update = Counter(), CpuImpl.do_kv_cache_update

    def watched(self, layer, key, value, kv_cache, slot_mapping):
        stores[self.decodes_next, len(slot_mapping)] += 1
        return update(self, layer, key, value, kv_cache, slot_mapping)

    monkeypatch.setattr(CpuImpl, "do_kv_cache_update", watched)
    with engine(folder, lossless(4, dense_layers=(0,))) as llm:
        layers = 2
        generate(llm, [[1, 2, 3]], 20)
        cycles = llm.collective_rpc("sparrow_acceptance")[0]["cycles"][4]
    drafts, verifications = stores[True, 1], stores[False, 5]
    assert cycles >= 4 and drafts == 4 * cycles * (layers - 1), (
        "in the dense layer, drafts must use vLLM's own attention"
    )
    assert layers * (cycles - 2) <= verifications <= layers * cycles
    assert stores[False, 1] == 4 * cycles and not any(
        n for (next_, size), n in stores.items() if next_ and size > 1
    )


@pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM's fp8 cache needs AVX-512 on a CPU"
)
def test_drafts_and_stock_vllm_share_an_fp8_cache(folder, monkeypatch):
    """vLLM stores keys and values with its own scales in prefill and verification, and drafts use
    the same scales.
    """
    asked, found, accepted = prompts(*FEW, seed=2), Landmarks(monkeypatch), []
    stock_scales = attention.set_default_quant_scales

    def scaled(layer, *args, **kwargs):  # as a checkpoint may specify
        stock_scales(layer, *args, **kwargs)
        layer._k_scale_float, layer._v_scale_float = 0.25, 0.5
        layer._k_scale.fill_(0.25)
        layer._v_scale.fill_(0.5)

    monkeypatch.setattr(attention, "set_default_quant_scales", scaled)

    def served(decoding, dtype):
        with engine(folder, decoding, kv_cache_dtype=dtype) as llm:
            got = generate(llm, asked, 40)
            if decoding is not None:
                counts, described = counters(llm), llm.collective_rpc("sparrow_describe")[0]
                accepted.append(counts["accepted"] / counts["drafted"])
                assert described.get("kv_cache") == (None if dtype == "auto" else "fp8_e4m3")
                assert "kv_scales" not in described
        return got

    wide, stock = (served(None, dtype) for dtype in ("auto", "fp8"))
    assert not any(a == b for a, b in zip(tokens_of(wide), tokens_of(stock), strict=True))
    for pages in (2, 1000):
        got = served(lossless(4, pages=pages), "fp8")
        assert tokens_of(got) == tokens_of(stock)
        assert all(
            np.abs(logprobs_of(a) - logprobs_of(b)).max() < 1e-4
            for a, b in zip(got, stock, strict=True)
        )
    served(lossless(4, pages=1000), "auto")
    few, everything, wide_everything = accepted
    assert few < 0.5 and everything == wide_everything, (
        "drafts that read everything must be accepted, except at the ends of responses"
    )
    assert found.worst < 1e-5 and found.pages > 500


def test_steps_without_drafts_bypass_the_speculator_without_changing_counters(
    folder, model, monkeypatch
):
    found, asked, told, calls = Landmarks(monkeypatch), prompts(*FEW, seed=2), [], [0]
    for passes_by in (True, False):
        if not passes_by:
            never = property(lambda _: False, lambda *_: None)
            monkeypatch.setattr(speculator.SparseSpeculator, "is_idle", never, raising=False)
        drafts = cycle((4, 0, 0, 0, 4, 4, 0))
        monkeypatch.setattr(DraftChooser, "choose", lambda *_, drafts=drafts: next(drafts))
        with engine(folder, lossless(4, adapt=True, pages=4)) as llm:
            got = generate(llm, asked, 40)
            told.append((counters(llm), llm.collective_rpc("sparrow_acceptance")[0]["cycles"]))
        assert_greedy_and_dense(model, asked, got)
        calls.append(found.calls)
    assert found.worst < 1e-5 and found.pages > 100
    assert (
        told[0] == told[1]
        and told[0][1].keys() == {0, 4}
        and told[0][0]["emitted"] >= 39 * len(asked)
    )
    assert calls[1] < calls[2] - calls[1] == sum(told[1][1].values())


@pytest.mark.parametrize(
    ("drafts", "to_verify", "has_head", "is_idle"),
    [
        (0, {}, False, True),
        (0, {}, True, False),
        (2, {}, False, False),
        (0, {"a": [-1]}, False, False),
    ],
)
def test_a_step_is_idle_if_it_neither_verifies_nor_makes_drafts(
    drafts, to_verify, has_head, is_idle
):
    drafting = SimpleNamespace(plan=DraftPlan(4, budget=0), has_head=has_head)
    scheduled = SimpleNamespace(
        num_spec_tokens_to_schedule=drafts, scheduled_spec_decode_tokens=to_verify
    )
    speculator.SparseSpeculator.begin_step(drafting, scheduled)
    assert (drafting.is_idle, drafting.plan) == (is_idle, DraftPlan(drafts, budget=0))
    plan.attach(scheduled, DraftPlan(drafts, budget=1), verified=DraftPlan(0, budget=0))
    speculator.SparseSpeculator.begin_step(drafting, scheduled)
    assert drafting.plan == DraftPlan(drafts, budget=1)


def test_the_speculator_passes_its_plan_to_any_drafter():
    asked, read = [], []
    drafter = SimpleNamespace(
        read=lambda *what: read.append(what),
        propose=lambda *what: asked.append(what) or "drafts",
    )
    drafting = SimpleNamespace(
        drafter=drafter, plan=DraftPlan(3, budget=1), draft_tokens=torch.zeros(4, 3), device="cpu"
    )
    sampled, rejected, newest = torch.tensor([0, 2]), torch.tensor([0, 1]), torch.zeros(4, 1)
    of_prompts = torch.arange(8).view(2, 4)  # the next two tokens of each prompt
    for is_prefilling in ([True, False], [False, False]):
        batch = SimpleNamespace(num_reqs=2, is_prefilling_np=np.array(is_prefilling))
        told = (
            batch,
            "metadata",
            "slots",
            None,
            ["states"],
            sampled,
            rejected,
            newest,
            of_prompts,
            "temperatures",
            "seeds",
        )
        assert speculator.SparseSpeculator.propose(drafting, *told) == "drafts"
        planned, after = asked.pop()
        assert planned == DraftPlan(3, budget=1)
        assert read.pop() == (after, 3)
        assert (after.batch, after.sampled_B, after.rejected_B) == (batch, sampled, rejected)
        assert after.newest_S.shape == (4,) and after.next_prompt_S.tolist() == [0, 1, 2, 3]
        assert after[-5:] == ("temperatures", "seeds", ["states"], "metadata", "slots")
        assert (after.is_prefilling_B is None) == (not any(is_prefilling))
    assert speculator.SparseSpeculator.propose(drafting, *told, dummy_run=True).shape == (2, 3)
    assert read and not asked  # vLLM measures its memory with such runs


# --- vLLM's handling of requests around a cycle ---


def test_requests_may_be_chunked_preempted_or_cut_off_at_the_context_length(
    folder, model, monkeypatch
):
    preempted = []
    stock = Scheduler._preempt_request
    monkeypatch.setattr(
        Scheduler,
        "_preempt_request",
        lambda self, *a, **kw: preempted.append(1) or stock(self, *a, **kw),
    )
    asked = prompts(90, 17, 70, 64, 33, 100, seed=3)
    small = dict(
        num_gpu_blocks_override=12, max_model_len=128, max_num_batched_tokens=48, max_num_seqs=6
    )
    with engine(folder, lossless(4), **small) as llm:
        got = generate(llm, asked, 60)
    assert len(preempted) > 0
    assert [len(c.token_ids) for c in got] == [min(60, 128 - len(p)) for p in asked]
    assert {c.finish_reason for c in got} == {"length"}
    assert_greedy_and_dense(model, asked, got)


def test_drafts_use_no_more_blocks_than_the_workspace_covers(folder, model):
    asked = prompts(90, 17, seed=3)
    with engine(
        folder, lossless(4), max_model_len=130
    ) as llm:  # vLLM pads 5 blocks of 32 tokens to 8
        got = generate(llm, asked, 60)

        def widths(worker):
            speculator = worker.model_runner.speculator
            return speculator.block_tables.input_block_tables[0].shape[1], speculator.drafter._step(
                2
            ).block_table.shape[1]

        assert llm.collective_rpc(widths) == [(8, 5)]
    assert [len(c.token_ids) for c in got] == [40, 60]
    assert_greedy_and_dense(model, asked, got)


def test_a_second_turn_reuses_the_dense_cache_of_the_first_turn(folder, model):
    asked = prompts(150, 33, 70, seed=4)
    with engine(folder, lossless(4)) as llm:
        first = generate(llm, asked, 40)
        turns = [[*p, *c.token_ids, 5, 6, 7] for p, c in zip(asked, first, strict=True)]
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p in turns], parameters(12), use_tqdm=False
        )
    assert [o.num_cached_tokens for o in outputs] == [(len(t) - 4) // 32 * 32 for t in turns]
    assert_greedy_and_dense(model, turns, [o.outputs[0] for o in outputs])


def test_responses_can_end_within_accepted_drafts(folder, model):
    asked = prompts(64, seed=5)
    with engine(
        folder, lossless(8, pages=40)
    ) as llm:  # drafts that read everything are all accepted
        whole = generate(llm, asked, 20)[0]
        ids = list(whole.token_ids)
        for tokens in (1, 2, 5, 9, 10):
            assert tokens_of(generate(llm, asked, tokens)) == [ids[:tokens]]
        for at in (3, 12):
            stopped = generate(llm, asked, 20, stop_token_ids=[ids[at]])[0]
            assert list(stopped.token_ids) == ids[: ids.index(ids[at]) + 1]
            assert stopped.finish_reason == "stop" and stopped.stop_reason == ids[at]
        counts = counters(llm)
    assert counts["accepted"] > 0.5 * counts["drafted"]


def test_cancelled_requests_do_not_affect_other_requests(folder, model):
    asked = prompts(*FEW, *FEW, seed=6)
    done = {}
    with engine(folder, lossless(4), max_num_seqs=4) as llm:
        for i, prompt in enumerate(asked):
            llm.llm_engine.add_request(str(i), {"prompt_token_ids": prompt}, parameters(20))
        for turn in range(400):
            if not llm.llm_engine.has_unfinished_requests():
                break
            if turn in (2, 4, 6):
                llm.llm_engine.abort_request([str(turn)])
            for output in llm.llm_engine.step():
                if output.finished:
                    done[int(output.request_id.split("-")[0])] = output.outputs[0]
    kept = [i for i in range(len(asked)) if i not in (2, 4, 6)]
    assert sorted(i for i in done if done[i].finish_reason != "abort") == kept
    assert_greedy_and_dense(model, [asked[i] for i in kept], [done[i] for i in kept])


# --- sampling ---

PROCESSORS = [
    dict(repetition_penalty=1.5),
    dict(presence_penalty=1.0, frequency_penalty=0.7),
    dict(allowed_token_ids=[1, 2, 3, 5, 8, 13, 21]),
    dict(min_tokens=15, stop_token_ids=list(range(0, 97, 2))),
    dict(temperature=1.0, top_k=1),
    dict(temperature=0.7, top_p=1e-6),
    dict(logit_bias={3: 4.0, 5: 3.5, 8: -4.0}),
    dict(temperature=1.0, min_p=1.0),
]


def test_greedy_tokens_with_logits_processors_match_stock_vllm(folder):
    asked = prompts(64, 33, seed=7)
    answers = []
    for decoding in (None, lossless(4)):
        with engine(folder, decoding) as llm:
            answers.append([tokens_of(generate(llm, asked, 16, **each)) for each in PROCESSORS])
            if decoding is not None:
                with pytest.raises(ValueError, match="'lossless' does not support logprob_token"):
                    generate(llm, asked, 16, logprobs=2, logprob_token_ids=[3, 5])
    for each, stock, ours in zip(PROCESSORS, *answers, strict=True):
        assert ours == stock, each


def test_bad_words_are_never_generated(folder):
    asked = prompts(64, 33, seed=7)
    with engine(folder, lossless(4)) as llm:
        first = tokens_of(generate(llm, asked, 16))
        wanted = parameters(16)
        wanted._bad_words_token_ids = [[first[0][0]], first[1][4:6]]
        outputs = llm.generate([{"prompt_token_ids": p} for p in asked], wanted, use_tqdm=False)
        ours = [list(o.outputs[0].token_ids) for o in outputs]
    with engine(folder) as llm:
        outputs = llm.generate([{"prompt_token_ids": p} for p in asked], wanted, use_tqdm=False)
        assert ours == [list(o.outputs[0].token_ids) for o in outputs]
    assert first[0][0] not in ours[0]


def test_the_same_seed_gives_identical_samples_with_dense_log_probs(folder, model):
    asked = prompts(64, 33, seed=8)
    with engine(folder, lossless(4)) as llm:
        answers = []
        for _ in range(2):
            llm.reset_prefix_cache()
            wanted = parameters(16, temperature=1.0, seed=11, n=3, logprobs=5)
            outputs = llm.generate([{"prompt_token_ids": p} for p in asked], wanted, use_tqdm=False)
            answers.append([o.outputs for o in outputs])
    first, second = answers
    for prompt, a, b in zip(asked, first, second, strict=True):
        assert len(a) == 3 and tokens_of(a) == tokens_of(b)
        assert len({tuple(x) for x in tokens_of(a)}) == 3
        for x, y in zip(a, b, strict=True):
            assert np.array_equal(logprobs_of(x), logprobs_of(y))
            log_p = dense(model, prompt, list(x.token_ids))
            for at, given in zip(log_p, x.logprobs, strict=True):
                assert set(np.argsort(-at)[:5]) <= set(given)
                assert max(abs(at[token] - one.logprob) for token, one in given.items()) < 1e-4


SEEDED = [
    dict(temperature=1.0, n=2),
    dict(temperature=0.7, top_p=0.9),
    dict(temperature=1.3, top_k=20),
    dict(temperature=1.0, presence_penalty=1.0),
    dict(temperature=1.0, min_p=0.3, logit_bias={3: 2.0, 5: -2.0}),
    dict(temperature=0.0),
]


def seeded(llm, asked, tokens=24):
    """Return the tokens of every response with each of ``SEEDED``."""
    answers = []
    for each in SEEDED:
        wanted = [parameters(tokens, seed=100 + i, **each) for i in range(len(asked))]
        outputs = llm.generate([{"prompt_token_ids": p} for p in asked], wanted, use_tqdm=False)
        answers.append([tokens_of(o.outputs) for o in outputs])
    return answers


def test_seeded_tokens_match_stock_vllm_with_any_drafts(tmp_path, monkeypatch):
    """With ``drafter_invariant``, tokens match for any number of drafts, any pages and any batches,
    even if the number of drafts changes.
    """
    tiny.checkpoint(tmp_path, num_hidden_layers=2, initializer_range=0.15)
    asked = prompts(*FEW, seed=13)
    with engine(tmp_path) as llm:
        expected = seeded(llm, asked)
    assert len({str(tokens) for tokens in expected}) == len(SEEDED)
    turns = iter(range(10**6))
    monkeypatch.setattr(DraftChooser, "choose", lambda *_: (0, 1, 3, 4)[next(turns) % 4])
    for decoding, options in (
        (lossless(1, pages=4, drafter_invariant=True), {}),
        (lossless(8, pages=1, drafter_invariant=True), dict(max_num_seqs=3)),
        (lossless(4, adapt=True, pages=4, drafter_invariant=True), dict(max_num_batched_tokens=64)),
    ):
        with engine(tmp_path, decoding, **options) as llm:
            assert seeded(llm, asked) == expected, decoding
            counts, cycles = counters(llm), llm.collective_rpc("sparrow_acceptance")[0]["cycles"]
        assert 0 < counts["accepted"] < counts["drafted"]
        assert len(cycles) == 4 if decoding.adapt_draft_tokens else len(cycles) == 1
    with engine(tmp_path, lossless(4)) as llm:
        assert seeded(llm, asked[:2])[0] != expected[0][:2]  # drafts that do not share their noise


def test_drafts_that_share_their_noise_with_verification_are_mostly_accepted(folder, monkeypatch):
    """The share of accepted drafts is between a / (2 - a) and a, where a is the acceptance rate.
    With separate noise, it is far lower.
    """
    asked = prompts(*FEW, *FEW, seed=14)
    stock, shares = sparse_drafter.gumbel_sample, []
    for other_noise in (False, True):
        if other_noise:
            monkeypatch.setattr(
                sparse_drafter,
                "gumbel_sample",
                lambda *args, **named: stock(*args, **{**named, "is_drafting": True}),
            )
        with engine(folder, lossless(1, pages=4, drafter_invariant=True)) as llm:
            generate(llm, asked, 120, temperature=1.0, seed=5)
            report = llm.collective_rpc("sparrow_acceptance")[0]["bins"]
            counts = counters(llm)
        judged = sum(each["drafts"] for each in report)
        a = sum(each["drafts"] * each["mean"] for each in report) / judged
        shares.append(counts["accepted"] / judged)
        assert 0.3 < a < 0.95
    assert a / (2 - a) - 0.03 < shares[0] < a + 0.03
    assert shares[1] < a / (2 - a) - 0.1


def enumerated(
    model, prompt, tokens, temperature, min_p=0.0, logit_bias=None, top_k=None, top_p=1.0
):
    """Return the probabilities ``[V ** tokens]`` of all continuations, computed by transformers."""
    V = model.config.vocab_size
    p, written = np.ones(1), np.zeros((1, 0), int)
    for _ in range(tokens):
        logits = torch.cat(
            [model(torch.tensor([[*prompt, *row]])).logits[:, -1].detach() for row in written]
        )
        for token, bias in (logit_bias or {}).items():
            logits[:, token] += bias
        log_p = torch.log_softmax(logits.double() / temperature, -1)
        if min_p:
            least = log_p.amax(-1, keepdim=True) + np.log(min_p)
            log_p = log_p.masked_fill(log_p < least, -float("inf")).log_softmax(-1)
        if top_k is not None:
            least = log_p.topk(top_k).values[:, -1:]
            log_p = log_p.masked_fill(log_p < least, -float("inf")).log_softmax(-1)
        if top_p < 1:
            best, order = log_p.exp().sort(-1, descending=True)
            is_beyond = torch.empty_like(best, dtype=torch.bool)
            is_beyond.scatter_(-1, order, best.cumsum(-1) - best >= top_p)
            log_p = log_p.masked_fill(is_beyond, -float("inf")).log_softmax(-1)
        p = (p[:, None] * log_p.exp().numpy()).reshape(-1)
        written = np.concatenate(
            [written.repeat(V, 0), np.tile(np.arange(V), len(written))[:, None]], 1
        )
    return p


def likelihood(counts, p):
    """Return the p-value of these counts for probabilities p, from a chi-square test that merges
    rare outcomes.
    """
    expected = p * counts.sum()
    rare = expected < 5
    seen, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    kept = expected > 0
    return stats.chisquare(seen[kept], expected[kept] * seen.sum() / expected.sum()).pvalue


def with_a_fused_sampler(monkeypatch):
    """Make vLLM sample with a stand-in for FlashInfer's sampler, which has its own random numbers.
    Return a list that collects the number of tokens sampled in each step.
    """
    drawn = []

    def flashinfer_sample(logits, k, p):
        drawn.append(len(logits))
        kept = topk_topp_sampler.apply_top_k_top_p(logits, k, p)
        return torch.multinomial(kept.softmax(-1), 1).view(-1)

    monkeypatch.setattr(sampler, "flashinfer_sampler_supported", lambda: True)
    monkeypatch.setattr(sampler, "flashinfer_sample", flashinfer_sample)
    return drawn


def keep_rejected(monkeypatch):
    """Keep each sequence's first rejected draft instead of replacing it."""
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    verify = rejection_sampler.rejection_sample

    @wraps(verify)
    def keep(*args, **named):
        tokens, count = verify(*args, **named)
        draft_sampled, first = args[2], args[3]
        at = first[:-1] + count  # the last verified draft is the token after the accepted ones
        rows = torch.arange(len(count))
        rejected = at < first[1:]
        tokens[rows[rejected], count[rejected].long() - 1] = draft_sampled[at[rejected].long()].to(
            tokens.dtype
        )
        return tokens, count

    monkeypatch.setattr(rejection_sampler, "rejection_sample", keep)


SAMPLES = {
    "exact": 20_000,
    "any number of drafts": 20_000,
    "two samplers": 10_000,
    "min_p and logit_bias": 10_000,
    "worst drafts": 10_000,
    "shared noise": 20_000,
    "no resampling": 2_000,
}
EXACT = ("exact", "any number of drafts", "two samplers", "min_p and logit_bias", "worst drafts")


@pytest.mark.parametrize("variant", SAMPLES)
def test_continuations_follow_the_dense_distribution(tmp_path, monkeypatch, variant):
    """Continuations must follow the dense policy, whatever is drafted. In some variants, a defect
    is introduced that the test must detect.
    """
    # Of 108 models that we tried, this one reveals shared noise best, and 30 % of its drafts are
    # rejected. In two variants, the number of drafts changes in every step. The temperature is
    # below 1.
    adapts = variant in ("any number of drafts", "two samplers")
    V, T = 12, 3 if variant in EXACT[:3] else 2  # with fewer outcomes, fewer samples reveal a bias
    model = tiny.checkpoint(
        tmp_path, vocab_size=V, num_hidden_layers=2, initializer_range=0.35, seed=7
    )
    prompt = np.random.default_rng(1).integers(0, V, 150).tolist()
    stock = sparse_drafter.gumbel_sample
    if adapts:
        turns = iter(range(10**6))
        monkeypatch.setattr(DraftChooser, "choose", lambda *_: (2, 0, 1)[next(turns) % 3])
    if variant == "two samplers":
        drawn = with_a_fused_sampler(monkeypatch)
    elif variant == "worst drafts":  # drafts that are rejected as often as possible
        monkeypatch.setattr(
            sparse_drafter,
            "gumbel_sample",
            lambda logits, *args, **named: stock(-logits, *args, **named),
        )
    elif (
        variant == "shared noise"
    ):  # real drafts, sampled with the same noise as their replacements
        monkeypatch.setattr(
            sparse_drafter,
            "gumbel_sample",
            lambda *args, **named: stock(*args, **{**named, "is_drafting": False}),
        )
    elif variant == "no resampling":  # a rejected draft is kept
        keep_rejected(monkeypatch)
    layout = dict(max_model_len=256, max_num_seqs=256, max_num_batched_tokens=4096)
    temperature = 0.8 if adapts else 1.0
    processing = {}
    if variant == "min_p and logit_bias":  # neither affects drafts
        processing = dict(min_p=0.15, logit_bias={2: 1.0, 7: -1.5})
    if variant == "two samplers":  # vLLM's fused sampler is used only for requests without seeds
        processing = dict(top_k=7, top_p=0.9)
    has_seeds = variant != "two samplers"
    with engine(tmp_path, lossless(T - 1, adapt=adapts), **layout) as llm:
        wanted = [
            parameters(
                T,
                temperature=temperature,
                seed=10**6 + i if has_seeds else None,
                logprobs=None,
                **processing,
            )
            for i in range(SAMPLES[variant])
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt}] * len(wanted), wanted, use_tqdm=False)
        counts = counters(llm)
    assert 0 < counts["accepted"] < counts["drafted"]
    if variant == "two samplers":
        assert len(drawn) > 20
    code = np.array([o.outputs[0].token_ids for o in outputs]) @ (V ** np.arange(T - 1, -1, -1))
    p_value = likelihood(
        np.bincount(code, minlength=V**T),
        enumerated(model, prompt, T, temperature, **processing),
    )
    print(variant, p_value)  # shown if the test fails
    assert p_value > 1e-3 if variant in EXACT else p_value < 1e-4


# --- changes while an engine runs ---


def test_the_draft_schedule_may_change_between_calls(folder, model):
    asked = prompts(*FEW, seed=9)
    shares = {}
    with engine(folder, lossless(4)) as llm:
        for pages in (1, 40, 2):
            llm.collective_rpc(
                "sparrow_set_schedule", args=(DRAFTS.replace(top_k=(pages,)).to_dict(),)
            )
            llm.reset_prefix_cache()
            counters(llm)
            assert_greedy_and_dense(model, asked, generate(llm, asked, 15))
            counts = counters(llm)
            shares[pages] = counts["accepted"] / counts["drafted"]
    # Some drafts that would have been accepted are cut off by the end of the context or of the
    # response.
    assert shares[1] < 0.4 and shares[40] > 0.7


def test_requests_with_a_cached_prompt_have_no_drafts_that_nobody_made(folder):
    """vLLM pads a new request whose prompt is cached except for one token to the length of other
    requests' verification, unless draft lengths are looked up in a table. It then verifies and
    counts drafts that no drafter has made.
    """
    (prompt,) = prompts(2 * tiny.OPTIONS["block_size"] + 1, seed=9)
    told = []
    for is_cached in (True, False):
        options = dict(max_num_seqs=4, enable_prefix_caching=is_cached)
        with engine(folder, lossless(4, pages=2), **options) as llm:
            llm.collective_rpc("sparrow_acceptance")
            wanted = [parameters(8, temperature=1.0, seed=seed) for seed in range(24)]
            asked = [{"prompt_token_ids": prompt}] * len(wanted)
            outputs = llm.generate(asked, wanted, use_tqdm=False)
            (bin_,) = llm.collective_rpc("sparrow_acceptance")[0]["bins"]
            told.append((bin_["drafts"], tokens_of(output.outputs[0] for output in outputs)))
    assert told[0] == told[1]


def test_the_draft_budget_may_change_with_every_cycle(folder, model, monkeypatch):
    """Drafts are verified and counted under their own budget, and tokens and counters are the same
    as with constant budgets.
    """
    asked = prompts(*FEW, seed=9)
    found = Landmarks(monkeypatch)
    monkeypatch.setattr(DraftChooser, "choose", lambda *_: 4)

    def run(budgets):
        turns = cycle(budgets)
        monkeypatch.setattr(DraftChooser, "choose_budget", lambda *_: next(turns))
        with engine(folder, lossless(4, adapt=True, pages=6, adapt_draft_budget=True)) as llm:
            counters(llm), llm.collective_rpc("sparrow_acceptance")
            assert_greedy_and_dense(model, asked, generate(llm, asked, 40))
            fixed = dict(temperature=1.0, seed=3)
            generate(llm, asked, 40, **fixed)
            told = llm.collective_rpc("sparrow_acceptance")[0]
            assert llm.collective_rpc("sparrow_describe")[0]["draft_budget"] in DRAFT_BUDGETS
            return told, counters(llm)

    (told, counts), *held = (run(budgets) for budgets in ((0, 2, 1), (0,), (2,)))
    assert found.worst < 1e-5 and found.pages > 100
    assert [part["multiple"] for part in told["budgets"]] == list(DRAFT_BUDGETS)
    by_budget = [DraftAcceptance.from_dict(part["acceptance"]) for part in told["budgets"]]
    drafts = [acceptance.drafts for acceptance in by_budget]
    assert min(drafts) > 20 and sum(drafts) == DraftAcceptance.from_dict(told["acceptance"]).drafts
    assert by_budget[0].mean < by_budget[1].mean < by_budget[2].mean
    for (alone, _), budget in zip(held, (0, 2), strict=True):
        assert [part["multiple"] for part in alone["budgets"]] == [DRAFT_BUDGETS[budget]]
        off = [
            abs(DraftAcceptance.from_dict(alone["acceptance"]).mean - each.mean)
            for each in by_budget
        ]
        assert min(off) == off[budget]
    few, mixed, many = (
        each["pages_read"] / each["drafted"] for each in (held[0][1], counts, held[1][1])
    )
    assert 1.2 * few < mixed < many / 1.2


def test_each_draft_step_reads_the_pages_scheduled_for_its_length(folder, monkeypatch):
    from sparrow import attention

    schedule = DRAFTS.replace(
        top_k=tuple(range(1, 21)), bin_tokens=16
    )  # some cycles end in a different bin
    decode, steps = attention.paged_decode, []

    @wraps(decode)
    def watched(*args, **named):
        steps.append((args[5].numpy().copy(), args[6].numpy().copy()))
        return decode(*args, **named)

    monkeypatch.setattr(attention, "paged_decode", watched)
    with engine(
        folder, Decoding.lossless(schedule, draft_tokens=4, adapt_draft_tokens=False)
    ) as llm:
        generate(llm, prompts(17, 33, 90, seed=4), 48)
    read = [
        (rows, top_k)
        for length, pages in steps
        for rows, top_k in zip(length, pages, strict=True)
        if rows
    ]
    assert len(set(read)) > 20 and all(
        top_k == schedule.pages(np.array([rows]))[0] for rows, top_k in read
    )


def test_weights_may_change_between_rollouts(folder, model, tmp_path):
    asked = prompts(64, 33, 150, seed=10)
    new = tiny.tiny_model(num_hidden_layers=2, seed=1)
    with engine(folder, lossless(4)) as llm:
        assert_greedy_and_dense(model, asked, generate(llm, asked, 12))
        new.save_pretrained(tmp_path)
        llm.collective_rpc("sparrow_load_weights", args=(str(tmp_path / "model.safetensors"),))
        llm.reset_prefix_cache()
        assert_greedy_and_dense(new, asked, generate(llm, asked, 12))


@pytest.mark.parametrize(
    "options",
    [dict(adapt=True), dict(adapt=True, max_num_seqs=1), dict(adapt=False, async_scheduling=False)],
)
def test_scheduling_does_not_change_greedy_tokens(folder, model, options):
    adapt, others = options["adapt"], {k: v for k, v in options.items() if k != "adapt"}
    asked = prompts(*FEW, seed=12)
    with engine(folder, lossless(4, adapt=adapt), **others) as llm:
        got = generate(llm, asked, 30)
        cycles = llm.collective_rpc("sparrow_acceptance")[0]["cycles"]
    assert_greedy_and_dense(model, asked, got)
    assert len(cycles) > 1 if adapt else set(cycles) == {4}


@pytest.mark.parametrize("drafts", [0, 3])
def test_steps_leave_no_tensors_for_the_garbage_collector(folder, monkeypatch, drafts):
    def tensors():
        return sum(isinstance(x, torch.Tensor) for x in gc.get_objects())

    monkeypatch.setattr(DraftChooser, "choose", lambda *_: drafts)
    with engine(folder, lossless(4, adapt=True)) as llm:
        generate(llm, [[1, 2, 3]], 10, temperature=1.0)
        gc.collect()
        gc.disable()
        try:
            before = tensors()
            generate(llm, [[1, 2, 3]], 60, temperature=1.0)
            left = tensors() - before
        finally:
            gc.enable()
    assert left < 20
