"""What the kernel says about processes."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import NamedTuple


class Process(NamedTuple):
    """A process as it is now."""

    state: str  # as in ps: R if it runs or waits for a processor
    parent: int
    processor_s: float  # seconds it has used, and those of its children that it has waited for


def look(pid: int) -> Process:
    """One process. Raises OSError: no process has this number."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
    return Process(
        fields[0].decode(), int(fields[1]), sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    )


def family(root: int) -> list[Process]:
    """A process and all its descendants; empty if it is gone."""
    processes: dict[int, Process] = {}
    for name in os.listdir("/proc"):
        with suppress(OSError):
            if name.isdigit():
                processes[int(name)] = look(int(name))
    members = {root} & processes.keys()
    while (
        more := {pid for pid, process in processes.items() if process.parent in members} - members
    ):
        members |= more
    return [processes[pid] for pid in members]
