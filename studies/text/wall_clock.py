"""Train with GRPO and stock, lossless or lossy rollouts in vLLM, on one GPU per arm, and record the
reward against wall-clock time.

The text model has few heads, so attention takes only a small part of its decode steps. Here, every
head is copied ``--copies`` times without changing what the model computes: queries and keys are
repeated, and values and the output projection are scaled to compensate. With 32 copies, a token
takes 262 KB of cache, and attention takes as large a share of a step as in large models at long
contexts. The task is the one from ``control.py``, with responses four times as long.

    # calibrates the schedule of the lossy arm
    python studies/text/control.py runs/text --out runs/wall --targets 0.86 --runs p86-0 \\
        --seconds 0 --max-new-tokens 2048 --dense-layers --budgets 4 8 16 26 38 56 80 110
    python studies/text/wall_clock.py runs/text dense --out runs/wall
    python studies/text/wall_clock.py runs/text lossless --out runs/wall
    python studies/text/wall_clock.py runs/text p86 --out runs/wall
    python studies/text/wall_clock_summary.py runs/wall --checkpoint runs/text \\
        --out benchmarks/results/text_wall_clock.json

``OUT/ARM-SEED.jsonl`` is a log like ``control.py``'s, with the seconds of every phase of a step.
Evaluations on held-out problems don't count. ``OUT/ARM-SEED.profile.json`` shows how the time of a
decode step is spent.
"""

from __future__ import annotations

import copy
import json
import math
import re
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from control import LAYOUT, held_out_problems, longest
from task import Continue
from transformers import PreTrainedModel

from sparrow.decoding import Decoding
from sparrow.engines.base import Counters
from sparrow.engines.hf import load_model
from sparrow.engines.vllm import VLLMEngine
from sparrow.engines.vllm.client import WITHOUT_SPARROW
from sparrow.engines.vllm.engine import InProcessClient, has_memory
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from sparrow.train.config import OptimizerConfig, RolloutConfig, TrainConfig
from sparrow.vllm import plugin

sys.path.append(str(Path(__file__).parents[1] / "common"))
from many_runs import logged, mean_reward, plain_options, schedules, train_logged

ATTENTION = re.compile(
    r"flash::|FlashAttn|^attend$|^plan_kernel$|^landmark_kernel$|^store_kernel$|varlen_num_blocks"
)
"""vLLM and Sparrow kernels that attend, select pages or update landmarks, by name."""
PROFILED = 16
"""How many engine steps to profile."""


@dataclass(frozen=True)
class Options:
    """One arm."""

    checkpoint: tyro.conf.Positional[Path]  # Folder written by train.py.
    arm: tyro.conf.Positional[
        str
    ]  # dense (stock vLLM), lossless, or a schedule in OUT/schedules.json, such as p86.
    out: Path = Path("runs/wall")  # Results.
    seed: int = 0  # Seed of problems and samples.
    copies: int = 32  # Copies of every head; a power of 2.
    seconds: float = 480  # Seconds, without vLLM's start, after which no step begins.
    steps: int = 1000  # Maximum number of steps.
    prompts: int = 8  # Prompts per step.
    samples: int = 8  # Responses per prompt.
    max_new_tokens: int = 2048  # Maximum length of a response.
    temperature: float = 0.8  # Sampling temperature of actor and policy.
    top_n: int = 20  # Length of the recorded top lists, which bound the acceptance rate.
    learning_rate: float = 5e-5  # Learning rate of AdamW.
    token_budget: int = 8192  # Padded tokens per forward and backward pass.
    held_out: int = 48  # Number of held-out problems.
    held_out_every: int = 5  # Steps between evaluations, besides those at the start and at the end.
    draft_pages: int = 29  # Pages that lossless drafts read by score.
    engine: tyro.conf.Suppress[dict[str, Any]] = field(  # Further options for vLLM.
        default_factory=lambda: {
            "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
        }
    )


