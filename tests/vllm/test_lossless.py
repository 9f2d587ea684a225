"""Runs the cases of lossless mode, each part in a process of its own.

vLLM chooses its model runner and Triton its interpreter when they are imported, which other tests may have done before.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm.version")
CASES = Path(__file__).with_name("lossless_cases.py")
PARTS = ("greedy_tokens_are",)
REST = "not (" + " or ".join(PARTS) + ")"


@pytest.mark.parametrize("part", [*PARTS, REST])
def test_lossless_mode(part):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", part, str(CASES)],
        env={**os.environ, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"},
        cwd=CASES.parents[2], capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
