"""Test the choice of how many tokens to draft, with simulated times and without vLLM."""

import random
from collections import Counter
from functools import cache

import numpy as np
import pytest

from sparrow.cost import MACHINES, SHAPES
from sparrow.cost.lossless import DraftSetup, lossless_step
from sparrow.decoding import DRAFT_BUDGETS, acceptance_at
from sparrow.schedule import SparsitySchedule
from sparrow.vllm.lossless import draft_budget, draft_length, measured
from sparrow.vllm.lossless.chooser import DraftChooser
from sparrow.vllm.lossless.measured import tokens_per_cycle
from sparrow.vllm.lossless.plan import Guessed, drafts_of
from sparrow.vllm.lossless.setup import passes_of

CHOICES = (0, 4, 8)
# Measured times in milliseconds, rounded: a dense step, a draft, and each additional token to
# verify.
LONG = dict(dense=26.0, draft=4.5, verified=0.4)  # 64 x 15,000: mostly reading the cache
SHORT = dict(
    dense=4.1, draft=3.8, verified=0.15
)  # 64 x 1,024: a draft costs as much as the step it saves


def cycle_time(drafts, dense, draft, verified):
    return (dense + drafts * (draft + verified)) / 1000


def best(acceptance, machine):
    return max(CHOICES, key=lambda k: tokens_per_cycle(acceptance, k) / cycle_time(k, **machine))


def simulate(
    chooser, cycles, acceptance, machine, rows=64, length=15_000, seed=0, hiccup=lambda i: 1.0
):
    """Return the number of drafts in each cycle, and the overall number of tokens per second."""
    rng = np.random.default_rng(seed)
    chosen, seconds, tokens = [], 0.0, 0
    for i in range(cycles):
        k = chooser.choose(rows, length)
        took = cycle_time(k, **machine) * rng.normal(1, 0.01) * hiccup(i)
        accepted = (rng.random((rows, k)) < acceptance).cumprod(1).sum(1)
        if chooser.is_watching:
            chooser.observe(
                rows, length, k, took, int(accepted.sum()), int(np.minimum(accepted + 1, k).sum())
            )
        chosen.append(k)
        seconds += took
        tokens += int(accepted.sum()) + rows
    return chosen, tokens / seconds


@pytest.mark.parametrize(
    ("acceptance", "machine", "expected"),
    [(0.95, LONG, 8), (0.7, LONG, 4), (0.3, LONG, 0), (0.95, SHORT, 0)],
)
def test_the_chooser_settles_on_the_fastest_number_of_drafts(acceptance, machine, expected):
    assert best(acceptance, machine) == expected
    chosen, _ = simulate(DraftChooser(CHOICES), 900, acceptance, machine)
    assert Counter(chosen[200:]).most_common(1)[0][0] == expected
    assert chosen[200:].count(expected) >= 0.98 * len(chosen[200:])


@pytest.mark.parametrize(
    ("acceptance", "machine"), [(0.95, LONG), (0.7, LONG), (0.3, LONG), (0.95, SHORT)]
)
def test_probing_costs_less_than_two_percent_of_throughput(acceptance, machine):
    k = best(acceptance, machine)
    ideal = 64 * tokens_per_cycle(acceptance, k) / cycle_time(k, **machine)
    _, speed = simulate(DraftChooser(CHOICES), 4000, acceptance, machine)
    assert speed >= 0.98 * ideal


def test_a_single_slow_cycle_does_not_change_the_choice():
    chooser = DraftChooser(CHOICES)
    settled = set(simulate(chooser, 200, 0.95, LONG)[0][100:])
    assert settled == {8}
    chosen, _ = simulate(chooser, 50, 0.95, LONG, seed=1, hiccup=lambda i: 50.0 if i == 0 else 1.0)
    assert set(chosen) == {8}


@pytest.mark.parametrize("paused", [0, 1])
def test_a_pause_in_one_of_the_first_two_cycles_does_not_rule_out_a_draft_count(paused):
    """Batches with other lengths must not be misled either."""
    chooser = DraftChooser((0, 4))
    for _ in range(measured.DENSE_PROBES):
        chooser.observe(64, 15_000, 0, cycle_time(0, **LONG), 0, 0)
    for cycle in range(measured.TRIED):
        pause = 0.3 if cycle == paused else 0.0
        chooser.observe(64, 15_000, 4, cycle_time(4, **LONG) + pause, 240, 250)
    assert chooser.choose(64, 21_000) == 4
    assert simulate(chooser, 30, 0.95, LONG)[0][-20:].count(4) >= 18


def test_two_dense_steps_do_not_change_what_is_expected_of_drafts():
    """At another length, the first two dense steps are slow by chance."""
    chooser = DraftChooser((0, 4))
    for _ in range(measured.DENSE_PROBES):
        chooser.observe(64, 1000, 0, 0.004, 0, 0)
        chooser.observe(64, 1000, 4, 0.02, 4 * 60, 4 * 62)
    chooser.choose(64, 1400)
    case = chooser.measured.find((measured.steps_of(64), measured.steps_of(1400)), 0)
    for _ in range(measured.TRIED):
        chooser.observe(64, 1400, 0, 0.006, 0, 0)
    assert chooser.measured.known(case) == pytest.approx({0: 0.004, 4: 0.02})


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    "growth", [0, 5]
)  # tokens per cycle, so the batch soon reaches a new length class
def test_dense_steps_can_be_chosen_even_if_their_first_timings_were_slow(seed, growth):
    """Simulate one sequence, for which every step waits for the host. Four drafts are 15 % slower
    than none.
    """
    machine, chooser, chosen = dict(dense=2.1, draft=2.0, verified=0.0), DraftChooser(CHOICES), []
    for i in range(120):
        machine["dense"] = 3.4 if i < 3 else 2.1
        chosen += simulate(
            chooser, 1, 0.9, machine, rows=1, length=1190 + growth * i, seed=1000 * seed + i
        )[0]
    assert chosen[3:16].count(4) >= 4  # the chooser has been misled
    assert chosen[40:].count(0) >= 0.9 * len(chosen[40:])


