"""Check on a GPU, in low precision, that Sparrow in vLLM computes what it should.

    python benchmarks/vllm_check.py [--dtype bfloat16] [--tensor-parallel 1]
        [--mixture | --hybrid | --windowed] --out equal.json

Models are random and written to a temporary folder, so nothing is downloaded. ``--mixture`` checks
a mixture of experts, ``--hybrid`` a mixture with linear attention in most layers, and
``--windowed`` a model with a sliding window in most layers.

The tolerance is measured rather than assumed. Transformers in float32 provides the truth, either
dense or with the same pages selected at every position. In 16 bits, every kernel rounds, so even
transformers has errors if it runs in the same 16-bit dtype. The mean and 99th percentile of
transformers' log-prob errors are the yardstick. Sparrow's kernels round in different places, so
Sparrow in vLLM may be off by up to twice as much.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import SMALL_VOCAB, parser, save, small_hybrid, small_qwen3, small_windowed
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
from vllm import LLM, SamplingParams

from sparrow import SparsitySchedule
from sparrow.engines.hf import HFEngine
from sparrow.engines.vllm import VLLMEngine
from sparrow.rollout import Sampling

SMALL = SparsitySchedule(top_k=(4, 6, 8, 12, 16), bin_tokens=256, dense_layers=(0,))
UNBOUNDED = SparsitySchedule.dense(dense_layers=(0,))
LENGTHS = (3000, 17, 700, 1601, 33, 512, 64, 1024)
SAMPLED = Sampling(max_new_tokens=192, temperature=1.0, top_n=8, seed=1)
GRAPHS = {
    "mode": 0,
    "cudagraph_mode": "FULL_DECODE_ONLY",
    "cudagraph_capture_sizes": [1, 2, 4, 8, 16],
}
VARIANTS: dict[str, dict[str, Any]] = {
    "eager": dict(enforce_eager=True, compilation_config=None),
    "chunked prefill": dict(max_num_batched_tokens=256, enable_prefix_caching=False),
    "preemption": dict(
        num_gpu_blocks_override=420, max_model_len=3328, enable_prefix_caching=False
    ),
}
"""Other ways to run an engine, with their vLLM options."""
PREEMPTION_BLOCKS = {"hybrid": (48, 32, 24), "windowed": (640, 480, 400, 340)}
"""Numbers of KV blocks to try in turn until vLLM preempts, in models with several groups of layers.
There, vLLM chooses how many tokens a block has. With windows, a prompt needs blocks in every group.
"""

LINEAR_ATTENTION = {"gdn_prefill_backend": "triton"}
"""vLLM options for hybrids. On Hopper GPUs, vLLM's default is FlashInfer, a separate package."""


def notes(out: Path, **results: Any) -> Callable[[str, Any], None]:
    """Return a function that adds a result, prints it, and writes all results so far."""
    started = time.monotonic()

    def note(name: str, value: Any) -> None:
        results[name] = value
        print(f"{time.monotonic() - started:6.1f} s  {name}: {json.dumps(value)}", flush=True)
        save(out, results)

    return note


def options(dtype: str, **more: Any) -> dict[str, Any]:
    """Return the options shared by all engines under test."""
    return {
        "dtype": dtype,
        "max_model_len": 4096,
        "kv_cache_memory_bytes": 2 * 2**30,
        "max_num_seqs": 16,
        "compilation_config": GRAPHS,
        "gpu_memory_utilization": 0.1,
        "enable_sleep_mode": False,
        **more,
    }


def config_of(kind: str | None) -> Any:
    """Return the config of the model to check. None means a dense Qwen3."""
    if kind == "hybrid":
        return small_hybrid()
    if kind == "windowed":
        return small_windowed()
    return small_qwen3(kind == "mixture")


def random_model(
    folder: Path, dtype: str, config: PretrainedConfig, seed: int = 0
) -> PreTrainedModel:
    """Write and return a random Qwen3, Qwen3-Next or EXAONE 4 with attention so peaked that it
    matters which pages are left out.
    """
    torch.manual_seed(seed)
    model: Any = AutoModelForCausalLM.from_config(config)
    weight = 1.5
    if config.model_type == "qwen3_next":
        weight -= 1  # it adds 1 to the weights of its norms
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer, "self_attn"):
                layer.self_attn.q_norm.weight.fill_(weight)
                layer.self_attn.k_norm.weight.fill_(weight)
        model.model.embed_tokens.weight.normal_()
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    return load(folder, dtype)


