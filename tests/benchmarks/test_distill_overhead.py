"""Test that ``benchmarks/distill_overhead.py`` runs, with a tiny model."""

import importlib
import json
from pathlib import Path

import pytest
import torch
from transformers import Qwen3Config

from sparrow.train.config import OptimizerConfig


@pytest.fixture
def script(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("distill_overhead")


def test_the_dense_update_and_all_variants_are_timed(script, monkeypatch, tmp_path):
    shape = Qwen3Config(
        vocab_size=100_000,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=3,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
    )
    changed = {
        "PROMPT": 16,
        "TOKENS": 64,
        "ROUNDS": 1,
        "TEXTS": {"runs": 12},
        "qwen3": lambda name: shape,
        "read": lambda distiller, step: 3.0,  # counts pages in Triton's kernels
        # accelerate uses one precision for all tests
        "OptimizerConfig": lambda **options: OptimizerConfig(**options | {"precision": "fp32"}),
    }
    for name, value in changed.items():
        monkeypatch.setattr(script, name, value)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 2**30)
    out = tmp_path / "result.json"

    script.measure(script.make_trainer(str(tmp_path / "run")), out)

    measured = json.loads(out.read_text())["runs"]
    assert measured.keys() == {"read", "dense_update", *script.VARIANTS}
    assert all(measured[name]["added"] > 0 for name in script.VARIANTS)
