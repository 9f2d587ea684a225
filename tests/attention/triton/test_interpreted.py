"""Runs the tests of the Triton kernels in Triton's interpreter.

In a process of its own: the interpreter is chosen when triton is imported, which other tests may
have done before.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("triton")


FOLDER = Path(__file__).parent
FILES = ("test_kernels.py", "test_forced.py")


def run(name):
    arguments = ["-m", "not gpu", "-p", "no:cacheprovider", str(FOLDER / name)]
    return subprocess.run(
        [sys.executable, "-m", "pytest", *arguments],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        cwd=FOLDER.parents[2],
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def runs(request):
    """What becomes of each file that was asked for; they run side by side."""
    wanted = [
        item.callspec.params["name"]
        for item in request.session.items
        if item.parent is request.node
    ]
    with ThreadPoolExecutor(2) as pool:
        yield {name: pool.submit(run, name) for name in wanted}


@pytest.mark.parametrize("name", FILES)
def test_kernels_in_the_interpreter(runs, name):
    done = runs[name].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