def test_dense_steps_are_timed_again_after_drafting_has_started():
    machine, chooser = dict(dense=2.1, draft=2.0, verified=0.0), DraftChooser(CHOICES)
    assert simulate(chooser, 1100, 0.9, machine, rows=1)[0][-1] == 0
    for seed in range(800):  # dense steps are slow for a while
        if not chooser.settled(1, 15_000):
            simulate(chooser, 1, 0.9, dict(machine, dense=4.2), rows=1, seed=seed)
    assert chooser.settled(1, 15_000) == 4
    chosen, _ = simulate(chooser, 60, 0.9, machine, rows=1, seed=1)
    assert chosen[30:].count(0) >= 27


def test_one_slow_dense_step_does_not_override_earlier_measurements():
    """Four drafts are about 40 % faster than none. At the next length, the only measured dense step
    includes a pause.
    """
    machine, chooser = dict(dense=7.0, draft=3.8, verified=0.15), DraftChooser(CHOICES)
    assert simulate(chooser, 100, 0.95, machine, length=1000)[0][-1] == 4
    assert chooser.choose(64, 1500) == 4
    chooser.observe(64, 1500, 0, 0.4, 0, 0)
    assert simulate(chooser, 60, 0.95, machine, length=1500)[0].count(0) >= measured.DENSE_ALIKE


def test_discarded_draft_counts_are_retried_when_acceptance_changes():
    chooser = DraftChooser(CHOICES)
    assert simulate(chooser, 300, 0.3, LONG)[0][-1] == 0
    chosen, _ = simulate(chooser, 4 * draft_length.TRY_AGAIN, 0.95, LONG, seed=1)
    assert Counter(chosen[-100:]).most_common(1)[0][0] == 8


