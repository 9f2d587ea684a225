"""A sandboxed process, and the choice of how to confine it on this machine."""

from __future__ import annotations

import json
import logging
import math
import os
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict
from functools import cache
from typing import Any, Literal

from sparrow.errors import RewardError
from sparrow.rewards.sandbox import cgroup, files
from sparrow.rewards.sandbox.child import Child, ChildEndedError, ChildTimeoutError
from sparrow.rewards.sandbox.inside.confine import LANDLOCK_NEEDED, landlock_version
from sparrow.rewards.sandbox.limits import Limits
from sparrow.rewards.sandbox.seccomp import packed_filter
from sparrow.rewards.sandbox.walls import ENVIRONMENT, Held, Wall

Isolation = Literal["auto", "bwrap", "session", "none"]

# seconds that a sandbox may take to start; generous, because the machine may be busy
_START_S = 60.0
_STARTS = 4  # number of attempts to start: processes or memory may be used up for a moment
_log = logging.getLogger(__name__)

_INSTALL = (
    "install the package bubblewrap (apt install bubblewrap, dnf install bubblewrap) "
    "where user namespaces are allowed"
)


@cache
def _fault(wall: Wall) -> str | None:
    """Why programs cannot be confined by ``wall`` on this machine, None if they can; found out by
    running a program.
    """
    if wall.held == "bwrap" and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    if wall.held == "session" and (version := landlock_version()) < LANDLOCK_NEEDED:
        return (
            f"this kernel's Landlock is of version {version}, "
            f"and {LANDLOCK_NEEDED} is needed (Linux 6.2)"
        )
    program = (
        "import threading\nthread = threading.Thread(target=print, args=(6 * "
        "7,))\nthread.start(); thread.join()"
    )
    try:
        with Sandbox(
            {"mode": "stdio", "prelude": "", "code": program}, Limits(), wall, starts=1
        ) as box:
            box.send({"stdin": ""}, time.monotonic() + _START_S)
            reply = box.receive(time.monotonic() + _START_S)
            said = box.receive_bytes(reply.get("stdout_bytes", 0), time.monotonic() + _START_S)
    except (RewardError, ChildTimeoutError, ChildEndedError) as error:
        return str(error)
    return None if said == b"42\n" else str(reply.get("detail"))


@cache
def _wall(held: Held) -> Wall:
    """The wall of this kind to use on this machine: the one that gives each sandbox its own user id
    if that works here, otherwise the plain one.
    """
    if held == "bwrap" and os.geteuid() == 0 and _fault(Wall("bwrap", own_user=True)) is None:
        return Wall("bwrap", own_user=True)
    return Wall(held)


@cache
def _announce(held: Held) -> None:
    """Log what confines programs, and what limits them."""
    wall = _wall(held)
    grouped = cgroup.parent() is not None
    if grouped or wall.counted_by_kernel:
        tasks = "by the kernel"
    elif held != "bwrap":
        tasks = "by counting"
    else:
        tasks = "not at all"
    file_system = "a file system of their own and " if held == "bwrap" else ""
    group = (
        "and all of it by a control group of its own"
        if grouped
        else "no control group can be made here"
    )
    bounds = (
        f"tasks are bounded {tasks}, processor time, memory and the size of a file by resource "
        f"limits, files by {file_system}counting, replies by their size and shape, {group}"
    )
    if held == "none":
        _log.warning(
            "GENERATED PROGRAMS RUN WITHOUT ISOLATION, as isolation='none' asks: they can read "
            "and write this user's files and read this process's memory and environment; %s",
            bounds,
        )
    else:
        _log.info(
            "generated programs are confined by %s: %s",
            {"bwrap": "bubblewrap"}.get(held, "Landlock"),
            bounds,
        )


