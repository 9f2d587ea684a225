"""Test complete audits: what is sampled, and how the samples are ranked with full distributions and
with top lists.
"""

from contextlib import closing, contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch

from sparrow.audit.run import ListRanker, run_audit, tokens_of
from sparrow.audit.statistics import COMMON, audit
from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError, EngineError
from sparrow.rollout import Rollout, Sampling, Standing, TopLists
from sparrow.schedule import SparsitySchedule
from tests.conftest import tiny_model

V = 40
SAMPLED = Sampling(12, top_n=0, seed=3)


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return tiny_model(vocab_size=V, num_hidden_layers=2, initializer_range=0.25)


def asked(count):
    return np.random.default_rng(0).integers(1, V, (count, 20)).tolist()


class Lists:
    """The lists of most likely tokens that a prefill would return, computed with transformers."""

    def __init__(self, model):
        self.model = model
        self.closed = False

    @torch.no_grad()
    def top_lists(self, rollouts, n):
        found = []
        for each in rollouts:
            ids = torch.tensor([[*each.prompt_ids, *each.response_ids.tolist()]])
            log_p = self.model(ids).logits[0, len(each.prompt_ids) - 1 : -1].log_softmax(-1)
            best = log_p.topk(n)
            own = log_p.gather(-1, torch.from_numpy(each.response_ids)[:, None])[:, 0]
            found.append(TopLists(own.numpy(), best.indices.int().numpy(), best.values.numpy()))
        return found

    def close(self):
        self.closed = True


def dense(model):
    return HFEngine(model, SparsitySchedule.dense(), eos_ids=[])


@pytest.mark.parametrize(
    "options", [{}, dict(temperature=0.7, top_k=9, top_p=0.8), dict(top_p=0.5)]
)
def test_ranks_are_computed_from_top_lists_that_contain_every_sampled_token(model, options):
    sampling = Sampling(12, top_n=0, **options)
    engine = dense(model)
    rollouts = engine.generate(asked(8), sampling)
    whole = engine.rank(rollouts, sampling, COMMON)
    listed = ListRanker(Lists(model), 10).rank(rollouts, sampling, COMMON)
    seen = 0
    for exact, found, rollout, lists in zip(
        whole, listed, rollouts, Lists(model).top_lists(rollouts, 10), strict=True
    ):
        inside = (lists.top_ids == rollout.response_ids[:, None]).any(1) & ~np.isnan(found.p)
        seen += int(inside.sum())
        for name in ("before", "p"):
            a, b = getattr(exact, name)[inside], getattr(found, name)[inside]
            np.testing.assert_allclose(a, b, atol=1e-5)
        np.testing.assert_allclose(exact.raw_logprobs, found.raw_logprobs, atol=1e-5)
        # The rest of the vocabulary forms one cell, so the entropy is lower.
        assert (found.entropy[inside] <= exact.entropy[inside] + 1e-5).all()
    assert seen > 40


def test_sampling_is_rejected_if_top_lists_may_omit_its_tokens(model):
    ranker = ListRanker(Lists(model), 10)
    with pytest.raises(ConfigError, match=r"temperature is 0.7, but the .* set top_k to at most"):
        ranker.rank([], Sampling(4, temperature=0.7), COMMON)
    with pytest.raises(ConfigError, match="top_k is 11, but the lists contain only 10 tokens"):
        ranker.rank([], Sampling(4, top_k=11), COMMON)


def test_engine_is_closed_before_the_next_one_starts(model):
    events = []

    def made(name):
        engine = dense(model)
        engine.close = lambda: events.append(f"{name} closed")
        events.append(f"{name} made")
        return engine

    @contextmanager
    def ranker():
        events.append("ranker made")
        yield dense(model)
        events.append("ranker closed")

    told = []
    result = run_audit(
        lambda: made("tested"),
        lambda: made("dense"),
        ranker,
        asked(60),
        SAMPLED,
        listener=told.append,
    )
    assert events == [
        "tested made",
        "tested closed",
        "dense made",
        "dense closed",
        "ranker made",
        "ranker closed",
    ]
    assert len(told) == 3 and "sampling 60 responses" in told[0]
    assert (result.tokens, result.dense_tokens, result.prompts) == (720, 720, 60)
    assert result.to_dict()["counters"]["kv"]["read_fraction"] == 1


def test_each_arm_samples_with_a_different_seed(model):
    """If both arms sampled the same tokens, the audit could never find a difference."""
    seeds = []

    def made():
        engine = dense(model)
        generate = engine.generate

        def seen(prompts, sampling):
            seeds.append(sampling.seed)
            return generate(prompts, sampling)

        engine.generate = seen
        engine.close = lambda: None
        return engine

    @contextmanager
    def ranker():
        yield dense(model)

    run_audit(made, made, ranker, asked(40), SAMPLED)
    assert seeds[0] == SAMPLED.seed and seeds[1] != seeds[0]


def test_greedy_sampling_is_refused_before_an_engine_starts():
    def never():
        raise AssertionError("an engine was made")

    with pytest.raises(ConfigError, match="greedy decoding leaves no distribution"):
        run_audit(never, None, never, [[1]], Sampling(4, temperature=0.0))


