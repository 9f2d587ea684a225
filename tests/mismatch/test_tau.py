"""Test absolute and relative tau: quadrature, intervals, verdicts, and values that cannot be
reached.
"""

from dataclasses import replace
from math import isnan, nan

import numpy as np
import pytest

from sparrow.mismatch import BinMismatch, Tau, acceptance, relative_p5, relative_span


def measured(p5: float, half=0.01, upper=None, ceiling=(nan, nan, nan)) -> BinMismatch:
    upper = p5 if upper is None else upper
    ends = (p5 - half, p5 + half, upper, *ceiling, upper + half)
    return BinMismatch(3, 300, 400, 99, 20, 0.99, p5, *ends)


def test_relative_p5_subtracts_noise_in_quadrature():
    # In total, 0.13 is rejected. Noise accounts for 0.05 and sparsity for 0.12, since 5^2 + 12^2 =
    # 13^2.
    assert relative_p5(0.87, 0.95) == pytest.approx(0.88)
    assert Tau(0.88, relative=True).level(0.95) == pytest.approx(0.87)
    assert relative_p5(0.87, 1.0) == pytest.approx(0.87) and Tau(0.87).level(0.95) == 0.87
    assert relative_p5(0.95, 0.95) == relative_p5(0.96, 0.95) == 1
    assert isnan(relative_p5(0.9, nan))


def softmax(logits: np.ndarray) -> np.ndarray:
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


@pytest.mark.parametrize("noise", [0.1, 0.25])
def test_independent_logit_errors_add_in_quadrature_in_the_tail(noise):
    """Sample distributions from nearly flat to nearly one-hot. Errors from sparsity are rare and
    large, whereas noise affects every token.
    """
    rng = np.random.default_rng(0)
    T, V = 40_000, 12
    logits = rng.standard_normal((T, V)) * rng.exponential(4, (T, 1))
    sparse = rng.standard_normal((T, V)) * 0.3 * rng.standard_exponential((T, 1)) ** 2

    def p5(error):
        return float(np.percentile(acceptance(softmax(logits), softmax(logits + error)), 5))

    ceiling = p5(noise * rng.standard_normal((T, V)))
    for strength in (0.5, 1.0, 2.0):
        alone, both = (
            p5(strength * sparse),
            p5(strength * sparse + noise * rng.standard_normal((T, V))),
        )
        assert abs(relative_p5(both, ceiling) - alone) < 0.02
        if alone > 0.7:  # the ratio and the difference are twice as far off
            assert min(both / ceiling, 1 - (ceiling - both)) - alone > 2 * abs(
                relative_p5(both, ceiling) - alone
            )


def test_interval_of_relative_p5_combines_the_intervals_of_p5_and_the_ceiling():
    estimate, lower, upper = relative_span((0.87, 0.86, 0.88), (0.95, 0.94, 0.96))
    assert estimate == pytest.approx(0.88)
    # (0.13^2 - 0.05^2) + hypot(0.14^2 - 0.13^2, 0.05^2 - 0.04^2) = 0.0144 + 0.002846
    assert lower == pytest.approx(1 - np.sqrt(0.0144 + np.hypot(0.0027, 0.0009)))
    assert upper == pytest.approx(1 - np.sqrt(0.0144 - np.hypot(0.0025, 0.0011)))
    assert relative_span((0.9, 0.89, 0.91), (1.0, 1.0, 1.0)) == pytest.approx((0.9, 0.89, 0.91))
    exact, unknown, _ = relative_span((0.9, nan, nan), (0.95, 0.94, 0.96))
    assert not isnan(exact) and isnan(unknown)
    # When p5 equals the ceiling, the interval is wide: the estimate is 1, but 0.9623 is also
    # possible.
    assert relative_span((0.95, 0.94, 0.96), (0.95, 0.94, 0.96)) == pytest.approx(
        (1.0, 0.9623, 1.0), abs=1e-3
    )


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
def test_at_least_nine_out_of_ten_intervals_contain_the_true_value(noise):
    """Draw both p5 values around known values, as if they came from independent rollouts."""
    rng = np.random.default_rng(1)
    truth, spread = 0.9, 0.004
    p5 = 1 - np.hypot(1 - truth, noise) + spread * rng.standard_normal(2000)
    ceiling = 1 - noise + spread * rng.standard_normal(2000)
    spans = [
        relative_span(
            (a, a - 1.96 * spread, a + 1.96 * spread), (c, c - 1.96 * spread, c + 1.96 * spread)
        )
        for a, c in zip(p5, ceiling, strict=True)
    ]
    held = np.mean([low <= truth <= high for _, low, high in spans])
    assert 0.93 <= held <= 0.97


