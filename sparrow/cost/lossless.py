"""Predict the speed-up of lossless decoding: find the best draft length and budget, and compare
dense, lossy and lossless rollouts.

A cycle consists of k draft steps and one verification. The verification reads weights and cache
like a dense step, but computes k more tokens per sequence, which in an MoE also activate more
experts. If drafts are accepted independently with probability a, a cycle produces (1 - a^(k+1)) /
(1 - a) tokens (Leviathan et al., arXiv 2211.17192, equation 1). ``docs/cost.md`` explains what is
fitted and what is assumed.

Shapes: B sequences, k drafts per cycle.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparrow.cost.roofline import (
    VLLM_H200,
    Machine,
    Overheads,
    Prediction,
    RolloutEstimate,
    StepCost,
    decode_step,
    simulate_rollout,
)
from sparrow.cost.shapes import ModelShape
from sparrow.decoding import DraftWeights, acceptance_at
from sparrow.errors import ConfigError
from sparrow.schedule import LandmarkDtype, SparsitySchedule

REFERENCE_TOKENS = 1024  # the draft budget, in tokens, for which acceptance is quoted
WORTHWHILE = 1.15  # smaller rollout speed-ups are within prediction error
DRAFT_TOKENS = (2, 4, 8, 16)
# 16-token pages per layer, on top of the sink page and the two recent pages
DRAFT_PAGES = (
    29,
    61,
    125,
    253,
)


@dataclass(frozen=True)
class CycleOverheads:
    """Costs of a cycle that a dense step doesn't have."""

    # seconds per layer in a draft step, without all-reduces; replaces all ``Overheads``, because a
    # draft step is a single CUDA graph
    draft_layer_s: float
    # share of peak FLOP/s that a verification reaches on its extra tokens
    peak_share: float
    # extra seconds per layer in an fp8 draft step, for rounding activations
    fp8_layer_s: float = 0.0
    fp8_share: float = 1.0  # weight bandwidth of fp8 steps, relative to other steps


# Fitted to benchmarks/results/lossless_*.json by benchmarks/fit_lossless.py.
CYCLE_H200 = CycleOverheads(45.55e-6, 0.774, 7.64e-6, 0.762)


def flops_s(shape: ModelShape, machine: Machine, tokens: float) -> float:
    """Return the time in seconds to multiply ``tokens`` tokens by the weights at peak FLOP/s."""
    return 2 * shape.active_weights * tokens / machine.flops


def expert_bytes(shape: ModelShape, tokens: int, further: int) -> float:
    """Return how many more bytes of expert weights a pass over ``tokens + further`` tokens reads
    than a pass over ``tokens``. For a dense model, return 0.
    """
    return shape.weight_bytes * (shape.weights_read(tokens + further) - shape.weights_read(tokens))


def verify_s(
    shape: ModelShape,
    machine: Machine,
    sequences: int,
    further: int,
    overheads: Overheads,
    cycle: CycleOverheads,
) -> float:
    """Return how many seconds verifying ``further`` drafts adds to a dense step. ``sequences`` is
    the step's batch size.
    """
    read_s = expert_bytes(shape, sequences, further) / (
        machine.read_bytes_s * overheads.read_fraction
    )
    return flops_s(shape, machine, further) / cycle.peak_share + read_s


@dataclass(frozen=True)
class DraftSetup:
    """One way to draft: the draft length, the pages and weights read, and the acceptance."""

    tokens: int  # draft length (k); 0 means plain dense decoding
    schedule: SparsitySchedule  # the draft schedule
    acceptance: float  # mean probability that a draft is accepted, from 0 to 1
    weights: DraftWeights = "auto"  # weights used in draft steps

    @property
    def tokens_per_cycle(self) -> float:
        """Expected number of tokens per cycle if drafts are accepted independently."""
        return sum(self.acceptance**i for i in range(self.tokens + 1))


