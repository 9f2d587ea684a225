"""Put sandboxes in control groups (cgroups v2) if this process may create them. A cgroup limits a
program's total resources, including kernel memory used on its behalf.
"""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

from sparrow.rewards.sandbox.limits import Limits

_NEEDED = {"memory", "pids"}
_REMOVAL_S = 2.0
_HARNESS_TASKS = 16
_HARNESS_BYTES = 128 << 20
_log = logging.getLogger(__name__)


@cache
def parent() -> Path | None:
    """Find a group where we can create subgroups with memory and task limits: either this process's
    own group or that group's parent. Return None if neither works.
    """
    groups = (line for line in _lines("/proc/self/cgroup") if line.startswith("0::"))
    own = next((line[3:].strip() for line in groups), None)
    mounts = [line.split() for line in _lines("/proc/self/mountinfo") if " - cgroup2 " in line]
    if own is None or not mounts:
        return None
    folder = Path(mounts[0][4]) / own.lstrip("/")
    for group in dict.fromkeys((folder.parent, folder)):
        controllers = " ".join(_lines(group / "cgroup.subtree_control")).split()
        if _NEEDED.issubset(controllers) and _works(group):
            return group
    return None


def _works(group: Path) -> bool:
    """Return whether a subgroup can be created and a process started in it."""
    try:
        subgroup = make(group, Limits())
    except OSError:
        return False
    try:
        return subprocess.run(enter(subgroup, ["true"]), stderr=subprocess.DEVNULL).returncode == 0
    finally:
        remove(subgroup)


def _lines(path: str | Path) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


def make(group: Path, limits: Limits) -> Path:
    """Create a subgroup of ``group`` with ``limits``. Raises OSError if it cannot be created."""
    subgroup = Path(tempfile.mkdtemp(prefix="sparrow-", dir=group))
    most = limits.memory_bytes + limits.files_bytes + 3 * limits.output_bytes + _HARNESS_BYTES
    try:
        (subgroup / "pids.max").write_text(str(limits.tasks + _HARNESS_TASKS))
        (subgroup / "memory.max").write_text(str(most))
        if (subgroup / "memory.swap.max").exists():
            (subgroup / "memory.swap.max").write_text("0")
    except OSError:
        remove(subgroup)
        raise
    return subgroup


def enter(group: Path, command: list[str]) -> list[str]:
    """Wrap ``command`` so that all of its processes run in the group from the start."""
    return ["/bin/sh", "-c", 'echo 0 > "$0/cgroup.procs" && exec "$@"', str(group), *command]


def remove(group: Path) -> None:
    """Kill any processes left in the group and remove it, logging a warning if that fails."""
    deadline = time.monotonic() + _REMOVAL_S
    while True:
        try:
            if (group / "cgroup.kill").exists():
                (group / "cgroup.kill").write_text("1")
            return os.rmdir(group)
        except FileNotFoundError:
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                _log.warning("the control group %s cannot be removed: %s", group, error)
                return
        time.sleep(0.005)