def choose_isolation(isolation: Isolation = "auto") -> Held:
    """The isolation that will be used, once it is found to work; ``auto`` is bubblewrap. Its bounds
    are logged once.

    Raises RewardError: it does not work here. ValueError: no such isolation.
    """
    if isolation not in ("auto", "bwrap", "session", "none"):
        raise ValueError(f"isolation is auto, bwrap, session or none, got {isolation!r}")
    held: Held = "bwrap" if isolation == "auto" else isolation
    if (fault := _fault(_wall(held))) is None:
        _announce(held)
        return held
    if held == "bwrap":
        raise RewardError(
            f"generated programs must run in bubblewrap, which does not work here: {fault}; "
            f"{_INSTALL}, or choose isolation='session' (Landlock, weaker) or isolation='none' "
            "(nothing is kept from them)"
        )
    if held == "session":
        raise RewardError(
            f"generated programs cannot be confined by Landlock here: {fault}; {_INSTALL}"
        )
    raise RewardError(
        f"generated programs cannot be held to their limits here: {fault}; use another machine"
    )


class Sandbox(Child):
    """One sandboxed process; leaves nothing behind when closed.

    Args:
        request: what to run, see ``inside.main``.
        limits: what it may use.
        isolation: how it is confined, from ``choose_isolation``.
        starts: how many times starting it is tried.

    Raises RewardError: it does not start.
    """

    def __init__(
        self,
        request: Mapping[str, Any],
        limits: Limits,
        isolation: Held | Wall,
        starts: int = _STARTS,
    ) -> None:
        self._wall = isolation if isinstance(isolation, Wall) else _wall(isolation)
        for left in reversed(range(starts)):
            try:
                return self._start(request, limits)
            except (OSError, ChildTimeoutError, ChildEndedError) as error:
                if not left:
                    raise RewardError(
                        f"a sandbox did not start ({self._wall.held}): "
                        f"{error}; try again with fewer workers"
                    ) from error
                _log.info("a sandbox did not start (%s), trying again", error)
                time.sleep(2.0 ** (starts - left - 3))

    def _start(self, request: Mapping[str, Any], limits: Limits) -> None:
        self._report: int | None = None
        with ExitStack() as stack:
            command = self._wall.command(limits)
            folder = "/"
            inherited = []
            environment = dict(ENVIRONMENT)
            if self._wall.held == "bwrap":
                self._report, writer = os.pipe()
                inherited = [writer]
                stack.callback(os.close, self._report)
                command[1:1] = ["--json-status-fd", str(writer)]
            else:
                folder = tempfile.mkdtemp(prefix="sparrow-")
                stack.callback(files.remove, folder)
                environment.update(HOME=folder, TMPDIR=folder)

            if (group := cgroup.parent()) is not None:
                own = cgroup.make(group, limits)
                stack.callback(cgroup.remove, own)
                command = cgroup.enter(own, command)
            try:
                super().__init__(command, cwd=folder, env=environment, pass_fds=inherited)
            finally:
                for fd in inherited:
                    os.close(fd)
            stack.callback(super().close)

            whole = {"cpu_s": math.ceil(limits.cpu_s), "program_s": math.ceil(limits.program_s)}
            request = {
                **request,
                **self._wall.request(folder),
                "limits": {**asdict(limits), **whole},
            }
            self.send({**request, "filter": packed_filter()}, time.monotonic() + _START_S)
            self.receive(time.monotonic() + _START_S)
            self._undo = stack.pop_all()

    @property
    def stopped_by_limit(self) -> bool:
        """True if the process ended by itself, and by a signal with which the limit on processor
        time ends a process.
        """
        signals = (signal.SIGXCPU, signal.SIGKILL)
        return self.status in {code for number in signals for code in (-number, 128 + number)}

    def kill(self) -> None:
        """End every process inside, and wait for it."""
        if self.process.returncode is not None:
            return
        if self._report is not None and (first := self._first_process()):
            # Killing the namespace's first process ends all others in it. Killing bubblewrap itself
            # would too, but would leave the first process for process 1 of this machine or
            # container to reap, which might never happen.
            with suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
                return
        # The process group outlives its leader, and its number is not reused before the leader has
        # been waited for.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _first_process(self) -> int | None:
        """Process 1 of the namespace, None if there is none or it was reaped."""
        assert self._report is not None
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        lines = os.read(self._report, 65536).splitlines() if poll.poll(5000) else []
        said = [json.loads(line) for line in lines]
        return None if not said or "exit-code" in said[-1] else said[0].get("child-pid")

    def close(self) -> None:
        """End every process inside and remove its files. A failure is logged: it is no reason to
        stop a run.
        """
        try:
            self._undo.close()
        except (OSError, ValueError) as error:
            _log.warning("a sandbox was not cleaned up: %s", error)
