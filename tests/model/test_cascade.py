"""Test the cascade: history guesses tokens, the sparse actor turns the guesses it agrees with into
drafts, and the policy verifies the drafts. Samples must follow the dense policy, whatever history
guesses.
"""

import itertools
from collections import Counter

import numpy as np
import pytest
import torch
from scipy import stats

from sparrow.attention import reference
from sparrow.decoding import Decoding
from sparrow.engines.hf import HFEngine
from sparrow.model import speculative
from sparrow.model.actor import (
    dense_steps,
    set_schedule,
    sparse_calls,
    steps_of_several,
    teacher_forced,
)
from sparrow.model.history import History
from sparrow.model.speculative import CachedSequences, Shape, draw_along, residual, speculate
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from tests.conftest import tiny_model
from tests.model.test_speculative import prompts

CPU = torch.device("cpu")
SPARSE = SparsitySchedule.fixed(0, page_size=4, recent_pages=1, dense_layers=())


def cascade(pages=1, k=6, m=3, **options):
    schedule = SparsitySchedule.fixed(pages, page_size=8, dense_layers=())
    return Decoding.lossless(schedule, draft_tokens=k, guess_tokens=m, **options)


# --- which guesses the actor keeps ---


def test_guess_is_kept_with_the_actor_probability_or_replaced():
    q = torch.tensor([0.2, 0.5, 0.0, 0.3], dtype=torch.float64)
    uniform = (torch.arange(1000, dtype=torch.float64) + 0.5) / 1000
    q_BTV = q.expand(1000, 2, 4)
    for guess in range(4):
        guess_B1 = torch.full((1000, 1), guess)
        drawn, kept = draw_along(q_BTV, guess_B1, torch.stack([uniform, uniform], 1))
        assert int(kept.sum()) == round(1000 * float(q[guess]))
        assert (drawn[kept == 1, 0] == guess).all()
        others = drawn[kept == 0, 0].bincount(minlength=4) / (kept == 0).sum()
        rest = q.clone()
        rest[guess] = 0
        torch.testing.assert_close(others.double(), rest / rest.sum(), atol=1e-6, rtol=0)


def test_guesses_after_a_rejected_guess_are_dropped():
    certain = torch.eye(5, dtype=torch.float64)[[1, 2, 3, 4]][None]
    drawn, kept = draw_along(certain, torch.tensor([[1, 0, 3]]), torch.zeros(1, 4))
    assert drawn.tolist() == [[1, 2, 3, 4]] and kept.tolist() == [1]


# --- one page selection for all tokens of a pass ---


def cached(model, ids):
    sequences = CachedSequences(model, torch.zeros(len(ids), dtype=torch.long))
    with dense_steps(model):
        sequences.read(ids[:, :-1])
    return sequences


def pass_over(model, ids, guesses):
    """Run one sparse pass over the last token of ``ids`` and all ``guesses``, and return its
    logits.
    """
    sequences = cached(model, ids)
    with torch.no_grad(), steps_of_several(model):
        return sequences.read(torch.cat([ids[:, -1:], guesses], 1))


def test_pass_over_one_token_equals_a_decode_step():
    model = tiny_model()
    set_schedule(model, SparsitySchedule.fixed(1, page_size=8, dense_layers=()))
    ids = torch.tensor(prompts([90]))
    sequences = cached(model, ids)
    with torch.no_grad():
        step = sequences.read(ids[:, -1:])
    several = pass_over(model, ids, ids[:, :3])
    torch.testing.assert_close(several[:, :1], step, atol=1e-4, rtol=0)
    assert sparse_calls(model) == 2 * 4


def test_teacher_forcing_reproduces_passes_over_several_tokens():
    model = tiny_model()
    set_schedule(model, SparsitySchedule.fixed(1, page_size=8, dense_layers=()))
    ids = torch.tensor(prompts([90, 90]))
    sequences = cached(model, ids[:, :71])
    with torch.no_grad(), steps_of_several(model):
        passes = [sequences.read(ids[:, begin : begin + 4]) for begin in range(70, 90, 4)]
    with torch.no_grad(), teacher_forced(model, [70, 70], tokens=4):
        forced = model(input_ids=ids, use_cache=False).logits[:, 70:]
    torch.testing.assert_close(forced, torch.cat(passes, 1), atol=1e-4, rtol=0)
    with torch.no_grad(), teacher_forced(model, [70, 70]):
        alone = model(input_ids=ids, use_cache=False).logits[:, 70:]
    assert (alone - forced).abs().max() > 0.01


@pytest.mark.parametrize("broken", [False, True])
def test_output_for_a_token_does_not_depend_on_later_guesses(monkeypatch, broken):
    if broken:
        monkeypatch.setattr(reference, "selecting_query", lambda q_BHTD: q_BHTD[:, :, -1:])
    model = tiny_model()
    set_schedule(model, SparsitySchedule.fixed(1, page_size=8, dense_layers=()))
    ids = torch.tensor(prompts([90])).expand(20, -1)
    guesses = torch.randint(1, 97, (20, 3), generator=torch.Generator().manual_seed(1))
    guesses[:, 0] = 5
    logits = pass_over(model, ids, guesses)[:, :2]  # after the newest token, and after guess 5
    is_same = bool(((logits - logits[:1]).abs() < 1e-4).all())
    assert is_same != broken


