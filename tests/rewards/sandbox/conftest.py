"""Fixtures for the isolation mechanisms that the sandbox tests require. This folder is a package so
that its ``conftest`` cannot be confused with the one in the parent folder, from which other tests
import.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from harness import require


@pytest.fixture(params=["bwrap", "session"])
def mode(request) -> str:
    require(request.param)
    return request.param


@pytest.fixture
def bwrap() -> None:
    require("bwrap")
