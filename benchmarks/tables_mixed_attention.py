"""The table of decode steps measured by ``benchmarks/mixed_attention.py``."""

from __future__ import annotations

from typing import Any

import numpy as np
import predicted
from common import RESULTS, Row, interval, read_result, table
from mixed_attention import SHAPES, cost_shape
from numpy.typing import ArrayLike
from scipy.stats import ttest_1samp

from sparrow import SparsitySchedule
from sparrow.cost import decode_step


def results() -> list[dict[str, Any]]:
    """Return the results of all shapes."""
    return [read_result(RESULTS / f"mixed_attention_{shape}.json") for shape in SHAPES]


def mean_of_pairs(rounds: ArrayLike) -> list[float]:
    """Return the geometric mean of an even number of rounds and its 95 % interval, from Student's t
    over the means of consecutive pairs. In such a pair, each engine goes first once.
    """
    pairs = np.log(rounds).reshape(-1, 2).mean(1)
    ends = ttest_1samp(pairs, 0.0).confidence_interval()
    return np.exp([pairs.mean(), *ends]).tolist()


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
            stock, lossy = (np.array(point["ms"][arm]) for arm in ("stock", "lossy"))
            rows.append(
                [
                    f"{model.name}, {model.layers} layers",
                    model.full_layers,
                    f"{point['sequences']} x {point['length']:,.0f}",
                    interval(mean_of_pairs(stock), 2),
                    interval(mean_of_pairs(lossy), 2),
                    f"{prediction(result, point):.3f}" if is_covered else "",
                    interval(mean_of_pairs(stock / lossy), 3),
                ]
            )
    head = ["shape", "layers with full attention", "sequences x tokens"]
    head += ["stock, ms per step", "lossy, ms per step", "stock / lossy: predicted", "measured"]
    return table(head, rows)


TABLES = {"mixed attention": mixed_attention}
