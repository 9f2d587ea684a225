"""Test what lossless mode's scheduler chooses and records for each step. vLLM's part of the
scheduler is replaced.
"""

import pickle
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("vllm.version")

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput

from sparrow.decoding import DraftChoice
from sparrow.errors import ConfigError
from sparrow.vllm.lossless import measured, plan
from sparrow.vllm.lossless import scheduler as module
from sparrow.vllm.lossless.plan import DraftPlan, Guessed, drafts_of
from sparrow.vllm.lossless.scheduler import LOG_EVERY, LosslessScheduler

CHOICES = (0, 2, 4)
UNKNOWN = DraftPlan(-1, budget=-1)


@pytest.fixture
def make(monkeypatch):
    """Make a scheduler for at most this many sequences. The test advances its clock."""

    adapts_budget = False
    guess_tokens = 0

    def init(self, most):
        ranges = [(n, n, drafts) for n, drafts in enumerate(CHOICES, start=1)]
        spec = SimpleNamespace(num_speculative_tokens_per_batch_size=ranges)
        setting = {"adapt_draft_budget": adapts_budget, "guess_tokens": guess_tokens}
        additional = {"sparrow": {"mode": "lossless", **setting}}
        self.vllm_config = SimpleNamespace(speculative_config=spec, additional_config=additional)
        self.dynamic_sd_lookup = [0, *CHOICES, *[CHOICES[-1]] * most][
            : most + 1
        ]  # as vLLM expands it from the ranges
        self.running, self.requests = [], {}

    monkeypatch.setattr(AsyncScheduler, "__init__", init)
    monkeypatch.setattr(
        AsyncScheduler,
        "schedule",
        lambda self: SimpleNamespace(num_spec_tokens_to_schedule=self.dynamic_sd_lookup[1]),
    )
    monkeypatch.setattr(AsyncScheduler, "update_from_output", lambda self, *_: None)
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: clock.now))

    def made(most=8, budgets=False, keeps=False, guesses=0):
        nonlocal adapts_budget, guess_tokens
        adapts_budget, guess_tokens = budgets, guesses
        scheduler = LosslessScheduler(most)
        scheduler.clock, scheduler.keeps_choices = clock, keeps
        return scheduler

    return made


def run(scheduler, lengths):
    """Add running sequences of these lengths, by name."""
    scheduler.requests = {
        name: SimpleNamespace(num_computed_tokens=n) for name, n in lengths.items()
    }
    scheduler.running = list(scheduler.requests.values())


def step(scheduler, names, choice, emitted, seconds=0.01, budget=0):
    """Run one step of these sequences. It verifies drafts of this choice and budget, and yields
    ``emitted`` tokens, one number for each sequence.
    """
    drafts = drafts_of(choice)
    scheduler.clock.now += seconds
    output = SimpleNamespace(
        num_scheduled_tokens=dict.fromkeys(names, drafts + 1),
        scheduled_spec_decode_tokens=dict.fromkeys(names, [-1] * drafts) if drafts else {},
    )
    plan.attach(output, DraftPlan(0, budget), DraftPlan.of(choice, budget))
    scheduler.update_from_output(
        output, SimpleNamespace(sampled_token_ids=[[5] * n for n in emitted])
    )


@pytest.fixture
def observed(monkeypatch):
    found = []
    monkeypatch.setattr(
        module.DraftChooser,
        "observe",
        lambda self, *what, first, budget: found.append((*what, first, budget)),
    )
    return found


@pytest.mark.parametrize("most", [1, 2, 8])
def test_every_number_of_drafts_may_be_chosen_for_any_number_of_sequences(make, most):
    scheduler = make(most)
    assert scheduler.chooser.choices == CHOICES
    run(scheduler, {"a": 100})
    chosen = set()
    for _ in range(40):
        scheduler.schedule()
        drafts = scheduler.dynamic_sd_lookup[1]
        assert scheduler.dynamic_sd_lookup == [drafts] * (most + 1)
        step(scheduler, ["a"], drafts, [drafts + 1])
        chosen.add(drafts)
    assert chosen == set(CHOICES)


