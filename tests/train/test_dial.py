"""Test the dial against hand calculations and with a meter that is too optimistic."""

import json
from dataclasses import replace
from math import inf, nan

import pytest

from sparrow.cost import MACHINES, SHAPES, decode_step
from sparrow.cost.lossless import DraftSetup, lossless_step
from sparrow.mismatch import BinMismatch, Tau
from sparrow.schedule import SparsitySchedule
from sparrow.train.dial import FASTER, WAIT, Dial, gain, price

TAU = Tau(0.95)


def tail(index, p5, low=None, sequences=100, ceiling=nan):
    """Return a bin 100 tokens wide."""
    low, start = p5 - 0.005 if low is None else low, 100 * index
    return BinMismatch(
        index, start, start + 100, 1000, sequences, 0.99, p5, low, p5 + 0.005, p5, ceiling=ceiling
    )


def twice_as_fast(length, acceptance):
    return 2e-3, 1e-3


def words(bins):
    return [(b.start // 100, b.mode, b.verdict) for b in bins]


def test_bins_become_lossy_one_by_one_starting_with_the_longest():
    dial = Dial(TAU, twice_as_fast)
    drafts = [tail(i, 0.97) for i in (1, 2, 3)]
    assert dial.verified_up_to == inf
    assert words(dial.turn(drafts, [])) == [(i, "lossless", "ready") for i in (1, 2, 3)]
    assert dial.verified_up_to == 300
    # Bin 3 now contains unverified tokens. Only these count, and the bin's drafts are ignored.
    found = dial.turn([*drafts[:2], tail(3, 0.5)], [tail(3, 0.96)])
    assert words(found) == [
        (1, "lossless", "ready"),
        (2, "lossless", "ready"),
        (3, "lossy", "holds"),
    ]
    assert dial.verified_up_to == 200
    dial.turn(drafts[:1], [tail(2, 0.96), tail(3, 0.96)])
    assert dial.verified_up_to == 100


@pytest.mark.parametrize(
    "longest, reason",
    [
        (tail(3, 0.953, low=0.949), "may be below tau 0.95"),
        (
            tail(3, 0.97, low=0.96, ceiling=0.96),
            "may be below tau 0.95",
        ),  # 0.04 and 0.04 add up to 0.057 in quadrature
        (tail(3, nan, low=nan), "may be below tau 0.95"),
    ],
)
def test_bin_that_may_miss_tau_and_all_shorter_bins_stay_lossless(longest, reason):
    dial = Dial(TAU, twice_as_fast)
    found = dial.turn([tail(1, 0.99), tail(2, 0.99), longest], [])
    assert dial.verified_up_to == inf and found[-1].verdict == "waits" and reason in found[-1].why


def test_draft_acceptance_is_rescaled_for_absolute_but_not_for_relative_tau():
    absolute, relative = Dial(TAU, twice_as_fast), Dial(Tau(0.95, relative=True), twice_as_fast)
    drafts = tail(3, 0.97, low=0.96, ceiling=0.97)
    assert absolute.turn([drafts], [])[0].low == pytest.approx(
        0.95
    )  # losses of 0.04 and 0.03 add up to 0.05 in quadrature
    assert relative.turn([drafts], [])[0].low == 0.96
    assert absolute.verified_up_to == relative.verified_up_to == 300
    # 0.945 is 0.055 below 1. The ceiling accounts for 0.03, and sparsity for 0.0461.
    own = replace(tail(3, 0.945, ceiling=0.97), ceiling_low=0.97, ceiling_high=0.97)
    assert absolute.turn([], [own])[0].verdict == "fails"
    found = relative.turn([], [own])[0]
    assert found.p5 == pytest.approx(1 - 0.0461, abs=1e-4) and found.verdict == "holds"
    assert "relative p5 of unverified tokens, 0.954, reaches relative tau 0.95" in found.why


def test_a_bin_with_few_responses_cannot_become_lossy_but_can_restore_verification():
    dial = Dial(TAU, twice_as_fast)
    found = dial.turn([tail(1, 0.99), tail(2, 0.99), tail(3, 0.5, sequences=7)], [])
    assert found[-1].verdict == "unknown" and dial.verified_up_to == 200
    dial.turn([tail(1, 0.5)], [tail(2, 0.97), tail(3, 0.949, sequences=7)])
    assert dial.verified_up_to == 200, "its interval still reaches tau"
    dial.turn([tail(1, 0.5)], [tail(2, 0.97), tail(3, 0.9, sequences=7)])
    assert dial.verified_up_to == inf, (
        "no longer bin is lossy, and responses of shorter bins would continue into this one"
    )


def test_only_the_failing_bin_and_shorter_bins_become_lossless_again():
    dial = Dial(TAU, twice_as_fast)
    dial.load({"verified_up_to": 100, "waits": [], "failures": []})
    found = dial.turn([], [tail(1, 0.99), tail(2, 0.9499), tail(3, 0.96)])
    assert [b.verdict for b in found] == ["holds", "fails", "holds"]
    assert dial.verified_up_to == 300
    dial.load({"verified_up_to": 100, "waits": [], "failures": []})
    dial.turn([], [tail(1, 0.94), tail(2, 0.96, sequences=8), tail(3, 0.96)])
    assert dial.verified_up_to == 200, (
        "all bins from the second on stay lossy, because eight responses are enough"
    )


def test_a_bin_becomes_lossy_only_if_that_is_faster():
    def by_length(length, acceptance):
        return {150: (1.0, 1.1), 250: (1.0, 1 / FASTER - 1e-3), 350: (1.0, 1.0)}[length]

    dial = Dial(TAU, by_length)
    found = dial.turn([tail(i, 0.99) for i in (1, 2, 3)], [])
    assert [b.verdict for b in found] == ["waits", "ready", "even"]
    assert dial.verified_up_to == 200, (
        "the longest bin gains nothing, but becomes lossy with the next one"
    )
    found = dial.turn([tail(1, 0.99)], [tail(2, 0.99), tail(3, 0.99)])
    assert dial.verified_up_to == 200 and found[0].verdict == "waits" and "0.91x" in found[0].why
    slower = Dial(TAU, lambda length, acceptance: (1.0, 1.01 if acceptance > 0.9 else 0.5))
    slower.load(dial.state())
    assert slower.turn([], [tail(2, 0.99)])[0].verdict == "fails" and slower.verified_up_to == inf


def test_lossy_mode_is_retried_less_and_less_often_if_the_meter_is_too_optimistic():
    """Drafts have a p5 of 0.99, but unverified tokens turn out to have a p5 of 0.93."""
    dial, lossy = Dial(TAU, twice_as_fast), []
    for _ in range(100):
        up_to = dial.verified_up_to
        bins = (1, 2, 3)
        drafts = [tail(i, 0.99) for i in bins if 100 * i < up_to]
        own = [tail(i, 0.93) for i in bins if 100 * i >= up_to]
        lossy.append(len(own))
        dial.turn(drafts, own)
    assert set(lossy) == {0, 1}, "every attempt must be limited to one bin and one step"
    tries = [step for step, n in enumerate(lossy) if n]
    assert tries == [1, 1 + WAIT + 1, 1 + WAIT + 1 + 2 * WAIT + 1, 1 + 7 * WAIT + 3]


def test_the_dial_does_not_oscillate_if_p5_is_close_to_tau():
    dial, ends = Dial(TAU, twice_as_fast), []
    for step in range(64):
        p5 = TAU.value + (0.003 if step % 2 else -0.003)
        dial.turn([tail(3, p5)] if dial.verified_up_to == inf else [], [tail(3, p5)])
        ends.append(dial.verified_up_to)
    assert set(ends) == {inf}, "a bin that may miss tau must never become lossy"


def test_the_dial_can_be_restored_from_a_saved_state():
    dial = Dial(TAU, twice_as_fast)
    dial.turn([tail(2, 0.99), tail(3, 0.99)], [])
    dial.turn([tail(2, 0.99)], [tail(3, 0.9)])
    again = Dial(TAU, twice_as_fast)
    again.load(json.loads(json.dumps(dial.state())))
    for _ in range(2 * WAIT):
        evidence = [tail(2, 0.99), tail(3, 0.99)]
        assert dial.turn(evidence, []) == again.turn(evidence, [])
        assert dial.verified_up_to == again.verified_up_to


def test_the_gain_matches_a_hand_calculation():
    dial = Dial(TAU, twice_as_fast)
    dial.load({"verified_up_to": 200, "waits": [], "failures": []})
    bins = dial.turn([tail(1, 0.5)], [tail(2, 0.99)])
    # 100 tokens take 2 ms each, and 300 take 1 ms each. In lossless mode, all 400 would take 2 ms
    # each.
    assert gain(bins, {100: 100, 200: 300}) == pytest.approx(0.8 / 0.5)
    assert gain(bins, {}) == 1.0
    # Lossless mode takes 1.5 ms per token in the first bin and 2.5 ms in the second. Lossy mode
    # takes 1 ms in both.
    dial = Dial(TAU, lambda length, acceptance: (length * 1e-5, 1e-3))
    dial.load({"verified_up_to": 200, "waits": [], "failures": []})
    bins = dial.turn([tail(1, 0.5)], [tail(2, 0.99)])
    assert gain(bins, {100: 100, 200: 300}) == pytest.approx((0.15 + 0.75) / (0.15 + 0.3))


def test_predicted_times_match_the_cost_model():
    shape, machine, schedule = SHAPES["qwen3-1.7b"], MACHINES["h200"], SparsitySchedule.fixed(61)
    lossless, lossy = price(shape, machine, schedule, 4, 32)(12_000, 0.97)
    assert lossy == decode_step(shape, machine, [12_000] * 32, schedule).seconds
    cycles = [
        lossless_step(shape, machine, [12_000] * 32, DraftSetup(k, schedule, 0.97)).seconds
        for k in range(5)
    ]
    assert lossless == min(cycles) == cycles[4] and 1.1 < lossless / lossy < 3
    # Where lossy mode reads everything, it cannot be faster.
    lossless, lossy = price(shape, machine, schedule, 4, 32)(512, 0.97)
    assert lossless <= lossy
    # as many sequences as fit
    assert price(shape, machine, schedule, 4, 10**6)(12_000, 0.97)[1] < 0.2
