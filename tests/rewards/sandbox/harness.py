"""Run attacks in a judging process, and check that process from outside."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import select
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import psutil
import pytest
from attacks import TESTS, Attack

from sparrow.rewards.sandbox import box
from sparrow.rewards.sandbox.walls import Held

SECRET = "nobody's business"
PATIENCE_S = 90.0  # for one answer; a program may take 15 s, and the machine may be busy
GROWTH_MB = 128.0  # additional memory that the judging process may need for one answer

# Judges each attack that it reads and, at the same time, an honest program.
_JUDGE = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
from sparrow.rewards import CodeVerifier, Limits
from sparrow.rewards.sandbox import walls
walls.ENVIRONMENT["MARK"] = sys.argv[2]
limits = Limits(cpu_s=1, wall_s=1.5, program_s=15, memory_bytes=256 << 20)
attacked = CodeVerifier(limits, sys.argv[1], 1)
honest = CodeVerifier(Limits(cpu_s=20, wall_s=60), sys.argv[1], 1)
pool = ThreadPoolExecutor(1)
def peak():
    fields = dict(line.split(":") for line in open("/proc/self/status"))
    return int(fields["VmHWM"].split()[0]) / 1024
good, tests = "print(int(input()) * 2)", {"inputs": ["21", "4"], "outputs": ["42", "8"]}
honest.judge(good, tests)
print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    open("/proc/self/clear_refs", "w").write("5")
    before = peak()
    neighbour = pool.submit(honest.judge, good, tests)
    try:
        said = attacked.judge(request["code"], request["tests"])
        reply = {"verdicts": said.verdicts, "detail": said.detail}
    except BaseException as error:
        reply = {"raised": f"{type(error).__name__}: {error}"}
    try:
        near = neighbour.result()
        reply["neighbour"] = near.passed or f"{near.verdicts} {near.detail}"
    except BaseException as error:
        reply["neighbour"] = f"{type(error).__name__}: {error}"
    reply["grew_mb"] = peak() - before
    print(json.dumps(reply), flush=True)
"""


def require(held: Held) -> None:
    """Skip the test if this isolation mechanism does not work here. In CI, fail it instead."""
    if (fault := box._fault(box._wall(held))) is not None:
        missing = f"{held} does not work here: {fault}"
        if os.environ.get("CI"):
            pytest.fail(missing)
        pytest.skip(missing)