def widened(model: PreTrainedModel, copies: int) -> PreTrainedModel:
    """Return an equivalent model with ``copies`` times as many query and kv heads, on the same
    device.

    Raises ValueError if ``copies`` is not a power of 2, since dividing weights by it would then
    round them.
    """
    power = math.log2(copies)
    if power != int(power):
        raise ValueError(f"copies must be a power of 2, got {copies}")
    config = copy.deepcopy(model.config)
    config.num_attention_heads *= copies
    config.num_key_value_heads *= copies
    values = 2.0 ** (power // 2)
    state = {}
    for name, weight in model.state_dict().items():
        kind = name.split(".")[-2]
        if kind in ("q_proj", "k_proj"):
            weight = weight.repeat(copies, 1)
        elif kind == "v_proj":
            weight = weight.repeat(copies, 1) / values
        elif kind == "o_proj":
            weight = weight.repeat(1, copies) * (values / copies)
        state[name] = weight
    with torch.device(model.device):
        wide = type(model)(config).to(model.dtype)
    wide.load_state_dict(state)
    wide.generation_config = model.generation_config
    return wide


class StockEngine(InProcessClient):
    """Unmodified vLLM, with its own attention and lists. It has no schedule and counts nothing."""

    def __init__(self, model: str, **options: Any) -> None:
        plugin.register()  # only needed for loading new weights
        super().__init__(model, {"enable_sleep_mode": has_memory(), **options}, {}, WITHOUT_SPARROW)

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """No-op: stock vLLM has no schedule."""

    def counters(self) -> Counters:
        return Counters(tokens_read=0, tokens_held=0)


def token_bytes(model: PreTrainedModel) -> int:
    """Return the size of a token's keys and values in bfloat16, in bytes."""
    config = model.config
    return 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def start_engine(
    options: Options, folder: str, schedule: SparsitySchedule, most: int, bytes_a_token: int
) -> InProcessClient:
    """Start vLLM with the model in ``folder``. The cache has room for all responses of a step, each
    with the maximum length of ``most`` tokens.
    """
    rows = options.prompts * options.samples
    settings: dict[str, Any] = (
        dict(
            dtype="bfloat16",
            max_model_len=most + 16,
            max_num_seqs=-(-rows // 8) * 8,
            gpu_memory_utilization=0.5,
            kv_cache_memory_bytes=int(1.1 * rows * (most + 64) * bytes_a_token),
            seed=options.seed,
        )
        | options.engine
    )
    if options.arm == "dense":
        return StockEngine(folder, **settings)
    decoding = Decoding.lossless(schedule) if options.arm == "lossless" else schedule
    return VLLMEngine(folder, decoding, **settings)


def breakdown(kernels: Iterable[tuple[str, float]], tokens: float) -> dict[str, float]:
    """Return the GPU time per token of a sequence in ms, for attention and for all other kernels.
    ``kernels`` has each kernel's time in us.
    """
    attention, other = 0.0, 0.0
    for name, us in kernels:
        if ATTENTION.search(name):
            attention += us
        else:
            other += us
    return {"attention_ms": attention / 1e3 / tokens, "other_ms": other / 1e3 / tokens}


def profile(
    engine: InProcessClient, prompts: Sequence[Sequence[int]], sampling: Sampling
) -> dict[str, float]:
    """Profile the middle of a rollout, in ms per token of each sequence. ``clock_ms`` is measured
    over some engine steps, and the kernel times over the same number of later steps. In the rest of
    ``clock_ms``, the GPU waits for the host.
    """
    core, step = engine.llm.llm_engine, engine.llm.llm_engine.step
    states = core.output_processor.request_states
    is_cuda = torch.cuda.is_available()
    recorder = torch.profiler.profile(
        activities=[
            torch.profiler.ProfilerActivity.CUDA if is_cuda else torch.profiler.ProfilerActivity.CPU
        ]
    )
    marks: list[tuple[float, float]] = []
    steps = 0

    def length() -> float:
        """Return how many tokens running sequences have generated on average."""
        return float(np.mean([state.detokenizer.num_output_tokens() for state in states.values()]))

    def mark() -> None:
        if is_cuda:
            torch.cuda.synchronize()
        marks.append((time.perf_counter(), length()))

    def watched() -> Any:
        nonlocal steps
        if marks or (states and length() > sampling.max_new_tokens / 2):
            if steps == 0:
                mark()
            elif steps == PROFILED:
                mark()
                recorder.start()
            elif steps == 2 * PROFILED:
                mark()
                recorder.stop()
            steps += 1
        return step()

    core.step = watched
    try:
        engine.generate(prompts, sampling)
    finally:
        core.step = step
    if len(marks) < 3:
        raise ValueError(
            f"responses ended before {2 * PROFILED} steps were timed; generate more tokens"
        )
    (began, short), (middle, longer), (_, longest) = marks
    kernels = [(e.key, float(e.self_device_time_total)) for e in recorder.key_averages()]
    return {
        "length": short,
        "clock_ms": 1e3 * (middle - began) / (longer - short),
        "tokens_per_step": (longer - short) / PROFILED,
        **breakdown(kernels, longest - longer),
    }


def train(options: Options, path: Path) -> None:
    """Run the arm. The trained model is not saved."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    narrow, tokenizer = load_model(str(options.checkpoint), "fp32", device)
    model = widened(narrow, options.copies)
    task, other = Continue(options.checkpoint), Continue(options.checkpoint, "held_out")
    most = max(longest(each, tokenizer, options.max_new_tokens) for each in (task, other))
    schedule = SparsitySchedule.dense(**LAYOUT, dense_layers=())
    if options.arm == "lossless":  # the draft schedule
        schedule = schedule.replace(top_k=(options.draft_pages,))
    elif options.arm != "dense":
        tables = json.loads(schedules(options).read_text(encoding="utf-8"))
        schedule = schedule.replace(top_k=tuple(tables[options.arm]))
    problems = held_out_problems(options)
    sampling = Sampling(options.max_new_tokens, options.temperature, 1)
    with tempfile.TemporaryDirectory() as folder:
        copy.deepcopy(model).to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        engine = start_engine(options, folder, schedule, most, token_bytes(model))

        def held_out() -> float:
            """Return the mean reward of the densely decoded policy."""
            if lossy := not (engine.schedule.is_dense or options.arm == "lossless"):
                engine.set_schedule(schedule.reading_everything())
            reward = mean_reward(engine, tokenizer, problems, sampling)
            if lossy:
                engine.set_schedule(schedule)
            return reward

        config = TrainConfig(
            run_dir=str(Path(folder, "run")),
            steps=options.steps,
            save_every=10**6,
            seed=options.seed,
            logged_rollouts=0,
            rollout=RolloutConfig(
                prompts=options.prompts,
                samples=options.samples,
                max_new_tokens=options.max_new_tokens,
                temperature=options.temperature,
                top_n=options.top_n,
                mode="lossless" if options.arm == "lossless" else None,
            ),
            optimizer=OptimizerConfig(
                options.learning_rate, token_budget=options.token_budget, precision="bf16"
            ),
        )
        start = {
            "arm": options.arm,
            "seed": options.seed,
            "schedule": options.arm,
            "actor": "",
            "correction": "token_tis",
            "learning_rate": options.learning_rate,
            "top_k": schedule.to_dict()["top_k"],
            "token_bytes": token_bytes(model),
            "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU",
            "options": plain_options(options),
        }
        try:
            warm = Sampling(options.max_new_tokens, options.temperature, options.top_n)
            texts = [task.problem(i, seed=10**6).prompt for i in range(options.prompts)]
            batch = tokenizer(texts, add_special_tokens=False)["input_ids"] * options.samples
            timed = profile(engine, batch, warm)
            path.with_suffix(".profile.json").write_text(json.dumps(timed) + "\n", encoding="utf-8")
            engine.counters()
            deadline = time.time() + options.seconds
            every = options.held_out_every
            trainer = config, model, tokenizer, task, engine, schedule
            train_logged(path, start, held_out, every, deadline, *trainer, judge_cut_off=True)
        finally:
            engine.close()


def main(options: Options) -> None:
    """Run the arm, unless it already has a log."""
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{options.arm}-{options.seed}.jsonl"
    if not path.exists():
        logged(path, partial(train, options, path))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
