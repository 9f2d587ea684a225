"""Run vLLM engines one after another, each in its own process.

Importing vLLM is slow, so each process imports it while the previous engine is still using the GPU,
and then waits for its turn.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from common import last_error

LEAST_S = 25.0
"""Don't start an engine with less time left than this, since it couldn't time even one point."""
GRACE_S = 10.0
"""At the deadline, an engine should stop after the current point. If it is still running this much
later, it gets killed.
"""


class EngineProcess:
    """A process that imports vLLM, and then waits for the signal to start its engine.

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
        with self._log.open("w") as output:
            self._process = subprocess.Popen(
                [sys.executable, *command],
                stdin=subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=Path(__file__).parent,
                env=dict(environment),
                text=True,
            )

    def measure(self, until: float) -> dict[str, Any]:
        """Let the engine time its points until the deadline ``until``, a ``time.time`` value.
        Return its results and, if it failed, the reason.
        """
        code = None
        with suppress(BrokenPipeError):
            assert self._process.stdin is not None
            self._process.stdin.write(f"{until}\n")
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(max(0.0, until + GRACE_S - time.time()))
        self.end()

        found: dict[str, Any] = {"points": [], "finished": False}
        if self._written.exists():
            found = json.loads(self._written.read_text())
        if code == 0:
            self._log.unlink()
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


def told_to_start() -> float:
    """In an engine's process, import vLLM, wait for the start signal, and return the deadline."""
    import rollout  # noqa: F401  imports vLLM while another engine runs

    return float(sys.stdin.readline() or "inf")


def in_turn(
    names: Sequence[str], start: Callable[[str], EngineProcess], until: float
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Measure engines one after another while time is left, and yield each one's results.

    Args:
        start: starts an engine's process.
        until: the deadline, a ``time.time`` value.
    """
    waiting = list(names)
    name = waiting.pop(0)
    process = start(name)
    while True:
        following = start(waiting[0]) if waiting else None
        found = process.measure(until)
        failed = f", {found['failed']}" if "failed" in found else ""
        left = until - time.time()
        print(f"{left:6.1f} s left  {name}: {len(found['points'])} points{failed}", flush=True)
        yield name, found
        if following is None:
            return
        if until - time.time() < LEAST_S:
            following.end()
            print(f"no time left for {', '.join(waiting)}")
            return
        name = waiting.pop(0)
        process = following
