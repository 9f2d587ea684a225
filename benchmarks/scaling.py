"""Log-probs, update and weight gathering of an RL step on 1, 2, 4 ... GPUs, by the trainer itself.

    accelerate launch --num_processes 2 [--use_fsdp --fsdp_version 2] benchmarks/scaling.py --out scaling_2_fsdp.json

The model is random, in the shape of Qwen3-1.7B; the rollouts are random tokens of log-normal lengths, the same for
every number of GPUs, so that times divide (strong scaling). No engine runs: what generates is replaced by those
tokens, and weights are gathered and cast to bfloat16 as an engine would be given them.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from sparrow import SparsitySchedule
from sparrow.cost import response_lengths
from sparrow.engines.base import Counters, Rollout, Sampling
from sparrow.tasks import Problem, build_tokenizer
from sparrow.train.config import DistillConfig, OptimizerConfig, RolloutConfig, TrainConfig
from sparrow.train.trainer import Trainer

SHAPES = {
    "qwen3-1.7b": dict(hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16),
    "qwen3-4b": dict(hidden_size=2560, intermediate_size=9728, num_hidden_layers=36, num_attention_heads=32),
    "tiny": dict(hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4),
}


class Random:
    """In place of an engine: random tokens, and a task that rewards them at random."""

    def __init__(self, vocabulary: int, median: float, longest: int) -> None:
        self.vocabulary, self.median, self.longest = vocabulary, median, longest

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        rollouts = []
        for prompt, seed in zip(prompts, sampling.request_seeds(len(prompts)), strict=True):
            n = int(response_lengths(self.median, self.longest, 1, seed=seed)[0])
            rng = np.random.default_rng(seed)
            top_ids = rng.integers(0, self.vocabulary, (n, sampling.top_n), dtype=np.int32)
            even = np.float32(-np.log(self.vocabulary))
            logprobs, top = np.full(n, even), np.full((n, sampling.top_n), even)
            rollouts.append(Rollout(prompt, rng.integers(0, 100, n), logprobs, top_ids, top, "stop"))
        return rollouts

    def problem(self, index: int, seed: int = 0) -> Problem:
        return Problem(str(index), " 1" * 64, lambda text: float(len(text) % 2))

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            weight.to(torch.bfloat16)

    def counters(self) -> Counters:
        return Counters(0, 0)

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        pass

    sleep = wake = close = lambda self: None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shape", default="qwen3-1.7b", choices=SHAPES)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--median", type=float, default=3000, help="of the response lengths, in tokens")
    parser.add_argument("--longest", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=4, help="the first is left out")
    parser.add_argument("--token-budget", type=int, default=16384)
    parser.add_argument("--distill", action="store_true", help="train a LoRA under qwen3-1.7b-0.86 too")
    args = parser.parse_args()

    state = PartialState()
    tokenizer = build_tokenizer()
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=151936, num_key_value_heads=8 if args.shape != "tiny" else 2, head_dim=128,
        max_position_embeddings=40960, tie_word_embeddings=True, attn_implementation="sdpa", **SHAPES[args.shape],
    )  # fmt: skip
    with state.device:
        model = Qwen3ForCausalLM(config)
    random = Random(config.vocab_size, args.median, args.longest)
    with tempfile.TemporaryDirectory() as folder:
        settings = TrainConfig(
            run_dir=folder, steps=args.steps, save_every=10**9, logged_rollouts=0,
            rollout=RolloutConfig(prompts=args.prompts, samples=args.samples, max_new_tokens=args.longest),
            optimizer=OptimizerConfig(
                token_budget=args.token_budget, gradient_checkpointing=True,
                precision="bf16" if state.device.type == "cuda" else "fp32",
            ),
            distill=DistillConfig(enabled=args.distill),
        )  # fmt: skip
        schedule = SparsitySchedule.load("qwen3-1.7b-0.86") if args.distill else SparsitySchedule.dense()
        steps: list[dict] = []
        trainer = Trainer(
            settings, model, tokenizer, random, random, schedule,
            lambda event, metrics: steps.append(metrics) if event == "step" else None,
        )  # fmt: skip
        began = time.perf_counter()
        for _ in range(args.steps):
            trainer._train_step()
            measured = steps[1:]
            if not measured or not state.is_main_process:
                continue
            cuda = state.device.type == "cuda"
            found = {
                "shape": args.shape,
                "gpus": trainer.ranks.count,
                "mode": "fsdp2" if trainer.ranks.is_sharded else "ddp" if trainer.ranks.count > 1 else "single",
                "distill": args.distill,
                "responses": args.prompts * args.samples,
                "tokens": statistics.median(m["response"]["tokens"] for m in measured),
                "token_budget": args.token_budget,
                "steps": len(measured),
                "seconds": {
                    phase: statistics.median(m["seconds"][phase] for m in measured)
                    for phase in ("rollout", "score", "update", "sync")
                },
                "spread": {
                    phase: [min(v), max(v)]
                    for phase in ("score", "update", "sync")
                    for v in [[m["seconds"][phase] for m in measured]]
                },
                "imbalance": statistics.median(m["imbalance"]["score"] for m in measured),
                "grad_norm": [m["loss"]["grad_norm"] for m in steps],
                "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if cuda else None,
                "device": torch.cuda.get_device_name() if cuda else "CPU",
                "torch": torch.__version__,
                "total_s": time.perf_counter() - began,
            }
            args.out.write_text(json.dumps(found, indent=1), encoding="utf-8")
            print(json.dumps({k: found[k] for k in ("gpus", "mode", "seconds", "peak_gib")}), flush=True)
    trainer.accelerator.end_training()


if __name__ == "__main__":
    main()
