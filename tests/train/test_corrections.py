"""Test mismatch corrections against hand calculations, and check properties that hold for any
batch.

Shapes: B sequences, T response tokens, V vocabulary.
"""

import math

import pytest
import torch
import tyro
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.errors import ConfigError
from sparrow.train.config import CorrectionConfig, LossConfig
from sparrow.train.corrections import Correction, compute_correction
from sparrow.train.losses import count_normalizers, policy_loss

KINDS = [
    "none",
    "token_tis",
    "sequence_tis",
    "geometric_tis",
    "icepop",
    "sparse_rl",
    "obrs",
    "m2po",
]


def batch(*ratios: list[float]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return log p, log q and the mask of right-padded sequences with these ratios p/q. log q is 0,
    so log p - log q is exact.
    """
    longest = max(len(row) for row in ratios)
    log_p_BT = torch.full(
        (len(ratios), longest), torch.nan, dtype=torch.float64
    )  # NaN padding must never be read
    for row, values in zip(log_p_BT, ratios, strict=True):
        row[: len(values)] = torch.tensor([math.log(r) for r in values], dtype=torch.float64)
    mask_BT = ~log_p_BT.isnan()
    return log_p_BT, torch.zeros_like(log_p_BT), mask_BT


# The first sequence has the ratios 1, 4 and 1/2 (product 2), the second 1/4 and 1/8 (product 1/32).
EXAMPLE = batch([1, 4, 0.5], [0.25, 0.125])


def correct(kind: str, log_p, log_q, mask, z_BT=None, uniform_BT=None, **options) -> Correction:
    generator = torch.Generator().manual_seed(0)
    z, uniform = (torch.rand(mask.shape, generator=generator) for _ in range(2))
    return compute_correction(
        CorrectionConfig(kind, **options),
        log_p,
        log_q,
        mask,
        z_BT=z if z_BT is None else z_BT,
        uniform_BT=uniform if uniform_BT is None else uniform_BT,
    )


def assert_correction(actual: Correction, weights: list[list[float]], kept: list[list[int]]):
    assert actual.weight_BT.dtype == torch.float32
    torch.testing.assert_close(actual.weight_BT, torch.tensor(weights, dtype=torch.float32))
    assert actual.mask_BT.tolist() == [[bool(k) for k in row] for row in kept]


UNCAPPED = 1e9


def test_metrics_without_a_correction_match_a_hand_calculation():
    correction = correct("none", *EXAMPLE)
    assert_correction(correction, [[1, 1, 1], [1, 1, 0]], [[1, 1, 1], [1, 1, 0]])
    assert correction.metrics == pytest.approx(
        {
            "ess_token": 1.0,
            "ess_sequence": 1.0,
            # products 2 and 1/32: (2 + 1/32)^2 / (2 (4 + 1/1024))
            "ess_sequence_ratio": 2.03125**2 / (2 * 4.0009765625),
            "clipped_fraction": 0.0,
            "masked_fraction": 0.0,
            "dropped_sequence_fraction": 0.0,
            "ratio_mean": 1.175,  # (1 + 4 + 1/2 + 1/4 + 1/8) / 5
            "ratio_max": 4.0,
            "kl_k1": 0.8 * math.log(2),  # -log(1 * 4 * 1/2 * 1/4 * 1/8) / 5 = log(16) / 5
            "kl_k3": 0.175 + 0.8 * math.log(2),  # mean(r) - 1 + k1
            "weight_mean": 1.0,
        }
    )


def test_empty_sequences_do_not_affect_the_correction():
    empty = correct("icepop", *batch([1, 4, 0.5], [], [0.25, 0.125]))
    assert empty.metrics == correct("icepop", *EXAMPLE).metrics
    assert empty.weight_BT[1].tolist() == [0, 0, 0]


def test_token_tis_matches_a_hand_calculation():
    correction = correct("token_tis", *EXAMPLE)
    assert_correction(correction, [[1, 2, 0.5], [0.25, 0.125, 0]], [[1, 1, 1], [1, 1, 0]])
    metrics = correction.metrics
    assert metrics["clipped_fraction"] == pytest.approx(1 / 5)
    assert metrics["weight_mean"] == pytest.approx(3.875 / 5)  # 1 + 2 + 1/2 + 1/4 + 1/8
    # sum of squares 1 + 4 + 1/4 + 1/16 + 1/64
    assert metrics["ess_token"] == pytest.approx(3.875**2 / (5 * 5.328125))
    # mean weights of the sequences: 3.5 / 3 = 56/48 and 0.375 / 2 = 9/48
    assert metrics["ess_sequence"] == pytest.approx((56 + 9) ** 2 / (2 * (56**2 + 9**2)))
    assert metrics["ratio_max"] == pytest.approx(4.0)  # raw, not truncated


def test_sequence_tis_matches_a_hand_calculation():
    product = correct("sequence_tis", *EXAMPLE, cap=1.5)
    assert_correction(product, [[1.5] * 3, [1 / 32, 1 / 32, 0]], [[1, 1, 1], [1, 1, 0]])
    assert product.metrics["clipped_fraction"] == pytest.approx(3 / 5)

    geometric = correct("geometric_tis", *EXAMPLE, cap=1.5)
    mean = 2 ** (1 / 3)  # for 1, 4 and 1/2; for 1/4 and 1/8 it is 2^-2.5
    assert_correction(geometric, [[mean] * 3, [2**-2.5, 2**-2.5, 0]], [[1, 1, 1], [1, 1, 0]])
    assert geometric.metrics["clipped_fraction"] == 0.0


def test_icepop_matches_a_hand_calculation():
    correction = correct(
        "icepop", *EXAMPLE
    )  # the band from 0.5 to 5 includes 0.5, but neither 1/4 nor 1/8
    assert_correction(correction, [[1, 4, 0.5], [0, 0, 0]], [[1, 1, 1], [0, 0, 0]])
    assert correction.metrics["masked_fraction"] == pytest.approx(2 / 5)
    assert correction.metrics["dropped_sequence_fraction"] == pytest.approx(1 / 2)
    assert correction.metrics["weight_mean"] == pytest.approx(5.5 / 5)
    assert correction.metrics["ess_sequence"] == pytest.approx(
        1 / 2
    )  # one of two sequences carries all the weight
    assert_correction(correct("icepop", *batch([5, 5.001])), [[5, 0]], [[1, 0]])
    assert_correction(
        correct("icepop", *EXAMPLE, band=(0.2, 3.0)),
        [[1, 0, 0.5], [0.25, 0, 0]],
        [[1, 0, 1], [1, 0, 0]],
    )


def test_sparse_rl_matches_a_hand_calculation():
    # In the first sequence, 4 and 1.6 are outside the band from 0.5 to 1.5. In the second, a ratio
    # below 1e-4 excludes the whole sequence.
    correction = correct("sparse_rl", *batch([1, 4, 0.5, 1.6, 1.5], [1, 9e-5, 1], [1, 2e-4]))
    assert_correction(
        correction,
        [[1, 0, 0.5, 0, 1.5], [0] * 5, [1, 0, 0, 0, 0]],
        [[1, 0, 1, 0, 1], [0] * 5, [1, 0, 0, 0, 0]],
    )
    assert correct("sparse_rl", *EXAMPLE, reject_below=0.2).mask_BT.tolist() == [
        [True, False, True],
        [False] * 3,
    ]
    assert correct("sparse_rl", *EXAMPLE, band=(0.2, 4.0)).mask_BT.tolist() == [
        [True] * 3,
        [True, False, False],
    ]
    assert correction.metrics["masked_fraction"] == pytest.approx(6 / 10)
    assert correction.metrics["dropped_sequence_fraction"] == pytest.approx(1 / 3)


def test_obrs_matches_a_hand_calculation():
    z_BT = torch.tensor([[0.8, 0.6, 0.5], [0.9, 0.4, torch.nan]])
    uniform_BT = torch.tensor([[0.9, 0.9, 0.4], [0.3, 0.1, torch.nan]])
    # The acceptance probabilities min(1, r) are 1, 1, 1/2 | 1/4, 1/8. All tokens except the fourth
    # are accepted, with weight Z max(1, r).
    correction = correct("obrs", *EXAMPLE, z_BT=z_BT, uniform_BT=uniform_BT, cap=UNCAPPED)
    assert_correction(correction, [[0.8, 2.4, 0.5], [0, 0.4, 0]], [[1, 1, 1], [0, 1, 0]])
    capped = correct("obrs", *EXAMPLE, z_BT=z_BT, uniform_BT=uniform_BT, cap=2.0)
    assert_correction(capped, [[0.8, 2.0, 0.5], [0, 0.4, 0]], [[1, 1, 1], [0, 1, 0]])
    assert capped.metrics["clipped_fraction"] == pytest.approx(1 / 5)
    # With lambda = 2, the probabilities are 1/2, 1, 1/4 | 1/8, 1/16, and the weight is Z max(2, r).
    uniform_BT[0, 0] = 0.4
    half = correct(
        "obrs", *EXAMPLE, z_BT=z_BT, uniform_BT=uniform_BT, obrs_lambda=2.0, cap=UNCAPPED
    )
    assert_correction(half, [[1.6, 2.4, 0], [0, 0, 0]], [[1, 1, 0], [0, 0, 0]])


def test_obrs_tolerates_a_normalizer_rounded_above_one():
    assert (
        correct(
            "obrs", *EXAMPLE, z_BT=torch.full((2, 3), 1 + 1e-6), uniform_BT=torch.zeros(2, 3)
        ).mask_BT.sum()
        == 5
    )


def test_m2po_matches_a_hand_calculation():
    # log r: 0.5 0.1 | -0.2 0.3, squares 0.25 0.01 | 0.04 0.09; means of the smallest 0.01 0.025
    # 0.0467 0.0975
    example = batch([math.exp(0.5), math.exp(0.1)], [math.exp(-0.2), math.exp(0.3)])
    two = [[0, math.exp(0.1)], [math.exp(-0.2), 0]]
    assert_correction(correct("m2po", *example), two, [[0, 1], [1, 0]])
    assert_correction(
        correct("m2po", *example, m2_bound=0.05),
        [two[0], [two[1][0], math.exp(0.3)]],
        [[0, 1], [1, 1]],
    )
    nothing = correct("m2po", *example, m2_bound=0.005)
    assert_correction(nothing, [[0, 0], [0, 0]], [[0, 0], [0, 0]])
    assert nothing.metrics["ess_token"] == nothing.metrics["ess_sequence"] == 0.0
    assert nothing.metrics["masked_fraction"] == nothing.metrics["dropped_sequence_fraction"] == 1.0


def test_obrs_requires_random_draws():
    with pytest.raises(ValueError, match="pass z_BT and uniform_BT"):
        compute_correction(CorrectionConfig("obrs"), *EXAMPLE)


log_ratios = st.one_of(st.floats(-0.5, 0.5), st.floats(-20, 20), st.just(0.0))
sequences = st.lists(st.lists(log_ratios, max_size=6), min_size=1, max_size=4).filter(any)


def padded(
    rows: list[list[float]], padding: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    T = max(map(len, rows))
    log_r = torch.tensor([row + [padding] * (T - len(row)) for row in rows], dtype=torch.float64)
    mask = torch.tensor([[t < len(row) for t in range(T)] for row in rows])
    log_q = torch.full_like(log_r, -3.0)
    return log_q + log_r, log_q, mask


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(sequences)
def test_weights_masks_and_metrics_are_valid_for_any_batch(kind, rows):
    log_p, log_q, mask = padded(rows)
    correction = correct(kind, log_p, log_q, mask)
    weight, kept, metrics = correction.weight_BT, correction.mask_BT, correction.metrics
    assert not (kept & ~mask).any()
    assert (weight[~kept] == 0).all()
    assert weight.isfinite().all() and (weight >= 0).all()
    upper = {
        "none": 1.0,
        "token_tis": 2,
        "sequence_tis": 2,
        "geometric_tis": 2,
        "icepop": 5,
        "sparse_rl": 1.5,
        "obrs": 2,
    }
    assert weight.max() <= upper.get(kind, math.inf)
    if kind in ("icepop", "sparse_rl"):
        assert (weight[kept] >= 0.5 * (1 - 1e-6)).all()

    assert all(map(math.isfinite, metrics.values()))
    shares = [name for name in metrics if name.startswith("ess") or name.endswith("fraction")]
    assert len(shares) == 6
    assert all(-1e-12 <= metrics[name] <= 1 + 1e-12 for name in shares)
    assert metrics["kl_k3"] >= 0
    assert metrics["ratio_max"] >= metrics["ratio_mean"] * (1 - 1e-12) > 0

    # Padding is never read, not even by sums over a sequence.
    poisoned = correct(kind, *padded(rows, padding=math.nan))
    assert torch.equal(poisoned.weight_BT, weight) and torch.equal(poisoned.mask_BT, kept)
    assert poisoned.metrics == metrics


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "obrs"])
@settings(deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_corrections_do_not_change_a_batch_without_mismatch(kind, lengths):
    log_p, _, mask = padded([[0.3] * length for length in lengths])
    correction = correct(kind, log_p, log_p, mask)
    assert torch.equal(correction.weight_BT, mask.float()) and torch.equal(correction.mask_BT, mask)
    for name, value in correction.metrics.items():
        one = name.startswith(("ess", "ratio", "weight"))
        assert value == pytest.approx(1.0 if one else 0.0, abs=1e-12), name


@settings(deadline=None)
@given(sequences, st.floats(1e-3, 2.0))
def test_m2po_keeps_as_many_tokens_as_the_bound_allows(rows, bound):
    log_p, log_q, mask = padded(rows)
    kept = correct("m2po", log_p, log_q, mask, m2_bound=bound).mask_BT
    m2 = (log_p - log_q).square()
    dropped = sorted(m2[mask & ~kept].tolist())
    if kept.any():
        assert m2[kept].mean().item() <= bound * (1 + 1e-12)
    if dropped:
        assert dropped[0] >= m2[kept].max().item() if kept.any() else True
        assert torch.tensor([*m2[kept].tolist(), dropped[0]]).double().mean().item() > bound * (
            1 - 1e-12
        )


distributions = st.lists(st.floats(0.01, 1.0), min_size=5, max_size=5).map(
    lambda weights: torch.tensor(weights, dtype=torch.float64) / sum(weights)
)


@settings(deadline=None)
@given(distributions, distributions, st.floats(0.5, 3.0))
def test_obrs_preserves_the_expectation_under_the_target_policy(p_V, q_V, obrs_lambda):
    """For every token v of the vocabulary, q(v) P(accept v) weight(v) = Z p(v)."""
    log_p, log_q = p_V.log()[None], q_V.log()[None]
    z = torch.minimum(q_V, p_V / obrs_lambda).sum()
    accept_V = (p_V / (obrs_lambda * q_V)).clamp(max=1.0)
    options = dict(z_BT=z.expand(1, 5), obrs_lambda=obrs_lambda, cap=UNCAPPED)
    mask = torch.ones(1, 5, dtype=torch.bool)
    below = correct("obrs", log_p, log_q, mask, uniform_BT=(accept_V * (1 - 1e-9))[None], **options)
    above = correct(
        "obrs",
        log_p,
        log_q,
        mask,
        uniform_BT=(accept_V * (1 + 1e-9)).clamp(max=1 - 1e-12)[None],
        **options,
    )
    assert below.mask_BT.all()
    assert torch.equal(above.mask_BT[0], accept_V == 1)
    torch.testing.assert_close(
        q_V * accept_V * below.weight_BT[0].double(), z * p_V, rtol=1e-5, atol=1e-8
    )


def test_obrs_is_unbiased_when_averaged_over_a_grid_of_draws():
    """Check the expectation without the acceptance probability, by averaging over 10,000 evenly
    spaced draws.
    """
    p_V, q_V = (
        torch.tensor([0.5, 0.3, 0.15, 0.05]).double(),
        torch.tensor([0.1, 0.3, 0.2, 0.4]).double(),
    )
    n = 10_000
    uniform = ((torch.arange(n).double() + 0.5) / n)[:, None].expand(n, 4)
    log_p, log_q, mask = (
        p_V.log().expand(n, 4),
        q_V.log().expand(n, 4),
        torch.ones(n, 4, dtype=torch.bool),
    )
    z = torch.full((n, 4), 0.1 + 0.3 + 0.15 + 0.05).double()
    correction = correct("obrs", log_p, log_q, mask, z_BT=z, uniform_BT=uniform, cap=UNCAPPED)
    torch.testing.assert_close(
        q_V * correction.weight_BT.double().mean(0), 0.6 * p_V, rtol=0, atol=1e-4
    )
    # Dividing the sum by the number of accepted draws, rather than by all draws, cancels Z. The
    # result estimates E_p itself.
    accepted = (q_V * correction.mask_BT.double().mean(0)).sum().item()
    assert accepted == pytest.approx(0.6, abs=1e-4)


@pytest.mark.parametrize("obrs_lambda", [1.0, 2.0, 4.0])
def test_obrs_does_not_scale_the_gradient_if_the_actor_is_the_policy(obrs_lambda):
    B = 64
    T = 200
    logp = torch.full((B, T), math.log(0.1), requires_grad=True)
    fixed = logp.detach()
    mask = torch.ones(B, T, dtype=torch.bool)
    correction = correct(
        "obrs", fixed, fixed, mask, torch.full((B, T), 1 / obrs_lambda), obrs_lambda=obrs_lambda
    )
    counted = correction.counted_BT
    loss, _ = policy_loss(
        logp,
        fixed,
        torch.ones(B),
        counted,
        correction.weight_BT,
        LossConfig(),
        count_normalizers(counted, T),
    )
    loss.backward()
    assert -logp.grad.sum().item() == pytest.approx(1.0)


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_counts_masked_out_tokens_except_with_obrs(kind):
    correction = correct(kind, *EXAMPLE)
    expected = correction.mask_BT if kind == "obrs" else EXAMPLE[-1]
    assert torch.equal(correction.counted_BT, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", KINDS)
def test_sequences_of_32k_tokens_neither_overflow_nor_underflow(kind, dtype):
    T = 32_768
    log_q = torch.full((2, T), -1.0, dtype=dtype)
    log_p = log_q + torch.tensor([[0.5], [-0.5]], dtype=dtype)  # products e^16384 and e^-16384
    correction = correct(kind, log_p, log_q, torch.ones(2, T, dtype=torch.bool))
    assert correction.weight_BT.isfinite().all()
    assert all(map(math.isfinite, correction.metrics.values()))
    assert correction.metrics["ess_sequence_ratio"] == pytest.approx(
        0.5
    )  # one of the two outweighs everything else
    expected = {"sequence_tis": (2.0, 0.0), "geometric_tis": (math.exp(0.5), math.exp(-0.5))}
    if kind in expected:
        assert correction.weight_BT[:, 0].tolist() == pytest.approx(expected[kind])


def test_the_product_of_32k_ratios_is_precise():
    log_q = torch.full((1, 32_768), -0.7, dtype=torch.float64)
    correction = correct(
        "sequence_tis", log_q + 1e-5, log_q, torch.ones(1, 32_768, dtype=torch.bool)
    )
    assert correction.weight_BT[0, 0].item() == pytest.approx(math.exp(0.32768), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_flows_through_corrections(kind):
    log_p, log_q, mask = padded([[0.1, -0.3], [0.2]])
    assert not correct(
        kind, log_p.requires_grad_(), log_q.requires_grad_(), mask
    ).weight_BT.requires_grad


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: correct("none", EXAMPLE[0], EXAMPLE[1][:1], EXAMPLE[2]),
            r"the same shape \[B, T\]",
        ),
        (lambda: correct("none", EXAMPLE[0], EXAMPLE[1], EXAMPLE[2].float()), "pass a bool tensor"),
        (lambda: correct("none", EXAMPLE[0], EXAMPLE[1], EXAMPLE[2] & False), "no response token"),
        (
            lambda: correct("none", EXAMPLE[0], EXAMPLE[1] - math.inf, EXAMPLE[2]),
            "token 0 of sequence 0 .* log q -inf",
        ),
        (
            lambda: correct(
                "obrs", *EXAMPLE, z_BT=torch.ones(2, 3), uniform_BT=torch.full((2, 3), 1.5)
            ),
            r"uniform_BT is outside \[0, 1\]",
        ),
        (
            lambda: correct("obrs", *EXAMPLE, z_BT=torch.ones(2), uniform_BT=torch.ones(2, 3)),
            r"z_BT has shape \(2,\)",
        ),
        (
            lambda: correct(
                "obrs", *EXAMPLE, z_BT=torch.full((2, 3), 1.001), uniform_BT=torch.zeros(2, 3)
            ),
            r"z_BT is outside \[0, 1\]",
        ),
    ],
)
def test_invalid_arguments_raise_errors(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    "options",
    [
        {"cap": 0.0},
        {"cap": math.nan},
        {"band": (1.5, 0.5)},
        {"reject_below": 1.0},
        {"obrs_lambda": 0.0},
        {"m2_bound": -0.04},
    ],
)
def test_invalid_correction_settings_raise_errors(options):
    (name,) = options
    with pytest.raises(
        ConfigError,
        match=rf"^correction\.{name} is .*, but must be .*$",
    ):
        CorrectionConfig(**options)


def test_correction_settings_can_be_given_on_the_command_line():
    parsed = tyro.cli(CorrectionConfig, args=["--kind", "icepop", "--band", "0.4", "3"])
    assert parsed == CorrectionConfig(kind="icepop", band=(0.4, 3.0))
    assert tyro.cli(CorrectionConfig, args=[]) == CorrectionConfig(kind="token_tis", cap=2.0)
