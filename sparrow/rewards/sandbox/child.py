"""A process that is sent objects and answers with objects, one line of JSON each; every wait for it
has a limit.
"""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from sparrow.rewards.sandbox import processes
from sparrow.rewards.sandbox.inside.clock import OwnTime
from sparrow.rewards.sandbox.inside.wire import parse

MOST_BYTES = 64 << 20  # longest answer, unless a caller takes less
_LOOK_S = 0.25  # seconds between two looks at a process that does not answer
_ENDING_S = 1.0  # seconds that a process may take to end after it has closed its pipes


class ChildTimeoutError(Exception):
    """No answer in time."""


class ChildEndedError(Exception):
    """The process ended, or sent something that is no answer."""


class Child:
    """A process and its pipes, in a session of its own: an interrupt typed at the trainer does not
    reach it.

    Args:
        command, options: of ``subprocess.Popen``.
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

    def send(self, message: Mapping[str, Any], deadline: float) -> None:
        """Hand an object over.

        Raises ChildTimeoutError: not taken by the deadline (of ``time.monotonic``).
        ChildEndedError: nobody takes it any more.
        """
        rest = memoryview(json.dumps(message).encode() + b"\n")
        while rest:
            self._await(self._input, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(self._input, rest) :]
            except BrokenPipeError as error:
                raise self._ended() from error

    def receive(self, deadline: float, most: int = MOST_BYTES) -> dict[str, Any]:
        """The next answer. It may come from a hostile program: only its form is checked, and that
        it is cheap to read.

        Raises ChildTimeoutError: none by the deadline. ChildEndedError: the process ended, or sent
        something else.
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
        """The next answer of a program, whose own time is counted against ``time_limit`` while it
        is awaited.

        Raises ChildTimeoutError: it has none left. ChildEndedError: as ``receive``.
        """
        seen: float | None = None
        while True:
            began = time.monotonic()
            look_s = _LOOK_S if seen is not None else _LOOK_S / 5
            try:
                reply = self.receive(began + min(look_s, time_limit.left_s), most)
            except ChildEndedError:
                time_limit.spent_s += time.monotonic() - began
                raise
            except ChildTimeoutError:
                waited_s, family = time.monotonic() - began, processes.family(self.process.pid)
                used_s = sum(process.processor_s for process in family)
                ran_s = waited_s if seen is None else used_s - seen
                time_limit.count(waited_s, ran_s, any(process.state == "R" for process in family))
                if time_limit.over:
                    raise
                seen = used_s
            else:
                time_limit.spent_s += time.monotonic() - began
                return reply

    def receive_bytes(self, count: int, deadline: float) -> bytes:
        """The next ``count`` bytes. Raises as ``receive`` does."""
        while len(self._unread) < count:
            self._read(deadline)
        data = bytes(memoryview(self._unread)[:count])
        del self._unread[:count]
        return data

    def skip(self, count: int, deadline: float) -> None:
        """Discard the next ``count`` bytes. Raises as ``receive`` does."""
        while (left := count - len(self._unread)) > 0:
            self._unread.clear()
            self._read(deadline)
            count = left
        del self._unread[:count]

    def _read(self, deadline: float) -> None:
        self._await(self._output, select.POLLIN, deadline)
        data = os.read(self._output, 1 << 16)  # what a pipe holds
        if not data:
            raise self._ended()
        self._unread += data

    def _await(self, fd: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise ChildTimeoutError("no reply in time")

    def _ended(self) -> ChildEndedError:
        by_itself = self._ends_by_itself()  # perhaps it only closed its pipes
        self.kill()
        self.status = self.process.returncode if by_itself else None
        os.set_blocking(self._errors, False)
        try:
            said = os.read(self._errors, 1 << 16).decode(errors="replace").strip().splitlines()
        except BlockingIOError:
            said = []
        return ChildEndedError(said[-1] if said else f"ended with status {self.status}")

    def _ends_by_itself(self) -> bool:
        """Whether it ends within a moment. It is not reaped: its number must stay its own until its
        group is killed.
        """
        deadline = time.monotonic() + _ENDING_S
        try:
            while (
                os.waitid(os.P_PID, self.process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is None
            ):
                if time.monotonic() > deadline:
                    return False
                time.sleep(0.002)
        except (
            ChildProcessError
        ):  # this process lets the kernel reap its children, or it was reaped before
            pass
        return True

    def kill(self) -> None:
        """End the process, and wait for it."""
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        """End the process and leave nothing behind."""
        with self.process:  # closes its pipes
            self.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
