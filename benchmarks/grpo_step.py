"""Time whole GRPO steps, with rollouts by stock vLLM or by Sparrow, for Qwen3-1.7B's shape on one
or several GPUs.

    python benchmarks/grpo_step.py --variant stock --out benchmarks/results/grpo_step_stock.json
    python benchmarks/grpo_step.py --variant sparse --out benchmarks/results/grpo_step_sparse.json
    python benchmarks/grpo_step.py --variant lossless --scale 4 --steps 3 \\
        --out .../grpo_steps_lossless.json
    accelerate launch --num_processes 4 [--use_fsdp --fsdp_version 2] \\
        benchmarks/grpo_step.py --variant sparse --out ...

Runs Sparrow's own trainer unchanged: rollouts in vLLM with top-20 log-probs, the policy's dense
log-probs, acceptance, correction, update (AdamW, float32 weights, bfloat16 autocast, gradient
checkpointing), and transfer of the new weights to vLLM. Weights are random, rewards are coin
tosses, and each response ends at a length drawn beforehand. The first step isn't counted. Its
responses are a sixteenth as long, and it only serves to compile kernels and initialise AdamW's
moments. ``lossless`` drafts are accepted with a given probability, as in
``benchmarks/lossless.py``.

A full-length step, with 240 responses of 14,268 tokens on average, would take most of an hour.
There are two ways to shorten it:

- ``--scale 8``: all 240 responses at once, each an eighth as long (mean 1,783, cut at 4,096), with
  the schedule scaled to match (an eighth of the pages, in bins an eighth as wide). A decode step
  then reads as many KV bytes as a step over 30 full-length responses (60 with ``--scale 4``). As in
  a full-length step, only the longest responses are left at the end.
- ``--part 15``: every fifteenth response by length, at full length. Training time adds up over
  responses; rollout time doesn't. ``--variant given`` uses random tokens instead of rollouts.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate import PartialState
from common import REASONER, parser, qwen3, write
from rollout_trace import CUTOFF, most_cached, responses, simulate
from torch import Tensor
from transformers import AutoTokenizer, Qwen3ForCausalLM

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # so that stock vLLM gets weights on the GPU too
from vllm import LLM, SamplingParams

from sparrow import SparsitySchedule
from sparrow.cost import SHAPES
from sparrow.decoding import DRAFT_SCHEDULE, DRAFT_TOKENS, Decoding
from sparrow.engines.base import Counters
from sparrow.engines.vllm import VLLMEngine
from sparrow.engines.vllm.engine import rollout_of
from sparrow.rollout import Rollout, Sampling
from sparrow.tasks import Problem
from sparrow.train.config import LossConfig, OptimizerConfig, RolloutConfig, TrainConfig
from sparrow.train.trainer import Trainer

RESPONSES, SAMPLES = 240, 8
SHAPE = "qwen3-1.7b"
VOCABULARY = 151_936
PROMPT = 64
"""Prompt length in tokens."""
ACCEPTANCE = 0.945
"""Acceptance of drafts that read 1,024 tokens, measured with the text model."""


class Coin:
    """A task with random rewards."""

    def problem(self, index: int, seed: int = 0) -> Problem:
        chance = random.Random(index)
        return Problem(str(index), " 1" * PROMPT, lambda text: float(chance.random() < 0.5))


class Given:
    """Stands in for an engine, and returns random tokens. ``lengths`` yields the response lengths
    for each call.
    """

    def __init__(self, lengths: Iterator[Sequence[int]], schedule: SparsitySchedule) -> None:
        self._lengths = lengths
        self.schedule = schedule
        self.measured: dict[str, Any] = {}

    def _next(self, count: int) -> Sequence[int]:
        """Return the lengths of the next ``count`` responses. The call that measures the ceiling
        asks for fewer responses than the other calls.
        """
        return next(self._lengths)[:count]

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        rng, rollouts = np.random.default_rng(0), []
        for prompt, n in zip(prompts, self._next(len(prompts)), strict=True):
            ids = rng.integers(0, VOCABULARY, n)
            top = ((ids[:, None] + np.arange(sampling.top_n)) % VOCABULARY).astype(np.int32)
            even = np.full(top.shape, -np.log(VOCABULARY), dtype=np.float32)
            rollouts.append(Rollout(prompt, ids, even[:, 0], top, even, "length"))
        return rollouts

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            weight.bfloat16()

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """No-op: vLLM keeps the schedule it was started with."""

    def counters(self) -> Counters:
        return Counters(tokens_read=0, tokens_held=0)

    def sleep(self) -> None: ...

    def wake(self) -> None: ...

    def close(self) -> None: ...


class Engine(Given):
    """An engine for the trainer that runs vLLM, stock or with Sparrow, and generates responses of
    given lengths.
    """

    def __init__(
        self, llm: LLM, lengths: Iterator[Sequence[int]], schedule: SparsitySchedule
    ) -> None:
        super().__init__(lengths, schedule)
        self.llm, self._step, self._ends = llm, llm.llm_engine.step, [0.0]
        llm.llm_engine.step = self._timed  # type: ignore[method-assign]

    def _timed(self) -> Any:
        outputs = self._step()
        self._ends.append(time.perf_counter())
        return outputs

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        parameters = [
            SamplingParams(
                max_tokens=length,
                temperature=sampling.temperature,
                logprobs=sampling.top_n,
                ignore_eos=True,
                seed=seed,
                detokenize=False,
                flat_logprobs=True,
            )
            for length, seed in zip(
                self._next(len(prompts)), sampling.request_seeds(len(prompts)), strict=True
            )
        ]
        requests: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        self._ends = [time.perf_counter()]
        outputs = self.llm.generate(requests, parameters, use_tqdm=False)
        pairs = zip(prompts, outputs, strict=True)
        rollouts = [
            rollout_of(prompt, output.outputs[0], sampling.top_n) for prompt, output in pairs
        ]
        ms = 1e3 * np.diff(self._ends)
        self.measured = {
            "generate_s": time.perf_counter() - self._ends[0],
            "decode_s": ms.sum() / 1e3,
            "steps": len(ms),
            "ms": [float(part.mean()) for part in np.array_split(ms, 32)],
        }
        return rollouts

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        self.llm.collective_rpc("sparrow_load_weights", args=(weights,))
        self.llm.reset_prefix_cache()

    def sleep(self) -> None:
        began = time.perf_counter()
        self.llm.sleep(level=1)
        self.measured["sleep_s"] = time.perf_counter() - began

    def wake(self) -> None:
        torch.cuda.empty_cache()
        self.llm.wake_up()


class Done(Exception):
    pass


def scaled(schedule: SparsitySchedule, scale: int) -> SparsitySchedule:
    pages = tuple(round(k / scale) for k in schedule.top_k)
    return schedule.replace(top_k=pages, bin_tokens=schedule.bin_tokens // scale)


def chosen(part: int, scale: int) -> list[int]:
    """Sort responses by length, take every ``part``-th, and return the lengths in trace order."""
    lengths = np.array(responses(RESPONSES))
    return [
        max(1, int(n) // scale)
        for n in lengths[np.sort(np.argsort(lengths, kind="stable")[part // 2 :: part])]
    ]


def start(
    variant: str, folder: str, schedule: SparsitySchedule, lengths: Sequence[int], longest: int
) -> LLM:
    """Start vLLM with the model in ``folder``, with room for all responses at once."""
    spans, token_bytes = (
        simulate([PROMPT] * len(lengths), lengths, len(lengths)),
        2 * SHAPES[SHAPE].kv_width,
    )
    options: dict[str, Any] = dict(
        load_format="dummy",
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=longest + 256,
        max_num_seqs=-(-len(lengths) // 8) * 8,  # otherwise some batches would have no CUDA graph
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=int(1.15 * most_cached(spans) * token_bytes),
        enable_sleep_mode=True,
        logprobs_mode="processed_logprobs",
        max_logprobs=-1,
        disable_log_stats=False,
        compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},
    )
    if variant == "stock":
        return LLM(folder, attention_backend="FLASH_ATTN", **options)
    if variant == "lossless":
        rates = [
            ACCEPTANCE ** (i + 1) for i in range(DRAFT_TOKENS)
        ]  # probability that a draft and all earlier ones are accepted
        synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
        return VLLMEngine(
            folder, Decoding.lossless(schedule), speculative_config=synthetic, **options
        ).llm
    return VLLMEngine(folder, schedule, **options).llm


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--variant", choices=["stock", "sparse", "lossless", "given"], required=True
    )
    options.add_argument("--out", type=Path, required=True)
    options.add_argument(
        "--scale", type=int, default=8, help="factor by which to shrink lengths and schedule"
    )
    options.add_argument(
        "--part", type=int, default=1, help="sort responses by length and use only every N-th"
    )
    options.add_argument(
        "--steps", type=int, default=1, help="steps to measure, all with the same lengths"
    )
    arguments = options.parse_args()
    state = PartialState()
    scale = arguments.scale
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    lengths = chosen(arguments.part, scale)
    dealt = lengths[state.process_index :: state.num_processes]
    short = [max(1, n // 16) for n in dealt]
    calls = iter(
        [short, short, *[dealt] * arguments.steps]
    )  # the first call measures the ceiling of p5
    schedule = scaled(SparsitySchedule.preset(SHAPE), scale)
    read = scaled(DRAFT_SCHEDULE, scale) if arguments.variant == "lossless" else schedule
    with tempfile.TemporaryDirectory() as folder:
        shape = qwen3(SHAPE, dtype="float32")
        shape.save_pretrained(folder)
        engine = Given(calls, read)
        if arguments.variant != "given":
            llm = start(arguments.variant, folder, read, dealt, CUTOFF // scale)
            engine = Engine(llm, calls, read)
        torch.manual_seed(0)
        with state.device:
            model = Qwen3ForCausalLM(shape)
        config = TrainConfig(
            run_dir=f"{folder}/run",
            steps=1 + arguments.steps,
            save_every=10**9,
            rollout=RolloutConfig(
                prompts=len(lengths) // SAMPLES, samples=SAMPLES, max_new_tokens=CUTOFF // scale
            ),
            optimizer=OptimizerConfig(
                precision="bf16", gradient_checkpointing=True, token_budget=65536
            ),
            loss=LossConfig(normalization="dapo"),
        )
        result: dict[str, Any] = {
            "device": torch.cuda.get_device_name(),
            "shape": SHAPE,
            "variant": arguments.variant,
            "scale": scale,
            "part": arguments.part,
            "responses": len(lengths),
            "tokens": sum(lengths),
            "longest": max(lengths),
            "schedule": read.to_dict()["top_k"]
            if arguments.variant in ("sparse", "lossless")
            else None,
            "steps": [],
        }

        def listen(event: str, metrics: dict[str, Any]) -> None:
            if event == "step" and metrics["step"] == 1:
                torch.cuda.reset_peak_memory_stats()
            elif event == "step":
                if state.is_main_process:
                    result["steps"].append(metrics["seconds"])
                    result.update(
                        {
                            key: metrics[key]
                            for key in ("seconds", "response", "entropy", "imbalance")
                        }
                    )
                    result["acceptance"] = metrics["mismatch"]["mean"]
                    result["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
                    result["engine"] = engine.measured
                    write(arguments.out, result)
                if metrics["step"] > arguments.steps:
                    raise Done  # before a checkpoint is written

        tokenizer = AutoTokenizer.from_pretrained(str(REASONER))
        trainer = Trainer(config, model, tokenizer, Coin(), engine, schedule, listener=listen)
        result["gpus"], result["sharded"] = trainer.ranks.count, trainer.ranks.is_sharded
        with suppress(Done):
            trainer.train()


if __name__ == "__main__":
    main()
