"""Finds relative budgets of layers and kv heads, as some need more pages than others.

Pages are given out a few at a time, each time where they reduce the unread attention mass most.
Mass is weighted by the acceptance that is lost if only its layer is sparse (docs/calibration.md).

Shapes: L sparse layers, K kv heads, C cells (layers, or kv heads of layers), U numbers of units of
pages: 1, 2, ....
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparrow.calibrate.trajectories import Trajectories
from sparrow.errors import ConfigError
from sparrow.mismatch.tokens import flatten
from sparrow.rollout import Sampling
from sparrow.schedule import LARGEST_BUDGET, SparsitySchedule

if TYPE_CHECKING:
    from sparrow.engines.hf import HFEngine

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
By = Literal["layers", "heads"]
UNITS = 16  # units of pages in the mean budget
# Every layer counts as losing at least this share of what the most sensitive layer loses.
LEAST = 0.01


def greedy(missed_CU: Floats, units: int) -> Ints:
    """Divide ``units`` among the cells, at least one each: every next unit goes where it reduces
    the unread mass most.

    If several cells gain the same, it goes to the one with the fewest units.
    """
    given = np.ones(len(missed_CU), np.int64)
    gains = np.append(
        missed_CU[:, :-1] - missed_CU[:, 1:], np.full((len(missed_CU), 1), -np.inf), axis=1
    )
    for _ in range(units - len(given)):
        next_C = gains[np.arange(len(given)), given - 1]
        given[np.where(next_C == next_C.max(), given, gains.shape[1] + 1).argmin()] += 1
    return given


def weights(missed_LKU: Floats, lost_L: Floats, at: int) -> Floats:
    """Return the acceptance lost per attention mass that a layer's heads leave unread; ``lost_L``
    was measured at ``at`` units.
    """
    mass = missed_LKU[..., at - 1].mean(1)
    return lost_L / np.maximum(mass, np.finfo(float).tiny)


def divided(missed_LKU: Floats, weight_L: Floats, by: By, units: float) -> Ints:
    """Divide units among layers or kv heads, ``units`` on average, by the weighted mass that they
    leave unread; returns ``[L, K]``.
    """
    L, K, _ = missed_LKU.shape
    weighted = missed_LKU * weight_L[:, None, None]
    if by == "layers":
        return greedy(weighted.mean(1), int(L * units))[:, None].repeat(K, 1)
    return greedy(weighted.reshape(L * K, -1), int(L * K * units)).reshape(L, K)


def find(
    engine: HFEngine,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    folder: Path,
    layout: SparsitySchedule,
    by: By,
    top_k: int,
    made_by: dict[str, Any] | None = None,
    listener: Callable[[str], None] = lambda phase: None,
) -> SparsitySchedule:
    """Find budgets for the sparse layers of ``layout``, on dense responses to these prompts;
    returns the layout with them.

    Takes one pass over the responses for each sparse layer, and four more.

    Args:
        engine, prompts, sampling, folder, made_by: see ``Trajectories``.
        layout: says which layers are sparse.
        by: "layers" gives all heads of a layer the same budget, "heads" does not.
        top_k: the mean number of pages by score at which the budgets are found.
        listener: called at the start of every pass with its name.

    Raises ConfigError: the layout has no sparse layer or has budgets already, or ``top_k`` is less
    than ``UNITS``; no layer loses acceptance; or the budgets do not raise p5 at ``top_k``, which
    happens if a layer's loss does not follow its unread mass.
    """
    layers = engine.model.config.get_text_config().num_hidden_layers
    sparse = [layer for layer in range(layers) if layer not in layout.dense_layers]
    if layout.head_budgets or not sparse or top_k < UNITS:
        raise ConfigError(
            f"budgets are found for a layout without any, with sparse layers, at {UNITS} pages or "
            f"more; got {'' if layout.head_budgets else 'no '}head_budgets, {len(sparse)} sparse "
            f"layers and {top_k} pages"
        )
    unit = top_k // UNITS
    even = layout.replace(top_k=(unit * UNITS,))
    listener(f"head budgets: sampling {len(prompts)} dense responses")
    trajectories = Trajectories(
        engine, engine, prompts, sampling, folder, SparsitySchedule.dense(), made_by
    )

    def acceptance(schedule: SparsitySchedule) -> Floats:
        return flatten(trajectories.acceptance(schedule))[0]

    best = float(flatten(trajectories.ceiling())[0].mean())
    lost = []
    for layer in sparse:
        listener(f"head budgets: scoring with layer {layer} alone sparse")
        others = tuple(other for other in range(layers) if other != layer)
        lost.append(best - float(acceptance(even.replace(dense_layers=others)).mean()))
    if max(lost) <= 0:
        raise ConfigError(
            f"no layer loses acceptance where it alone keeps {unit * UNITS} pages by score, so no "
            "budgets are found; sample longer responses, or try smaller budgets"
        )
    lost_L = np.maximum(lost, LEAST * max(lost))
    listener("head budgets: attention that is left unread")
    longest = max(len(r.prompt_ids) + len(r) for r in trajectories.rollouts) // layout.page_size
    counts = [
        unit * n for n in range(1, min(LARGEST_BUDGET * UNITS, max(UNITS, -(-longest // unit))) + 1)
    ]
    missed_LKU = engine.unread(trajectories.rollouts, layout, counts)[sparse]
    units = divided(missed_LKU, weights(missed_LKU, lost_L, UNITS), by, UNITS)
    table = np.ones((layers, units.shape[1]))
    table[sparse] = units / UNITS
    found = {"by": by, "top_k": unit * UNITS, "lost": [round(x, 5) for x in lost]}
    budgets = tuple(map(tuple, table.tolist()))
    listener("head budgets: scoring with them and without")
    without, uneven = (
        float(np.percentile(acceptance(each), 5))
        for each in (even, even.replace(head_budgets=budgets))
    )
    if uneven <= without:
        raise ConfigError(
            f"with {unit * UNITS} pages kept by score, p5 is {without:.3f} without head_budgets and "
            f"{uneven:.3f} with those found by {by}; leave them out"
        )
    return layout.replace(
        head_budgets=budgets, provenance={**layout.provenance, "head_budgets": found}
    )
