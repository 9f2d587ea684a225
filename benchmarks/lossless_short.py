"""Test whether lossless mode in vLLM is slower than stock vLLM where drafting doesn't pay: with
short contexts and few sequences.

    python benchmarks/lossless_short.py --shape qwen3-1.7b    # writes benchmarks/results/lossless_short_qwen3-1.7b.json
    python benchmarks/lossless_short.py --shape qwen3-8b
    python benchmarks/lossless_short.py --sequences 1 8 --out benchmarks/results/lossless_short_qwen3-1.7b_3.json

The speed of a short step depends on the host, whose own speed varies from minute to minute by more
than the difference we're after. So three engines share one GPU and take turns of ``TURN_S``: stock
vLLM, lossless mode, and a second stock vLLM. The second one shows how much even two stock engines
differ (``control`` is its speed relative to the first). Lossless mode's speed is given relative to
both stock engines together. Each engine has its own process, as in real use, because its scheduler
would be slower in a process with other kinds of engines. The threads that run steps all run at the
same speed, because they share one core (the last one the script may use). Hosts differ, and so do
two processes of the same engine. Several runs therefore tell you more than one long run;
``benchmarks/tables.py`` averages them.

Sequences start with their tokens already in the cache (see ``benchmarks/rollout.py``), and stop
growing after ``GROWTH`` tokens or ``SECONDS``. Acceptance is synthetic (see
``benchmarks/lossless.py``). Either nothing is drafted, or Sparrow chooses the draft length and
budget from scratch. Ratios compare tokens per second over all turns, and their intervals come from
resampling rounds of turns.

Taking turns costs time that real use doesn't: at the start of a turn, the GPU waits for the host,
and at the end, the host waits for the GPU. So timing starts when a turn's first ``UNDER_WAY`` steps
are done, and ends with the result of its last step, before the wait. ``with_pauses`` is the ratio
with these steps and the wait included. Objects that exist when a state begins are excluded from
Python's garbage collection, which would otherwise scan them during some turn.

``host_us``, which is only printed, gives each engine's host time in microseconds per step for each
of ``PARTS``. To profile the GPU, use ``benchmarks/lossless.py --profile``.
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import os
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import numpy as np
from common import clock, parse_states, parser, save, speed_ratio
from lossless import abandon, accept, begin, generated, scheduler
from rollout import CONTEXT, Bench

from sparrow import SparsitySchedule
from sparrow.decoding import Decoding
from sparrow.vllm.lossless.chooser import DraftChooser

STATES = {
    "qwen3-1.7b": [(64, 320), (64, 1024), (60, 1024), (8, 1024), (1, 1024), (1, 30000)],
    "qwen3-8b": [(64, 320), (8, 1024), (1, 1024), (2, 30000)],
}
"""The batch size, and the cached tokens of each sequence at the start. vLLM has no CUDA graph for
60 sequences.
"""
KEPT = ("ratio", "control", "tokens_per_s", "grown", "cycles_by_drafts")
"""The results to save in the JSON file for each case. Other results are only printed, except for
the individual turns.
"""
RATES = (None, 0.95, 0.9, 0.5)
"""vLLM's acceptance probabilities for drafts; None: nothing is drafted."""
ENGINES = ("stock", "lossless", "control")
"""The engines, in turn order; ``control`` is also stock vLLM."""
TURN_S = 0.2
GROWTH, SECONDS = 4096, 25.0
"""The turns on a state end after ``SECONDS``, or once sequences have grown by ``GROWTH`` tokens."""
UNDER_WAY = 2  # steps in flight in vLLM when a turn ends
BLOCK = 16  # tokens per KV cache block in vLLM
SPARE = 64  # room for drafts, in tokens per sequence
MEMORY, CACHE_BYTES = 0.3, 20 * 2**30
"""The fraction of GPU memory that must be free when an engine starts, and the KV cache size. The
size is fixed because vLLM would derive it from the memory in use, which changes while the other
engines start.
"""
DECODING = Decoding.lossless(
    SparsitySchedule.fixed(61, dense_layers=(), landmark_dtype="fp8_e4m3"), adapt_draft_budget=True
)
PARTS = {
    "schedule": "scheduler",
    "update_from_output": "scheduler",
    "execute_model": "model_executor",
    "sample_tokens": "model_executor",
}
"""Maps each method that runs in every step to its owner, an attribute of vLLM's engine core."""


