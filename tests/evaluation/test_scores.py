"""Test evaluation metrics against hand calculations."""

import numpy as np
import pytest

from sparrow.evaluation.scores import majority_at_k, mean_at_k, pass_at_k


def test_pass_at_k_matches_a_hand_calculation():
    # 1 of 4 right: pass@1 = 1/4, pass@2 = 1 - C(3,2)/C(4,2) = 1/2; 0 right: 0; 4 right: 1.
    rewards = [[1, 0, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]]
    assert pass_at_k(rewards, 1).value == pytest.approx((0.25 + 0 + 1) / 3)
    assert pass_at_k(rewards, 2).value == pytest.approx((0.5 + 0 + 1) / 3)
    assert pass_at_k(rewards, 4).value == pytest.approx(2 / 3)
    assert pass_at_k(rewards, 1).value == pytest.approx(mean_at_k(rewards).value)
    with pytest.raises(ValueError, match=r"1 <= k <= 4"):
        pass_at_k(rewards, 5)


def test_pass_at_k_is_unbiased():
    rng = np.random.default_rng(0)
    rewards = (rng.random((20000, 6)) < 0.3).astype(float)
    assert pass_at_k(rewards, 3).value == pytest.approx(1 - 0.7**3, abs=0.01)


def test_majority_voting_matches_a_hand_calculation():
    rewards = [[1, 0, 1, 0], [1, 0, 1, 1], [0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    answers = [
        ["7", "3", "7", None],
        ["8", "9", "8", "8"],
        ["2", "2", "5", None],
        ["4", "6", None, None],
        [None] * 4,
    ]
    # The majorities 7 and 8 are right, and 2 is wrong. In the fourth problem, a right and a wrong
    # answer tie. The last problem has no answers.
    assert majority_at_k(rewards, answers).value == pytest.approx((1 + 1 + 0 + 0.5 + 0) / 5)
    with pytest.raises(ValueError, match="one answer per reward"):
        majority_at_k(rewards, answers[:2])


def test_interval_covers_the_mean_and_narrows_with_more_problems():
    rng = np.random.default_rng(1)
    wide, narrow = (mean_at_k((rng.random((n, 4)) < 0.5).astype(float)) for n in (20, 2000))
    assert wide.low < wide.value < wide.high and wide.high - wide.low > 3 * (
        narrow.high - narrow.low
    )
    half = mean_at_k([[0.0], [1.0]] * 800)  # 1.96 standard errors of 0.5 / sqrt(1600) to each side
    assert (half.low, half.high) == pytest.approx((0.5 - 0.0245, 0.5 + 0.0245), abs=0.0012)
    with pytest.raises(ValueError, match="must be finite"):
        mean_at_k([[float("nan")]])


@pytest.mark.parametrize("count", [1, 4, 100])
def test_intervals_have_a_positive_width_even_if_all_problems_have_equal_scores(count):
    """Check 0 of n against the exact (Clopper-Pearson) upper limit 1 - 0.025^(1/n), and n of n as
    its mirror image.
    """
    limit = 1 - 0.025 ** (1 / count)
    for score in (mean_at_k, lambda r: pass_at_k(r, 1)):
        none, every = score(np.zeros((count, 1))), score(np.ones((count, 1)))
        assert (none.value, none.low) == (0, 0) and none.high == pytest.approx(limit)
        assert (every.value, every.high) == (1, 1) and every.low == pytest.approx(1 - limit)
    half = mean_at_k(np.full((count, 2), 0.5))
    assert half.low == pytest.approx(0.5 - limit / 2)
    assert half.high == pytest.approx(0.5 + limit / 2)
    majority = majority_at_k(np.zeros((count, 1)), [[None]] * count)
    assert majority.high == pytest.approx(limit)
