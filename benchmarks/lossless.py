"""Measure the tokens per second of lossless decoding and of stock vLLM on one GPU, at a given
acceptance rate.

    python benchmarks/lossless.py --shape qwen3-1.7b --variant stock \\
        --out results/lossless_qwen3-1.7b_stock.json
    python benchmarks/lossless.py --shape qwen3-1.7b --variant lossless \\
        --out results/lossless_qwen3-1.7b.json

As in ``benchmarks/rollout.py``, models are random, and states are set up without prefill. A random
model's real acceptance would be meaningless, so vLLM's synthetic rejection sampler accepts each
draft with a given probability. Everything else, including the meter, runs as in real use. Parts:

- ``points``: sequences of equal length. Stock vLLM and each fixed draft length are timed for
  ``FIXED_S``. Sparrow's own choice of draft length is timed for ``SECONDS``, including its initial
  search, and then for another ``SETTLED_S``. Sequences grow while they are timed. To give them the
  state's length on average, we start them shorter by half of their expected growth. The previous
  row's speed determines the expected growth.
- ``trace``: the trace from ``benchmarks/rollout.py``, with log-probs of the sampled tokens. As in
  that script, its time is estimated from states. The time per token is the cycle time divided by
  the tokens per cycle. Timing starts once the draft length has settled.
- ``whole``: a smaller trace, run from beginning to end.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch
from common import add_draft_weights, parse_point, parser, write
from rollout import LOGPROBS, POINTS, PROMPT, Bench, recorded
from rollout_trace import SLOTS, most_cached, responses, simulate, states

from sparrow import SparsitySchedule
from sparrow.decoding import Decoding, acceptance_at
from sparrow.schedule import LandmarkDtype
from sparrow.vllm.lossless.chooser import DraftChooser
from sparrow.vllm.lossless.measured import tokens_per_cycle
from sparrow.vllm.lossless.plan import Choice
from sparrow.vllm.runtime import Runtime, find

SETTLE, TIMED = 4, 16
FIXED_S, SECONDS, SETTLED_S = 5.0, 4.0, 6.0
STATES = 16
SETTLED, SETTLED_CYCLES = 512, 48
"""While the draft length settles, a request may grow by ``SETTLED`` tokens. After the first choice,
``SETTLED_CYCLES`` cycles are run, so that dense steps get timed again.
"""
MARGIN = 8192
"""Maximum new tokens per request, large enough that no request ends while it is being timed."""


def scheduler(bench: Bench) -> Any:
    return bench.llm.llm_engine.engine_core.engine_core.scheduler


def runner(bench: Bench) -> Any:
    return bench.llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def runtime(bench: Bench) -> Runtime:
    found = find(runner(bench).vllm_config)
    assert found is not None
    return found


def accept(bench: Bench, rate: float) -> None:
    """Make vLLM accept drafts with probability ``rate`` at the standard budget. At other budgets,
    the probability comes from ``acceptance_at``.
    """
    shared, rates = runtime(bench), runner(bench).rejection_sampler.synthetic_conditional_rates

    def use_budget(budget: int) -> None:  # called between a verification and the next drafts
        Runtime.use_budget(shared, budget)
        rates.fill_(acceptance_at(rate, shared.budgets[budget]))

    shared.use_budget = use_budget  # type: ignore[method-assign]


def generated(bench: Bench) -> int:
    """Return how many output tokens the host has received for the running requests."""
    return sum(request.num_output_tokens for request in scheduler(bench).running)


def abandon(bench: Bench, batch: int) -> None:
    """Abort the last ``batch`` requests."""
    engine = bench.llm.llm_engine
    engine.abort_request([str(i) for i in range(bench.served - batch + 1, bench.served + 1)])
    while engine.has_unfinished_requests():
        engine.step()


def timed(bench: Bench, lengths: Sequence[int], steps: int, seconds: float) -> dict[str, float]:
    """Run at least ``steps`` cycles for at least ``seconds``, and return tokens per second and ms
    per cycle.
    """
    engine, times, before = bench.llm.llm_engine, list[float](), generated(bench)
    began = last = time.perf_counter()
    while len(times) < steps or last - began < seconds:
        engine.step()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    came = generated(bench) - before
    low, middle, high = np.percentile(times, [10, 50, 90])
    return {
        "tokens_per_s": came / (last - began),
        "ms": float(middle * 1e3),
        "p10": float(low * 1e3),
        "p90": float(high * 1e3),
        "tokens_per_cycle": came / len(times) / len(lengths),
        "cycles": len(times),
        "length_reached": float(np.mean(lengths) + generated(bench) / len(lengths)),
    }


def begin(bench: Bench, lengths: Sequence[int], logprobs: int | None = None) -> None:
    """Start requests with ``lengths`` cached tokens and run a few steps before timing begins, since
    the first step returns before the GPU has finished it.
    """
    bench.start(lengths, [MARGIN] * len(lengths), logprobs)
    for _ in range(SETTLE):
        bench.llm.llm_engine.step()


def hold(bench: Bench, choice: Choice) -> None:
    """Make every cycle draft as in ``choice``."""
    before = scheduler(bench).chooser
    chooser: Any = DraftChooser(before.choices, before.budgets)
    chooser.choose = lambda *_: choice
    scheduler(bench).chooser = chooser


def point(
    bench: Bench, batch: int, length: int, seconds: float, tokens_per_s: float = 0.0
) -> dict[str, Any]:
    """Time ``batch`` sequences with an average length of ``length`` tokens over the timed period.

    Args:
        tokens_per_s: an estimate of their speed, used to compute how much they grow.
    """
    lengths = [
        length - 32 - int(tokens_per_s * seconds / batch / 2)
    ] * batch  # 32: roughly how much they grow before timing begins
    begin(bench, lengths)
    metrics = timed(bench, lengths, TIMED, seconds)
    abandon(bench, batch)
    return metrics


def settle(bench: Bench, lengths: np.ndarray) -> int:
    """Run a state until its draft length has stayed settled for ``SETTLED_CYCLES`` cycles, and
    return that draft length.
    """
    behind = np.maximum(PROMPT + 1, lengths - SETTLED)
    chooser = scheduler(bench).chooser
    begin(bench, behind.tolist(), LOGPROBS["sampled"])
    drafts, cycles = None, 0
    while drafts is None or cycles < SETTLED_CYCLES:
        bench.llm.llm_engine.step()
        drafts = chooser.settled(
            len(lengths), float(np.mean(behind)) + generated(bench) / len(lengths)
        )
        cycles += drafts is not None
    abandon(bench, len(lengths))
    return drafts


def state(bench: Bench, lengths: np.ndarray, rate: float | None) -> dict[str, float]:
    """Time a state of the trace. ``ms_per_token`` is the time per token of each request.

    Args:
        rate: acceptance rate; the draft length settles before timing begins. None: stock vLLM.
    """
    drafts = 0
    if rate is not None:
        drafts = settle(bench, lengths)
        chooser = scheduler(bench).chooser
        hold(bench, drafts)
    grown = round(
        (SETTLE + TIMED / 2) * tokens_per_cycle(rate or 0.0, drafts)
    )  # halfway through the timed cycles
    behind = np.maximum(PROMPT + 1, lengths - grown).tolist()
    begin(bench, behind, LOGPROBS["sampled"])
    metrics = timed(bench, behind, TIMED, 0.5)
    abandon(bench, len(lengths))
    if rate is not None:
        scheduler(bench).chooser = chooser
        metrics["drafts"] = drafts
    return {"ms_per_token": len(lengths) / metrics["tokens_per_s"] * 1e3, **metrics}


def whole(bench: Bench, requests: int) -> dict[str, Any]:
    """Run a trace from the first prompt's prefill to the last token."""
    tokens, engine, rows = responses(requests), bench.llm.llm_engine, list[list[float]]()
    bench.start([PROMPT] * requests, tokens, LOGPROBS["sampled"], only_final=True)
    began, steps = time.perf_counter(), 0
    while engine.has_unfinished_requests():
        engine.step()
        steps += 1
        if not steps % 1000:
            rows.append([steps, time.perf_counter() - began, len(scheduler(bench).running)])
    took = time.perf_counter() - began
    return {
        "requests": requests,
        "slots": bench.slots,
        "tokens": sum(tokens),
        "longest": max(tokens),
        "seconds": took,
        "tokens_per_s": sum(tokens) / took,
        "steps": steps,
        "steps_seconds_running": rows,
    }


