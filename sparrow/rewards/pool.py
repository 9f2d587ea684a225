"""Worker processes that answer one small request at a time and are killed when they take too long.

A worker is a script run by path in a fresh interpreter, so it never imports torch, never runs the caller's
``__main__`` again (which ``multiprocessing`` with spawn would do), and shares nothing with a CUDA context.
It reads one JSON value per line from standard input and writes one JSON value per line to standard output.
"""

from __future__ import annotations

import json
import os
import queue
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from sparrow.errors import RewardError

START_LIMIT_S = 120.0
"""Seconds a worker may take to import its libraries: generous, because a busy machine is slow at that."""


class WorkerLostError(Exception):
    """The worker was killed at the time limit, or died, before it replied."""


class _Worker:
    def __init__(self, script: Path, limit_s: float) -> None:
        # -P: the script's folder must not be searched for modules, where math.py would hide the standard one.
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(script), str(limit_s)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,  # an interrupt typed at the trainer is not for the workers
        )
        self.asked = 0
        try:
            self._read(START_LIMIT_S)
        except WorkerLostError as error:
            said = self.kill().decode(errors="replace").strip().splitlines() or [str(error)]
            raise RewardError(f"the worker {script.name} did not start: {said[-1]}; install what is missing") from error

    def _read(self, limit_s: float) -> Any:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        deadline = time.monotonic() + limit_s
        reply = b""
        while not reply.endswith(b"\n"):
            if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
                raise WorkerLostError(f"no reply within {limit_s:g} s")
            if not (chunk := os.read(fd, 65536)):
                raise WorkerLostError("the worker died")
            reply += chunk
        return json.loads(reply)

    def ask(self, request: Any, limit_s: float) -> Any:
        assert self.process.stdin is not None
        self.asked += 1
        try:
            self.process.stdin.write(json.dumps(request).encode() + b"\n")
        except BrokenPipeError as error:
            raise WorkerLostError("the worker died") from error
        return self._read(limit_s)

    def kill(self) -> bytes:
        """End it; returns what it wrote to standard error."""
        self.process.kill()
        return self.process.communicate()[1]


class WorkerPool:
    """Up to ``size`` workers, started when first needed; threads that find none free wait for one.

    Attributes:
        size: workers at most.
        limit_s: seconds a request may take, after which its worker is killed and later replaced.
        lost: requests whose worker was killed or died.

    Args:
        script: the worker, run as ``python script limit_s``. It writes a line when it is ready and should end
            itself somewhat after ``limit_s``, in case the process that would kill it is gone.
        recycle: requests after which a worker is replaced, so that no library's caches grow without end.

    A request must encode to less than a pipe's buffer (64 KiB), so that handing it over cannot block.
    """

    def __init__(self, script: Path, size: int, limit_s: float, recycle: int = 5000) -> None:
        if size < 1 or limit_s <= 0:
            raise ValueError(f"a pool needs size >= 1 and limit_s > 0, got size={size}, limit_s={limit_s}")
        self.size, self.limit_s, self.lost = size, limit_s, 0
        self._script, self._recycle = script, recycle
        self._pid = os.getpid()
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(size):
            self._slots.put(None)

    def ask(self, request: Any) -> Any:
        """The worker's reply to ``request``, both JSON values.

        Raises:
            WorkerLostError: no reply within ``limit_s``, or the worker died.
            RewardError: a worker cannot be started.
        """
        worker = self._slots.get()
        try:
            worker = worker or _Worker(self._script, self.limit_s)
            reply = worker.ask(request, self.limit_s)
            if worker.asked >= self._recycle:
                worker.kill()
                worker = None
            return reply
        except BaseException as error:
            # Also for an interrupt: a late reply must not be read as the answer to the next request.
            if worker is not None:
                worker.kill()
                worker = None
            self.lost += isinstance(error, WorkerLostError)
            raise
        finally:
            self._slots.put(worker)

    def close(self) -> None:
        """Kill the idle workers; a later request starts new ones. Does nothing in a forked copy of the pool."""
        if os.getpid() != self._pid:
            return
        for _ in range(self._slots.qsize()):
            worker = self._slots.get()
            if worker is not None:
                worker.kill()
            self._slots.put(None)

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