def lossless_step(
    shape: ModelShape,
    machine: Machine,
    lengths: ArrayLike,
    drafting: DraftSetup,
    overheads: Overheads = VLLM_H200,
    cycle: CycleOverheads = CYCLE_H200,
) -> StepCost:
    """Predict the cost of a cycle over sequences of ``lengths`` ``[B]``. To be comparable with a
    dense step, the cost is divided by the cycle's tokens per sequence. A cycle without drafts is a
    dense step.

    Raises the same errors as ``decode_step``.
    """
    if not drafting.tokens:
        return decode_step(shape, machine, lengths, None, overheads)

    length = np.atleast_1d(np.asarray(lengths, dtype=np.int64))
    plain = overheads.without_lists
    copied = _copied(shape, drafting.weights)
    layer_s = cycle.draft_layer_s
    if copied:
        copy_s = copied / (machine.read_bytes_s * overheads.read_fraction)
        layer_s += cycle.fp8_layer_s + copy_s * (1 / cycle.fp8_share - 1) / shape.layers
    graph = replace(plain, layer_s=layer_s, sparse_layer_s=0.0, row_s=0.0)

    # Fp8 only saves memory traffic: its matmuls are assumed to cost as much as 16-bit ones, and its
    # scales are ignored.
    read = shape.weight_bytes - copied / shape.weights
    drafts = replace(shape, weight_bytes=read)
    parts = [decode_step(drafts, machine, length, drafting.schedule, graph)] * drafting.tokens
    parts.append(decode_step(shape, machine, length, None, plain))

    further = length.size * drafting.tokens
    given = drafting.tokens_per_cycle
    verified_bytes = expert_bytes(shape, length.size, further)
    weight_s = sum(p.weight_s for p in parts)
    weight_s += verify_s(shape, machine, length.size, further, overheads, cycle)
    attention_s = sum(p.attention_s for p in parts)
    overhead_s = sum(p.overhead_s for p in parts)
    overhead_s += overheads.lists_s * length.size * given  # once per output token
    # Count host time per token, as in dense steps, because it was never measured per cycle.
    host_s = overheads.host_s * length.size * given
    overhead_s += max(0.0, host_s - overhead_s - weight_s - attention_s)
    return StepCost(
        weight_bytes=(sum(p.weight_bytes for p in parts) + verified_bytes) / given,
        kv_bytes=sum(p.kv_bytes for p in parts) / given,
        landmark_bytes=sum(p.landmark_bytes for p in parts) / given,
        overhead_s=overhead_s / given,
        weight_s=weight_s / given,
        attention_s=attention_s / given,
        seconds=(overhead_s + weight_s + attention_s) / given,
    )


def _copied(shape: ModelShape, draft_weights: DraftWeights) -> int:
    """Return the size in bytes of the fp8 weight copy for draft steps. The copy has one byte for
    each weight outside the output layer. Without a copy, the size is 0.

    Raises ConfigError if the model is a mixture of experts, which fp8 copies don't support.
    """
    if draft_weights != "auto" and shape.experts is not None:
        raise ConfigError(
            f"draft_weights={draft_weights!r} is not available for mixtures of experts such as "
            f"{shape.name}; leave it at 'auto'"
        )
    return 0 if draft_weights == "auto" else shape.weights - shape.output


def choices(
    acceptance: float, landmark_dtype: LandmarkDtype = "auto", draft_weights: DraftWeights = "auto"
) -> list[DraftSetup]:
    """List the draft lengths and budgets to choose from, given the acceptance of drafts that read
    ``REFERENCE_TOKENS``.

    8-bit landmarks are assumed not to change acceptance (``docs/selectors.md``).
    """
    candidates = []
    for pages in DRAFT_PAGES:
        schedule = SparsitySchedule.fixed(pages, dense_layers=(), landmark_dtype=landmark_dtype)
        budget = (pages + schedule.sink_pages + schedule.recent_pages) * schedule.page_size
        accepted = acceptance_at(acceptance, budget / REFERENCE_TOKENS)
        candidates += [DraftSetup(k, schedule, accepted, draft_weights) for k in DRAFT_TOKENS]
    return candidates


def typical_batch(
    dense: RolloutEstimate, responses: ArrayLike, prompt: int = 256
) -> tuple[int, float]:
    """Return a dense rollout's mean batch size, and the mean context length of its tokens."""
    final = np.atleast_1d(np.asarray(responses, dtype=np.int64))
    mean = prompt + float(np.average(final, weights=final)) / 2
    return max(1, round(dense.mean_batch)), mean


@dataclass(frozen=True)
class LosslessPrediction:
    """A predicted lossless rollout. Each cycle drafts ``drafting.tokens`` tokens, half as many, or
    none, whichever is fastest.
    """

    drafting: DraftSetup
    rollout: RolloutEstimate
    speedup: float  # speed-up over the dense rollout


