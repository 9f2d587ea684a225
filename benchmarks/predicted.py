"""Predict measured rollouts with the cost model behind ``sparrow cost``.

The requests did not ask for top-20 lists, so the time for these is left out. This includes all host
time, because the cost model knows no other.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
from cascade import DRAFT_PAGES, DRAFTS
from never_slower import Cell, shape_config
from numpy.typing import NDArray

from sparrow import SparsitySchedule
from sparrow.cost import MACHINES, VLLM_H200, ModelShape, StepCost, simulate_rollout
from sparrow.cost.lossless import DraftSetup, lossless_step

MACHINE = MACHINES["h200"]
"""The GPU that the overheads were fitted on."""
OVERHEADS = VLLM_H200.without_lists
READ = SparsitySchedule.fixed(DRAFT_PAGES, dense_layers=())
"""What drafts read."""


@cache
def cost_shape(shape: str) -> ModelShape:
    """Return the cost model's description of a shape of ``never_slower.py``."""
    return ModelShape.from_config(shape_config(shape).to_dict())


def tokens_per_s(shape: str, cell: Cell, schedule: SparsitySchedule | None = None) -> float:
    """Predict the speed of decoding a cell's requests together, dense or with a schedule."""
    model = cost_shape(shape)
    responses = [cell.new] * cell.requests
    batching = cell.prompt, cell.requests, OVERHEADS
    found = simulate_rollout(model, MACHINE, responses, schedule, *batching)
    return found.tokens / found.seconds


def lossless_tokens_per_s(shape: str, cell: Cell, choices: Sequence[DraftSetup]) -> float:
    """Predict the speed of decoding a cell's requests together in lossless mode. Each cycle uses
    the fastest of ``choices``.
    """
    model = cost_shape(shape)

    def fastest(lengths: NDArray[np.int64]) -> StepCost:
        steps = [lossless_step(model, MACHINE, lengths, each, OVERHEADS) for each in choices]
        return min(steps, key=lambda step: step.seconds)

    responses = [cell.new] * cell.requests
    batching = cell.prompt, cell.requests, OVERHEADS
    found = simulate_rollout(model, MACHINE, responses, None, *batching, price=fastest)
    return found.tokens / found.seconds


def all_accepted() -> list[DraftSetup]:
    """Return the numbers of drafts that vLLM chooses from, with every draft accepted."""
    return [DraftSetup(drafts, READ, 1.0) for drafts in (0, *DRAFTS)]


def like(acceptance: float, tokens_per_cycle: float) -> DraftSetup:
    """Return the number of drafts for which the expected tokens per cycle are closest to the
    measured ones, at the measured acceptance.
    """
    choices = [DraftSetup(drafts, READ, acceptance) for drafts in range(1, max(DRAFTS) + 1)]
    return min(choices, key=lambda drafting: abs(drafting.tokens_per_cycle - tokens_per_cycle))
