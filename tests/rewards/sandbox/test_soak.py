"""The soak of ``benchmarks/sandbox.py`` in short: attacks and honest programs side by side."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_honest_programs_get_their_verdicts_beside_attacks_and_nothing_is_left(tmp_path, bwrap):
    command = [sys.executable, ROOT / "benchmarks" / "sandbox.py", "--programs", "80", "--workers", "4"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--out", tmp_path / "out.json"], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "out.json").read_text())
    mixed = result["mixed"]
    assert mixed["programs"] == 80 and mixed["unexpected"] == [] and sum(mixed["verdicts"].values()) == 80
    assert mixed["verdicts"]["pass"] > 20 and result["honest"]["verdicts"] == {"pass": 8}
    assert max(mixed["rss_mb"]) - mixed["rss_mb"][0] < 32
    for name in ("file_descriptors", "threads", "children", "sandboxed_processes", "temporary_files"):
        assert result["after"][name] <= result["before"][name], name
