"""Test lossless decoding in transformers. Samples must follow the dense policy, whichever pages
drafts read.
"""

import itertools
import warnings

import numpy as np
import pytest
import torch
from scipy import stats
from transformers.cache_utils import DynamicLayer

from sparrow.decoding import Decoding
from sparrow.engines.base import Counters, total
from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError
from sparrow.model import speculative
from sparrow.model.actor import dense_steps
from sparrow.model.speculative import CachedSequences, Shape, speculate, verify
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from tests.conftest import VOCAB, tiny_model

LENGTHS = [73, 64, 9, 130, 1]


def prompts(lengths=LENGTHS, vocabulary=VOCAB, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, vocabulary, (n,), generator=generator).tolist() for n in lengths]


def lossless(pages=1, k=4, **layout):
    return Decoding.lossless(
        SparsitySchedule.fixed(pages, **{"dense_layers": (), **layout}), draft_tokens=k
    )


# --- rejection sampling against hand calculations ---

P = [[0.5, 0.5, 0.0], [0.1, 0.2, 0.7], [0.25, 0.25, 0.5]]
Q = [[0.25, 0.5, 0.25], [0.4, 0.5, 0.1]]


@pytest.mark.parametrize(
    ("draft", "drafts", "accept", "last", "tokens", "acceptance"),
    [
        (
            [1, 1],
            2,
            [0.99, 0.39],
            0.4,
            [1, 1, 1],
            [0.75, 0.4],
        ),  # 0.99 < 0.5/0.5, 0.39 < 0.2/0.5; the last token is drawn from p itself
        (
            [1, 1],
            2,
            [0.99, 0.41],
            0.0,
            [1, 2],
            [0.75, 0.4],
        ),  # the second draft is rejected: only token 2 has p > q
        ([2, 1], 2, [0.0, 0.0], 0.99, [0], [0.75, np.nan]),  # p is 0 there; only token 0 has p > q
        ([0, 2], 2, [0.99, 0.99], 0.8, [0, 2, 2], [0.75, 0.4]),  # p above q is always accepted
        (
            [0, 1],
            1,
            [0.5, 0.0],
            0.29,
            [0, 1],
            [0.75, np.nan],
        ),  # only one draft: 0.29 in the second row of p
        ([1, 1], 0, [0.0, 0.0], 0.6, [1], [np.nan, np.nan]),  # no drafts: 0.6 in the first row of p
    ],
)
def test_verification_matches_a_hand_calculation(draft, drafts, accept, last, tokens, acceptance):
    p, q = (torch.tensor([x], dtype=torch.float64) for x in (P, Q))
    uniform = torch.tensor([[[*accept, 0.0]], [[last] * 3]], dtype=torch.float64)
    found, accepted, alpha = verify(p, q, torch.tensor([draft]), torch.tensor([drafts]), uniform)
    assert found[0, : accepted[0] + 1].tolist() == tokens
    np.testing.assert_allclose(alpha[0], acceptance, atol=1e-7)


def test_distributions_that_differ_only_by_rounding_still_yield_a_token():
    q = torch.tensor([[[0.5, 0.5 + 1e-12]]], dtype=torch.float64)
    p = torch.tensor([[[0.5, 0.5], [0.5, 0.5]]], dtype=torch.float64)
    uniform = torch.tensor([[[1 - 1e-16, 0.0]], [[0.9, 0.9]]], dtype=torch.float64)
    tokens, accepted, _ = verify(p, q, torch.tensor([[1]]), torch.tensor([1]), uniform)
    assert accepted.tolist() == [0] and tokens[0, 0] == 1


# --- greedy ---