class Rig:
    """A judging process, and everything outside the sandbox that an attack must not reach.

    Args:
        isolation: how the process confines programs.
    """

    def __init__(self, isolation: str) -> None:
        self.isolation, self.mark = isolation, f"{os.getpid()}-{time.monotonic_ns()}"
        self.folder = Path(tempfile.mkdtemp(prefix="attacked-"))
        self.outside, self.temporary = self.folder / "outside", self.folder / "tmp"
        self.temporary.mkdir()
        os.chmod(self.folder, 0o755)
        (self.temporary / "sparrow-other").mkdir()
        (self.temporary / "sparrow-other" / "secret").write_text(SECRET)
        self.abstract = f"sparrow-{self.mark}"
        self.sockets: list[socket.socket] = []
        self._lay_out()
        self.libc = ctypes.CDLL(None, use_errno=True)
        self.segment = self.libc.shmget(0, 4096, 0o1600)
        self.process: subprocess.Popen[str] | None = None

    def _lay_out(self) -> None:
        """Restore everything outside the sandbox to its original state."""
        for end in self.sockets:
            end.close()
        shutil.rmtree(self.outside, ignore_errors=True)
        self.outside.mkdir()
        secret = self.outside / "secret"
        secret.write_text(SECRET)
        secret.chmod(0o644)
        os.utime(secret, (10**9, 10**9))
        self.sockets = [socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) for _ in range(2)]
        for end, name in zip(
            self.sockets, (str(self.outside / "socket"), f"\0{self.abstract}"), strict=True
        ):
            end.bind(name)
            end.setblocking(False)

    def _start(self) -> subprocess.Popen[str]:
        if self.process is None or self.process.poll() is not None:
            self.process = subprocess.Popen(
                [sys.executable, "-c", _JUDGE, self.isolation, self.mark],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "TMPDIR": str(self.temporary)},
            )
            assert self.process.stdout and self.process.stderr
            if self.process.stdout.readline() != "ready\n":
                raise RuntimeError(self.process.stderr.read())
        return self.process

    def run(self, attack: Attack) -> str | None:
        """Return what the attack achieved, or None if it was contained."""
        process = self._start()
        program = attack.program
        for name, value in (
            ("PARENT", process.pid),
            ("OUTSIDE", self.outside),
            ("SEGMENT", self.segment),
            ("ABSTRACT", self.abstract),
        ):
            program = program.replace(name, str(value))
        assert process.stdin and process.stdout
        process.stdin.write(json.dumps({"code": program, "tests": TESTS[attack.kind]}) + "\n")
        process.stdin.flush()
        began = time.monotonic()
        faults = []
        if not select.select([process.stdout], [], [], PATIENCE_S)[0]:
            faults.append(f"no answer in {PATIENCE_S:g} s")
            self._stop()
        elif not (line := process.stdout.readline()):
            faults.append(f"the judging process ended with status {process.wait()}")
        else:
            faults += self._faults(json.loads(line))
        seconds = time.monotonic() - began
        if seconds > 20:
            faults.append(f"took {seconds:.0f} s")
        return "; ".join([*faults, *self._left()]) or None

    def _faults(self, reply: dict[str, Any]) -> list[str]:
        faults = []
        if "raised" in reply:
            faults.append(f"raised {reply['raised']}")
        elif "pass" in reply["verdicts"]:
            faults.append("passed")
        elif not set(reply["verdicts"]) <= {"pass", "wrong", "error", "timeout", "memory"}:
            faults.append(f"verdicts {reply['verdicts']}")
        elif len(reply["detail"]) > 2000:
            faults.append(f"a detail of {len(reply['detail'])} characters")
        if reply["neighbour"] is not True:
            faults.append(f"the neighbour got {reply['neighbour']}")
        if reply["grew_mb"] > GROWTH_MB:
            faults.append(f"the judging process grew by {reply['grew_mb']:.0f} MB")
        return faults

    def _left(self) -> list[str]:
        """Return what an attack left behind or changed."""
        faults = []
        deadline = time.monotonic() + 60
        while (alive := self._alive()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for process in alive:
            faults.append(f"left a process: {process.cmdline()[:3]}")
            process.kill()
        secret = self.outside / "secret"
        if sorted(os.listdir(self.outside)) != ["secret", "socket"] or secret.read_text() != SECRET:
            faults.append(f"changed files outside: {os.listdir(self.outside)}")
        else:
            found = secret.stat()
            if (found.st_mode & 0o777, found.st_uid, found.st_mtime) != (0o644, os.getuid(), 10**9):
                faults.append("changed a file's mode, owner or time outside")
            if os.listxattr(secret):
                faults.append("changed a file's attributes outside")
        for end in self.sockets:
            with contextlib.suppress(BlockingIOError):
                faults.append(f"reached a Unix socket: {end.recv(100)!r}")
        if self.libc.shmctl(self.segment, 2, ctypes.create_string_buffer(256)):
            faults.append("removed a shared memory segment")
            self.segment = self.libc.shmget(0, 4096, 0o1600)
        for path in self.temporary.iterdir():
            if path.name != "sparrow-other":
                faults.append(f"left {path.name}")
                subprocess.run(["chattr", "-R", "-i", path], capture_output=True)
                subprocess.run(["rm", "-rf", path], check=True)
        if faults:
            self._lay_out()
        return faults

    def _alive(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if (
                    process.environ().get("MARK") == self.mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
        return found

    def _stop(self) -> None:
        if self.process is not None:
            with self.process:
                self.process.kill()
            self.process = None

    def close(self) -> None:
        """Stop the judging process and remove its files."""
        self._stop()
        self._left()
        for end in self.sockets:
            end.close()
        self.libc.shmctl(self.segment, 0, None)
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def score(attacks: Iterable[Attack], isolation: str) -> dict[str, str]:
    """Return what each uncontained attack achieved, by name."""
    failed = {}
    with Rig(isolation) as rig:
        for attack in attacks:
            if (fault := rig.run(attack)) is not None:
                failed[str(attack)] = fault
                print(f"{isolation}  {attack}  {fault}", flush=True)
    return failed
