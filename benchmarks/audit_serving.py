"""Audit lossless mode with LoRA adapters and under data parallelism, with ten seeds each.

    python benchmarks/audit_serving.py --arms LoRA             # one GPU
    python benchmarks/audit_serving.py --arms "data parallel"  # two GPUs

Results are added to benchmarks/results/audit_serving.json. Every seed is tested as in ``sparrow
audit``, at the 1 % level. As in ``audit_drafters.py``, the model is the bundled reasoner in
bfloat16, and drafts read few pages.

- ``LoRA``: a third of the requests in every batch use no adapter, and two random adapters get
  another third each. Every cycle drafts four tokens. To rank a request's tokens, transformers
  merges its adapter into the weights.
- ``data parallel``: a server with one engine on each of two GPUs. The engines share the requests,
  and each picks its own draft lengths.

One engine samples all seeds of an arm. An arm and its dense counterpart run at the same time, each
in its own process.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import urlopen

import psutil
from audits import LEVEL, TASK, Sampled, audited, command_line, loaded, samplings, separate
from common import REASONER, read_result, save
from lora_check import merge, write_adapter
from same_run import answers, free_port, wait_for
from vllm_versions import FEW_PAGES

if TYPE_CHECKING:
    from sparrow.rollout import Rollout, Sampling

ARMS = {"LoRA": "LoRA, dense", "data parallel": "dense"}
"""Maps each arm to the dense arm it is compared with."""
RANKS = 2
START_S = 900.0
"""How long to wait for the server. While other programs use the machine, it needs minutes."""
STOP_S = 60.0
DRAFTS = 4
RANK = 8
ALPHA = 16
STRENGTH = 0.2
"""Standard deviation of the weights in the adapters' B matrices."""
ADAPTERS = 2
WITH_LORA = f"enable_lora=true,max_loras={ADAPTERS},max_lora_rank={RANK}"


@contextlib.contextmanager
def serving(options: str, precision: str) -> Iterator[str]:
    """Start a data-parallel server in lossless mode, and yield its address. The server prints to
    this process's output.

    Args:
        options: vLLM options, in the format of ``sparrow audit --engine``.
    """
    port = free_port()
    flags = []
    for option in re.split(r",(?=\w+=)", options):
        name, value = option.split("=", 1)
        flags += [f"--{name.replace('_', '-')}", *([] if value == "true" else [value])]
    settings = {"mode": "lossless", "draft_schedule": FEW_PAGES}
    command = [
        sys.executable,
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(REASONER)),
        *("--host", "localhost", "--port", str(port), "--data-parallel-size", str(RANKS)),
        *("--dtype", {"bf16": "bfloat16", "fp32": "float32"}[precision]),
        *("--additional-config", json.dumps({"sparrow": settings})),
        *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1", "--enable-scale-out"),
        "--disable-uvicorn-access-log",
        *flags,
    ]
    environment = {
        **os.environ,
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
    }
    began = time.monotonic()
    server = subprocess.Popen(command, env=environment)
    try:
        address = f"http://localhost:{port}"
        wait_for(lambda: server.poll() is not None or answers(f"{address}/health"), START_S)
        seconds = time.monotonic() - began
        if not answers(f"{address}/health"):
            raise RuntimeError(f"the server did not start in {seconds:.0f} s; see its output above")
        print(f"the server started in {seconds:.0f} s", flush=True)
        yield address
    finally:
        stop(server)


def stop(server: subprocess.Popen[bytes]) -> None:
    """End a server and its engines. Kill those that take longer than ``STOP_S``."""
    processes = []
    if server.poll() is None:
        parent = psutil.Process(server.pid)
        processes = [parent, *parent.children(recursive=True)]
    server.terminate()
    _, running = psutil.wait_procs(processes, STOP_S)
    for process in running:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    server.wait()


def counted(address: str) -> dict[str, int]:
    """Read the server's metrics: the draft counts, and how many tokens each rank generated."""
    metrics = urlopen(f"{address}/metrics").read().decode()

    def values(name: str) -> dict[str, int]:
        found = re.findall(
            rf'^vllm:{name}_total\{{[^}}]*engine="(\d+)"[^}}]*\}} (\S+)', metrics, re.M
        )
        return {rank: int(float(value)) for rank, value in found}

    return {
        "drafted": sum(values("spec_decode_num_draft_tokens").values()),
        "accepted": sum(values("spec_decode_num_accepted_tokens").values()),
        **{f"tokens of rank {k}": n for k, n in sorted(values("generation_tokens").items())},
    }


