"""Lossless decoding in vLLM on one GPU: tokens per second against stock vLLM, at a given acceptance of drafts.

    python benchmarks/lossless.py --shape qwen3-1.7b --variant stock --out results/lossless_qwen3-1.7b_stock.json
    python benchmarks/lossless.py --shape qwen3-1.7b --variant lossless --out results/lossless_qwen3-1.7b.json

Models are random, states are reached without prefill, as in ``benchmarks/rollout.py``. What drafts of
a random model agree on tells nothing, so vLLM is told to accept each draft with a given probability (its synthetic
rejection sampler); everything else runs as it does for real, the meter included. Points are
measured with each number of drafts, and with Sparrow choosing it for ``SECONDS``, the probing at the start included.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rollout import POINTS, Bench

from sparrow import SparsitySchedule
from sparrow.mode import Decoding

SETTLE, TIMED, SECONDS = 4, 16, 4.0
MARGIN = 512
"""Tokens a request may still generate after its point was timed."""


def scheduler(bench: Bench) -> Any:
    return bench.llm.llm_engine.engine_core.engine_core.scheduler


def runner(bench: Bench) -> Any:
    return bench.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def emitted(bench: Bench) -> int:
    torch.cuda.synchronize()
    return bench.llm.collective_rpc("sparrow_counters")[0]["emitted"]


def timed(bench: Bench, lengths: list[int], steps: int, seconds: float) -> dict[str, float]:
    """Cycles from a state on: tokens per second, and the median time of a cycle, in ms."""
    engine, times = bench.llm.llm_engine, []
    bench.start([n - 64 for n in lengths], [MARGIN * 16] * len(lengths), None)
    for _ in range(SETTLE):
        engine.step()
    emitted(bench)
    engine.step()  # with nothing under way it returns before its work is done: from here on a step returns as one ends
    began = last = time.perf_counter()
    while len(times) < steps or last - began < seconds:
        engine.step()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    took = last - began
    tokens = emitted(bench) * len(times) / (len(times) + 1)  # the first step's tokens came in as the last one's did not
    engine.abort_request([str(i) for i in range(bench._served - len(lengths) + 1, bench._served + 1)])
    while engine.has_unfinished_requests():
        engine.step()
    return {
        "tokens_per_s": tokens / took,
        "ms": float(np.median(times) * 1e3),
        "p10": float(np.percentile(times, 10) * 1e3),
        "p90": float(np.percentile(times, 90) * 1e3),
        "tokens_per_cycle": tokens / len(times) / len(lengths),
        "cycles": len(times),
    }


def profile(bench: Bench, batch: int, length: int, text: Path, cycles: int = 4) -> None:
    """Kernels of some cycles, in us per cycle and launches per cycle, the longest first."""
    bench.start([length - 64] * batch, [MARGIN] * batch, None)
    for _ in range(SETTLE):
        bench.llm.llm_engine.step()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as recorded:
        for _ in range(cycles):
            bench.llm.llm_engine.step()
        torch.cuda.synchronize()
    bench.llm.llm_engine.abort_request([str(i) for i in range(bench._served - batch + 1, bench._served + 1)])
    while bench.llm.llm_engine.has_unfinished_requests():
        bench.llm.llm_engine.step()
    rows = sorted(recorded.key_averages(), key=lambda r: -r.self_device_time_total)[:60]
    lines = [f"{r.self_device_time_total / cycles:9.1f} us {r.count / cycles:7.1f} x  {r.key[:120]}" for r in rows]
    text.write_text("\n".join(lines) + "\n")


def profile_host(bench: Bench, batch: int, length: int, text: Path, steps: int = 300) -> None:
    """Where the host spends its time in steps without drafts."""
    bench.start([length - 64] * batch, [steps + MARGIN] * batch, None)
    for _ in range(SETTLE):
        bench.llm.llm_engine.step()
    recorded = cProfile.Profile()
    recorded.enable()
    for _ in range(steps):
        bench.llm.llm_engine.step()
    recorded.disable()
    bench.llm.llm_engine.abort_request([str(i) for i in range(bench._served - batch + 1, bench._served + 1)])
    while bench.llm.llm_engine.has_unfinished_requests():
        bench.llm.llm_engine.step()
    with text.open("w") as stream:
        pstats.Stats(recorded, stream=stream).sort_stats("tottime").print_stats(45)


def measure(arguments: argparse.Namespace) -> None:
    out, rows, began = Path(arguments.out), [], time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    k = arguments.draft_tokens
    budgets = [int(n) for n in arguments.pages]
    decoding = None
    if arguments.variant == "lossless":
        schedule = SparsitySchedule.fixed(budgets[0], dense_layers=tuple(arguments.dense_layers))
        decoding = Decoding.lossless(schedule, draft_tokens=k)
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(arguments.shape, arguments.variant, folder, arguments.memory, decoding)
        config = bench.vllm_config
        import vllm

        found: dict[str, Any] = dict(
            device=torch.cuda.get_device_name(), vllm=vllm.__version__, torch=torch.__version__, shape=arguments.shape,
            variant=arguments.variant, start_s=time.monotonic() - began, points=rows,
            kv_tokens=config.cache_config.num_gpu_blocks * config.cache_config.block_size,
            settings={"max_num_seqs": bench.slots, "gpu_memory_utilization": arguments.memory},
        )  # fmt: skip
        if decoding is not None:
            found["decoding"] = decoding.to_dict()
            adapt = scheduler(bench).draft_length.choose
            choices = scheduler(bench).draft_length.choices

        def save(**row: Any) -> None:
            rows.append(row)
            out.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{time.monotonic() - began:6.1f} s  {json.dumps(row)}", flush=True)

        print(f"{time.monotonic() - began:6.1f} s  started, {found['kv_tokens']} tokens of KV cache", flush=True)
        if arguments.profile and decoding is not None:
            scheduler(bench).draft_length.choose = lambda *_: k
            runner(bench).rejection_sampler.synthetic_conditional_rates.fill_(arguments.rates[0])
            profile(bench, 64, 15000, out.with_suffix(".txt"))
        if arguments.profile:
            if decoding is not None:
                scheduler(bench).draft_length.choose = lambda *_: 0
            profile_host(bench, 8, 1024, out.with_suffix(".host.txt"))
        points = [tuple(map(int, p.split("x"))) for p in arguments.points] or POINTS[arguments.shape]
        for batch, length in points:
            if decoding is None:
                step = bench.step([length] * batch, None)
                save(batch=batch, length=length, tokens_per_s=batch / step["mean"] * 1e3, **step)
                continue
            rates = runner(bench).rejection_sampler.synthetic_conditional_rates
            for pages in budgets:
                bench.llm.collective_rpc(
                    "sparrow_set_schedule", args=(decoding.schedule.replace(top_k=(pages,)).to_dict(),)
                )
                for rate in arguments.rates:
                    rates.fill_(rate)
                    for drafts in choices if pages == budgets[0] and rate == arguments.rates[0] else (k,):
                        scheduler(bench).draft_length.choose = lambda *_, drafts=drafts: drafts
                        found_here = timed(bench, [length] * batch, TIMED, 0.3)
                        save(batch=batch, length=length, pages=pages, rate=rate, drafts=drafts, **found_here)
                    if pages != budgets[0]:
                        continue
                    scheduler(bench).draft_length.choose = adapt
                    found_here = timed(bench, [length] * batch, TIMED, SECONDS)
                    in_use = scheduler(bench).draft_length.in_use()
                    save(
                        batch=batch, length=length, pages=pages, rate=rate, drafts="adapt", in_use=in_use, **found_here
                    )
        if decoding is not None:
            print(json.dumps(bench.llm.collective_rpc("sparrow_acceptance")[0])[:600], flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=POINTS, required=True)
    parser.add_argument("--variant", choices=["stock", "lossless"], required=True)
    parser.add_argument("--points", nargs="*", default=[], help="sequences x tokens, such as 64x15000")
    parser.add_argument("--draft-tokens", type=int, default=8)
    parser.add_argument(
        "--pages", nargs="+", default=["61", "157"], help="top-k pages of drafts; adapts with the first"
    )
    parser.add_argument("--dense-layers", type=int, nargs="*", default=[], help="layers that drafts read whole")
    parser.add_argument("--rates", type=float, nargs="+", default=[0.95, 0.9], help="synthetic acceptance of a draft")
    parser.add_argument("--memory", type=float, default=0.93, help="vLLM's gpu_memory_utilization")
    parser.add_argument("--profile", action="store_true", help="kernels at 64 x 15000 and the host at 8 x 1024")
    parser.add_argument("--out", required=True)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
