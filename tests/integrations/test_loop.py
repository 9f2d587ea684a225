"""Test how p5 is measured in a custom training loop with a transformers model."""

from types import SimpleNamespace

import pytest
import torch

from sparrow.engines.hf import HFEngine, eos_ids
from sparrow.engines.measure import measure
from sparrow.errors import ConfigError
from sparrow.integrations.loop import measured
from sparrow.mismatch import mismatch_metrics
from sparrow.mismatch.tokens import pool
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from tests.conftest import VOCAB, tiny_model

SCHEDULE = SparsitySchedule.fixed(1, page_size=8, bin_tokens=64, dense_layers=(0,))
TOKENIZER = SimpleNamespace(eos_token_id=None)
PROMPTS = [[1, 2, 3] * 20, [4, 5] * 40]


def test_measuring_in_a_loop_matches_measure_and_restores_the_model():
    model = tiny_model().train()
    model.lm_head.weight.grad = torch.ones_like(model.lm_head.weight)
    attention = model.config._attn_implementation
    found = measured(model, TOKENIZER, PROMPTS, SCHEDULE, max_new_tokens=12, top_n=VOCAB, seed=3)
    assert model.training and model.config._attn_implementation == attention
    assert bool((model.lm_head.weight.grad == 1).all())
    engine = HFEngine(model, SCHEDULE, eos_ids(model, TOKENIZER))
    wanted = measure(engine, engine, PROMPTS, Sampling(12, 1.0, VOCAB, seed=3), SCHEDULE)
    assert found == mismatch_metrics(pool(wanted, 64, 3))
    assert 0 < found["sparrow/p5"] < 1 and found["sparrow/sequences"] == 2
    dense = measured(model, TOKENIZER, PROMPTS, "dense", max_new_tokens=12, top_n=VOCAB)
    assert "sparrow/p5" not in dense
    ceilings = [value for name, value in dense.items() if name.endswith("/ceiling")]
    assert ceilings and ceilings == pytest.approx([1] * len(ceilings), abs=1e-4)


@pytest.mark.parametrize(
    "wrong, message",
    [
        ({"prompts": []}, "no prompts to measure with"),
        ({"temperature": 0.0}, "a greedy actor has no acceptance rate"),
        ({"schedule": "lossless"}, "no mismatch to measure"),
        ({"schedule": "fixed:x"}, "no schedule 'fixed:x'"),
    ],
)
def test_invalid_input_is_reported_in_one_sentence(wrong, message):
    given = {"prompts": PROMPTS, "schedule": SCHEDULE, "max_new_tokens": 4, **wrong}
    with pytest.raises(ConfigError, match=message):
        measured(tiny_model(), TOKENIZER, **given)
