"""Measure rollouts of a mixture of experts in vLLM on one GPU. Each run covers stock vLLM and both
of Sparrow's modes.

    python benchmarks/mixture.py    # Qwen3-30B-A3B; writes results/mixture_qwen3-30b-a3b.json
    python benchmarks/mixture.py --experts 32 --points 32x15000 16x30000    # for a GPU with 80 GB
    python benchmarks/mixture.py --quantization fp8_per_block --points 64x15000 --slots 64

As in ``benchmarks/lossless.py``, models are random, states are set up without prefill, and vLLM
accepts each draft with a given probability. A random router uses all experts about equally often,
so a pass reads more experts than it would with a trained router. There is no published schedule for
this shape, so lossy mode uses Qwen3-4B's.

With all 128 experts per layer, the weights take 61 GB. ``--experts`` keeps fewer of them without
changing the number of experts per token, and ``--layers`` keeps fewer layers, for trials. With
``--quantization``, vLLM quantises the weights in all engines, also in stock vLLM. The JSON file
records all three.

Parts:

- ``points``: a batch size, and a sequence length in tokens. Points that don't fit in an engine's
  cache are skipped. Lossless mode is timed with each draft length for ``FIXED_S``. Sparrow's own
  choice of draft length is timed for ``SECONDS``, including its initial search, and then for
  another ``SETTLED_S``.
- ``trace``: states from the trace of ``benchmarks/lossless.py``, with at most ``--slots``
  concurrent sequences and with log-probs of the sampled tokens. Timing starts once the draft length
  has settled.

The three modes' engines run one after another, each in its own process. Every invocation adds a
separate run to the file, and ratios are computed within a run. ``--deadline`` ends a run early.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from break_even import fitting
from common import (
    EXPERTS,
    add_quantization,
    earlier_runs,
    machine,
    parse_point,
    parser,
    qwen3,
    save,
    write,
)
from processes import EngineProcess, in_turn, told_to_start, wait_for_turn
from rollout_trace import PROMPT, most_cached, responses, simulate, states

MODES = ("stock", "lossless", "lossy")
PARTS = ("points", "trace")
POINTS = ((40, 15_000), (20, 30_000), (8, 30_000), (40, 1_024))
"""The default points, which fit on an H200 alongside the weights of all experts."""
SLOTS = 40
REQUESTS = 240
STATES = 8
SCHEDULE = "qwen3-4b"
DRAFT_PAGES = 61
DRAFT_TOKENS = 12
ACCEPTANCE = 0.95
FIXED_S = 2.0
SECONDS = 4.0
SETTLED_S = 6.0
PREFILLED = 2048
"""Maximum number of tokens that vLLM prefills at once. A small value is enough for our short
prompts, and saves memory: vLLM reserves room for the experts' activations at this many tokens.
"""


def changes(experts: int | None, layers: int | None) -> dict[str, int]:
    """Return the model config fields that differ from the shape's."""
    given = {"num_experts": experts, "num_hidden_layers": layers}
    return {name: value for name, value in given.items() if value is not None}


def traced(slots: int, count: int) -> tuple[dict[str, int], list[tuple[int, Any]]]:
    """Return a description of the trace, and its states. A state is a pair: the number of a step,
    and the cached tokens of each request in it.
    """
    tokens = responses(REQUESTS)
    spans = simulate([PROMPT] * REQUESTS, tokens, slots)
    described = dict(
        requests=REQUESTS,
        tokens=sum(tokens),
        slots=slots,
        steps=sum(steps for steps, _, _ in spans),
        peak=most_cached(spans),
    )
    return described, states(spans, count)


def graph_sizes(batches: Sequence[int], choices: Sequence[int]) -> list[int]:
    """Return the batch sizes, in tokens, that need CUDA graphs. Capturing is slow, so only the
    sizes of decode steps are included, for each draft length.
    """
    return sorted({batch * (drafts + 1) for batch in batches for drafts in choices})


