"""What DistillSparse adds to the dense policy update: the trainer's own code on a full-size model with random weights.

    python benchmarks/distill_overhead.py               # writes benchmarks/results/distill_overhead.json

One GPU; Qwen3-1.7B's shape, float32 weights under bfloat16 autocast, gradient checkpointing, the published 0.86
schedule. A dense update is everything from the corrections to the optimiser step; "added" is how much longer the same
takes with the phi pass, its own optimiser step included. Random weights make the sparse pass dear: neighbouring
positions choose unlike pages (see benchmarks/teacher_forced.py).
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sparrow import SparsitySchedule
from sparrow.engines.base import Rollout
from sparrow.tasks import Problem
from sparrow.train.config import DistillConfig, OptimizerConfig, RolloutConfig, TrainConfig
from sparrow.train.experience import Assessment, Experience, Group
from sparrow.train.trainer import Trainer

SHAPE = dict(
    hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8,
    head_dim=128, vocab_size=151_936, tie_word_embeddings=True, max_position_embeddings=40_960,
)  # fmt: skip
PROMPT, TOP_N = 256, 20
VARIANTS = {
    "everything": dict(positions=1.0, responses=1.0),
    "a_quarter_of_the_positions": dict(positions=0.25, responses=1.0),
    "half_of_the_responses": dict(positions=1.0, responses=0.5),
    "a_quarter_of_the_responses": dict(positions=1.0, responses=0.25),
}


def experience(tokens: int, responses: int) -> Experience:
    """Random responses with the lists of an actor that was sure of them."""
    rng = np.random.default_rng(0)
    T = tokens - PROMPT
    rollouts = [
        Rollout(
            rng.integers(1000, 100_000, PROMPT).tolist(),
            rng.integers(1000, 100_000, T),
            np.full(T, -11.9, dtype=np.float32),
            np.stack([rng.permutation(TOP_N) for _ in range(T)]).astype(np.int32),
            np.full((T, TOP_N), -11.9, dtype=np.float32),
            "length",
        )
        for _ in range(responses)
    ]
    problem = Problem("random", "", lambda text: 0.0)
    parts = [{"correct": float(i % 2)} for i in range(responses)]
    groups = [Group(problem, rollouts, parts, None)]
    return Experience.join(groups, groups, 1)


def make_trainer(layers: int, tokens: int, checkpointing: bool, folder: str) -> Trainer:
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(Qwen3Config(**{**SHAPE, "num_hidden_layers": layers})).float()
    config = TrainConfig(
        run_dir=folder,
        rollout=RolloutConfig(prompts=1, max_new_tokens=tokens),
        optimizer=OptimizerConfig(token_budget=tokens, gradient_checkpointing=checkpointing, precision="bf16"),
        distill=DistillConfig(enabled=True),
    )
    schedule = SparsitySchedule.preset("qwen3-1.7b", target=0.86)
    unused = cast(Any, None)  # nothing here tokenizes, samples or verifies
    return Trainer(config, model, unused, unused, unused, schedule)


def seconds(work: Any, repeats: int) -> dict[str, float]:
    work()
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return {
        "seconds": statistics.median(times),
        "slowest": max(times),
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
    }


def measure(trainer: Trainer, step: Experience, assessment: Assessment, repeats: int) -> dict[str, Any]:
    distiller = trainer.distiller
    assert distiller is not None
    trainer.distiller = None
    dense = seconds(lambda: trainer._update(step, assessment), repeats)
    found: dict[str, Any] = {"dense_update": dense}
    trainer.distiller = distiller
    for name, shares in VARIANTS.items():
        distiller.config = replace(distiller.config, distill=replace(distiller.config.distill, **shares))
        both = seconds(lambda: trainer._update(step, assessment), repeats)
        found[name] = both | {"added": both["seconds"] / dense["seconds"] - 1}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384, help="prompt and response together")
    parser.add_argument("--responses", type=int, default=4)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--no-checkpointing", action="store_true", help="keep all activations")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/distill_overhead.json"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(options.layers, options.tokens, not options.no_checkpointing, folder)
        step = experience(options.tokens, options.responses)
        assessment = trainer._assess(step)[0]
        found = measure(trainer, step, assessment, options.repeats)
    result = {
        "device": torch.cuda.get_device_name(), "torch": torch.__version__, "shape": SHAPE,
        "layers": options.layers, "tokens": options.tokens, "responses": options.responses,
        "gradient_checkpointing": not options.no_checkpointing,
    } | found  # fmt: skip
    print(json.dumps(result, indent=1))
    options.out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