@pytest.mark.slow
@pytest.mark.parametrize("pages", [0, 2, 5])
@pytest.mark.parametrize("k", [1, 4, 8])
def test_greedy_tokens_match_dense_decoding(k, pages):
    model = tiny_model()
    sampling = Sampling(max_new_tokens=40, temperature=0.0, top_n=3)
    expected = HFEngine(model, SparsitySchedule.dense(), eos_ids=[7]).generate(prompts(), sampling)
    engine = HFEngine(model, lossless(pages, k), eos_ids=[7])
    found = engine.generate(prompts(), sampling)
    for ours, dense in zip(found, expected, strict=True):
        assert ours.response_ids.tolist() == dense.response_ids.tolist()
        assert ours.finish_reason == dense.finish_reason
        np.testing.assert_allclose(ours.logprobs, dense.logprobs, atol=1e-4)
        assert ours.top_ids.tolist() == dense.top_ids.tolist()
    counters = engine.counters()
    assert 0 < counters.accepted < counters.drafted, (
        "the test needs both accepted and rejected drafts"
    )


def test_cache_is_complete_after_a_cycle_without_drafts(monkeypatch):
    model, sampling = tiny_model(), Sampling(2, temperature=0.0)
    dense = HFEngine(model, SparsitySchedule.dense(), eos_ids=[]).generate(prompts(), sampling)

    def crop(layer, length):
        """Keep the first ``length`` tokens or, if ``length`` is negative, remove that many tokens
        at the end, as transformers did before 5.15.
        """
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]

    monkeypatch.setattr(DynamicLayer, "crop", crop)
    found = HFEngine(model, lossless(), eos_ids=[]).generate(prompts(), sampling)
    for ours, expected in zip(found, dense, strict=True):
        assert ours.response_ids.tolist() == expected.response_ids.tolist()
        np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=1e-4)


# --- sampling ---


def broken(monkeypatch, how):
    """Break the implementation."""
    if how == "never rejects":
        monkeypatch.setattr(
            speculative, "accepts", lambda p, q, draft, uniform: torch.ones_like(draft).bool()
        )
    elif how == "does not resample":
        monkeypatch.setattr(speculative, "residual", lambda p, q: p)
    elif how == "draws both from one noise":
        right = HFEngine._uniform
        monkeypatch.setattr(HFEngine, "_uniform", lambda *args: right(*args)[[0, 1, 0]])


def cut(mass: list[float], top_k: int | None, top_p: float) -> list[float]:
    """Truncate a distribution token by token until enough mass is kept."""
    left = sorted(range(len(mass)), key=lambda v: -mass[v])[:top_k]
    total, held, kept = sum(mass[v] for v in left), 0.0, []
    for v in left:
        if held >= top_p * total and top_p < 1:
            break
        kept.append(v)
        held += mass[v]
    return [mass[v] / held if v in kept else 0.0 for v in range(len(mass))]


@pytest.mark.parametrize(
    ("top_k", "top_p"), [(None, 1.0), (3, 1.0), (None, 0.7), (6, 0.5), (1, 0.9), (None, 1e-9)]
)
def test_batched_truncation_matches_row_by_row_truncation(top_k, top_p):
    logits = 2 * torch.randn(50, 12, generator=torch.Generator().manual_seed(0))
    expected = torch.tensor(
        [cut(row, top_k, top_p) for row in (logits.double() / 0.7).softmax(-1).tolist()]
    )
    shape = Shape(0.7, top_k, top_p)
    torch.testing.assert_close(shape.distribution(logits), expected.double(), atol=1e-6, rtol=0)
    torch.testing.assert_close(shape.log_probs(logits).exp(), expected.float(), atol=1e-6, rtol=0)
    at_one = Shape(1.0, top_k, top_p).log_probs(logits)
    assert torch.equal(Shape(0.0, top_k, top_p).log_probs(logits), at_one) and Shape() == Shape(1.0)
    greedy = Shape(0.0, top_k, top_p).distribution(logits)
    assert torch.equal(greedy.argmax(-1), logits.argmax(-1)) and torch.equal(
        greedy.sum(-1), torch.ones(50).double()
    )


def test_tokens_that_tie_at_the_top_k_cutoff_are_all_kept():
    logits = torch.tensor([[2.0, 1.0, 1.0, 0.0]])
    assert (Shape(1.0, 2).log_probs(logits) > -torch.inf).tolist() == [[True, True, True, False]]


