"""Test whether Sparrow is slower than stock vLLM, in either mode, with short sequences or small
models. Reading fewer pages may not help there.

    python benchmarks/never_slower.py --tokenizer TOKENIZER     # results/never_slower_smollm2-135m.json
    python benchmarks/never_slower.py --shape qwen3-1.7b        # 512 x 128 + 300, as on GSM8K
    python benchmarks/never_slower.py --model CHECKPOINT        # the same shape, with real weights
    python benchmarks/never_slower.py --engines stock lossy before --before OLD_TREE --cells 512x128+512

In such steps, the GPU waits for the host, and the host's speed varies by a tenth from minute to
minute and from process to process. So the engines (stock vLLM, lossless mode and lossy mode) run
side by side and take turns. As in real use, vLLM's engine core has its own process. A turn is one
``LLM.generate`` call for a whole cell (requests x prompt + new tokens), while the other engines
wait. Requests are sampled at temperature 1, each with its own seed, and return the log-probs of the
sampled tokens. In each round, every engine has two turns per cell, one with detokenisation and one
without. The engine that goes first changes from cell to cell. Ratios are computed within a round.
All engines get the same prompts of random tokens, new in each round so that nothing comes from the
prefix cache. To warm up, every engine first generates eight tokens for every request of each cell.

Without ``--model``, weights are random, and nothing is downloaded. Nearly every draft is then
accepted, which makes lossless mode faster than with real weights. Without a tokenizer, there are no
turns with detokenisation.

The ``before`` engine runs lossy mode with an earlier version of Sparrow; ``--before`` is the folder
of its source tree.

The KV caches of all engines must fit on the GPU together: 130 GB for the three SmolLM2 cells.
``--sleep`` avoids this: engines start one after another and sleep between turns.

Results are written after each turn. Running again with the same file adds more rounds to it, even
with another version of vLLM. With ``--deadline``, a turn only starts if it is expected to end in
time. If ``VLLM_CACHE_ROOT`` is set, later runs start faster.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import re
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from common import RESULTS, ROOT, parser, qwen3, read_result, write

ENGINES = ("stock", "lossy", "lossless", "before")
WARM_UP = 8  # tokens
SPARE = 64  # room for drafts and partly filled blocks, in tokens per sequence
BATCHED_TOKENS = 16_384


class Cell(NamedTuple):
    """A batch of equal-sized requests."""

    requests: int
    prompt: int
    new: int

    def __str__(self) -> str:
        return f"{self.requests}x{self.prompt}+{self.new}"

    @classmethod
    def parse(cls, text: str) -> Cell:
        """Read a cell from the command line.

        Raises ArgumentTypeError, whose message argparse shows, if the form is wrong.
        """
        found = re.fullmatch(r"(\d+)x(\d+)\+(\d+)", text)
        if not found:
            raise argparse.ArgumentTypeError(
                f"a cell must have the form REQUESTSxPROMPT+NEW, such as 512x128+300, got {text!r}"
            )
        return cls(*map(int, found.groups()))


CELLS = {
    "smollm2-135m": (Cell(512, 128, 512), Cell(256, 5000, 2048), Cell(32, 5000, 2048)),
    "qwen3-1.7b": (Cell(512, 128, 300),),
}
LOSSY = {"smollm2-135m": "fixed:96", "qwen3-1.7b": "qwen3-1.7b-0.86"}
"""Lossy mode's schedule."""


def smollm2() -> Any:
    """Return SmolLM2-135M's config, changed so that no token ends a response."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rope_theta=100_000.0,
        tie_word_embeddings=True,
        architectures=["LlamaForCausalLM"],
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
        dtype="bfloat16",
    )


def shape_config(shape: str) -> Any:
    """Return a shape's transformers config."""
    return smollm2() if shape == "smollm2-135m" else qwen3(shape, dtype="bfloat16")


def cache_bytes(model: Any, cells: Sequence[Cell]) -> int:
    """Return the KV cache size in bytes for the largest cell, including room for landmarks."""
    tokens = max(cell.requests * (cell.prompt + cell.new + SPARE) for cell in cells)
    heads = model.num_hidden_layers * model.num_key_value_heads
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return int(1.04 * tokens * heads * head_dim * 2 * 2)


def engine_options(name: str, schedule: str) -> dict[str, Any]:
    """Return the ``LLM`` arguments that set an engine's mode."""
    if name == "stock":
        return {}
    if name == "lossless":
        return {"additional_config": {"sparrow": "lossless"}}
    return {"attention_backend": "CUSTOM", "additional_config": {"sparrow": schedule}}


_llm: Any
"""This process's engine."""
_sleeps = False


def engine() -> Any:
    """Return this process's engine, which ``start`` has started."""
    return _llm


