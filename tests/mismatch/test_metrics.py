"""Test the scalars of a mismatch report against hand calculations."""

import numpy as np
import pytest

from sparrow.mismatch import mismatch_metrics, mismatch_report


def test_metric_names_contain_the_bin_and_unknown_values_are_omitted():
    lower = np.array([0.5, 1.0, 0.9])
    report = mismatch_report(
        lower, np.ones(3), np.array([0, 1, 7]), np.array([0, 1, 1]), bin_tokens=4
    )
    metrics = mismatch_metrics(report)
    assert metrics["sparrow/p5"] == metrics["sparrow/p5/0-4"] == pytest.approx(0.525)
    assert metrics["sparrow/p5/4-8"] == 0.9 and metrics["sparrow/p5/4-8/upper"] == 1.0
    assert "sparrow/p5/0-4/low" in metrics and "sparrow/p5/4-8/low" not in metrics
    assert (
        metrics["sparrow/acceptance_mean"] == pytest.approx(0.8)
        and metrics["sparrow/sequences"] == 2
    )


def test_only_an_upper_bound_is_logged_for_bins_sampled_by_the_dense_policy():
    lower, upper = np.array([0.5, 0.6, 0.9]), np.array([0.9, 0.95, 1.0])
    report = mismatch_report(lower, upper, np.array([0, 1, 7]), np.array([0, 1, 1]), bin_tokens=4)
    partly = mismatch_metrics(report, dense_up_to=4)
    assert partly["sparrow/p5"] == partly["sparrow/p5/4-8"] == 0.9
    assert partly["sparrow/p5/upper"] == 1.0 and partly["sparrow/acceptance_mean"] == 0.9
    assert "sparrow/p5/0-4" not in partly and "sparrow/p5/0-4/low" not in partly
    assert partly["sparrow/p5/0-4/upper"] == pytest.approx(0.9025)
    assert set(mismatch_metrics(report, dense_up_to=np.inf)) == {
        "sparrow/sequences",
        "sparrow/p5/0-4/upper",
        "sparrow/p5/0-4/upper/high",
        "sparrow/p5/4-8/upper",
    }
