"""Test users' reward functions: how each form is called, and which forms raise an error before the
first rollout.
"""

import functools
import pickle

import numpy as np
import pytest

from sparrow.errors import ConfigError, RewardError
from sparrow.tasks.dataset import DatasetTask
from sparrow.tasks.formats import FORMATS
from sparrow.tasks.judges import Judge
from sparrow.tasks.verify import verify

ROWS = [
    {"question": "1+1?", "answer": "2", "level": 3, "data_source": "sums", "extra_info": {"i": 7}},
    {"question": "2+2?", "answer": "4", "level": 5, "data_source": "sums", "extra_info": None},
]


def ours(response, answer):
    return float(response == answer)


def ours_with_columns(response, *, answer, level, unknown=9):
    return float(response == answer) + level / 10 + unknown


def ours_with_all(text, **columns):
    assert sorted(columns) == ["answer", "data_source", "extra_info", "level", "question"]
    return float(text == columns["answer"]) + columns["level"] / 10


def as_in_trl(completions, answer, level, **kwargs):
    assert kwargs["prompts"][0].startswith("1+1?") and kwargs["question"] == ["1+1?"]
    return [float(c == a) + n / 10 for c, a, n in zip(completions, answer, level, strict=True)]


def as_in_trl_with_prompts(prompts, completions):
    return np.array([len(completions) * prompts[0].startswith("1+1?")])


def as_in_verl(data_source, solution_str, ground_truth, extra_info=None):
    assert data_source == "sums"
    return float(solution_str == ground_truth) + extra_info["i"] + extra_info["level"] / 10


def as_in_verl_with_parts(solution_str, ground_truth, **kwargs):
    assert set(kwargs) == {"data_source", "extra_info"}
    return {"score": float(solution_str == ground_truth), "acc": 0.0}


class Callable:
    def __call__(self, response, answer):
        return float(response == answer)


def task(function, rows=ROWS):
    judge = Judge.of(function, "mine:judge")
    return DatasetTask("qa", rows, FORMATS["qa"], {"math": judge}, source="rows.jsonl")


@pytest.mark.parametrize(
    "function, right",
    [
        (ours, 1.0),
        (ours_with_columns, 10.3),
        (ours_with_all, 1.3),
        (as_in_trl, 1.3),
        (as_in_trl_with_prompts, 1.0),
        (as_in_verl, 8.3),
        (as_in_verl_with_parts, 1.0),
        (Callable(), 1.0),
        (functools.partial(ours_with_columns, level=1), 10.3),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_a_reward_function_is_called_with_the_arguments_its_trainer_would_pass(function, right):
    problem = next(iter(task(function)))
    assert verify(pickle.loads(pickle.dumps(problem)), "2") == pytest.approx(right)
    if function is not as_in_trl_with_prompts:
        assert verify(problem, "3") == pytest.approx(right - 1)


async def asynchronous(completions, **kwargs):
    return [0.0]


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda: 1.0, "has no parameter for the response"),
        (lambda *, answer: 1.0, "has no parameter for the response"),
        (lambda response: 1.0, "has no parameter for the answer"),
        (lambda response, truth: 1.0, "has no parameter for the answer"),
        (
            lambda response, answer, grade: 1.0,
            "needs 'grade', but the columns of row 1 of rows.jsonl are",
        ),
        (
            lambda completions, trainer_state: [1.0],
            "needs 'trainer_state', but the columns of row 1",
        ),
        (
            lambda solution_str, ground_truth, tokenizer: 1.0,
            "needs 'tokenizer', but the columns of row 1",
        ),
        (asynchronous, "is asynchronous; make it a plain function"),
        (3, "is a int; a reward is f"),
    ],
)
def test_loading_a_reward_function_with_an_unusable_signature_raises_an_error(function, message):
    with pytest.raises(ConfigError, match=message):
        task(function)


def test_loading_fails_if_a_required_column_is_missing_from_some_rows():
    rows = [ROWS[0], {"question": "3+3?", "answer": "6"}]
    with pytest.raises(ConfigError, match="needs 'level', but the columns of row 2 of rows"):
        task(ours_with_columns, rows)


@pytest.mark.parametrize(
    "function, message",
    [
        (lambda completions, **_: 1.0, "returned 1.0 for a list of one completion"),
        (lambda completions, **_: [1.0, 2.0], "for a list of one completion"),
        (lambda completions, **_: [None], "returned None, expected a finite number"),
        (lambda solution_str, ground_truth: {"acc": 1}, r"without the key 'score' \(keys: acc\)"),
    ],
)
def test_rewards_of_the_wrong_type_or_shape_raise_errors(function, message):
    with pytest.raises(RewardError, match=message):
        verify(next(iter(task(function))), "2")


def test_column_with_the_name_of_the_response_parameter_is_left_out():
    def named(response, answer, **columns):
        return float(response == answer and columns == {"question": "1+1?"})

    def positional(response, /, **columns):
        return float(columns["response"] == "two")

    row = {"question": "1+1?", "answer": "2", "response": "two"}
    assert Judge.of(named, "named").verifier("2", "", row, "sums")("2") == 1
    assert Judge.of(positional, "positional").verifier("2", "", row, "sums")("2") == 1
