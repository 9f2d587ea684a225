"""Test acceptance estimated from sampled tokens, against hand calculations and exact distributions."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.mismatch import acceptance, sampled_acceptance, tail_floor_by_bin


def test_acceptance_of_sampled_tokens_matches_a_hand_calculation():
    found = sampled_acceptance(np.log([0.5, 0.9, 0.3, 1e-300]), np.log([1.0, 0.3, 0.3, 0.5]))
    np.testing.assert_allclose(found, [0.5, 1.0, 1.0, 2e-300], rtol=1e-12)
    assert sampled_acceptance([-np.inf], [-1.0]).tolist() == [0.0]


@pytest.mark.parametrize(
    ("policy", "actor", "message"),
    [
        ([-1.0], [-1.0, -2.0], "shape"),
        ([np.nan], [-1.0], "NaN"),
        ([-1.0], [-np.inf], "infinite under the actor"),
    ],
)
def test_impossible_log_probs_raise_an_error(policy, actor, message):
    with pytest.raises(ValueError, match=message):
        sampled_acceptance(policy, actor)


def test_floor_averages_the_tokens_with_the_lowest_acceptance():
    values = np.ones(60)
    values[[7, 33]] = 0.2, 0.4  # 5 % of the 40 tokens in the first bin
    values[50] = 0.6  # and 5 % of the 20 tokens in the second
    first, second = tail_floor_by_bin(values, np.arange(60), np.arange(60) % 2, bin_tokens=40)
    assert first.estimate == pytest.approx(0.3) and (first.start, first.end, first.n_tokens) == (
        0,
        40,
        40,
    )
    assert second.estimate == pytest.approx(0.6) and second.n_sequences == 2
    assert 0 <= first.lower <= first.estimate <= first.upper <= 1
    assert tail_floor_by_bin(values, np.arange(60), np.zeros(60, int), 40, 10)[
        1
    ].estimate == pytest.approx(0.8)
    assert np.isnan(tail_floor_by_bin(values, np.arange(60), np.zeros(60, int), 40)[0].lower)
    with pytest.raises(ValueError, match="percentile is 0"):
        tail_floor_by_bin(values, np.arange(60), np.arange(60), 40, 0)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.02, 3.0), st.integers(2, 12))
def test_mean_matches_exact_acceptance_and_the_floor_is_below_its_percentile(
    seed, spread, vocabulary
):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(8000, vocabulary)) * 2
    p, q = (
        np.exp(x) / np.exp(x).sum(-1, keepdims=True)
        for x in (logits, logits + rng.gamma(0.3, spread, logits.shape))
    )
    alpha = acceptance(p, q)
    token = (q.cumsum(-1) > rng.random((8000, 1))).argmax(-1)[:, None]
    sampled = sampled_acceptance(*(np.log(np.take_along_axis(x, token, -1))[:, 0] for x in (p, q)))
    assert abs(sampled.mean() - alpha.mean()) < 5 * sampled.std() / np.sqrt(8000) + 1e-9
    floor = tail_floor_by_bin(sampled, np.zeros(8000, int), np.arange(8000) // 80)[0]
    assert floor.estimate <= np.percentile(alpha, 5) + (floor.upper - floor.lower)
