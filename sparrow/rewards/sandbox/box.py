"""Start a sandboxed process, and choose how to confine it on this machine."""

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

# seconds to wait for a sandbox to start; generous, in case the machine is busy
_START_S = 60.0
# attempts at starting a sandbox, in case the machine is briefly out of processes or memory
_STARTS = 4
_log = logging.getLogger(__name__)

_INSTALL = (
    "install bubblewrap (apt install bubblewrap, dnf install bubblewrap) "
    "on a system that allows user namespaces"
)


@cache
def _fault(wall: Wall) -> str | None:
    """Run a test program to see whether ``wall`` works on this machine. Return what's wrong, or
    None if it works.
    """
    if wall.held == "bwrap" and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    if wall.held == "session" and (version := landlock_version()) < LANDLOCK_NEEDED:
        return (
            f"this kernel has version {version} of Landlock, but Sparrow needs version "
            f"{LANDLOCK_NEEDED} (Linux 6.2) or later"
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
    """Return the wall for the isolation ``held``. Each sandbox gets a separate user id if this
    machine allows it.
    """
    if held == "bwrap" and os.geteuid() == 0 and _fault(Wall("bwrap", own_user=True)) is None:
        return Wall("bwrap", own_user=True)
    return Wall(held)


@cache
def _announce(held: Held) -> None:
    """Log how programs are confined and how each limit is enforced."""
    wall = _wall(held)
    grouped = cgroup.parent() is not None
    if grouped or wall.counted_by_kernel:
        tasks = "counted by the kernel"
    elif held != "bwrap":
        tasks = "counted by a watcher"
    else:
        tasks = "unlimited"
    file_system = "a separate file system, " if held == "bwrap" else ""
    group = "each in its own" if grouped else "none can be created here"
    bounds = (
        f"tasks ({tasks}); processor time, memory and file size (resource limits); files "
        f"({file_system}counted by a watcher); replies (size and shape); control groups ({group})"
    )
    if held == "none":
        _log.warning(
            "GENERATED PROGRAMS RUN WITHOUT ISOLATION, because isolation is 'none': they can read "
            "and write this user's files and read this process's memory and environment. Their limits: %s",
            bounds,
        )
    else:
        _log.info(
            "generated programs are confined by %s. Their limits: %s",
            {"bwrap": "bubblewrap"}.get(held, "Landlock"),
            bounds,
        )


def choose_isolation(isolation: Isolation = "auto") -> Held:
    """Check that the requested isolation works on this machine, and return its name. ``auto`` means
    bubblewrap. The first call for each isolation logs how programs are confined and limited.

    Raises RewardError if the isolation does not work here. Raises ValueError if there is no such
    isolation.
    """
    if isolation not in ("auto", "bwrap", "session", "none"):
        raise ValueError(f"isolation must be auto, bwrap, session or none, got {isolation!r}")
    held: Held = "bwrap" if isolation == "auto" else isolation
    if (fault := _fault(_wall(held))) is None:
        _announce(held)
        return held
    if held == "bwrap":
        raise RewardError(
            f"generated programs must run in bubblewrap, which does not work here: {fault}; "
            f"{_INSTALL}, or choose isolation='session' (Landlock, weaker) or isolation='none' "
            "(no protection)"
        )
    if held == "session":
        raise RewardError(f"Landlock cannot confine generated programs here: {fault}; {_INSTALL}")
    raise RewardError(
        f"the limits on generated programs cannot be enforced here: {fault}; use another machine"
    )


class Sandbox(Child):
    """A sandboxed process that leaves nothing behind once it's closed.

    Args:
        request: what to run; see ``inside.main``.
        limits: the process's resource limits.
        isolation: how the process is confined; see ``choose_isolation``.
        starts: number of attempts to start the process.

    Raises RewardError if the process does not start.
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
        """Whether the kernel ended the process at its CPU time limit. False after ``kill``."""
        signals = (signal.SIGXCPU, signal.SIGKILL)
        return self.status in {code for number in signals for code in (-number, 128 + number)}

    def kill(self) -> None:
        """Kill every process in the sandbox and wait for them to exit."""
        if self.process.returncode is not None:
            return
        if self._report is not None and (first := self._first_process()):
            # Killing the namespace's first process takes all the others down with it. Killing
            # bubblewrap would do the same, but it would leave the first process for the machine's
            # or container's init to reap, which might never happen.
            with suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
                return
        # The process group outlives its leader. The group's id is not reused until the leader is
        # reaped.
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def _first_process(self) -> int | None:
        """Return the id of the namespace's first process, or None if there is none or it has been
        reaped.
        """
        assert self._report is not None
        poll = select.poll()
        poll.register(self._report, select.POLLIN)
        lines = os.read(self._report, 65536).splitlines() if poll.poll(5000) else []
        said = [json.loads(line) for line in lines]
        return None if not said or "exit-code" in said[-1] else said[0].get("child-pid")

    def close(self) -> None:
        """Kill every process in the sandbox and remove its files. Best effort: failures are only
        logged, so that they don't stop a run.
        """
        try:
            self._undo.close()
        except (OSError, ValueError) as error:
            _log.warning("a sandbox was not cleaned up: %s", error)