def test_a_step_is_recorded_with_its_accepted_and_judged_drafts(make, observed):
    scheduler = make()
    run(scheduler, {"a": 100, "b": 300, "c": 200})
    for emitted in ([1, 1, 1], [1, 3, 5]):  # no step precedes the first
        step(scheduler, ["a", "b", "c"], 4, emitted)
    # Each sequence has 4 drafts, of which 0, 2 and 4 are accepted. The accepted drafts and the
    # first rejected draft count as judged.
    assert observed == [(3, 200.0, 4, pytest.approx(0.01), 6, 1 + 3 + 4, False, 0)]
    observed.clear()
    for _ in range(2):
        step(scheduler, ["a", "b", "c"], 0, [1, 1, 1])
    assert observed == [
        (3, 200.0, 0, pytest.approx(0.01), 0, 0, False, 0)
    ]  # the first of these steps is left out, because it followed drafts


@pytest.mark.parametrize(
    ("dense", "verified", "draft", "drafts"),
    [(2.9, 3.9, 2.8, 0), (26.0, 27.6, 4.5, 4)],
    ids=["short", "long"],
)
def test_dense_step_time_excludes_launching_the_drafts_of_the_next_step(
    make, dense, verified, draft, drafts
):
    """The host launches a step before the previous one ends. A launch takes about twice as long if
    the step has drafts. ``dense``, ``verified`` and ``draft`` are GPU times in milliseconds. With
    short contexts, dense steps wait for the host, and drafting is slower.
    """
    scheduler, names, rng = make(), ["a", "b", "c", "d"], np.random.default_rng(0)
    run(scheduler, dict.fromkeys(names, 320))
    host = free = end = (
        # a pass can end only after the host has launched it and the GPU has finished all earlier
        # work
        0.0
    )
    verifies, makes, chosen = None, 0, []
    for _ in range(600):
        scheduler.schedule()
        before, verifies, makes = verifies, makes, scheduler.dynamic_sd_lookup[1]
        host, ended = host + (6.6 if verifies or makes else 3.4), end
        end = max(host, free) + (verified if verifies else dense)
        free = end + makes * draft
        if before is not None:
            host = max(host, ended)
            emitted = [1 + int((rng.random(before) < 0.9).cumprod().sum()) for _ in names]
            step(scheduler, names, before, emitted, host / 1000 - scheduler.clock.now)
        chosen.append(makes)
    assert chosen[-300:].count(drafts) >= 270


def test_steps_are_recorded_only_while_the_chooser_watches(make, observed):
    scheduler = make()
    run(scheduler, {"a": 100})
    for is_watching, noted in ((True, 0), (True, 1), (False, 1), (False, 1), (True, 1), (True, 2)):
        scheduler.chooser.draft_length.is_watching = is_watching
        step(scheduler, ["a"], 0, [1])
        assert len(observed) == noted
    assert observed[1][3] == pytest.approx(0.01)


def test_the_first_step_with_a_different_draft_count_is_marked(make, observed):
    scheduler = make()
    run(scheduler, {"a": 100, "b": 300})
    for drafts in (0, 0, 2, 2, 4, 0, 0):
        step(scheduler, ["a", "b"], drafts, [1, 1])
    assert [(drafts, first) for _, _, drafts, *_, first, _ in observed] == [
        (0, False),
        (2, True),
        (2, False),
        (4, True),
        (0, False),
    ]


def test_steps_are_recorded_with_the_budget_of_their_drafts(make, observed):
    """A step verifies drafts that the previous step made. A dense step reads everything, whatever
    the budget for drafts is.
    """
    scheduler = make(budgets=True)
    run(scheduler, {"a": 100, "b": 300})
    for drafts, budget in ((2, 1), (2, 1), (2, 0), (2, 0), (0, 0), (0, 0), (0, 1)):
        step(scheduler, ["a", "b"], drafts, [1, 1], budget=budget)
    assert [(drafts, first, budget) for _, _, drafts, *_, first, budget in observed] == [
        (2, False, 1),
        (2, True, 0),
        (2, False, 0),
        (0, False, 0),
        (0, False, 1),
    ]


