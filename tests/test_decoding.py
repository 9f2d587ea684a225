"""Test the settings that say how to decode."""

import json
from dataclasses import replace

import pytest

from sparrow import SparsitySchedule
from sparrow.decoding import (
    DRAFT_BUDGETS,
    DRAFT_SCHEDULE,
    GUESS_LOOKUP_MIN,
    Decoding,
    acceptance_at,
)
from sparrow.errors import ConfigError

TABLE = SparsitySchedule(top_k=(2, 4), bin_tokens=64, dense_layers=(0,))


def test_mode_name_alone_selects_the_defaults_of_that_mode():
    lossless = Decoding.load("lossless")
    assert (lossless.mode, lossless.schedule, lossless.draft_tokens) == (
        "lossless",
        DRAFT_SCHEDULE,
        12,
    )
    assert lossless.schedule.tokens_read(20_000) == 1024 and lossless.schedule.dense_layers == ()
    assert Decoding.load("dense").mode == "dense" and Decoding.load("dense").schedule.is_dense
    assert Decoding.load("qwen3-4b-0.86").mode == "lossy"


@pytest.mark.parametrize(
    "value, expected",
    [
        ("fixed:9", Decoding("lossy", SparsitySchedule.fixed(9))),
        (TABLE.to_dict(), Decoding("lossy", TABLE)),
        (TABLE.to_json(), Decoding("lossy", TABLE)),
        ({"mode": "lossy", "schedule": "fixed:9"}, Decoding("lossy", SparsitySchedule.fixed(9))),
        ({"mode": "dense"}, Decoding("dense", SparsitySchedule.dense())),
        (
            {
                "mode": "lossless",
                "draft_schedule": TABLE.to_dict(),
                "draft_tokens": 4,
                "adapt_draft_tokens": False,
            },
            Decoding("lossless", TABLE, draft_tokens=4, adapt_draft_tokens=False),
        ),
        (
            {"mode": "lossless", "meter_schedule": TABLE.to_dict(), "meter_every": 3},
            Decoding("lossless", DRAFT_SCHEDULE, meter_schedule=TABLE, meter_every=3),
        ),
        (
            {"mode": "lossless", "meter_schedule": TABLE.to_dict()},
            Decoding("lossless", DRAFT_SCHEDULE, meter_schedule=TABLE),
        ),
        (
            ' {"mode": "lossless", "draft_tokens": 2}',
            Decoding("lossless", DRAFT_SCHEDULE, draft_tokens=2),
        ),
        (
            {"mode": "lossless", "drafter_invariant": True},
            Decoding("lossless", DRAFT_SCHEDULE, drafter_invariant=True),
        ),
        (
            {"mode": "lossless", "draft_weights": "fp8"},
            Decoding("lossless", DRAFT_SCHEDULE, draft_weights="fp8"),
        ),
        ({"mode": "lossless", "draft_weights": "auto"}, Decoding("lossless", DRAFT_SCHEDULE)),
        (
            {"mode": "lossless", "guess_tokens": 3, "guess_head": "h"},
            Decoding("lossless", DRAFT_SCHEDULE, guess_tokens=3, guess_head="h"),
        ),
        (
            {
                "mode": "lossless",
                "guess_tokens": 3,
                "guess_head": "h",
                "guess_lookup_min": 2,
            },
            Decoding(
                "lossless", DRAFT_SCHEDULE, guess_tokens=3, guess_head="h", guess_lookup_min=2
            ),
        ),
        (
            {"mode": "lossless", "guess_tokens": 3},
            Decoding("lossless", DRAFT_SCHEDULE, guess_tokens=3),
        ),
        (
            {"mode": "lossless", "adapt_draft_budget": False},
            Decoding("lossless", DRAFT_SCHEDULE, adapt_draft_budget=False),
        ),
    ],
)
def test_decoding_settings_survive_a_round_trip_through_json(value, expected):
    assert Decoding.load(value) == expected
    assert Decoding.load(expected) is expected
    assert (
        Decoding.load(expected.to_dict())
        == Decoding.load(json.dumps(expected.to_dict()))
        == expected
    )


