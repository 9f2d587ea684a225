"""Runs the tests of the Triton kernels in Triton's interpreter.

In a process of its own: the interpreter is chosen when triton is imported, which other tests may
have done before.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton")


@pytest.mark.parametrize("name", ["test_kernels.py", "test_forced.py"])
def test_kernels_in_the_interpreter(name):
    tests = Path(__file__).with_name(name)
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "not gpu",
        "-p",
        "no:cacheprovider",
        str(tests),
    ]
    done = subprocess.run(
        command,
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=tests.parents[3],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
