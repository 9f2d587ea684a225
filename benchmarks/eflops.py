"""The paper's eFLOPs formulas, in its own notation (Sparrow, arXiv 2606.08446, section 5; after
Kinetics, arXiv 2506.05333).
"""
# ruff: noqa: E741

from __future__ import annotations

import numpy as np
from common import SHAPES, table

from sparrow.cost import MACHINES, ModelShape
from sparrow.cost import SHAPES as SHAPES_OF
from sparrow.schedule import SparsitySchedule


def dense_eflops(
    P_w: float, N: float, L_in: float, L_out: float, D: float, r: float, I: float
) -> float:
    """Apply the published formula for the eFLOPs of a dense rollout of N samples per prompt.

    D is ``ModelShape.kv_width``, the width of keys and values together. With this width and a
    2-byte cache, the memory term is exact in bytes, the attention term is exact in FLOPs, and the
    formula matches Kinetics' code. Use I = 0 to get just the compute.
    """
    compute = 2 * P_w * N * L_out + r * (2 * L_in + L_out) * L_out * N * D
    return compute + I * (2 * L_in * L_out * D + N * L_out**2 * D)


def sparse_eflops(
    P_w: float,
    N: float,
    L_in: float,
    L_out: float,
    D: float,
    r: float,
    I: float,
    b: float,
    P: float,
) -> float:
    """Apply the published formula for the eFLOPs of a sparse rollout that keeps b tokens in pages
    of P.

    In this formula, the terms for scoring the prompt's pages are not divided by P, and one of these
    terms is not multiplied by r.
    """
    attend = 2 * P_w * N * L_out + 2 * r * N * D * b * L_out + 2 * I * N * D * b * L_out
    score = 2 * N * L_in * D * L_out + r * N * D * L_out**2 / (2 * P)
    return attend + score + 2 * I * L_in * D * L_out + I * N * D * L_out**2 / (2 * P)


def ideal_speedup(
    shape: ModelShape,
    schedule: SparsitySchedule,
    intensity: float,
    response: int,
    prompt: int = 0,
    samples: int = 1,
) -> float:
    """Return the ratio of dense to sparse eFLOPs for responses of ``response`` tokens. b is the
    schedule's average budget over the response.
    """
    b = float(schedule.tokens_read(prompt + np.arange(1, response + 1)).mean())
    common = (
        shape.weights,
        samples,
        prompt,
        response,
        shape.kv_width,
        shape.heads / shape.kv_heads,
        intensity,
    )
    return dense_eflops(*common) / sparse_eflops(*common, b, schedule.page_size)


PUBLISHED = (5.2, 5.1, 3.5, 3.5, 2.7)


def ideal() -> str:
    """Compare the published speed-ups on an H200, for a p5 of 0.86, with those the formulas predict
    for the released schedules.
    """
    schedules = [(shape, name, SparsitySchedule.preset(shape)) for shape, name in SHAPES.items()]
    schedules.insert(3, ("qwen3-8b", "8B, table 0.87", SparsitySchedule.preset("qwen3-8b", 0.87)))
    dense_peak = MACHINES["h200"].flops / MACHINES["h200"].hbm_bytes_s
    rows = [["published", *PUBLISHED]]
    for intensity, cutoff in (
        (2 * dense_peak, 40_000),
        (dense_peak, 40_000),
        (2 * dense_peak, 32_000),
    ):
        cells = [
            f"{ideal_speedup(SHAPES_OF[s], schedule, intensity, cutoff):.2f}"
            for s, _, schedule in schedules
        ]
        rows.append(
            [f"I = {intensity:.0f}{f', cut at {cutoff:,}' if cutoff < 40_000 else ''}", *cells]
        )
    return table(["source", *(name for _, name, _ in schedules)], rows)