def test_mode_auto_cannot_be_written_as_plain_types():
    auto = Decoding("auto", SparsitySchedule.fixed(9))
    with pytest.raises(ConfigError, match="mode 'auto' works only in sparrow train"):
        auto.to_dict()


@pytest.mark.parametrize(
    "options, least",
    [
        ({"guess_head": "h"}, GUESS_LOOKUP_MIN),
        ({"guess_head": "h", "guess_lookup_min": 0}, 0),
        ({"guess_head": "h", "guess_lookup_min": 8}, 8),
        ({}, 0),
    ],
)
def test_history_guesses_beside_a_head_unless_that_is_turned_off(options, least):
    assert Decoding.lossless(guess_tokens=3, **options).lookup_min == least


@pytest.mark.parametrize(
    "value, message",
    [
        ({"mode": "fast"}, "unknown mode 'fast', expected one of"),
        ({"mode": "lossy"}, "'lossy' needs a schedule"),
        ("lossy", "'lossy' needs a schedule"),
        ("auto", "mode 'auto' works only in sparrow train with engine hf"),
        (
            {"mode": "lossless", "schedule": "fixed:9"},
            "'lossless' has no setting 'schedule', expected",
        ),
        (
            {"mode": "dense", "draft_tokens": 2},
            "'dense' has no setting 'draft_tokens', expected none",
        ),
        (
            {"mode": "lossless", "draft_tokens": 0},
            "draft_tokens must be an integer of at least 1, got 0",
        ),
        ({"mode": "lossless", "draft_tokens": True}, "draft_tokens must be .* got True"),
        (
            {"mode": "lossless", "meter_every": 0},
            "meter_every must be an integer of at least 1, got 0",
        ),
        (
            {"mode": "lossless", "meter_every": 16},
            "meter_every is 16, but without a meter_schedule, .*, or leave meter_every out",
        ),
        ({"mode": "lossless", "meter_schedule": "loseless"}, "no schedule 'loseless'"),
        (
            {"mode": "lossless", "adapt_draft_tokens": 1},
            "adapt_draft_tokens must be true or false, got 1",
        ),
        (
            {"mode": "lossless", "adapt_draft_budget": 2},
            "adapt_draft_budget must be true or false, got 2",
        ),
        (
            {"mode": "lossless", "adapt_draft_budget": True, "adapt_draft_tokens": False},
            "adapt_draft_tokens is false; set both to true, or adapt_draft_budget to false",
        ),
        (
            {"mode": "lossless", "drafter_invariant": "yes"},
            "drafter_invariant must be true or false, got 'yes'",
        ),
        (
            {"mode": "lossless", "draft_weights": "int8"},
            r"draft_weights must be one of \('auto', 'fp8'\), got 'int8'",
        ),
        ({"mode": "lossless", "draft_weights": True}, "draft_weights must be one of .* got True"),
        (
            {"mode": "lossless", "guess_head": "h"},
            "guess_head is 'h', but guess_tokens is 0; set guess_tokens to 3, .*or leave guess_head",
        ),
        (
            {"mode": "lossless", "guess_tokens": 3, "guess_head": 3},
            "guess_head must be the folder or name of a head, got 3",
        ),
        (
            {"mode": "lossless", "guess_tokens": 3, "guess_lookup_min": 2},
            "guess_lookup_min is 2, but without a guess_head, .* leave guess_lookup_min out",
        ),
        (
            {"mode": "lossless", "guess_tokens": 3, "guess_head": "h", "guess_lookup_min": 9},
            "guess_lookup_min is 9, but at most 8 tokens are looked up; choose a value from 0 to 8",
        ),
        (
            {"mode": "lossless", "guess_tokens": 3, "guess_head": "h", "guess_lookup_min": -1},
            "guess_lookup_min must be an integer of at least 0, got -1",
        ),
        (
            {"mode": "lossless", "guess_tokens": -1},
            "guess_tokens must be an integer of at least 0, got -1",
        ),
        (
            {"mode": "lossy", "schedule": "fixed:9", "draft_weights": "fp8"},
            "'lossy' has no setting 'draft_weights'",
        ),
        (
            {"mode": "lossy", "schedule": "fixed:9", "drafter_invariant": True},
            "'lossy' has no setting 'drafter_inv",
        ),
        ('{"mode": ', "is not valid JSON"),
        ('{"top_k": [9], "top_k": [1]}', "the key 'top_k' occurs twice"),
        ({"mode": ["lossless"]}, r"unknown mode \['lossless'\]"),
        (
            "loseless",
            r"^no mode 'loseless', expected one of .*, and no schedule 'loseless': expect",
        ),
        ("qwen3-4b-0.8", "^no schedule 'qwen3-4b-0.8': expected"),
        ({"draft_tokens": 3}, "'draft_tokens' needs a mode; set mode to one of"),
        ({"schedule": "fixed:9"}, "'schedule' needs a mode"),
    ],
)
def test_invalid_decoding_settings_raise_errors(value, message):
    with pytest.raises(ConfigError, match=message):
        Decoding.load(value)


