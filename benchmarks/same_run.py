"""Compare the same GRPO run on one, two and four GPUs, and test what happens when a run loses a
process or its server.

    python benchmarks/same_run.py --out benchmarks/results/same_run.json

All ``sparrow train --engine vllm`` runs train the bundled reasoner, as in ``vllm_train.py``, side
by side. Two GPUs are enough for everything except *ddp4* and *fsdp2_4*, which need four; pick runs
with ``--runs``. Two more runs on one GPU show how much runs differ anyway. In *again*, vLLM runs
fewer responses at a time, which changes the bfloat16 rounding. *seed* uses different problems and
samples.

*killed* is a DDP run whose second process is killed after three steps; the run then resumes from
its checkpoint on one GPU. *killed_fsdp2* is the same with FSDP2, and resumes with FSDP2. *server*
samples from a ``vllm serve`` process on the other GPU, which is killed after two steps. Sparrow
must be installed for the server to load the plugin.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.request import urlopen

import psutil
from common import REASONER, free_port, parser, read_result, write
from vllm_train import ENGINE, SPARSE, TRAIN, columns, read

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--num_processes"]
SHARD = ["--use_fsdp", "--fsdp_version", "2"]
RUNS: dict[str, tuple[str, list[str], list[str]]] = {
    "one": ("0", [], []),
    "ddp": ("0,1", [*LAUNCH, "2"], []),
    "fsdp2": ("0,1", [*LAUNCH, "2", *SHARD], []),
    "ddp4": ("0,1,2,3", [*LAUNCH, "4"], []),
    "fsdp2_4": ("0,1,2,3", [*LAUNCH, "4", *SHARD], []),
    "again": ("1", [], ["--engine", ENGINE.replace("max_num_seqs=256", "max_num_seqs=64")]),
    "seed": ("1", [], ["--seed", "1"]),
}
"""Each run's GPUs, its launcher, and additional options."""
TOLD = re.compile(r"sparrow:|--resume|Signal 9")
PATIENCE_S = 300.0


class Bench:
    """Starts processes, writing their output to files in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "schedule.json").write_text(json.dumps(SPARSE))

    def start(self, name: str, gpus: str, command: Sequence[str]) -> subprocess.Popen[bytes]:
        environment = {**os.environ, "CUDA_VISIBLE_DEVICES": gpus, "VLLM_SERVER_DEV_MODE": "1"}
        with open(self.folder / f"{name}.log", "wb") as log:
            return subprocess.Popen(
                command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def train(
        self, name: str, gpus: str, launcher: Sequence[str] = (), more: Sequence[str] = ()
    ) -> Any:
        port = ["--main_process_port", str(free_port())] if launcher else []
        command = [
            *(launcher or TRAIN[:1]),
            *port,
            *TRAIN[1:],
            "--run-dir",
            str(self.folder / name),
            "--engine",
            ENGINE,
            "--save-every",
            "2",
            "--schedule",
            str(self.folder / "schedule.json"),
            "--tau",
            "0.9",
            "--optimizer.token-budget",
            "65536",
            "--steps",
            "10",
            *more,
        ]
        return self.start(name, gpus, command)

    def ended(self, name: str, process: subprocess.Popen[bytes]) -> dict[str, Any]:
        """Wait for a run to end, and return its exit status, its last messages and its steps."""
        code = process.wait(2 * PATIENCE_S)
        lines = (self.folder / f"{name}.log").read_text(errors="replace").splitlines()
        messages = list(dict.fromkeys(line.strip() for line in lines if TOLD.search(line)))
        return {"exit": code, "told": messages[-6:], "steps": columns(read(self.folder / name))}

    def until_step(self, name: str, steps: int, process: subprocess.Popen[bytes]) -> None:
        wait_for(lambda: process.poll() is not None or len(read(self.folder / name)) >= steps)

    def plain(self, name: str) -> dict[str, Any]:
        gpus, launcher, more = RUNS[name]
        return self.ended(name, self.train(name, gpus, launcher, more))

    def killed(self) -> dict[str, Any]:
        return self.loses_a_process("killed", RUNS["ddp"][1], "0", [])

    def killed_fsdp2(self) -> dict[str, Any]:
        return self.loses_a_process("killed_fsdp2", RUNS["fsdp2"][1], "0,1", RUNS["fsdp2"][1])

    def loses_a_process(
        self, name: str, first: list[str], gpus: str, then: list[str]
    ) -> dict[str, Any]:
        launcher = self.train(name, "0,1", first)
        self.until_step(name, 3, launcher)
        children = psutil.Process(launcher.pid).children(recursive=True)
        victim = next(p for p in children if p.environ().get("LOCAL_RANK") == "1")
        began = time.monotonic()
        victim.kill()
        stopped = self.ended(name, launcher) | {"seconds": time.monotonic() - began}
        resumed = self.ended(name, self.train(name, gpus, then, ["--resume"]))
        return {"stopped": stopped, "resumed": resumed}

    def server(self) -> dict[str, Any]:
        port = free_port()
        engine = [
            flag
            for option in re.split(r",(?=\w+=)", ENGINE.removeprefix("vllm:"))
            for flag in ("--" + option.split("=", 1)[0].replace("_", "-"), option.split("=", 1)[1])
        ]
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--port",
            str(port),
            *engine,
            "--model",
            str(REASONER),
            "--attention-backend",
            "CUSTOM",
            "--additional-config",
            json.dumps({"sparrow": SPARSE}),
            "--logprobs-mode",
            "processed_logprobs",
            "--max-logprobs",
            "-1",
            "--enable-sleep-mode",
        ]
        server = self.start("serve", "1", command)
        try:
            wait_for(
                lambda: server.poll() is not None or answers(f"http://localhost:{port}/health")
            )
            process = self.train("server", "0", more=["--engine", f"http://localhost:{port}"])
            self.until_step("server", 2, process)
        finally:
            began = time.monotonic()
            os.killpg(server.pid, signal.SIGKILL)
        return self.ended("server", process) | {"seconds": time.monotonic() - began}


def answers(url: str) -> bool:
    try:
        return bool(urlopen(url, timeout=2).status == 200)
    except (URLError, OSError):
        return False


def wait_for(condition: Callable[[], bool], seconds: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + seconds
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.3)


def main() -> None:
    options = parser(__doc__, "same_run")
    runs = [*RUNS, "killed", "killed_fsdp2", "server"]
    options.add_argument(
        "--runs",
        nargs="+",
        choices=runs,
        default=runs,
        help="runs to do; results for other runs that the file contains are kept",
    )
    arguments = options.parse_args()
    results: dict[str, Any] = read_result(arguments.out) if arguments.out.exists() else {}
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(len(arguments.runs)) as pool:
        bench = Bench(Path(name))
        futures = {}
        for run in arguments.runs:
            work = getattr(bench, run) if run not in RUNS else lambda run=run: bench.plain(run)
            futures[pool.submit(work)] = run
            time.sleep(3)  # vLLM measures free memory when it starts
        for future in as_completed(futures):
            error = future.exception()
            results[futures[future]] = {"error": repr(error)} if error else future.result()
            write(arguments.out, results)


if __name__ == "__main__":
    main()
