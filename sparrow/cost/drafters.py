"""Predict the break-even of drafters: how many tokens a cycle must produce before a drafter is
faster than dense decoding.

A cycle drafts some tokens and verifies them in a dense pass, so the break-even is the cycle time
divided by the dense step time. A trained drafter's pass is assumed to cost as much as a decode step
through a few layers; nothing is fitted to measured drafters. ``docs/which-drafter.md`` has
measurements.

Shapes: B sequences.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from sparrow.cost.lossless import (
    CYCLE_H200,
    CycleOverheads,
    DraftSetup,
    LosslessPrediction,
    flops_s,
    lossless_step,
    typical_batch,
    verify_s,
)
from sparrow.cost.roofline import (
    VLLM_H200,
    Machine,
    Overheads,
    RolloutEstimate,
    decode_step,
)
from sparrow.cost.shapes import ModelShape


@dataclass(frozen=True)
class TrainedDrafter:
    """A trained drafter: a few layers of the model's width, and an output layer."""

    name: str
    drafts: int  # tokens drafted per cycle
    passes: int  # forward passes of the drafter per cycle
    layers: int
    output_share: float  # size of the drafter's output layer, relative to the model's


EAGLE3 = TrainedDrafter("EAGLE-3", 3, 3, 1, 0.21)
"""One layer, with an output layer for 32,000 of Qwen3's 151,936 tokens, as in published EAGLE-3
heads.
"""
DSPARK = TrainedDrafter("DSpark", 7, 1, 5, 1.0)
"""A block drafter of five layers, as published. Its Markov head is left out."""
TRAINED = (EAGLE3, DSPARK)


def break_even(
    shape: ModelShape,
    machine: Machine,
    lengths: ArrayLike,
    drafter: TrainedDrafter,
    overheads: Overheads = VLLM_H200,
    cycle: CycleOverheads = CYCLE_H200,
) -> float:
    """Return how many tokens a trained drafter must produce per cycle to break even.

    Args:
        lengths: number of cached tokens in each sequence, ``[B]``.

    Raises the same errors as ``decode_step``.
    """
    length = np.atleast_1d(np.asarray(lengths, dtype=np.int64))
    plain = overheads.without_lists
    dense_s = decode_step(shape, machine, length, None, plain).seconds

    # A drafter's layers are dense even for an MoE model.
    layer = (shape.active_weights - shape.output) / shape.layers
    output = drafter.output_share * shape.output
    head = replace(
        shape,
        layers=drafter.layers,
        weights=round(drafter.layers * layer + output),
        output=0,
        experts=None,
        linear_layers=(),
        window_layers=(),
        window=0,
        state_bytes=0.0,
    )
    # a cycle is only scheduled once, and ``dense_s`` already includes that time
    one_token = replace(plain, row_s=0.0)
    pass_s = decode_step(head, machine, length, None, one_token).seconds
    # number of drafted tokens beyond one per pass
    further = length.size * (drafter.drafts - drafter.passes)
    drafting_s = drafter.passes * pass_s + flops_s(head, machine, further) / cycle.peak_share

    drafts = length.size * drafter.drafts
    verified_s = verify_s(shape, machine, length.size, drafts, overheads, cycle)
    return (dense_s + verified_s + drafting_s) / dense_s


def sparse_break_even(
    shape: ModelShape,
    machine: Machine,
    lengths: ArrayLike,
    drafting: DraftSetup,
    overheads: Overheads = VLLM_H200,
    cycle: CycleOverheads = CYCLE_H200,
) -> float:
    """Like ``break_even``, but for the sparse actor."""
    plain = overheads.without_lists
    # with every draft rejected, a token costs a whole cycle
    rejected = replace(drafting, acceptance=0.0)
    cycle_s = lossless_step(shape, machine, lengths, rejected, plain, cycle).seconds
    return cycle_s / decode_step(shape, machine, lengths, None, plain).seconds


def rows(
    shape: ModelShape,
    machine: Machine,
    responses: ArrayLike,
    dense: RolloutEstimate,
    lossless: LosslessPrediction,
    prompt: int = 256,
) -> list[tuple[str, str]]:
    """Return (name, value) pairs for printing: break-evens, and how many tokens per cycle a trained
    drafter needs to be faster than lossless mode. All are computed for the mean batch size and the
    mean context length of sampled tokens.
    """
    batch, mean = typical_batch(dense, responses, prompt)
    lengths = np.full(batch, max(1, int(mean)))
    drafting = lossless.drafting
    needed = sparse_break_even(shape, machine, lengths, drafting)
    speed = max(1.0, drafting.tokens_per_cycle / needed)  # of lossless mode, relative to dense

    found = []
    for drafter in TRAINED:
        point = break_even(shape, machine, lengths, drafter)
        compared = f"{speed * point:.2f} to be faster than lossless mode"
        if speed * point > drafter.drafts + 1:
            compared = f"never faster than lossless mode with {drafter.drafts} drafts"
        value = f"{point:.2f} tokens per cycle of {drafter.drafts} drafts; {compared}"
        found.append((f"break-even, {drafter.name}", value))
    found.append(
        (
            "break-even, sparse actor",
            f"{needed:.2f} tokens per cycle of {drafting.tokens} drafts, "
            f"which yield {drafting.tokens_per_cycle:.2f}",
        )
    )
    return found
