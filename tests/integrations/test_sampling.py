"""Test which sampling options the adapters refuse, whatever the trainer, and which ones the probe
sends.
"""

import numpy as np
import pytest

from sparrow.errors import ConfigError
from sparrow.integrations import probe
from sparrow.integrations.sampling import NEUTRAL, check_whole_softmax
from sparrow.schedule import SparsitySchedule

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


def test_probe_samples_from_the_whole_softmax_whatever_the_checkpoint_recommends(monkeypatch):
    """A server takes missing settings from the checkpoint's generation_config.json."""
    sent = []

    def answer(url, body=None):
        if body is None:
            return {"data": [{"id": "served", "max_model_len": 3}]}
        sent.append(body)
        listed = {"token_id:5": -0.1, "token_id:6": -3.0}
        scored = {"5": {"logprob": -0.1}, "6": {"logprob": -3.0}}
        logprobs = {"tokens": ["token_id:5"], "top_logprobs": [listed]}
        choice = {"finish_reason": "length", "logprobs": logprobs}
        return {"choices": [{**choice, "prompt_logprobs": [None, scored]}]}

    monkeypatch.setattr(probe, "_request", answer)
    (response,) = probe.probe(["http://localhost:1"], [[1]], SparsitySchedule.fixed(4), 1, top_n=2)
    assert response.lower == pytest.approx(np.exp(-0.1) + np.exp(-3.0))
    assert len(sent) == 2
    for name, value in {"top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}.items():
        assert [body.get(name) for body in sent] == [value, value], name
