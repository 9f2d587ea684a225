"""Test that the audit passes exact engines and detects injected defects."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from sparrow.audit.run import tokens_of
from sparrow.audit.statistics import COMMON, audit
from sparrow.decoding import Decoding
from sparrow.engines import hf
from sparrow.engines.hf import HFEngine
from sparrow.model import speculative
from sparrow.model.speculative import CachedSequences, Shape
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from tests.conftest import tiny_model

V = 40
DRAFTS = Decoding.lossless(
    SparsitySchedule.fixed(3, page_size=4, recent_pages=1, dense_layers=()), draft_tokens=3
)
SEQUENCES, LENGTH = 512, 24
"""About 12,000 tokens per arm, enough to detect a bias that affects 3 % of the tokens."""


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    return tiny_model(vocab_size=V, num_hidden_layers=2, initializer_range=0.25)


def asked(sequences, prompts=32):
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(1, V, (prompts, 20), generator=generator).tolist()
    return [drawn[i % prompts] for i in range(sequences)]


def arm(model, decoding, seed, sequences=SEQUENCES, length=LENGTH, prompts=32, **sampling):
    """Sample with an engine. Return the tokens with their ranks under the dense policy, and the
    engine's counters.
    """
    engine = HFEngine(model, decoding, eos_ids=[], batch_size=2048)
    wanted = Sampling(length, top_n=0, seed=seed, **sampling)
    rollouts = engine.generate(asked(sequences, prompts), wanted)
    counters = engine.counters()
    return tokens_of(rollouts, engine.rank(rollouts, wanted, COMMON)), counters


def dense(model, seed, **sampling):
    return arm(model, SparsitySchedule.dense(), seed, **sampling)[0]


# --- ranks ---


@pytest.mark.parametrize("sampling", [{}, dict(temperature=0.7, top_k=9, top_p=0.8)])
def test_ranks_match_distributions_computed_one_token_at_a_time(model, sampling):
    engine = HFEngine(model, SparsitySchedule.dense(), eos_ids=[], token_budget=64)
    wanted = Sampling(6, top_n=0, **sampling)
    rollouts = engine.generate(asked(3), wanted)
    shape = Shape(wanted.temperature, wanted.top_k, wanted.top_p)
    for rollout, found in zip(rollouts, engine.rank(rollouts, wanted, COMMON), strict=True):
        ids = [*rollout.prompt_ids, *rollout.response_ids.tolist()]
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, len(rollout.prompt_ids) - 1 : -1]
        for t, (token, p) in enumerate(
            zip(rollout.response_ids, shape.distribution(logits).numpy(), strict=True)
        ):
            assert found.p[t] == pytest.approx(p[token], rel=1e-4)
            assert found.before[t] == pytest.approx(p[p > p[token]].sum(), abs=1e-5)
            assert found.entropy[t] == pytest.approx(-(p[p > 0] * np.log(p[p > 0])).sum(), abs=1e-4)
            raw = float(logits[t].log_softmax(-1)[token])
            assert found.raw_logprobs[t] == pytest.approx(raw, abs=1e-4)


def test_tokens_excluded_by_truncation_rank_after_all_others(model):
    engine = HFEngine(model, SparsitySchedule.dense(), eos_ids=[])
    rollouts = engine.generate(asked(20), Sampling(10, top_n=0))
    for found in engine.rank(rollouts, Sampling(10, top_n=0, top_k=3), COMMON):
        assert ((found.p == 0) == (found.before == 1)).all()
        assert found.p[found.p > 0].min() > 0
    p = np.concatenate([s.p for s in engine.rank(rollouts, Sampling(10, top_n=0, top_k=3), COMMON)])
    assert (p == 0).any() and (p > 0).any()


def test_recorded_cycle_positions_match_the_counters(model):
    engine = HFEngine(model, DRAFTS, eos_ids=[])
    rollouts = engine.generate(asked(20), Sampling(LENGTH, top_n=0))
    counters = engine.counters()
    places = [r.cycle_place for r in rollouts]
    assert all(place[0] == -1 for place in places)  # the token from the prefill
    steps = np.concatenate([np.diff(place) for place in places])
    assert max(place.max() for place in places) == 3
    assert set(steps.tolist()) <= {1, 0, -1, -2, -3, -4}
    begun = sum(int((place == 0).sum()) for place in places)
    alone = sum(int((place[1:] == -1).sum()) for place in places)  # last tokens have no drafts
    assert begun + alone == counters.cycles
    plain = HFEngine(model, SparsitySchedule.dense(), eos_ids=[]).generate(
        asked(2), Sampling(5, top_n=0)
    )
    assert all((r.cycle_place == -1).all() for r in plain)


# --- exact engines ---


@pytest.mark.slow
def test_dense_and_lossless_decoding_pass_the_audit_with_all_ten_seeds(model):
    sampled = [{}, dict(temperature=0.8), dict(top_p=0.9), dict(top_k=8, temperature=1.2)]
    shares = []
    for seed in range(10):
        options = sampled[seed % len(sampled)]
        beside = dense(model, 1000 + seed, **options)
        again = audit(dense(model, seed, **options), beside)
        tokens, counters = arm(model, DRAFTS, 100 + seed, **options)
        assert 0.1 < counters.accepted / counters.drafted < 0.9
        lossless = audit(tokens, beside)
        assert (again.status, lossless.status) == ("exact", "exact"), (seed, lossless.reasons)
        assert "bonus token" in {f.place for f in lossless.findings}
        shares.append(lossless.detectable)
    assert max(shares) < 0.04


@pytest.mark.slow
def test_drafter_invariant_decoding_passes_the_audit(model):
    decoding = Decoding.lossless(DRAFTS.schedule, draft_tokens=3, drafter_invariant=True)
    tokens, _ = arm(model, decoding, 5)
    assert audit(tokens, dense(model, 6)).status == "exact"


# --- injected defects ---


def shared_noise(monkeypatch):
    """Draw a replacement with the random number that drew the draft."""
    right = HFEngine._uniform
    monkeypatch.setattr(HFEngine, "_uniform", lambda *args: right(*args)[[0, 1, 0]])


def no_residual(monkeypatch):
    """Draw a replacement from p instead of the residual distribution."""
    monkeypatch.setattr(speculative, "residual", lambda p, q: p)


def everything_accepted(monkeypatch):
    def accepts(p, q, draft, uniform):
        return torch.ones_like(draft).bool()

    monkeypatch.setattr(speculative, "accepts", accepts)


def drafts_at_another_temperature(monkeypatch):
    """Draw drafts at a higher temperature than verification assumes."""
    draw_drafts_from(monkeypatch, Shape(1.4))


def top_p_on_the_target_alone(monkeypatch):
    """Draw drafts from the whole vocabulary but verify them as if top-p had been applied."""
    draw_drafts_from(monkeypatch, Shape())


def draw_drafts_from(monkeypatch, other):
    """Draw drafts from distributions other than those that verification assumes."""
    right = Shape.distribution
    draw_along = speculative.draw_along
    seen = []

    def shaped(self, logits):
        seen[:] = [logits]
        return right(self, logits)

    def drawn(q_BTV, *rest):
        return draw_along(right(other, *seen), *rest)

    monkeypatch.setattr(Shape, "distribution", shaped)
    monkeypatch.setattr(speculative, "draw_along", drawn)


def while_drafting(monkeypatch):
    """Return a list that is non-empty only while a cycle's tokens are being drafted."""
    draft = speculative.draft
    inside = []

    def entered(*args):
        inside.append(True)
        try:
            return draft(*args)
        finally:
            inside.pop()

    monkeypatch.setattr(speculative, "draft", entered)
    return inside


