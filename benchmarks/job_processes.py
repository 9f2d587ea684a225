"""Start the processes of ``run_jobs.py``'s jobs, and end them with everything they have started.

A job's processes may leave its session, and those whose parent ends get another parent. Nothing in
a process then shows which job it belongs to: vLLM's engine cores even overwrite the memory that
shows their environment. So every job is a *child subreaper*, which Linux makes the parent of its
descendants that lose theirs. While a job runs, all its processes thus descend from it. The runner
is a child subreaper too, and becomes the parent of everything that ended jobs leave behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

SIGNAL_AFTER_PARENT = 1
CHILD_SUBREAPER = 36
"""``SIGNAL_AFTER_PARENT`` and ``CHILD_SUBREAPER`` are options of the system call ``prctl``."""
_libc = ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, value: int) -> None:
    if _libc.prctl(option, value, 0, 0, 0):
        error = ctypes.get_errno()
        raise OSError(error, f"prctl({option}, {value}): {os.strerror(error)}")


class JobProcesses:
    """Starts and ends the processes of jobs. Must not be used with threads, because Python code
    runs between a fork and the job's command.
    """

    def __init__(self) -> None:
        _prctl(CHILD_SUBREAPER, 1)
        self._runner = psutil.Process()
        self._others = set(self._runner.children())
        self._leaders: set[int] = set()

    def start(
        self,
        command: Sequence[str],
        folder: Path,
        log: Path,
        environment: Mapping[str, str],
        cores: Collection[int],
    ) -> subprocess.Popen[bytes]:
        """Start a job in a new session, on these CPU cores. It gets SIGTERM if the runner is
        killed.

        Raises OSError if the command cannot be started.
        """

        def prepare() -> None:
            os.sched_setaffinity(0, cores)
            _prctl(CHILD_SUBREAPER, 1)
            _prctl(SIGNAL_AFTER_PARENT, signal.SIGTERM)

        with log.open("wb") as output:
            leader = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=folder,
                env=environment,
                start_new_session=True,
                preexec_fn=prepare,
            )
        self._leaders.add(leader.pid)
        return leader

    def left(self, leader: subprocess.Popen[bytes]) -> list[psutil.Process]:
        """Return the processes of a job that is about to end. If the job itself has ended, these
        are the processes left by all ended jobs, because their origin is no longer known.
        """
        if leader.poll() is None:
            return _with_descendants([psutil.Process(leader.pid)])
        self._leaders.discard(leader.pid)
        adopted = [
            child
            for child in self._runner.children()
            if child.pid not in self._leaders and child not in self._others
        ]
        return _with_descendants(child for child in adopted if not _reaped(child.pid))


def is_stopped(leader: subprocess.Popen[bytes]) -> bool:
    """Return whether a job's process has been paused by a signal."""
    return psutil.Process(leader.pid).status() == psutil.STATUS_STOPPED


def send(number: signal.Signals, processes: Iterable[psutil.Process]) -> None:
    """Send a signal to all processes that still exist."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.send_signal(number)


def _with_descendants(processes: Iterable[psutil.Process]) -> list[psutil.Process]:
    found = []
    for process in processes:
        found.append(process)
        with suppress(psutil.NoSuchProcess):
            found.extend(process.children(recursive=True))
    return found


def _reaped(pid: int) -> bool:
    """Remove a child that has ended from the table of processes, and return whether it has."""
    with suppress(ChildProcessError):
        return os.waitpid(pid, os.WNOHANG) != (0, 0)
    return True
