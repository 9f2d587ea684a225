"""Test chunked log-probs against the model's own logits, and how sequences are packed into
micro-batches.

Shapes: B sequences, T tokens, M response tokens of all sequences concatenated, n top ids, V
vocabulary.
"""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Gemma2Config, Gemma2ForCausalLM

from sparrow.errors import UnsupportedModel
from sparrow.model.scoring import Batch, TokenScorer, micro_batches
from tests.conftest import VOCAB, tiny_model

SPANS = [(1, 9), (7, 1), (12, 5), (3, 17)]  # prompt and response length of each row
TOP = 5


def ragged_batch(top: bool = True, seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(1, VOCAB, p).tolist() for p, _ in SPANS]
    responses = [rng.integers(1, VOCAB, r) for _, r in SPANS]
    top_ids = [rng.integers(0, VOCAB, (r, TOP), dtype=np.int32) for _, r in SPANS] if top else None
    return Batch.build(prompts, responses, top_ids)


def direct(model, batch: Batch, temperature: float):
    """Compute log-probs ``[M, V]`` and ids ``[M]`` from the model's own logits, one row at a time
    and without padding.
    """
    log_p, target = [], []
    for row, (p, r) in zip(batch.input_ids, SPANS, strict=True):
        log_p.append(
            (
                model(input_ids=row[None, : p + r]).logits[0, p - 1 : -1].float() / temperature
            ).log_softmax(-1)
        )
        target.append(row[p : p + r])
    return torch.cat(log_p), torch.cat(target)


# --- Batch ---


def test_rows_of_a_batch_are_left_aligned_and_responses_are_concatenated():
    top_ids = [np.array([[1, 2], [3, 4]], dtype=np.int32), np.array([[5, 6]], dtype=np.int32)]
    batch = Batch.build([[11, 12], [21]], [np.array([13, 14]), np.array([22])], top_ids)
    assert batch.input_ids.tolist() == [[11, 12, 13, 14], [21, 22, 0, 0]]
    assert batch.prompt_lengths.tolist() == [2, 1] and batch.response_lengths.tolist() == [2, 1]
    assert batch.top_ids.tolist() == [[1, 2], [3, 4], [5, 6]] and batch.top_ids.dtype == torch.int64
    rows, columns = batch.response_index()
    assert rows.tolist() == [0, 0, 1] and columns.tolist() == [2, 3, 1]
    assert Batch.build([[1]], [np.array([2])]).top_ids is None


# --- TokenScorer ---


@pytest.mark.parametrize("chunk_tokens", [1, 7, 32, 4096])  # 32 is the number of response tokens
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_scores_equal_the_log_softmax_of_the_logits(architecture, chunk_tokens, temperature):
    model, batch = tiny_model(architecture), ragged_batch()
    with torch.no_grad():
        scores = TokenScorer(model, chunk_tokens)(batch, temperature)
        log_p, target = direct(model, batch, temperature)
    M = sum(r for _, r in SPANS)
    assert M == 32 and scores.logprobs.shape == (M,) and scores.top_logprobs.shape == (M, TOP)
    torch.testing.assert_close(
        scores.logprobs, log_p.gather(1, target[:, None])[:, 0], rtol=0, atol=1e-4
    )
    torch.testing.assert_close(
        scores.top_logprobs, log_p.gather(1, batch.top_ids), rtol=0, atol=1e-4
    )
    torch.testing.assert_close(scores.entropy, -(log_p.exp() * log_p).sum(-1), rtol=0, atol=1e-4)


def test_temperature_zero_is_scored_like_one_and_other_values_scale_the_logits():
    scorer, batch = TokenScorer(tiny_model()), ragged_batch()
    with torch.no_grad():
        greedy, plain, cool = (scorer(batch, t).logprobs for t in (0.0, 1.0, 0.6))
    assert torch.equal(greedy, plain) and (cool - plain).abs().max() > 0.1


def test_without_top_ids_there_are_no_top_logprobs():
    model = tiny_model()
    with torch.no_grad():
        scores, with_top = (
            TokenScorer(model, 5)(ragged_batch(top=False)),
            TokenScorer(model, 5)(ragged_batch()),
        )
    assert scores.top_logprobs is None and torch.equal(scores.logprobs, with_top.logprobs)


@pytest.mark.parametrize("chunk_tokens", [5, 4096])
def test_chunked_gradient_matches_the_direct_gradient(chunk_tokens):
    model, batch = tiny_model().double(), ragged_batch()
    generator = torch.Generator().manual_seed(1)
    weight, top_weight = (
        torch.randn(32, generator=generator),
        torch.randn(32, TOP, generator=generator),
    )

    def gradient(logprobs, top_logprobs):
        model.zero_grad()
        ((weight * logprobs).sum() + (top_weight * top_logprobs).sum()).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    log_p, target = direct(model, batch, 0.7)
    expected = gradient(log_p.gather(1, target[:, None])[:, 0], log_p.gather(1, batch.top_ids))
    scores = TokenScorer(model, chunk_tokens)(batch, 0.7)
    assert scores.entropy is None
    # Log-probs are computed in float32, and the rest of the model in float64.
    error = (gradient(scores.logprobs, scores.top_logprobs) - expected).norm() / expected.norm()
    assert error < 1e-5


def test_scorer_exposes_the_model_parameters():
    model = tiny_model()
    assert {id(p) for p in TokenScorer(model).parameters()} == {id(p) for p in model.parameters()}


def test_soft_capped_model_is_rejected():
    torch.manual_seed(0)
    config = dict(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        initializer_range=2.0,
    )
    with pytest.raises(
        UnsupportedModel, match=r"Gemma2ForCausalLM changes its logits after the output embedding"
    ):
        TokenScorer(Gemma2ForCausalLM(Gemma2Config(**config, final_logit_softcapping=1.0)))
    TokenScorer(Gemma2ForCausalLM(Gemma2Config(**config, final_logit_softcapping=None)))


def test_dropout_in_training_mode_is_not_mistaken_for_changed_logits():
    model = tiny_model(attention_dropout=0.5).train()
    TokenScorer(model)
    assert all(module.training for module in model.modules())


# --- micro_batches ---


def test_micro_batches_match_a_hand_calculation():
    # The longest sequences come first. 9 is alone, because two sequences would pad to 18. 5 and 4
    # pad to 10, and 3, 3 and 2 pad to 9.
    assert micro_batches([3, 5, 9, 2, 4, 3], 10) == [[2], [1, 4], [0, 5, 3]]
    assert micro_batches([4, 25, 4], 10) == [[1], [0, 2]]
    assert micro_batches([], 10) == []


@settings(deadline=None)
@given(st.lists(st.integers(1, 60), max_size=30), st.integers(1, 200))
def test_micro_batches_contain_every_index_once_and_stay_within_the_budget(lengths, budget):
    groups = micro_batches(lengths, budget)
    assert sorted(i for group in groups for i in group) == list(range(len(lengths)))
    for group in groups:
        assert len(group) == 1 or max(lengths[i] for i in group) * len(group) <= budget
    order = [lengths[i] for group in groups for i in group]
    assert order == sorted(lengths, reverse=True)
    for group, following in pairwise(groups):
        assert lengths[group[0]] * (len(group) + 1) > budget, f"{following[0]} would have fit"
