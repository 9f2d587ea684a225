"""Test that programs that attack the sandbox, the harness or the machine don't escape, don't pass,
and leave nothing behind.
"""

import contextlib
import gc
import json
import math
import os
import platform
import re
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import textwrap
import time
import venv
from pathlib import Path

import psutil
import pytest
from harness import require
from hypothesis import given
from hypothesis import strategies as st

from sparrow.errors import RewardError
from sparrow.rewards import CodeVerifier, Limits
from sparrow.rewards.sandbox import (
    ChildEndedError,
    ChildTimeoutError,
    Sandbox,
    box,
    choose_isolation,
    pack,
    unpack,
    walls,
)
from sparrow.rewards.sandbox.inside import programs, watch
from sparrow.rewards.sandbox.seccomp import packed_filter, program_filter

LIMITS = Limits(
    cpu_s=1,
    wall_s=4.0,
    program_s=60,
    memory_bytes=256 << 20,
    output_bytes=1 << 20,
    files_bytes=8 << 20,
)
DOUBLE = {"inputs": ["21\n", "4\n"], "outputs": ["42\n", "8\n"]}
GOOD = "print(int(input()) * 2)"
SECRET = "the parent's secret"

# name -> program and acceptable verdicts; PARENT is replaced with the parent's process id
HOSTILE = {
    "fork bomb": ("import os\nwhile True: os.fork()", {"error"}),
    "fork bomb in assembly's place": (
        f"import ctypes\nwhile True: ctypes.CDLL(None).syscall({56 if platform.machine() == 'x86_64' else 220}, 17)",
        {"timeout"},
    ),
    "thread bomb": (
        "import threading, time\nwhile True: threading.Thread(target=time.sleep, args=(999,), daemon=True).start()",
        {"error", "memory", "timeout"},
    ),
    "memory bomb": ("x = [0]\nwhile True: x += x", {"memory", "timeout"}),
    "memory bomb at once": ("bytearray(10**11)", {"memory"}),
    "memory bomb in shared memory": (
        "import mmap\nkept = []\nwhile True:\n m = mmap.mmap(-1, 1 << 24); m.write(b'x' * (1 << 24)); kept.append(m)",
        {"error", "memory", "timeout"},
    ),
    "memory bomb out of memfd": (
        "import os\nfd = os.memfd_create('x')\nos.write(fd, b'x' * 100)",
        {"error"},
    ),
    "endless output": ("while True: print('x' * 1000)", {"error"}),
    "endless output that catches the refusal": (
        "while True:\n try: print('x' * 1000)\n except BaseException: pass",
        {"timeout"},
    ),
    "endless errors": ("import sys\nwhile True: sys.stderr.write('x' * 1000)", {"error"}),
    "endless loop": ("while True: pass", {"timeout"}),
    "endless loop in C": ("10 ** 10 ** 10", {"timeout", "memory"}),
    "loop that ignores signals": (
        "import signal, resource\nfor s in range(1, 65):\n try: signal.signal(s, signal.SIG_IGN)\n"
        " except (OSError, ValueError): pass\nresource.setrlimit(resource.RLIMIT_CPU, (2, 2))\nwhile True: pass",
        {"timeout"},
    ),
    "sleeps": ("import time; time.sleep(999)", {"timeout"}),
    "stops itself": ("import os, signal; os.kill(os.getpid(), signal.SIGSTOP)", {"timeout"}),
    "child that outlives its parent": (
        "import subprocess; subprocess.Popen(['sleep', '999'])",
        {"error"},
    ),
    "child through the shell": ("import os; os.system('setsid sleep 999 &')", {"wrong"}),
    "daemon": (
        "import os\nif os.fork(): os._exit(0)\nos.setsid()\nimport time; time.sleep(999)",
        {"error"},
    ),
    "multiprocessing": (
        "import multiprocessing, time\nmultiprocessing.Process(target=time.sleep, args=(999,)).start()",
        {"error"},
    ),
    "becomes another program": ("import os; os.execv('/bin/sleep', ['sleep', '999'])", {"error"}),
    "new session": ("import os; os.setsid()", {"error"}),
    "socket": ("import socket; socket.socket()", {"error"}),
    "kills its parent": ("import os; os.kill(os.getppid(), 9)", {"error"}),
    "kills everybody": ("import os; os.kill(-1, 9)", {"error"}),
    "kills the trainer": ("import os; os.kill(PARENT, 9)", {"error"}),
    "traces its parent": (
        "import ctypes, os\nif ctypes.CDLL(None).ptrace(16, os.getppid(), 0, 0): raise SystemExit('refused')",
        {"error"},
    ),
    "lowers its parent's limits": (
        "import os, resource; resource.prlimit(os.getppid(), resource.RLIMIT_CPU, (1, 1))",
        {"error"},
    ),
    "new namespaces": (
        "import ctypes\nif ctypes.CDLL(None).unshare(0x10000000): raise SystemExit('refused')",
        {"error"},
    ),
    "exits at once": ("import os; os._exit(0)", {"wrong"}),
    "exits early with 0": ("import sys; sys.exit(0)", {"wrong"}),
    "exits early with 0 after half the answer": ("print(4, end=''); raise SystemExit", {"wrong"}),
    "dies by a signal": ("import ctypes; ctypes.string_at(0)", {"error"}),
    "aborts": ("import os; os.abort()", {"error"}),
    "deep recursion": (
        "import sys\nsys.setrecursionlimit(10**9)\ndef f(): f()\nf()",
        {"memory", "timeout", "error"},
    ),
    "deep recursion in C": (
        "import sys, functools\nsys.setrecursionlimit(10**9)\n@functools.cache\ndef f(n): return f(n + 1)\nf(0)",
        {"memory", "timeout", "error"},
    ),
    "deeply nested source": ("(" * 10**5, {"error", "memory"}),
    "source that is not text": ("\ud800\0", {"error"}),
    "closes everything": ("import os; os.closerange(0, 1024)", {"wrong", "error"}),
    "writes a verdict everywhere": (
        'import os, struct\ntext = b\'{"outcome": "ok"}\'\n'
        "frame = struct.pack('>II', len(text), 3) + text + b'42\\n'\n"
        "for fd in range(3, 1024):\n try: os.write(fd, frame)\n except OSError: pass",
        {"wrong"},
    ),
    "patches the harness": (
        "import os, sys, json\nfor m in list(sys.modules.values()):\n"
        " for name in ('wait', 'same_output', 'finish', 'confine'):\n"
        "  if hasattr(m, name):\n   try: setattr(m, name, lambda *a: {'outcome': 'ok'})\n   except Exception: pass\n"
        "json.dumps = lambda *a: '{}'\nprint(42, file=sys.stderr)",
        {"wrong"},
    ),
    "finds the expected output in memory": (
        "import gc\nkept = [o for o in gc.get_objects() if isinstance(o, dict)]\n"
        "print(*[s for o in kept for s in o.values() if s in ('42\\n', b'42\\n')])",
        {"wrong"},
    ),
}


