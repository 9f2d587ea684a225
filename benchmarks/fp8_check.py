"""An fp8 KV cache and fp8 weights in vLLM on a GPU, against exact arithmetic on the same rounded keys and values.

    python benchmarks/fp8_check.py    # writes benchmarks/results/fp8_equal.json

The model is the random one of ``vllm_check.py``. Three engines decode with every page kept, each from its own samples:
stock vLLM in bfloat16, stock vLLM with an fp8 cache (its FlashAttention 3 rounds queries to fp8 as well), and Sparrow
with an fp8 cache. *truth* is transformers in float32; *rounded* is the same with every key and value rounded to e4m3
with Sparrow's own scales, in float32 (what an fp8 cache costs by itself) and in bfloat16 (the yardstick for a kernel
that rounds once more, as in ``vllm_check.py``). *prefill from decode* compares the log-probs of a response that a
decoding engine returned with those that the same engine gives for prompt and response as one prompt.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import vllm_check as base
from common import parser
from rounding import rounded_cache
from vllm import LLM, SamplingParams
from vllm_check import options

from sparrow.engines.hf import HFEngine
from sparrow.engines.vllm import VLLMEngine
from sparrow.rollout import Rollout
from sparrow.vllm.runtime import find


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
    dtype = "bfloat16"
    note = base.notes(parser(__doc__, "fp8_equal").parse_args().out, dtype=dtype)

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
        rollouts = generated(engine)
        note("engine", engine.describe())
        layers = find(engine.llm.llm_engine.vllm_config).fp8_cache.layers
        scales = [(layer.values.k.clone(), layer.values.v.clone()) for layer in layers]
        note("counters", engine.rpc("sparrow_counters")[0])

        def judge(label: str, rollouts: Sequence[Any], schedule: Any) -> None:
            exact, yardstick = (scores(engine, rollouts, schedule, scales) for engine in (truth, in_dtype))
            note(f"{label} fp8 from rounded", base.judged(rollouts, exact, yardstick))
            note(f"{label} fp8 from the truth", from_truth(rollouts, schedule))
            note(f"{label} rounded from the truth", base.miss(exact, scores(truth, rollouts, schedule)))

        judge("unbounded", rollouts, base.UNBOUNDED)
        note("unbounded fp8 prefill from decode", prefilled(engine.llm, rollouts))
        engine.set_schedule(base.SMALL)
        first = generated(engine)
        judge("sparse", first, base.SMALL)
        note("sparse fp8 again", base.gap(first, generated(engine)))

        def weights_go_and_come(engine: VLLMEngine, first: Sequence[Rollout], kind: str, what: str) -> list[Rollout]:
            """Note whether samples are what they were; return those under the new weights."""
            engine.update_weights(new_weights.named_parameters())
            updated = generated(engine)
            engine.update_weights(model.named_parameters())
            note(f"{kind} again after {what} went and came", base.gap(first, generated(engine)))
            engine.close()
            return updated

        def fresh(label: str, updated: Sequence[Rollout], **more: Any) -> None:
            engine = VLLMEngine(str(other), base.SMALL, **options(dtype, **more))
            note(f"updated {label} from a fresh engine", base.gap(updated, generated(engine)))
            engine.close()

        fresh("weights", weights_go_and_come(engine, first, "sparse fp8", "weights"), **fp8)
        eager = VLLMEngine(
            str(folder), base.SMALL, **options(dtype, **fp8, enforce_eager=True, compilation_config=None)
        )
        note("sparse fp8 from eager", base.gap(first, generated(eager)))
        eager.close()
        both = dict(fp8, quantization="fp8_per_channel")
        engine = VLLMEngine(str(folder), base.SMALL, **options(dtype, **both))
        first = generated(engine)
        note("fp8 weights", engine.describe())
        note("sparse fp8 with fp8 weights from the truth", from_truth(first, base.SMALL))
        fresh("fp8 weights", weights_go_and_come(engine, first, "fp8 weights", "they"), **both)


def generated(engine: VLLMEngine) -> list[Rollout]:
    return engine.generate(base.prompts(), base.SAMPLED)


if __name__ == "__main__":
    main()