def test_drafting_with_guesses_is_a_separate_choice(make, observed):
    """Acceptance of drafts with guesses is recorded per cycle. The first step after a change is
    marked, even if only the use of guesses has changed.
    """
    scheduler, alone = make(guesses=3), Guessed(2, alone=True)
    assert scheduler.chooser.choices == (*CHOICES, Guessed(2), Guessed(4), alone)
    assert make().chooser.choices == CHOICES
    run(scheduler, {"a": 100, "b": 300})
    for choice in (2, 2, Guessed(2), Guessed(2), Guessed(4), alone, alone, Guessed(2), 0, 0):
        step(scheduler, ["a", "b"], choice, [1, drafts_of(choice) + 1])
    assert [(choice, accepted, first) for _, _, choice, _, accepted, _, first, _ in observed] == [
        (2, 2, False),
        (Guessed(2), 2, True),
        (Guessed(2), 2, False),
        (Guessed(4), 4, True),
        (alone, 2, True),
        (alone, 2, False),
        (Guessed(2), 2, True),
        (0, 0, False),
    ]


def test_guesses_are_planned_recorded_replayed_and_logged(make, monkeypatch):
    choices = (Guessed(4), 4, 0, Guessed(2), Guessed(2), Guessed(2, alone=True))
    monkeypatch.setattr(module.DraftChooser, "choose", lambda *_: next(turns))

    def told(scheduler):
        run(scheduler, {"a": 100})
        return [plan.drafts_after(scheduler.schedule(), UNKNOWN) for _ in choices]

    turns = iter(choices)
    first, again = make(keeps=True, guesses=3), make(keeps=True, guesses=3)
    drafts = told(first)
    assert [each.choice for each in drafts] == list(choices)
    assert drafts[0] == DraftPlan(4, 0, True) and drafts[1] == DraftPlan(4, 0, False)
    recorded = first.take_choices()
    assert drafts[-1] == DraftPlan(2, 0, True, alone=True)
    assert recorded == [
        (4, 1.0, 3, 1),
        (4, 1.0, 0, 1),
        (0, 1.0, 0, 1),
        (2, 1.0, 3, 2),
        (2, 0.0, 3, 1),
    ]
    again.replay(recorded)
    turns = iter([0] * len(choices))
    assert told(again) == drafts and again.take_choices() == recorded
    in_use = {"1 x 91": Guessed(2), "1 x 64": Guessed(2, alone=True)}
    assert str(in_use) == "{'1 x 91': 2 with guesses, '1 x 64': 2 guesses}"


def test_workers_receive_the_budgets_of_new_drafts_and_of_drafts_being_verified(make, monkeypatch):
    scheduler, budgets = make(budgets=True), iter((1, 2, 2, 0))
    run(scheduler, {"a": 100})
    monkeypatch.setattr(module.DraftChooser, "choose", lambda *_: 2)
    monkeypatch.setattr(module.DraftChooser, "choose_budget", lambda *_: next(budgets))
    told = [scheduler.schedule() for _ in range(4)]
    drafts = [DraftPlan(2, budget) for budget in (1, 2, 2, 0)]
    assert [plan.drafts_after(each, UNKNOWN) for each in told] == drafts
    assert [plan.verified_by(each, UNKNOWN).budget for each in told] == [1, 1, 2, 2]
    scheduler.running = []  # the last response has ended; another one arrives
    assert plan.drafts_after(scheduler.schedule(), UNKNOWN).budget == 0
    assert plan.drafts_after(make().schedule(), UNKNOWN) == DraftPlan(0, 0)


def test_no_budget_is_chosen_for_dense_steps(make, monkeypatch):
    """A dense step keeps the draft budget in use for batches like its own, because its time is
    recorded for this budget.
    """
    scheduler = make(budgets=True)
    run(scheduler, {"a": 100})
    scheduler.chooser.draft_budget._in_use[measured.steps_of(1), measured.steps_of(100)] = 2
    monkeypatch.setattr(module.DraftChooser, "choose_budget", lambda *_: pytest.fail("asked"))
    assert plan.drafts_after(scheduler.schedule(), UNKNOWN) == DraftPlan(0, 2)


def test_the_chooser_is_consulted_when_due_and_when_the_batch_changes(make, monkeypatch):
    scheduler, asked = make(), []
    monkeypatch.setattr(scheduler.chooser.draft_length, "repeats", 3)
    monkeypatch.setattr(module.DraftChooser, "choose", lambda _, *what: asked.append(what) or 0)
    run(scheduler, {"a": 100, "b": 300})
    for _ in range(9):
        scheduler.schedule()
    assert asked == [(2, 200.0, 0), (2, 200.0, 3), (2, 200.0, 3)]
    run(scheduler, {"a": 100})
    for _ in range(3):
        scheduler.schedule()
    run(scheduler, {"a": 100, "b": 300})
    scheduler.schedule()
    assert asked[3:] == [(1, 100.0, 0), (2, 200.0, 2)]