@pytest.fixture
def marked(monkeypatch):
    """Return a function that waits for this test's sandboxed processes to end, and returns whether
    all of them ended in time.
    """
    mark = f"{os.getpid()}-{time.monotonic_ns()}"
    monkeypatch.setitem(walls.ENVIRONMENT, "MARK", mark)

    def left():
        found = []
        for process in psutil.process_iter():
            try:
                if (
                    process.environ().get("MARK") == mark
                    and process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process.cmdline())
            except psutil.Error:
                pass
        return found

    def gone():
        deadline = time.monotonic() + 60
        while (still := left()) and time.monotonic() < deadline:
            time.sleep(0.02)
        return not still

    return gone


@pytest.mark.slow
@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_program_is_stopped_and_the_next_one_runs(name, mode, marked):
    program, verdicts = HOSTILE[name]
    verifier = CodeVerifier(LIMITS, mode, workers=1)
    judgement = verifier.judge(program.replace("PARENT", str(os.getpid())), DOUBLE)
    assert judgement.verdicts[0] in verdicts, judgement
    assert not judgement.passed
    assert judgement.wall_s < LIMITS.wall_s + 5
    assert marked()
    assert verifier.judge(GOOD, DOUBLE).passed


def test_a_program_sees_only_its_private_environment(bwrap, monkeypatch):
    """A program sees its own environment and an empty, writable, private folder, but no other
    processes and no network.
    """
    monkeypatch.setenv("SECRET", SECRET)
    program = """
        import os, socket
        print(sorted(os.environ))
        print(os.getcwd(), os.listdir("."), os.getuid() in (0, os.stat("/usr").st_uid), socket.gethostname())
        open("/tmp/own", "w").write("kept")
        print(open("own").read(), os.path.exists("/proc/1"), os.listdir("/dev/shm"), os.listdir("/dev/pts"))
    """
    expected = (
        "['HOME', 'LANG', 'OMP_NUM_THREADS', 'OPENBLAS_NUM_THREADS', 'PATH', 'PWD', 'PYTHONHASHSEED']\n"
        "/tmp [] False sandbox\nkept False [] []\n"
    )
    seen = CodeVerifier(LIMITS, "bwrap").judge(
        textwrap.dedent(program), {"inputs": [""], "outputs": [expected]}
    )
    assert seen.passed, seen.detail


