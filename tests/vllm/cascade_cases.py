"""Lossless mode with guesses from history in a real vLLM; ``test_lossless.py`` runs this file in its
own process.
"""

import pytest
import torch

from tests.vllm import lossless_cases as cases  # isort: skip  before vLLM is imported
import numpy as np

from sparrow.model.history import guess
from sparrow.vllm.lossless import cascade, cascade_kernels
from tests.vllm import tiny_vllm as tiny

lossless = cases.lossless


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


@pytest.mark.parametrize("at_once", [16, 256])
def test_guesses_equal_those_of_the_reference(at_once):
    rng = np.random.default_rng(1)
    rows = [rng.integers(0, words, length) for words in (2, 3, 50) for length in (1, 2, 9, 77, 200)]
    N, m, B = 256, 5, len(rows)
    history = torch.zeros(B, N, dtype=torch.int32)
    for b, row in enumerate(rows):
        history[b, : len(row)] = torch.from_numpy(row)
    length = torch.tensor([len(row) for row in rows])
    expected = guess(history.long()[:, None], length[:, None], m)

    found = torch.full((B, 8), -7, dtype=torch.int64)
    made, drawn = torch.zeros(B, dtype=torch.int32), torch.zeros(B, dtype=torch.int64)
    counts = torch.zeros(2, dtype=torch.int64)
    cascade_kernels.fill_kernel[(B,)](
        torch.arange(B),
        length.int(),
        made,
        history,
        N,
        found,
        drawn,
        counts,
        8,
        KP=8,
        BLOCK=at_once,
    )
    assert torch.equal(found[:, :m], expected)
    assert counts.tolist() == [8 * B, 8 * B] and not drawn.any()
    assert len(expected.unique()) > 8


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


# --- sampling ---

SAMPLES = {
    "exact": 20_000,
    "guesses are drafted unjudged": 4_000,
    "filled places keep the distribution of an earlier pass": 4_000,
    "rejected drafts are kept": 4_000,
}


def drafting_guesses(monkeypatch):
    """Draft every guess, whatever the sparse actor drew in its place."""
    begun = []
    stock_init, stock_sample = cascade.CascadeDrafter.__init__, cascade.gumbel_sample

    def init(self, *args):
        stock_init(self, *args)
        begun.append(self)

    def sample(logits, *args, **named):
        drawn = stock_sample(logits, *args, **named)
        ids = begun[-1]._vllm.input_buffers.input_ids[: len(drawn)].view(-1, begun[-1].tokens)
        return torch.cat([ids[:, 1:], drawn.view(ids.shape)[:, -1:]], 1).flatten().long()

    monkeypatch.setattr(cascade.CascadeDrafter, "__init__", init)
    monkeypatch.setattr(cascade, "gumbel_sample", sample)


class NoKernel:
    def __getitem__(self, grid):
        return lambda *args, **named: None


@pytest.mark.parametrize("variant", SAMPLES)
def test_continuations_follow_the_dense_distribution(tmp_path, monkeypatch, variant):
    """Continuations follow the dense policy, and the test detects a defect in either verification
    and in the distribution of guesses that fill places.
    """
    V, T = 6, 4
    model = tiny.checkpoint(
        tmp_path, vocab_size=V, num_hidden_layers=2, initializer_range=0.35, seed=7
    )
    phrase = np.random.default_rng(1).integers(0, V, 30)
    prompt = np.tile(phrase, 5).tolist()
    if variant == "guesses are drafted unjudged":
        drafting_guesses(monkeypatch)
    elif variant == "filled places keep the distribution of an earlier pass":
        monkeypatch.setattr(cascade_kernels, "one_hot_kernel", NoKernel())
    elif variant == "rejected drafts are kept":
        cases.keep_rejected(monkeypatch)
    layout = dict(max_model_len=256, max_num_seqs=256, max_num_batched_tokens=4096)
    with cases.engine(tmp_path, lossless(T - 1, guess_tokens=2), **layout) as llm:
        wanted = [
            cases.parameters(T, temperature=1.0, seed=10**6 + i, logprobs=None)
            for i in range(SAMPLES[variant])
        ]
        outputs = llm.generate([{"prompt_token_ids": prompt}] * len(wanted), wanted, use_tqdm=False)
        counts = cases.counters(llm)
    if variant != "guesses are drafted unjudged":  # which leaves no places to fill
        assert 0 < counts["guessed"] < counts["drafted"]
    assert 0 < counts["accepted"] < counts["drafted"]
    code = np.array([o.outputs[0].token_ids for o in outputs]) @ (V ** np.arange(T - 1, -1, -1))
    p_value = cases.likelihood(
        np.bincount(code, minlength=V**T), cases.enumerated(model, prompt, T, 1.0)
    )
    print(variant, p_value, counts)  # shown if the test fails
    assert p_value > 1e-3 if variant == "exact" else p_value < 1e-4
