"""Runs the cases of lossless mode, each part in a process of its own, two at a time.

vLLM chooses its model runner and Triton its interpreter when they are imported, which other tests
may have done before.
"""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

pytest.importorskip("vllm.version")
FOLDER = Path(__file__).parent
PARTS = {
    "distribution": ("lossless_cases.py", "distribution"),
    "64_ragged": ("lossless_cases.py", "64_ragged"),
    "greedy_tokens_are": ("lossless_cases.py", "greedy_tokens_are"),
    "cases": ("lossless_cases.py", "not (distribution or 64_ragged or greedy_tokens_are)"),
    "life": ("lossless_life_cases.py", ""),
    "reference": ("lossless_reference_cases.py", ""),
    "draft_weights": ("draft_weights_cases.py", ""),
    "audit": ("audit_cases.py", ""),
    "selfcheck": ("selfcheck_cases.py", ""),
}


def run(part):
    file, names = PARTS[part]
    # The process is no worker of pytest-xdist, and the limits of one do not hold in it.
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-k", names, str(FOLDER / file)],
        env={**environment, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"},
        cwd=FOLDER.parents[1],
        capture_output=True,
        text=True,
    )


@pytest.fixture(scope="module")
def runs(request):
    """What becomes of each part that was asked for."""
    wanted = [
        item.callspec.params["part"]
        for item in request.session.items
        if item.parent is request.node
    ]
    with ThreadPoolExecutor(2) as pool:
        yield {part: pool.submit(run, part) for part in wanted}


@pytest.mark.parametrize("part", PARTS)
def test_lossless_mode(runs, part):
    done = runs[part].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