def test_discarded_draft_counts_are_retried_less_and_less_often():
    """The cycle count carries over when sequences grow into new length classes."""
    chooser, first, most = (
        DraftChooser(CHOICES),
        draft_length.TRY_AGAIN,
        draft_length.TRY_AGAIN_MOST,
    )
    chosen = [
        simulate(chooser, 1, 0.3, LONG, length=4000 + i / 2, seed=i)[0][0]
        for i in range(3 * most + 100)
    ]
    tried = np.flatnonzero(chosen)
    begun = [
        int(i) + 1 for i, before in zip(tried, [-first, *tried], strict=False) if i - before > 100
    ]
    due = [*(first << i for i in range((most // first).bit_length())), 2 * most, 3 * most]
    assert len(begun) == len(due) + 1 and begun[0] < 20
    assert all(
        0 <= at - cycle <= draft_length.THINK_DENSE
        for at, cycle in zip(begun[1:], due, strict=True)
    )


def test_drafting_continues_when_sequences_outgrow_measured_lengths():
    """A batch grows beyond the lengths at which drafting was faster. At its new lengths, only
    drafts have been timed.
    """
    chooser = DraftChooser(CHOICES)
    for length in range(4_000, 30_000, 8):
        machine = dict(LONG, dense=26.0 * length / 15_000)
        chosen, _ = simulate(chooser, 1, 0.95, machine, length=length, seed=length)
    assert chosen == [8]
    assert chooser.settled(64, 30_000) == 8


@pytest.mark.parametrize("acceptance", [0.95, 0.5])
def test_growing_sequences_reuse_timings_from_shorter_lengths(acceptance):
    """As with async scheduling, a step uses the choice made two steps earlier."""
    chooser, rng, share = DraftChooser(CHOICES), np.random.default_rng(0), []
    for _rollout in range(2):
        under_way, last, length, seconds, ideal = [], None, 320.0, 0.0, 0.0
        while length < 1344:
            machine = dict(SHORT, dense=3.4 + 0.0016 * length)
            k = chooser.choose(64, length)
            accepted = (rng.random((64, k)) < acceptance).cumprod(1).sum(1)
            took, judged = cycle_time(k, **machine), int(np.minimum(accepted + 1, k).sum())
            under_way.append((64, length, k, took, int(accepted.sum()), judged))
            if len(under_way) > 2:
                ended = under_way.pop(0)
                if ended[2] == last:
                    chooser.observe(*ended)
                last = ended[2]
            tokens = accepted.mean() + 1
            seconds += took
            ideal += tokens * min(
                cycle_time(k, **machine) / tokens_per_cycle(acceptance, k) for k in CHOICES
            )
            length += tokens
        share.append(ideal / seconds)
    assert share[0] > 0.95
    assert share[1] > 0.985


@pytest.mark.parametrize("acceptance", [0.95, 0.9, 0.5])
@pytest.mark.parametrize(
    ("rows", "length", "dense", "draft"),
    [(64, 320, 3.9, 3.75), (64, 1024, 4.9, 3.95), (8, 1024, 2.5, 2.3)],
)
def test_noisy_timings_do_not_reduce_throughput_where_drafting_hardly_helps(
    rows, length, dense, draft, acceptance
):
    """With short contexts on an H200, drafting gains or loses only a few percent. The times of
    dense steps vary more than that.
    """
    machine, floor = dict(dense=dense, draft=draft, verified=0.0), []
    for seed in range(8):
        chooser, rng, seconds, tokens = DraftChooser(CHOICES), np.random.default_rng(seed), 0.0, 0.0
        while tokens < 1024:
            k = chooser.choose(rows, length + tokens)
            took = cycle_time(k, **machine) * max(0.6, rng.normal(1, 0.04 if k else 0.15))
            accepted = (rng.random((rows, k)) < acceptance).cumprod(1).sum(1)
            judged = int(np.minimum(accepted + 1, k).sum())
            chooser.observe(rows, length + tokens, k, took, int(accepted.sum()), judged)
            seconds += took
            tokens += accepted.mean() + 1
        floor.append(tokens * dense / 1000 / seconds)
    assert np.mean(floor) >= 0.98


@pytest.mark.parametrize(("acceptance", "drafts", "watched"), [(0.3, 0, 9), (0.95, 8, 96)])
def test_few_steps_are_timed_while_drafting_is_off(acceptance, drafts, watched):
    chooser = DraftChooser(CHOICES)
    simulate(chooser, 180, acceptance, LONG)
    seen = 0
    for _ in range(96):
        assert chooser.choose(64, 15_000) == drafts
        seen += chooser.is_watching
    assert seen == watched


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.95])
def test_repeating_a_choice_gives_the_same_result_as_deciding_anew(acceptance):
    """Two choosers see the same times. One is asked at every step, and the other only when it has
    to be.
    """
    always, seldom = DraftChooser(CHOICES), DraftChooser(CHOICES)
    rng, repeated, asked, drafts, before = np.random.default_rng(0), 0, 0, 0, 0
    for _ in range(6_000):
        rows = 64 if rng.random() < 0.99 else 60
        expected = always.choose(rows, 15_000)
        if rows == before and repeated < seldom.repeats:
            repeated += 1
        else:
            drafts, repeated, asked = seldom.choose(rows, 15_000, repeated), 0, asked + 1
        before = rows
        assert drafts == expected and always.is_watching == seldom.is_watching
        took = cycle_time(drafts, **LONG) * rng.normal(1, 0.02)
        accepted = (rng.random((rows, drafts)) < acceptance).cumprod(1).sum(1)
        if always.is_watching:
            for each in (always, seldom):
                judged = int(np.minimum(accepted + 1, drafts).sum())
                each.observe(rows, 15_000, drafts, took, int(accepted.sum()), judged)
    seldom.chosen[0] += repeated
    assert always.chosen == seldom.chosen
    assert asked < 700 if acceptance == 0.3 else asked > 5500


def test_draft_counts_that_are_far_too_slow_are_timed_only_twice():
    chooser = DraftChooser(CHOICES)
    simulate(chooser, 60, 0.5, SHORT)
    assert chooser.chosen[4] == 2 and chooser.chosen[8] == 0
    assert chooser.settled(64, 15_000) == 0


def late(chooser, steps, machine, acceptance, rows=8, length=1024, under_way=2):
    """Return the number of drafts in each cycle. As in vLLM, the time of a cycle is known only
    ``under_way`` cycles later.
    """
    rng, chosen = np.random.default_rng(0), [0]
    for _ in range(steps):
        if len(chosen) > under_way:
            before, k = chosen[-under_way - 1 : -under_way + 1]
            accepted = (rng.random((rows, k)) < acceptance).cumprod(1).sum(1)
            judged = int(np.minimum(accepted + 1, k).sum())
            if k or before == k:
                chooser.observe(
                    rows,
                    length,
                    k,
                    cycle_time(k, **machine),
                    int(accepted.sum()),
                    judged,
                    first=before != k,
                )
        chosen.append(chooser.choose(rows, length))
    return chosen[1:]


def test_late_timings_do_not_prolong_the_trial_of_a_slower_draft_count():
    machine = dict(dense=7.3, draft=6.1, verified=0.1)
    chosen = late(DraftChooser((0, 4, 8, 12)), 300, machine, 0.5)
    assert Counter(chosen) == {0: 298, 4: measured.TRIED}


def test_the_fastest_draft_count_is_used_even_if_its_timings_arrive_late():
    chosen = late(DraftChooser((0, 4, 8)), 300, LONG, 0.95)
    assert set(chosen[-200:]) == {8} and chosen.count(0) <= measured.DENSE_ALIKE + 8


def test_the_first_timing_after_a_change_never_favours_the_new_draft_count():
    """The first cycle after a change may appear shorter than it is."""
    machine = dict(dense=4.1, draft=3.8, verified=0.15)
    chooser = DraftChooser((0, 4))
    for _ in range(measured.DENSE_PROBES):
        chooser.observe(64, 1024, 0, cycle_time(0, **machine), 0, 0)
    for _ in range(20):
        chooser.observe(64, 1024, 4, 0.001, 61, 64, first=True)
        assert chooser.settled(64, 1024) is None and chooser.choose(64, 1024) in (0, 4)
    for _ in range(measured.PROBES):
        chooser.observe(64, 1024, 4, cycle_time(4, **machine), 61, 64)
    assert chooser.choose(64, 1024) == 0 and chooser.settled(64, 1024) == 0


@pytest.mark.parametrize(
    ("scatter", "steps"), [(0.005, measured.DENSE_ALIKE), (0.2, measured.DENSE_PROBES)]
)
def test_dense_steps_with_consistent_times_are_timed_less_often(scatter, steps):
    chooser, rng, taken = DraftChooser((0, 4)), np.random.default_rng(1), 0
    while chooser.choose(64, 15_000) == 0:
        chooser.observe(64, 15_000, 0, 0.026 * (1 + scatter * rng.random()), 0, 0)
        taken += 1
    assert taken == steps


def test_different_batch_sizes_and_lengths_have_separate_choices():
    chooser = DraftChooser(CHOICES)
    for seed in range(40):
        long, _ = simulate(chooser, 10, 0.95, LONG, seed=seed)
        short, _ = simulate(chooser, 10, 0.95, SHORT, length=1024, seed=seed)
    assert (long[-1], short[-1]) == (8, 0)
    assert chooser.in_use() == {"64 x 16384": 8, "64 x 1024": 0}


def test_acceptance_is_recorded_by_length():
    chooser = DraftChooser(CHOICES)
    for length, acceptance, expected in ((15_000, 0.95, 8), (60_000, 0.3, 0), (15_000, 0.95, 8)):
        chosen, _ = simulate(chooser, 600, acceptance, LONG, length=length)
        assert Counter(chosen[300:]).most_common(1)[0][0] == expected


def test_a_length_without_data_uses_the_acceptance_of_the_nearest_length():
    chooser = DraftChooser(CHOICES)
    for length, accepted in ((1_000, 1), (30_000, 9)):
        chooser.observe(1, length, 4, 0.01, accepted * 100, 1000)
    for length, share in ((2_000, 0.1), (40_000, 0.9)):
        accepted, judged = chooser.measured.judged(measured.steps_of(length), 0)
        assert accepted / judged == pytest.approx(share, abs=0.01)


def test_draft_counts_predicted_to_be_slow_are_never_tried():
    chosen, _ = simulate(DraftChooser(CHOICES), 300, 0.95, SHORT)
    assert set(chosen) == {0, 4}, "four drafts are half as fast as none, so eight must not be tried"


def test_the_typical_time_is_the_interquartile_mean():
    assert measured.typical([3.0, 1.0, 90.0, 2.0]) == 2.5 and measured.typical([5.0]) == 5.0
    assert (
        measured.typical([9.0, 1.0]) == 5.0 and measured.typical([1.0, 3.0, 3.5, 4.0, 70.0]) == 3.5
    )


@pytest.mark.parametrize("acceptance", [0.95, 0.9])
@pytest.mark.parametrize(
    ("rows", "length", "machine"),
    [
        (64, 320, dict(dense=11.0, draft=9.4, verified=0.55)),
        (8, 1024, dict(dense=7.3, draft=7.1, verified=0.05)),
        (1, 1024, dict(dense=6.7, draft=6.7, verified=0.0)),
    ],
)
def test_pauses_of_the_host_do_not_mislead_the_chooser(rows, length, machine, acceptance):
    """Every 0.4 seconds, the host pauses while two cycles end. The second of them then seems to
    take no time.
    """
    floor = []
    for seed in range(6):
        chooser, rng, seconds, tokens = DraftChooser(CHOICES), np.random.default_rng(seed), 0.0, 0.0
        last, pause = None, 0.4
        while tokens < 1024:
            k = chooser.choose(rows, length + tokens)
            took = cycle_time(k, **machine) * rng.normal(1, 0.02)
            seconds += took
            if late := seconds > pause:
                pause += 0.4
            accepted = (rng.random((rows, k)) < acceptance).cumprod(1).sum(1)
            judged = int(np.minimum(accepted + 1, k).sum())
            if k == last:
                chooser.observe(
                    rows, length + tokens, k, 0.002 if late else took, int(accepted.sum()), judged
                )
            last = k
            tokens += accepted.mean() + 1
        floor.append(tokens * machine["dense"] / 1000 / seconds)
    assert np.mean(floor) >= 0.98


@cache
def mixture_times(rows, length):
    """Return the predicted seconds of a cycle for Qwen3-30B-A3B on an H200, by number of drafts."""
    drafts = SparsitySchedule.fixed(61, dense_layers=())
    return {
        k: (k + 1)
        * lossless_step(
            SHAPES["qwen3-30b-a3b"], MACHINES["h200"], [length] * rows, DraftSetup(k, drafts, 1.0)
        ).seconds
        for k in CHOICES
    }


def test_the_first_drafts_cost_most_in_a_mixture_of_experts():
    """For eight sequences, verifying four drafts already reads most of the experts, so eight drafts
    read hardly more. In a dense model, times grow linearly.
    """
    none, four, eight = (mixture_times(8, 30_000)[k] for k in CHOICES)
    assert eight - four < 0.9 * (four - none)


@pytest.mark.parametrize("acceptance", [0.9, 0.95, 0.99])
@pytest.mark.parametrize("order", [1, -1], ids=["ending", "joining"])
def test_choices_for_a_mixture_of_experts_stay_near_optimal_while_the_batch_size_changes(
    acceptance, order
):
    """When sequences end or join, all passes read fewer or more experts."""
    chooser = DraftChooser(CHOICES)
    seconds = ideal = 0.0
    for stage, rows in enumerate([64, 45, 32, 23, 16, 11, 8, 4, 2, 1][::order]):
        length = 15_000 + 1500 * stage
        times = mixture_times(rows, length)
        best = max(tokens_per_cycle(acceptance, k) / times[k] for k in CHOICES)
        for i in range(120):
            k = chooser.choose(rows, length)
            rng = np.random.default_rng([stage, i])
            accepted = (rng.random((rows, k)) < acceptance).cumprod(1).sum(1)
            took = times[k] * rng.normal(1, 0.01)
            if chooser.is_watching:
                judged = int(np.minimum(accepted + 1, k).sum())
                chooser.observe(rows, length, k, took, int(accepted.sum()), judged)
            seconds += took
            ideal += (accepted.mean() + 1) / best
    assert ideal > 0.97 * seconds


def test_copied_times_do_not_drift_while_batches_alternate_between_cases():
    """Only dense steps are timed in every case. The time of eight drafts, 10 ms, was measured once,
    and every case copies it.
    """
    for seed in range(5):
        times = measured.Measured((1.0,))
        rng = random.Random(seed)
        batches = [(rows, length) for rows in range(8, 11) for length in range(20, 23)]
        first = times.case(batches[0], 0)
        for _ in range(measured.PROBES):
            times.add(first, 20, 8, 0.010, 70, 75, False)
        for batch in batches:
            dense = 0.003 * rng.uniform(1, 1.6)
            for _ in range(measured.DENSE_PROBES):
                times.add(times.case(batch, 0), 20, 0, dense, 0, 0, False)
        for _ in range(30):
            times.case(rng.choice(batches), 0)
        del first.seconds[8]
        copied = [times.known(times.case(rng.choice(batches), 0))[8] for _ in range(3000)]
        assert min(copied) > 0.005 and max(copied) < 0.015


def test_timings_for_a_new_batch_size_are_scaled_by_its_first_timed_choice():
    """The times are those of the 4B model in milliseconds, first for 48 sequences and then for 21
    longer ones. The smaller batch starts with four drafts, although eight are 8 % faster.
    """
    chooser = DraftChooser(CHOICES)
    many, few = (
        dict(dense=23.4, draft=4.9, verified=0.45),
        dict(dense=17.6, draft=4.2, verified=0.43),
    )
    assert simulate(chooser, 100, 0.95, many, rows=48, length=11_500)[0][-1] == 8
    for _ in range(measured.PROBES):
        chooser.observe(21, 16_800, 4, cycle_time(4, **few), 76, 80)
    chosen, _ = simulate(chooser, 60, 0.95, few, rows=21, length=16_800)
    assert 8 in chosen[:2] and chosen[30:].count(8) >= 26


def test_a_smaller_batch_tries_dense_steps_even_if_only_drafts_were_timed():
    """In the larger batch, eight drafts are slightly faster than none. In the smaller batch, a
    cycle is 8 ms shorter, which is more than the larger batch's dense step takes.
    """
    chooser = DraftChooser((0, 8))
    many, few = dict(dense=7.0, draft=6.0, verified=0.1), dict(dense=4.5, draft=5.3, verified=0.1)
    assert simulate(chooser, 100, 0.99, many, rows=48, length=1000)[0][-1] == 8
    for _ in range(measured.PROBES):
        chooser.observe(30, 1000, 8, cycle_time(8, **few), 230, 232)
    chosen, _ = simulate(chooser, 60, 0.99, few, rows=30, length=1000)
    assert chosen[30:].count(0) >= 26


def test_timings_at_new_lengths_are_scaled_by_dense_step_timings():
    """At 320 tokens, four drafts are a seventh slower than none. For longer sequences, dense steps
    are timed first, and those times imply that four drafts are slower there too.
    """
    chooser, drafted = DraftChooser(CHOICES), []
    for length in range(320, 1344):
        machine = dict(dense=9.5 + 0.0003 * length, draft=8.6, verified=0.5)
        chosen, _ = simulate(chooser, 1, 0.9, machine, length=length, seed=length)
        drafted.append(chosen[0])
    assert drafted[:40].count(4) >= measured.TRIED and drafted[40:].count(4) <= 2 * measured.PROBES


# --- guesses ---

GUESSES = 3
NUMBERS = (0, 4, 8, 12)
ALONE = Guessed(4, alone=True)
STAGES = (*NUMBERS, *(Guessed(k) for k in NUMBERS if k), ALONE)
# The probability that a guess is kept (kept), by the actor or by the policy if there are only
# guesses, and the probabilities that a draft is accepted: a draft made without guesses (plain), a
# draft drawn in a pass over guesses (drawn), and a guess used as a draft after the passes (filled).
REPETITIVE = dict(kept=0.75, plain=0.945, drawn=0.921, filled=0.3)
NOVEL = dict(kept=0.1, plain=0.945, drawn=0.921, filled=0.05)
UNSURE = dict(kept=0.4, plain=0.7, drawn=0.65, filled=0.2)
HARD = dict(kept=0.05, plain=0.3, drawn=0.3, filled=0.05)
HEAD = dict(kept=0.74, plain=0.945, drawn=0.9, filled=0.3)
MEDIUM = dict(dense=9.0, draft=3.5, verified=0.15)  # 64 x 4,096
BETWEEN = dict(MEDIUM, dense=16.0)  # 64 x 8,000
# Four guesses by a head and their verification take 1.15 dense steps, and yield three tokens (with
# the text HEAD). Eight drafts with guesses take 2.6 dense steps, and yield six tokens.
WITH_HEAD = dict(dense=10.0, draft=4.5, verified=0.15, head=0.22)
PASS = 1.08
"""The time of a pass over four tokens of each sequence, relative to the time of a draft."""


def accepted_of(choice, rows, rng, kept, plain, drawn, filled):
    """Draw the number of accepted drafts for each sequence."""
    k = drafts_of(choice)
    p = np.full((rows, k), kept if choice == ALONE else plain)
    if isinstance(choice, Guessed) and not choice.alone:
        made = (1 + (rng.random((rows, passes_of(k), GUESSES)) < kept).cumprod(2).sum(2)).sum(1)
        p = np.where(np.arange(k) < made[:, None], drawn, filled)
    return (rng.random((rows, k)) < p).cumprod(1).sum(1)


def stage_time(choice, dense, draft, verified, head=0.0):
    k = drafts_of(choice)
    if choice == ALONE:
        return (dense + k * (verified + head)) / 1000
    drafts = PASS * passes_of(k) if isinstance(choice, Guessed) else k
    return (dense + drafts * draft + k * verified) / 1000


@cache
def tokens_of_stages(text):
    """Return the mean number of tokens per cycle for each choice."""
    rng = np.random.default_rng(1)
    return {each: 1 + accepted_of(each, 50_000, rng, **dict(text)).mean() for each in STAGES}


def with_stages(chooser, cycles, text, machine, rows=64, length=15_000, seed=0, grows=False):
    """Return the choices, and the average speed relative to the best choice. The measurements of a
    cycle are known two cycles later.
    """
    rng, under_way, chosen = np.random.default_rng(seed), [], []
    tokens, seconds, ideal, last = tokens_of_stages(tuple(text.items())), 0.0, 0.0, None
    for _ in range(cycles):
        choice = chooser.choose(rows, length)
        now = dict(machine, dense=machine["dense"] * length / 15_000) if grows else machine
        took = stage_time(choice, **now) * rng.normal(1, 0.01)
        accepted = accepted_of(choice, rows, rng, **text)
        judged = int(np.minimum(accepted + 1, drafts_of(choice)).sum())
        under_way.append((rows, length, choice, took, int(accepted.sum()), judged))
        if len(under_way) > 2:
            ended = under_way.pop(0)
            if chooser.is_watching and (ended[2] or last == 0):
                chooser.observe(*ended, first=last != ended[2])
            last = ended[2]
        chosen.append(choice)
        seconds += took
        ideal += tokens[choice] / max(tokens[each] / stage_time(each, **now) for each in STAGES)
        if grows:
            length += tokens[choice]
    return chosen, ideal / seconds


SETTLED = [
    (REPETITIVE, LONG, Guessed(12)),
    (REPETITIVE, BETWEEN, Guessed(12)),
    (REPETITIVE, MEDIUM, ALONE),
    (REPETITIVE, SHORT, ALONE),
    (HEAD, WITH_HEAD, ALONE),
    (NOVEL, LONG, 12),
    (NOVEL, MEDIUM, 4),
    (NOVEL, SHORT, 0),
    (UNSURE, MEDIUM, ALONE),
    (HARD, MEDIUM, 0),
    (HARD, LONG, 0),
]


def kind_of(choice):
    return type(choice), choice == ALONE


@pytest.mark.parametrize(("text", "machine", "best"), SETTLED)
@pytest.mark.parametrize("rows", [64, 8])
def test_the_fastest_stage_is_found_at_a_cost_below_two_percent(rows, text, machine, best):
    tokens = tokens_of_stages(tuple(text.items()))
    assert best == max(STAGES, key=lambda each: tokens[each] / stage_time(each, **machine))
    shares = []
    for seed in range(3):
        chooser = DraftChooser(STAGES)
        chosen, share = with_stages(chooser, 2500, text, machine, rows, seed=seed)
        assert kind_of(Counter(chosen[500:]).most_common(1)[0][0]) == kind_of(best)
        shares.append(share)
    assert np.mean(shares) >= 0.98


@pytest.mark.parametrize(
    ("text", "machine"),
    [
        (REPETITIVE, BETWEEN),
        (REPETITIVE, MEDIUM),
        (HEAD, WITH_HEAD),
        (UNSURE, MEDIUM),
        (NOVEL, LONG),
        (HARD, MEDIUM),
    ],
)
def test_stages_are_compared_reliably_for_a_single_sequence(text, machine):
    """The number of accepted drafts varies between cycles by half its mean, so it takes many cycles
    to tell stages apart. Only stages of about the same speed are worth that many cycles.
    """
    shares = [
        with_stages(DraftChooser(STAGES), 3000, text, machine, rows=1, seed=seed)[1]
        for seed in range(6)
    ]
    assert np.mean(shares) >= 0.98 and min(shares) >= 0.93


@pytest.mark.parametrize("text", [REPETITIVE, NOVEL, UNSURE, HARD, HEAD])
def test_stage_choices_stay_near_optimal_while_sequences_grow(text):
    """For short sequences, dense steps are fastest. They become slower as sequences grow."""
    shares = []
    for seed in range(3):
        chooser = DraftChooser(STAGES)
        machine = dict(MEDIUM, dense=27.0)
        shares.append(
            with_stages(chooser, 2500, text, machine, rows=32, length=1500, seed=seed, grows=True)[
                1
            ]
        )
    assert np.mean(shares) >= 0.98


SMALL = dict(dense=2.8, draft=0.75, verified=0.002)  # a small model waits for the host
EASY = dict(kept=0.45, plain=0.985, drawn=0.985, filled=0.3)


def rollout(chooser, text, machine, lengths, prompt, rng):
    """Sample responses that end one after another, and return the average speed relative to the
    best choice. The measurements of a cycle are known when the next one has been planned, unless a
    response ended.
    """
    lengths = np.array(lengths)
    done = np.zeros(len(lengths))
    tokens = tokens_of_stages(tuple(text.items()))
    seconds = ideal = 0.0
    choice = 0
    last = None
    rows_before = 0
    while (done < lengths).any():
        (running,) = np.nonzero(done < lengths)
        rows = len(running)
        length = prompt + done[running].mean()
        following = chooser.plan(rows, length).choice
        took = stage_time(choice, **machine) * max(0.7, rng.normal(1, 0.08))
        accepted = accepted_of(choice, rows, rng, **text)
        judged = int(np.minimum(accepted + 1, drafts_of(choice)).sum())
        is_clean = choice or not (last or following)
        if chooser.is_watching and rows == rows_before and is_clean:
            chooser.observe(
                rows, length, choice, took, int(accepted.sum()), judged, first=last != choice
            )
        done[running] += accepted + 1
        seconds += took
        ideal += tokens[choice] / max(tokens[k] / stage_time(k, **machine) for k in STAGES)
        last = choice
        choice = following
        rows_before = rows
    return ideal / seconds


@pytest.mark.parametrize(("prompt", "typical_length"), [(100, 200), (40, 900)])
def test_the_fastest_stage_is_found_while_responses_end_one_after_another(prompt, typical_length):
    """The batch size and the length change all the time, so few cycles are alike. What was learned
    from one of them must also be used in those around it.
    """
    shares = []
    for seed in range(4):
        chooser = DraftChooser(STAGES)
        rng = np.random.default_rng(seed)
        found = []
        for _ in range(3):
            lengths = np.minimum(1024, rng.lognormal(np.log(typical_length), 0.7, 48)).astype(int)
            found.append(rollout(chooser, EASY, SMALL, lengths, prompt, rng))
        shares.append(found)
    first, second, third = np.mean(shares, axis=0)
    assert first >= 0.7 and second >= 0.9 and third >= 0.95


@pytest.mark.parametrize(
    ("machine", "drafts", "best"), [(LONG, 12, Guessed(12)), (SHORT, 0, ALONE)]
)
def test_guesses_are_used_once_text_repeats_itself(machine, drafts, best):
    """Guesses that were slower are retried later. By then, their earlier acceptance has been
    forgotten.
    """
    chooser = DraftChooser(STAGES)
    chosen, _ = with_stages(chooser, 600, NOVEL, machine)
    assert Counter(chosen[-200:]).most_common(1)[0][0] == drafts
    chosen, _ = with_stages(chooser, 2 * draft_length.TRY_AGAIN, REPETITIVE, machine, seed=1)
    assert Counter(chosen[-200:]).most_common(1)[0][0] == best


def test_guesses_are_not_tried_where_even_perfect_guesses_would_lose():
    """A draft takes longer than the dense step that it could save."""
    machine = dict(dense=2.0, draft=3.8, verified=0.15)
    chosen, _ = with_stages(DraftChooser(STAGES), 600, HARD, machine)
    assert not any(isinstance(choice, Guessed) and choice != ALONE for choice in chosen)


def test_dense_steps_are_timed_again_while_no_other_choice_is_certain():
    """Four drafts were given up early, compared with dense steps. When the times of dense steps are
    forgotten, nothing is known but guesses alone, and their acceptance is uncertain again.
    """
    text = dict(UNSURE, kept=0.2)
    for seed in (16, 23, 35):
        chosen, _ = with_stages(DraftChooser(STAGES), 250, text, SHORT, rows=4, seed=seed)
        assert {0, ALONE} <= set(chosen[50:])


def test_tokens_per_cycle_with_guesses_are_measured_separately_for_each_number_of_drafts():
    """Acceptance depends on a draft's place in the cycle, so it doesn't carry over to other numbers
    of drafts.
    """
    chooser = DraftChooser(STAGES)
    measured_ = chooser.measured
    for _ in range(300):
        chooser.observe(64, 15_000, 4, 0.05, 4 * 60, 4 * 62)
        chooser.observe(64, 15_000, Guessed(4), 0.04, 64, 128)
        chooser.observe(64, 15_000, Guessed(8), 0.05, 3 * 64, 4 * 64)
        chooser.observe(64, 15_000, ALONE, 0.03, 32, 96)
    case = measured_.find((12, 28), 0)
    assert measured_.tokens(case, Guessed(4)) == pytest.approx(2.0, abs=0.01)
    assert measured_.tokens(case, Guessed(8)) == pytest.approx(4.0, abs=0.01)
    assert measured_.tokens(case, 4) == pytest.approx(tokens_per_cycle(60 / 62, 4), rel=0.01)
    assert measured_.tokens(case, ALONE) == pytest.approx(1.5, abs=0.01)
    assert measured_.tokens(case, Guessed(12)) > 4.0  # extrapolated from eight drafts
    assert chooser.observe(64, 20_000, Guessed(4), 0.04, 2 * 64, 128) is None
    longer = measured_.find((12, 29), 0)
    # starts from the estimate for the shorter length
    assert 2.2 < measured_.tokens(longer, Guessed(4)) < 2.8
    assert measured_.tokens(longer, ALONE) == pytest.approx(1.5, abs=0.01)


def test_the_acceptance_of_guesses_alone_is_unrelated_to_that_of_drafts():
    """The policy accepts a guess or not, whatever the actor's drafts are like."""
    found = []
    for accepted in (5, 62):
        chooser = DraftChooser(STAGES)
        chooser.observe(64, 15_000, 4, 0.05, 4 * accepted, 4 * 62)
        chooser.observe(64, 15_000, Guessed(4), 0.04, accepted, 128)
        before = chooser.measured.tokens(chooser.measured.find((12, 28), 0), ALONE)
        chooser.observe(64, 15_000, ALONE, 0.03, 32, 96)
        found.append((before, chooser.measured.tokens(chooser.measured.find((12, 28), 0), ALONE)))
    assert found[0] == found[1]


def test_guesses_alone_do_not_change_what_is_expected_of_drafts():
    chooser, other = DraftChooser(STAGES), DraftChooser(STAGES)
    for each in (chooser, other):
        each.observe(64, 15_000, 4, 0.05, 4 * 60, 4 * 62)
    for _ in range(20):
        other.observe(64, 15_000, ALONE, 0.03, 0, 64)
    for choice in STAGES[:-1]:
        of_both = [
            each.measured.tokens(each.measured.find((12, 28), 0), choice)
            for each in (chooser, other)
        ]
        assert of_both[0] == of_both[1]


# --- the draft budget ---

BASE = DRAFT_BUDGETS.index(1.0)
# As above. ``read`` is the part of a draft's time that depends on its budget.
AT_4K = dict(dense=9.0, draft=2.8, read=1.1, verified=0.2)  # 64 x 4,096
FEW = dict(dense=8.2, draft=2.0, read=0.15, verified=0.05)  # 8 x 30,000
MIDDLE = dict(dense=26.0, draft=2.5, read=2.0, verified=0.4)  # 64 x 15,000


def with_budgets(
    cycles, acceptance, dense, draft, read, verified, rows=64, length=15_000, seed=0, scatter=0.01
):
    """Return the chooser, its budget in each cycle with drafts, and the speed relative to the best
    number of drafts and budget. As with async scheduling, the time of a cycle is known three cycles
    after its choice. ``acceptance`` lists the acceptance for each budget.
    """
    chooser, rng = DraftChooser((0, 4, 8, 12), DRAFT_BUDGETS), np.random.default_rng(seed)

    def took(drafts, budget):
        return (dense + drafts * (draft + read * DRAFT_BUDGETS[budget] + verified)) / 1000

    speeds = [
        tokens_per_cycle(acceptance[b], k) / took(k, b)
        for b in range(len(DRAFT_BUDGETS))
        for k in chooser.choices
    ]
    chosen, seconds, tokens = [], 0.0, 0.0
    for _ in range(cycles):
        if len(chosen) > 3:
            (before, cycle) = chosen[-4:-2]
            k, budget = cycle
            accepted = (rng.random((rows, k)) < acceptance[budget]).cumprod(1).sum(1)
            judged, passed = (
                int(np.minimum(accepted + 1, k).sum()),
                took(k, budget) * rng.normal(1, scatter),
            )
            seconds, tokens = seconds + passed, tokens + accepted.mean() + 1
            if k or before[0] == k:
                is_first = before != cycle if k else False
                chooser.observe(
                    rows,
                    length,
                    k,
                    passed,
                    int(accepted.sum()),
                    judged,
                    first=is_first,
                    budget=budget,
                )
        k = chooser.choose(rows, length)
        chosen.append((k, chooser.choose_budget(rows, length, k)))
    return chooser, [budget for k, budget in chosen if k], tokens / seconds / max(speeds)


def as_expected(acceptance):
    return [acceptance_at(acceptance, multiple) for multiple in DRAFT_BUDGETS]


@pytest.mark.parametrize(
    ("acceptance", "machine", "rows", "multiple"),
    [(0.97, AT_4K, 64, 0.5), (0.99, MIDDLE, 64, 0.5), (0.9, FEW, 8, 2.0), (0.93, MIDDLE, 64, 1.0)],
)
def test_the_fastest_draft_budget_is_chosen(acceptance, machine, rows, multiple):
    for seed in range(4):
        chooser, budgets, share = with_budgets(
            1500, as_expected(acceptance), **machine, rows=rows, seed=seed
        )
        assert DRAFT_BUDGETS[budgets[-1]] == multiple
        assert chooser.budgets_in_use() == ({} if multiple == 1 else {f"{rows} x 16384": multiple})
        assert share > 0.97


def test_budgets_that_are_only_marginally_faster_do_not_reduce_throughput():
    shares = [with_budgets(1500, as_expected(0.93), **MIDDLE, seed=seed)[2] for seed in range(6)]
    assert np.mean(shares) > 0.992


def test_budget_whose_drafts_are_rejected_too_often_is_abandoned():
    """Half the budget would be faster if the rejected share grew as expected. Here, it grows more."""
    assert set(with_budgets(600, as_expected(0.97), **AT_4K)[1][-100:]) == {0}
    _, budgets, share = with_budgets(1500, [0.9, 0.97, 0.975], **AT_4K)
    assert budgets.count(0) <= 6 * draft_budget.BUDGET_PROBES and budgets[-1] == BASE
    assert share > 0.98


def test_alternative_budgets_are_tried_only_with_the_settled_number_of_drafts():
    chooser, tried = DraftChooser(CHOICES, DRAFT_BUDGETS), 0
    simulate(chooser, 40, 0.95, LONG)
    for seed in range(60):
        drafts = simulate(chooser, 1, 0.95, LONG, seed=seed)[0][0]
        if chooser.choose_budget(64, 15_000, drafts) != BASE:
            tried += 1
            assert drafts == chooser.settled(64, 15_000) == 8
            assert chooser.choose_budget(64, 15_000, 4) == BASE
    assert tried == 2 * draft_budget.BUDGET_PROBES


def test_an_explicit_draft_schedule_is_never_changed():
    chooser = DraftChooser(CHOICES)
    simulate(chooser, 400, 0.99, LONG)
    assert (
        chooser.budgets == (1.0,)
        and chooser.choose_budget(64, 15_000, chooser.settled(64, 15_000)) == 0
    )
    assert chooser.budgets_in_use() == {}


def test_the_budget_of_a_small_batch_does_not_fluctuate():
    """Five cycles of one sequence say little about acceptance. The budget also makes hardly any
    difference to the time of a draft here.
    """
    machine, shares = dict(FEW, read=0.02), []
    for seed in range(6):
        _, budgets, share = with_budgets(
            1500, as_expected(0.945), **machine, rows=1, seed=seed, scatter=0.03
        )
        assert (np.diff(budgets) != 0).sum() < 30
        shares.append(share)
    assert np.mean(shares) > 0.99


def test_longer_sequences_start_with_the_budget_chosen_for_shorter_ones():
    chooser, _, _ = with_budgets(600, as_expected(0.97), **AT_4K, length=4096)
    assert chooser.budgets_in_use() == {"64 x 4096": 0.5}
    assert chooser.choose(64, 5800) and chooser.choose_budget(64, 5800, 8) == 0
    assert chooser.choose_budget(64, 60_000, 8) == BASE  # too far from length 4,096


def test_tokens_per_cycle_match_a_hand_calculation():
    assert tokens_per_cycle(0.5, 2) == 1.75  # 1 + 1/2 + 1/4
    assert tokens_per_cycle(1.0, 8) == 9
    assert tokens_per_cycle(0.0, 8) == 1
    assert tokens_per_cycle(0.9, 0) == pytest.approx(1)
