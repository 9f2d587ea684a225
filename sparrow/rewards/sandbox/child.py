"""A process that is sent objects and answers with objects, a line of JSON each, and is not waited for without end."""

from __future__ import annotations

import json
import os
import select
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, Self

MOST_BYTES = 64 << 20  # longest answer, unless a caller takes less


class ChildTimeoutError(Exception):
    """No answer in time."""


class ChildEndedError(Exception):
    """The process ended, or sent something that is no answer."""


class Child:
    """A process and its pipes, in a session of its own: an interrupt typed at the trainer is not for it.

    Args:
        command, options: of ``subprocess.Popen``.
    """

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0, start_new_session=True, **options
        )
        self.status: int | None = None
        self._input, self._output, self._errors = (
            end.fileno() for end in (self.process.stdin, self.process.stdout, self.process.stderr) if end
        )
        os.set_blocking(self._input, False)
        self._unread = b""
        self._parts: list[bytes] = []  # of an answer that has come in part

    def send(self, message: Mapping[str, Any], deadline: float) -> None:
        """Hand an object over.

        Raises ChildTimeoutError: not taken by the deadline (of ``time.monotonic``). ChildEndedError: nobody takes it
        any more.
        """
        rest = memoryview(json.dumps(message).encode() + b"\n")
        while rest:
            self._await(self._input, select.POLLOUT, deadline)
            try:
                rest = rest[os.write(self._input, rest) :]
            except BrokenPipeError as error:
                raise self._ended() from error

    def receive(self, deadline: float, most: int = MOST_BYTES) -> dict[str, Any]:
        """The next answer. It may come from a hostile program: only its form is checked.

        Raises ChildTimeoutError: none by the deadline. ChildEndedError: the process ended, or sent no such thing.
        """
        parts = self._parts
        newline = b""
        while not newline:
            if not self._unread:
                self._await(self._output, select.POLLIN, deadline)
                self._unread = os.read(self._output, 1 << 20)
                if not self._unread:
                    raise self._ended()
            part, newline, self._unread = self._unread.partition(b"\n")
            parts.append(part)
            if sum(map(len, parts)) > most:
                raise ChildEndedError(f"a reply is over the limit of {most} bytes")
        self._parts = []
        try:
            found = json.loads(b"".join(parts))
        except (ValueError, RecursionError) as error:
            raise ChildEndedError("the reply is not JSON") from error
        if not isinstance(found, dict):
            raise ChildEndedError("the reply is not an object")
        return found

    def _await(self, fd: int, event: int, deadline: float) -> None:
        poll = select.poll()
        poll.register(fd, event)
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise ChildTimeoutError("no reply in time")

    def _ended(self) -> ChildEndedError:
        with suppress(subprocess.TimeoutExpired):  # perhaps it only closed its pipes
            self.status = self.process.wait(1)
        self.kill()
        os.set_blocking(self._errors, False)
        try:
            said = os.read(self._errors, 1 << 16).decode(errors="replace").strip().splitlines()
        except BlockingIOError:
            said = []
        return ChildEndedError(said[-1] if said else f"ended with status {self.status}")

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
