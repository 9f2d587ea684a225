"""Short contexts and few sequences, where drafting does not pay: is lossless mode in vLLM slower than stock vLLM there?

    python benchmarks/lossless_short.py --shape qwen3-1.7b    # writes benchmarks/results/lossless_short_qwen3-1.7b.json
    python benchmarks/lossless_short.py --shape qwen3-8b

A short step is bound by the host or nearly so, and the host's speed changes from minute to minute and from process to
process by more than what is asked about. So the engines live in one process, on one GPU, and take turns of ``TURN_S``:
stock vLLM, lossless mode, and stock vLLM once more, because even two stock engines differ (``control`` is the ratio of
the second one's speed to the first one's). A ratio is that of lossless mode to both stock engines together.
Sequences begin with their tokens in the cache (``benchmarks/rollout.py``) and grow by ``GROWTH`` tokens, or for
``SECONDS``; acceptance is synthetic (``benchmarks/lossless.py``). Nothing is drafted, or the number of drafts and what
they read are chosen from knowing nothing. Ratios are those of tokens per second over all turns; intervals resample
rounds of turns.

Taking turns costs time that nobody else would spend: at its end a turn waits for what the GPU still does, and at its
start the GPU waits for the host. So a turn's time is from the result of one step to that of a later one, without the
first ``UNDER_WAY`` and without the wait at the end (``with_pauses`` is the ratio with both). What the engines hold when
a state begins is left out of Python's garbage collection, which one engine alone would not have to go through.

``host_us`` has the microseconds that ``PARTS`` of a step take the host, for each engine; ``benchmarks/lossless.py
--profile`` tells what the GPU does.
"""

from __future__ import annotations

import gc
import json
import tempfile
import time
from collections import Counter
from typing import Any

import numpy as np
from common import RESULTS, clock, parser, save, speed_ratio
from lossless import abandon, accept, begin, generated, scheduler
from rollout import Bench

from sparrow import SparsitySchedule
from sparrow.mode import Decoding
from sparrow.vllm.adapt import DraftLength

STATES = {
    "qwen3-1.7b": [(64, 320), (64, 1024), (60, 1024), (8, 1024), (1, 1024), (1, 30000)],
    "qwen3-8b": [(64, 320), (8, 1024), (1, 1024), (2, 30000)],
}
"""Sequences, and tokens in the cache of each at the start. vLLM has no CUDA graph for 60 sequences."""
RATES = (None, 0.95, 0.9, 0.5)
"""Probability with which vLLM accepts a draft; None: no drafts."""
TURN_S = 0.1
GROWTH, SECONDS = 4096, 20.0
"""Tokens by which sequences grow at most, and for how long the engines take turns at most."""
UNDER_WAY = 2  # steps that vLLM has begun when a turn ends
BLOCK = 16  # tokens in a block of vLLM's KV cache
MEMORY = {"stock": 0.30, "lossless": 0.33, "control": 0.30}
"""vLLM's ``gpu_memory_utilization`` of the engines, in the order of their turns (of an H200; an H100 is too small)."""
PARTS = {
    "schedule": "scheduler", "update_from_output": "scheduler",
    "execute_model": "model_executor", "sample_tokens": "model_executor",
}  # fmt: skip
"""Methods that a step calls, by the attributes of vLLM's engine core that have them."""


