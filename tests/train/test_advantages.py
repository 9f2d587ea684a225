"""Test advantages against hand calculations, and check their invariants."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.train.advantages import compute_advantages

# Group 7 has rows 0, 2, 4 and 5, with rewards 1, 0, 0 and 0. Group 3 has rows 1, 3 and 6, with
# equal rewards. Group 5 has only row 7.
GROUPS = torch.tensor([7, 3, 7, 3, 7, 7, 3, 5])
REWARDS = torch.tensor([1.0, 0.1, 0.0, 0.1, 0.0, 0.0, 0.1, 1.0])


def rows(first: float, others: float) -> list[float]:
    return [first, 0.0, others, 0.0, others, others, 0.0, 0.0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        # mean 1/4, deviations 3/4 and -1/4, sum of squares 9/16 + 3/16 = 3/4, sample std sqrt((3/4)
        # / 3) = 1/2
        ("grpo", rows(1.5, -0.5)),
        ("dr_grpo", rows(0.75, -0.25)),
        # The mean of the other rewards is 0 for the first row, and 1/3 for the others.
        ("rloo", rows(1.0, -1 / 3)),
    ],
)
def test_advantages_match_a_hand_calculation(kind, expected):
    advantages, metrics = compute_advantages(kind, REWARDS, GROUPS)
    assert advantages.dtype == torch.float32
    assert advantages.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-12)
    assert metrics["zero_variance_fraction"] == pytest.approx(2 / 3)  # two of the three groups


@pytest.mark.parametrize("kind", ["grpo", "dr_grpo", "rloo"])
def test_equal_rewards_give_advantages_of_exactly_zero(kind):
    # In floating point, 3 * 0.1 / 3 is not exactly 0.1. A division by std + eps would amplify the
    # difference.
    rewards = torch.full((3,), 0.1, dtype=torch.float64)
    advantages, metrics = compute_advantages(kind, rewards, torch.zeros(3, dtype=torch.int64))
    assert advantages.tolist() == [0.0, 0.0, 0.0]
    assert metrics["zero_variance_fraction"] == 1.0


batches = st.lists(
    st.tuples(st.integers(0, 64), st.integers(-2, 2)), min_size=1, max_size=12
)  # multiples of 1/64 have exact sums


@settings(deadline=None)
@given(batches, st.randoms())
def test_each_kind_of_advantage_satisfies_its_invariants(batch, random):
    rewards = torch.tensor([reward / 64 for reward, _ in batch])
    groups = torch.tensor([group for _, group in batch])
    standard, centred, left_out = (
        compute_advantages(kind, rewards, groups)[0] for kind in ("grpo", "dr_grpo", "rloo")
    )
    for group in groups.unique():
        members = groups == group
        n = int(members.sum())
        for advantages in (standard, centred, left_out):
            assert advantages[members].sum().item() == pytest.approx(0.0, abs=1e-4)
        if n > 1:
            others = (rewards[members].sum() - rewards[members]) / (n - 1)
            torch.testing.assert_close(left_out[members], rewards[members] - others)
        if rewards[members].unique().numel() > 1:
            assert standard[members].std().item() == pytest.approx(1.0, rel=1e-3)
        else:
            assert standard[members].abs().max() == 0
    # The order of rows and the names of groups do not matter.
    order = torch.tensor(random.sample(range(len(batch)), len(batch)))
    again, _ = compute_advantages("grpo", rewards[order], 100 - groups[order])
    torch.testing.assert_close(again, standard[order])


def test_no_gradient_flows_to_the_rewards():
    rewards = REWARDS.clone().requires_grad_()
    for kind in ("grpo", "rloo"):
        assert not compute_advantages(kind, rewards, GROUPS)[0].requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: compute_advantages("grpo", REWARDS[:3], GROUPS), "same, non-zero length"),
        (lambda: compute_advantages("grpo", REWARDS[:0], GROUPS[:0]), "same, non-zero length"),
        (lambda: compute_advantages("grpo", REWARDS, GROUPS.float()), "integer group ids"),
        (
            lambda: compute_advantages("rloo", REWARDS.where(GROUPS != 5, torch.nan), GROUPS),
            "reward 7 is nan",
        ),
    ],
)
def test_invalid_arguments_raise_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()
