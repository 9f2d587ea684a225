"""Runs inside the sandbox, started by path and importing nothing of this package: runs the program under judgement.

It speaks in lines of JSON over its standard input and output. The first says what to run and is acknowledged before
anything runs; its ``mode`` is one of

- ``stdio``: every further line has one test's standard input; the program runs once for each, in a forked process,
  and the reply is how it ended and what it wrote.
- ``serve``: the program is loaded once; every further line is a call of one of its functions.
- ``judge``: the line holds trusted test code, which calls the program's functions by lines of its own.

Nothing here knows an expected output in the first two modes, so a program that takes this process over has gained
nothing: it can still only say what it computed.
"""

from __future__ import annotations

import builtins
import ctypes
import json
import os
import resource
import signal
import struct
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress

TYPE_CHECKING = False  # typing.TYPE_CHECKING without typing: every program pays for the imports made here
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, NoReturn

_NO_NEW_PRIVS, _SECCOMP, _DUMPABLE, _DEATH_SIGNAL = 38, 22, 4, 1
_STACK_BYTES = 112 << 20  # as far as the main thread's stack can always grow: the kernel leaves 128 MiB
_DETAIL_CHARS = 400


def pack(value: Any) -> Any:
    """A built-in value as JSON that keeps its type; the wire format of arguments and results.

    Raises TypeError: a value of another kind.
    """
    if value is None or value is True or value is False:
        return value
    for scalar in (int, float, str):
        if isinstance(value, scalar):
            return scalar(value)  # not a subclass, whose own comparisons could claim anything
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, Mapping):
        return {"dict": [[pack(key), pack(item)] for key, item in value.items()]}
    for group in (tuple, set, frozenset):
        if isinstance(value, group):
            return {group.__name__: [pack(item) for item in value]}
    if isinstance(value, (bytes, bytearray)):
        return {"bytes": bytes(value).decode("latin-1")}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if hasattr(value, "tolist"):  # arrays and their scalars
        return pack(value.tolist())
    if isinstance(value, Iterator) or type(value).__name__ in (
        "range",
        "deque",
        "dict_keys",
        "dict_values",
        "dict_items",
    ):
        return [pack(item) for item in value]
    raise TypeError(f"a value of type {type(value).__name__} cannot be compared")


def unpack(value: Any) -> Any:
    """The value that ``pack`` wrote. Raises ValueError: not written by ``pack``."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "dict":
        return {unpack(key): unpack(item) for key, item in content}
    if kind == "bytes":
        return content.encode("latin-1")
    if kind == "complex":
        return complex(*content)
    if kind not in ("tuple", "set", "frozenset"):
        raise ValueError(f"no type {kind!r} in the wire format")
    return {"tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(unpack, content))


class Channel:
    """Objects in lines of JSON over two file descriptors."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        self._requests, self._write_fd = os.fdopen(read_fd, "rb"), write_fd

    def receive(self) -> dict[str, Any]:
        """The next object; ends this process when there is none."""
        line = self._requests.readline()
        if not line:
            os._exit(0)
        return json.loads(line)

    def send(self, message: dict[str, Any]) -> None:
        write_whole(self._write_fd, json.dumps(message).encode() + b"\n")

    def close(self) -> None:
        self._requests.close()
        os.close(self._write_fd)


def write_whole(fd: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(fd, rest) :]


def confine(limits: Mapping[str, Any], instructions: list[list[Any]], cpu_s: int) -> None:
    """Put this process under its limits for good. Raises OSError: the kernel refuses the system call filter."""
    pid = os.getpid()
    libc = ctypes.CDLL(None, use_errno=True)
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["output_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
    ):
        _lower(kind, value, value)
    _lower(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
    _lower(resource.RLIMIT_STACK, _STACK_BYTES, resource.RLIM_INFINITY)
    filter = b"".join(struct.pack("HBBI", *code, pid if k == "pid" else k) for *code, k in instructions)
    buffer = ctypes.create_string_buffer(filter, len(filter))
    program = struct.pack("HxxxxxxP", len(instructions), ctypes.addressof(buffer))
    for arguments in (
        (_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0),
        (_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_SECCOMP, 2, ctypes.c_char_p(program), 0, 0),
    ):
        if libc.prctl(*arguments):
            raise OSError(ctypes.get_errno(), f"prctl({arguments[0]}) refused")


def _lower(kind: int, soft: int, hard: int) -> None:
    _, ceiling = resource.getrlimit(kind)
    if ceiling != resource.RLIM_INFINITY:
        soft = min(soft, ceiling)
        hard = ceiling if hard == resource.RLIM_INFINITY else min(hard, ceiling)
    resource.setrlimit(kind, (soft, hard))


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


def allow_cpu(limits: Mapping[str, Any]) -> None:
    """Let this process use ``cpu_s`` more seconds of processor time, within what ``program_s`` leaves."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(hard, int(time.process_time()) + 1 + limits["cpu_s"]), hard))


class ProgramError(Exception):
    """The program under judgement raised an exception."""


def judge(channel: Channel, request: Mapping[str, Any]) -> None:
    """Mode ``judge``: run the tests; a name that neither they nor their setup define is a call of the program's."""

    def remote(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            channel.send({"call": name, "args": pack(list(args)), "kwargs": pack(kwargs)})
            reply = channel.receive()
            if "raised" in reply:
                raise ProgramError(reply["raised"])
            return unpack(reply["value"])

        call.__name__ = name
        return call

    import ast

    confine(request["limits"], request["filter"], request["limits"]["program_s"])
    try:
        namespace = execute("tests", request["setup"])
        tree = ast.parse(request["test"])
        # What the tests define themselves takes the place of a call once they have run so far.
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        wanted = names - set(namespace) - set(dir(builtins)) | {request["entry_point"]} - {None}
        namespace.update({name: remote(name) for name in wanted})
        exec(compile(tree, "tests.py", "exec", dont_inherit=True), namespace)
        if request["entry_point"] and "check" in namespace:
            namespace["check"](namespace[request["entry_point"]])
        verdict = {"verdict": "pass", "detail": ""}
    except AssertionError as error:
        verdict = {"verdict": "wrong", "detail": describe(error)}
    except ProgramError as error:
        detail = str(error)
        verdict = {"verdict": "memory" if detail.startswith("MemoryError") else "error", "detail": detail}
    except BaseException as error:
        verdict = {"verdict": "error", "detail": f"in the tests: {describe(error)}"}
    channel.send(verdict)


def main() -> None:
    channel = Channel(os.dup(0), os.dup(1))
    nowhere = os.open(os.devnull, os.O_RDWR)
    request = channel.receive()
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    libc = ctypes.CDLL(None)
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_DUMPABLE, 0, 0, 0, 0)  # same-user processes may otherwise read and write each other through /proc
    channel.send({"ready": True})
    {"stdio": run_tests, "serve": serve, "judge": judge}[request["mode"]](channel, request)


if __name__ == "__main__":
    main()
