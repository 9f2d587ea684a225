"""Test that control groups are found if available, limit programs from the start, and are removed
with their contents. Writing limits is tested on a copy of the kernel's file layout. If this process
may create groups, the tests also enter, kill and remove real ones. If real groups may limit memory
and tasks, the effects of these limits are tested too.
"""

import errno
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from sparrow.rewards import CodeVerifier, Limits
from sparrow.rewards.sandbox import box, cgroup

ONE = {"inputs": ["1"], "outputs": ["1"]}


def layout(tmp_path, monkeypatch, controllers, own="/trainer"):
    """Create a root with these controllers enabled for its groups, and a group ``trainer`` in it."""
    root = tmp_path / "root"
    (root / "trainer").mkdir(parents=True)
    (root / "cgroup.subtree_control").write_text(controllers)
    (tmp_path / "cgroup").write_text(f"4:memory:/old\n0::{own}\n")
    (tmp_path / "mounts").write_text(f"31 30 0:26 / {root} rw shared:4 - cgroup2 cgroup2 rw\n")
    names = {"/proc/self/cgroup": tmp_path / "cgroup", "/proc/self/mountinfo": tmp_path / "mounts"}
    real = cgroup._lines
    monkeypatch.setattr(cgroup, "_lines", lambda path: real(names.get(str(path), path)))
    cgroup.parent.cache_clear()
    monkeypatch.setattr(
        cgroup.os, "rmdir", lambda path: subprocess.run(["rm", "-r", path], check=True)
    )
    return root


@pytest.fixture(autouse=True)
def anew():
    caches = cgroup.parent, box._announce
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def test_groups_are_created_beside_the_trainers_group_if_both_controllers_exist(
    tmp_path, monkeypatch
):
    root = layout(tmp_path, monkeypatch, "cpu memory pids\n")
    assert cgroup.parent() == root and sorted(path.name for path in root.iterdir()) == [
        "cgroup.subtree_control",
        "trainer",
    ]


@pytest.mark.parametrize("controllers", ["", "memory", "pids cpu"])
def test_no_groups_are_created_unless_both_controllers_exist(controllers, tmp_path, monkeypatch):
    layout(tmp_path, monkeypatch, controllers)
    assert cgroup.parent() is None


def test_groups_that_cannot_be_entered_are_not_used(tmp_path, monkeypatch):
    root = layout(tmp_path, monkeypatch, "memory pids")
    monkeypatch.setattr(
        cgroup,
        "enter",
        lambda group, command: ["/bin/sh", "-c", "echo 0 > /proc/nowhere && exec true"],
    )
    assert cgroup.parent() is None and sorted(p.name for p in root.iterdir() if p.is_dir()) == [
        "trainer"
    ]


def test_no_groups_are_created_without_cgroup_version_2(tmp_path, monkeypatch):
    layout(tmp_path, monkeypatch, "memory pids")
    (tmp_path / "mounts").write_text("31 30 0:26 / /sys/fs/cgroup rw - cgroup cgroup rw,memory\n")
    assert cgroup.parent() is None


def test_group_limits_are_derived_from_the_programs_limits(tmp_path):
    limits = Limits(memory_bytes=1 << 30, files_bytes=64 << 20, output_bytes=8 << 20, tasks=100)
    made = cgroup.make(tmp_path, limits)
    assert (made / "pids.max").read_text() == "116"
    assert (made / "memory.max").read_text() == str((1024 + 64 + 24 + 128) << 20)


def test_a_sandbox_runs_in_a_group_and_removes_the_group_afterwards(
    tmp_path, monkeypatch, mode, caplog
):
    root = layout(tmp_path, monkeypatch, "memory pids")
    seen = []
    real = cgroup.remove

    def remove(group):
        seen.append(
            (group / "cgroup.procs").read_text() if (group / "cgroup.procs").exists() else ""
        )
        real(group)

    monkeypatch.setattr(cgroup, "remove", remove)
    with caplog.at_level("INFO"):
        box._announce.cache_clear()
        assert CodeVerifier(isolation=mode).judge("print(1)", ONE).passed
    assert seen == ["0\n", "0\n"] and sorted(p.name for p in root.iterdir() if p.is_dir()) == [
        "trainer"
    ]
    assert "control groups (each in its own)" in caplog.text