def generate(
    engine: Any,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    whose: Sequence[int],
    folder: str,
) -> list[Rollout]:
    """Sample a response to each prompt. ``whose`` contains an adapter number for each prompt (0: no
    adapter).
    """
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    from sparrow.engines.vllm.engine import rollout_of

    wanted = [
        SamplingParams(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            logprobs=0,
            seed=seed,
            detokenize=False,
            flat_logprobs=True,
        )
        for seed in sampling.request_seeds(len(prompts))
    ]
    adapters = [
        LoRARequest(f"a{number}", number, f"{folder}/adapter-{number}") if number else None
        for number in whose
    ]
    requests = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
    outputs = engine.llm.generate(requests, wanted, lora_request=adapters, use_tqdm=False)
    return [
        rollout_of(prompt, output.outputs[0], 0)
        for prompt, output in zip(prompts, outputs, strict=True)
    ]


def sample(arm: str, folder: str, options: str, precision: Any, seeds: int, count: int) -> Sampled:
    """Sample an arm with all seeds in this process, and rank its tokens with the dense model."""
    separate(folder, arm)

    from sparrow.audit.run import tokens_of
    from sparrow.audit.statistics import COMMON
    from sparrow.cli import loading
    from sparrow.decoding import Decoding
    from sparrow.schedule import SparsitySchedule

    dense = Decoding.lossy("dense")
    decoding = dense
    if arm == "LoRA":
        few_pages = SparsitySchedule.from_dict(FEW_PAGES)
        decoding = Decoding.lossless(few_pages, draft_tokens=DRAFTS, adapt_draft_tokens=False)
    elif arm in ARMS:
        decoding = Decoding.lossless(SparsitySchedule.from_dict(FEW_PAGES))
    has_adapters = arm.startswith("LoRA")
    asked = f"vllm:{options}" + (f",{WITH_LORA}" if has_adapters else "")
    model, tokenizer, prompts = loaded(asked, precision, count)
    whose = [i % (ADAPTERS + 1) if has_adapters else 0 for i in range(len(prompts))]

    wanted = samplings(ARMS, arm, seeds)
    began = time.monotonic()
    with contextlib.ExitStack() as stack:
        if arm == "data parallel":
            asked = stack.enter_context(serving(options, precision))
        engine: Any = loading.load_engine(
            asked, "reasoner", model, tokenizer, decoding, precision, audits=True
        )
        rollouts = [
            generate(engine, prompts, sampling, whose, folder)
            if has_adapters
            else engine.generate(prompts, sampling)
            for sampling in wanted
        ]
        drafts: dict[str, int] = {}
        if arm == "data parallel":
            drafts = counted(asked)
        elif arm in ARMS:
            counters = engine.counters()
            drafts = {"drafted": counters.drafted, "accepted": counters.accepted}
        engine.close()
    print(f"{arm}: sampled in {time.monotonic() - began:.0f} s, {drafts}", flush=True)

    began = time.monotonic()
    standings: list[list[Any]] = [[None] * len(prompts) for _ in wanted]
    for number in sorted(set(whose)):
        adapted = copy.deepcopy(model)
        if number:
            merge(adapted, Path(folder) / f"adapter-{number}")
        scorer = loading.load_scorer(adapted, tokenizer, dense, precision)
        places = [i for i, each in enumerate(whose) if each == number]
        for made, sampling, found in zip(rollouts, wanted, standings, strict=True):
            ranked = scorer.rank([made[i] for i in places], sampling, COMMON)
            for place, standing in zip(places, ranked, strict=True):
                found[place] = standing
    print(f"{arm}: ranked in {time.monotonic() - began:.0f} s", flush=True)
    pairs = zip(rollouts, standings, strict=True)
    return Sampled([tokens_of(made, found) for made, found in pairs], drafts)


def measure(arguments: argparse.Namespace) -> None:
    import vllm

    from sparrow.cli import loading

    path: Path = arguments.out
    result: dict[str, Any] = read_result(path) if path.exists() else {"arms": {}}
    result |= {
        "vllm": vllm.__version__,
        "model": "reasoner",
        "task": TASK,
        "level": LEVEL,
        "responses": arguments.count,
        "draft_schedule": FEW_PAGES,
    }
    with tempfile.TemporaryDirectory() as folder:
        model, _ = loading.load_model("reasoner")
        for number in range(1, ADAPTERS + 1):
            write_adapter(model, Path(folder) / f"adapter-{number}", number, RANK, ALPHA, STRENGTH)
        del model
        asked = (folder, arguments.options, arguments.precision, arguments.seeds, arguments.count)
        for arm, found in audited(ARMS, arguments.arms, sample, *asked):
            result["arms"][arm] = found
            save(path, result)


def main() -> None:
    options = command_line(__doc__, "audit_serving", "arms", ARMS)
    options.add_argument("--precision", choices=("bf16", "fp32"), default="bf16")
    measure(options.parse_args())


if __name__ == "__main__":
    main()
