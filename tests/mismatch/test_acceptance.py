"""Test that acceptance rates match hand calculations, and that bounds always contain the exact
value.

Shapes: T tokens, V vocabulary, n entries of a top-n list.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.mismatch import acceptance, acceptance_bounds

P = np.array([0.5, 0.3, 0.15, 0.05, 0.0])
Q = np.array([0.2, 0.1, 0.3, 0.3, 0.1])


def log(probabilities):
    with np.errstate(divide="ignore"):
        return np.log(probabilities)


def top(distribution_TV, n):
    """Return the ids and log-probs of each row's n most probable tokens, [T, n]."""
    ids = np.argsort(-distribution_TV, axis=-1, kind="stable")[:, :n]
    return ids, np.take_along_axis(log(distribution_TV), ids, axis=-1)


@st.composite
def distribution_pairs(draw):
    """Generate two arrays [T, V] of distributions. The pairs range from nearly equal to disjoint,
    and the distributions from flat to one-hot. Some probabilities are exactly zero.
    """
    vocabulary = draw(st.integers(1, 12))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scale = draw(st.sampled_from([0.1, 1.0, 5.0, 30.0]))
    noise = draw(st.sampled_from([0.0, 0.01, 1.0, 10.0]))
    logits = scale * rng.standard_normal((6, vocabulary))
    pair = []
    for perturbed in (logits, logits + noise * rng.standard_normal(logits.shape)):
        weights = np.exp(perturbed - perturbed.max(axis=-1, keepdims=True))
        weights[(rng.random(weights.shape) < draw(st.sampled_from([0.0, 0.3]))) & (weights < 1)] = 0
        pair.append(weights / weights.sum(axis=-1, keepdims=True))
    return pair


def test_exact_acceptance_matches_a_hand_calculation():
    assert acceptance(P, Q) == pytest.approx(0.2 + 0.1 + 0.15 + 0.05)
    assert acceptance([[1.0, 0.0], [0.5, 0.5]], [[0.0, 1.0], [0.5, 0.5]]).tolist() == [0.0, 1.0]


@settings(deadline=None)
@given(distribution_pairs())
def test_exact_acceptance_is_one_minus_total_variation(pair):
    p, q = pair
    total_variation = 0.5 * np.abs(p - q).sum(axis=-1)
    np.testing.assert_allclose(acceptance(p, q), 1 - total_variation, atol=1e-12)
    np.testing.assert_array_equal(acceptance(p, q), acceptance(q, p))


def test_exact_acceptance_keeps_leading_dimensions_and_stays_in_range_in_float32():
    p = np.random.default_rng(0).dirichlet(np.ones(7), (2, 3)).astype(np.float32)
    alpha = acceptance(p, p)
    assert alpha.shape == (2, 3) and alpha.dtype == np.float64
    assert alpha.max() <= 1 and alpha.min() == pytest.approx(1, abs=1e-6)


@pytest.mark.parametrize(
    ("p", "q", "message"),
    [
        ([0.5, 0.5], [1.0, 0.0, 0.0], r"shape \(2,\) and q_TV has \(3,\)"),
        ([0.5, 0.6], [0.5, 0.5], "p_TV must contain probabilities"),
        ([0.5, 0.5], [-0.5, 1.5], "q_TV must contain probabilities"),
        ([0.5, 0.5], [np.nan, 1.0], "q_TV must contain probabilities"),
        ([-0.7, -0.7], [-0.7, -0.7], "exponentiate log-probs"),
    ],
)
def test_invalid_distributions_raise_an_error(p, q, message):
    with pytest.raises(ValueError, match=message):
        acceptance(p, q)


def test_gathered_bounds_match_a_hand_calculation():
    ids = [2, 3, 0]  # the three best tokens of the actor
    lower, upper = acceptance_bounds([ids], log(Q[ids])[None], log(P[ids])[None])
    assert lower == pytest.approx([0.15 + 0.05 + 0.2])
    assert upper == pytest.approx([0.4 + min(1 - 0.7, 1 - 0.8)])


def test_two_list_bounds_match_a_hand_calculation():
    # The lists share only token 0, with probabilities 0.5 and 0.3. Masses of 0.5 and 0.7 remain.
    lower, upper = acceptance_bounds(
        [[2, 0]], log([[0.4, 0.3]]), log([[0.5, 0.3]]), policy_ids=[[0, 1]]
    )
    assert lower == pytest.approx([0.3])
    assert upper == pytest.approx([0.3 + 0.5])
    # Disjoint lists give no information.
    lower, upper = acceptance_bounds([[7]], log([[0.6]]), log([[0.9]]), policy_ids=[[3]])
    assert (lower.tolist(), upper.tolist()) == ([0.0], [1.0])


@settings(max_examples=200, deadline=None)
@given(distribution_pairs(), st.integers(1, 12))
def test_gathered_bounds_contain_the_exact_value(pair, n):
    p, q = pair
    ids, actor_logprobs = top(q, n)
    lower, upper = acceptance_bounds(ids, actor_logprobs, np.take_along_axis(log(p), ids, axis=-1))
    exact = acceptance(p, q)
    assert np.all((lower >= 0) & (lower <= exact + 1e-12) & (exact <= upper + 1e-12) & (upper <= 1))
    if n >= p.shape[-1]:
        np.testing.assert_allclose(lower, exact, atol=1e-12)
        np.testing.assert_allclose(upper, exact, atol=1e-12)


