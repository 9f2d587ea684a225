"""Check on a GPU that the self-check lets sound vLLM engines start and refuses broken ones.

    python benchmarks/selfcheck.py --out benchmarks/results/selfcheck/0.33.0_h200.json

Each case starts an engine with the random model of ``vllm_check.py`` in its own process; ``--jobs``
cases run at a time. Faulty cases first break one part of Sparrow: landmarks are written one block
off, attention uses the wrong scale, the scales of an fp8 KV cache are doubled, or a tensor moves
after CUDA graphs using it have been captured. Sound engines are checked twice (the second time with
all kernels already compiled) and then generate tokens. The exit status is 1 if any case doesn't end
as expected. ``--only`` selects the cases whose names contain all of the given words. The JSON file
keeps its results for the other cases.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from common import SMALL_VOCAB, parser, read_result, save, small_qwen3

RESPONSE_TOKENS = 24
RESULT = "result: "
"""Prefix of the line in which a case's process prints its result."""
LOSSLESS = {
    "mode": "lossless",
    "draft_schedule": {"top_k": [4], "dense_layers": []},
    "draft_tokens": 6,
}
LOSSY = {"top_k": [4], "bin_tokens": 2000, "dense_layers": [0]}
EAGER = {"enforce_eager": True}
GRAPHS = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
COMPILED: dict[str, Any] = {}
"""vLLM's defaults: torch.compile, and full CUDA graphs for decode steps."""
ENGINE: dict[str, Any] = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 2**30,
    "gpu_memory_utilization": 0.03,
    "skip_tokenizer_init": True,
}


# --- faults ---


def misplaced_landmarks() -> Any:
    from sparrow.vllm.backend import attention

    update = attention.update_landmarks

    def update_landmarks(layers: Any, slots: Any, **options: Any) -> None:
        block_tokens = layers.keys.shape[2]
        update(layers, (slots - block_tokens).where(slots >= 0, slots), **options)

    return patch.object(attention, "update_landmarks", update_landmarks)


def wrong_scale() -> Any:
    from sparrow.vllm.backend import attention

    decode = attention.paged_decode

    def paged_decode(*tensors: Any, scale: float, **options: Any) -> Any:
        return decode(*tensors, scale=1.25 * scale, **options)

    return patch.object(attention, "paged_decode", paged_decode)


def doubled_cache_scales() -> Any:
    from sparrow.vllm.backend import fp8

    stock = fp8.LayerScales.__init__

    def initialise(self: Any, *arguments: Any) -> None:
        stock(self, *arguments)
        self.values.k.mul_(2)

    return patch.object(fp8.LayerScales, "__init__", initialise)


def moved_block_table() -> Any:
    from sparrow.vllm.lossless.sparse_drafter import SparseDrafter

    stock = SparseDrafter.capture

    def capture(self: Any) -> None:
        stock(self)
        self._blocks_SM = self._blocks_SM.clone()

    return patch.object(SparseDrafter, "capture", capture)


# --- cases ---


@dataclass(frozen=True)
class Case:
    """An engine to start, and how its self-check should turn out."""

    name: str
    sparrow: dict[str, Any]
    engine: dict[str, Any]
    fault: Callable[[], Any] = nullcontext
    refusal: str | None = None  # part of the expected error; None if the engine should start
    is_mixture: bool = False  # whether the model is a mixture of experts
    settings: dict[str, Any] = field(init=False)

    def __post_init__(self) -> None:
        settings = ENGINE | self.engine | {"additional_config": {"sparrow": self.sparrow}}
        if "mode" not in self.sparrow:
            settings["attention_backend"] = "CUSTOM"
        object.__setattr__(self, "settings", settings)


FP8 = {"kv_cache_dtype": "fp8"}
INT8 = {"kv_cache_dtype": "int8_per_token_head"}
CASES = (
    Case("lossless, CUDA graphs", LOSSLESS, GRAPHS),
    Case("lossless, one sequence", LOSSLESS, GRAPHS | {"max_num_seqs": 1}),
    Case("lossless, eager", LOSSLESS, EAGER),
    Case("lossless, compiled", LOSSLESS, COMPILED),
    Case("lossless, fp8 cache", LOSSLESS, GRAPHS | FP8),
    Case("lossy, CUDA graphs", LOSSY, GRAPHS),
    Case("lossy, eager", LOSSY, EAGER),
    Case("lossy, compiled", LOSSY, COMPILED),
    Case("lossy, fp8 cache", LOSSY, EAGER | FP8),
    Case("lossy, int8 cache", LOSSY, GRAPHS | INT8),
    Case("lossless, mixture", LOSSLESS, COMPILED, is_mixture=True),
    Case("lossy, mixture", LOSSY, COMPILED, is_mixture=True),
    Case("lossless, misplaced landmarks", LOSSLESS, EAGER, misplaced_landmarks, "the best pages"),
    Case("lossy, misplaced landmarks", LOSSY, EAGER, misplaced_landmarks, "the best pages"),
    Case("lossless, wrong scale", LOSSLESS, GRAPHS, wrong_scale, "every page"),
    Case("lossy, wrong scale", LOSSY, EAGER, wrong_scale, "every page"),
    Case("lossless, doubled fp8 scales", LOSSLESS, EAGER | FP8, doubled_cache_scales, "every page"),
    Case("lossless, moved block table", LOSSLESS, GRAPHS, moved_block_table, "were captured"),
)


