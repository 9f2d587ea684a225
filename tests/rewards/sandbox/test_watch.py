"""Test the limits on a running program's files and tasks, how its files and processes are removed
afterwards, and that a failed start is retried.
"""

import logging
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
from attacks import ATTACKS
from harness import require

from sparrow.errors import RewardError
from sparrow.rewards import CodeVerifier, Limits, sandbox
from sparrow.rewards.sandbox import Sandbox, box, child, files, walls
from sparrow.rewards.sandbox.inside import watch as watch_module
from sparrow.rewards.sandbox.inside.watch import Watch
from sparrow.rewards.sandbox.walls import Wall

FOLDER = Path(sandbox.__file__).parent
ONE = {"inputs": ["1"], "outputs": ["1"]}
CALL = {"fn_name": "f", "inputs": [[1]], "outputs": [1]}


def request(folder, **limits):
    whole = {
        "files": 5,
        "files_bytes": 1 << 20,
        "tasks": 10**6,
        **limits,
    }  # the process that runs the tests has threads
    return {"limits": whole, "folder": str(folder), "own_files": False, "own_tasks": False}


def test_files_folders_and_links_are_counted_at_any_depth(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "c").symlink_to("/")
    (tmp_path / "d").write_text("x")
    assert Watch(request(tmp_path, files=4)).over(os.getpid()) is None
    assert (
        Watch(request(tmp_path, files=3)).over(os.getpid()) == "made more than 3 files and folders"
    )


def test_sparse_files_count_only_the_disk_space_they_use(tmp_path):
    with open(tmp_path / "hole", "wb") as file:
        file.truncate(1 << 30)
    assert Watch(request(tmp_path)).over(os.getpid()) is None
    (tmp_path / "full").write_bytes(bytes(range(256)) * 8192)
    os.sync()
    assert Watch(request(tmp_path)).over(os.getpid()) == "wrote more than 1048576 bytes of files"


def test_threads_are_counted(tmp_path):
    """The threads belong to a separate process, because this one's may start and end at any time."""
    script = """
import threading, time
for _ in range(3): threading.Thread(target=time.sleep, args=(600,)).start()
print("started", flush=True)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline() == b"started\n"
            assert Watch(request(tmp_path, tasks=4)).over(process.pid) is None
            over = Watch(request(tmp_path, tasks=3)).over(process.pid)
            assert over == "made more than 3 tasks"
        finally:
            process.kill()
    assert Watch(request(tmp_path)).over(2**22 + 1) is None  # a process that does not exist


def test_slow_file_check_is_not_repeated_immediately(tmp_path, monkeypatch):
    """A check that takes 0.05 s is repeated after 0.25 s at the earliest."""
    watch = Watch(request(tmp_path))
    clock = SimpleNamespace(now=1000.0)
    looks = []

    def look():
        looks.append(clock.now)
        clock.now += 0.05

    monkeypatch.setattr(watch_module, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(watch, "_files", look)
    for _ in range(40):
        watch.over(os.getpid())
        clock.now += 0.01
    first, second = looks
    assert first == 1000.0 and 0.24 < second - first < 0.27


# These programs wait after their last thread or file, which gives a watcher time to count them. A
# program over its limit waits until it is stopped.
THREADS = """
import threading, time
threading.stack_size(65536)
done = threading.Event()
threads = [threading.Thread(target=done.wait) for _ in range({})]
try:
    for thread in threads: thread.start()
    time.sleep({})
finally: done.set()
"""
FILES = """
import time
for i in range({}): open(str(i), 'w').close()
time.sleep({})
"""


@pytest.mark.parametrize("tests", [ONE, CALL], ids=["stdio", "call"])
def test_a_programs_tasks_and_files_are_limited(tests, mode):
    tail = "print(1)" if tests is ONE else "def f(x): return x"
    verifier = CodeVerifier(Limits(tasks=20, files=30), mode)
    assert verifier.judge(THREADS.format(15, 0.2) + tail, tests).passed
    over = verifier.judge(THREADS.format(60, 60) + tail, tests)
    assert over.verdicts == ("error",)
    assert over.detail in ("RuntimeError: can't start new thread", "made more than 20 tasks")
    assert verifier.judge(FILES.format(25, 0.3) + tail, tests).passed
    assert (
        verifier.judge(FILES.format(60, 60) + tail, tests).detail
        == "made more than 30 files and folders"
    )


def test_each_program_has_a_separate_user_id_if_the_trainer_runs_as_root(bwrap):
    if os.geteuid():
        assert box._wall("bwrap") == Wall("bwrap")
        return
    assert (
        box._wall("bwrap") == Wall("bwrap", own_user=True)
        and Wall("bwrap", own_user=True).counted_by_kernel
    )
    assert not Wall("bwrap").counted_by_kernel and not Wall("session").counted_by_kernel
    seen = [
        CodeVerifier().judge("import os; print(os.getuid(), os.getgid())", ONE).detail
        for _ in range(2)
    ]
    (first,), (second,) = (set(re.search(r"got '(\d+) (\d+)", detail).groups()) for detail in seen)
    assert first != second and min(int(first), int(second)) > 1 << 29


@pytest.mark.parametrize(
    ("ids", "low", "high"),
    [("0 0 4294967295", 1 << 30, 1 << 31), ("0 1000 1\n1 100000 65536", 1 << 15, 65537)],
)
def test_private_user_ids_are_within_the_ranges_mapped_on_this_machine(ids, low, high, monkeypatch):
    monkeypatch.setattr(walls.Path, "read_text", lambda path: ids)
    found = {walls._user_id() for _ in range(1000)}
    assert len(found) == 1000 and low <= min(found) and max(found) < high


def test_files_of_any_kind_are_removed(tmp_path, caplog):
    folder = tmp_path / "left"
    folder.mkdir()
    script = """