def load(folder: Path, dtype: str) -> Any:
    # model.to(dtype) would round the rotary frequencies too, which changes log-probs at 3,000
    # tokens.
    return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()


def prompts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, SMALL_VOCAB, n).tolist() for n in LENGTHS]


def summary(differences: Sequence[np.ndarray]) -> dict[str, float]:
    every = np.concatenate(list(differences))
    return {
        "mean": float(every.mean()),
        "p99": float(np.quantile(every, 0.99)),
        "max": float(every.max()),
    }


def gap(a: Sequence[Any], b: Sequence[Any]) -> dict[str, float]:
    """Return how much two runs' log-probs differ before the first token that differs, and what
    fraction of the tokens comes before it.
    """
    same = [
        np.cumprod(x.response_ids == y.response_ids).astype(bool) for x, y in zip(a, b, strict=True)
    ]
    differences = [np.abs(x.logprobs - y.logprobs)[s] for x, y, s in zip(a, b, same, strict=True)]
    return {**summary(differences), "tokens_agreed": float(np.concatenate(same).mean())}


def miss(a: Sequence[Any], b: Sequence[Any]) -> dict[str, float]:
    """Return the log-prob differences for the same tokens."""
    return summary([np.abs(x.logprobs - y.logprobs) for x, y in zip(a, b, strict=True)])


def judged(
    rollouts: Sequence[Any], true: Sequence[Any], yardstick: Sequence[Any]
) -> dict[str, Any]:
    """Compare the log-prob errors with those of the yardstick, which runs in the same 16-bit dtype.
    Both are errors relative to the truth.
    """
    missed, allowed = miss(rollouts, true), miss(true, yardstick)
    within = all(missed[k] <= 2 * allowed[k] for k in ("mean", "p99"))
    return {"missed": missed, "yardstick": allowed, "within twice the yardstick": within}


def gib_asleep(engine: VLLMEngine) -> float:
    """Put the engine to sleep, return how many GiB of GPU memory are in use, and wake it again."""
    engine.sleep()
    free, total = torch.cuda.mem_get_info()
    engine.wake()
    return (total - free) / 2**30


def blocks_that_preempt(
    folder: str, every_number: Sequence[int], engine_options: dict[str, Any]
) -> int:
    """Return the first number of KV blocks with which vLLM preempts a sequence.

    Raises RuntimeError if there is none.
    """
    for blocks in every_number:
        limited = {**engine_options, "num_gpu_blocks_override": blocks}
        engine = VLLMEngine(folder, SMALL, **limited)
        engine.generate(prompts(), SAMPLED)
        preemptions = engine.counters().preemptions
        engine.close()
        if preemptions:
            return blocks
    raise RuntimeError(
        f"vLLM preempts no sequence with {blocks} KV blocks; add a smaller number to "
        "PREEMPTION_BLOCKS"
    )