def clock_parts(bench: Bench) -> Counter[str]:
    """Make an engine add up the seconds it spends on each of ``PARTS``, and count its steps."""
    core, spent = bench.llm.llm_engine.engine_core.engine_core, Counter[str]()

    def clocked(part: str, method: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            began = time.perf_counter()
            result = method(*args, **kwargs)
            spent[part] += time.perf_counter() - began  # type: ignore[assignment]
            spent["steps"] += part == "schedule"
            return result

        return run

    for part, owner in PARTS.items():
        holder = getattr(core, owner)
        setattr(holder, part, clocked(part, getattr(holder, part)))
    return spent


class Engine:
    """An engine that runs only during its turn."""

    def __init__(self, bench: Bench, lossless: bool) -> None:
        self.bench, self.spent = bench, clock_parts(bench)
        # The draft lengths to choose from; empty for stock vLLM.
        self.choices: Sequence[int] = scheduler(bench).chooser.choices if lossless else ()

    def kv_tokens(self) -> int:
        return self.bench.kv_tokens

    def prepare(self, lengths: Sequence[int], rate: float | None) -> int:
        """Start requests with ``lengths`` cached tokens, and return how many tokens they have
        generated so far.
        """
        if self.choices:
            choices = [0] if rate is None else self.choices
            scheduler(self.bench).chooser = DraftChooser(choices, DECODING.draft_budgets)
            if rate is not None:
                accept(self.bench, rate)
        begin(self.bench, lengths)
        self.spent.clear()
        gc.collect()
        gc.freeze()
        return generated(self.bench)

    def turn(self, tokens: int) -> list[float]:
        """Run steps for ``TURN_S``, or until the requests have generated ``tokens`` tokens in
        total. Return new tokens and seconds without pauses, then both with pauses.
        """
        bench, resumed, had = self.bench, clock(), generated(self.bench)
        for _ in range(UNDER_WAY):
            scheduler(bench)._last = None  # don't time the step that ended during the pause
            bench.llm.llm_engine.step()
        scheduler(bench)._last = None
        began = now = time.perf_counter()
        before = generated(bench)
        while now - began < TURN_S and generated(bench) < tokens:
            bench.llm.llm_engine.step()
            now = time.perf_counter()
        new = generated(bench)
        return [new - before, now - began, new - had, clock() - resumed]

    def end(self, batch: int) -> dict[str, Any]:
        """Abort the requests. Return the host's microseconds for each part of a step, and the
        number of cycles with each draft length.
        """
        abandon(self.bench, batch)
        host_us = {part: 1e6 * self.spent[part] / self.spent["steps"] for part in PARTS}
        cycles = dict(scheduler(self.bench).chooser.chosen) if self.choices else {}
        return {"host_us": host_us, "cycles_by_drafts": cycles}


_engine: Engine
"""This process's engine."""


def start(shape: str, name: str, folder: str) -> None:
    """Start an engine in this process."""
    global _engine
    os.environ["VLLM_CACHE_ROOT"] = (
        f"{folder}/cache"  # engines starting at the same time must not share files
    )
    slots, lossless = max(batch for batch, _ in STATES[shape]), name == "lossless"
    kind, decoding = ("lossless", DECODING) if lossless else ("stock", None)
    bench = Bench(
        shape, kind, folder, MEMORY, decoding, slots=slots, kv_cache_memory_bytes=CACHE_BYTES
    )
    _engine = Engine(bench, lossless)
    os.sched_setaffinity(
        0, {max(os.sched_getaffinity(0))}
    )  # this thread only; the engine's other threads may use any core


def run(method: str, *arguments: Any) -> Any:
    """Call a method of this process's engine."""
    return getattr(_engine, method)(*arguments)


def side_by_side(
    engines: Mapping[str, ProcessPoolExecutor], batch: int, length: int, rate: float | None
) -> dict[str, Any]:
    """Let the engines take turns on one state, and compare them. Return two ratios with intervals:
    the speed of lossless mode relative to stock vLLM, and the speed of the second stock engine
    relative to the first. Also return tokens per second, host times, and all turns.
    """

    def ask(name: str, method: str, *arguments: Any) -> Any:
        return engines[name].submit(run, method, *arguments).result()

    lengths = [
        length + i % BLOCK for i in range(batch)
    ]  # so that sequences fill their blocks at different times, as in real use
    most = min(CONTEXT, *(ask(name, "kv_tokens") // batch for name in engines)) - BLOCK - SPARE
    growth = min(GROWTH, most - length)
    ends = {name: ask(name, "prepare", lengths, rate) + growth * batch for name in engines}
    turns: dict[str, list[list[float]]] = {name: [] for name in engines}
    began, grown = time.perf_counter(), Counter[str]()
    while time.perf_counter() - began < SECONDS and all(
        tokens < growth * batch for tokens in grown.values()
    ):
        for name in engines:
            turns[name].append(ask(name, "turn", ends[name]))
            grown[name] += int(turns[name][-1][2])
    ended = {name: ask(name, "end", batch) for name in engines}
    stock, ours, control = (np.array(turns[name]) for name in ENGINES)  # [turns, 4]
    both = stock + control
    return {
        "ratio": speed_ratio(np.stack([both, ours], 1)[..., :2]),
        "control": speed_ratio(np.stack([stock, control], 1)[..., :2]),
        "with_pauses": float(np.divide(*ours.sum(0)[2:]) / np.divide(*both.sum(0)[2:])),
        "tokens_per_s": {name: float(np.divide(*np.sum(of, 0)[:2])) for name, of in turns.items()},
        "host_us": {name: of["host_us"] for name, of in ended.items()},
        "cycles_by_drafts": ended["lossless"]["cycles_by_drafts"],
        "grown": {name: tokens / batch for name, tokens in grown.items()},
        "turns": turns,
    }


def main() -> None:
    import vllm

    shape, states, out = parse_states(parser(__doc__ or ""), "lossless_short", STATES)
    rows: list[dict[str, Any]] = []
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        engines = {
            name: ProcessPoolExecutor(
                1, spawn, initializer=start, initargs=(shape, name, f"{folder}/{name}")
            )
            for name in ENGINES
        }
        started = [engine.submit(run, "kv_tokens") for engine in engines.values()]
        print(f"tokens of KV cache: {[future.result() for future in started]}", flush=True)
        for batch, length in states:
            for rate in RATES:
                about = {"batch": batch, "length": length, "rate": rate}
                case = side_by_side(engines, batch, length, rate)
                turns = len(case.pop("turns")["stock"])
                print(json.dumps(about | case | {"turns": turns}), flush=True)
                rows.append(about | {name: case[name] for name in KEPT})
                save(
                    out,
                    {
                        "vllm": vllm.__version__,
                        "shape": shape,
                        "decoding": DECODING.to_dict(),
                        "cache_bytes": CACHE_BYTES,
                        "turn_s": TURN_S,
                        "rows": rows,
                    },
                )
        for engine in engines.values():
            engine.shutdown()


if __name__ == "__main__":
    main()
