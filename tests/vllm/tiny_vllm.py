"""Run real vLLM engines with tiny checkpoints, one after another, in the tests' own process."""

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from sparrow.engines.vllm import VLLMEngine
from sparrow.rollout import Rollout
from sparrow.schedule import SparsitySchedule
from tests.conftest import VOCAB, tiny_model

torch.set_num_threads(1)
# Set before vLLM reads them: few threads, no compilation, no downloads.
for name, value in dict(
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="ERROR",
    VLLM_NO_USAGE_STATS="1",
    TORCHDYNAMO_DISABLE="1",
    HF_HUB_OFFLINE="1",
).items():
    os.environ.setdefault(name, value)

OPTIONS: dict[str, Any] = dict(
    dtype="float32",
    enforce_eager=True,
    kv_cache_memory_bytes=64 * 2**20,
    block_size=32,
    max_model_len=1024,
)
SMALL = SparsitySchedule(top_k=(2, 3, 4, 6), bin_tokens=100, dense_layers=(0,))
"""A schedule that is sparse beyond about a hundred tokens, in all layers except the first."""
UNBOUNDED = SparsitySchedule.dense(dense_layers=(0,))
CACHE_IN_8_BITS = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM supports 8-bit KV caches only on CPUs with AVX-512 or AMX",
)


def checkpoint(folder: Path, **changes: Any) -> PreTrainedModel:
    """Return a random model that is also written to ``folder``."""
    model = tiny_model(**changes)
    model.save_pretrained(folder)
    return model


def discoverable(folder: Path) -> str:
    """Return a ``PYTHONPATH`` that lets other processes find the plugin even if this checkout is
    not installed.
    """
    path = [str(Path(__file__).parents[2]), *sys.path]
    if not entry_points(group="vllm.general_plugins", name="sparrow"):
        described = folder / "plugin" / "sparrow_rl-0.dist-info"
        described.mkdir(parents=True)
        (described / "METADATA").write_text("Metadata-Version: 2.1\nName: sparrow-rl\nVersion: 0\n")
        (described / "entry_points.txt").write_text(
            "[vllm.general_plugins]\nsparrow = sparrow.vllm.plugin:register\n"
        )
        path.append(str(described.parent))
    return os.pathsep.join(path)


def on_v2(folder: Path) -> str:
    """Return a ``PYTHONPATH`` for processes that use vLLM's V2 model runner, which lossless mode
    requires.
    """
    (folder / "sitecustomize.py").write_text("import tests.vllm.v2_on_cpu\n")
    return os.pathsep.join([str(folder), discoverable(folder)])


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, VOCAB, n).tolist() for n in lengths]


@contextlib.contextmanager
def engine(
    folder: Path, schedule: SparsitySchedule = SMALL, **options: Any
) -> Iterator[VLLMEngine]:
    made = VLLMEngine(str(folder), schedule, **{**OPTIONS, **options})
    try:
        yield made
    finally:
        made.close()


def same_tokens(a: list[Rollout], b: list[Rollout]) -> bool:
    return all(np.array_equal(x.response_ids, y.response_ids) for x, y in zip(a, b, strict=True))


def logprob_gap(a: list[Any], b: list[Any]) -> float:
    """Return the largest difference between the log-probs of sampled tokens. The arguments are
    rollouts or scores of the same tokens.
    """
    return max(float(np.abs(x.logprobs - y.logprobs).max()) for x, y in zip(a, b, strict=True))
