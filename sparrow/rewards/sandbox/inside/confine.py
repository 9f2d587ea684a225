"""Put the process of a program under its limits for good."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import time
from collections.abc import Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NO_NEW_PRIVS, _SECCOMP, _DUMPABLE, _DEATH_SIGNAL = 38, 22, 4, 1
STARVED = 10  # times ``wall_s`` after which a program that gets no processor is given up
_STACK_BYTES = 112 << 20  # as far as the main thread's stack can always grow: the kernel leaves 128 MiB


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


def allow_cpu(limits: Mapping[str, Any]) -> None:
    """Let this process use ``cpu_s`` more seconds of processor time, within what ``program_s`` leaves."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (min(hard, int(time.process_time()) + 1 + limits["cpu_s"]), hard))


def hide() -> None:
    """End this process with its parent; keep other processes of this user from reading or writing it through /proc."""
    libc = ctypes.CDLL(None)
    libc.prctl(_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    libc.prctl(_DUMPABLE, 0, 0, 0, 0)
