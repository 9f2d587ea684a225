"""Search for the cheapest schedule that meets a target. This package exports the search itself,
which is engine-independent; ``run`` applies it to an engine's samples, and ``head_budgets`` finds
per-head budgets.
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
