"""The walls that confine a program. A wall is the command that starts a sandbox, plus settings for
the harness inside.

See THREATS.md for what each kind of wall stops. ``none`` leaves just the filter and the limits.
"""

from __future__ import annotations

import compileall
import itertools
import os
import random
import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sparrow.rewards.sandbox.limits import Limits

Held = Literal["bwrap", "session", "none"]

ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OMP_NUM_THREADS": "1",
}

_INSIDE = Path(__file__).with_name("inside")
_count = itertools.count(random.randrange(1 << 24))


@dataclass(frozen=True)
class Wall:
    """One way to confine programs."""

    held: Held
    # whether root starts bubblewrap, with a separate user id per sandbox
    own_user: bool = False

    @property
    def counted_by_kernel(self) -> bool:
        """Whether the kernel can limit a program's task count without counting anyone else's tasks.

        The kernel can do this if the sandbox has a user id of its own. Since Linux 5.14, it can
        also do this in a user namespace that was not created by root.
        """
        if self.own_user:
            return True
        release = tuple(int(part) for part in os.uname().release.split("-")[0].split(".")[:2])
        return self.held == "bwrap" and os.geteuid() != 0 and release >= (5, 14)

    def command(self, limits: Limits) -> list[str]:
        """Return the command that starts the harness."""
        _compile()
        if self.held == "bwrap":
            return _bwrap(limits, self.own_user)
        return _python(str(_INSIDE.parent), sys.executable)

    def request(self, folder: str) -> dict[str, Any]:
        """Return this wall's settings, which become part of the harness's request. ``folder`` is
        the program's folder.
        """
        return {
            "own_tasks": self.counted_by_kernel,
            "own_files": self.held == "bwrap",
            "folder": "/tmp" if self.held == "bwrap" else folder,
            "uid": _user_id() if self.own_user else None,
            "readable": [*_folders(), *_SYSTEM, *_CACHES] if self.held == "session" else None,
        }


_SYSTEM = ("/bin", "/sbin", "/lib", "/lib64")
_CACHES = ("/etc/ld.so.cache", "/etc/alternatives")


@cache
def _folders() -> list[str]:
    """Return the folders with Python and the system libraries."""
    installed = str(Path(sys.executable).resolve().parents[1])
    return sorted({"/usr", sys.prefix, sys.base_prefix, sys.exec_prefix, installed})


_OWN_FOLDERS = ("/tmp", "/dev")  # folders that bubblewrap creates for each sandbox
_MOVED = "/sandbox/python"


@cache
def _moved() -> str | None:
    """Return the path of the virtual environment if it will be mounted elsewhere, which hides its
    location from programs. Return None if the environment stays in place.

    The environment is mounted elsewhere if it is in one of ``_OWN_FOLDERS`` and its base Python is
    not. The base Python must stay in place, because the environment's files contain its path.
    """

    def hidden(path: object) -> bool:
        return any(Path(str(path)).is_relative_to(folder) for folder in _OWN_FOLDERS)

    if not Path(sys.executable).is_relative_to(sys.prefix):
        return None
    made_from = (Path(sys.executable).resolve(), sys.base_prefix)
    if hidden(sys.prefix) and not any(hidden(path) for path in made_from):
        return sys.prefix
    return None


def _place(folder: str) -> str:
    """Map one of Python's folders to its path inside bubblewrap."""
    return _MOVED if folder == _moved() else folder


def _user_id() -> int:
    """Pick a user id near the top of this process's user namespace that isn't taken by any user or
    other sandbox on this machine.
    """
    maps = [line.split() for line in Path("/proc/self/uid_map").read_text().splitlines()]
    ids = max(int(first) + int(length) for first, _, length in maps)
    room = min(1 << 30, ids // 2)
    return min(ids, 1 << 31) - 2 - next(_count) % room


def _bwrap(limits: Limits, own_user: bool) -> list[str]:
    binary = shutil.which("bwrap") or "bwrap"
    command = [binary, "--die-with-parent", "--new-session", "--cap-drop", "ALL"]
    if own_user:
        # No user namespace here: root inside it would still be root to the kernel, which doesn't
        # limit root's tasks.
        command += [
            "--unshare-ipc",
            "--unshare-pid",
            "--unshare-net",
            "--unshare-uts",
            "--unshare-cgroup-try",
        ]
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID", "--perms", "1777"]
    else:
        command += ["--unshare-user", "--unshare-all", "--uid", "65534", "--gid", "65534"]
    if _bwrap_sizes(binary):
        command += ["--size", str(limits.files_bytes), "--tmpfs", "/tmp", "--chdir", "/tmp"]
    # bubblewrap before 0.7 cannot limit the size of a tmpfs, so do not let programs write to /tmp
    # at all
    else:
        command += ["--dir", "/tmp", "--chdir", "/tmp"]
    if own_user:  # or only root could enter the parent folders that bubblewrap creates
        above = {
            str(parent)
            for path in (*map(_place, _folders()), *_CACHES, "/sandbox/inside")
            for parent in Path(path).parents
        }
        for parent in sorted(above - {"/", "/tmp"}):
            command += ["--perms", "0755", "--dir", parent]
    # Mount these after making /tmp private, because the base Python may live in /tmp.
    for folder in _folders():
        command += ["--ro-bind", folder, _place(folder)]
    for link in _SYSTEM:
        if os.path.islink(link):
            command += ["--symlink", os.readlink(link), link]
        elif os.path.isdir(link):
            command += ["--ro-bind", link, link]
    for path in _CACHES:
        command += ["--ro-bind-try", path, path]
    command += [
        "--ro-bind",
        str(_INSIDE),
        "/sandbox/inside",
        "--dev",
        "/dev",
        "--tmpfs",
        "/dev/pts",
    ]
    command += [
        "--remount-ro",
        "/dev/pts",
        "--remount-ro",
        "/dev",
        "--hostname",
        "sandbox",
        "--remount-ro",
        "/",
    ]
    executable = sys.executable
    if (moved := _moved()) is not None:
        executable = str(_MOVED / Path(executable).relative_to(moved))
    return [*command, "--", *_python("/sandbox", executable)]


@cache
def _bwrap_sizes(binary: str) -> bool:
    return "--size" in subprocess.run([binary, "--help"], capture_output=True, text=True).stdout


@cache
def _compile() -> None:
    """Compile the harness if its folder is writable. Inside the sandbox, the folder is never
    writable, and without this step every program would compile the harness again.
    """
    compileall.compile_dir(_INSIDE, maxlevels=0, quiet=2)


def _python(folder: str, executable: str) -> list[str]:
    """Return the Python command that runs the package ``inside`` from ``folder``. The command then
    removes the folder from the import path, so that the program can't import from it.
    """
    # Python starts in a third of the time without installed packages' .pth files, such as those of
    # editable installs. Garbage collection is off during imports, which create no garbage. This
    # saves another 5 % of the harness's time.
    start = "import gc, sys, site; gc.disable(); site.addpackage = lambda *_: None; site.main(); "
    start += (
        f"sys.path.insert(0, {folder!r}); from inside.main import main; del sys.path[0]; main()"
    )
    return [executable, "-s", "-S", "-P", "-c", start]