def start(arguments: argparse.Namespace, mode: str, folder: str) -> Any:
    """Start a mode's engine."""
    from rollout import Bench

    from sparrow import SparsitySchedule
    from sparrow.decoding import Decoding
    from sparrow.vllm.lossless.setup import draft_choices

    batches = [batch for batch, _ in arguments.points] if "points" in arguments.parts else []
    if "trace" in arguments.parts:
        _, found = traced(arguments.slots, arguments.states)
        batches += [len(lengths) for _, lengths in found]
    decoding = None
    choices: tuple[int, ...] = (0,)
    if mode == "lossless":
        drafts = SparsitySchedule.fixed(DRAFT_PAGES, dense_layers=())
        decoding = Decoding.lossless(drafts, draft_tokens=DRAFT_TOKENS)
        choices = draft_choices(decoding)

    return Bench(
        arguments.shape,
        "sparse" if mode == "lossy" else mode,
        folder,
        memory=arguments.memory,
        lossless=decoding,
        slots=max(batches),
        schedule=SparsitySchedule.preset(SCHEDULE),
        config=changes(arguments.experts, arguments.layers),
        cudagraph_capture_sizes=graph_sizes(batches, choices),
        max_num_batched_tokens=PREFILLED,
        quantization=arguments.quantization,
    )


def time_point(bench: Any, mode: str, batch: int, length: int) -> list[dict[str, Any]]:
    """Time a point. In lossless mode, time it with each draft length and with the one Sparrow
    chooses.
    """
    from lossless import hold, point, scheduler

    from sparrow.vllm.lossless.chooser import DraftChooser

    if mode != "lossless":
        speed = point(bench, batch, length, 0.0)["tokens_per_s"]
        return [{"drafts": 0, **point(bench, batch, length, FIXED_S, speed)}]

    rows: list[dict[str, Any]] = []
    choices = scheduler(bench).chooser.choices
    speed = 0.0
    for drafts in choices:
        hold(bench, drafts)
        measured = point(bench, batch, length, FIXED_S, speed)
        speed = measured["tokens_per_s"]
        rows.append({"drafts": drafts, **measured})
    chooser = scheduler(bench).chooser = DraftChooser(choices)
    chosen = point(bench, batch, length, SECONDS, speed)
    settled = point(bench, batch, length, SETTLED_S, chosen["tokens_per_s"])
    rows.append({"drafts": "adapt", **chosen, "settled": settled, "in_use": chooser.in_use()})
    return rows


def measure_mode(arguments: argparse.Namespace, mode: str, until: float) -> None:
    """Measure a mode in this process, writing the results after each row. Stop once ``time.time``
    reaches ``until``.
    """
    from lossless import accept, scheduler, state
    from rollout import CONTEXT

    from sparrow.vllm.lossless.chooser import DraftChooser

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        bench = start(arguments, mode, folder)
        for prefilled in (1, 8):  # compile the remaining kernels
            bench.start([PROMPT] * prefilled, [4] * prefilled, None)
            bench.finish()
        rate = None
        if mode == "lossless":
            rate = ACCEPTANCE
            accept(bench, rate)
        elif mode == "lossy":
            bench.use("published")

        found: dict[str, Any] = {
            "start_s": time.monotonic() - began,
            "kv_tokens": bench.kv_tokens,
            "points": [],
            "trace": [],
            "finished": False,
        }

        def keep(part: str, **row: Any) -> None:
            found[part].append(row)
            write(arguments.out, found)
            print(f"{time.monotonic() - began:6.1f} s  {json.dumps(row)}", flush=True)

        write(arguments.out, found)
        print(f"{time.monotonic() - began:6.1f} s  started, {bench.kv_tokens} tokens", flush=True)
        wait_for_turn()
        wanted = arguments.points if "points" in arguments.parts else ()
        for batch, length in fitting(wanted, bench.kv_tokens, CONTEXT):
            if time.time() > until:
                return
            for row in time_point(bench, mode, batch, length):
                keep("points", batch=batch, length=length, **row)

        if "trace" in arguments.parts:
            found["rollout"], chosen = traced(arguments.slots, arguments.states)
            # Each sequence may have a partly filled block.
            peak = found["rollout"]["peak"] + 64 * arguments.slots
            assert peak < bench.kv_tokens, (
                f"{peak} tokens do not fit in the KV cache; reduce --slots"
            )
            if mode == "lossless":
                scheduler(bench).chooser = DraftChooser(scheduler(bench).chooser.choices)
            for step, lengths in chosen:
                if time.time() > until:
                    return
                what = {"step": step, "batch": len(lengths), "tokens": int(lengths.sum())}
                keep("trace", **what, **state(bench, lengths, rate))
        found["finished"] = True
        write(arguments.out, found)