@pytest.mark.parametrize(
    ("how", "k", "top_k", "top_p"),
    [
        ("as it should", 1, None, 1.0),
        ("as it should", 2, None, 1.0),
        ("as it should", 2, 5, 0.8),
        ("never rejects", 2, None, 1.0),
        ("does not resample", 2, None, 1.0),
        ("draws both from one noise", 2, None, 1.0),
    ],
)
@pytest.mark.slow
def test_continuations_follow_the_dense_policy(monkeypatch, how, k, top_k, top_p):
    V, T, count = 8, 4, 6_000
    model = tiny_model(vocab_size=V, num_hidden_layers=2)
    prompt = prompts([37], V)[0]
    prefixes = [list(c) for n in range(T) for c in itertools.product(range(V), repeat=n)]
    width = len(prompt) + T - 1
    ids = torch.tensor([[*prompt, *c, *[0] * (width - len(prompt) - len(c))] for c in prefixes])
    with torch.no_grad():
        p = model(input_ids=ids).logits.double().softmax(-1)
    p = torch.tensor(
        [[cut(row, top_k, top_p) for row in rows] for rows in p.tolist()], dtype=p.dtype
    )
    at = {tuple(c): p[i, len(prompt) + len(c) - 1] for i, c in enumerate(prefixes)}
    chance = np.array(
        [
            np.prod([float(at[c[:t]][c[t]]) for t in range(T)])
            for c in itertools.product(range(V), repeat=T)
        ]
    )
    assert abs(chance.sum() - 1) < 1e-9

    broken(monkeypatch, how)
    engine = HFEngine(
        model, lossless(0, k, page_size=4, recent_pages=1), eos_ids=[], batch_size=3000
    )
    rollouts = engine.generate(
        [prompt] * count, Sampling(T, top_n=0, seed=1, top_k=top_k, top_p=top_p)
    )
    cell = np.array([r.response_ids for r in rollouts]) @ V ** np.arange(T - 1, -1, -1)
    seen = np.bincount(cell, minlength=V**T)
    order = np.argsort(chance)[::-1]
    rare = chance[order] * count < 5
    expected = np.append(chance[order][~rare], chance[order][rare].sum()) * count
    observed = np.append(seen[order][~rare], seen[order][rare].sum())
    p_value = stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue
    if how == "as it should":
        assert p_value > 1e-3
        counters = engine.counters()
        alpha = counters.acceptance
        assert alpha.mean < 0.9, "the test needs many rejected drafts"
        # Each verified draft is accepted with the probability that the meter measured.
        assert abs(counters.accepted - alpha.sums.sum()) < 4 * np.sqrt(alpha.drafts) / 2
    else:
        assert p_value < 1e-9, p_value


@pytest.mark.slow
def test_log_probs_and_top_lists_match_the_dense_policy():
    model = tiny_model()
    for limit in (1, 2, 3, 30):  # the last token of a response is verified alone, without drafts
        engine = HFEngine(model, lossless(0, 3), eos_ids=[7], batch_size=3)
        rollouts = engine.generate(prompts(), Sampling(limit, temperature=0.8, top_n=5, seed=3))
        dense = engine.score(rollouts, SparsitySchedule.dense(), 0.8)
        for rollout, d in zip(rollouts, dense, strict=True):
            np.testing.assert_allclose(rollout.logprobs, d.logprobs, atol=1e-4)
            np.testing.assert_allclose(rollout.top_logprobs, d.top_logprobs, atol=1e-4)
            assert (np.diff(rollout.top_logprobs, axis=1) <= 0).all()
    counters = engine.counters()
    assert 0 < counters.accepted < counters.drafted