def test_programs_cannot_see_each_others_files(mode):
    verifier = CodeVerifier(LIMITS, mode)
    tests = {"inputs": [""], "outputs": ["[]\n"]}
    program = "import os\nprint(os.listdir('.'))\nopen('left', 'w').write('x')"
    assert verifier.judge(program, tests).passed
    assert verifier.judge(program, tests).passed


@pytest.mark.parametrize("parent", ["/tmp", "/dev/shm"])
def test_a_python_environment_below_a_private_folder_is_read_only(bwrap, parent):
    """If the Python environment is below /tmp, programs can read its packages but not change them."""
    if not os.access(parent, os.W_OK):
        pytest.skip(f"{parent} is not writable")
    program = """
        import os, sys, numpy
        print(os.getcwd(), os.listdir("/tmp"), os.listdir("/dev/shm"), os.access(sys.prefix, os.W_OK))
        print(sys.prefix.startswith(("/tmp", "/dev")), numpy.__file__.startswith(sys.prefix))
    """
    folder = Path(tempfile.mkdtemp(prefix="clone-", dir=parent))
    try:
        os.chmod(folder, 0o755)
        venv.create(folder / "venv", symlinks=True)
        packages = next((folder / "venv" / "lib").glob("python*/site-packages"))
        (packages / "numpy.py").write_text("")  # a package that exists only in this environment
        (folder / "secret").write_text(SECRET)
        code = f"""
from sparrow.rewards import CodeVerifier
verifier = CodeVerifier(isolation="bwrap")
print(verifier.judge({textwrap.dedent(program)!r},
    {{"inputs": [""], "outputs": ["/tmp [] [] False\\nFalse True"]}}))
"""
        paths = [str(Path(box.__file__).parents[3]), *filter(None, sys.path)]
        done = subprocess.run(
            [folder / "venv" / "bin" / "python", "-c", code],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        )
    finally:
        shutil.rmtree(folder)
    assert "verdicts=('pass',)" in done.stdout, done.stdout + done.stderr


def test_a_session_removes_its_folder(marked, monkeypatch, tmp_path):
    monkeypatch.setattr(box.tempfile, "tempdir", str(tmp_path))
    program = "import os\nfor i in range(9): os.makedirs(f'{i}/a'); os.symlink('/etc', f'{i}/b')\nprint(42)"
    assert (
        CodeVerifier(LIMITS, "session").judge(program, {"inputs": [""], "outputs": ["42"]}).passed
    )
    assert list(tmp_path.iterdir()) == [] and Path("/etc/passwd").exists()