import os
os.mkdir("closed", 0); os.mkdir("shut"); open("shut/file", "w").close(); os.chmod("shut", 0)
os.symlink("/", "root"); os.symlink("nowhere", "lost"); open(b"\\xff", "w").close(); os.mkfifo("fifo")
for i in range(3000):
    os.mkdir("d"); open("file", "w").close(); os.symlink("/", "root"); os.chdir("d")
"""
    subprocess.run(
        [sys.executable, "-c", script.replace('os.symlink("/", "root"); os.chdir', "os.chdir")],
        cwd=folder,
    )
    files.remove(str(folder))
    assert list(tmp_path.iterdir()) == [] and Path("/usr").exists() and caplog.text == ""
    files.remove(str(folder))  # already gone


def test_files_that_cannot_be_removed_are_logged_without_raising(tmp_path, caplog, monkeypatch):
    folder = tmp_path / "left"
    (folder / "a").mkdir(parents=True)

    def refuse(path):
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(files.os, "unlink", refuse)
    files.remove(str(folder))
    assert (
        f"a program left {folder}, which cannot be removed: [Errno 1] Operation not permitted"
        in caplog.text
    )


def test_a_failed_start_is_retried(monkeypatch, caplog):
    require("session")  # detecting the isolation takes a start, so do it before starts fail
    real, failures = box.Child.__init__, [BlockingIOError(11, "no process"), MemoryError]

    def start(self, *args, **kwargs):
        if failures[0] is not MemoryError:
            raise failures.pop(0)
        real(self, *args, **kwargs)

    monkeypatch.setattr(box.Child, "__init__", start)
    with caplog.at_level(logging.INFO):
        assert CodeVerifier(isolation="session").judge("print(1)", ONE).passed
    assert "a sandbox did not start ([Errno 11] no process), trying again" in caplog.text
    failures[:] = [BlockingIOError(11, "no process")] * 5
    monkeypatch.setattr(box.time, "sleep", lambda seconds: None)
    with pytest.raises(
        RewardError,
        match=r"did not start \(session\): \[Errno 11\] no process; try again with fewer",
    ):
        Sandbox({"mode": "stdio", "prelude": "", "code": ""}, Limits(), "session")
    assert len(failures) == 1


def test_a_process_group_is_killed_even_if_its_leader_is_dead(monkeypatch):
    """A process that the harness leaves behind is killed with the sandbox."""
    monkeypatch.setattr(child, "_ENDING_S", 60.0)  # the leader may have to wait for a processor
    script = r"""
import os, time
if os.fork(): os._exit(7)
os.write(1, b"%d\n" % os.getpid()); os.close(1); time.sleep(600)
"""
    held = Sandbox({"mode": "stdio", "prelude": "", "code": ""}, Limits(), "session")
    held.close()
    sandbox.Child.__init__(held, [sys.executable, "-c", script])
    left = int(held._read(time.monotonic() + 60) or held._unread)
    os.kill(left, 0)
    with pytest.raises(sandbox.ChildEndedError, match="ended with status 7"):
        held.receive(time.monotonic() + 60) if held._unread.clear() is None else None
    deadline = time.monotonic() + 60
    with suppress(FileNotFoundError, ProcessLookupError):  # it has been reaped
        while "Z" not in Path(f"/proc/{left}/stat").read_text().split()[2]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    held.process.__exit__(None, None, None)


def test_the_example_in_the_readme_runs(bwrap):
    (block,) = re.findall(r"```python\n(.*?)```", (FOLDER / "README.md").read_text(), re.DOTALL)
    exec(block, {})


def test_the_threat_model_names_only_existing_attacks_and_files():
    page, readme = ((FOLDER / name).read_text() for name in ("THREATS.md", "README.md"))
    named = {
        word
        for row in page.split("\n")
        if row.startswith("| ")
        for word in re.findall(r"`([^`]+)`", row)
    }
    assert {attack.group for attack in ATTACKS} - {"answers to assertions"} <= named
    assert f"({len(ATTACKS)} programs)" in page
    for name in re.findall(r"`((?:tests/)?(?:test_)\w+\.py|tests/[\w/]+\.py)`", page):
        assert (Path(__file__).parent / Path(name).name).exists() or (
            FOLDER.parents[2] / name
        ).exists(), name
    for path in FOLDER.rglob("*.py"):
        if path.name != "__init__.py":
            assert f"`{path.relative_to(FOLDER)}`" in readme, path
