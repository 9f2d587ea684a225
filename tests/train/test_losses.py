"""Test the policy loss against hand calculations, and check that it is exact under gradient
accumulation.

Shapes: B sequences, T response tokens.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.errors import ConfigError, TrainingDiverged
from sparrow.train.config import LossConfig
from sparrow.train.losses import (
    Normalizers,
    check_finite,
    count_normalizers,
    merge_metrics,
    policy_loss,
    reference_loss,
)

# Ratios pi/p_old 1.5 0.5 with advantage 1, and 1.5 0.5 0.5 with advantage -2; clip range 0.8 to 1.28.
#   1.5:  min( 1.5,  1.28) =  1.28, loss -1.28, clipped above  |  min(-3, -2.56) = -3,   loss 3
#   0.5:  min( 0.5,  0.8 ) =  0.5,  loss -0.5                  |  min(-1, -1.6 ) = -1.6, loss 1.6, clipped below
# Times the weights 2 1 | 1 1/2 0: -2.56 -0.5 | 3 0.8 0.
RATIO = torch.tensor([[1.5, 0.5, torch.nan], [1.5, 0.5, 0.5]], dtype=torch.float64)
MASK = torch.tensor([[True, True, False], [True, True, True]])
OLD = torch.full((2, 3), -1.0, dtype=torch.float64)
ADVANTAGES = torch.tensor([1.0, -2.0])
WEIGHT = torch.tensor([[2.0, 1.0, 9.0], [1.0, 0.5, 0.0]])
NORMALIZERS = Normalizers(sequences=2, tokens=5, max_length=10)


def example() -> torch.Tensor:
    return (OLD + RATIO.log()).requires_grad_()


@pytest.mark.parametrize(
    ("normalization", "expected"),
    [
        ("grpo", (-3.06 / 2 + 3.8 / 3) / 2),
        ("dapo", (-3.06 + 3.8) / 5),
        ("dr_grpo", (-3.06 + 3.8) / (2 * 10)),
    ],
)
def test_losses_match_a_hand_calculation(normalization, expected):
    config = LossConfig(normalization=normalization)
    loss, metrics = policy_loss(
        example(), OLD, ADVANTAGES, MASK, WEIGHT, config, count_normalizers(MASK, 10)
    )
    assert loss.item() == pytest.approx(expected)
    assert metrics == pytest.approx(
        {
            "loss": expected,
            "clip_low_fraction": 2 / 5,  # including the token with weight 0
            "clip_high_fraction": 1 / 5,
            "ratio_mean": 4.5 / 5,
            "approx_kl": 4.5 / 5 - 1 - math.log(1.5**2 * 0.5**3) / 5,
            "log_ratio_abs_max": math.log(2),
        }
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "low", "high"),
    [(1.5, 1, 0, 1), (1.5, -1, 0, 0), (0.5, 1, 0, 0), (0.5, -1, 1, 0)],
)
def test_each_clip_bound_applies_only_to_one_sign_of_the_advantage(ratio, advantage, low, high):
    one, mask = torch.ones(1, 1), torch.ones(1, 1, dtype=torch.bool)
    logp = (math.log(ratio) * one).requires_grad_()
    advantages = torch.tensor([float(advantage)])
    loss, metrics = policy_loss(
        logp, 0 * one, advantages, mask, one, LossConfig(), count_normalizers(mask, 1)
    )
    loss.backward()
    assert (metrics["clip_low_fraction"], metrics["clip_high_fraction"]) == (low, high)
    assert (logp.grad.item() == 0) == bool(low + high)


def test_the_gradient_matches_a_hand_calculation():
    logp = example()
    config = LossConfig(normalization="dapo")
    policy_loss(logp, OLD, ADVANTAGES, MASK, WEIGHT, config, NORMALIZERS)[0].backward()
    # -weight A ratio / 5, but 0 where the ratio is clipped, where the weight is 0, and on padding.
    expected = torch.tensor(
        [[0.0, -1 * 1 * 0.5 / 5, 0.0], [1 * 2 * 1.5 / 5, 0.0, 0.0]], dtype=torch.float64
    )
    torch.testing.assert_close(logp.grad, expected)


def test_clip_bounds_are_taken_from_the_settings():
    config = LossConfig(clip_low=0.6, clip_high=0.6, normalization="dapo")
    loss, metrics = policy_loss(example(), OLD, ADVANTAGES, MASK, WEIGHT, config, NORMALIZERS)
    assert metrics["clip_low_fraction"] == metrics["clip_high_fraction"] == 0.0
    # Unclipped: 2 * -1.5 - 0.5 + 3 + 0.5 * 1
    assert loss.item() == pytest.approx(0.0 / 5, abs=1e-12)


def test_on_policy_gradient_equals_the_reinforce_gradient():
    logp = OLD.clone().requires_grad_()
    config = LossConfig(normalization="dapo")
    policy_loss(logp, OLD, ADVANTAGES, MASK, torch.ones(2, 3), config, NORMALIZERS)[0].backward()
    torch.testing.assert_close(logp.grad, torch.where(MASK, -ADVANTAGES.double()[:, None] / 5, 0.0))


def test_dual_clip_matches_a_hand_calculation():
    # With c = 1.2, the second row's ratio of 1.5 counts as 1.2, and its ratio of 0.5 is still
    # clipped to 0.8. The first row, whose advantage is 1, is unchanged.
    config = LossConfig(clip_ratio_c=1.2)
    logp = example()
    loss, metrics = policy_loss(logp, OLD, ADVANTAGES, MASK, WEIGHT, config, NORMALIZERS)
    assert (
        loss.item() == pytest.approx((-3.06 + 2.4 + 0.8) / 5)
        and metrics["clip_c_fraction"] == 1 / 5
    )
    loss.backward()
    assert logp.grad[1, 0] == 0 and logp.grad[0, 1] != 0
    # This bound never applies to nonnegative advantages, however small they are.
    small = [
        policy_loss(logp, OLD, ADVANTAGES.abs() / 10, MASK, WEIGHT, c, NORMALIZERS)[0]
        for c in (config, LossConfig())
    ]
    assert small[0] == small[1]
    with pytest.raises(ConfigError, match=r"loss.clip_ratio_c is 1.0, but must be greater than 1"):
        LossConfig(clip_ratio_c=1.0)


def test_the_kl_to_the_reference_matches_a_hand_calculation():
    # The reference's probabilities are twice the policy's, so the KL is 2 - 1 - log 2 per token,
    # whatever the token's weight.
    logp = example()
    reference = torch.where(MASK, logp.detach() + math.log(2), math.inf)
    loss, metrics = reference_loss(logp, reference, MASK, LossConfig(beta=0.1), NORMALIZERS)
    assert metrics["kl"] == pytest.approx(1 - math.log(2))
    assert loss.item() == metrics["loss"] == pytest.approx(0.1 * (1 - math.log(2)))
    loss.backward()
    # d/dlogp of exp(r - logp) - (r - logp) - 1 is 1 - exp(r - logp) = -1, times beta over the
    # tokens.
    torch.testing.assert_close(logp.grad, torch.where(MASK, -0.1 / 5, 0.0).double())


def test_the_default_normalization_is_the_mean_over_tokens():
    assert LossConfig().normalization == "dapo"


def test_the_gradient_flows_only_through_the_policy():
    logp = example()
    others = [OLD.clone(), ADVANTAGES.clone(), WEIGHT.clone()]
    old, advantages, weight = (x.requires_grad_() for x in others)
    policy_loss(logp, old, advantages, MASK, weight, LossConfig(), NORMALIZERS)[0].backward()
    assert logp.grad is not None
    assert [x.grad for x in others] == [None] * 3


@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 1e30])
def test_padding_is_never_read(garbage):
    clean = example()
    reference, expected = policy_loss(
        clean, OLD, ADVANTAGES, MASK, WEIGHT, LossConfig(), NORMALIZERS
    )
    reference.backward()
    logp, old, weight = (torch.where(MASK, x.detach(), garbage) for x in (clean, OLD, WEIGHT))
    loss, metrics = policy_loss(
        logp.requires_grad_(), old, ADVANTAGES, MASK, weight, LossConfig(), NORMALIZERS
    )
    loss.backward()
    assert loss.item() == reference.item() and metrics == expected
    assert torch.equal(logp.grad, clean.grad)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_loss_of_half_precision_inputs_is_computed_in_float32(dtype):
    logp = OLD.to(dtype).requires_grad_()
    loss, _ = policy_loss(logp, OLD.to(dtype), ADVANTAGES, MASK, WEIGHT, LossConfig(), NORMALIZERS)
    assert loss.dtype == torch.float32


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=6).filter(any),
    cuts=st.sets(st.integers(1, 5)),
    normalization=st.sampled_from(["grpo", "dapo", "dr_grpo"]),
    seed=st.integers(0, 2**31),
)
def test_micro_batch_losses_and_gradients_add_up_to_those_of_the_batch(
    lengths, cuts, normalization, seed
):
    B, T = len(lengths), max(lengths)
    random = torch.Generator().manual_seed(seed)
    old, noise = (torch.randn(B, T, generator=random, dtype=torch.float64) for _ in range(2))
    advantages = torch.randn(B, generator=random, dtype=torch.float64)
    weight = 2 * torch.rand(B, T, generator=random, dtype=torch.float64)
    mask = torch.arange(T) < torch.tensor(lengths)[:, None]
    config = LossConfig(normalization=normalization)
    normalizers = count_normalizers(mask, max_length=8)

    def loss_of(rows: slice, logp: torch.Tensor):
        tensors = (logp[rows], old[rows], advantages[rows], mask[rows], weight[rows])
        return policy_loss(*tensors, config, normalizers)

    whole = (old + 0.5 * noise).requires_grad_()
    loss, metrics = loss_of(slice(None), whole)
    loss.backward()

    split = whole.detach().clone().requires_grad_()
    edges = [0, *sorted(cut for cut in cuts if cut < B), B]
    parts = [loss_of(slice(a, b), split) for a, b in itertools.pairwise(edges)]
    for part, _ in parts:
        part.backward()
    assert sum(part.item() for part, _ in parts) == pytest.approx(loss.item(), rel=1e-12, abs=1e-12)
    torch.testing.assert_close(split.grad, whole.grad, rtol=1e-12, atol=1e-12)
    assert merge_metrics(part for _, part in parts) == pytest.approx(metrics, rel=1e-12, abs=1e-12)


def test_normalizers_match_a_hand_calculation():
    mask = torch.tensor([[True, True], [False, False], [True, False]])
    assert count_normalizers(mask, 7) == Normalizers(sequences=2, tokens=3, max_length=7)
    assert count_normalizers(mask & False, 7) == Normalizers(sequences=1, tokens=1, max_length=7)


def test_merged_metrics_match_a_hand_calculation():
    parts = [{"loss": 0.25, "log_ratio_abs_max": 3.0}, {"loss": -1.0, "log_ratio_abs_max": 2.0}]
    assert merge_metrics(parts) == {"loss": -0.75, "log_ratio_abs_max": 3.0}


@pytest.mark.parametrize(
    "values", [(math.nan, 1.0, 2.0), (1.0, math.nan, 2.0), (1.0, 2.0, math.nan)]
)
def test_merged_metrics_preserve_nan(values):
    assert math.isnan(merge_metrics({"x_max": value} for value in values)["x_max"])


def test_an_exploding_ratio_is_detected():
    logp = OLD.clone()
    _, metrics = policy_loss(logp, OLD, ADVANTAGES, MASK, WEIGHT, LossConfig(), NORMALIZERS)
    check_finite(metrics, 20.0)
    logp[1, 2] += 21.0  # With weight 0, the loss is finite, but the policy has diverged.
    _, metrics = policy_loss(logp, OLD, ADVANTAGES, MASK, WEIGHT, LossConfig(), NORMALIZERS)
    check_finite(metrics, 21.5)
    with pytest.raises(
        TrainingDiverged, match=r"is 21, above the bound of 20; lower the learning rate"
    ):
        check_finite(metrics, 20.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 2000.0])
def test_a_non_finite_loss_is_detected(bad):
    logp = OLD.clone()
    logp[1, 0] += bad
    _, metrics = policy_loss(logp, OLD, ADVANTAGES, MASK, WEIGHT, LossConfig(), NORMALIZERS)
    with pytest.raises(TrainingDiverged, match=r"loss is (?:nan|inf), but must be finite"):
        check_finite(metrics, 20.0)


def test_non_finite_metrics_are_detected():
    with pytest.raises(TrainingDiverged, match="grad_norm is inf"):
        check_finite({"loss": 0.1, "grad_norm": math.inf}, 20.0)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Normalizers(sequences=1, tokens=1, max_length=0), "denominator below 1; every"),
        (
            lambda: policy_loss(OLD, OLD, ADVANTAGES[:1], MASK, WEIGHT, LossConfig(), NORMALIZERS),
            r"pass four tensors \[B, T\] and advantages \[B\]",
        ),
    ],
)
def test_invalid_arguments_raise_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "options",
    [{"clip_low": 1.5}, {"clip_high": 0.0}, {"max_log_ratio": math.inf}],
)
def test_invalid_loss_settings_raise_errors(options):
    (name,) = options
    with pytest.raises(ConfigError, match=rf"^loss\.{name} is .*, but must be .*$"):
        LossConfig(**options)