def test_programs_may_read_or_ignore_huge_input(mode):
    numbers = "1\n" * 5_000_000
    tests = {"inputs": [numbers] * 2, "outputs": ["5000000\n"] * 2}
    verifier = CodeVerifier(Limits(cpu_s=5, wall_s=20), mode)
    assert verifier.judge("import sys; print(sys.stdin.buffer.read().count(b'1'))", tests).passed
    assert verifier.judge("print(5000000)", tests).passed


def test_output_up_to_the_limit_is_accepted(mode):
    tests = {"inputs": [""], "outputs": ["x" * (LIMITS.output_bytes - 1)]}
    verifier = CodeVerifier(LIMITS, mode)
    assert verifier.judge(f"print('x' * {LIMITS.output_bytes - 1})", tests).passed
    longer = verifier.judge(f"print('x' * {LIMITS.output_bytes})", tests)
    assert longer.verdicts == ("error",) and longer.detail == "OSError: [Errno 27] File too large"


def test_honest_programs_in_many_styles_pass(mode):
    verifier = CodeVerifier(Limits(cpu_s=5, wall_s=20), mode)
    for program in (
        "import sys\nfor line in sys.stdin: print(int(line) * 2)",
        "import os\nprint(int(os.read(0, 100)) * 2)",
        "print(int(open(0).read()) * 2); exit()",
        "def main():\n print(int(input()) * 2)\nif __name__ == '__main__': main()",
        "import threading\nthreading.stack_size(1 << 26)\n"
        "threading.Thread(target=lambda: print(int(input()) * 2)).start()",
        "import atexit\natexit.register(lambda: print(int(input()) * 2))",
        "import sys, functools\nsys.setrecursionlimit(10**6)\n"
        "@functools.lru_cache(None)\ndef f(n): return f(n - 1) + 1 if n else 0\n"
        "print(f(20000) - 20000 + int(input()) * 2)",
        "import asyncio\nasync def f(): print(int(input()) * 2)\nasyncio.run(f())",
        "from collections import *\nfrom heapq import *\nimport bisect, itertools, math, random, re, string\n"
        "print(int(input()) * 2)",
    ):
        assert verifier.judge(program, DOUBLE).passed, program


def test_python_starts_normally_but_skips_pth_files(mode):
    """Installed packages add .pth files that run whenever Python starts, which takes 25 ms here.
    Sandboxed programs skip them.
    """
    program = "import sys\nprint(any(p.endswith('-packages') for p in sys.path), quit, help)\n"
    program += (
        "print(sorted(m for m in sys.modules if 'editable' in m or 'distutils' in m), sys.prefix)"
    )
    prefix = walls._place(sys.prefix) if mode == "bwrap" else sys.prefix
    expected = f"True {quit} {help}\n[] {prefix}\n"
    judged = CodeVerifier(LIMITS, mode).judge(program, {"inputs": [""], "outputs": [expected]})
    assert judged.passed, judged.detail


def test_programs_run_with_garbage_collection_on_and_without_unneeded_harness_modules(mode):
    """The harness imports only the modules that a mode needs. It imports them with the garbage
    collector off.
    """
    program = "import gc, sys\nprint(gc.isenabled(), 'inside.exchange' in sys.modules)\n"
    judged = CodeVerifier(LIMITS, mode).judge(program, {"inputs": [""], "outputs": ["True False"]})
    assert judged.passed, judged.detail


