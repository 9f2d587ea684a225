"""The two modes that run the program being judged. One mode runs the program once per test, on the
test's standard input. The other mode loads the program once and then calls its functions.

This process never sees the expected outputs. A program that takes over this process gains nothing,
because it can still report only what it computed.
"""

from __future__ import annotations

import builtins
import io
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from .clock import OwnTime
from .confine import allow_cpu, confine
from .errors import DETAIL_CHARS, describe
from .watch import EVERY_S, Watch
from .wire import pack, unpack, write_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

    from .wire import Channel

# tests see at most this many of the characters that a called function prints
_PRINTED_CHARS = 1 << 16
_LOOK_S = 0.1  # seconds between checks of a running program
_STDIN = ("/dev/stdin", "/dev/fd/0", "/proc/self/fd/0")


def execute(name: str, *sources: str) -> dict[str, Any]:
    """Run ``sources`` one after the other as the module ``name``, and return the module's globals."""
    module = type(sys)(name)
    sys.modules[name] = module
    sys.argv = ["program.py"]
    for source in sources:
        run_source(source, module.__dict__)
    return module.__dict__


def run_source(source: str, namespace: dict[str, Any]) -> None:
    exec(compile(source, "program.py", "exec", dont_inherit=True), namespace)


def open_standard_input() -> None:
    """Let programs open standard input by a path such as ``/dev/stdin``. Without /proc, such a path
    doesn't resolve.
    """

    def with_stdin(real: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, *args: Any, **kwargs: Any) -> Any:
            named = isinstance(file, (str, os.PathLike)) and os.fspath(file) in _STDIN
            return real(os.dup(0) if named else file, *args, **kwargs)

        return opened

    builtins.open = io.open = with_stdin(io.open)
    real_open = os.open

    def opened(path: Any, *args: Any, **kwargs: Any) -> int:
        named = isinstance(path, (str, os.PathLike)) and os.fspath(path) in _STDIN
        return os.dup(0) if named else real_open(path, *args, **kwargs)

    os.open = opened


def run_tests(channel: Channel, request: Mapping[str, Any]) -> None:
    """Mode ``stdio``: run the program once per test input."""
    # Import these here once, or ``finish`` would import them in every forked process.
    import atexit  # noqa: F401
    import gc
    import threading  # noqa: F401

    # Keep garbage collection in forked processes from copying all the memory they share with this
    # one.
    gc.freeze()
    watch = Watch(request)
    while True:
        given = channel.receive()["stdin"].encode(errors="replace")
        stdin, stdout, stderr = (os.memfd_create(name) for name in ("stdin", "stdout", "stderr"))
        write_whole(stdin, given)
        os.lseek(stdin, 0, os.SEEK_SET)
        pid = os.fork()
        if pid == 0:
            for fd, target in ((stdin, 0), (stdout, 1), (stderr, 2)):
                os.dup2(fd, target)
            channel.close()
            os.closerange(3, 256)
            for stream in (sys.stdin, sys.stdout, sys.stderr):
                stream.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
            open_standard_input()
            confine(request, request["limits"]["cpu_s"])
            finish(request["prelude"], request["code"])
        reply = wait(pid, request["limits"], watch)
        written = b""
        if reply["outcome"] == "ok":
            written = os.pread(stdout, os.fstat(stdout).st_size, 0)
            reply["stdout_bytes"] = len(written)
        elif reply["outcome"] != "stopped":
            tail = os.pread(stderr, 4096, max(0, os.fstat(stderr).st_size - 4096)).decode(
                errors="replace"
            )
            reply["detail"] = (tail.strip().splitlines() or [reply["detail"]])[-1][:DETAIL_CHARS]
            if reply["outcome"] == "error" and reply["detail"].startswith("MemoryError"):
                reply["outcome"] = "memory"
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        channel.send(reply, written)


def finish(*sources: str) -> NoReturn:
    """Run source code as a complete program, then exit as the interpreter would.

    The interpreter's own shutdown is skipped, because freeing all objects would copy every memory
    page shared with the parent.
    """
    import atexit
    import threading

    status = 0
    try:
        execute("__main__", *sources)
    except SystemExit as error:
        if error.code is not None:
            status = error.code & 0xFF if isinstance(error.code, int) else 1
    except BaseException as error:
        sys.stderr.write(describe(error))
        status = 1
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # waits for the program's threads
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except BaseException as error:
        os.write(2, describe(error).encode(errors="replace"))
        status = status or 1
    os._exit(status)


