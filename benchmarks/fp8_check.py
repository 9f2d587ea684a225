"""An fp8 KV cache and fp8 weights in vLLM on a GPU, against exact arithmetic on the same rounded keys and values.

    python benchmarks/fp8_check.py --out benchmarks/results/fp8_equal.json

The model is the random one of ``vllm_check.py``. Three engines decode with every page kept, each from its own samples:
stock vLLM in bfloat16, stock vLLM with an fp8 cache (its FlashAttention 3 rounds queries to fp8 as well), and Sparrow
with an fp8 cache. *truth* is transformers in float32; *rounded* is the same with every key and value rounded to e4m3
with Sparrow's own scales, in float32 (what an fp8 cache costs by itself) and in bfloat16 (the yardstick for a kernel
that rounds once more, as in ``vllm_check.py``). *prefill from decode* compares the log-probs of a response that a
decoding engine returned with those that the same engine gives for prompt and response as one prompt.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import vllm_check as base
from common import save
from fp8_rounding import rounded_cache
from vllm import LLM, SamplingParams

from sparrow.engines.hf import HFEngine
from sparrow.engines.vllm import VLLMEngine
from sparrow.rollout import Rollout
from sparrow.vllm.runtime import find


def options(dtype: str, **more: Any) -> dict[str, Any]:
    return {
        "dtype": dtype, "max_model_len": 4096, "kv_cache_memory_bytes": 2 * 2**30, "max_num_seqs": 16,
        "compilation_config": base.GRAPHS, "gpu_memory_utilization": 0.1, "enable_sleep_mode": False, **more,
    }  # fmt: skip


def sampled(llm: LLM) -> list[Rollout]:
    """Samples of any vLLM with the settings of ``vllm_check.SAMPLED``, as rollouts."""
    parameters = [
        SamplingParams(max_tokens=192, temperature=1.0, logprobs=0, seed=seed, detokenize=False, flat_logprobs=True)
        for seed in base.SAMPLED.request_seeds(len(base.LENGTHS))
    ]
    outputs = llm.generate([{"prompt_token_ids": p} for p in base.prompts()], parameters, use_tqdm=False)
    rollouts = []
    for prompt, output in zip(base.prompts(), outputs, strict=True):
        ids, T = np.asarray(output.outputs[0].token_ids), len(output.outputs[0].token_ids)
        logprobs = np.asarray(output.outputs[0].logprobs.logprobs, np.float32).reshape(T, -1)[:, 0]
        empty = np.zeros((T, 0), np.int32)
        rollouts.append(Rollout(prompt, ids, logprobs, empty, empty.astype(np.float32), "length"))
    return rollouts


def prefilled(llm: LLM, rollouts: Sequence[Any]) -> dict[str, float]:
    """Differences of the rollouts' log-probs from those of the same tokens as parts of a prompt."""
    parameters = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
    requests = [{"prompt_token_ids": [*r.prompt_ids, *r.response_ids.tolist()]} for r in rollouts]
    differences = []
    for rollout, output in zip(rollouts, llm.generate(requests, parameters, use_tqdm=False), strict=True):
        tail = output.prompt_logprobs[-len(rollout) :]
        own = [at[int(token)].logprob for at, token in zip(tail, rollout.response_ids, strict=True)]
        differences.append(np.abs(np.array(own) - rollout.logprobs))
    return base.summary(differences)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    dtype = arguments.dtype
    results: dict[str, Any] = {"dtype": dtype}
    started = time.monotonic()

    def note(name: str, value: Any) -> None:
        results[name] = value
        print(f"{time.monotonic() - started:6.1f} s  {name}: {json.dumps(value)}", flush=True)
        save(arguments.out, results)

    with tempfile.TemporaryDirectory() as name:
        folder, other = Path(name) / "a", Path(name) / "b"
        model = base.random_model(folder, dtype).cuda()
        new_weights = base.random_model(other, dtype, seed=1)
        truth = HFEngine(base.load(folder, "float32").cuda(), base.SMALL, eos_ids=[])
        in_dtype = HFEngine(model, base.SMALL, eos_ids=[])

        def scores(engine: HFEngine, rollouts: Sequence[Any], schedule: Any, scales: Any = None) -> Any:
            with rounded_cache(engine.model, scales) if scales else contextlib.nullcontext():
                return engine.score(rollouts, schedule, 1.0)

        def from_truth(rollouts: Sequence[Any], schedule: Any) -> dict[str, float]:
            return base.miss(rollouts, scores(truth, rollouts, schedule))

        kept = []  # to the end: their graphs hold vLLM's pool of graph memory
        for label, more in {"stock": {}, "stock fp8": {"kv_cache_dtype": "fp8"}}.items():
            llm = LLM(
                str(folder), skip_tokenizer_init=True, logprobs_mode="processed_logprobs", enable_prefix_caching=False,
                **options(dtype, **more),
            )  # fmt: skip
            rollouts = sampled(llm)
            note(f"{label} from the truth", from_truth(rollouts, base.UNBOUNDED))
            note(f"{label} prefill from decode", prefilled(llm, rollouts))
            kept.append(llm)

        fp8 = dict(kv_cache_dtype="fp8", enable_prefix_caching=False)
        engine = VLLMEngine(str(folder), base.UNBOUNDED, **options(dtype, **fp8))
        rollouts = engine.generate(base.prompts(), base.SAMPLED)
        note("engine", engine.describe())
        layers = find(engine.llm.llm_engine.vllm_config).fp8_cache.layers
        scales = [(layer.values.k_K.clone(), layer.values.v_K.clone()) for layer in layers]
        note("counters", engine.rpc("sparrow_counters")[0])

        def judge(label: str, rollouts: Sequence[Any], schedule: Any) -> None:
            exact = scores(truth, rollouts, schedule, scales)
            yardstick, missed = (
                base.miss(exact, scores(in_dtype, rollouts, schedule, scales)),
                base.miss(rollouts, exact),
            )
            within = all(missed[k] <= 2 * yardstick[k] for k in ("mean", "p99"))
            note(
                f"{label} fp8 from rounded",
                {"missed": missed, "yardstick": yardstick, "within twice the yardstick": within},
            )
            note(f"{label} fp8 from the truth", from_truth(rollouts, schedule))
            note(f"{label} rounded from the truth", base.miss(exact, scores(truth, rollouts, schedule)))

        judge("unbounded", rollouts, base.UNBOUNDED)
        note("unbounded fp8 prefill from decode", prefilled(engine.llm, rollouts))
        engine.set_schedule(base.SMALL)
        first = engine.generate(base.prompts(), base.SAMPLED)
        judge("sparse", first, base.SMALL)
        note("sparse fp8 again", base.gap(first, engine.generate(base.prompts(), base.SAMPLED)))
        engine.update_weights(new_weights.named_parameters())
        updated = engine.generate(base.prompts(), base.SAMPLED)
        engine.update_weights(model.named_parameters())
        note(
            "sparse fp8 again after weights went and came",
            base.gap(first, engine.generate(base.prompts(), base.SAMPLED)),
        )
        engine.close()
        engine = VLLMEngine(str(other), base.SMALL, **options(dtype, **fp8))
        note("updated weights from a fresh engine", base.gap(updated, engine.generate(base.prompts(), base.SAMPLED)))
        engine.close()
        eager = options(dtype, **fp8, enforce_eager=True) | {"compilation_config": None}
        engine = VLLMEngine(str(folder), base.SMALL, **eager)
        note("sparse fp8 from eager", base.gap(first, engine.generate(base.prompts(), base.SAMPLED)))
        engine.close()
        weights = dict(fp8, quantization="fp8_per_channel")
        engine = VLLMEngine(str(folder), base.SMALL, **options(dtype, **weights))
        first = engine.generate(base.prompts(), base.SAMPLED)
        note("fp8 weights", engine.describe())
        note("sparse fp8 with fp8 weights from the truth", from_truth(first, base.SMALL))
        engine.update_weights(new_weights.named_parameters())
        updated = engine.generate(base.prompts(), base.SAMPLED)
        engine.update_weights(model.named_parameters())
        note(
            "fp8 weights again after they went and came", base.gap(first, engine.generate(base.prompts(), base.SAMPLED))
        )
        engine.close()
        engine = VLLMEngine(str(other), base.SMALL, **options(dtype, **weights))
        note(
            "updated fp8 weights from a fresh engine", base.gap(updated, engine.generate(base.prompts(), base.SAMPLED))
        )
        engine.close()


if __name__ == "__main__":
    main()
