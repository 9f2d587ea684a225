"""Test the ceiling of p5: which dense rollouts contribute to it, and which ceiling applies to each
length.
"""

import json
from math import inf, isnan, log, nan

import numpy as np
import pytest

from sparrow.mismatch import BinMismatch, Ceiling, MismatchReport, mismatch_report
from sparrow.mismatch.ceiling import engine_noise, with_noise


def dense(*bins: tuple[int, float, int], width: int = 100) -> MismatchReport:
    """Return a report with these bins, each given as (index, p5, number of responses)."""
    empty = mismatch_report([1.0], [1.0], [0], [0], width)
    rows = (
        BinMismatch(i, i * width, (i + 1) * width, 99, n, 1, p5, p5 - 0.01, p5 + 0.01, 1)
        for i, p5, n in bins
    )
    return MismatchReport(**{**vars(empty), "bins": tuple(rows)})


def ceilings(ceiling: Ceiling, *indices: int) -> list[float]:
    return [b.ceiling for b in ceiling.on(dense(*((i, 0.5, 20) for i in indices))).bins]


def test_every_length_uses_the_nearest_measured_ceiling():
    ceiling = Ceiling()
    assert isnan(*ceilings(ceiling, 0)) and not ceiling
    ceiling.measure(dense((0, 0.95, 64), (2, 0.93, 20), (3, 0.5, 7)))
    assert ceilings(ceiling, 0, 2, 3, 9) == [
        0.95,
        0.93,
        0.93,
        0.93,
    ]  # seven responses are too few
    b = ceiling.on(dense((2, 0.5, 20))).bins[0]
    assert (b.ceiling_low, b.ceiling_high, b.lower_bound) == (0.93 - 0.01, 0.93 + 0.01, 0.5)
    ceiling.measure(dense((2, 0.91, 8), (0, 0.8, 7)))  # eight newer responses are enough
    assert ceilings(ceiling, 0, 2) == [0.95, 0.91]


def test_ceilings_apply_by_length_to_bins_of_a_different_width():
    ceiling = Ceiling()
    ceiling.measure(dense((0, 0.95, 64), (1, 0.93, 20), (2, 0.90, 20)))
    found = ceiling.on(dense((0, 0.5, 20), (4, 0.5, 20), width=50)).bins
    assert [b.ceiling for b in found] == [0.95, 0.90]


def test_only_lengths_that_were_read_in_full_contribute_to_the_ceiling():
    ceiling = Ceiling()
    ceiling.measure(dense((0, 0.95, 64), (1, 0.60, 64)), up_to=100)
    assert ceilings(ceiling, 0, 1) == [0.95, 0.95]


def test_state_with_a_single_response_bin_survives_a_json_round_trip():
    ceiling, again = Ceiling(), Ceiling()
    report = dense((0, 0.95, 64), (1, 0.93, 1))
    bins = (report.bins[0], BinMismatch(1, 100, 200, 9, 1, 1, 0.93, nan, nan, 1))
    ceiling.measure(MismatchReport(**{**vars(report), "bins": bins}))
    again.load(json.loads(json.dumps(ceiling.state(), allow_nan=False)))
    assert str(again.state()) == str(ceiling.state()) and ceilings(again, 0) == [0.95]


def test_sampler_noise_matches_a_hand_calculation():
    """Only two tokens are listed. All others are treated as a single token."""
    noise = engine_noise(np.log([[0.4, 0.4]]), np.log([[0.5, 0.3]]))
    np.testing.assert_allclose(noise, [[log(0.8), log(4 / 3), 0.0]], atol=1e-12)
    np.testing.assert_allclose(np.exp(with_noise(np.log([[0.5, 0.3]]), noise)), [[0.4, 0.4]])
    # With another schedule, probabilities 0.2, 0.6 and 0.2 become 0.16, 0.8 and 0.2 before they are
    # divided by their sum, 1.16.
    np.testing.assert_allclose(
        np.exp(with_noise(np.log([[0.2, 0.6]]), noise)), [[0.16 / 1.16, 0.8 / 1.16]]
    )


def test_noise_is_defined_for_complete_and_padded_lists():
    whole = np.array([[log(0.75), log(0.25), -inf]])
    noise = engine_noise(whole, whole)
    assert not noise.any()
    np.testing.assert_allclose(np.exp(with_noise(whole, noise)), [[0.75, 0.25, 0.0]], atol=2e-6)
    # A remaining mass of 0.001 is real, but a mass of 1e-7 is only a rounding error.
    for rest, expected in ((1e-3, log(1e-3 / 1e-2)), (1e-7, log(1e-6 / 1e-2))):
        assert engine_noise([[np.log1p(-rest)]], [[np.log1p(-1e-2)]])[0, 1] == pytest.approx(
            expected, abs=1e-6
        )
