"""Test that counts of draft acceptance by length preserve the statistics of the counted values."""

import json
import math

import numpy as np
import pytest

from sparrow.engines.base import Counters
from sparrow.mismatch.drafts import BUCKETS, DraftAcceptance


def test_counts_preserve_the_mean_and_percentile_of_every_bin():
    rng = np.random.default_rng(0)
    alpha, position = rng.beta(9, 1, 20_000), rng.integers(0, 7000, 20_000)
    position[position // 2000 == 1] += 2000  # one bin stays empty
    found = DraftAcceptance.of(alpha, position, 2000)
    assert [(b.start, b.end) for b in found.bins()] == [(0, 2000), (4000, 6000), (6000, 8000)]
    for b in found.bins():
        inside = alpha[(position >= b.start) & (position < b.end)]
        assert b.drafts == len(inside)
        assert abs(b.mean - inside.mean()) < 1e-12
        assert abs(b.p5 - np.percentile(inside, 5, method="inverted_cdf")) < 1 / BUCKETS
    assert abs(found.mean - alpha.mean()) < 1e-12 and found.drafts == 20_000
    assert abs(found.percentile(50) - np.median(alpha)) < 1 / BUCKETS


def test_percentiles_match_a_hand_calculation():
    # Each of four drafts accounts for a quarter, so the 5th percentile is a fifth of the way into
    # the first draft's bucket.
    found = DraftAcceptance.of([0.2, 0.4, 0.6, 1.0], [5, 5, 5, 5], 10)
    assert abs(found.percentile(5) - (0.2 + 0.2 / BUCKETS)) < 1e-9
    assert found.percentile() == found.percentile(5)
    assert abs(found.percentile(100) - 1) < 1e-9 and abs(found.mean - 0.55) < 1e-12


def test_counts_of_different_lengths_can_be_added():
    parts = [
        DraftAcceptance.of([0.5, 0.9], [10, 20], 16),
        DraftAcceptance.of([0.7], [50], 16),
        DraftAcceptance.empty(),
    ]
    both = parts[2] + parts[0] + parts[1] + parts[2]
    assert [(b.start, b.drafts, b.mean) for b in both.bins()] == [
        (0, 1, 0.5),
        (16, 1, 0.9),
        (48, 1, 0.7),
    ]
    with pytest.raises(ValueError, match="bins of 16 tokens to counts in bins of 32 tokens"):
        parts[0] + DraftAcceptance.of([0.5], [0], 32)


def test_acceptance_is_undefined_without_drafts():
    none = DraftAcceptance.empty()
    assert (
        none.bins() == []
        and none.drafts == 0
        and math.isnan(none.mean)
        and math.isnan(none.percentile())
    )
    assert DraftAcceptance.of([], np.zeros(0, int), 2000).drafts == 0
    with pytest.raises(ValueError, match=r"range from 1\.5"):
        DraftAcceptance.of([1.5], [0], 2000)


def test_counters_are_logged_as_plain_numbers():
    alpha = DraftAcceptance.of([0.5, 0.9, 1.0], [10, 20, 2010], 2000)
    found = Counters(30, 60, drafted=16, accepted=6, cycles=2, acceptance=alpha).to_dict()
    assert found["kv"] == {
        "read_fraction": 0.5,
        "tokens_read": 30,
        "tokens_held": 60,
        "preemptions": 0,
    }
    lossy = Counters(30, 60, rows=8, dense_rows=2) + Counters(0, 0, rows=2)
    assert lossy.to_dict()["kv"]["dense_fraction"] == 0.2
    drafts = json.loads(json.dumps(found["drafts"]))
    counts = {
        "drafted": 16,
        "accepted": 6,
        "cycles": 2,
        "tokens_per_cycle": 4.0,
        "drafts_per_token": 2.0,
    }
    assert {name: drafts[name] for name in counts} == counts
    assert abs(drafts["acceptance"] - 0.8) < 1e-12
    assert [(b["start"], b["end"], b["drafts"]) for b in drafts["bins"]] == [
        (0, 2000, 2),
        (2000, 4000, 1),
    ]
    assert "metered" not in drafts
    both = Counters(
        30, 60, cycles=2, acceptance=alpha, metered=DraftAcceptance.of([0.25], [30], 2000)
    ) + Counters(0, 0)
    metered = both.to_dict()["drafts"]["metered"]
    assert metered["acceptance"] == 0.25 and [b["drafts"] for b in metered["bins"]] == [1]
    assert "drafts" not in Counters(30, 60).to_dict()
    assert "bins" not in Counters(30, 60, cycles=1).to_dict()["drafts"], (
        "an engine without acceptance counts must not report bins"
    )
