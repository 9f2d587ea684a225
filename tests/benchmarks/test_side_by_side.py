"""Test the comparison of two source trees, each timed by its own code. No GPU is needed."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "side_by_side.py"
KERNELS = """
import itertools, torch
TOKENS, LAYERS, CASES, DENSE = 1, 1, [(1, 2, 3, 4)] * 4, [(5, 6)]
SHAPES = [(128, torch.bfloat16, 16), (80, torch.bfloat16, 16)]
calls = itertools.count()
def us(pool): return TIMES[pool] + (next(calls) % 4 != 2) * 10  # one call in four is 10 us faster
def Pool(tokens, layers, D=128, dtype=None, P=16): return D
class Case:
    def __init__(self, pool, *shape): self.pool, self.top_k = pool, torch.zeros(1)
    def time(self, config, what, top_k=None): return {"us": us(self.pool)}
def ragged(pool, limit): return [dict(shape="small", step=7, B=3, us=us(128))]
"""


def compare(
    tmp_path, old: dict[int, float], new: dict[int, float], *options: str
) -> tuple[int, list[str]]:
    for name, times in (("old", old), ("new", new)):
        (tmp_path / name / "benchmarks").mkdir(parents=True, exist_ok=True)
        module = "kernels.py" if name == "old" else "decode_kernels.py"
        (tmp_path / name / "benchmarks" / module).write_text(f"TIMES = {times}\n{KERNELS}")
    shutil.copy(SCRIPT, tmp_path / "new" / "benchmarks")
    command = [sys.executable, "new/benchmarks/side_by_side.py", "old", "--rounds", "1", *options]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert not done.stderr
    return done.returncode, done.stdout.splitlines()


@pytest.mark.slow
def test_rows_slower_than_allowed_are_marked_and_fail_the_comparison(tmp_path):
    code, lines = compare(tmp_path, {128: 100.0, 80: 100.0}, {128: 103.0, 80: 124.0})
    assert code == 1
    assert [line.endswith("SLOWER") for line in lines] == [True, True, True, True, False]
    assert lines[0].endswith("100.0    103.0 us  1.030  SLOWER") and lines[0].startswith(
        "1 x 2, group 3, 4 pages "
    )
    assert lines[-1].endswith("100.0    124.0 us  1.240") and lines[-1].startswith(
        "Triton, head dim 80, pages of 16, "
    )


@pytest.mark.slow
def test_triton_only_rows_can_be_excluded(tmp_path):
    code, lines = compare(tmp_path, {128: 100.0, 80: 100.0}, {128: 101.0, 80: 200.0}, "--cuda")
    assert code == 0 and len(lines) == 4 and "Triton" not in "".join(lines)


def test_allowed_slowdown_depends_on_the_row_and_unmatched_rows_are_ignored(monkeypatch):
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from side_by_side import slower

    old = {"64 x 15000": 100.0, "Triton, D 80": 100.0}
    assert slower(old, {"64 x 15000": 101.9, "Triton, D 80": 124.9}) == []
    assert slower(old, {"64 x 15000": 102.1, "Triton, D 80": 125.1}) == list(old)
    assert slower(old, {"64 x 15000": 100.0, "another": 1.0}) == []
