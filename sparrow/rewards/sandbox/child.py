"""A child process that takes and returns objects as lines of JSON. Every wait for the child has a
time limit.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from sparrow.rewards.sandbox import processes
from sparrow.rewards.sandbox.inside.clock import OwnTime
from sparrow.rewards.sandbox.inside.wire import parse

MOST_BYTES = 64 << 20  # default maximum reply size
_LOOK_S = 0.25  # seconds between checks of a process that does not reply
_ENDING_S = 1.0  # seconds a process gets to exit after closing its pipes


T = TypeVar("T")


def _queued_here() -> float:
    """Return how many seconds this thread has waited for a CPU. Return 0 if the kernel doesn't
    report waiting times.
    """
    try:
        with open("/proc/thread-self/schedstat", "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError):
        return 0.0


class ChildTimeoutError(Exception):
    """Raised if no reply arrives in time."""


class ChildEndedError(Exception):
    """Raised if a process ends, or sends something other than a reply."""


class Child:
    """A process and its pipes. The process gets its own session, so that Ctrl-C in the trainer's
    terminal doesn't reach it.

    Args:
        command: the command to run.
        options: further arguments for ``subprocess.Popen``.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            bufsize=0,
            start_new_session=True,
            **options,
        )
        self.status: int | None = None
        self._input, self._output, self._errors = (
            end.fileno()
            for end in (self.process.stdin, self.process.stdout, self.process.stderr)
            if end
        )
        os.set_blocking(self._input, False)
        self._unread = bytearray()
        self._unsent = memoryview(b"")
        # Results of the last check of the child's processes: their CPU time, each thread's wait for
        # a CPU, and this thread's own wait for a CPU. The last field is the time since that check.
        self._seen: float | None = None
        self._queued: dict[int, float] = {}
        self._queued_here_s = 0.0
        self._uncounted_s = 0.0

    def send(self, message: Mapping[str, Any], deadline: float) -> None:
        """Send an object.

        Raises ChildTimeoutError if the process hasn't read the object by ``deadline`` (a
        ``time.monotonic()`` value), or ChildEndedError if it has stopped reading.
        """
        self._unsent = memoryview(json.dumps(message).encode() + b"\n")
        self._send_rest(deadline)

    def _send_rest(self, deadline: float) -> None:
        while self._unsent:
            self._await(self._input, select.POLLOUT, deadline)
            try:
                self._unsent = self._unsent[os.write(self._input, self._unsent) :]
            except BrokenPipeError as error:
                raise self._ended() from error

    def send_within(self, message: Mapping[str, Any], time_limit: OwnTime) -> None:
        """Send an object to a program. The program's own time counts against ``time_limit`` while
        it reads the object.

        Raises the same errors as ``receive_within``.
        """
        self._unsent = memoryview(json.dumps(message).encode() + b"\n")
        self._within(time_limit, self._send_rest)

    def receive(self, deadline: float, most: int = MOST_BYTES) -> dict[str, Any]:
        """Read the next reply.

        The reply may come from a hostile program. We only check that it is well-formed and cheap to
        read.

        Raises ChildTimeoutError if there is no reply by ``deadline``, or ChildEndedError if the
        process ended or sent something else.
        """
        searched = 0
        while (end := self._unread.find(b"\n", searched)) < 0 and len(self._unread) <= most:
            searched = len(self._unread)
            self._read(deadline)
        if end < 0 or end > most:
            raise ChildEndedError(f"a reply is over the limit of {most} bytes")
        line = bytes(memoryview(self._unread)[:end])
        del self._unread[: end + 1]
        try:
            return parse(line)
        except (ValueError, RecursionError) as error:
            raise ChildEndedError(f"the reply cannot be read: {error}") from error

    def receive_within(self, time_limit: OwnTime, most: int = MOST_BYTES) -> dict[str, Any]:
        """Read a program's next reply. While we wait, the program's own time counts against
        ``time_limit``.

        Raises ChildTimeoutError if the program runs out of time, or ChildEndedError as in
        ``receive``.
        """
        return self._within(time_limit, lambda deadline: self.receive(deadline, most))

    def _within(self, time_limit: OwnTime, attempt: Callable[[float], T]) -> T:
        """Call ``attempt`` with short deadlines until it succeeds, and return its result. Raises
        ChildTimeoutError if the program runs out of time first.
        """
        if self._seen is None and not self._uncounted_s:
            self._queued_here_s = _queued_here()
        while True:
            began = time.monotonic()
            look_s = _LOOK_S if self._seen is not None else _LOOK_S / 5
            late = False
            try:
                return attempt(began + min(look_s, time_limit.left_s))
            except ChildTimeoutError:
                late = True
                self._count(began, time_limit, late)
                if time_limit.over:
                    raise
            finally:
                if not late:
                    self._count(began, time_limit, late)

    def _count(self, began: float, time_limit: OwnTime, late: bool) -> None:
        """Count the time since ``began``.

        At first, all of this time counts as the program's own. Once enough time has accumulated, we
        check how long the processes waited for a CPU, and correct the count.
        """
        waited_s = time.monotonic() - began
        time_limit.spent_s += waited_s
        self._uncounted_s += waited_s
        if not late and (self._uncounted_s < _LOOK_S or self.process.returncode is not None):
            return
        family = processes.family(self.process.pid)
        used_s = sum(process.processor_s for process in family)
        ran_s = self._uncounted_s if self._seen is None else used_s - self._seen
        queued_s = self._queued_since(family)
        if queued_s is not None:
            ran_s = used_s - (self._seen or 0.0)
        time_limit.spent_s -= self._uncounted_s
        runnable = any(process.state == "R" for process in family)
        time_limit.count(self._uncounted_s, ran_s, runnable, queued_s)
        self._seen = used_s
        self._uncounted_s = 0.0

    def _queued_since(self, family: Sequence[processes.Process]) -> float | None:
        """Return how many seconds have been spent waiting for a CPU since the last check. This
        includes waits by the processes and by this thread, which reads their replies. Return None
        if the kernel doesn't report waiting times.

        Of the processes' threads, only the one that waited longest counts. Otherwise, a program
        could gain time by starting lots of threads.
        """
        now: dict[int, float] = {}
        for process in family:
            if process.queued_s is None:
                return None
            now |= process.queued_s
        longest = max((wait - self._queued.get(tid, 0.0) for tid, wait in now.items()), default=0.0)
        here_s = _queued_here()
        before_s = self._queued_here_s
        self._queued = now
        self._queued_here_s = here_s
        return max(0.0, longest) + max(0.0, here_s - before_s)

    def receive_bytes(self, count: int, deadline: float) -> bytes:
        """Read the next ``count`` bytes. Raises the same errors as ``receive``."""
        while len(self._unread) < count:
            self._read(deadline)
        data = bytes(memoryview(self._unread)[:count])
        del self._unread[:count]
        return data

    def skip(self, count: int, deadline: float) -> None:
        """Discard the next ``count`` bytes. Raises the same errors as ``receive``."""
        while (left := count - len(self._unread)) > 0:
            self._unread.clear()
            self._read(deadline)
            count = left
        del self._unread[:count]

    def _read(self, deadline: float) -> None:
        self._await(self._output, select.POLLIN, deadline)
        data = os.read(self._output, 1 << 16)  # 64 KiB is a pipe's capacity
        if not data:
            raise self._ended()
        self._unread += data

    def _await(self, fd: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise ChildTimeoutError("no reply in time")

    def _ended(self) -> ChildEndedError:
        by_itself = self._ends_by_itself()  # it may still be running with its pipes closed
        self.kill()
        self.status = self.process.returncode if by_itself else None
        os.set_blocking(self._errors, False)
        try:
            said = os.read(self._errors, 1 << 16).decode(errors="replace").strip().splitlines()
        except BlockingIOError:
            said = []
        return ChildEndedError(said[-1] if said else f"ended with status {self.status}")

    def _ends_by_itself(self) -> bool:
        """Give the process a moment to exit, and return whether it did.

        The process isn't reaped, so that its id can't be reused before its group is killed.
        """
        deadline = time.monotonic() + _ENDING_S
        options = os.WEXITED | os.WNOWAIT | os.WNOHANG
        try:
            while os.waitid(os.P_PID, self.process.pid, options) is None:
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.002)
        except ChildProcessError:
            # The kernel reaps this process's children automatically, or the child has already been
            # reaped.
            pass
        return True

    def kill(self) -> None:
        """Kill the process and wait for it to exit."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """Kill the process and close its pipes."""
        with self.process:  # closes its pipes
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