def wait(pid: int, limits: Mapping[str, Any], watch: Watch) -> dict[str, Any]:
    """Wait for a process and describe how it ended. Kill the process if it exceeds ``wall_s`` or
    its limits on files or tasks.
    """
    code, used, why = reap(pid, watch, limits["wall_s"])
    cpu_s = used.ru_utime + used.ru_stime
    killed_at_cpu_limit = code == -signal.SIGKILL and cpu_s >= limits["cpu_s"]
    if why:
        outcome = "stopped"
        detail = why
    elif code == 0:
        outcome = "ok"
        detail = ""
    elif code == -signal.SIGXCPU or killed_at_cpu_limit:
        outcome = "timeout"
        detail = f"stopped after {cpu_s:.1f} s of processor time"
    elif why is not None:
        outcome = "timeout"
        detail = f"stopped after running and sleeping for {limits['wall_s']:g} s"
    elif code < 0 and used.ru_maxrss * 1024 > limits["memory_bytes"] / 2:
        outcome = "memory"
        detail = f"ended by signal {-code}"
    else:
        outcome = "error"
        detail = f"ended by signal {-code}" if code < 0 else f"exit status {code}"
    return {"outcome": outcome, "detail": detail}


def reap(
    pid: int, watch: Watch, wall_s: float = math.inf
) -> tuple[int, resource.struct_rusage, str | None]:
    """Wait for a process. Return its exit code, its resource usage, and the reason why it was
    killed. The reason is an empty string for the time limit, and None if the process ended on its
    own.

    ``wall_s`` limits the time that the process spends running and sleeping. Waiting for a CPU
    doesn't count. A process that gets less than a twentieth of a CPU is assumed to be asleep (see
    ``OwnTime``).
    """
    why: str | None = None
    looking = False
    looked = time.monotonic()
    seen = 0.0
    clock = OwnTime(wall_s)

    def late() -> bool:
        nonlocal looked, seen
        if (now := time.monotonic()) - looked < _LOOK_S:
            return False
        waited = now - looked
        ran = 0.0
        looked = now
        with suppress(OSError):  # the process has just ended by itself
            # this is the id of process ``pid``'s CPU time clock
            ran = time.clock_gettime((~pid << 3) | 2) - seen
        seen += ran
        clock.count(waited, ran)
        return clock.over

    def look(*_: object) -> None:
        nonlocal why, looking
        if looking:  # a check may take so long that the alarm goes off again
            return
        looking = True
        if why is None:
            why = "" if late() else watch.over(pid)
        looking = False
        if why is not None:
            with suppress(ProcessLookupError):  # the process has just ended by itself
                os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, EVERY_S, EVERY_S)
    _, status, used = os.wait4(pid, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    return os.waitstatus_to_exitcode(status), used, why


class Program:
    """A program that has been loaded, or has failed to load."""

    def __init__(self, prelude: str, code: str) -> None:
        self._code = code
        self._failure: BaseException | None = None
        try:
            self._namespace = execute("program", prelude)
            self._given = dict(self._namespace)
            run_source(code, self._namespace)
        except BaseException as error:
            self._failure = error

    def loaded(self) -> None:
        """Raise the error from loading, if loading failed."""
        if self._failure is not None:
            raise self._failure

    def find(self, name: str) -> Any:
        """Return a function or other global that the program itself defines, or a method of the
        program's ``Solution`` class.

        Raises NameError if the program doesn't define the name, even if the prelude or Python does.
        If the program failed to load, raises the error from loading instead.
        """
        self.loaded()
        value = self._namespace.get(name)
        if value is not None and value is self._given.get(name) and not self._stores(name):
            value = None
        if value is None and "Solution" in self._namespace:
            value = getattr(self._namespace["Solution"](), name, None)
        if value is None:
            raise NameError(f"the program defines no function {name!r}")
        return value

    def _stores(self, name: str) -> bool:
        """Return whether the program itself sets a name. Setting it to the same value as the
        prelude, for example by repeating an import, also counts.
        """
        import dis

        code = compile(self._code, "program.py", "exec", dont_inherit=True)
        instructions = dis.get_instructions(code)
        return any(i.opname.startswith("STORE_") and i.argval == name for i in instructions)


class Printed(io.StringIO):
    """Captures what a called function prints, keeping only the beginning."""

    def write(self, text: str) -> int:
        super().write(text[: max(0, _PRINTED_CHARS - self.tell())])
        return len(text)

    def take(self) -> str:
        text = self.getvalue()
        self.seek(0)
        self.truncate()
        return text


def load(channel: Channel, request: Mapping[str, Any]) -> Program:
    """Load the program in a forked process. This function returns only in the forked process. The
    parent waits for the forked process and then exits too.
    """
    limits = request["limits"]
    if pid := os.fork():
        channel.close(but_errors=True)
        code, _, why = reap(pid, Watch(request))
        if why:
            channel.complain(why)
        os._exit(128 - code if code < 0 and not why else abs(code))

    confine(request, limits["program_s"])
    allow_cpu(limits)
    return Program(request["prelude"], request["code"])


def serve(channel: Channel, request: Mapping[str, Any]) -> NoReturn:
    """Mode ``serve``: answer calls with plain values."""
    program = load(channel, request)
    while True:
        header = channel.receive()
        allow_cpu(request["limits"])
        try:
            function = program.find(header["call"])
            reply = {"value": pack(function(*unpack(header["args"]), **unpack(header["kwargs"])))}
            json.dumps(reply)
        except BaseException as error:
            reply = {"raised": describe(error)}
        channel.send(reply)