def test_no_drafts_are_scheduled_after_a_replay_if_the_chooser_chooses_none(make, monkeypatch):
    scheduler = make()
    monkeypatch.setattr(scheduler.chooser.draft_length, "repeats", 3)
    monkeypatch.setattr(module.DraftChooser, "choose", lambda *_: 0)
    run(scheduler, {"a": 100})
    scheduler.replay([DraftChoice(0, 1.0, 0), DraftChoice(4, 1.0, 0)])
    told = []
    for _ in range(3):
        scheduler.schedule()
        told.append(scheduler.dynamic_sd_lookup[1])
    assert told == [0, 4, 0]


def chosen(scheduler, choices, monkeypatch):
    """Run these steps in a new scheduler, and return what it sends to the workers."""
    numbers, budgets = (iter(column) for column in zip(*choices, strict=True))
    monkeypatch.setattr(module.DraftChooser, "choose", lambda *_: next(numbers))
    monkeypatch.setattr(module.DraftChooser, "choose_budget", lambda *_: next(budgets))
    told = []
    for i in range(len(choices) + 1):
        run(scheduler, {"a": 100} if i else {})
        told.append(plan.drafts_after(scheduler.schedule(), UNKNOWN))
    return told


def test_choices_are_recorded_and_can_be_replayed(make, monkeypatch):
    first, again = make(budgets=True, keeps=True), make(budgets=True, keeps=True)
    told = chosen(first, [(4, 1), (4, 1), (2, 0), (2, 2), (2, 2)], monkeypatch)
    choices = first.take_choices()
    assert (
        choices == [(0, 1.0, 0, 1), (4, 1.0, 0, 2), (2, 0.5, 0, 1), (2, 2.0, 0, 2)]
        and first.take_choices() == []
    )
    again.replay(choices)
    assert chosen(again, [(0, 1)] * 5, monkeypatch) == told
    assert again.take_choices() == choices
    unread = make(budgets=True)  # like a server's scheduler, whose choices nobody would retrieve
    chosen(unread, [(4, 1)], monkeypatch)
    assert unread.take_choices() == []
    assert chosen(again, [(0, 1)] * 2, monkeypatch)[1:] == [DraftPlan(0, 1)] * 2, (
        "after a replay, the scheduler must choose again"
    )


def test_steps_between_two_choices_are_recorded(make, monkeypatch):
    scheduler = make(keeps=True)
    run(scheduler, {"a": 100})
    asked = []
    monkeypatch.setattr(module.DraftChooser, "choose", lambda *_: asked.append(1) or 0)
    scheduler.chooser.draft_length.repeats = 3
    for _ in range(8):
        scheduler.schedule()
    assert len(asked) == 2 and scheduler.take_choices() == [(0, 1.0, 0, 8)]


@pytest.mark.parametrize(
    ("steps", "warning"),
    [(1, "no recorded draft choices left"), (9, "were not replayed"), (6, None)],
)
def test_replay_of_the_wrong_length_logs_a_warning(make, monkeypatch, steps, warning):
    scheduler, said = make(), []
    scheduler._logger = SimpleNamespace(info=lambda *_: None, warning=said.append)
    scheduler.replay([DraftChoice(2, 1.0, 0, steps)])
    told = chosen(scheduler, [(4, 0)] * 5, monkeypatch)
    assert told[steps:] == [DraftPlan(4, 0)] * (6 - steps)
    scheduler.take_choices()
    assert len(said) == bool(warning) and all(warning in text for text in said)


def test_replaying_choices_that_the_engine_does_not_offer_raises_an_error(make):
    for guesses, choice in (
        (0, DraftChoice(3, 1.0, 0)),
        (0, DraftChoice(2, 0.5, 0)),
        (0, DraftChoice(2, 1.0, 3)),
        (0, DraftChoice(2, 0.0, 3)),
        (2, DraftChoice(2, 1.0, 3)),
        (2, DraftChoice(2, 0.0, 0)),
        (2, DraftChoice(4, 0.0, 2)),
    ):
        offered = (
            rf"drafts are \(0, 2, 4.*\), its budgets \(1.0,\), and its guesses per pass {guesses};"
        )
        with pytest.raises(ConfigError, match=f"cannot replay .* {offered}"):
            make(guesses=guesses).replay([choice])