def found_by(mode: str, out: Path) -> Path:
    """Return the file that a mode's process writes. The file lies next to the result, so that its
    measurements survive if the script is killed. It is deleted once they are in the result.
    """
    return out.with_name(f"{out.stem}_{mode}.part")


class Child(EngineProcess):
    """The process running a mode's engine."""

    def __init__(self, arguments: argparse.Namespace, mode: str) -> None:
        written = found_by(mode, arguments.out)
        written.unlink(missing_ok=True)
        given = {
            "shape": arguments.shape,
            "child": mode,
            "points": [f"{batch}x{length}" for batch, length in arguments.points],
            "parts": arguments.parts,
            "slots": arguments.slots,
            "states": arguments.states,
            "memory": arguments.memory,
            "experts": arguments.experts,
            "layers": arguments.layers,
            "quantization": arguments.quantization,
            "out": written,
        }
        command = [Path(__file__).name]
        for name, value in given.items():
            if value is not None:
                values = value if isinstance(value, (list, tuple)) else [value]
                command += [f"--{name}", *map(str, values)]
        super().__init__(command, written, arguments.out.with_suffix(f".{mode}.log"), os.environ)


def measure(arguments: argparse.Namespace) -> None:
    import vllm

    out, result = earlier_runs(arguments.out, "mixture", arguments.shape)
    arguments.out = out
    model = qwen3(arguments.shape, **changes(arguments.experts, arguments.layers))
    engines: dict[str, Any] = {}
    result["runs"].append(
        {
            "gpu": machine(),
            "vllm": vllm.__version__,
            "experts": model.num_experts,
            "experts per token": model.num_experts_per_tok,
            "layers": model.num_hidden_layers,
            "quantization": arguments.quantization,
            "acceptance": ACCEPTANCE,
            "draft pages": DRAFT_PAGES,
            "schedule": SCHEDULE,
            "engines": engines,
        }
    )
    until = time.time() + arguments.deadline
    for mode, found in in_turn(arguments.modes, lambda name: Child(arguments, name), until):
        engines[mode] = found
        save(out, result)
        found_by(mode, out).unlink(missing_ok=True)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--shape", choices=EXPERTS, default=next(iter(EXPERTS)))
    options.add_argument("--experts", type=int, help="experts per layer; by default, all")
    options.add_argument("--layers", type=int, help="number of layers; by default, all")
    add_quantization(options)
    options.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    options.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    options.add_argument(
        "--points",
        nargs="+",
        type=parse_point,
        default=POINTS,
        help="points to measure, as SEQUENCESxTOKENS, such as 40x15000",
    )
    options.add_argument(
        "--slots",
        type=int,
        default=SLOTS,
        help="maximum number of concurrent sequences in the trace",
    )
    options.add_argument(
        "--states", type=int, default=STATES, help="number of strata to divide the trace into"
    )
    options.add_argument("--memory", type=float, default=0.93, help="vLLM's gpu_memory_utilization")
    options.add_argument(
        "--deadline", type=float, default=3600.0, help="time limit for the whole run, in seconds"
    )
    options.add_argument(
        "--out",
        type=Path,
        help="the JSON file to add the run to, results/mixture_SHAPE.json by default",
    )
    options.add_argument("--child", choices=MODES, help=argparse.SUPPRESS)
    arguments = options.parse_args()

    if arguments.child is None:
        measure(arguments)
    else:
        measure_mode(arguments, arguments.child, told_to_start())


if __name__ == "__main__":
    main()
