"""Search for the cheapest schedule that meets a target. This package exports the search itself,
which does not depend on an engine; ``run`` searches with an engine's samples, and ``head_budgets``
finds a budget for each head.
"""

from typing import TYPE_CHECKING

from sparrow import _moved
from sparrow.calibrate.search import (
    MIN_SEQUENCES,
    Acceptance,
    BinChoice,
    Calibration,
    calibrate,
)

if not TYPE_CHECKING:
    __getattr__ = _moved.attributes_of(__name__)
