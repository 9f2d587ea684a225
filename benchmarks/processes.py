"""Run vLLM engines on one GPU, each in its own process, so that no two of them measure at once.

Importing vLLM is slow, so each process imports it while earlier engines are still using the GPU.
Starting an engine is slower still. Engines whose memory fits together can start side by side. Once
all of them have started, they measure one after another; the idle engines don't use the GPU. If the
benchmark dies, idle engines end, but one that is measuring goes on until its deadline.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import last_error, read_result

LEAST_S = 25.0
"""With less time left than this, an engine isn't started: it couldn't time even one point."""
GRACE_S = 10.0
"""An engine gets killed if it is still running this long after the deadline. It should stop by
itself after the point that it is timing at the deadline.
"""
POLL_S = 0.1
READY = "SPARROW_BENCHMARK_READY"
"""The environment variable with a file's path. An engine creates the file once it has started."""


def add_together(options: argparse.ArgumentParser, limit: str) -> None:
    """Add the ``--together`` option to a script that measures engines with ``in_turn``.

    Args:
        limit: the option that limits each engine's memory.
    """
    options.add_argument(
        "--together",
        type=int,
        default=1,
        help=f"how many engines start side by side; {limit} must limit their memory",
    )


class EngineProcess:
    """A process that imports vLLM, starts an engine when told to, and measures when told to.

    Args:
        command: the script and its arguments.
        written: the JSON file the process writes its results to.
        log: the file for everything the process prints; deleted if the process succeeds.
    """

    def __init__(
        self, command: Sequence[str], written: Path, log: Path, environment: Mapping[str, str]
    ) -> None:
        self._written = written
        self._log = log
        self._ready = written.with_suffix(".ready")
        self._ready.unlink(missing_ok=True)
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).parent,
                env=dict(environment) | {READY: str(self._ready)},
                text=True,
            )

    def start(self, until: float) -> None:
        """Let the process start its engine, and tell it the deadline ``until``, a ``time.time``
        value.
        """
        self._tell(f"{until}\n")

    def wait_until_ready(self, until: float) -> None:
        """Wait until the engine has started, the process has ended, or the deadline has passed."""
        while not self._ready.exists() and self._process.poll() is None and time.time() < until:
            time.sleep(POLL_S)

    def measure(self, until: float) -> dict[str, Any]:
        """Let the engine measure until the deadline. Return its results and, if it failed, the
        reason.
        """
        code = None
        self._tell("measure\n")
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(max(0.0, until + GRACE_S - time.time()))
        self.end()
        self._ready.unlink(missing_ok=True)

        found: dict[str, Any] = {"points": [], "finished": False}
        if self._written.exists():
            found = read_result(self._written)
        if code == 0:
            self._log.unlink(missing_ok=True)
        else:
            found["failed"] = (
                "killed at the deadline" if code is None else last_error(self._log, code)
            )
        return found

    def end(self) -> None:
        """Kill the process if it is still running."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(line)
            self._process.stdin.flush()


def told_to_start() -> float:
    """In an engine's process, import vLLM, wait for the signal to start the engine, and return the
    deadline. A process started by hand with empty input starts its engine without a deadline.
    """
    import rollout  # noqa: F401  imports vLLM while another engine runs

    return float(_signal() or "inf")


def wait_for_turn() -> None:
    """In an engine's process, report that the engine has started, and wait for the signal to
    measure. A process started by hand doesn't wait.
    """
    if READY in os.environ:
        Path(os.environ[READY]).touch()
        _signal()


def _signal() -> str:
    """Wait for a line of input. If the benchmark that started this process has died, there is none;
    exit then, because other programs may already be using the GPU.
    """
    line = sys.stdin.readline()
    if not line and READY in os.environ:
        sys.exit("this engine's benchmark died before the engine's turn, so it will not measure")
    return line


def in_turn(
    names: Sequence[str],
    start: Callable[[str], EngineProcess],
    until: float,
    together: int = 1,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure engines one after another while time is left, and yield each one's results.

    Args:
        start: starts an engine's process.
        until: the deadline, a ``time.time`` value.
        together: how many engines start side by side.
    """
    groups = [names[i : i + together] for i in range(0, len(names), together)]
    following = [start(name) for name in groups[0]]
    for i, group in enumerate(groups):
        processes = following
        for process in processes:
            process.start(until)
        following = [start(name) for name in groups[i + 1]] if i + 1 < len(groups) else []

        for process in processes:
            process.wait_until_ready(until)
        for name, process in zip(group, processes, strict=True):
            found = process.measure(until)
            failed = f", {found['failed']}" if "failed" in found else ""
            left = until - time.time()
            print(f"{left:6.1f} s left  {name}: {len(found['points'])} points{failed}", flush=True)
            yield name, found

        if following and until - time.time() < LEAST_S:
            for process in following:
                process.end()
            skipped = [name for later in groups[i + 1 :] for name in later]
            print(f"no time left for {', '.join(skipped)}")
            return
