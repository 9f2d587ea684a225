"""The walls that the sandbox's tests ask for."""

import pytest
from harness import require


@pytest.fixture(params=["bwrap", "session"])
def mode(request) -> str:
    require(request.param)
    return request.param


@pytest.fixture
def bwrap() -> None:
    require("bwrap")
