"""The table of decode steps measured by ``benchmarks/mixed_attention.py``."""

from __future__ import annotations

from typing import Any

import predicted
from common import RESULTS, Row, interval, read_result, table
from mixed_attention import SHAPES, cost_shape, ratios, with_interval

from sparrow import SparsitySchedule
from sparrow.cost import decode_step


def results() -> list[dict[str, Any]]:
    """Return the results of all shapes that have been measured."""
    paths = [RESULTS / f"mixed_attention_{shape}.json" for shape in SHAPES]
    return [read_result(path) for path in paths if path.exists()]


def prediction(result: Row, point: Row) -> float:
    """Return how fast the cost model expects lossy mode to be, relative to dense decoding."""
    model = cost_shape(result["shape"], result["layers"])
    state = model, predicted.MACHINE, [round(point["length"])] * point["sequences"]
    schedule = SparsitySchedule.load(result["schedule"])
    dense, lossy = (decode_step(*state, each, predicted.OVERHEADS) for each in (None, schedule))
    return dense.seconds / lossy.seconds


def mixed_attention() -> str:
    """Return a table with one row per point: the ms per decode step in both engines, and their
    ratio, after what the cost model predicts.
    """
    rows = []
    for result in results():
        model = cost_shape(result["shape"], result["layers"])
        is_covered = predicted.MACHINE.name in result["machine"]
        for point in result["points"]:
            ms = [interval(with_interval(point["ms"][arm]), 2) for arm in ("stock", "lossy")]
            rows.append(
                [
                    model.name,
                    f"{model.full_layers} of {model.layers}",
                    f"{point['sequences']} x {point['length']:,.0f}",
                    *ms,
                    f"{prediction(result, point):.2f}" if is_covered else "",
                    interval(with_interval(ratios(point)), 2),
                ]
            )
    head = ["shape", "layers with full attention", "sequences x tokens"]
    head += ["stock, ms per step", "lossy, ms per step", "stock / lossy: predicted", "measured"]
    return table(head, rows) if rows else ""


TABLES = {"mixed attention": mixed_attention}