def test_plans_attached_to_a_step_reach_the_workers():
    """vLLM pickles steps to send them to workers in other processes."""
    scheduled = SchedulerOutput.make_empty()
    scheduled.num_spec_tokens_to_schedule = 4
    drafts, verified = DraftPlan(4, budget=2, guesses=True), DraftPlan(3, budget=1)
    plan.attach(scheduled, drafts, verified)
    received = pickle.loads(pickle.dumps(scheduled))
    assert plan.drafts_after(received, UNKNOWN) == drafts
    assert plan.verified_by(received, UNKNOWN) == verified


@pytest.mark.parametrize("guesses", [True, False])
def test_a_step_without_a_plan_uses_vllms_draft_count_and_the_previous_budget(guesses):
    """vLLM's warm-up steps have no plan. The same is true of steps that are repeated without a
    choice.
    """
    scheduled = SchedulerOutput.make_empty()
    scheduled.num_spec_tokens_to_schedule = 4
    before = DraftPlan(8, 2, guesses)
    assert plan.drafts_after(scheduled, before) == DraftPlan(4, 2, guesses)
    assert plan.verified_by(scheduled, before) == before


def test_steps_with_unequal_draft_counts_are_not_timed(make, observed):
    scheduler = make()
    run(scheduler, {"a": 100, "b": 300})
    for names, drafts in (
        (["a", "b"], 4),
        (["a"], 4),
        (["a", "b"], 2),
        (["a", "b"], 3),
        (["a", "b"], 3),
    ):
        step(scheduler, names, drafts, [1] * len(names))  # 3 is not one of the choices
    step(scheduler, ["a", "b"], 2, [1, 1])
    step(scheduler, ["a", "b"], 2, [0, 1])  # "a" was in prefill
    assert observed == []


def test_steps_whose_choice_the_engine_does_not_offer_are_not_timed(make):
    """Guesses alone make two drafts here, but vLLM may schedule a different number than planned."""
    scheduler = make(guesses=3)
    cases = scheduler.chooser.measured.cases
    run(scheduler, {"a": 100})
    for _ in range(3):
        step(scheduler, ["a"], Guessed(4, alone=True), [2])
    step(scheduler, ["a"], 4, [2])  # not timed either, because no timed step precedes it
    assert not cases
    for _ in range(2):
        step(scheduler, ["a"], 4, [2])
    [case] = cases.values()
    assert set(case.seconds) == {4}


def test_the_length_of_a_step_is_the_mean_over_remaining_sequences(make, observed):
    """When a response ends, the next step is already in flight. Some of a step's sequences may
    therefore have ended before the step is recorded.
    """
    scheduler = make()
    run(scheduler, {"a": 1000, "b": 3000})
    step(scheduler, ["a", "b"], 2, [1, 1])
    del scheduler.requests["a"]
    step(scheduler, ["a", "b"], 2, [1, 1])
    assert [length for _, length, *_ in observed] == [3000]
    del scheduler.requests["b"]
    step(scheduler, ["a", "b"], 2, [1, 1])
    assert len(observed) == 1


def test_the_choices_in_use_are_checked_rarely_and_logged_once(make, monkeypatch):
    scheduler, asked, said = make(), [], []
    run(scheduler, {"a": 100})
    in_use = module.DraftChooser.in_use
    monkeypatch.setattr(module.DraftChooser, "in_use", lambda self: asked.append(1) or in_use(self))
    scheduler._logger = SimpleNamespace(info=lambda text, *use: said.append(use))
    for _ in range(5 * LOG_EVERY):
        scheduler.schedule()
        drafts = scheduler.dynamic_sd_lookup[1]
        step(scheduler, ["a"], drafts, [1], seconds=0.01 * (1 + drafts))
    # While no choice is in use, looking for one costs nothing, so every cycle looks for one. After
    # that, only one cycle in ``LOG_EVERY`` does.
    assert len(asked) <= 30 and said == [({"1 x 91": 0}, "")]