def main() -> None:
    command = parser(__doc__, "vllm_equal_bf16")
    command.add_argument("--dtype", default="bfloat16")
    command.add_argument("--tensor-parallel", type=int, default=1)
    kind = command.add_mutually_exclusive_group()
    for name, what in (
        ("mixture", "a mixture of experts"),
        ("hybrid", "a hybrid model"),
        ("windowed", "a model with sliding windows"),
    ):
        kind.add_argument(
            f"--{name}", dest="kind", action="store_const", const=name, help=f"check {what}"
        )
    command.add_argument(
        "--against",
        type=Path,
        help="compare with the .npz file that another run wrote next to its --out",
    )
    arguments = command.parse_args()
    note = notes(arguments.out, dtype=arguments.dtype)
    shared = options(arguments.dtype, tensor_parallel_size=arguments.tensor_parallel)
    if arguments.kind == "hybrid":
        shared |= LINEAR_ATTENTION

    config = config_of(arguments.kind)
    with tempfile.TemporaryDirectory() as name:
        folder, other = Path(name) / "a", Path(name) / "b"
        model, new_weights = (
            random_model(path, arguments.dtype, config, seed)
            for seed, path in enumerate((folder, other))
        )
        truth = HFEngine(load(folder, "float32").cuda(), SMALL, eos_ids=[])
        rounded = HFEngine(model.cuda(), SMALL, eos_ids=[])

        def judge(label: str, rollouts: Sequence[Any], schedule: SparsitySchedule) -> None:
            scores = (
                engine.score(rollouts, schedule, SAMPLED.temperature) for engine in (truth, rounded)
            )
            note(label, judged(rollouts, *scores))

        llm = LLM(
            str(folder), skip_tokenizer_init=True, **shared
        )  # kept alive to the end, because its graphs use the memory pool
        parameters = SamplingParams(
            temperature=0.0, max_tokens=192, logprobs=0, detokenize=False, flat_logprobs=True
        )
        outputs = llm.generate(
            [{"prompt_token_ids": p} for p in prompts()], parameters, use_tqdm=False
        )
        stock = [
            (np.asarray(o.outputs[0].token_ids), np.asarray(o.outputs[0].logprobs.logprobs))
            for o in outputs
        ]

        sleeps = arguments.tensor_parallel == 1
        engine = VLLMEngine(str(folder), UNBOUNDED, **{**shared, "enable_sleep_mode": sleeps})
        note("engine", engine.describe())
        greedy = engine.generate(prompts(), Sampling(max_new_tokens=192, temperature=0.0, top_n=0))
        agreed = [
            np.cumprod(r.response_ids == ids).astype(bool)
            for r, (ids, _) in zip(greedy, stock, strict=True)
        ]
        apart = [
            np.abs(r.logprobs - lps.reshape(len(r), -1)[:, 0])[same]
            for r, (_, lps), same in zip(greedy, stock, agreed, strict=True)
        ]
        note(
            "unbounded from stock, greedy, same tokens",
            {**summary(apart), "tokens": int(np.concatenate(agreed).sum())},
        )
        unbounded = engine.generate(prompts(), SAMPLED)
        judge("unbounded", unbounded, UNBOUNDED)
        note("counters, unbounded", str(engine.counters()))
        engine.set_schedule(SMALL)
        first = engine.generate(prompts(), SAMPLED)
        note("counters, sparse", str(engine.counters()))
        judge("sparse", first, SMALL)
        responses: dict[str, Any] = {
            "ids": [r.response_ids for r in first],
            "logprobs": [r.logprobs for r in first],
        }
        np.savez(arguments.out.with_suffix(".npz"), **responses)
        if arguments.against:
            with np.load(arguments.against) as saved:
                pairs = zip(first, saved["ids"], saved["logprobs"], strict=True)
                other_run = [
                    replace(r, response_ids=ids, logprobs=logprobs) for r, ids, logprobs in pairs
                ]
            note(f"sparse from the run in {arguments.against.name}", gap(first, other_run))
        note("sparse from the dense truth", miss(first, truth.score(first, UNBOUNDED, 1.0)))
        note("sparse again, from the prefix cache", gap(first, engine.generate(prompts(), SAMPLED)))
        if sleeps:
            note("GiB in use asleep", gib_asleep(engine))
        engine.drop_prefixes()
        note("sparse again", gap(first, engine.generate(prompts(), SAMPLED)))
        engine.update_weights(new_weights.named_parameters())
        updated = engine.generate(prompts(), SAMPLED)
        engine.update_weights(model.named_parameters())
        note(
            "sparse again after weights went and came",
            gap(first, engine.generate(prompts(), SAMPLED)),
        )
        engine.close()

        engine = VLLMEngine(str(other), SMALL, **shared)
        note(
            "updated weights from a fresh engine", gap(updated, engine.generate(prompts(), SAMPLED))
        )
        engine.close()
        variants = VARIANTS | {
            "compiled": dict(compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16]})
        }
        for label, more in variants.items():
            if arguments.tensor_parallel > 1 and label != "eager":
                continue
            if label == "preemption" and arguments.kind in PREEMPTION_BLOCKS:
                numbers = PREEMPTION_BLOCKS[arguments.kind]
                blocks = blocks_that_preempt(str(folder), numbers, {**shared, **more})
                more = more | dict(num_gpu_blocks_override=blocks)
                note("KV blocks, preemption", blocks)
            engine = VLLMEngine(str(folder), SMALL, **{**shared, **more})
            rollouts = engine.generate(prompts(), SAMPLED)
            note(f"sparse from {label}", gap(first, rollouts))
            note(f"counters, {label}", str(engine.counters()))
            if (
                label != "preemption"
            ):  # preempted responses are prefilled densely, so there's no truth to match them
                judge(label, rollouts, SMALL)
            engine.close()
        if arguments.tensor_parallel > 1:
            # otherwise the process would wait for its workers
            llm.llm_engine.engine_core.shutdown()


if __name__ == "__main__":
    main()
