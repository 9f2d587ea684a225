"""Test the audit with a real vLLM on the V2 model runner; ``test_lossless.py`` runs this file in
its own process.
"""

import pytest

from tests.vllm import lossless_cases as cases  # isort: skip  before vLLM is imported
from functools import wraps

import numpy as np

from sparrow.audit.run import ListRanker, tokens_of
from sparrow.audit.statistics import COMMON, audit
from sparrow.engines.hf import HFEngine
from sparrow.engines.vllm.engine import rollout_of
from sparrow.engines.vllm.stock import StockEngine
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from sparrow.vllm.lossless.chooser import DraftChooser
from tests.vllm import tiny_vllm as tiny

V, SEQUENCES, LENGTH = 24, 192, 12
LAYOUT = dict(max_model_len=256, max_num_seqs=256, max_num_batched_tokens=4096)


@pytest.fixture(scope="module", params=["qwen3-gqa", "qwen3-mixture"])
def made(tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("model")
    shape = dict(vocab_size=V, num_hidden_layers=2, initializer_range=0.3)
    model = tiny.checkpoint(folder, name=request.param, **shape)
    return folder, model


def asked():
    prompts = [[token % V for token in prompt] for prompt in tiny.prompts(*[90] * 16)]
    return [prompts[i % 16] for i in range(SEQUENCES)]


@pytest.fixture(scope="module")
def ranker(made):
    return HFEngine(made[1], SparsitySchedule.dense(), eos_ids=[])


@pytest.fixture(scope="module")
def stock(made):
    """Return tokens that stock vLLM decoded densely, and their ranks according to its own
    prefill.
    """
    engine = StockEngine(str(made[0]), skip_tokenizer_init=True, **{**tiny.OPTIONS, **LAYOUT})
    sampling = Sampling(LENGTH, top_n=0, seed=1)
    rollouts = engine.generate(asked(), sampling)
    listed = ListRanker(engine, 8).rank(rollouts, sampling, COMMON)
    engine.close()
    return rollouts, listed


def lossless(folder, ranker, seed, **settings):
    """Return tokens sampled in lossless mode, with their ranks."""
    with cases.engine(folder, cases.lossless(3, **settings), **LAYOUT) as llm:
        wanted = [
            cases.parameters(LENGTH, temperature=1.0, seed=seed + i, flat_logprobs=True)
            for i in range(SEQUENCES)
        ]
        requests = [{"prompt_token_ids": prompt} for prompt in asked()]
        outputs = llm.generate(requests, wanted, use_tqdm=False)
        counts = cases.counters(llm)
    assert 0 < counts["accepted"] < counts["drafted"]
    pairs = zip(asked(), outputs, strict=True)
    rollouts = [rollout_of(prompt, output.outputs[0], 0) for prompt, output in pairs]
    return tokens_of(rollouts, ranker.rank(rollouts, Sampling(LENGTH), COMMON), "raw")


def dense(stock, ranker):
    rollouts, _ = stock
    return tokens_of(rollouts, ranker.rank(rollouts, Sampling(LENGTH), COMMON))


@pytest.mark.parametrize(
    "seed, guesses, adapt",
    [(10_000, 0, False), (20_000, 0, False), (40_000, 2, False), (50_000, 2, True)],
)
def test_lossless_mode_passes_the_audit(made, ranker, stock, monkeypatch, seed, guesses, adapt):
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(
        DraftChooser, "choose", lambda self, *_: self.choices[rng.integers(len(self.choices))]
    )
    tokens = lossless(made[0], ranker, seed, guess_tokens=guesses, adapt=adapt)
    verdict = audit(tokens, dense(stock, ranker), resolution=0.1)
    assert verdict.status == "exact", verdict.reasons


def test_the_audit_detects_rejected_drafts_that_are_kept(made, ranker, stock, monkeypatch):
    from vllm.v1.worker.gpu.spec_decode import rejection_sampler

    verify = rejection_sampler.rejection_sample

    @wraps(verify)
    def keep_rejected(*args, **named):
        tokens, count = verify(*args, **named)
        drafted, first = args[2], args[3]
        at = first[:-1] + count  # the index of the first rejected draft
        for row in (at < first[1:]).nonzero()[:, 0].tolist():
            tokens[row, int(count[row]) - 1] = drafted[at[row].long()].to(tokens.dtype)
        return tokens, count

    monkeypatch.setattr(rejection_sampler, "rejection_sample", keep_rejected)
    verdict = audit(lossless(made[0], ranker, 30_000), dense(stock, ranker))
    assert verdict.status == "biased"


def test_ranks_from_prefill_match_transformers(stock, ranker):
    rollouts, listed = stock
    exact = ranker.rank(rollouts, Sampling(LENGTH), COMMON)
    seen = 0
    for mine, theirs, rollout in zip(listed, exact, rollouts, strict=True):
        certain = mine.is_common
        seen += int(certain.sum())
        for name in ("before", "p"):
            gap = abs(getattr(mine, name) - getattr(theirs, name))[certain].max(initial=0)
            assert gap < 1e-4
        assert abs(mine.raw_logprobs - theirs.raw_logprobs).max() < 1e-3
        assert abs(rollout.logprobs - theirs.raw_logprobs).max() < 1e-3
    assert seen > 0.6 * SEQUENCES * LENGTH
    verdict = audit(tokens_of(rollouts, listed, "raw"), None, resolution=0.1)
    assert verdict.status == "exact", verdict.reasons
