"""Test the code-RL recipe end to end with a few steps: programs are sampled, run in a sandbox, and
rewarded by their tests.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "recipes" / "code_rl.py"


def test_code_rl_runs_end_to_end(tmp_path):
    small = [
        "--steps",
        "2",
        "--prompts",
        "2",
        "--samples",
        "2",
        "--pretraining",
        "60",
        "--held-out",
        "2",
    ]
    places = ["--folder", str(tmp_path / "run"), "--out", str(tmp_path / "out.json")]
    done = subprocess.run(
        [sys.executable, str(RECIPE), *small, *places], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads((tmp_path / "out.json").read_text())
    assert len(result["passed"]) == 2 and all(0 <= share <= 1 for share in result["passed"])
    assert set(result["held_out"]) == {
        "before, dense",
        "before, sparse",
        "after, dense",
        "after, sparse",
    }
    rows = [
        json.loads(line)
        for line in (tmp_path / "run" / "run" / "rollouts.jsonl").read_text().splitlines()
    ]
    assert any("print(x)" in "".join(row["tokens"]) for row in rows)