def a_stale_key_after_a_rejection(monkeypatch):
    """Leave a rejected draft's keys and values in the cache, where its replacement's belong."""
    keep = CachedSequences.keep
    select = CachedSequences.select
    drafting = while_drafting(monkeypatch)

    def stale_keep(self, lengths_B):
        if drafting:
            return keep(self, lengths_B)
        row = torch.arange(len(lengths_B))
        rejected = lengths_B < self.lengths
        column = (self.start + lengths_B).clamp(max=self.cache.get_seq_length() - 1)
        layers = self.cache.layers
        taken = [(x.keys[row, :, column].clone(), x.values[row, :, column].clone()) for x in layers]
        keep(self, lengths_B)
        if (before := getattr(self, "stale", None)) is not None:
            place, was_rejected, kept = before
            there = (row[was_rejected], slice(None), (self.start + place)[was_rejected])
            for layer, (keys, values) in zip(layers, kept, strict=True):
                layer.keys[there] = keys[was_rejected]
                layer.values[there] = values[was_rejected]
        self.stale = lengths_B, rejected, taken

    def stale_select(self, rows):
        select(self, rows)
        if (before := getattr(self, "stale", None)) is not None:
            place, rejected, kept = before
            self.stale = place[rows], rejected[rows], [(k[rows], v[rows]) for k, v in kept]

    monkeypatch.setattr(CachedSequences, "keep", stale_keep)
    monkeypatch.setattr(CachedSequences, "select", stale_select)


def log_probs_of_the_draft(monkeypatch):
    """Report accepted drafts with the drafter's log-probs."""
    verify = speculative.verify
    speculate = hf.speculate
    q = []

    def seen(p_BTV, q_BkV, *rest):
        q[:] = [q_BkV]
        return verify(p_BTV, q_BkV, *rest)

    def reported(*args):
        cycle = speculate(*args)
        log_q = q[0].log().float()
        return replace(cycle, log_p=torch.cat([log_q, cycle.log_p[:, log_q.shape[1] :]], 1))

    monkeypatch.setattr(speculative, "verify", seen)
    monkeypatch.setattr(hf, "speculate", reported)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defect", "sampling", "found"),
    [
        (no_residual, {}, "log p + entropy"),
        (everything_accepted, {}, "u1 (likely tokens), draft 1"),
        (drafts_at_another_temperature, {}, "log p + entropy, all"),
        (top_p_on_the_target_alone, dict(top_p=0.7), "log p + entropy, all"),
        (a_stale_key_after_a_rejection, {}, "log p + entropy, first after a rejection"),
        (log_probs_of_the_draft, {}, "reported log-probs"),
    ],
)
def test_each_injected_defect_is_detected(model, monkeypatch, defect, sampling, found):
    beside = dense(model, 12, **sampling)
    defect(monkeypatch)
    tokens, counters = arm(model, DRAFTS, 11, **sampling)
    verdict = audit(tokens, beside)
    assert counters.accepted > 0 and verdict.status == "biased"
    assert any(reason.startswith(found) for reason in verdict.reasons), verdict.reasons


@pytest.mark.slow
def test_shared_noise_is_detected_in_repeated_contexts(model, monkeypatch):
    """Sample a few prompts many times, because this bias leaves the frequency of every rank
    unchanged.
    """
    often = dict(sequences=8192, length=5, prompts=8)
    beside, _ = arm(model, SparsitySchedule.dense(), 12, **often)
    exact, _ = arm(model, DRAFTS, 13, **often)
    assert audit(exact, beside).status == "exact"
    shared_noise(monkeypatch)
    tokens, _ = arm(model, DRAFTS, 11, **often)
    verdict = audit(tokens, beside)
    assert verdict.status == "biased"
    assert verdict.reasons[0].startswith("repeated contexts, later tokens")