def predict_lossless(
    shape: ModelShape,
    machine: Machine,
    responses: ArrayLike,
    dense: RolloutEstimate,
    acceptance: float,
    prompt: int = 256,
    max_batch: int = 256,
    overheads: Overheads = VLLM_H200,
    cycle: CycleOverheads = CYCLE_H200,
    landmark_dtype: LandmarkDtype = "auto",
    draft_weights: DraftWeights = "auto",
) -> LosslessPrediction:
    """Find the best of ``choices`` for a rollout of ``responses``, and predict that rollout.

    ``acceptance`` is the mean acceptance of drafts that read ``REFERENCE_TOKENS`` and use
    ``draft_weights``. A separate weight copy for drafts leaves less memory for the cache. Choices
    are compared at the mean batch size and at 0.5, 1 and 1.5 times the mean context length of
    sampled tokens.

    Raises ValueError if the acceptance is outside [0, 1]. Also raises the same errors as
    ``simulate_rollout``.
    """
    if not 0 <= acceptance <= 1:
        raise ValueError(f"acceptance is {acceptance}, expected a probability in [0, 1]")
    final = np.atleast_1d(np.asarray(responses, dtype=np.int64))
    batch, mean = typical_batch(dense, final, prompt)
    typical = [np.full(batch, max(1, int(mean * share))) for share in (0.5, 1.0, 1.5)]

    def cost(lengths: NDArray[np.int64], drafting: DraftSetup) -> StepCost:
        return lossless_step(shape, machine, lengths, drafting, overheads, cycle)

    candidates = choices(acceptance, landmark_dtype, draft_weights)
    best = min(candidates, key=lambda drafting: sum(cost(n, drafting).seconds for n in typical))
    tunable = [replace(best, tokens=k) for k in sorted({0, (best.tokens + 1) // 2, best.tokens})]

    def fastest(lengths: NDArray[np.int64]) -> StepCost:
        return min((cost(lengths, drafting) for drafting in tunable), key=lambda step: step.seconds)

    # Like an embedding, the copy takes up memory but isn't read in a dense step.
    held = replace(
        shape, embedding=shape.embedding + round(_copied(shape, draft_weights) / shape.weight_bytes)
    )
    rollout = simulate_rollout(
        held, machine, final, None, prompt, max_batch, overheads, price=fastest
    )
    return LosslessPrediction(best, rollout, dense.seconds / rollout.seconds)


def rows(lossy: Prediction, lossless: LosslessPrediction | None) -> list[tuple[str, str]]:
    """Compare dense, lossy and lossless rollouts, and recommend a mode. Return (name, value) pairs
    for printing. ``lossless`` is None if lossless mode doesn't support the model.
    """
    rollouts = [("dense rollout", str(lossy.dense)), ("lossy rollout", str(lossy.sparse))]
    speedups = [
        (
            "lossy speed-up",
            f"{lossy.speedup:.2f}x on the rollout, {lossy.step_speedup:.2f}x on the step",
        )
    ]
    if lossless is not None:
        drafting = lossless.drafting
        kept = drafting.schedule
        pages = kept.top_k[0] + kept.sink_pages + kept.recent_pages
        step = (lossy.dense.seconds + lossy.train_s) / (lossless.rollout.seconds + lossy.train_s)
        rollouts.append(("lossless rollout", str(lossless.rollout)))
        speedups += [
            (
                "lossless speed-up",
                f"{lossless.speedup:.2f}x on the rollout, {step:.2f}x on the step",
            ),
            (
                "drafts",
                f"{drafting.tokens} that read {pages * kept.page_size:,} tokens each; "
                f"{drafting.tokens_per_cycle:.2f} tokens per cycle",
            ),
        ]
    return [*rollouts, *speedups, ("verdict", verdict(lossy, lossless))]


def verdict(lossy: Prediction, lossless: LosslessPrediction | None) -> str:
    """Recommend a mode in one or two sentences; see ``rows``."""
    lossy_pays = lossy.speedup >= WORTHWHILE
    if lossless is None:
        gain = (
            f"{lossy.speedup:.2f}x lossy; in vLLM, lossless mode needs full attention in every "
            "layer"
        )
        if lossy_pays:
            return f"Sparse rollouts pay off ({gain}), but need a schedule that keeps p5 on target."
        return f"Sparse rollouts do not pay off ({gain}): decode densely. {_limit(lossy)}"
    lossless_pays = lossless.speedup >= WORTHWHILE
    both = f"{lossy.speedup:.2f}x lossy, {lossless.speedup:.2f}x lossless"
    if not lossy_pays and not lossless_pays:
        return f"Neither pays off ({both}): decode densely. {_limit(lossy)}"
    if lossless.speedup >= lossy.speedup:
        return f"Lossless rollouts gain the most ({both}), and need no correction."
    if not lossless_pays:
        return (
            "Lossy rollouts pay off and lossless ones do not "
            f"({both}), but lossy mode needs a schedule that keeps p5 on target."
        )
    return (
        f"Both pay off ({both}): lossy mode gains more, but needs "
        "a schedule that keeps p5 on target; lossless mode does not."
    )


def _limit(lossy: Prediction) -> str:
    _, limit = max(
        (
            lossy.dense.attention_s,
            "reading the cache, but drafts and kept pages read about as much of it",
        ),
        (lossy.dense.weight_s, "reading weights: the model is large for this batch"),
        (lossy.dense.overhead_s, "fixed overheads: responses are few or short"),
    )
    return f"Most of a dense rollout's time goes to {limit}."