@pytest.mark.parametrize(
    ("setting", "adapts"),
    [
        ({}, True),
        ({"adapt_draft_budget": False}, False),
        (
            {"adapt_draft_tokens": False},
            False,
        ),  # fixing the number of drafts keeps samples reproducible
        ({"guess_tokens": 3}, False),
        ({"draft_schedule": "fixed:9"}, False),  # explicit values are kept
        ({"draft_schedule": "fixed:9", "adapt_draft_budget": True}, True),
    ],
)
def test_draft_budget_adapts_unless_draft_settings_rule_it_out(setting, adapts):
    decoding = Decoding.load({"mode": "lossless", **setting})
    assert decoding.draft_budgets == (DRAFT_BUDGETS if adapts else (1.0,))
    assert Decoding.load(decoding.to_dict()).draft_budgets == decoding.draft_budgets
    assert Decoding.load("fixed:9").draft_budgets == Decoding.load("dense").draft_budgets == (1.0,)


def test_the_meter_measures_every_16_cycles_by_default():
    assert Decoding.lossless(meter_schedule=TABLE).meter_cycles == 16
    assert Decoding.lossless(meter_schedule=TABLE, meter_every=3).meter_cycles == 3


def test_a_default_draft_schedule_can_be_told_from_the_same_schedule_given():
    default = Decoding.load("lossless")
    given = Decoding.load({"mode": "lossless", "draft_schedule": DRAFT_SCHEDULE.to_dict()})
    assert default.has_default_schedule and not given.has_default_schedule
    assert default == given and default.to_dict() == given.to_dict()
    assert replace(default, draft_tokens=3).has_default_schedule
    assert not default.with_schedule(DRAFT_SCHEDULE).has_default_schedule


def test_acceptance_predicted_for_another_budget_matches_a_hand_calculation():
    assert acceptance_at(0.9, 1) == pytest.approx(0.9)
    assert acceptance_at(0.9, 2) == pytest.approx(1 - 0.1 / 2**0.7)
    assert acceptance_at(0.2, 0.5) == 0 and acceptance_at(1.0, 0.5) == 1


def test_changing_the_schedule_keeps_lossless_mode_but_may_change_other_modes():
    assert Decoding.load("lossless").with_schedule(TABLE) == Decoding("lossless", TABLE)
    assert Decoding.load("dense").with_schedule(TABLE).mode == "lossy"
    assert Decoding.load("fixed:9").with_schedule(SparsitySchedule.dense()).mode == "dense"