def test_busy_group_that_cannot_be_removed_is_logged_without_raising(tmp_path, monkeypatch, caplog):
    def busy(path):
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(cgroup.os, "rmdir", busy)
    monkeypatch.setattr(cgroup, "_REMOVAL_S", 0.02)
    cgroup.remove(tmp_path)
    assert f"the control group {tmp_path} cannot be removed" in caplog.text


def _writable() -> list[Path]:
    mounts = [
        line.split()[4] for line in cgroup._lines("/proc/self/mountinfo") if " - cgroup2 " in line
    ]
    return [Path(mount) for mount in mounts if os.access(mount, os.W_OK) and os.geteuid() == 0]


@pytest.mark.parametrize("mount", _writable(), ids=str)
def test_removing_a_real_group_kills_its_processes(mount):
    group = mount / f"sparrow-test-{os.getpid()}"
    group.mkdir()
    process = subprocess.Popen(cgroup.enter(group, ["sh", "-c", "sleep 60 & sleep 60"]))
    try:
        deadline = time.monotonic() + 20
        while len((group / "cgroup.procs").read_text().split()) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        cgroup.remove(group)
    assert process.wait(10) == -9 and not group.exists()


@pytest.fixture
def kernel_s() -> Path:
    """Return the group in which this process may create groups that limit memory and tasks."""
    if (group := cgroup.parent()) is None:
        pytest.skip("this process cannot create control groups of version 2 with memory and pids")
    return group


def test_kernel_enforces_a_groups_task_limit(kernel_s):
    group = cgroup.make(kernel_s, Limits(tasks=10))
    forks = "for i in $(seq 40); do sleep 60 & done; wait"
    with subprocess.Popen(
        cgroup.enter(group, ["sh", "-c", forks]), stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            assert "fork" in process.stderr.readline()
            assert (group / "pids.max").read_text() == "26\n"
            assert int((group / "pids.current").read_text()) <= 26
        finally:
            cgroup.remove(group)
    assert not group.exists()


def test_kernel_enforces_a_groups_memory_limit(kernel_s, monkeypatch):
    monkeypatch.setattr(cgroup, "_HARNESS_BYTES", 0)
    group = cgroup.make(kernel_s, Limits(memory_bytes=64 << 20, files_bytes=1, output_bytes=1))
    try:
        for size, status in ((16, 0), (256, -9)):
            program = [sys.executable, "-S", "-c", f"bytearray(b'x') * ({size} << 20)"]
            assert subprocess.run(cgroup.enter(group, program)).returncode == status
        assert "oom_kill 1\n" in (group / "memory.events").read_text()
    finally:
        cgroup.remove(group)


def test_exceeding_a_groups_memory_limit_does_not_affect_the_next_program(
    kernel_s, monkeypatch, mode
):
    """The group's limit is lower than the limit on the address space, which would otherwise take
    effect first.
    """
    monkeypatch.setattr(cgroup, "_HARNESS_BYTES", -(1 << 30) + (64 << 20))
    before = sorted(path.name for path in kernel_s.iterdir() if path.is_dir())
    verifier = CodeVerifier(Limits(memory_bytes=1 << 30, files_bytes=16 << 20), mode)
    for tests in (ONE, {"fn_name": "f", "inputs": [[1]], "outputs": [1]}):
        judged = verifier.judge(
            "x = bytearray(b'x') * (600 << 20)\nprint(1)\ndef f(n): return n", tests
        )
        assert judged.verdicts[0] in ("memory", "error", "timeout"), judged
        assert verifier.judge("print(1)\ndef f(n): return n", tests).passed
    assert sorted(path.name for path in kernel_s.iterdir() if path.is_dir()) == before
