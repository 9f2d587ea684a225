"""A place for untrusted programs: bubblewrap's namespaces where they work, a bare session with limits elsewhere.

=================  ==========================================  ========================================
                   ``bwrap``                                   ``session``
=================  ==========================================  ========================================
files              Python and system libraries, read-only      **everything this user can read or write**
network            none                                        no sockets (system call filter)
other processes    not visible, not reachable                  visible; can't be signalled or traced
starting others    refused (system call filter)                refused (system call filter)
environment        empty                                       empty; **the parent's can be read**
=================  ==========================================  ========================================

In both: limits on processor time, wall time, memory, file size and output.
"""

from __future__ import annotations

import json
import logging
import math
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sparrow.errors import RewardError
from sparrow.rewards.sandbox.child import Child, ChildEndedError, ChildTimeoutError
from sparrow.rewards.sandbox.seccomp import program_filter

Isolation = Literal["auto", "bwrap", "session"]

_INSIDE = Path(__file__).with_name("inside")
_ENVIRONMENT = {"PATH": "/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "PYTHONHASHSEED": "0",
                "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}  # fmt: skip
_START_S = 60.0  # seconds a sandbox may take to start: no program runs yet, and the machine may be busy
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What one program may use."""

    cpu_s: float = 6.0  # processor seconds per test, rounded up to whole seconds
    wall_s: float = 12.0  # seconds per test, sleeping included; a busy machine needs more of these than of ``cpu_s``
    # seconds for all tests of a program, and processor seconds of one that is called, rounded up
    program_s: float = 60.0
    memory_bytes: int = 1 << 30  # address space
    output_bytes: int = 8 << 20  # output, and any file it writes
    files_bytes: int = 64 << 20  # all the files in its private ``/tmp``

    def __post_init__(self) -> None:
        wrong = [f"{name}={value}" for name, value in asdict(self).items() if value <= 0]
        if wrong:
            raise ValueError(f"limits are positive, got {', '.join(wrong)}")


def _bwrap_command(limits: Limits) -> list[str]:
    binary = shutil.which("bwrap") or "bwrap"
    command = [binary, "--unshare-user", "--unshare-all", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    command += ["--uid", "65534", "--gid", "65534", "--hostname", "sandbox"]
    if _bwrap_sizes(binary):
        command += ["--size", str(limits.files_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    else:  # bubblewrap before 0.7 cannot bound a tmpfs: rather none that can be written
        command += ["--dir", "/tmp", "--chdir", "/tmp"]
    # After /tmp is private, since Python itself may lie there.
    folders = {"/usr", sys.prefix, sys.base_prefix, sys.exec_prefix, str(Path(sys.executable).resolve().parents[1])}
    for folder in sorted(folders):
        command += ["--ro-bind", folder, folder]
    for link in ("/bin", "/sbin", "/lib", "/lib64"):
        if os.path.islink(link):
            command += ["--symlink", os.readlink(link), link]
        elif os.path.isdir(link):
            command += ["--ro-bind", link, link]
    command += ["--ro-bind-try", "/etc/ld.so.cache", "/etc/ld.so.cache"]
    command += ["--ro-bind-try", "/etc/alternatives", "/etc/alternatives"]
    command += ["--ro-bind", str(_INSIDE), "/sandbox/inside", "--dev", "/dev", "--remount-ro", "/dev"]
    return [*command, "--remount-ro", "/", "--", *_python("/sandbox")]


def _python(folder: str) -> list[str]:
    """Python running the package ``inside`` of a folder, of which programs then find nothing on their path."""
    start = f"import sys; sys.path.insert(0, {folder!r}); from inside.main import main; del sys.path[0]; main()"
    return [sys.executable, "-s", "-P", "-c", start]


@cache
def _bwrap_sizes(binary: str) -> bool:
    return "--size" in subprocess.run([binary, "--help"], capture_output=True, text=True).stdout


@cache
def _fault(isolation: Literal["bwrap", "session"]) -> str | None:
    """Why programs cannot be held like this here, None if they can; found out by running one."""
    if isolation == "bwrap" and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    try:
        with Sandbox({"mode": "stdio", "prelude": "", "code": "print(6 * 7)"}, Limits(), isolation) as box:
            box.send({"stdin": ""}, time.monotonic() + _START_S)
            reply = box.receive(time.monotonic() + _START_S)
    except (RewardError, ChildTimeoutError, ChildEndedError) as error:
        return str(error)
    return None if reply.get("stdout") == "42\n" else str(reply.get("detail"))


@cache
def _warn(fault: str) -> None:
    _log.warning(
        "GENERATED PROGRAMS RUN WITHOUT A SANDBOX (%s). They have resource limits, no network and no way to start or "
        "signal processes, but they can read and write this user's files and environment. Install bubblewrap where "
        "user namespaces are allowed, or set isolation='bwrap' to refuse to run like this.",
        fault,
    )


def choose_isolation(isolation: Isolation = "auto") -> Literal["bwrap", "session"]:
    """The isolation that will be used: bubblewrap where it works; ``session`` is announced by a warning.

    Raises RewardError: ``bwrap`` is asked for and does not work here. ValueError: no such isolation.
    """
    if isolation not in ("auto", "bwrap", "session"):
        raise ValueError(f"isolation is auto, bwrap or session, got {isolation!r}")
    fault = _fault("bwrap") if isolation != "session" else "isolation='session' was asked for"
    if fault is None:
        return "bwrap"
    if isolation == "bwrap":
        raise RewardError(
            f"generated programs must run in bubblewrap, which does not work here: {fault}; install the package "
            "bubblewrap and allow user namespaces, or set isolation='auto' to accept weaker protection"
        )
    if (worse := _fault("session")) is not None:
        raise RewardError(f"generated programs cannot be held to their limits here: {worse}; use another machine")
    _warn(fault)
    return "session"


class Sandbox(Child):
    """One sandboxed process; leaves nothing behind when closed.

    Args:
        request: what to run, see ``inside.main``.
        limits: what it may use.
        isolation: how it is held, from ``choose_isolation``.

    Raises RewardError: it does not start.
    """

    def __init__(self, request: Mapping[str, Any], limits: Limits, isolation: Literal["bwrap", "session"]) -> None:
        self._report: int | None = None
        with ExitStack() as stack:
            if isolation == "bwrap":
                self._report, writer = os.pipe()
                stack.callback(os.close, self._report)
                command, folder, inherited = _bwrap_command(limits), "/", [writer]
                command[1:1] = ["--json-status-fd", str(writer)]
            else:
                command, inherited = _python(str(_INSIDE.parent)), []
                folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sparrow-", ignore_cleanup_errors=True))
            try:
                super().__init__(command, cwd=folder, env=_ENVIRONMENT, pass_fds=inherited)
            finally:
                for fd in inherited:
                    os.close(fd)
            stack.callback(super().close)
            whole = {"cpu_s": math.ceil(limits.cpu_s), "program_s": math.ceil(limits.program_s)}
            request = {**request, "limits": {**asdict(limits), **whole}, "filter": program_filter()}
            try:
                self.send(request, time.monotonic() + _START_S)
                self.receive(time.monotonic() + _START_S)
            except (ChildTimeoutError, ChildEndedError) as error:
                raise RewardError(
                    f"a sandbox did not start ({isolation}): {error}; try again with fewer workers"
                ) from error
            self._undo = stack.pop_all()

    @property
    def stopped_by_limit(self) -> bool:
        """Whether it ended by itself in the way the limit of processor time ends a process."""
        signals = (signal.SIGXCPU, signal.SIGKILL)
        return self.status in {code for number in signals for code in (-number, 128 + number)}

    def kill(self) -> None:
        """End every process inside, and wait for it."""
        if self.process.returncode is not None:
            return
        if self._report is not None and (first := self._first_process()):
            # Killing the namespace's first process ends all others in it. Killing bubblewrap itself would do so
            # too, but leave that process to be reaped by whoever is process 1 here, possibly nobody.
            with suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(5)
                return
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
        """End every process inside and remove its files."""
        self._undo.close()