def test_verdicts_use_the_requested_scale():
    noisy = measured(0.87, ceiling=(0.95, 0.945, 0.955))
    assert Tau(0.86).verdict(noisy) == Tau(0.86, relative=True).verdict(noisy) == "holds"
    assert Tau(0.9).verdict(noisy) == "below" and Tau(0.9, relative=True).verdict(noisy) == "below"
    # A p5 of 0.87 that is close to the ceiling meets relative tau, but not absolute tau.
    close = measured(0.87, ceiling=(0.88, 0.875, 0.885))
    assert Tau(0.9).verdict(close) == "below" and Tau(0.9, relative=True).verdict(close) == "holds"
    assert Tau(0.5, relative=True).verdict(measured(0.87)) == "undecided", "no ceiling was measured"
    assert Tau(0.9).scale([noisy]) == (noisy,)
    high = replace(noisy, upper_bound=0.94, upper_bound_high=0.945)
    (scaled,) = Tau(0.9, relative=True).scale([high])
    assert scaled.lower_bound == pytest.approx(0.88) and scaled.upper_bound == pytest.approx(
        relative_p5(0.94, 0.95)
    )
    _, _, end = relative_span((0.94, 0.94, 0.945), (0.95, 0.945, 0.955))
    assert scaled.upper_bound < scaled.upper_bound_high == pytest.approx(end)
    assert (scaled.bin, scaled.n_sequences, scaled.ceiling) == (
        noisy.bin,
        noisy.n_sequences,
        noisy.ceiling,
    )


def test_tau_that_dense_rollouts_miss_is_reported_in_one_sentence():
    bins = [
        measured(0.9, ceiling=(0.999, 0.998, 1.0)),
        measured(0.9, ceiling=(0.951, 0.948, 0.955)),
    ]
    said = Tau(0.98).out_of_reach(bins)
    assert (
        said is not None
        and "dense rollouts of this engine have p5 0.951 [0.948, 0.955], so no schedule" in said
    )
    assert (
        "can be shown to reach 0.98; lower tau, or make engine and trainer agree more closely"
        in said
    )
    assert Tau(0.955).out_of_reach(bins) is None
    # A relative tau of 0.9 is far enough below the ceiling, but 0.99 cannot be distinguished from
    # it.
    assert Tau(0.9, relative=True).out_of_reach(bins) is None
    said = Tau(0.99, relative=True).out_of_reach(bins)
    assert (
        said is not None
        and "and relative tau 0.99 lets p5 fall to 0.950, which is not significantly lower" in said
    )
    assert "lower relative tau, sample more responses, or make" in said
    assert Tau(0.99, relative=True).out_of_reach([measured(0.9)]) is None


def test_relative_and_absolute_tau_have_distinct_names():
    assert str(Tau(0.86)) == "tau 0.86" and str(Tau(0.86, relative=True)) == "relative tau 0.86"
    assert Tau(0.86).statistic == "p5" and Tau(0.86, relative=True).statistic == "relative p5"
    assert Tau.chosen(0.9, None) == Tau(0.9) and Tau.chosen(None, 0.9) == Tau(0.9, relative=True)