def test_the_harness_is_compiled_before_it_becomes_read_only(monkeypatch, tmp_path):
    (tmp_path / "module.py").write_text("x = 1")
    monkeypatch.setattr(walls, "_INSIDE", tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    walls._compile.__wrapped__()
    assert [path.name for path in (tmp_path / "__pycache__").iterdir()] == [
        f"module.{sys.implementation.cache_tag}.pyc"
    ]


def test_string_hashes_are_the_same_in_every_run(mode):
    program = "print(hash('sparrow') % 1000, *{'a', 'b', 'c', 'd', 'e'})"
    verifier = CodeVerifier(LIMITS, mode)
    seen = {verifier.judge(program, {"inputs": [""], "outputs": ["?"]}).detail for _ in range(3)}
    assert len(seen) == 1


@pytest.mark.parametrize(
    "program",
    ["import time\ntime.sleep(999)", "while True: pass", "import os\nos.closerange(0, 99)"],
)
def test_closing_a_sandbox_during_a_run_ends_its_processes(program, mode, marked):
    with Sandbox(
        {"mode": "stdio", "prelude": "", "code": program},
        Limits(wall_s=60, cpu_s=60),
        choose_isolation(mode),
    ) as held:
        held.send({"stdin": ""}, time.monotonic() + 60)
        runs_on = "close" not in program  # this program may already have ended
        with (
            pytest.raises(ChildTimeoutError) if runs_on else contextlib.suppress(ChildTimeoutError)
        ):
            held.receive(time.monotonic() + (0.3 if runs_on else 0))
    assert marked()


def test_programs_end_when_the_trainer_is_killed(mode, marked, tmp_path):
    program = f"""
        import os, tempfile, threading, time
        from sparrow.rewards import CodeVerifier, Limits
        from sparrow.rewards.sandbox import walls
        tempfile.tempdir = {str(tmp_path)!r}
        walls.ENVIRONMENT["MARK"] = {walls.ENVIRONMENT["MARK"]!r}
        verifier = CodeVerifier(Limits(wall_s=60), {mode!r})
        tests = {{"inputs": [""], "outputs": [""]}}
        threading.Thread(target=verifier.judge, args=("import time; time.sleep(999)", tests), daemon=True).start()
        time.sleep(1.5)
        os.kill(os.getpid(), 9)
    """
    run = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], capture_output=True)
    assert run.returncode == -signal.SIGKILL
    assert marked()


def test_timer_that_fires_just_after_the_program_ends_does_not_change_its_outcome(
    monkeypatch, tmp_path
):
    reap = os.wait4

    def slowly(*arguments):
        found = reap(*arguments)
        time.sleep(0.3)  # the alarm fires during this time
        return found

    monkeypatch.setattr(programs.os, "wait4", slowly)
    if (pid := os.fork()) == 0:
        os._exit(0)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    before = signal.getsignal(signal.SIGALRM)
    limits = {
        "wall_s": 0.1,
        "cpu_s": 1,
        "memory_bytes": 1 << 30,
        "files": 9,
        "files_bytes": 1,
        "tasks": 9,
    }
    nothing = {"limits": limits, "folder": str(tmp_path), "own_files": False, "own_tasks": False}
    reply = programs.wait(pid, limits, watch.Watch(nothing))
    signal.signal(signal.SIGALRM, before)
    assert reply == {"outcome": "ok", "detail": ""}


def test_open_files_and_processes_do_not_accumulate(mode, marked):
    verifier = CodeVerifier(LIMITS, mode, workers=1)
    verifier.judge(GOOD, DOUBLE)
    me = psutil.Process()
    gc.collect()  # closes what earlier tests have dropped
    before = me.num_fds(), set(me.children(recursive=True))
    for program in (GOOD, "1/0", "import os; os._exit(1)", "def ("):
        verifier.judge(program, DOUBLE)
        verifier.judge(program, {"fn_name": "f", "inputs": [[1]], "outputs": [1]})
        verifier.judge(program, {"test": "assert f(1) == 1"})
    # What earlier tests started may end at any time.
    assert me.num_fds() <= before[0] and set(me.children(recursive=True)) <= before[1]
    assert marked()


@pytest.fixture
def forgetful():
    """Forget which isolation works here, so that this test and all later ones detect it again."""
    caches = box._fault, box._wall, box._announce
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


