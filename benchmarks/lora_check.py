"""Check on a GPU that lossless mode uses a request's LoRA adapter both to draft and to verify.

    python benchmarks/lora_check.py    # writes benchmarks/results/lossless_lora.json

A batch mixes requests without an adapter with requests for two adapters that change every linear
layer. Stock vLLM and lossless mode decode it greedily in three ways: eagerly, with CUDA graphs, and
with CUDA graphs and ``torch.compile``. The model and the adapters have random weights in bfloat16.

- Log-probs are compared with those of transformers in float32, with merged adapters. The comparison
  ends where the tokens of stock vLLM and lossless mode first differ. The yardstick is stock vLLM.
- Drafts keep every page, so nearly all of them should be accepted if they use their requests'
  adapters. For comparison, acceptance is also measured for requests without adapters, and with
  drafts that ignore the adapters.
- Lossless mode is timed with adapters, without adapters, and without ``enable_lora``.

All engines run at the same time, each in its own process, but only one is timed at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import SMALL_VOCAB, parser, save, small_qwen3
from transformers import Qwen3ForCausalLM

LENGTHS = (700, 17, 300, 1601, 33, 512, 64, 1024, 90, 150, 48, 800)
WHOSE = (0, 1, 2, 2, 0, 1, 1, 2, 0, 2, 0, 1)
"""Each prompt's adapter (0: no adapter)."""
NEW_TOKENS = 128
DRAFT_TOKENS = 4
RANK = 16
ALPHA = 32
STRENGTH = 0.1
"""Standard deviation of B's weights. A's weights have variance 1 / inputs."""
LAYERS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}},
    "graphs and torch.compile": {},
}
PLAIN = "lossless, graphs, no enable_lora"
OPTIONS: dict[str, Any] = dict(
    dtype="bfloat16",
    max_model_len=2048,
    max_num_seqs=16,
    kv_cache_memory_bytes=2**30,
    gpu_memory_utilization=0.1,
    skip_tokenizer_init=True,
)
LORA: dict[str, Any] = dict(enable_lora=True, max_loras=2, max_lora_rank=RANK)


