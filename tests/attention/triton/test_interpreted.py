"""Run the Triton kernels' tests in Triton's interpreter."""

from pathlib import Path

import pytest

from tests import own_process

pytestmark = pytest.mark.slow

pytest.importorskip("triton")

FOLDER = Path(__file__).parent
FILES = ("test_kernels.py", "test_forced.py", "test_search.py")


def run(name):
    return own_process.run("-m", "not gpu", str(FOLDER / name), TRITON_INTERPRET="1")


@pytest.fixture(scope="module")
def runs(request):
    yield from own_process.side_by_side(request, "name", run)


@pytest.mark.parametrize("name", FILES)
def test_kernel_tests_pass_in_the_interpreter(runs, name):
    own_process.passed(runs[name].result())