def in_cuda(bench: Bench, steps: int) -> str:
    """Profile steps of the running requests. List the kernels with their GPU time, and the torch
    and CUDA calls with their host time, slowest first.
    """
    calls, kernels = recorded(bench, steps)
    lines = [f"{sum(call.self_device_time_total for call in kernels) / steps:9.1f} us of kernels"]
    for rows, time_of in ((kernels, "self_device_time_total"), (calls, "self_cpu_time_total")):
        for call in sorted(rows, key=lambda call: -getattr(call, time_of))[:60]:
            lines.append(
                f"{getattr(call, time_of) / steps:9.1f} us {call.count / steps:7.1f} x  {call.key[:100]}"
            )
    return "\n".join(lines) + "\n"


def measure(arguments: argparse.Namespace) -> None:
    out, began = Path(arguments.out), time.monotonic()
    out.parent.mkdir(parents=True, exist_ok=True)
    k = arguments.draft_tokens
    cases = [
        (int(pages), float(rate)) for pages, rate in (case.split(":") for case in arguments.cases)
    ]
    decoding = None
    if arguments.variant == "lossless":
        schedule = SparsitySchedule.fixed(
            cases[0][0],
            dense_layers=tuple(arguments.dense_layers),
            landmark_dtype=arguments.landmarks,
        )
        decoding = Decoding.lossless(
            schedule, draft_tokens=k, draft_weights=arguments.draft_weights
        )
    with tempfile.TemporaryDirectory() as folder:
        cache = {} if arguments.cache == "auto" else {"kv_cache_dtype": arguments.cache}
        bench = Bench(
            arguments.shape, arguments.variant, folder, arguments.memory, decoding, **cache
        )
        import vllm

        result: dict[str, Any] = dict(
            device=torch.cuda.get_device_name(),
            vllm=vllm.__version__,
            torch=torch.__version__,
            shape=arguments.shape,
            variant=arguments.variant,
            start_s=time.monotonic() - began,
            kv_tokens=bench.kv_tokens,
            settings={
                "max_num_seqs": bench.slots,
                "gpu_memory_utilization": arguments.memory,
                **cache,
            },
        )
        if decoding is not None:
            result["decoding"] = decoding.to_dict()
            result["draft_weight_bytes"] = bench.llm.collective_rpc("sparrow_describe")[0].get(
                "draft_weight_bytes", 0
            )
            choices = scheduler(bench).chooser.choices

        def save(part: str, **row: Any) -> None:
            result.setdefault(part, []).append(row)
            write(out, result)
            print(f"{time.monotonic() - began:6.1f} s  {json.dumps(row)}", flush=True)

        print(
            f"{time.monotonic() - began:6.1f} s  started, {result['kv_tokens']} tokens of KV cache",
            flush=True,
        )
        if arguments.profile and decoding is not None:
            hold(bench, k)
            runner(bench).rejection_sampler.synthetic_conditional_rates.fill_(cases[0][1])
            begin(bench, [15_000 - 64] * 64)
            out.with_suffix(".txt").write_text(in_cuda(bench, 4))
            abandon(bench, 64)
        parts = arguments.parts.split(",")
        if decoding is not None:
            rates = runner(bench).rejection_sampler.synthetic_conditional_rates
        for batch, length in (
            (arguments.points or POINTS[arguments.shape]) if "points" in parts else ()
        ):
            if decoding is not None:
                hold(bench, 0)
            speed = point(bench, batch, length, 0.0)["tokens_per_s"]
            if decoding is None:
                save(
                    "points",
                    batch=batch,
                    length=length,
                    **point(bench, batch, length, FIXED_S, speed),
                )
                continue
            for pages, rate in cases:
                read = decoding.schedule.replace(top_k=(pages,))
                bench.llm.collective_rpc("sparrow_set_schedule", args=(read.to_dict(),))
                rates.fill_(rate)
                what = dict(batch=batch, length=length, pages=pages, rate=rate)
                for drafts in choices if (pages, rate) == cases[0] else ():
                    hold(bench, drafts)
                    measured = point(bench, batch, length, FIXED_S, speed)
                    save("points", **what, drafts=drafts, **measured)
                    speed = measured["tokens_per_s"]
                chooser = scheduler(bench).chooser = DraftChooser(choices)
                measured = point(bench, batch, length, SECONDS, speed)
                measured["settled"] = point(
                    bench, batch, length, SETTLED_S, measured["tokens_per_s"]
                )
                speed = measured["settled"]["tokens_per_s"]
                save("points", **what, drafts="adapt", in_use=chooser.in_use(), **measured)
        if decoding is not None:
            bench.llm.collective_rpc("sparrow_set_schedule", args=(decoding.schedule.to_dict(),))
            rates.fill_(cases[0][1])
            scheduler(bench).chooser = DraftChooser(choices)
        if "trace" in parts:
            tokens, slots = responses(240), SLOTS[arguments.shape]
            spans = simulate([PROMPT] * len(tokens), tokens, slots)
            result["rollout"] = dict(
                requests=len(tokens),
                tokens=sum(tokens),
                slots=slots,
                rate=cases[0][1],
                steps=sum(steps for steps, _, _ in spans),
            )
            peak = most_cached(spans)
            assert peak + slots * 64 < result["kv_tokens"], (
                f"{peak} tokens do not fit in the KV cache, so requests would be preempted; use fewer slots"
            )
            for step, lengths in states(spans, STATES):
                row: dict[str, Any] = dict(batch=len(lengths), tokens=int(lengths.sum()))
                row |= state(bench, lengths, None if decoding is None else cases[0][1])
                save("trace", step=step, **row)
        if "whole" in parts:
            ran = whole(bench, arguments.requests)
            if decoding is not None:
                ran["in_use"] = scheduler(bench).chooser.in_use()
            save("whole", rate=cases[0][1], **ran)
        if decoding is not None:
            print(json.dumps(bench.llm.collective_rpc("sparrow_acceptance")[0])[:600], flush=True)


