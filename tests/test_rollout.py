"""Test the plain data types that engines and trainers exchange."""

import numpy as np
import pytest

from sparrow.errors import ConfigError, PromptError
from sparrow.rollout import Sampling, split


def test_responses_are_split_by_their_lengths():
    parts = split(np.arange(5), [2, 0, 3])
    assert [part.tolist() for part in parts] == [[0, 1], [], [2, 3, 4]]


def test_no_responses_are_split_into_no_arrays():
    assert split(np.zeros((0, 4)), []) == []


def test_each_prompt_has_its_own_seed():
    assert Sampling(8, seeds=[7, 5]).request_seeds(2) == [7, 5]
    derived = Sampling(8, seed=1).request_seeds(3)
    assert len(set(derived)) == 3 and derived[:2] == Sampling(8, seed=1).request_seeds(2)


def test_a_wrong_number_of_seeds_raises_an_error():
    with pytest.raises(ConfigError, match="seeds has 1 seeds, but there are 2 prompts; pass one"):
        Sampling(8, seeds=[7]).request_seeds(2)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens is 0, but must be at least 1"),
        ({"top_n": -1}, "top_n is -1, but must be at least 0"),
        ({"temperature": float("nan")}, "temperature is nan, but must be finite"),
        ({"temperature": 1e-38}, "temperature is 1e-38, but must be 0, for the most likely"),
        ({"seed": -1}, "seed is -1, but must be at least 0"),
        ({"seeds": [3, 2**64]}, r"seed is 18446744073709551616, .* less than 2\*\*63"),
        ({"top_k": 0}, "top_k is 0, but must be at least 1"),
        ({"top_p": 0.0}, "top_p is 0.0, but must be greater than 0"),
    ],
)
def test_sampling_parameters_out_of_range_raise_an_error(setting, message):
    with pytest.raises(ConfigError, match=message):
        Sampling(**{"max_new_tokens": 8, **setting})


@pytest.mark.parametrize(("unknown", "shown"), [([8, 3], 8), ([0, -1], -1), ([-1, 9], 9)])
def test_a_token_that_the_model_does_not_have_raises_an_error(unknown, shown):
    sampling = Sampling(2)
    sampling.check([[0, 7]], 10, 8)
    sampling.check([unknown], 10)
    message = f"has the token id {shown}, but the model's ids go from 0 to 7; encode it with"
    with pytest.raises(PromptError, match=message) as raised:
        sampling.check([[0, 7], unknown], 10, 8)
    assert raised.value.index == 1


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ("abc", "prompt 0 is the text 'a'; encode it"),
        ([[1, 2], "abc"], "prompt 1 is the text 'abc'; encode it"),
    ],
)
def test_text_in_place_of_token_ids_raises_an_error(prompts, message):
    with pytest.raises(PromptError, match=message):
        Sampling(max_new_tokens=8).check(prompts, context=100)
