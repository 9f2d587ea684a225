"""Fixtures that several test files use with vLLM."""

import gc

import pytest

from sparrow.engines.hf import HFEngine
from tests.vllm import tiny_vllm as tiny


@pytest.fixture(scope="session", autouse=True)
def frozen_imports():
    """Keep the objects of imported modules, of which there are a million, out of garbage collections.
    vLLM collects garbage eight times per engine. It also freezes what exists after an engine's
    start, and unfreezes everything when the engine stops, so both must do nothing.
    """
    gc.collect()
    gc.freeze()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gc, "freeze", lambda: None)
        patch.setattr(gc, "unfreeze", lambda: None)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Return a folder with a model."""
    pytest.importorskip("vllm.version")
    path = tmp_path_factory.mktemp("model")
    tiny.checkpoint(path)
    return path


@pytest.fixture(scope="module")
def reference():
    """Return an engine in transformers with the same model."""
    return HFEngine(tiny.tiny_model(), tiny.SMALL, eos_ids=[])


@pytest.fixture(scope="module")
def old_and_new(tmp_path_factory):
    """Return a folder with a model, the model, a different model, and a file with the different
    model's weights.
    """
    folder, other = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("other")
    model = tiny.checkpoint(folder, num_hidden_layers=2)
    new = tiny.checkpoint(other, num_hidden_layers=2, seed=1)
    return folder, model, new, str(other / "model.safetensors")