def start(name: str, folder: str, tree: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Start an engine in this process, with Sparrow imported from the source tree ``tree``. Return
    the GPU, the versions and the start-up time.
    """
    global _llm, _sleeps
    sys.path.insert(0, str(tree))
    os.environ.update(
        VLLM_CACHE_ROOT=f"{folder}/cache-{name}",  # engines start at the same time
        PYTHONPATH=os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]),  # engine core
        VLLM_NO_USAGE_STATS="1",
        HF_HUB_OFFLINE="1",
    )
    if name == "stock":
        os.environ["VLLM_PLUGINS"] = ""
    import torch
    import vllm
    from vllm.platforms import current_platform

    began = time.perf_counter()
    _llm = vllm.LLM(**options)
    _sleeps = bool(options.get("enable_sleep_mode"))
    if _sleeps:
        _llm.sleep(level=1)
    return {
        "gpu": current_platform.get_device_name(),
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "cores": len(os.sched_getaffinity(0)),
        "start_s": time.perf_counter() - began,
    }


def generate(
    cell: Cell, new: int, detokenize: bool, seed: Sequence[int], vocabulary: int
) -> dict[str, Any]:
    """Generate ``new`` tokens for each of a cell's requests with this process's engine. Return the
    token count, the seconds, and Sparrow's counters.
    """
    import numpy as np
    from vllm import SamplingParams

    tokens = np.random.default_rng(seed).integers(0, vocabulary, (cell.requests, cell.prompt))
    prompts = [{"prompt_token_ids": row} for row in tokens.tolist()]
    sampling = [
        SamplingParams(
            temperature=1.0,
            max_tokens=new,
            ignore_eos=True,
            logprobs=0,
            seed=i,
            detokenize=detokenize,
        )
        for i in range(cell.requests)
    ]
    if _sleeps:
        _llm.wake_up()
    sparrow = _llm.llm_engine.vllm_config.additional_config
    if sparrow:
        _llm.collective_rpc("sparrow_counters")
    began = time.perf_counter()
    outputs = _llm.generate(prompts, sampling, use_tqdm=False)
    seconds = time.perf_counter() - began
    counts = _llm.collective_rpc("sparrow_counters")[0] if sparrow else {}
    if _sleeps:
        _llm.sleep(level=1)
    made = sum(len(output.outputs[0].token_ids) for output in outputs)
    return {"tokens": made, "seconds": seconds, "counts": counts}


class Turn(NamedTuple):
    round: int
    cell: Cell
    detokenize: bool
    engine: str


def turns(
    first: int,
    rounds: int,
    cells: Sequence[Cell],
    detokenize: Sequence[bool],
    engines: Sequence[str],
) -> Iterator[Turn]:
    """List the turns of ``rounds`` rounds, starting with round ``first``."""
    for number in range(first, first + rounds):
        begins = number
        for text in detokenize:
            for cell in cells:
                begins += 1
                for i in range(len(engines)):
                    yield Turn(number, cell, text, engines[(begins + i) % len(engines)])


def row_of(turn: Turn, measured: dict[str, Any]) -> dict[str, Any]:
    """Return a turn and its result as a row for the file."""
    counts = measured["counts"]
    shown = ("rows", "dense_rows_short", "dense_rows_schedule", "dense_steps", "preemptions")
    return {
        "round": turn.round,
        "cell": str(turn.cell),
        "detokenize": turn.detokenize,
        "engine": turn.engine,
        "tokens_per_s": measured["tokens"] / measured["seconds"],
        "seconds": measured["seconds"],
        **({"counts": {key: counts[key] for key in shown if key in counts}} if counts else {}),
    }


class Engines:
    """All engines, each in its own process."""

    def __init__(self, names: Sequence[str], takes_turns_in_memory: bool) -> None:
        spawn = multiprocessing.get_context("spawn")
        self._pools = {name: ProcessPoolExecutor(1, spawn) for name in names}
        self._takes_turns_in_memory = takes_turns_in_memory

    def call(
        self, function: Callable[..., dict[str, Any]], arguments: Mapping[str, Sequence[Any]]
    ) -> dict[str, dict[str, Any]]:
        """Call a function in each given engine's process. The calls run concurrently unless the
        engines take turns with the GPU's memory.
        """
        begun = {}
        for name, given in arguments.items():
            begun[name] = self._pools[name].submit(function, *given)
            if self._takes_turns_in_memory:
                begun[name].result()
        return {name: each.result() for name, each in begun.items()}

    def close(self) -> None:
        for pool in self._pools.values():
            pool.shutdown()


def options() -> argparse.Namespace:
    """Read the command line."""
    asked = parser(__doc__ or "")
    asked.add_argument("--shape", choices=CELLS, default="smollm2-135m")
    asked.add_argument(
        "--model", help="checkpoint to load, of this shape; by default, weights are random"
    )
    asked.add_argument(
        "--tokenizer", help="tokenizer for detokenisation; by default, the one in --model"
    )
    asked.add_argument("--schedule", help="the schedule for lossy mode")
    asked.add_argument(
        "--cells",
        type=Cell.parse,
        nargs="+",
        help="batches to measure, each as REQUESTSxPROMPT+NEW",
    )
    asked.add_argument("--engines", choices=ENGINES, nargs="+", default=ENGINES[:3])
    asked.add_argument(
        "--before", type=Path, metavar="TREE", help="source tree to use for the engine 'before'"
    )
    asked.add_argument("--detokenize", choices=("yes", "no"), nargs="+", default=("yes", "no"))
    asked.add_argument("--rounds", type=int, default=3, help="number of rounds to run")
    asked.add_argument(
        "--sleep", action="store_true", help="put each engine to sleep between its turns"
    )
    asked.add_argument("--deadline", type=float, default=float("inf"), help="time limit in seconds")
    asked.add_argument(
        "--out",
        type=Path,
        help="the JSON file to write, results/never_slower_SHAPE.json by default",
    )
    given = asked.parse_args()
    if ("before" in given.engines) != (given.before is not None):
        asked.error(
            "the engine 'before' and the option --before TREE require each other; pass both "
            "or neither"
        )
    given.tokenizer = given.tokenizer or given.model
    given.texts = [each == "yes" for each in given.detokenize if each == "no" or given.tokenizer]
    if not given.texts:
        asked.error("--detokenize yes needs --tokenizer or --model")
    given.out = given.out or RESULTS / f"never_slower_{given.shape}.json"
    given.cells = given.cells or CELLS[given.shape]
    given.schedule = given.schedule or LOSSY[given.shape]
    return given


def main() -> None:
    began = time.perf_counter()
    given = options()
    names = given.engines
    engines = Engines(names, given.sleep)
    with tempfile.TemporaryDirectory() as temporary:
        # If VLLM_CACHE_ROOT is set, later runs find the compiled models there.
        folder = os.environ.get("VLLM_CACHE_ROOT", temporary)
        model, shared = prepared(given, f"{folder}/{given.shape}")
        trees = {name: given.before.resolve() if name == "before" else ROOT for name in names}
        started = engines.call(
            start,
            {
                name: (name, folder, trees[name], shared | engine_options(name, given.schedule))
                for name in names
            },
        )
        print({name: f"started in {about['start_s']:.0f} s" for name, about in started.items()})
        session = {
            **{key: value for key, value in started[names[0]].items() if key != "start_s"},
            "date": time.strftime("%Y-%m-%d"),
            "shape": given.shape,
            "weights": given.model or "random",
            "schedule": given.schedule,
            "sleep": given.sleep,
            "rows": list[dict[str, Any]](),
        }
        print(json.dumps(session), flush=True)
        result = read_result(given.out) if given.out.exists() else {"sessions": []}
        first = sum(len({row["round"] for row in each["rows"]}) for each in result["sessions"])
        result["sessions"].append(session)

        def arguments(turn: Turn, new: int) -> tuple[Any, ...]:
            seed = (turn.round, *turn.cell, turn.detokenize, new)
            return turn.cell, new, turn.detokenize, seed, model.vocab_size

        for cell in given.cells:
            turn = Turn(first, cell, given.texts[0], "")
            engines.call(generate, dict.fromkeys(names, arguments(turn, WARM_UP)))
        likely = dict.fromkeys(given.cells, 0.0)  # expected seconds per turn
        for turn in turns(first, given.rounds, given.cells, given.texts, names):
            left = given.deadline - (time.perf_counter() - began)
            if left < max(likely[turn.cell], 1):
                print(f"skipped for lack of time: {turn}", flush=True)
                continue
            measured = engines.call(generate, {turn.engine: arguments(turn, turn.cell.new)})
            row = row_of(turn, measured[turn.engine])
            likely[turn.cell] = max(likely[turn.cell], 1.1 * row["seconds"])
            session["rows"].append(row)
            print(json.dumps(row), flush=True)
            write(given.out, result)
        engines.close()


def prepared(given: argparse.Namespace, folder: str) -> tuple[Any, dict[str, Any]]:
    """Return the model's config and the ``LLM`` arguments shared by all engines. For a model with
    random weights, only a config is written to ``folder``.
    """
    from transformers import AutoConfig

    if given.model:
        model = AutoConfig.from_pretrained(given.model)
    else:
        model = shape_config(given.shape)
        model.save_pretrained(folder)
    shared: dict[str, Any] = {
        "model": given.model or folder,
        "load_format": "auto" if given.model else "dummy",
        "max_model_len": max(cell.prompt + cell.new for cell in given.cells) + SPARE,
        "max_num_seqs": max(cell.requests for cell in given.cells),
        "max_num_batched_tokens": BATCHED_TOKENS,
        "kv_cache_memory_bytes": cache_bytes(model, given.cells),
        # This much memory has to be free at the start. The cache size is set above.
        "gpu_memory_utilization": 0.05,
        "enable_sleep_mode": given.sleep,
    }
    if given.tokenizer:
        shared["tokenizer"] = given.tokenizer
    else:
        shared["skip_tokenizer_init"] = True
    return model, shared


if __name__ == "__main__":
    main()