@pytest.mark.parametrize("isolation", ["auto", "bwrap"])
def test_without_bubblewrap_nothing_runs_unless_explicitly_allowed(
    isolation, forgetful, monkeypatch, caplog
):
    monkeypatch.setattr(box.shutil, "which", lambda name: None)
    with pytest.raises(
        RewardError,
        match=r"must run in bubblewrap, .*: bubblewrap is not installed; install bubblewrap \(apt install "
        r"bubblewrap, .*isolation='session' \(Landlock, weaker\) or isolation='none' \(no protection",
    ):
        CodeVerifier(LIMITS, isolation).judge(GOOD, DOUBLE)
    assert caplog.text == ""


def test_session_isolation_requires_landlock_version_3(forgetful, monkeypatch):
    monkeypatch.setattr(box, "landlock_version", lambda: 2)
    with pytest.raises(
        RewardError,
        match=r"Landlock cannot confine .* version 2 of Landlock, but Sparrow needs version 3 .* "
        "or later; install",
    ):
        CodeVerifier(LIMITS, "session").judge(GOOD, DOUBLE)


def test_explicitly_running_without_isolation_logs_one_warning(forgetful, caplog, tmp_path):
    (tmp_path / "secret").write_text(SECRET)
    verifier = CodeVerifier(LIMITS, "none")
    program = f"print(open('{tmp_path}/secret').read())"
    assert verifier.judge(program, {"inputs": [""], "outputs": [SECRET]}).passed
    assert "GENERATED PROGRAMS RUN WITHOUT ISOLATION, because isolation is 'none'" in caplog.text
    verifier.judge(GOOD, DOUBLE)
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("held", "said"),
    [
        (
            "bwrap",
            r"confined by bubblewrap. Their limits: tasks \(counted by the kernel\); .* \(a separate file system",
        ),
        (
            "session",
            r"confined by Landlock. Their limits: tasks \(counted by a watcher\); .* files \(counted by a watcher",
        ),
    ],
)
def test_the_enforced_limits_are_logged_at_start(held, said, forgetful, caplog):
    require(held)
    with caplog.at_level("INFO"):
        choose_isolation(held)
        choose_isolation(held)
    (record,) = [record for record in caplog.records if "confined by" in record.message]
    assert re.search(said, record.message)


