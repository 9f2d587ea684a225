"""Test which sampling options the adapters refuse, whatever the trainer."""

import pytest

from sparrow.errors import ConfigError
from sparrow.integrations.sampling import NEUTRAL, check_whole_softmax

ANOTHER = {
    "top_p": 0.99,
    "top_k": 20,
    "min_p": 0.01,
    "typical_p": 0.9,
    "repetition_penalty": 1.05,
    "presence_penalty": -1,
    "frequency_penalty": 0.1,
    "min_tokens": 3,
    "logit_bias": {3: 1.0},
    "bad_words": ["a"],
    "allowed_token_ids": [1, 2],
    "structured_outputs": {"regex": "a"},
    "logits_processors": [print],
}


def test_sampling_options_that_change_the_distribution_are_refused():
    assert ANOTHER.keys() == NEUTRAL.keys()
    for name, value in ANOTHER.items():
        with pytest.raises(ConfigError) as refused:
            check_whole_softmax({name: value, "temperature": 0.7}, "rollout.")
        assert f"rollout.{name} is {value!r}" in str(refused.value)


def test_sampling_options_that_keep_the_full_softmax_are_accepted():
    for name, neutral in NEUTRAL.items():
        for value in neutral:
            check_whole_softmax({name: value}, "")
    check_whole_softmax({"temperature": 0.7, "stop": ["a"], "top_p": 1.0, "top_k": -1}, "")