@pytest.mark.slow
@pytest.mark.parametrize(
    "sampling", [dict(temperature=1.0), dict(temperature=0.7, top_k=20, top_p=0.9)]
)
def test_drafter_invariant_tokens_depend_only_on_the_seed(sampling):
    """With ``drafter_invariant``, tokens are the same for any number of drafts and pages. Without
    it, drafts use separate random numbers.
    """
    model, sample = tiny_model(), Sampling(max_new_tokens=30, top_n=5, seed=3, **sampling)
    asked = prompts()
    dense = HFEngine(model, SparsitySchedule.dense(), []).generate(asked, sample)
    kept = {}
    for k, pages, invariant in (
        (1, 1, True),
        (4, 1, True),
        (4, 3, True),
        (9, 2, True),
        (4, 3, False),
    ):
        schedule = SparsitySchedule.fixed(pages, page_size=4, dense_layers=())
        engine = HFEngine(
            model, Decoding.lossless(schedule, draft_tokens=k, drafter_invariant=invariant), []
        )
        found, counters = engine.generate(asked, sample), engine.counters()
        same = [
            np.array_equal(a.response_ids, b.response_ids)
            for a, b in zip(found, dense, strict=True)
        ]
        assert all(same) if invariant else not all(same)
        assert 0 < counters.accepted < counters.drafted
        kept[k, invariant] = counters.accepted / counters.drafted
        if invariant:
            for a, b in zip(found, dense, strict=True):
                assert np.abs(a.logprobs - b.logprobs).max() < 1e-4
    assert kept[4, True] < kept[4, False]


def test_samples_do_not_depend_on_the_rest_of_the_batch():
    model = tiny_model()
    rows = prompts()
    sampling = Sampling(23, temperature=0.9, top_n=2, seeds=range(len(rows)))
    together = HFEngine(model, lossless(1, 5), eos_ids=[7]).generate(rows, sampling)
    assert len({len(r) for r in together}) > 1, (
        "the test needs responses that end at different times"
    )
    engine = HFEngine(model, lossless(1, 5), eos_ids=[7])
    for i, row in enumerate(rows):
        alone = engine.generate([row], Sampling(23, temperature=0.9, top_n=2, seeds=[i]))[0]
        assert alone.response_ids.tolist() == together[i].response_ids.tolist()
        np.testing.assert_allclose(alone.logprobs, together[i].logprobs, atol=1e-4)


# --- ends of responses, counters ---


def test_perfect_drafts_are_all_accepted_and_counted():
    model = tiny_model()
    everything = Decoding.lossless(SparsitySchedule.dense(), draft_tokens=4)
    engine = HFEngine(model, everything, eos_ids=[])
    rollouts = engine.generate(prompts([20, 30]), Sampling(13, seed=5))
    assert [len(r) for r in rollouts] == [13, 13] and {r.finish_reason for r in rollouts} == {
        "length"
    }
    # Prefill yields 1 token. Two cycles of 4 drafts yield 5 tokens each. The last cycle has room
    # for only one draft and yields 2 tokens.
    counters = engine.counters()
    assert counters.cycles == 2 * 3 and counters.drafted == counters.accepted == 2 * (4 + 4 + 1)
    assert counters.tokens_per_cycle == 24 / 6
    assert counters.acceptance.drafts == 18 and counters.acceptance.mean > 0.9999
    # The first cycle of the shorter row starts with 20 cached tokens. When its first draft is
    # sampled, 21 tokens are cached.
    drafts = (
        sum(range(21, 25)) + sum(range(26, 30)) + 31 + sum(range(31, 35)) + sum(range(36, 40)) + 41
    )
    verified = 25 + 30 + 32 + 35 + 40 + 42
    assert counters.tokens_read == 4 * (drafts + verified)
    assert counters.tokens_held == 4 * (sum(range(21, 33)) + sum(range(31, 43)))
    assert engine.counters() == Counters(0, 0)


def test_drafts_read_the_pages_allowed_by_the_schedule():
    engine = HFEngine(tiny_model(), lossless(0, 2, dense_layers=(0,)), eos_ids=[])
    engine.generate(prompts([100]), Sampling(3, temperature=0.0))
    counters = engine.counters()
    # One token is drafted with 101 cached tokens. In 3 of 4 layers, the draft reads 3 pages of 16
    # tokens. If the draft is rejected, another token is verified.
    cycles = 1 if counters.accepted else 2
    assert (counters.drafted, counters.cycles) == (1, cycles)
    assert counters.tokens_read == 101 + 3 * 48 + cycles * 4 * 102
    assert counters.tokens_held == 4 * (101 + 102)


