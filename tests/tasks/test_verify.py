"""Test how responses are judged concurrently: the first error is raised, no verification starts
after it, and hanging verifiers are reported.
"""

import sys
import time

import pytest

from sparrow.errors import RewardError
from sparrow.tasks import Problem
from sparrow.tasks import verify as verify_module
from sparrow.tasks.verify import stated, verify_all

SLOW_S = 0.3
LIMIT_S = 2.0  # long enough for the other verifiers, even on a busy machine


def judged(verify, count, **options):
    return verify_all(
        [Problem(str(i), "", verify) for i in range(count)],
        [str(i) for i in range(count)],
        **options,
    )


def test_rewards_are_returned_in_the_order_of_the_responses():
    def verify(text):
        time.sleep(SLOW_S * (text == "0"))
        return float(text)

    assert judged(verify, 100) == [float(i) for i in range(100)]
    assert judged(verify, 0) == []


def test_first_error_is_raised_and_no_new_verification_starts(monkeypatch):
    monkeypatch.setattr(verify_module, "VERIFYING", 2)
    begun = []

    def verify(text):
        begun.append(text)
        time.sleep(SLOW_S * (text == "0"))
        raise ValueError

    with pytest.raises(RewardError, match="of problem '0' raised ValueError"):
        judged(verify, 5)
    assert set(begun) <= {"0", "1"}


def test_a_hanging_verifier_is_reported_unless_another_verifier_failed():
    def verify(text):
        time.sleep(60 * (text == "1"))
        return float(text)

    with pytest.raises(
        RewardError,
        match=r"of problem '1' has not returned within 2 s; fix it, or raise the limit if this is a "
        r"training run \(reward.time_limit\), and continue",
    ):
        judged(verify, 3, time_limit=LIMIT_S)

    def verify_or_fail(text):
        return verify(text) or 1 / 0

    with pytest.raises(RewardError, match="of problem '0' raised ZeroDivisionError"):
        judged(verify_or_fail, 3, time_limit=LIMIT_S)


@pytest.mark.parametrize("returned", ["seven", 1e7])
def test_errors_say_how_to_continue_training_and_evaluation(returned):
    with pytest.raises(
        RewardError,
        match=r"it and continue \(sparrow train: with --resume, sparrow eval: with the same command\)",
    ):
        judged(lambda text: returned, 1)


@pytest.mark.parametrize(
    "ends", [lambda text: sys.exit(3), lambda text: exec("raise GeneratorExit")]
)
def test_a_verifier_that_exits_is_reported_immediately(ends):
    began = time.monotonic()
    with pytest.raises((RewardError, GeneratorExit)) as raised:
        judged(ends, 3, time_limit=600)
    assert time.monotonic() - began < 10
    if isinstance(raised.value, RewardError):
        assert "of problem '0' raised SystemExit: 3" in str(raised.value)
    with pytest.raises(RewardError, match="the extract function of problem 'p' raised SystemExit"):
        stated(Problem("p", "", float, extract=sys.exit), "0")


@pytest.mark.parametrize("text", ["1.0", b"1.0", "nan", 10**400, [1.0, 2.0], None, float("inf")])
def test_rewards_that_are_not_finite_numbers_raise_an_error(text):
    with pytest.raises(RewardError, match="expected a finite number"):
        judged(lambda _: text, 1)


def test_reward_beyond_one_million_raises_an_error():
    assert judged(lambda _: -1e6, 1) == [-1e6] and judged(lambda _: True, 1) == [1.0]
    for value in (1e300, -1e7):
        with pytest.raises(RewardError, match="absolute value of a reward must be at most 1e\\+06"):
            judged(lambda _, value=value: value, 1)
