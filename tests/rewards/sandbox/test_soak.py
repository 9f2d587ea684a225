"""Test a short run of ``benchmarks/sandbox.py``, where attacks and honest programs run side by
side.
"""

import json
import mmap
import os
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparrow.rewards import Judgement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[3]


def test_honest_programs_are_judged_correctly_while_attacks_run_and_nothing_remains(
    tmp_path, bwrap
):
    command = [
        sys.executable,
        ROOT / "benchmarks" / "sandbox.py",
        "--programs",
        "80",
        "--workers",
        "4",
        "--honest",
        "4",
        "--rounds",
        "3",
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--out", tmp_path / "out.json"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    mixed = result["mixed"]
    assert (
        mixed["programs"] == 80
        and mixed["unexpected"] == []
        and sum(mixed["verdicts"].values()) == 80
    )
    assert mixed["verdicts"]["pass"] > 20
    honest = result["honest"]
    assert (honest["programs"], honest["rounds"], honest["unexpected"]) == (4, 3, [])
    rate = honest["programs_per_minute"]
    assert 0 < rate["least"] <= rate["median"] <= rate["most"]
    assert max(mixed["rss_mb"]) - mixed["rss_mb"][0] < 32 and mixed["grew_mb"] <= 8
    for name in (
        "file_descriptors",
        "threads",
        "children",
        "sandboxed_processes",
        "temporary_files",
    ):
        assert result["after"][name] <= result["before"][name], name


@pytest.mark.parametrize(("leak_bytes", "flat"), [(0, True), (100_000, False)])
def test_the_soak_test_detects_a_memory_leak(leak_bytes, flat, monkeypatch):
    """A leak of 0.1 MB per program must be detected after 400 programs."""
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    benchmark = runpy.run_path(str(ROOT / "benchmarks" / "sandbox.py"))
    kept = []

    def judge(program, tests):
        if leak_bytes:
            kept.append(
                mmap.mmap(-1, leak_bytes)
            )  # allocates new pages, because the heap may have free memory from earlier tests
            kept[-1].write(b"x" * leak_bytes)
        return Judgement(("pass",), 1, "", 0.01)

    found = benchmark["soak"](SimpleNamespace(workers=2, judge=judge), [("", {}, "pass")] * 400)
    assert (found["grew_mb"] <= benchmark["FLAT_MB"]) == flat and found["unexpected"] == []