def test_broken_bubblewrap_raises_an_error(forgetful, monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for isolation in ("auto", "bwrap"):
        with pytest.raises(RewardError, match="No permissions to create new namespace"):
            choose_isolation(isolation)


def test_a_missing_isolation_mechanism_fails_the_tests_in_ci(forgetful, monkeypatch):
    monkeypatch.setattr(box.shutil, "which", lambda name: None)
    monkeypatch.setenv("CI", "true")
    with pytest.raises(
        pytest.fail.Exception, match="bwrap does not work here: bubblewrap is not installed"
    ):
        require("bwrap")
    monkeypatch.delenv("CI")
    with pytest.raises(pytest.skip.Exception):
        require("bwrap")


def test_invalid_replies_from_a_sandbox_raise_errors(monkeypatch):
    for reply, message in (
        (b"\xff" * 1001, "over the limit"),
        (b"{\n", "not JSON"),
        (b"\xff\n", "not JSON"),
        (b"[]\n", "not an object"),
        (b"[" * 900 + b"\n", "nested 900 levels deep, over the limit of 200"),
        (b"{}", "ended with status"),
    ):
        held = Sandbox({"mode": "stdio", "prelude": "", "code": ""}, LIMITS, "session")
        read, write = os.pipe()
        os.write(write, reply)
        os.close(write)
        held._output = read
        with pytest.raises(ChildEndedError, match=message):
            held.receive(time.monotonic() + 5, 1000)
        held.close()
        os.close(read)


@pytest.mark.parametrize(
    "limits",
    [
        {"cpu_s": 0},
        {"wall_s": -1.0},
        {"memory_bytes": 0},
        {"program_s": math.inf},
        {"wall_s": math.nan},
    ],
)
def test_limits_must_be_positive_and_finite(limits):
    (name,) = limits
    with pytest.raises(ValueError, match=f"limits must be positive and finite, got {name}="):
        Limits(**limits)


def test_unknown_isolation_raises_an_error():
    with pytest.raises(
        ValueError, match="isolation must be auto, bwrap, session or none, got 'docker'"
    ):
        choose_isolation("docker")


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_the_system_call_filter_is_a_valid_program_on_both_architectures(machine, monkeypatch):
    """As the kernel requires, jumps must stay inside the program, and the last instruction must
    return. Verdicts are checked by interpreting the program.
    """
    monkeypatch.setattr(platform, "machine", lambda: machine)
    code = program_filter()
    assert all(
        i + 1 + max(t, f) < len(code)
        for i, (op, t, f, _) in enumerate(code)
        if op in (0x15, 0x35, 0x45)
    )
    arch = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}[machine]
    number = {
        "x86_64": dict(
            read=0, clone=56, clone3=435, kill=62, socket=41, execve=59, mmap=9, prlimit64=302
        ),
        "aarch64": dict(
            read=63,
            clone=220,
            clone3=435,
            kill=129,
            socket=198,
            execve=221,
            mmap=222,
            prlimit64=261,
        ),
    }[machine]
    allow, refuse, kill = 0x7FFF0000, 0x00050001, 0x80000000

    def run(call, argument=0, arch=arch):
        data, at, a = {0: number.get(call, call), 4: arch, 16: argument}, 0, 0
        while True:
            op, t, f, k = code[at]
            k = 1234 if k == "pid" else k
            at += 1
            if op == 0x20:
                a = data[k]
            elif op == 0x06:
                return k
            else:
                at += t if {0x15: a == k, 0x35: a >= k, 0x45: bool(a & k)}[op] else f

    assert run("read") == run("mmap") == allow
    assert run("socket") == run("execve") == refuse
    assert run("clone", 17) == refuse and run("clone", 0x3D0F00) == allow
    assert run("clone3") == 0x00050026
    assert run("kill", 1234) == allow and run("kill", 1233) == run("kill", 0xFFFFFFFF) == refuse
    assert run("prlimit64", 0) == run("prlimit64", 1234) == allow and run("prlimit64", 7) == refuse
    assert run("read", arch=0x40000003) == kill
    assert run(0x40000000 + 57) == kill
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(RewardError, match="not on 'riscv64'"):
        program_filter()


def test_the_packed_filter_has_placeholders_for_the_process_id():
    packed, own_ids = packed_filter()
    assert list(struct.iter_unpack("HBBI", bytes.fromhex(packed))) == [
        (*rest, 0 if constant == "pid" else constant) for *rest, constant in program_filter()
    ]
    numbered = [at for at, (*_, constant) in enumerate(program_filter()) if constant == "pid"]
    assert numbered and own_ids == [8 * at + 4 for at in numbered]


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(st.integers() | st.text(), inner)
    ),
    max_leaves=12,
)


@given(VALUES)
def test_values_are_sent_through_the_sandbox_unchanged(value):
    back = unpack(json.loads(json.dumps(pack(value))))
    assert back == value and repr(back) == repr(value)


@given(st.sets(st.integers()) | st.frozensets(st.tuples(st.text(), st.integers())))
def test_sets_are_sent_through_the_sandbox_unchanged(value):
    back = unpack(json.loads(json.dumps(pack(value))))
    assert back == value and type(back) is type(value)


def test_only_plain_values_can_be_sent_through_the_sandbox():
    class Sly(int):
        def __eq__(self, other):
            return True

        __hash__ = int.__hash__

    assert type(unpack(pack(Sly(3)))) is int and unpack(pack(Sly(3))) != 4
    assert unpack(pack(range(3))) == unpack(pack(iter([0, 1, 2]))) == [0, 1, 2]
    with pytest.raises(TypeError, match="type object cannot be compared"):
        pack(object())
    for nonsense in ({"eval": "1"}, {}, {"a": 1, "b": 2}):
        with pytest.raises(ValueError):
            unpack(nonsense)
