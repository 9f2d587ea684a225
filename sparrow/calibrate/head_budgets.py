"""Search for relative budgets per layer or kv head, since some need more pages than others.

Pages are handed out in small units. Each unit goes to the layer or head whose unread attention mass
it reduces the most. A layer's unread mass is weighted by how much acceptance drops when only that
layer is sparse (docs/calibration.md).

Shapes: L sparse layers, K kv heads, C cells (layers, or kv heads of layers), U budgets of 1, 2, ...
units of pages.
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
UNITS = 16  # the mean budget is divided into this many units
# lower limit on a layer's acceptance cost, as a share of the most sensitive layer's cost
LEAST = 0.01


def greedy(missed_CU: Floats, units: int) -> Ints:
    """Divide ``units`` among the cells. Every cell gets one unit. The other units are handed out
    one at a time, and each goes to the cell whose unread mass it reduces the most.

    Ties go to the cell with the fewest units.
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
    """Return each layer's acceptance cost per unit of unread attention mass. The costs ``lost_L``
    were measured with ``at`` units.
    """
    mass = missed_LKU[..., at - 1].mean(1)
    return lost_L / np.maximum(mass, np.finfo(float).tiny)


def divided(missed_LKU: Floats, weight_L: Floats, by: By, units: float) -> Ints:
    """Divide units among layers or kv heads to minimise the weighted unread mass. Return units per
    head, ``[L, K]``, whose mean is ``units``.
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
    """Find budgets for the sparse layers of ``layout`` from dense responses to ``prompts``, and
    return the layout with these budgets.

    The search takes one pass over the responses for each sparse layer, and four additional passes.

    Args:
        engine, prompts, sampling, folder, made_by: see ``Trajectories``.
        layout: says which layers are sparse.
        by: "layers" finds one budget for all heads of a layer; "heads" finds one for each head.
        top_k: optimise the budgets for this mean number of pages kept by score.
        listener: called with the pass name at the start of every pass.

    Raises ConfigError if the layout has no sparse layer or already has budgets, if ``top_k`` is
    less than ``UNITS``, if the model has layers without full attention, or if no layer costs any
    acceptance when it is sparse. Also raises
    ConfigError if the budgets found don't raise p5 at ``top_k``, e.g. because a layer's cost isn't
    proportional to its unread mass.
    """
    engine.check_head_budgets()
    layers = engine.model.config.get_text_config().num_hidden_layers
    sparse = [layer for layer in range(layers) if layer not in layout.dense_layers]
    if layout.head_budgets or not sparse or top_k < UNITS:
        raise ConfigError(
            f"finding head budgets needs at least {UNITS} pages and a layout that has sparse layers "
            f"but no head_budgets; got {top_k} pages and a layout with {len(sparse)} sparse layers "
            f"and {'' if layout.head_budgets else 'no '}head_budgets"
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
        listener(f"head budgets: scoring with only layer {layer} sparse")
        others = tuple(other for other in range(layers) if other != layer)
        lost.append(best - float(acceptance(even.replace(dense_layers=others)).mean()))
    if max(lost) <= 0:
        raise ConfigError(
            "no head budgets were found, because acceptance does not drop when a single layer keeps "
            f"only {unit * UNITS} pages by score; sample longer responses, or try smaller budgets"
        )
    lost_L = np.maximum(lost, LEAST * max(lost))
    listener("head budgets: measuring the unread attention")
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
    listener("head budgets: scoring with and without them")
    without, uneven = (
        float(np.percentile(acceptance(each), 5))
        for each in (even, even.replace(head_budgets=budgets))
    )
    if uneven <= without:
        raise ConfigError(
            f"with {unit * UNITS} pages kept by score, p5 is {without:.3f} without head_budgets "
            f"and {uneven:.3f} with the head_budgets found for {by}; leave head_budgets out"
        )
    return layout.replace(
        head_budgets=budgets, provenance={**layout.provenance, "head_budgets": found}
    )