def main() -> None:
    command = parser(__doc__)
    command.add_argument("--shape", choices=POINTS, required=True)
    command.add_argument("--variant", choices=["stock", "lossless"], required=True)
    command.add_argument(
        "--parts", default="points", help="parts to run, separated by commas: points, trace, whole"
    )
    command.add_argument(
        "--requests",
        type=int,
        default=96,
        help="number of requests in the trace for the part 'whole'",
    )
    command.add_argument(
        "--points",
        type=parse_point,
        nargs="*",
        default=[],
        help="points to measure, as SEQUENCESxTOKENS, such as 64x15000",
    )
    command.add_argument(
        "--draft-tokens",
        type=int,
        default=12,
        help="maximum number of drafts; 0, a third and two thirds of this number are also tried",
    )
    command.add_argument(
        "--cases",
        nargs="+",
        default=["61:0.95", "61:0.945", "61:0.9"],
        metavar="PAGES:ACCEPTANCE",
        help="top-k pages and acceptance of drafts; the first case is also timed with fixed "
        "numbers of drafts",
    )
    command.add_argument(
        "--dense-layers", type=int, nargs="*", default=[], help="layers that stay dense in drafts"
    )
    command.add_argument(
        "--landmarks",
        choices=get_args(LandmarkDtype),
        default="auto",
        help="dtype of stored landmarks",
    )
    add_draft_weights(command)
    command.add_argument(
        "--cache",
        choices=["auto", "fp8"],
        default="auto",
        help="dtype of the KV cache, in stock vLLM as well",
    )
    command.add_argument("--memory", type=float, default=0.93, help="vLLM's gpu_memory_utilization")
    command.add_argument(
        "--profile", action="store_true", help="profile the kernels of lossless mode at 64 x 15000"
    )
    command.add_argument("--out", required=True)
    measure(command.parse_args())


if __name__ == "__main__":
    main()
