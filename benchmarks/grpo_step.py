"""One whole GRPO step at Qwen3-1.7B's shape, stock dense rollouts against Sparrow's, on one GPU and on several.

    python benchmarks/grpo_step.py --variant stock --out benchmarks/results/grpo_step_stock.json
    python benchmarks/grpo_step.py --variant sparse --out benchmarks/results/grpo_step_sparse.json
    accelerate launch --num_processes 2 [--use_fsdp --fsdp_version 2] benchmarks/grpo_step.py --variant sparse --out ...

Sparrow's own trainer does everything it always does: rollouts in vLLM with top-20 log-probs, dense log-probs of the
policy, acceptance, correction, update (AdamW, float32 weights, bfloat16 autocast, gradient checkpointing), and the new
weights into vLLM. Weights are random, rewards a coin's, and a response ends where its length, drawn beforehand, says.

A real step, 240 responses of 14,268 tokens on average, would take most of an hour with its training. Here lengths are
scaled by 1/8 (mean 1,783, cut at 4,096), the schedule with them (an eighth of the pages in bins of an eighth), and all
240 run at once. So a step reads as many bytes of KV as one of 30 responses at full length. The longest responses are
alone at the end, as they are in a real one.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from accelerate import PartialState
from rollout import SHAPES
from rollout_trace import CUTOFF, responses
from torch import Tensor
from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from vllm import LLM, SamplingParams

import sparrow
from sparrow import SparsitySchedule
from sparrow.engines.base import Counters, Rollout, Sampling
from sparrow.engines.vllm import VLLMEngine
from sparrow.engines.vllm.engine import _rollout
from sparrow.tasks import Problem
from sparrow.train.config import LossConfig, OptimizerConfig, RolloutConfig, TrainConfig
from sparrow.train.trainer import Trainer

PROMPTS, SAMPLES = 30, 8
SHAPE = "qwen3-1.7b"


class Coin:
    """A task whose rewards are chance."""

    def problem(self, index: int, seed: int = 0) -> Problem:
        chance = random.Random(index)
        return Problem(str(index), " 1" * 64, lambda text: float(chance.random() < 0.5))


class Engine:
    """vLLM, stock or with Sparrow, as the trainer wants it, with response lengths given."""

    def __init__(self, llm: LLM, lengths: Sequence[int]) -> None:
        self.llm, self._lengths = llm, lengths

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        parameters = [
            SamplingParams(
                max_tokens=length, temperature=sampling.temperature, logprobs=sampling.top_n, ignore_eos=True,
                seed=seed, detokenize=False, flat_logprobs=True,
            )
            for length, seed in zip(self._lengths, sampling.request_seeds(len(prompts)), strict=True)
        ]  # fmt: skip
        requests: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        outputs = self.llm.generate(requests, parameters, use_tqdm=False)
        return [_rollout(p, output.outputs[0], sampling.top_n) for p, output in zip(prompts, outputs, strict=True)]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.llm.collective_rpc("sparrow_load_weights", args=(weights,))
        self.llm.reset_prefix_cache()

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """It stays what vLLM was started with."""

    def counters(self) -> Counters:
        return Counters(tokens_read=0, tokens_held=0)

    def sleep(self) -> None:
        self.llm.sleep(level=1)

    def wake(self) -> None:
        torch.cuda.empty_cache()
        self.llm.wake_up()


class Done(Exception):
    pass


def scaled(schedule: SparsitySchedule, scale: int) -> SparsitySchedule:
    pages = tuple(round(k / scale) for k in schedule.top_k)
    return schedule.replace(top_k=pages, bin_tokens=schedule.bin_tokens // scale)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variant", choices=["stock", "sparse"], required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scale", type=int, default=8, help="what lengths and schedule are divided by")
    arguments = parser.parse_args()
    state = PartialState()
    scale = arguments.scale
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lengths = [max(1, n // scale) for n in responses(PROMPTS * SAMPLES)]
    schedule = scaled(SparsitySchedule.preset(SHAPE), scale)
    with tempfile.TemporaryDirectory() as folder:
        shape = Qwen3Config(
            vocab_size=151936, num_key_value_heads=8, head_dim=128, max_position_embeddings=40960, dtype="float32",
            architectures=["Qwen3ForCausalLM"], eos_token_id=None, bos_token_id=None, pad_token_id=None,
            **SHAPES[SHAPE],
        )  # fmt: skip
        shape.save_pretrained(folder)
        options: dict[str, Any] = dict(
            load_format="dummy", dtype="bfloat16", skip_tokenizer_init=True, max_model_len=CUTOFF // scale + 256,
            max_num_seqs=PROMPTS * SAMPLES, gpu_memory_utilization=0.5, kv_cache_memory_bytes=88 * 10**9,
            enable_sleep_mode=True, logprobs_mode="processed_logprobs", max_logprobs=-1, disable_log_stats=False,
            compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
        )  # fmt: skip
        if arguments.variant == "stock":
            llm = LLM(folder, attention_backend="FLASH_ATTN", **options)
        else:
            llm = VLLMEngine(folder, schedule, **options).llm
        torch.manual_seed(0)
        with state.device:
            model = Qwen3ForCausalLM(shape)
        config = TrainConfig(
            run_dir=f"{folder}/run",
            rollout=RolloutConfig(prompts=PROMPTS, samples=SAMPLES, max_new_tokens=CUTOFF // scale),
            optimizer=OptimizerConfig(precision="bf16", gradient_checkpointing=True, token_budget=65536),
            loss=LossConfig(normalization="dapo"),
        )
        found: dict[str, Any] = {
            "device": torch.cuda.get_device_name(), "shape": SHAPE, "variant": arguments.variant, "scale": scale,
            "responses": len(lengths), "tokens": sum(lengths), "longest": max(lengths),
            "schedule": schedule.to_dict()["top_k"] if arguments.variant == "sparse" else None,
        }  # fmt: skip

        def listen(event: str, metrics: dict[str, Any]) -> None:
            if event == "step":
                if not state.is_main_process:
                    raise Done
                found.update({key: metrics[key] for key in ("seconds", "response", "entropy")})
                found["imbalance"] = metrics["imbalance"]
                found["acceptance"] = metrics["mismatch"]["mean"]
                found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                print(found, flush=True)
                arguments.out.write_text(json.dumps(found, indent=1) + "\n")
                raise Done  # before a checkpoint is written

        tokenizer = AutoTokenizer.from_pretrained(str(Path(sparrow.__file__).parent / "reasoner"))
        dealt = lengths[state.process_index :: state.num_processes]
        trainer = Trainer(config, model, tokenizer, Coin(), Engine(llm, dealt), schedule, listener=listen)
        found["gpus"], found["sharded"] = trainer.ranks.count, trainer.ranks.is_sharded
        with suppress(Done):
            trainer.train()


if __name__ == "__main__":
    main()