# --- running them ---


@contextmanager
def checked_twice(result: dict[str, Any]) -> Iterator[None]:
    """Run each self-check twice, recording its times and differences."""
    import torch

    from sparrow.vllm.selfcheck import engine

    stock = engine.check_engine

    def run(worker: Any, runtime: Any) -> Any:
        for name in ("ms", "ms when compiled"):
            torch.cuda.synchronize()
            started = time.perf_counter()
            found = stock(worker, runtime)
            torch.cuda.synchronize()
            result[name] = round(1000 * (time.perf_counter() - started))
        result["layers differ by"] = float(f"{found.layers:.2g}")
        result["log-probs differ by"] = float(f"{found.steps:.2g}")
        return found

    with patch.object(engine, "check_engine", run):
        yield


def start(folder: str, case: Case, result: dict[str, Any]) -> None:
    """Start an engine, and generate responses to three prompts.

    Raises ConfigError if the self-check refuses the engine.
    """
    from vllm import LLM, SamplingParams

    with checked_twice(result):
        llm = LLM(model=folder, **case.settings)
    prompts = [
        {"prompt_token_ids": [(31 * n + 7 * row) % SMALL_VOCAB for n in range(300)]}
        for row in range(3)
    ]
    sampling = SamplingParams(
        temperature=1.0, seed=1, max_tokens=RESPONSE_TOKENS, ignore_eos=True, detokenize=False
    )
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    lengths = [len(output.outputs[0].token_ids) for output in outputs]
    assert lengths == [RESPONSE_TOKENS] * len(prompts), lengths


def outcome(folder: str, case: Case) -> dict[str, Any]:
    """Run a case, and return what happened and whether that was expected."""
    from sparrow.errors import ConfigError

    result: dict[str, Any] = {"case": case.name}
    try:
        with case.fault():
            start(folder, case, result)
        result["outcome"] = "started"
        result["as expected"] = case.refusal is None
    except ConfigError as error:
        result["outcome"] = str(error)
        result["as expected"] = case.refusal is not None and case.refusal in str(error)
    except Exception as error:
        traceback.print_exc()
        result["outcome"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
        result["as expected"] = False
    return result


def checkpoint_of(folder: str, is_mixture: bool) -> Path:
    """Return the folder with a case's model."""
    return Path(folder) / ("mixture" if is_mixture else "dense")


def in_own_process(folder: str, case: Case) -> dict[str, Any]:
    """Run a case in a new process, and return its result.

    Raises RuntimeError if the process prints no result.
    """
    checkpoint = str(checkpoint_of(folder, case.is_mixture))
    command = [sys.executable, __file__, "--case", case.name, "--checkpoint", checkpoint]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    for line in reversed(ended.stdout.splitlines()):
        if line.startswith(RESULT):
            found: dict[str, Any] = json.loads(line.removeprefix(RESULT))
            return found
    raise RuntimeError(
        f"the process for case {case.name!r} exited with status {ended.returncode} and "
        "printed no result"
    )


def measure(out: Path, words: list[str], jobs: int) -> list[str]:
    """Run the cases whose names contain all of ``words``, and return the names of those with an
    unexpected outcome.
    """
    import vllm
    from vllm_check import random_model

    before = read_result(out) if out.exists() else {"cases": []}
    by_name = {result["case"]: result for result in before["cases"]}
    wanted = [case for case in CASES if all(word in case.name for word in words)]
    failed = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool:
        for is_mixture in {case.is_mixture for case in wanted}:
            checkpoint = checkpoint_of(folder, is_mixture)
            random_model(checkpoint, ENGINE["dtype"], small_qwen3(is_mixture))
        for result in pool.map(lambda case: in_own_process(folder, case), wanted):
            by_name[result["case"]] = result
            if not result["as expected"]:
                failed.append(result["case"])
            results = [by_name[case.name] for case in CASES if case.name in by_name]
            save(out, {"vllm": vllm.__version__, "cases": results})
    return failed


def main() -> None:
    options = parser(__doc__)
    options.add_argument(
        "--out",
        type=Path,
        help="the JSON file to write; results that it contains for other cases are kept",
    )
    options.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="run only cases whose names contain all of these words",
    )
    options.add_argument("--jobs", type=int, default=4, help="number of cases to run concurrently")
    options.add_argument("--case", help="run only this case, in this process")
    options.add_argument("--checkpoint", help="folder with the model for --case")
    arguments = options.parse_args()

    if arguments.case is not None:
        # Faults only affect an engine in this process.
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        (case,) = (case for case in CASES if case.name == arguments.case)
        print(RESULT + json.dumps(outcome(arguments.checkpoint, case)), flush=True)
    elif arguments.out is None:
        options.error("--out is required; give the JSON file to write")
    elif failed := measure(arguments.out.resolve(), arguments.only, arguments.jobs):
        sys.exit(f"unexpected outcome: {', '.join(failed)}")


if __name__ == "__main__":
    main()
