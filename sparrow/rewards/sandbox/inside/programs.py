"""The two modes that run the program under judgement: once per test's standard input, or once for many calls.

Nothing here knows an expected output, so a program that takes this process over has gained nothing: it can still only
say what it computed.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress

from .confine import allow_cpu, confine
from .wire import pack, unpack, write_whole

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any, NoReturn

    from .wire import Channel

_DETAIL_CHARS = 400


def describe(error: BaseException) -> str:
    """Type and message of an exception, in one short line; safe with exceptions whose own text fails."""
    try:
        text = str(error)
    except BaseException:
        text = ""
    return " ".join([type(error).__name__ + ":" * bool(text.strip()), *text.split()])[:_DETAIL_CHARS]


def execute(name: str, *sources: str) -> dict[str, Any]:
    """Run source code, one after the other, as the module ``name``, and return its globals."""
    module = type(sys)(name)
    sys.modules[name] = module
    sys.argv = ["program.py"]
    for source in sources:
        exec(compile(source, "program.py", "exec", dont_inherit=True), module.__dict__)
    return module.__dict__


def run_tests(channel: Channel, request: Mapping[str, Any]) -> None:
    """Mode ``stdio``."""
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
            confine(request["limits"], request["filter"], request["limits"]["cpu_s"])
            finish(request["prelude"], request["code"])
        reply = wait(pid, request["limits"])
        if reply["outcome"] == "ok":
            reply["stdout"] = os.pread(stdout, os.fstat(stdout).st_size, 0).decode(errors="replace")
        else:
            tail = os.pread(stderr, 4096, max(0, os.fstat(stderr).st_size - 4096)).decode(errors="replace")
            reply["detail"] = (tail.strip().splitlines() or [reply["detail"]])[-1][:_DETAIL_CHARS]
            if reply["outcome"] == "error" and reply["detail"].startswith("MemoryError"):
                reply["outcome"] = "memory"
        for fd in (stdin, stdout, stderr):
            os.close(fd)
        channel.send(reply)


def finish(*sources: str) -> NoReturn:
    """Run source code as a whole program and end this process as the interpreter would.

    Without the interpreter's own end, which would free, and so copy, every page shared with the parent.
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


def wait(pid: int, limits: Mapping[str, Any]) -> dict[str, Any]:
    """How the process ended, killed if it takes longer than ``wall_s``."""
    late = False

    def kill(*_: object) -> None:
        nonlocal late
        late = True
        with suppress(ProcessLookupError):  # it has just ended by itself
            os.kill(pid, signal.SIGKILL)

    signal.signal(signal.SIGALRM, kill)
    signal.setitimer(signal.ITIMER_REAL, limits["wall_s"])
    _, status, used = os.wait4(pid, 0)
    signal.setitimer(signal.ITIMER_REAL, 0)
    cpu_s = used.ru_utime + used.ru_stime
    code = os.waitstatus_to_exitcode(status)
    if code == 0:
        outcome, detail = "ok", ""
    elif late or code == -signal.SIGXCPU or (code == -signal.SIGKILL and cpu_s >= limits["cpu_s"]):
        outcome, detail = "timeout", f"stopped after {cpu_s:.1f} s of processor time"
    elif code < 0 and used.ru_maxrss * 1024 > limits["memory_bytes"] / 2:
        outcome, detail = "memory", f"ended by signal {-code}"
    else:
        outcome, detail = "error", f"ended by signal {-code}" if code < 0 else f"exit status {code}"
    return {"outcome": outcome, "detail": detail}


def serve(channel: Channel, request: Mapping[str, Any]) -> None:
    """Mode ``serve``."""
    limits = request["limits"]
    confine(limits, request["filter"], limits["program_s"])
    allow_cpu(limits)
    namespace: dict[str, Any] = {}
    failure: BaseException | None = None
    try:
        namespace = execute("program", request["prelude"], request["code"])
    except BaseException as error:
        failure = error
    while True:
        header = channel.receive()
        allow_cpu(limits)
        try:
            if failure is not None:
                raise failure
            name, args, kwargs = header["call"], unpack(header["args"]), unpack(header["kwargs"])
            function = namespace.get(name)
            if function is None and "Solution" in namespace:
                function = getattr(namespace["Solution"](), name, None)
            if function is None:
                raise NameError(f"the program defines no function {name!r}")
            reply = {"value": pack(function(*args, **kwargs))}
            json.dumps(reply)
        except BaseException as error:
            reply = {"raised": describe(error)}
        channel.send(reply)
