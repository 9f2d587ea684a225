"""Run test files in separate pytest processes, two at a time. Some libraries, such as Triton with
its interpreter, fix their behaviour when they are imported. Another test in the same process may
already have imported them.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from tests.conftest import ROOT

Done = subprocess.CompletedProcess[str]


def run(*arguments: str, **environment: str) -> Done:
    """Run pytest with these arguments and additional environment variables. Even if this process is
    a pytest-xdist worker, the new one is not.
    """
    inherited = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")
    }
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments],
        env={**inherited, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
    )


def side_by_side(
    request: pytest.FixtureRequest, parameter: str, start: Callable[[str], Done]
) -> Iterator[dict[str, Future[Done]]]:
    """Start one run for each value of ``parameter`` used by the selected tests of this module.
    Yield a dictionary from values to runs.
    """
    wanted = [
        item.callspec.params[parameter]
        for item in request.session.items
        if item.parent is request.node
    ]
    with ThreadPoolExecutor(2) as pool:
        yield {value: pool.submit(start, value) for value in wanted}


def passed(done: Done) -> None:
    """Fail with the output of the process unless it ran tests and all of them passed."""
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
