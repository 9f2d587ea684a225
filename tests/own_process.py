"""Runs test files in pytest processes of their own, two at a time.

For tests whose libraries choose something when they are imported, such as Triton its interpreter,
which other tests may have done before.
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
    """Run pytest with these arguments and further variables.

    The process is no worker of pytest-xdist, and the limits of one do not hold in it.
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
    """Yield the runs of all values of ``parameter`` that tests of this module were asked for."""
    wanted = [
        item.callspec.params[parameter]
        for item in request.session.items
        if item.parent is request.node
    ]
    with ThreadPoolExecutor(2) as pool:
        yield {value: pool.submit(start, value) for value in wanted}


def passed(done: Done) -> None:
    """Fail with the process's output unless its tests passed, and there were some."""
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
