"""Check 8-bit KV caches and fp8 weights in vLLM on a GPU against exact arithmetic on the same
rounded keys and values.

    python benchmarks/fp8_check.py                 # writes benchmarks/results/fp8_equal.json
    python benchmarks/fp8_check.py --cache int8    # writes benchmarks/results/int8_equal.json

The model is the random one from ``vllm_check.py``. Three engines decode with every page kept: stock
vLLM in bfloat16, stock vLLM with an fp8 cache (its FlashAttention 3 also rounds queries to fp8),
and Sparrow with an fp8 cache. Transformers scores each engine's own samples. *truth* is the float32
score. *rounded* is the score with every key and value rounded to e4m3 with Sparrow's own scales. It
is computed twice: in float32, to show what an fp8 cache costs by itself, and in bfloat16, as the
yardstick for a kernel that rounds once more (see ``vllm_check.py``). *prefill from decode* compares
a response's log-probs from decoding with those from prefill, where the same engine gets prompt and
response as one prompt.

``--cache int8`` does the same for int8 keys and values, with one scale per token and head. Here,
stock vLLM uses its Triton backend, whose scales are not powers of 2.
"""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import vllm_check as base
from common import RESULTS, parser, small_qwen3
from rounding import int8_cache, rounded_cache
from vllm import LLM, SamplingParams
from vllm_check import options

from sparrow.engines.hf import HFEngine
from sparrow.engines.vllm import VLLMEngine
from sparrow.rollout import Rollout
from sparrow.vllm.runtime import find

STORED = {"fp8": "fp8", "int8": "int8_per_token_head"}
"""vLLM's names for the cache formats."""


def sampled(llm: LLM) -> list[Rollout]:
    """Sample from vLLM, stock or with Sparrow, using the ``vllm_check.SAMPLED`` settings."""
    parameters = [
        SamplingParams(
            max_tokens=192,
            temperature=1.0,
            logprobs=0,
            seed=seed,
            detokenize=False,
            flat_logprobs=True,
        )
        for seed in base.SAMPLED.request_seeds(len(base.LENGTHS))
    ]
    outputs = llm.generate(
        [{"prompt_token_ids": p} for p in base.prompts()], parameters, use_tqdm=False
    )
    rollouts = []
    for prompt, output in zip(base.prompts(), outputs, strict=True):
        ids, T = np.asarray(output.outputs[0].token_ids), len(output.outputs[0].token_ids)
        logprobs = np.asarray(output.outputs[0].logprobs.logprobs, np.float32).reshape(T, -1)[:, 0]
        empty = np.zeros((T, 0), np.int32)
        rollouts.append(Rollout(prompt, ids, logprobs, empty, empty.astype(np.float32), "length"))
    return rollouts


def prefilled(llm: LLM, rollouts: Sequence[Any]) -> dict[str, float]:
    """Compare the rollouts' log-probs with those that the engine returns for the same tokens in a
    prompt.
    """
    parameters = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0, detokenize=False)
    requests = [{"prompt_token_ids": [*r.prompt_ids, *r.response_ids.tolist()]} for r in rollouts]
    differences = []
    for rollout, output in zip(
        rollouts, llm.generate(requests, parameters, use_tqdm=False), strict=True
    ):
        tail = output.prompt_logprobs[-len(rollout) :]
        own = [at[int(token)].logprob for at, token in zip(tail, rollout.response_ids, strict=True)]
        differences.append(np.abs(np.array(own) - rollout.logprobs))
    return base.summary(differences)