@pytest.mark.parametrize("context", [32, 33])
def test_context_without_room_for_ranking_is_refused_before_sampling(model, context):
    """A prefill of prompt and response, 20 and 12 tokens, also samples a token."""
    events = []

    def made(name):
        engine = dense(model)
        engine.context = context
        generate = engine.generate

        def seen(prompts, sampling):
            events.append(name)
            return generate(prompts, sampling)

        engine.generate = seen
        return engine

    def audited():
        return run_audit(
            lambda: made("tested"),
            lambda: made("dense"),
            lambda: closing(ListRanker(Lists(model), 10)),
            asked(40),
            SAMPLED,
            prefills=True,
        )

    if context == 33:
        assert audited().dense_tokens == 480 and events == ["dense", "tested"]
    else:
        with pytest.raises(
            ConfigError, match=r"20 tokens and max_new_tokens=12 fill .* of 32 .*; lower .* by 1"
        ):
            audited()
        assert not events


def rollout(logprobs, response=(3, 4), prompt=(1, 2), **more):
    ids = np.array(response)
    none = np.zeros((len(ids), 0), np.int32)
    return Rollout(list(prompt), ids, np.float32(logprobs), none, none, "length", **more)


def standing(p, raw):
    p = np.array(p, dtype=float)
    zero = np.zeros(len(p))
    with np.errstate(divide="ignore"):
        return Standing(zero, p, zero, zero, p > COMMON, np.log(p), np.array(raw))


def test_reported_log_probs_are_compared_with_scores_of_the_same_kind():
    rollouts = [rollout([-1.0, -2.0])]
    standings = [standing([0.5, 0.0], [-3.0, -4.0])]
    processed = tokens_of(rollouts, standings)
    np.testing.assert_allclose(processed.scored, [np.log(0.5), -np.inf])
    assert tokens_of(rollouts, standings, "raw").scored.tolist() == [-3.0, -4.0]
    assert tokens_of(rollouts, standings, "none").reported is None


def test_log_probs_of_tokens_outside_top_lists_are_scored(model):
    """These tokens share a cell, whose probability is larger than each of theirs."""
    engine = dense(model)
    lists = ListRanker(Lists(model), 3)
    rollouts = engine.generate(asked(60), SAMPLED)
    others = engine.generate(asked(60), replace(SAMPLED, seed=4))
    standings = lists.rank(rollouts, SAMPLED, COMMON)
    found = tokens_of(rollouts, standings)
    assert (np.exp(found.scored) < 0.9 * found.p).mean() > 0.2
    np.testing.assert_allclose(found.scored, found.reported, atol=1e-4)

    beside = tokens_of(others, lists.rank(others, SAMPLED, COMMON))
    assert audit(found, beside, resolution=0.3).status == "exact"
    wrong = replace(found, reported=found.reported + np.where(found.scored < -3, 0.5, 0))
    assert "reported log-probs" in audit(wrong, beside).reasons[0]


def test_log_probs_that_top_lists_do_not_reveal_are_left_out(model):
    sampling = replace(SAMPLED, top_p=0.8)
    rollouts = dense(model).generate(asked(60), sampling)
    standings = ListRanker(Lists(model), 6).rank(rollouts, sampling, COMMON)
    found = tokens_of(rollouts, standings)
    unknown = np.isnan(found.p)
    assert 0 < unknown.mean() < 1
    assert (np.isnan(found.scored) == unknown).all()
    np.testing.assert_allclose(found.scored[~unknown], found.reported[~unknown], atol=1e-4)
    reported = next(f for f in audit(found, None).findings if f.name == "reported log-probs")
    assert reported.tested.tokens == (~unknown).sum()
    nothing = replace(found, scored=np.full(len(found), np.nan))
    assert any("none could be scored" in note for note in audit(nothing, None).notes)


def test_nan_log_probs_raise_an_error():
    with pytest.raises(EngineError, match="the engine reported NaN for 1 log-probs"):
        tokens_of([rollout([-1.0, np.nan])], [standing([0.5, 0.5], [-1, -1])])


def test_context_consists_of_the_prompt_and_all_previously_sampled_tokens():
    some = [
        rollout([0, 0, 0], (3, 4, 5)),
        rollout([0, 0, 0], (3, 4, 6)),
        rollout([0, 0, 0], (4, 4, 5)),
        rollout([0, 0, 0], (3, 4, 5), prompt=(1, 3)),
        rollout([0, 0], (4, 5), prompt=(1, 2, 3)),  # the same tokens, but a longer prompt
    ]
    standings = [standing([0.5] * len(each), [-1.0] * len(each)) for each in some]
    context = tokens_of(some, standings).context
    first, second, third, fourth, fifth = np.split(context, [3, 6, 9, 12])
    assert first.tolist() == second.tolist() and first[0] == third[0]
    assert len({*first, *third, *fourth, *fifth}) == 3 + 2 + 3 + 2


def test_cycle_positions_are_not_tested_if_any_position_is_unknown():
    known = rollout([-1.0, -2.0], cycle_place=np.array([-1, 0]))
    standings = [standing([0.5, 0.5], [-1, -1])] * 2
    assert tokens_of([known, rollout([-1.0, -2.0])], standings).place is None
    tokens = tokens_of([known, known], standings)
    assert tokens.place.tolist() == [-1, 0, -1, 0]
    assert "2 sequences are too few for a standard error" in audit(tokens, None).reasons[0]