@settings(max_examples=300, deadline=None)
@given(distribution_pairs(), st.integers(1, 12), st.integers(1, 12))
def test_two_list_bounds_contain_the_exact_value(pair, n, m):
    p, q = pair
    actor_ids, actor_logprobs = top(q, n)
    policy_ids, policy_logprobs = top(p, m)
    lower, upper = acceptance_bounds(actor_ids, actor_logprobs, policy_logprobs, policy_ids)
    exact = acceptance(p, q)
    assert np.all((lower >= 0) & (lower <= exact + 1e-12) & (exact <= upper + 1e-12) & (upper <= 1))
    if min(n, m) >= p.shape[-1]:
        np.testing.assert_allclose(lower, exact, atol=1e-12)
        everywhere = ((p > 0) & (q > 0)).all(-1)  # a probability of 0 counts as padding
        np.testing.assert_allclose(upper[everywhere], exact[everywhere], atol=1e-12)


def test_padded_entries_are_ignored():
    ids = [[2, 3, 0, 2, 2]]  # padded with an id that is also listed
    actor_logprobs = np.append(log(Q[[2, 3, 0]]), [-np.inf] * 2)[None]
    policy_logprobs = log(P[[2, 3, 0, 2, 2]])[None]
    expected = acceptance_bounds([[2, 3, 0]], log(Q[[[2, 3, 0]]]), log(P[[[2, 3, 0]]]))
    np.testing.assert_allclose(acceptance_bounds(ids, actor_logprobs, policy_logprobs), expected)

    padded_policy = np.append(log(P[[0, 1]]), -np.inf)[None]
    expected = acceptance_bounds([[2, 3, 0]], log(Q[[[2, 3, 0]]]), log(P[[[0, 1]]]), [[0, 1]])
    for pad in (
        0,
        1,
        2,
        -1,
    ):  # an id listed by the policy, by the actor, or an invalid id
        found = acceptance_bounds(
            [[2, 3, 0, pad]], actor_logprobs[:, :4], padded_policy, [[0, 1, pad]]
        )
        np.testing.assert_allclose(found, expected)


def test_bounds_accept_any_leading_dimensions_and_stay_in_range_in_float32():
    rng = np.random.default_rng(1)
    p, q = rng.dirichlet(np.full(40, 0.3), (2, 4, 5)).astype(np.float32)
    ids = np.argsort(-q, axis=-1)
    lower, upper = acceptance_bounds(
        ids, log(np.take_along_axis(q, ids, axis=-1)), log(np.take_along_axis(p, ids, axis=-1))
    )
    assert lower.shape == upper.shape == (4, 5)
    np.testing.assert_allclose(lower, acceptance(p, q), atol=1e-6)
    assert np.all((lower <= upper) & (upper <= 1)) and np.max(upper - lower) < 1e-6
    one = acceptance_bounds([1, 0], log(np.array([0.5, 0.5])), log(np.array([0.25, 0.75])))
    assert (float(one.lower), float(one.upper)) == pytest.approx((0.75, 0.75))


def test_log_probs_rounded_above_zero_are_clipped():
    assert acceptance_bounds([[0]], [[1e-4]], [[2e-4]]).lower.tolist() == [1.0]


LOGPROBS = log(np.array([[0.5, 0.3]]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[0, 1]], [[0.5, -1.0]], LOGPROBS), "actor's log-probs reach 0.5"),
        (([[0, 1]], LOGPROBS, [[3.0, -1.0]]), "policy's log-probs reach 3"),
        (([[0, 1]], [[np.nan, -1.0]], LOGPROBS), "actor's log-probs contain NaN"),
        (([[0, 1]], LOGPROBS, [[np.nan, -1.0]]), "policy's log-probs contain NaN"),
        (([[4, 4]], LOGPROBS, LOGPROBS), "actor's list contains id 4 twice"),
        (([[0, 1]], LOGPROBS, LOGPROBS, [[9, 9]]), "policy's list contains id 9 twice"),
        (([[0, 1]], LOGPROBS, [[-0.1, -0.1]]), "sum to 1.80967"),
        (([[0, 1]], LOGPROBS, LOGPROBS[:, :1]), "or pass policy_ids"),
        (([[0, 1, 2]], LOGPROBS, LOGPROBS), r"shape \(1, 3\)"),
        (
            ([[0, 1]], LOGPROBS, LOGPROBS.repeat(2, axis=0), [[0, 1]] * 2),
            "all axes except the last",
        ),
        (([[0.0, 1.0]], LOGPROBS, LOGPROBS), "dtype float64"),
        (([[-1, 1]], LOGPROBS, LOGPROBS), "ids contain -1"),
    ],
)
def test_acceptance_bounds_reject_invalid_lists(arguments, message):
    with pytest.raises(ValueError, match=message):
        acceptance_bounds(*arguments)
