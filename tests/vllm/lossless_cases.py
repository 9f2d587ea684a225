"""Lossless mode in a real vLLM, by the model runner of GPUs; ``test_lossless.py`` runs this in its own processes."""

import pytest
import v2_on_cpu  # noqa: F401  before vLLM is imported

import tiny_vllm as tiny  # isort: skip
from tiny_vllm import prompts
from vllm import LLM, SamplingParams

from sparrow import SparsitySchedule
from sparrow.mode import Decoding

DRAFTS = SparsitySchedule(top_k=(1,), bin_tokens=100, recent_pages=1, dense_layers=())
RAGGED = [300, 17, 150, 511, 64, 33, 400, 90, 16, 15, 31, 222, 275, 128, 47, 350]


def lossless(k=4, adapt=False, pages=1, **layout):
    schedule = DRAFTS.replace(top_k=(pages,), **layout)
    return Decoding.lossless(schedule, draft_tokens=k, adapt_draft_tokens=adapt)


def start(folder, decoding=None, **options):
    given = {} if decoding is None else {"additional_config": {"sparrow": decoding.to_dict()}}
    return LLM(model=str(folder), skip_tokenizer_init=True, **{**tiny.OPTIONS, **given, **options})


def generate(llm, prompts, tokens, **sampling):
    common = dict(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False, logprobs=0)
    parameters = SamplingParams(**{**common, **sampling})
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], parameters, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def tokens_of(completions):
    return [list(c.token_ids) for c in completions]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    tiny.checkpoint(path)
    return path


@pytest.fixture(scope="module")
def many(folder):
    """64 ragged prompts, and what stock vLLM answers to them greedily."""
    asked = prompts(*(RAGGED * 4), seed=1)
    llm = start(folder)
    return asked, generate(llm, asked, 256)


@pytest.mark.parametrize("pages", [1, 4, 12])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_greedy_tokens_are_stock_vllms(folder, many, k, pages):
    asked, expected = many
    llm = start(folder, lossless(k, pages=pages))
    got = generate(llm, asked, 256)
    assert tokens_of(got) == tokens_of(expected)
    gap = max(
        abs(a[token].logprob - b[token].logprob)
        for x, y in zip(got, expected, strict=True)
        for a, b, token in zip(x.logprobs, y.logprobs, x.token_ids, strict=True)
    )
    assert gap < 1e-4
    counts = llm.collective_rpc("sparrow_counters")[0]
    assert 0 < counts["accepted"] < counts["drafted"]
