"""Watch a program from outside: count its files and tasks many times per second. Resource limits
cover neither.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

EVERY_S = 0.02
_SHARE = 5  # a slow check is followed by a pause this many times as long


class Watch:
    """Watches one program from another process.

    Args:
        request: the harness's request. The program may write to ``folder``, which is a separate
            file system if ``own_files`` is true. If ``own_tasks`` is true, the kernel limits the
            program's tasks.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        self._limits = request["limits"]
        self._folder = request["folder"]
        self._own_files = request["own_files"]
        self._count_tasks = not request["own_tasks"]
        self._next = 0.0

    def over(self, pid: int) -> str | None:
        """Describe the limit that the program has exceeded, or return None."""
        now = time.monotonic()
        if now < self._next:
            return None
        excess = self._files()
        if not excess and self._count_tasks:
            excess = self._tasks(pid)
        self._next = now + (time.monotonic() - now) * _SHARE
        return excess

    def _files(self) -> str | None:
        most = self._limits["files"]
        if self._own_files:
            system = os.statvfs(self._folder)
            count = system.f_files - system.f_ffree - 1
            return f"made more than {most} files and folders" if count > most else None

        count = 0
        size = 0
        folders = [self._folder]
        while folders:
            try:
                with os.scandir(folders.pop()) as entries:
                    for entry in entries:
                        count += 1
                        if count > most:
                            return f"made more than {most} files and folders"
                        if entry.is_dir(follow_symlinks=False):
                            folders.append(entry.path)
                        else:
                            size += entry.stat(follow_symlinks=False).st_blocks * 512
            except FileNotFoundError:  # the program has just removed the folder
                continue
            except OSError as error:
                # The path is too long for any system call, or not even the folder's owner can list
                # the folder.
                return f"made a folder that cannot be read: {error.strerror}"
        most = self._limits["files_bytes"]
        return f"wrote more than {most} bytes of files" if size > most else None

    def _tasks(self, pid: int) -> str | None:
        try:
            with open(f"/proc/{pid}/stat", "rb") as file:
                tasks = int(file.read().rpartition(b")")[2].split()[17])
        except OSError:  # the process has ended, or there is no /proc
            return None
        most = self._limits["tasks"]
        return f"made more than {most} tasks" if tasks > most else None
