"""Test that models are saved in folders like the ones they were loaded from, so that other programs
can use them.
"""

import json
import shutil

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparrow.cli import main
from sparrow.engines.hf import load_model
from sparrow.tasks import build_tokenizer
from sparrow.train.pretrained import save_model, save_tokenizer
from tests.conftest import tiny_model


def dtypes(folder) -> set[torch.dtype]:
    return {weight.dtype for weight in load_file(folder / "model.safetensors").values()}


@pytest.fixture
def source(tmp_path, checkpoint):
    """Create a checkpoint in bfloat16 in the format of transformers 4."""
    folder = tmp_path / "source"
    shutil.copytree(checkpoint, folder)
    model = AutoModelForCausalLM.from_pretrained(checkpoint).to(torch.bfloat16)
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["torch_dtype"] = config.pop("dtype")
    config["rope_theta"] = config.pop("rope_parameters")["rope_theta"] * 2
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_model_is_saved_in_its_checkpoints_dtype(tmp_path, source):
    model, _ = load_model(str(source), "fp32", torch.device("cpu"))
    weights = {name: p.detach() for name, p in model.named_parameters()}
    assert {weight.dtype for weight in weights.values()} == {torch.float32}
    save_model(model, weights, tmp_path / "out")
    assert dtypes(tmp_path / "out") == dtypes(source) == {torch.bfloat16}
    size = [(f / "model.safetensors").stat().st_size for f in (tmp_path / "out", source)]
    assert size[0] == pytest.approx(size[1], rel=0.02)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.dtype == torch.bfloat16
    for name, weight in again.named_parameters():
        assert torch.equal(weight, weights[name].bfloat16())


def test_a_saved_config_keeps_earlier_versions_field_names(tmp_path, source):
    model, _ = load_model(str(source), "fp32", torch.device("cpu"))
    save_model(model, dict(model.named_parameters()), tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    before = json.loads((source / "config.json").read_text())
    assert config["torch_dtype"] == config["dtype"] == "bfloat16"
    assert config["rope_theta"] == before["rope_theta"]
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert again.config.rope_parameters["rope_theta"] == before["rope_theta"]


def test_a_model_without_a_checkpoint_keeps_its_dtype(tmp_path):
    model = tiny_model()
    assert not model.name_or_path
    save_model(model, dict(model.named_parameters()), tmp_path)
    assert dtypes(tmp_path) == {torch.float32}
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.float32


def test_modules_that_must_stay_in_float32_are_saved_in_float32(tmp_path, source):
    model, _ = load_model(str(source), "fp32", torch.device("cpu"))
    model._keep_in_fp32_modules = {"norm"}
    save_model(model, dict(model.named_parameters()), tmp_path / "out")
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 - not a mapping
            expected = torch.float32 if "norm" in name else torch.bfloat16
            assert file.get_tensor(name).dtype == expected, name


@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "TokenizersBackend", None])
def test_tokenizer_is_saved_with_a_class_available_in_every_transformers_version(
    tmp_path, checkpoint, named
):
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    path = source / "tokenizer_config.json"
    config = json.loads(path.read_text()) | {"additional_special_tokens": ["<think>"]}
    config["tokenizer_class"] = named or config["tokenizer_class"]
    path.write_text(json.dumps(config))
    loaded = AutoTokenizer.from_pretrained(source) if named else build_tokenizer()
    if not named:
        loaded.add_special_tokens({"additional_special_tokens": ["<think>"]})
    save_tokenizer(loaded, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    # transformers 5 stores this list under another name, ``extra_special_tokens``. Earlier versions
    # fail if they find a list there.
    assert written["additional_special_tokens"] == ["<think>"]
    assert "extra_special_tokens" not in written
    again = AutoTokenizer.from_pretrained(tmp_path / "out")
    text = " ba = 7\n<think> ku"
    assert again(text)["input_ids"] == loaded(text)["input_ids"]
    assert again.all_special_tokens == loaded.all_special_tokens
    assert again.padding_side == loaded.padding_side


def test_a_checkpoints_tokenizer_class_is_kept(tmp_path, checkpoint):
    source = tmp_path / "source"
    shutil.copytree(checkpoint, source)
    path = source / "tokenizer_config.json"
    config = json.loads(path.read_text())
    tokenizer = AutoTokenizer.from_pretrained(source)
    path.write_text(json.dumps(config | {"tokenizer_class": "Qwen2TokenizerFast"}))
    save_tokenizer(tokenizer, tmp_path / "out")
    written = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert written["tokenizer_class"] == "Qwen2TokenizerFast"


@pytest.mark.slow
def test_training_saves_models_in_the_initial_models_dtype(tmp_path, source):
    small = ["--rollout.prompts", "2", "--rollout.samples", "2", "--rollout.max-new-tokens", "8"]
    run = tmp_path / "run"
    arguments = ["--model", str(source), "--task", "trace:lines=4", "--run-dir", str(run)]
    main(["train", *arguments, *small, "--steps", "1", "--export.every", "1"])
    for folder in (run / "model", run / "exports" / "step-1"):
        assert dtypes(folder) == {torch.bfloat16}
        written = json.loads((folder / "tokenizer_config.json").read_text())
        assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
