"""Test that non-finite logits are reported in one sentence wherever a token would be sampled from
them.
"""

import pytest
import torch

from sparrow.decoding import Decoding
from sparrow.engines.hf import HFEngine
from sparrow.errors import TrainingDiverged, UnsupportedModel
from sparrow.model.speculative import Shape
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from tests.conftest import tiny_model


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("mode", ["dense", "lossless"])
def test_engine_reports_non_finite_logits(mode, bad, temperature):
    model = tiny_model()
    decoding = Decoding.lossless() if mode == "lossless" else SparsitySchedule.dense()
    engine = HFEngine(model, decoding, eos_ids=[])
    with torch.no_grad():
        model.model.norm.weight.fill_(bad)
    with pytest.raises(TrainingDiverged, match="the model's logits are not finite"):
        engine.generate([[1, 2, 3]], Sampling(4, temperature))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_non_finite_weights_are_reported_as_damaged(bad):
    model = tiny_model()
    with torch.no_grad():
        model.model.norm.weight.fill_(bad)
    with pytest.raises(UnsupportedModel, match="are not finite, because its weights are damaged"):
        HFEngine(model, SparsitySchedule.dense(), eos_ids=[])


def test_logits_of_minus_infinity_exclude_tokens():
    logits = torch.tensor([[0.0, -torch.inf]])
    assert Shape().distribution(logits).tolist() == [[1.0, 0.0]]
    with pytest.raises(TrainingDiverged, match="not finite"):
        Shape().distribution(torch.full((1, 2), -torch.inf))
