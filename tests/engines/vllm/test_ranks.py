"""Test that two training processes, each with its own vLLM on a CPU, sample and train like one
process.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.version")

from sparrow.engines.vllm import VLLMEngine
from sparrow.errors import ConfigError
from sparrow.tasks import build_tokenizer
from sparrow.train.config import OptimizerConfig, RolloutConfig, TrainConfig
from sparrow.train.trainer import Trainer
from tests.conftest import tiny_model
from tests.train.test_ranks import assert_same_run, environments
from tests.train.test_trainer import EarlyWords
from tests.vllm import tiny_vllm as tiny

pytestmark = pytest.mark.slow

SCHEDULE = tiny.SMALL.replace(bin_tokens=32)


def train(folder: Path, run: str) -> None:
    tokenizer = build_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), initializer_range=0.3)
    config = TrainConfig(
        run_dir=str(folder / run),
        steps=2,
        save_every=9,
        seed=5,
        rollout=RolloutConfig(prompts=3, samples=3, max_new_tokens=16, top_n=8),
        optimizer=OptimizerConfig(learning_rate=1e-3, token_budget=100),
    )
    with tiny.engine(folder / "model", SCHEDULE) as engine:
        Trainer(config, model, tokenizer, EarlyWords(), engine, SCHEDULE).train()


def test_two_processes_with_one_engine_each_train_like_one_process(tmp_path):
    tiny.checkpoint(tmp_path / "model", vocab_size=len(build_tokenizer()), initializer_range=0.3)
    code = f"import sys; sys.path[:0] = {sys.path!r}; import pathlib; from tests.engines.vllm import test_ranks as t\n"
    code += "from accelerate import PartialState; PartialState(cpu=True)\n"
    code += f"t.train(pathlib.Path({str(tmp_path)!r}), 'two')"
    processes = [
        subprocess.Popen([sys.executable, "-c", code], env=world, stderr=subprocess.PIPE, text=True)
        for world in environments(2)
    ]
    try:
        errors = [process.communicate(timeout=900)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], errors[0][-3000:]
    assert "Invalid process group" not in errors[0]
    train(tmp_path, "one")
    assert_same_run(tmp_path / "one", tmp_path / "two")


def test_engine_on_several_devices_is_refused_in_multi_process_training(tmp_path, monkeypatch):
    monkeypatch.setitem(os.environ, "WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"2 training processes .* 4 devices per engine; run this model"
    ):
        VLLMEngine(str(tmp_path), SCHEDULE, tensor_parallel_size=4)