def output(p, q_of, r):
    """Compute the distribution of a token after all three stages. The guess is drawn from ``r``,
    and an actor that has read the guess g drafts from ``q_of[g]``.
    """
    V = len(p)
    found = torch.zeros_like(p)
    for g, q in enumerate(q_of):
        if r[g] == 0:
            continue
        keep = min(1.0, float(q[g] / r[g]))
        drafted = (1 - keep) * residual(q, r) / residual(q, r).sum()
        drafted[g] += keep
        for x in range(V):
            accept = min(1.0, float(p[x] / q[x]))
            rest = residual(p, q) / residual(p, q).sum()
            found += r[g] * drafted[x] * (1 - accept) * rest
            found[x] += r[g] * drafted[x] * accept
    return found


def test_selecting_pages_by_random_guesses_would_be_inexact():
    p = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
    one = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)
    other = torch.tensor([0.6, 0.3, 0.1], dtype=torch.float64)
    r = torch.tensor([0.4, 0.4, 0.2], dtype=torch.float64)
    torch.testing.assert_close(output(p, [one, one, one], r), p)
    assert (output(p, [one, other, one], r) - p).abs().max() > 0.02
    # If guesses are deterministic, as they are from history, even such an actor is exact.
    certain = torch.tensor([0.0, 1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(output(p, [one, other, one], certain), p)


# --- greedy ---


def grouped(vocabulary=97):
    """Return seven prompts of different lengths, which contain repetitions. Two of the prompts
    occur more than once, so their responses are siblings.
    """
    rows = [row * 2 for row in prompts([40, 17, 3, 64], vocabulary)]
    return [rows[0], rows[1], rows[0], rows[2], rows[0], rows[3], rows[1]]


@pytest.mark.parametrize(("k", "m"), [(6, 3), (1, 2), (5, 7)])
def test_greedy_tokens_match_dense_decoding(k, m):
    model = tiny_model()
    sampling = Sampling(30, temperature=0.0, top_n=3)
    expected = HFEngine(model, SparsitySchedule.dense(), eos_ids=[7]).generate(grouped(), sampling)
    engine = HFEngine(model, cascade(k=k, m=m), eos_ids=[7])
    found = engine.generate(grouped(), sampling)
    for ours, dense in zip(found, expected, strict=True):
        assert ours.response_ids.tolist() == dense.response_ids.tolist()
        np.testing.assert_allclose(ours.logprobs, dense.logprobs, atol=1e-4)
        assert ours.finish_reason == dense.finish_reason
    counters = engine.counters()
    assert 0 < counters.accepted < counters.drafted
    if k > 1:
        assert counters.passes < counters.drafted < (m + 1) * counters.passes
        assert counters.to_dict()["drafts"]["drafts_per_pass"] == counters.drafts_per_pass > 1


# --- sampling ---


def test_drafter_invariant_sampling_yields_the_same_tokens_as_dense_decoding():
    model = tiny_model()
    sampling = Sampling(24, temperature=0.7, top_n=2, seed=3)
    dense = HFEngine(model, SparsitySchedule.dense(), []).generate(grouped(), sampling)
    engine = HFEngine(model, cascade(drafter_invariant=True), [])
    for ours, expected in zip(engine.generate(grouped(), sampling), dense, strict=True):
        assert ours.response_ids.tolist() == expected.response_ids.tolist()
        np.testing.assert_allclose(ours.logprobs, expected.logprobs, atol=1e-4)
    counters = engine.counters()
    assert counters.passes < counters.drafted


def test_only_responses_with_different_seeds_form_a_group():
    engine = HFEngine(tiny_model(), cascade(), [])
    seen = []
    engine._history = lambda *args: seen.append(HFEngine._history(engine, *args)) or seen[-1]
    engine.generate([[1, 2, 3]] * 4, Sampling(2, seeds=[5, 6, 5, 6]))
    assert seen[0]._streams_BR.tolist() == [[0, 1], [1, 0], [2, 3], [3, 2]]


def test_history_contains_only_verified_tokens_after_a_cycle():
    model = tiny_model()
    set_schedule(model, SPARSE)
    ids = torch.tensor(prompts([20, 20]))
    history = History(ids.tolist(), [0, 0], 9, 3, CPU)
    sequences = cached(model, ids)
    uniform = torch.rand(3, 2, 5, dtype=torch.float64)
    rows = torch.arange(2)
    drafts = torch.tensor([4, 1])
    cycle = speculate(sequences, ids[:, -1], drafts, Shape(), uniform, history=(history, rows))
    assert history.length_B.tolist() == [20, 20]
    assert sequences.lengths.tolist() == (19 + cycle.count).tolist()
    assert cycle.opens_pass[:, 0].all() and cycle.opens_pass[1].tolist() == [True, *[False] * 3]


def broken(monkeypatch, how):
    """Break one of the two verifications."""

    def keep_all(q_BTV, guess_Bm, uniform_BT):
        drawn, _ = right(q_BTV, guess_Bm, uniform_BT)
        drawn[:, : guess_Bm.shape[1]] = guess_Bm
        return drawn, torch.full((len(drawn),), guess_Bm.shape[1])

    def draw_again(q_BTV, guess_Bm, uniform_BT):
        m = guess_Bm.shape[1]
        drawn, _ = right(q_BTV, guess_Bm, uniform_BT)
        q_guess = q_BTV[:, :m].gather(2, guess_Bm[..., None])[..., 0]
        is_kept = torch.rand(guess_Bm.shape, dtype=torch.float64) < q_guess
        drawn[:, :m] = torch.where(is_kept, guess_Bm, drawn[:, :m])
        return drawn, is_kept.long().cumprod(1).sum(1)

    right = speculative.draw_along
    if how == "the actor keeps every guess":
        monkeypatch.setattr(speculative, "draw_along", keep_all)
    elif how == "the actor does not leave out a rejected guess":
        monkeypatch.setattr(speculative, "draw_along", draw_again)
    elif how == "the policy never rejects":
        monkeypatch.setattr(
            speculative, "accepts", lambda p, q, draft, uniform: torch.ones_like(draft).bool()
        )
    elif how == "the policy does not take the residual":
        monkeypatch.setattr(speculative, "residual", lambda p, q: p)


def sampled(model, prompt, count, tokens, k, m):
    """Sample the first ``tokens`` tokens of ``count`` responses with a cascade, in groups of four.
    Return the tokens and the counts of drafts, passes and accepted drafts.
    """
    ids = torch.tensor([prompt]).expand(count, -1)
    history = History(ids.tolist(), [b // 4 for b in range(count)], tokens + k, m, CPU)
    sequences = cached(model, ids)
    generator = torch.Generator().manual_seed(1)
    uniform = torch.rand(3, count, tokens + k + 1, dtype=torch.float64, generator=generator)
    rows = torch.arange(count)
    newest = ids[:, -1]
    drafts = torch.full((count,), k)
    done = torch.zeros(count, dtype=torch.long)
    counted = Counter()
    while (done < tokens).any():
        position = (done[:, None] + torch.arange(k + 1)).clamp(max=uniform.shape[2] - 1)
        numbers = uniform[:, rows[:, None], position]
        # A finished row drafts nothing and discards its samples.
        more = drafts * (done < tokens)
        cycle = speculate(sequences, newest, more, Shape(), numbers, history=(history, rows))
        added = torch.where(done < tokens, cycle.count, 0)
        history.extend(rows, cycle.tokens, added.clamp(max=tokens + k))
        newest = cycle.tokens.gather(1, cycle.count[:, None] - 1)[:, 0]
        done = done + added
        counted["drafted"] += int(more.sum())
        counted["passes"] += int(cycle.opens_pass.sum())
        counted["accepted"] += int((cycle.count - 1)[more > 0].sum())
    begin = len(prompt)
    return history.tokens_BS[:, begin : begin + tokens].numpy(), counted


@pytest.mark.parametrize(
    "how",
    [
        "as it should",
        "the actor keeps every guess",
        "the actor does not leave out a rejected guess",
        "the policy never rejects",
        "the policy does not take the residual",
    ],
)
@pytest.mark.slow
def test_samples_follow_the_dense_policy(monkeypatch, how):
    V, T = 6, 3
    count = 20_000 if how == "as it should" else 4_000
    model = tiny_model(vocab_size=V, num_hidden_layers=2, initializer_range=0.2)
    prompt = prompts([37], V)[0]
    continuations = list(itertools.product(range(V), repeat=T))
    with torch.no_grad():
        ids = torch.tensor([[*prompt, *c] for c in continuations])
        log_p = model(input_ids=ids).logits.double().log_softmax(-1)
    at = torch.arange(len(prompt) - 1, len(prompt) + T - 1)
    chance = log_p[:, at].gather(2, ids[:, at + 1, None]).sum((1, 2)).exp().numpy()
    assert abs(chance.sum() - 1) < 1e-9

    set_schedule(model, SPARSE)
    broken(monkeypatch, how)
    tokens, counted = sampled(model, prompt, count, T, k=3, m=2)
    cell = tokens @ V ** np.arange(T - 1, -1, -1)
    seen = np.bincount(cell, minlength=V**T)
    rare = chance * count < 5
    expected = np.append(chance[~rare], chance[rare].sum()) * count
    observed = np.append(seen[~rare], seen[rare].sum())
    p_value = stats.chisquare(observed[expected > 0], expected[expected > 0]).pvalue
    if how == "as it should":
        assert p_value > 1e-3
        assert counted["drafted"] > 1.1 * counted["passes"], "the test needs some correct guesses"
        assert counted["accepted"] < 0.9 * counted["drafted"], "the test needs many rejected drafts"
    else:
        assert p_value < 1e-6, p_value
