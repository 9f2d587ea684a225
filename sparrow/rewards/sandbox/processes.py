"""Read the states of processes, the CPU time they have used, and the time they have waited for a
CPU.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import NamedTuple


class Process(NamedTuple):
    """The current state of a process."""

    state: str  # as in ps: R if running or waiting for a CPU
    parent: int
    # CPU seconds used by the process and by any children it has waited for
    processor_s: float
    # seconds each thread has spent ready to run but waiting for a CPU; None if the kernel doesn't
    # report it
    queued_s: Mapping[int, float] | None = None


def look(pid: int) -> Process:
    """Read the state of one process. Raises OSError if no process has this id."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    ticks = sum(map(int, fields[11:15]))
    return Process(
        state=fields[0].decode(),
        parent=int(fields[1]),
        processor_s=ticks / os.sysconf("SC_CLK_TCK"),
    )


def queued(pid: int | str) -> dict[int, float] | None:
    """Read how many seconds each of a process's threads has waited for a CPU. Threads that end in
    the meantime are skipped. Return None if the kernel doesn't report waiting times.
    """
    waits: dict[int, float] = {}
    try:
        threads = os.listdir(f"/proc/{pid}/task")
        for thread in threads:
            with open(f"/proc/{pid}/task/{thread}/schedstat", "rb") as file:
                waits[int(thread)] = int(file.read().split()[1]) / 1e9
    except ProcessLookupError:
        return waits
    except FileNotFoundError:
        return waits if os.path.exists("/proc/self/schedstat") else None
    except (OSError, IndexError):
        return None
    return waits


def family(root: int) -> list[Process]:
    """Read the states of a process and all its descendants, including how long they have waited for
    a CPU. Return an empty list if the process is gone.
    """
    processes: dict[int, Process] = {}
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit():
                processes[int(name)] = look(int(name))

    members = {root} & processes.keys()
    while True:
        children = {pid for pid, process in processes.items() if process.parent in members}
        if children <= members:
            break
        members |= children
    return [processes[pid]._replace(queued_s=queued(pid)) for pid in members]
