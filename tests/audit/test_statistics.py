"""Test the audit's statistics against hand calculations and on samples from known distributions."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from sparrow.audit import statistics
from sparrow.audit.statistics import (
    LEAST_SEQUENCES,
    MOVED,
    Tokens,
    audit,
    cells_of_lists,
    holm,
    legendre,
    places,
)

V = 30


def drawn(seed, sequences=400, length=25, bias=None, reported_off=0.0, **kept):
    """Draw tokens from random distributions; ``bias`` changes the distribution that is actually
    sampled.
    """
    rng = np.random.default_rng(seed)
    T = sequences * length
    p = rng.dirichlet(np.full(V, 0.3), T)
    p = -np.sort(-p, axis=1)
    really = p if bias is None else bias(p)
    below = really.cumsum(1)
    token = (below < rng.random((T, 1)) * below[:, -1:]).sum(1)
    row = np.arange(T)
    chosen = p[row, token]
    scored = np.log(chosen)
    noise = rng.normal(0, 1e-5, T)
    return Tokens(
        before=(p.cumsum(1) - p)[row, token],
        p=chosen,
        entropy=-(p * np.log(np.maximum(p, 1e-300))).sum(1),
        sequence=np.repeat(np.arange(sequences), length),
        scored=scored,
        reported=scored + noise + reported_off * rng.normal(0, 1, T),
        **kept,
    )


def hotter(p):
    return p**0.9


# --- hand calculations ---


def test_polynomials_are_orthonormal_with_the_stated_mean_absolute_values():
    u = (np.arange(2**18) + 0.5) / 2**18
    h = legendre(u)
    np.testing.assert_allclose(h @ h.T / len(u), np.eye(4), atol=1e-6)
    np.testing.assert_allclose(h.mean(1), 0, atol=1e-6)
    np.testing.assert_allclose(np.abs(h).mean(1) / 2, MOVED, atol=1e-6)


def test_holm_correction_matches_a_hand_calculation():
    found = holm(np.array([0.01, 0.04, 0.03, 0.005]))
    np.testing.assert_allclose(found, [0.03, 0.06, 0.06, 0.02])


@pytest.mark.parametrize("freedom", [29, 100, 1000])
@pytest.mark.parametrize("t", [-1.0, 0.5, 2.5, 4.0, 5.0])
def test_tail_probabilities_match_the_student_t_distribution(freedom, t):
    expected = stats.t.sf(t, freedom)
    assert statistics._tail(t, freedom) == pytest.approx(expected, rel=0.03)


def test_standard_errors_treat_sequences_as_clusters():
    """A second copy of every token adds no information."""
    values = np.random.default_rng(0).normal(size=200)
    once = statistics._mean(values, np.arange(200))
    twice = statistics._mean(np.repeat(values, 2), np.repeat(np.arange(200), 2))
    assert once.error == pytest.approx(values.std(ddof=1) / np.sqrt(200))
    assert (twice.value, twice.error) == pytest.approx((once.value, once.error))
    assert (twice.tokens, twice.sequences) == (400, 200)


def test_tokens_are_grouped_by_their_position_within_a_cycle():
    # The first sequence starts with the token from the prefill. Its cycles have three tokens (no
    # rejection), two (a rejection), one (a rejection) and three. A second sequence follows.
    place = np.array([-1, 0, 1, 2, 0, 1, 0, 0, 1, 2, -1, 0])
    sequence = np.array([0] * 10 + [1] * 2)
    found = {
        name: np.flatnonzero(where).tolist() for name, where in places(place, sequence).items()
    }
    assert found == {
        "draft 1": [1, 4, 6, 7, 11],
        "draft 2": [2, 5, 8],
        "bonus token": [3, 9],
        "first after a rejection": [6, 7],
    }
    assert places(np.zeros(3, int), np.zeros(3, int)) == {}  # without any drafts


def test_drafts_after_the_eighth_are_tested_together():
    named = places(np.arange(13), np.zeros(13, int))
    assert list(named)[-3:] == ["drafts 9 to 12", "bonus token", "first after a rejection"]
    assert np.flatnonzero(named["drafts 9 to 12"]).tolist() == [8, 9, 10, 11]


# --- samples from known distributions ---


def test_exact_tokens_pass_the_audit():
    verdict = audit(drawn(1), drawn(2))
    assert verdict.status == "exact" and not verdict.reasons
    assert verdict.detectable < 0.05


def test_false_positive_rate_does_not_exceed_the_significance_level():
    """At a level of 5 %, the number of failures among 150 audits of exact tokens is consistent with
    chance.
    """
    called = sum(
        audit(
            drawn(2 * seed, sequences=60, length=10),
            drawn(2 * seed + 1, sequences=60, length=10),
            level=0.05,
        ).status
        == "biased"
        for seed in range(150)
    )
    assert called <= stats.binom.ppf(0.999, 150, 0.05)


def test_different_temperature_is_detected():
    verdict = audit(drawn(1, bias=hotter), drawn(2))
    assert verdict.status == "biased"
    assert any("log p + entropy, all" in reason for reason in verdict.reasons)


def test_bias_of_the_stated_detectable_size_is_detected_with_the_stated_power():
    """Replace exactly the detectable share of tokens with more likely ones."""
    share = audit(drawn(1, 200), drawn(2, 200)).detectable

    def likelier(p):
        before = p.cumsum(1) - p
        mean_h = np.sqrt(3) * (2 * before + p - 1)  # mean of the first polynomial over u's cell
        return p * np.maximum(1 - share / MOVED[0] * -mean_h, 0)

    name = "u1 (likely tokens)"
    found = 0
    for seed in range(40):
        verdict = audit(drawn(100 + seed, 200, bias=likelier), drawn(200 + seed, 200))
        strictest = verdict.level / len(verdict.findings)
        found += next(f for f in verdict.findings if f.name == name).p_value < strictest
    low, high = stats.binom.interval(0.999, 40, statistics.POWER)
    # u is drawn at random within a token's interval, which hides a small part of the bias.
    assert low - 8 <= found <= high


def test_bias_shared_by_both_arms_counts_as_rounding():
    def rounded(p):
        return p**0.95

    tested = drawn(1, bias=rounded)
    assert audit(tested, drawn(2, bias=rounded)).status == "exact"
    alone = audit(tested, None)
    assert alone.status == "biased" and all(f.dense is None for f in alone.findings)


def test_audit_is_inconclusive_if_the_dense_arm_fails_too():
    def other(p):
        return np.roll(p, 3, axis=1)

    verdict = audit(drawn(1, bias=other), drawn(2, bias=other))
    assert verdict.status == "cannot tell"
    assert "the dense arm itself shifts" in verdict.reasons[0]


def test_log_probs_that_are_far_off_in_both_arms_are_doubted():
    arms = [drawn(seed) for seed in (1, 2)]
    shifted = audit(*(replace(arm, entropy=arm.entropy - 0.3) for arm in arms))
    assert shifted.status == "cannot tell"
    assert re.fullmatch(
        r"the dense arm itself has a mean log p \+ entropy of -0.[23]\d\d nats, but the limit is "
        "0.1; score with the same weights, .*",
        *shifted.reasons,
    )
    other_kind = audit(*(replace(arm, reported=arm.reported + 0.4) for arm in arms))
    assert other_kind.status == "cannot tell"
    assert re.fullmatch(
        "the dense arm's own reported log-probs are off by 0.400 nats on average, but the limit is "
        "0.25; set --logprobs .*",
        *other_kind.reasons,
    )


def test_audit_of_too_few_tokens_is_inconclusive_and_states_how_many_are_needed():
    few = audit(drawn(1, 40, 5), drawn(2, 40, 5))
    assert few.status == "cannot tell" and "times as many tokens" in few.reasons[0]
    factor = float(few.reasons[0].rsplit("about ", 1)[1].split()[0])
    enough = round(40 * factor * 1.2)
    assert audit(drawn(3, enough, 5), drawn(4, enough, 5)).status == "exact"


def test_audit_of_too_few_sequences_is_inconclusive():
    sequences = LEAST_SEQUENCES - 1
    verdict = audit(drawn(1, sequences, 500, bias=hotter), drawn(2, sequences, 500))
    assert verdict.status == "cannot tell"
    assert f"{sequences} sequences are too few for a standard error" in verdict.reasons[0]


def test_audit_without_any_known_rank_is_inconclusive_and_states_the_remedy():
    arms = [drawn(seed, 40, 5) for seed in (1, 2)]
    unknown = np.full(len(arms[0]), np.nan)
    verdict = audit(
        *(replace(arm, before=unknown, p=unknown, entropy=unknown, reported=None) for arm in arms)
    )
    assert verdict.status == "cannot tell"
    (reason,) = verdict.reasons
    assert reason.startswith("no token's rank is known") and "request longer lists" in reason


def test_dependence_between_uniform_tokens_is_detected():
    rng = np.random.default_rng(0)

    def drawn_twice():
        u = rng.random((400, 20))
        u[:, 1::2] = u[:, ::2]  # every second token reuses the preceding token's random number
        return tokens(u)

    def tokens(u):  # cells so small that each determines u to three digits
        T = u.size
        return Tokens(
            before=np.floor(u.reshape(-1) * 1000) / 1000,
            p=np.full(T, 1e-3),
            entropy=np.full(T, np.log(1000)),
            sequence=np.repeat(np.arange(len(u)), u.shape[1]),
        )

    verdict = audit(drawn_twice(), tokens(rng.random((400, 20))))
    assert verdict.status == "biased" and all("neighbours" in r for r in verdict.reasons)
    verdict = audit(drawn_twice(), drawn_twice())
    assert verdict.status == "cannot tell"
    assert re.fullmatch(
        r"the dense arm itself has a correlation of \+0.[45]\d\d between neighbours, but the limit "
        "is 0.05; draw every token with its own random number, .*",
        *verdict.reasons,
    )


@pytest.mark.parametrize("share", [0.01, 1.0])
def test_tokens_outside_the_truncated_vocabulary_are_detected(share):
    tested = drawn(1)
    outside = np.random.default_rng(3).random(len(tested)) < share
    changed = {"p": np.where(outside, 0, tested.p), "before": np.where(outside, 1, tested.before)}
    verdict = audit(Tokens(**{**vars(tested), **changed}), drawn(2))
    assert verdict.status == "biased"
    assert any("outside top-k and top-p" in reason for reason in verdict.reasons)


def test_wrong_reported_log_probs_are_detected_but_rounding_is_tolerated():
    assert audit(drawn(1, reported_off=2e-5), drawn(2)).status == "exact"
    verdict = audit(drawn(1, reported_off=0.01), drawn(2))
    assert verdict.status == "biased" and "reported log-probs" in verdict.reasons[0]


def test_bias_at_one_position_in_the_cycle_is_traced_to_that_position():
    place = np.tile(np.concatenate([[-1], np.tile(np.arange(4), 6)]), 400)
    clean = drawn(1, place=place)
    assert audit(clean, drawn(2)).status == "exact"
    biased = drawn(3, bias=lambda p: p**0.5)
    at_last = place == 3
    mixed = {
        name: np.where(at_last, getattr(biased, name), getattr(clean, name))
        for name in ("before", "p", "entropy", "scored", "reported")
    }
    verdict = audit(Tokens(**{**vars(clean), **mixed}), drawn(2))
    found = {f.place for f in verdict.findings if f.corrected < 0.01}
    assert "bonus token" in found and not found & {"draft 1", "draft 2", "draft 3"}


def test_positions_reached_by_few_sequences_are_listed_but_not_tested():
    place = np.zeros(400 * 25, int)
    place[[1, 26]] = [1, 1]
    verdict = audit(drawn(1, place=place), drawn(2))
    assert "bonus token (only 2 sequences reach it)" in verdict.notes
    assert {f.place for f in verdict.findings} == {"all", "draft 1", "first after a rejection"}


def test_verdict_can_be_converted_to_json():
    verdict = audit(drawn(1, LEAST_SEQUENCES, 1), None)
    plain = json.loads(json.dumps(verdict.to_dict(), allow_nan=False))
    assert plain["status"] == "cannot tell" and len(plain["findings"]) == len(verdict.findings)


# --- repeated contexts ---


def in_few_contexts(seed, sequences, bias=None):
    """Draw sequences of two tokens after one of three prompts. The context of the second token
    includes the first.
    """
    rng = np.random.default_rng(seed)
    p = np.random.default_rng(9).dirichlet(np.full(6, 0.7), 3 + 3 * 6)
    really = p if bias is None else bias(p)
    context, token = np.zeros((2, sequences, 2), int)
    for b in range(sequences):
        context[b, 0] = b % 3
        token[b, 0] = rng.choice(6, p=p[b % 3])
        context[b, 1] = 3 + (b % 3) * 6 + token[b, 0]
        token[b, 1] = rng.choice(6, p=really[context[b, 1]])
    context, token = context.reshape(-1), token.reshape(-1)
    common = np.where(p >= statistics.COMMON, p, 0).sum(1)
    own = p[context, token]
    before = (p[context] * (p[context] > own[:, None])).sum(1)
    return Tokens(
        before=before,
        p=own,
        entropy=-(p * np.log(p)).sum(1)[context],
        sequence=np.repeat(np.arange(sequences), 2),
        token=token,
        context=context,
        common=common[context],
        is_common=own >= statistics.COMMON,
    ), p


def test_repeated_context_statistic_is_a_sum_over_pairs():
    tokens, p = in_few_contexts(0, 120)
    found = statistics._repeated(tokens)
    for name, first in (("first", 0), ("later", 1)):
        values = found[f"repeated contexts, {name} tokens"]
        total, pairs = 0.0, 0
        for j in range(first, 240, 2):
            for i in range(first, j, 2):
                if tokens.context[i] == tokens.context[j]:
                    pairs += 1
                    for w in np.flatnonzero(p[tokens.context[j]] >= statistics.COMMON):
                        share = p[tokens.context[j], w]
                        a, b = (tokens.token[k] == w for k in (i, j))
                        total += (a - share) * (b - share) / share
        assert pairs > 100
        assert np.nanmean(values) == pytest.approx(total / pairs)


def test_bias_unrelated_to_rank_is_detected_when_contexts_repeat():
    """In each context, some tokens are drawn too often, whatever their rank."""

    def anywhere(p):
        odd = np.random.default_rng(5).choice([0.7, 1.3], p.shape)
        return p * odd / (p * odd).sum(1, keepdims=True)

    beside, _ = in_few_contexts(1, 3000)
    exact, _ = in_few_contexts(2, 3000)
    assert audit(exact, beside).status == "exact"
    biased, _ = in_few_contexts(3, 3000, anywhere)
    name = "repeated contexts, later tokens"
    found = next(f for f in audit(biased, beside).findings if f.name == name)
    assert found.corrected < 0.01
    assert found.difference == pytest.approx(0.09, abs=0.04)  # about 0.3 squared
    first = next(f for f in audit(biased, beside).findings if "first tokens" in f.name)
    assert first.corrected > 0.01
    beside, _ = in_few_contexts(4, 3000, anywhere)
    verdict = audit(biased, beside)
    assert verdict.status == "cannot tell"
    assert re.fullmatch(
        rf"the dense arm itself is a chi-square distance of 0.\d+ from the scorer \({name}\), but "
        "the limit is 0.05; score with .*",
        *verdict.reasons,
    )


# --- top lists ---


def test_cells_of_top_lists_match_a_hand_calculation():
    lists = np.log([[0.5, 0.3], [0.5, 0.3], [0.6, 0.25]])
    before, p, entropy, _, _, known = cells_of_lists(lists, np.array([1, -1, 0]))
    np.testing.assert_allclose(before, [0.5, 0.8, 0.0])
    np.testing.assert_allclose(p, [0.3, 0.2, 0.6])
    expected = [
        stats.entropy(cells) for cells in ([0.5, 0.3, 0.2], [0.5, 0.3, 0.2], [0.6, 0.25, 0.15])
    ]
    np.testing.assert_allclose(entropy, expected)
    assert known.all()


def test_cells_of_truncated_top_lists_match_a_hand_calculation():
    lists = np.log([[0.5, 0.3], [0.3, 0.2]])
    before, p, entropy, _, _, known = cells_of_lists(lists, np.array([1, 1]), top_p=0.6)
    np.testing.assert_allclose((before[0], p[0]), (0.625, 0.375))
    assert known.tolist() == [True, False]  # the second list does not reach 0.6
    assert entropy[0] == pytest.approx(stats.entropy([0.625, 0.375]))
    # The most likely token alone has enough mass, so the other one is excluded.
    before, p, *_, known = cells_of_lists(lists[:1], np.array([1]), top_p=0.4)
    assert (before[0], p[0], known[0]) == (1, 0, True)


def test_temperatures_other_than_one_require_top_lists_of_all_possible_tokens():
    lists = np.log([[0.4, 0.3, 0.1]])
    index = np.array([0])
    assert not cells_of_lists(lists, index, temperature=0.5).known.any()
    before, p, *_, known = cells_of_lists(lists, index, temperature=0.5, top_k=2)
    assert known.all() and p[0] == pytest.approx(0.16 / 0.25) and before[0] == 0
    assert cells_of_lists(lists, np.array([2]), top_k=2).p[0] == 0
    assert not cells_of_lists(lists, index, top_k=50).known.any()


@pytest.mark.parametrize("bias", [None, hotter])
def test_audit_with_top_lists_passes_exact_tokens_and_detects_a_different_temperature(bias):
    def arm(seed, bias):
        rng = np.random.default_rng(seed)
        p = -np.sort(-rng.dirichlet(np.full(V, 0.3), 10_000), axis=1)
        really = p if bias is None else bias(p)
        below = really.cumsum(1)
        token = (below < rng.random((len(p), 1)) * below[:, -1:]).sum(1)
        index = np.where(token < 5, token, -1)
        before, cell, entropy, _, _, known = cells_of_lists(np.log(p[:, :5]), index)
        assert known.all() and (index < 0).any()
        return Tokens(before, cell, entropy, np.repeat(np.arange(400), 25))

    assert audit(arm(1, bias), arm(2, None)).status == ("exact" if bias is None else "biased")