@dataclass
class Found:
    """An arm's responses and, in lossless mode, the fractions of drafts accepted."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    accepted: dict[str, float] = field(default_factory=dict)
    milliseconds_per_token: dict[str, float] = field(default_factory=dict)


def random_model(folder: Path) -> None:
    torch.manual_seed(0)
    Qwen3ForCausalLM(small_qwen3()).to(torch.bfloat16).save_pretrained(folder)


def write_adapter(
    model: Any,
    folder: Path,
    seed: int,
    rank: int = RANK,
    alpha: int = ALPHA,
    strength: float = STRENGTH,
) -> None:
    """Write a random adapter for a model's linear layers, in PEFT's format."""
    from safetensors.torch import save_file

    torch.manual_seed(seed)
    weights = {}
    for name, layer in model.named_modules():
        if name.endswith(LAYERS):
            outputs, inputs = layer.weight.shape
            a = torch.randn(rank, inputs) / inputs**0.5
            b = torch.randn(outputs, rank) * strength
            weights[f"base_model.model.{name}.lora_A.weight"] = a.to(torch.bfloat16)
            weights[f"base_model.model.{name}.lora_B.weight"] = b.to(torch.bfloat16)
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "target_modules": list(LAYERS),
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(weights, folder / "adapter_model.safetensors", metadata={"format": "pt"})


@torch.no_grad()
def merge(model: Any, folder: Path) -> None:
    """Merge the adapter in ``folder`` into a model's weights."""
    from safetensors.torch import load_file

    weights = load_file(folder / "adapter_model.safetensors")
    config = json.loads((folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    for name, layer in model.named_modules():
        a = weights.get(f"base_model.model.{name}.lora_A.weight")
        if a is not None:
            b = weights[f"base_model.model.{name}.lora_B.weight"]
            change = scale * (b.float() @ a.float())
            layer.weight += change.to(layer.weight.device, layer.weight.dtype)


def prompts() -> list[list[int]]:
    draws = np.random.default_rng(0)
    return [draws.integers(0, SMALL_VOCAB, length).tolist() for length in LENGTHS]


@contextlib.contextmanager
def alone(folder: str) -> Iterator[None]:
    """Hold a lock so that only one process at a time runs the body."""
    with Path(folder, "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def run(arm: str, folder: str) -> Found:
    """Decode the batch in this process, in one arm."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_CACHE_ROOT"] = str(Path(folder) / "cache" / arm.replace(" ", "-"))
    os.environ.pop("VLLM_PORT", None)
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    from sparrow.decoding import Decoding
    from sparrow.schedule import SparsitySchedule

    kind, mode = arm.removesuffix(", no enable_lora").split(", ", 1)
    options = {**OPTIONS, **MODES[mode], **({} if arm == PLAIN else LORA)}
    if kind == "lossless":
        everything = SparsitySchedule.dense(dense_layers=())
        decoding = Decoding.lossless(
            everything, draft_tokens=DRAFT_TOKENS, adapt_draft_tokens=False
        )
        options["additional_config"] = {"sparrow": decoding.to_dict()}
    llm = LLM(str(Path(folder) / "model"), **options)
    wanted = SamplingParams(
        temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, detokenize=False, logprobs=0
    )
    requests = [{"prompt_token_ids": prompt} for prompt in prompts()]

    def decoded(whose: Sequence[int]) -> tuple[list[Any], float, float]:
        """Return the responses, the fraction of drafts accepted, and milliseconds per token."""
        adapters = [
            LoRARequest(f"a{n}", n, str(Path(folder) / f"adapter-{n}")) if n else None
            for n in whose
        ]
        llm.reset_prefix_cache()
        if kind == "lossless":
            llm.collective_rpc("sparrow_counters")
        began = time.perf_counter()
        outputs = llm.generate(requests, wanted, lora_request=adapters, use_tqdm=False)
        milliseconds = 1000 * (time.perf_counter() - began)
        share = 0.0
        if kind == "lossless":
            counts = llm.collective_rpc("sparrow_counters")[0]
            share = counts["accepted"] / counts["drafted"]
        return [each.outputs[0] for each in outputs], share, milliseconds / NEW_TOKENS

    nobody = [0] * len(WHOSE)
    responses, share, _ = decoded(nobody if arm == PLAIN else WHOSE)
    found = Found(
        [list(each.token_ids) for each in responses],
        [
            [at[token].logprob for at, token in zip(each.logprobs, each.token_ids, strict=True)]
            for each in responses
        ],
    )
    with alone(folder):
        if arm != PLAIN:
            found.milliseconds_per_token["with adapters"] = decoded(WHOSE)[2]
        _, share_of_nobody, milliseconds = decoded(nobody)
        found.milliseconds_per_token["without adapters"] = milliseconds
    if kind == "lossless" and arm != PLAIN:
        from sparrow.vllm.lossless.adapters import DraftAdapters

        found.accepted = {"with adapters": share, "without adapters": share_of_nobody}

        def without(self: DraftAdapters) -> contextlib.AbstractContextManager[None]:
            return self.captured(with_adapters=True)  # what drafts use when no row has an adapter

        DraftAdapters.by_sequence = without  # type: ignore[method-assign, assignment]
        found.accepted["drafts without adapters"] = decoded(WHOSE)[1]
    print(arm, found.accepted, found.milliseconds_per_token, flush=True)
    return found


@torch.no_grad()
def exact_logprobs(folder: Path, responses: Sequence[Sequence[int]]) -> list[np.ndarray]:
    """Compute the log-probs of responses with transformers in float32, with the adapters merged."""
    asked = prompts()
    exact: list[np.ndarray] = [np.empty(0)] * len(asked)
    for number in sorted(set(WHOSE)):
        model = Qwen3ForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).cuda()
        if number:
            merge(model, folder / f"adapter-{number}")
        for place in (i for i, whose in enumerate(WHOSE) if whose == number):
            ids = torch.tensor([[*asked[place], *responses[place]]]).cuda()
            logits = model(ids).logits[0, len(asked[place]) - 1 : -1]
            own = logits.log_softmax(-1).gather(1, ids[0, len(asked[place]) :, None])[:, 0]
            exact[place] = own.cpu().numpy()
    return exact


def compared(folder: Path, stock: Found, ours: Found) -> dict[str, Any]:
    """Compare lossless mode with stock vLLM, and compare both with transformers in float32."""
    before = []
    for a, b in zip(stock.tokens, ours.tokens, strict=True):
        differ = np.flatnonzero(np.array(a) != np.array(b))
        before.append(int(differ[0]) if len(differ) else len(a))
    errors = {}
    for name, found in (("stock", stock), ("lossless", ours)):
        exact = exact_logprobs(folder, found.tokens)
        apart = [
            np.abs(np.array(own) - true)[:first]
            for own, true, first in zip(found.logprobs, exact, before, strict=True)
        ]
        every = np.concatenate(apart)
        errors[name] = {"mean": float(every.mean()), "p99": float(np.quantile(every, 0.99))}
    return {
        "identical responses": sum(first == NEW_TOKENS for first in before),
        "responses": len(before),
        "tokens before the first difference": sum(before),
        "tokens": NEW_TOKENS * len(before),
        "log-probs": errors,
        "accepted": ours.accepted,
        "ms per token": {
            "stock": stock.milliseconds_per_token,
            "lossless": ours.milliseconds_per_token,
        },
    }


def measure(arguments: argparse.Namespace) -> None:
    import vllm

    spawn = multiprocessing.get_context("spawn")
    result: dict[str, Any] = {
        "vllm": vllm.__version__,
        "gpu": torch.cuda.get_device_name(),
        "draft_tokens": DRAFT_TOKENS,
        "rank": RANK,
        "modes": {},
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        random_model(folder / "model")
        model = Qwen3ForCausalLM.from_pretrained(folder / "model")
        for number in (1, 2):
            write_adapter(model, folder / f"adapter-{number}", number)
        arms = [f"{kind}, {mode}" for mode in arguments.modes for kind in ("stock", "lossless")]
        plain = [PLAIN] if "graphs" in arguments.modes else []
        with ProcessPoolExecutor(len(arms) + len(plain), spawn) as pool:
            futures = {arm: pool.submit(run, arm, name) for arm in arms + plain}
            for mode in arguments.modes:
                stock = futures[f"stock, {mode}"].result()
                ours = futures[f"lossless, {mode}"].result()
                result["modes"][mode] = compared(folder, stock, ours)
                print(mode, json.dumps(result["modes"][mode]), flush=True)
                save(arguments.out, result)
            if plain:
                found = futures[PLAIN].result()
                result["ms per token without enable_lora"] = found.milliseconds_per_token
                save(arguments.out, result)


def main() -> None:
    options = parser(__doc__, "lossless_lora")
    options.add_argument("--modes", nargs="+", choices=MODES, default=tuple(MODES))
    measure(options.parse_args())


if __name__ == "__main__":
    main()
