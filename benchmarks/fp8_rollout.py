"""Measure how fast Sparrow's rollouts are with 8-bit KV caches and fp8 weights, relative to stock
vLLM on the same GPU.

    python benchmarks/fp8_rollout.py --shape qwen3-14b    # writes benchmarks/results/fp8_qwen3-14b.json

The variants run one after another on the same GPU, each in its own engine. Stock vLLM runs in
bfloat16 and, for a fair comparison, with cache and weights in fp8. Sparrow runs with the published
table: in bfloat16, with an fp8 or int8 cache, and with such a cache and fp8 weights. vLLM always
does the weight quantisation (``quantization="fp8_per_channel"``). ``--variants`` selects the
variants to measure; earlier results for the others are kept. The trace is timed as in
``rollout.py``, with top-20 log-probs: once with as many concurrent requests as fit in the bfloat16
cache, and once with as many as fit in the variant's own cache. Tokens per second include the
prefill of new requests.
"""

from __future__ import annotations

import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch
from common import RESULTS, parser, read_result, save
from rollout import LOGPROBS, Bench
from rollout_trace import PROMPT, SLOTS, most_cached, responses, simulate, states

FP8_CACHE, INT8_CACHE = dict(kv_cache_dtype="fp8"), dict(kv_cache_dtype="int8_per_token_head")
FP8_WEIGHTS = dict(quantization="fp8_per_channel")
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "stock": ("stock", {}),
    "stock fp8": ("stock", {**FP8_CACHE, **FP8_WEIGHTS}),
    "sparse": ("sparse", {}),
    "sparse fp8 cache": ("sparse", FP8_CACHE),
    "sparse fp8": ("sparse", {**FP8_CACHE, **FP8_WEIGHTS}),
    "sparse int8 cache": ("sparse", INT8_CACHE),
    "sparse int8 cache, fp8 weights": ("sparse", {**INT8_CACHE, **FP8_WEIGHTS}),
}
REQUESTS = 240
MOST = 2.75
"""An engine allows this many times as many concurrent requests as fit on an H200 in bfloat16."""


def trace(bench: Bench, slots: int, count: int) -> dict[str, Any]:
    """Time ``count`` steps of a trace with ``slots`` concurrent requests, and estimate the time of
    the whole trace from them.
    """
    tokens = responses(REQUESTS)
    spans = simulate([PROMPT] * REQUESTS, tokens, slots)
    chosen, steps = states(spans, count), sum(n for n, _, _ in spans)
    timed = [bench.step(lengths, LOGPROBS["top 20"])["ms"] for _, lengths in chosen]
    join = bench.join(chosen[count // 4][1], LOGPROBS["top 20"])
    seconds = (steps * statistics.mean(timed) + REQUESTS * max(0.0, join)) / 1e3
    return {
        "slots": slots,
        "steps": steps,
        "tokens": sum(tokens),
        "step_ms": timed,
        "join_ms": join,
        "seconds": seconds,
        "tokens_per_second": sum(tokens) / seconds,
    }


def most_slots(kv_tokens: int, block: int, limit: int) -> int:
    """Return the largest multiple of 8, up to ``limit``, for which the whole trace fits in the
    cache.
    """
    tokens = responses(REQUESTS)

    def fits(slots: int) -> bool:
        spans = simulate([PROMPT] * REQUESTS, tokens, slots)
        return most_cached(spans) + slots * block < kv_tokens

    return max((slots for slots in range(8, limit + 1, 8) if fits(slots)), default=8)


def measure(shape: str, variant: str, count: int) -> dict[str, Any]:
    """Measure one variant in this process, timing ``count`` steps per trace."""
    kind, options = VARIANTS[variant]
    limit = int(MOST * SLOTS[shape]) // 8 * 8
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shape, kind, folder, slots=limit, **options)
        for prefilled in (
            1,
            8,
        ):  # compile the remaining kernels, and set the scales of an fp8 cache
            bench.start([PROMPT] * prefilled, [4] * prefilled, 20)
            bench.finish()
        if kind == "sparse":
            bench.use("published")
        bench.step([1024] * 8, 20)
        own = most_slots(bench.kv_tokens, bench.vllm_config.cache_config.block_size, limit)
        import vllm

        return {
            "options": options,
            "vllm": vllm.__version__,
            "kv_tokens": bench.kv_tokens,
            "described": None if bench.engine is None else bench.engine.describe(),
            "traces": [
                trace(bench, slots, count) for slots in sorted({min(own, SLOTS[shape]), own})
            ],
        }


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", choices=SLOTS, required=True)
    options.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    options.add_argument("--states", type=int, default=12, help="number of steps to time per trace")
    arguments = options.parse_args()
    out = RESULTS / f"fp8_{arguments.shape}.json"  # keeps variants that aren't measured now
    variants = read_result(out)["variants"] if out.exists() else {}
    for variant in arguments.variants:
        with ProcessPoolExecutor(
            1, mp_context=get_context("spawn")
        ) as alone:  # the GPU's memory is freed when the process ends
            measured = alone.submit(measure, arguments.shape, variant, arguments.states).result()
        variants[variant] = measured
        save(
            out,
            {
                "shape": arguments.shape,
                "device": torch.cuda.get_device_name(),
                "variants": variants,
            },
        )
        for row in measured["traces"]:
            print(
                f"{variant}: {row['slots']} at a time, {row['tokens_per_second']:.0f} tokens/s",
                flush=True,
            )


if __name__ == "__main__":
    main()