def test_stop_token_inside_accepted_drafts_ends_the_response():
    everything, sampling = (
        Decoding.lossless(SparsitySchedule.dense(), draft_tokens=8),
        Sampling(40, seed=2),
    )
    model = tiny_model()
    free = (
        HFEngine(model, everything, eos_ids=[])
        .generate(prompts()[:1], sampling)[0]
        .response_ids.tolist()
    )
    # The first token comes from prefill. Each cycle then yields 9 tokens, because all 8 drafts are
    # accepted.
    end = next(
        i for i, token in enumerate(free) if i > 10 and 0 < i % 9 < 8 and token not in free[:i]
    )
    engine = HFEngine(model, everything, eos_ids=[free[end]])
    rollout = engine.generate(prompts()[:1], sampling)[0]
    assert rollout.response_ids.tolist() == free[: end + 1] and rollout.finish_reason == "stop"
    assert len(rollout.logprobs) == len(rollout.top_ids) == end + 1
    assert engine.counters().cycles == -(-end // 9)


def test_responses_stop_at_the_end_of_the_context():
    small = dict(max_position_embeddings=64)
    sampling, rows = Sampling(24, temperature=0.0), prompts([40, 8, 23])
    dense = HFEngine(tiny_model(**small), SparsitySchedule.dense(), eos_ids=[]).generate(
        rows, sampling
    )
    model, positions = tiny_model(**small), []
    engine = HFEngine(model, lossless(0, 8), eos_ids=[])
    model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: positions.append(int(kwargs["position_ids"].max())),
        with_kwargs=True,
    )
    found = engine.generate(rows, sampling)
    assert [r.response_ids.tolist() for r in found] == [r.response_ids.tolist() for r in dense]
    assert len(found[0]) == 24 and max(positions) == 62, "the very last token must not be read"
    with torch.no_grad():
        sequences = CachedSequences(model, torch.tensor([0, 52]))
        sequences.read(torch.randint(1, VOCAB, (2, 62)))
        cycle = speculate(
            sequences, torch.tensor([5, 6]), torch.tensor([0, 8]), Shape(0.0), torch.zeros(3, 2, 9)
        )
    assert cycle.count[0] == 1 and sequences.lengths[0] == 63
    assert max(positions) == 63, (
        "a row without drafts must not be processed beyond the end of the context"
    )
    with pytest.raises(ConfigError, match=r"prompt 0 has 41 tokens.*context of 64"):
        engine.generate(prompts([41]), sampling)


def test_engine_counters_add_up():
    model = tiny_model()
    parts = []
    for i in range(2):
        engine = HFEngine(model, lossless(0, 3), eos_ids=[])
        engine.generate(prompts([40 + 30 * i]), Sampling(20, seed=i))
        parts.append(engine.counters())
    both = total(parts)
    assert both.drafted == parts[0].drafted + parts[1].drafted > 0
    assert both.acceptance.drafts == parts[0].acceptance.drafts + parts[1].acceptance.drafts
    mean = sum(p.acceptance.mean * p.acceptance.drafts for p in parts) / both.acceptance.drafts
    assert abs(both.acceptance.mean - mean) < 1e-12


def test_engine_remains_lossless_when_its_draft_schedule_changes():
    model = tiny_model()
    engine = HFEngine(model, lossless(0, 4), eos_ids=[])
    engine.set_schedule(SparsitySchedule.fixed(3, dense_layers=()))
    assert engine.decoding == lossless(3, 4)
    sampling = Sampling(20, temperature=0.0)
    dense = HFEngine(tiny_model(), Decoding.load("dense"), eos_ids=[]).generate(prompts(), sampling)
    found = engine.generate(prompts(), sampling)
    assert [r.response_ids.tolist() for r in found] == [r.response_ids.tolist() for r in dense]


def test_rollout_emits_no_warnings():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        HFEngine(tiny_model(), lossless(), eos_ids=[]).generate(prompts([20]), Sampling(4))


def test_dense_steps_raises_an_error_on_an_unprepared_model():
    with (
        pytest.raises(ConfigError, match="dense_steps needs a model prepared"),
        dense_steps(tiny_model()),
    ):
        pass
