"""Test how users name engines. Each engine has one registry entry, which all commands use."""

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from sparrow.cli import loading
from sparrow.cli.commands.train_options import TrainOptions
from sparrow.decoding import Decoding
from sparrow.engines import registry
from sparrow.engines.registry import KINDS, Kind, parse_engine
from sparrow.errors import ConfigError
from sparrow.train.config import RolloutConfig

DENSE = Decoding.lossy("dense")


@pytest.mark.parametrize(
    "spec, name, rest, options",
    [
        ("hf", "hf", "", {}),
        ("vllm", "vllm", "", {}),
        ("vllm:max_model_len=64,seed=1", "vllm", "max_model_len=64,seed=1", None),
        ("http://a:1,http://b:2", "http", "http://a:1,http://b:2", {}),
        ("https://a", "http", "https://a", {}),
        ("stock:", "stock", "", {}),
        ("stock:http://a:1", "stock:http", "http://a:1", {}),
    ],
)
def test_kind_of_an_engine_is_the_first_part_of_its_spec(spec, name, rest, options):
    parsed = parse_engine(spec)
    assert parsed.kind.names[0] == name and parsed.rest == rest
    assert parsed.options == ({"max_model_len": 64, "seed": 1} if options is None else options)


@pytest.mark.parametrize("spec", ["nonsense", "hf:seed=1", "vllms", "http:8000", "", "HF"])
def test_unknown_engine_error_lists_the_known_engines(spec):
    with pytest.raises(ConfigError) as refused:
        parse_engine(spec)
    sentence = str(refused.value)
    assert sentence.startswith(f"unknown engine {spec!r}; expected hf, vllm, vllm:option=value,...")
    assert "http://host:port" in sentence and "stock" not in sentence


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.names[0])
def test_every_kind_of_engine_has_a_start_function(kind):
    module, _, function = kind.start.partition(":")
    assert callable(getattr(importlib.import_module(module), function))


def test_engine_without_sparrow_is_accepted_only_for_audits():
    with pytest.raises(ConfigError, match="unknown engine 'stock:http://a'"):
        loading.load_engine("stock:http://a", "reasoner", None, None, DENSE, "fp32")


@pytest.mark.parametrize("options, asleep", [("", False), (":enable_sleep_mode=true", True)])
def test_audit_starts_vllm_engines_without_sleep_mode_unless_requested(
    monkeypatch, options, asleep
):
    from sparrow.engines.vllm import engine

    started = []
    monkeypatch.setattr(engine, "VLLMEngine", lambda *_, **options: started.append(options))
    arguments = (f"vllm{options}", "reasoner", None, None, DENSE, "fp32")
    loading.load_engine(*arguments, audits=True)
    loading.load_engine(*arguments)
    assert started[0]["enable_sleep_mode"] is asleep
    assert started[1].get("enable_sleep_mode", True) is True


@pytest.fixture
def echo(monkeypatch):
    """Register a custom engine, which consists of a module and one registry entry."""
    module = ModuleType("echo_engine")
    module.start = lambda asked: SimpleNamespace(**asked.spec.options)
    monkeypatch.setitem(sys.modules, "echo_engine", module)
    kind = Kind(("echo",), "echo_engine:start", "options", length_option="longest")
    monkeypatch.setattr(registry, "KINDS", (*KINDS, kind))


def test_one_registry_entry_makes_an_engine_available_to_all_commands(echo):
    engine = loading.load_engine("echo:loud=true", "reasoner", None, None, DENSE, "fp32")
    assert engine.loud is True
    assert loading.prompt_room(100, "echo:longest=50", 20) == 30
    assert loading.prompt_room(100, "echo:longest=-1", 20) == 80
    with pytest.raises(ConfigError, match="or echo, echo:option=value"):
        parse_engine("other")
    with pytest.raises(ConfigError, match="engine is 'echo', but mode 'auto' works only"):
        rollout = RolloutConfig(mode="auto")
        TrainOptions(model="reasoner", task="trace", rollout=rollout, engine="echo", tau=0.9)
