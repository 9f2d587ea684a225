"""Test the fit of a Beta distribution to the tail: it must recover known parameters, and weighting
a sequence must give the same KS distance as repeating its tokens.

Shapes: T tokens.
"""

import math
import warnings

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

MODULES = ("beta_tail",)
FOLDERS = ("studies/common",)


@pytest.mark.parametrize(("a", "b"), [(2.0, 5.0), (0.4, 0.3), (8.0, 0.6), (300.0, 40.0)])
def test_the_beta_fit_recovers_known_parameters(study, a, b):
    rng = np.random.default_rng(7)
    tail = 0.999 * rng.beta(a, b, 20_000)
    head = rng.uniform(0.9991, 1.0, 60_000)
    fit = study.beta_tail.beta_tail_fit(np.concatenate([head, tail]))
    assert (fit.n, fit.fraction_in_tail, fit.cut) == (20_000, 0.25, 0.999)
    assert fit.a == pytest.approx(a, rel=0.04)  # about three standard errors at this size
    assert fit.b == pytest.approx(b, rel=0.04)
    assert fit.ks < 0.012  # 1.63 / sqrt(n), the 1 % point of the Kolmogorov distribution
    assert fit.variance == pytest.approx(tail.var(), rel=0.03)


@pytest.mark.parametrize(
    "mirror", [False, True]
)  # the largest distance is above the fit in one case, and below it in the other
def test_the_beta_fit_agrees_with_scipy(study, mirror):
    tail = np.random.default_rng(3).beta(1.7, 0.8, 500)
    tail = 1 - tail if mirror else tail
    fit = study.beta_tail.beta_tail_fit(tail, cut=1.0)
    a, b, _, _ = stats.beta.fit(tail, floc=0, fscale=1)
    assert (fit.a, fit.b) == pytest.approx((a, b), rel=1e-4)
    assert fit.ks == pytest.approx(
        stats.kstest(tail, stats.beta(fit.a, fit.b).cdf).statistic, abs=1e-12
    )


def test_the_ks_distance_of_the_beta_fit_is_large_for_other_distributions(study):
    two_clumps = np.concatenate([np.linspace(0.2, 0.21, 500), np.linspace(0.7, 0.71, 500)])
    assert study.beta_tail.beta_tail_fit(two_clumps).ks > 0.2


def test_the_beta_variance_matches_a_hand_calculation(study):
    # Beta(1, 1) on [0, 0.6] is uniform: variance 0.36 / 12.
    uniform = study.beta_tail.BetaTail(a=1.0, b=1.0, ks=0.0, n=10, fraction_in_tail=1.0, cut=0.6)
    assert uniform.variance == pytest.approx(0.03)


def test_no_beta_distribution_is_fitted_without_a_tail(study):
    assert study.beta_tail.beta_tail_fit([]) is None
    assert study.beta_tail.beta_tail_fit(np.ones(1000)) is None
    assert study.beta_tail.beta_tail_fit(np.linspace(0.1, 0.9, 9)) is None
    assert study.beta_tail.beta_tail_fit(np.full(1000, 0.7)) is None
    assert study.beta_tail.beta_tail_fit(np.zeros(1000)) is None
    assert study.beta_tail.beta_tail_fit(np.linspace(0.1, 0.9, 10)).n == 10


def test_the_beta_fit_accepts_values_at_zero_and_at_the_cutoff(study):
    tail = 0.999 * np.random.default_rng(5).beta(2.0, 1.0, 5000)
    tail[:5], tail[5:10] = 0.0, 0.999
    fit = study.beta_tail.beta_tail_fit(tail)
    inside = study.beta_tail.beta_tail_fit(np.clip(tail, 0.999 * 1e-6, 0.999 * (1 - 1e-6)))
    assert fit.n == 5000
    assert (fit.a, fit.b) == pytest.approx((inside.a, inside.b), rel=1e-5)
    assert (fit.a, fit.b) == pytest.approx((2.0, 1.0), rel=0.08)
    # The KS statistic uses the original values. Half of the tokens are exactly zero, so it is at
    # least 0.5.
    tail[:2500] = 0.0
    assert study.beta_tail.beta_tail_fit(tail).ks >= 0.5


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([0.0, 1e-9, 0.3, 0.3 + 2e-6, 0.5, 0.9, 0.999, 1.0]), max_size=40),
    st.lists(st.floats(0, 1), max_size=40),
)
def test_the_beta_fit_is_finite_for_any_input(study, atoms, others):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fit = study.beta_tail.beta_tail_fit(atoms + others)
    if fit is not None:
        assert fit.a > 0 and fit.b > 0 and np.isfinite([fit.a, fit.b]).all()
        assert 0 < fit.ks <= 1 and 10 <= fit.n <= len(atoms + others)


@pytest.mark.parametrize(
    ("alpha", "cut", "message"), [([0.5], 0.0, "cut is 0"), ([-0.1], 0.9, "from -0.1")]
)
def test_beta_fit_of_invalid_input_raises_an_error(study, alpha, cut, message):
    with pytest.raises(ValueError, match=message):
        study.beta_tail.beta_tail_fit(alpha, cut)


def test_weighting_sequences_gives_the_same_ks_distance_as_repeating_their_tokens(study):
    rng = np.random.default_rng(4)
    values, sequence = (
        np.where(rng.random(400) < 0.4, 1, rng.beta(3, 0.6, 400)),
        np.repeat(np.arange(8), 50),
    )
    values[sequence == 7] = 1
    weights = np.array([[1.0] * 8, [2, 0, 3, 1, 1, 0, 1, 0], [0] * 7 + [8]])
    first, second, none = study.beta_tail.weighted_beta_ks(values, sequence, weights)
    assert first == study.beta_tail.beta_tail_fit(values).ks
    assert (
        second
        == pytest.approx(
            study.beta_tail.beta_tail_fit(np.repeat(values, weights[1][sequence].astype(int))).ks
        )
        and second != first
    )
    assert math.isnan(none)  # no token of this sequence is in the tail
