"""Permanently confine a program's process with resource limits, Landlock and a system call filter,
and drop its capabilities.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import time
from collections.abc import Iterable, Mapping
from functools import cache

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

_NO_NEW_PRIVS = 38
_SECCOMP = 22
_DUMPABLE = 4
_DEATH_SIGNAL = 1
# The kernel always leaves a gap of 128 MiB for the main thread's stack, so the stack can grow to
# ``_STACK_BYTES``.
_STACK_BYTES = 112 << 20
_TIMERS = 128
_CAPABILITY_VERSION = 0x20080522
_MEMLOCK = 8
_MSGQUEUE = 12
_SIGPENDING = 11

# Landlock's system calls have the same numbers on both architectures.
_CREATE_RULESET = 444
_ADD_RULE = 445
_RESTRICT_SELF = 446
LANDLOCK_NEEDED = 3  # the first version that prevents read-only files from being truncated
_WRITE_FILE = 1 << 1
_READ_FILE = 1 << 2
_READ_DIR = 1 << 3
_TRUNCATE = 1 << 14
_EVERYTHING = {3: (1 << 15) - 1, 4: (1 << 15) - 1}  # version 5 added device control
# Allow removing and creating folders, files and links, but not creating devices or sockets.
_REMOVE = (1 << 4) | (1 << 5)
_MAKE = (1 << 7) | (1 << 8) | (1 << 12)
_REFER = 1 << 13
_PATH_BENEATH = 1


def confine(request: Mapping[str, Any], cpu_s: int) -> None:
    """Confine this process permanently. Raises OSError if the kernel refuses a restriction."""
    pid = os.getpid()
    limits = request["limits"]
    for kind, value in (
        (resource.RLIMIT_AS, limits["memory_bytes"]),
        (resource.RLIMIT_FSIZE, limits["output_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (_MEMLOCK, 0),
        (_MSGQUEUE, 0),
        (_SIGPENDING, _TIMERS),
    ):
        _lower(kind, value, value)
    if request["own_tasks"]:  # the kernel counts only the program's tasks
        # The harness needs four more tasks.
        _lower(resource.RLIMIT_NPROC, limits["tasks"] + 4, limits["tasks"] + 4)
    _lower(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)
    _lower(resource.RLIMIT_STACK, _STACK_BYTES, resource.RLIM_INFINITY)

    packed, own_ids = request["filter"]
    filter = bytearray.fromhex(packed)
    for at in own_ids:
        struct.pack_into("I", filter, at, pid)
    buffer = ctypes.create_string_buffer(bytes(filter), len(filter))
    program = struct.pack("HxxxxxxP", len(filter) // 8, ctypes.addressof(buffer))

    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    _prctl(_NO_NEW_PRIVS, 1)
    if request["readable"] is not None:
        landlock(request["readable"], os.getcwd())
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _checked("capset", _libc().capset(header, bytes(24)))
    _prctl(_SECCOMP, 2, ctypes.c_char_p(program))


def landlock_version() -> int:
    """Return the kernel's Landlock version, or 0 if it doesn't have Landlock."""
    return max(0, _libc().syscall(_CREATE_RULESET, None, 0, 1))


def landlock(readable: Iterable[str], own: str) -> None:
    """Restrict this process's file access to the ``readable`` files and folders, a few devices, and
    its ``own`` folder.
    """
    version = landlock_version()
    handled = _EVERYTHING.get(version, (1 << 16) - 1)
    # ``network`` restricts TCP. ``scoped`` restricts abstract sockets and signals.
    network = 3 * (version >= 4)
    scoped = 3 * (version >= 6)
    attributes = struct.pack("QQQ", handled, network, scoped)
    if version < 4:
        attributes = attributes[:8]
    elif version < 6:
        attributes = attributes[:16]
    rules = _checked("landlock", _libc().syscall(_CREATE_RULESET, attributes, len(attributes), 0))

    reads = _READ_FILE | _READ_DIR
    allowed = [
        (path, reads)
        for path in (*readable, "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
    ]
    allowed.append(("/dev/null", _READ_FILE | _WRITE_FILE | _TRUNCATE))
    allowed.append((own, reads | _WRITE_FILE | _REMOVE | _MAKE | _REFER | _TRUNCATE))
    for path, access in allowed:
        try:
            fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
        except OSError:  # no such path on this machine
            continue
        try:
            if not os.path.isdir(path):
                access &= _READ_FILE | _WRITE_FILE | _TRUNCATE
            rule = struct.pack("=Qi", access, fd)
            _checked("landlock", _libc().syscall(_ADD_RULE, rules, _PATH_BENEATH, rule, 0))
        finally:
            os.close(fd)
    _checked("landlock", _libc().syscall(_RESTRICT_SELF, rules, 0))
    os.close(rules)


@cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *values: Any) -> None:
    _checked(
        f"prctl({option})",
        _libc().prctl(option, *values, *(ctypes.c_ulong(0),) * (4 - len(values))),
    )


def _checked(name: str, result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{name} refused")
    return result


def _lower(kind: int, soft: int, hard: int) -> None:
    _, ceiling = resource.getrlimit(kind)
    if ceiling != resource.RLIM_INFINITY:
        soft = min(soft, ceiling)
        hard = ceiling if hard == resource.RLIM_INFINITY else min(hard, ceiling)
    resource.setrlimit(kind, (soft, hard))


def allow_cpu(limits: Mapping[str, Any]) -> None:
    """Give this process another ``cpu_s`` CPU seconds, up to ``program_s`` in total."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(
        resource.RLIMIT_CPU, (min(hard, int(time.process_time()) + 1 + limits["cpu_s"]), hard)
    )


def hide(uid: int | None) -> None:
    """Switch this process to user id ``uid``, if given. Have the kernel kill this process when its
    parent ends. Keep the user's other processes from accessing this process's memory through /proc.
    """
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    _prctl(_DEATH_SIGNAL, signal.SIGKILL)
    _prctl(_DUMPABLE, 0)