def main() -> None:
    dtype = "bfloat16"
    arguments = parser(__doc__)
    arguments.add_argument(
        "--cache", choices=STORED, default="fp8", help="how keys and values are stored"
    )
    arguments.add_argument("--out", type=Path, help="the JSON file to write")
    args = arguments.parse_args()
    name, stored = args.cache, STORED[args.cache]
    note = base.notes(args.out or RESULTS / f"{name}_equal.json", dtype=dtype)

    with tempfile.TemporaryDirectory() as kept_in:
        folder, other = Path(kept_in) / "a", Path(kept_in) / "b"
        model = base.random_model(folder, dtype, small_qwen3()).cuda()
        new_weights = base.random_model(other, dtype, small_qwen3(), seed=1)
        truth = HFEngine(base.load(folder, "float32").cuda(), base.SMALL, eos_ids=[])
        in_dtype = HFEngine(model, base.SMALL, eos_ids=[])

        def scores(
            engine: HFEngine, rollouts: Sequence[Any], schedule: Any, rounding: Any = None
        ) -> Any:
            with rounding(engine.model) if rounding else contextlib.nullcontext():
                return engine.score(rollouts, schedule, 1.0)

        def from_truth(rollouts: Sequence[Any], schedule: Any) -> dict[str, float]:
            return base.miss(rollouts, scores(truth, rollouts, schedule))

        kept = []  # kept alive to the end, since their graphs use vLLM's graph memory pool
        for label, more in {"stock": {}, f"stock {name}": {"kv_cache_dtype": stored}}.items():
            llm = LLM(
                str(folder),
                skip_tokenizer_init=True,
                logprobs_mode="processed_logprobs",
                enable_prefix_caching=False,
                **options(dtype, **more),
            )
            rollouts = sampled(llm)
            note(f"{label} from the truth", from_truth(rollouts, base.UNBOUNDED))
            note(f"{label} prefill from decode", prefilled(llm, rollouts))
            kept.append(llm)

        in_8_bits = dict(kv_cache_dtype=stored, enable_prefix_caching=False)
        engine = VLLMEngine(str(folder), base.UNBOUNDED, **options(dtype, **in_8_bits))
        rollouts = generated(engine)
        note("engine", engine.describe())
        rounding: Any = int8_cache
        if name == "fp8":
            runtime = find(engine.llm.llm_engine.vllm_config)
            assert runtime is not None and runtime.cache.fp8 is not None
            layers = runtime.cache.fp8.layers
            rounding = partial(
                rounded_cache, scales=[(x.values.k.clone(), x.values.v.clone()) for x in layers]
            )
        note("counters", engine.rpc("sparrow_counters")[0])

        def judge(label: str, rollouts: Sequence[Any], schedule: Any) -> None:
            exact, yardstick = (
                scores(engine, rollouts, schedule, rounding) for engine in (truth, in_dtype)
            )
            note(f"{label} {name} from rounded", base.judged(rollouts, exact, yardstick))
            note(f"{label} {name} from the truth", from_truth(rollouts, schedule))
            note(
                f"{label} rounded from the truth",
                base.miss(exact, scores(truth, rollouts, schedule)),
            )

        judge("unbounded", rollouts, base.UNBOUNDED)
        note(f"unbounded {name} prefill from decode", prefilled(engine.llm, rollouts))
        engine.set_schedule(base.SMALL)
        first = generated(engine)
        judge("sparse", first, base.SMALL)
        note(f"sparse {name} again", base.gap(first, generated(engine)))

        def weights_go_and_come(
            engine: VLLMEngine, first: Sequence[Rollout], kind: str, what: str
        ) -> list[Rollout]:
            """Replace the weights and restore them, recording whether the samples match the earlier
            ones. Return the samples taken with the new weights.
            """
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

        fresh(
            "weights", weights_go_and_come(engine, first, f"sparse {name}", "weights"), **in_8_bits
        )
        eager = VLLMEngine(
            str(folder),
            base.SMALL,
            **options(dtype, **in_8_bits, enforce_eager=True, compilation_config=None),
        )
        note(f"sparse {name} from eager", base.gap(first, generated(eager)))
        eager.close()
        both = dict(in_8_bits, quantization="fp8_per_channel")
        engine = VLLMEngine(str(folder), base.SMALL, **options(dtype, **both))
        first = generated(engine)
        note("fp8 weights", engine.describe())
        note(f"sparse {name} with fp8 weights from the truth", from_truth(first, base.SMALL))
        fresh("fp8 weights", weights_go_and_come(engine, first, "fp8 weights", "they"), **both)


def generated(engine: VLLMEngine) -> list[Rollout]:
    return engine.generate(base.prompts(), base.SAMPLED)


if __name__ == "__main__":
    main()