def clock_parts(bench: Bench) -> Counter[str]:
    """Have an engine add up the seconds that ``PARTS`` take, and its steps."""
    core, spent = bench.llm.llm_engine.engine_core.engine_core, Counter[str]()

    def clocked(part: str, method: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = method(*args, **kwargs)
            spent[part] += time.perf_counter() - began
            spent["steps"] += part == "schedule"
            return result

        return run

    for part, owner in PARTS.items():
        holder = getattr(core, owner)
        setattr(holder, part, clocked(part, getattr(holder, part)))
    return spent


def turn(bench: Bench, tokens: int) -> list[float]:
    """Steps for ``TURN_S``, or until the requests have ``tokens`` together: new tokens and seconds, without and with
    those of the pauses."""
    resumed, had = clock(), generated(bench)
    for _ in range(UNDER_WAY):
        scheduler(bench)._last = None  # what ended in the pause says nothing about the time of a cycle
        bench.llm.llm_engine.step()
    scheduler(bench)._last = None
    began = now = time.perf_counter()
    before = generated(bench)
    while now - began < TURN_S and generated(bench) < tokens:
        bench.llm.llm_engine.step()
        now = time.perf_counter()
    new = generated(bench)
    return [new - before, now - began, new - had, clock() - resumed]


def side_by_side(benches: dict[str, Bench], spent: dict[str, Counter[str]], batch: int, length: int) -> dict[str, Any]:
    """The ratio of speeds with its interval, that of both stock engines, tokens per second, what parts of a step take
    (``spent``, from ``clock_parts`` of each engine), and each turn of each."""
    lengths = [length + i % BLOCK for i in range(batch)]  # sequences of real use do not end their blocks together
    for bench in benches.values():
        begin(bench, lengths)
    for of_engine in spent.values():
        of_engine.clear()
    ends = {name: generated(bench) + GROWTH * batch for name, bench in benches.items()}
    turns: dict[str, list[list[float]]] = {name: [] for name in benches}
    gc.collect()
    gc.freeze()
    began = clock()
    while clock() - began < SECONDS and all(generated(bench) < ends[name] for name, bench in benches.items()):
        for name, bench in benches.items():
            turns[name].append(turn(bench, ends[name]))
    for bench in benches.values():
        abandon(bench, batch)
    stock, ours, control = (np.array(turns[name]) for name in ("stock", "lossless", "control"))  # [turns, 4]
    both = stock + control
    return {
        "ratio": speed_ratio(np.stack([both, ours], 1)[..., :2]),
        "control": speed_ratio(np.stack([stock, control], 1)[..., :2]),
        "with_pauses": float(np.divide(*ours.sum(0)[2:]) / np.divide(*both.sum(0)[2:])),
        "tokens_per_s": {name: float(np.divide(*np.sum(of, 0)[:2])) for name, of in turns.items()},
        "host_us": {name: {part: 1e6 * of[part] / of["steps"] for part in PARTS} for name, of in spent.items()},
        "grown": {name: float(np.sum(of, 0)[2] / batch) for name, of in turns.items()}, "turns": turns,
    }  # fmt: skip


def main() -> None:
    import vllm

    options = parser(__doc__ or "")
    options.add_argument("--shape", choices=STATES, default="qwen3-1.7b")
    shape = options.parse_args().shape
    drafts = SparsitySchedule.fixed(61, dense_layers=(), landmark_dtype="fp8_e4m3")
    decoding = Decoding.lossless(drafts, adapt_draft_budget=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        most = max(batch for batch, _ in STATES[shape])
        benches = {
            name: Bench(
                shape, "lossless" if name == "lossless" else "stock", f"{folder}/{name}", memory,
                decoding if name == "lossless" else None, slots=most,
            )
            for name, memory in MEMORY.items()
        }  # fmt: skip
        ours, spent = benches["lossless"], {name: clock_parts(bench) for name, bench in benches.items()}
        choices = scheduler(ours).draft_length.choices
        for batch, length in STATES[shape]:
            for rate in RATES:
                numbers = [0] if rate is None else choices
                chooser = scheduler(ours).draft_length = DraftLength(numbers, decoding.draft_budgets)
                if rate is not None:
                    accept(ours, rate)
                row = {
                    "batch": batch,
                    "length": length,
                    "rate": rate,
                    **side_by_side(benches, spent, batch, length),
                }
                rows.append({**row, "cycles_by_drafts": dict(chooser.chosen)})
                print(json.dumps(rows[-1]), flush=True)
                save(RESULTS / f"lossless_short_{shape}.json", {
                    "vllm": vllm.__version__, "shape": shape, "decoding": decoding.to_dict(), "memory": MEMORY,
                    "turn_s": TURN_S, "rows": rows,
                })  # fmt: skip


if __name__ == "__main__":
    main()
