"""Predict the speed-up of a sparsity schedule with a byte-accurate roofline model of decoding.

Predictions come from the model's shape and the machine's specs. ``docs/cost.md`` explains what is
exact, what is fitted and what is assumed.

Shapes: B sequences.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparrow.cost.shapes import ModelShape
from sparrow.errors import ConfigError
from sparrow.schedule import SparsitySchedule

# share of device memory for weights and KV cache; predicted H200 KV capacities are within 4 % of
# actual ones
MEMORY_FRACTION = 0.85
PREFILL_MFU = 0.5  # share of peak FLOP/s that prefill reaches (assumed)
# share of peak FLOP/s that the trainer's log-prob passes and updates reach, measured by
# benchmarks/grpo_step.py
SCORE_MFU = 0.24
UPDATE_MFU = 0.28
DENSE = SparsitySchedule.dense(dense_layers=())  # the schedule of a dense step
CHUNK = 256  # predict this many decode steps at once, at the length halfway through


@dataclass(frozen=True)
class Machine:
    """One accelerator, or several rolled into one by adding up their specs (see
    ``sparrow.cost.cluster``).
    """

    name: str
    hbm_bytes_s: float  # data sheet bandwidth
    read_bytes_s: float  # bandwidth of a plain memory read
    # data sheet FLOP/s in dense bf16, which is half the "with sparsity" figure
    flops: float
    memory_bytes: float
    # seconds per layer of a decode step for all-reduces between the accelerators
    all_reduce_s: float = 0.0


# From NVIDIA's data sheets (A100 80GB SXM, H100 SXM, H200 SXM, HGX B200), except that memory is
# what nvidia-smi reports, in MiB. The H200's plain read bandwidth is measured (4.65 TB/s, 97 % of
# the data sheet's); the other GPUs are assumed to reach the same share.
MACHINES = {
    "a100": Machine("A100", 2.039e12, 0.97 * 2.039e12, 312e12, 81920 * 2**20),
    "h100": Machine("H100", 3.35e12, 0.97 * 3.35e12, 989.5e12, 81559 * 2**20),
    "h200": Machine("H200", 4.8e12, 4.65e12, 989.5e12, 143771 * 2**20),
    "b200": Machine("B200", 8.0e12, 0.97 * 8.0e12, 2250e12, 183359 * 2**20),
}


@dataclass(frozen=True)
class Overheads:
    """Costs of a decode step other than reading bytes. The values are fitted by
    ``benchmarks/fit_roofline.py``.
    """

    layer_s: float = 0.0  # seconds per layer, independent of the bytes read
    # extra seconds for each layer that scores and selects pages
    sparse_layer_s: float = 0.0
    row_s: float = 0.0  # seconds per sequence, for scheduling and sampling
    # extra seconds per sequence, for the top-20 lists
    lists_s: float = 0.0
    read_fraction: float = 1.0  # share of Machine.read_bytes_s that the kernels reach
    # host seconds per sequence for the top-20 lists, spent while the device is running
    host_s: float = 0.0

    @property
    def without_lists(self) -> Overheads:
        """The overheads of steps that return no top-20 lists."""
        return replace(self, lists_s=0.0, host_s=0.0)


VLLM_H200 = Overheads(49.65e-6, 0.0, 1.191e-6, 4.985e-6, 0.9362, 47e-6)


@dataclass(frozen=True)
class StepCost:
    """The cost of decoding one token per sequence in a batch: bytes read, and seconds by cause.

    Waiting for the host counts as overhead.
    """

    weight_bytes: float
    kv_bytes: float  # including linear attention states, which are read and written
    landmark_bytes: float
    overhead_s: float
    weight_s: float
    attention_s: float
    seconds: float  # sum of the seconds above


def decode_step(
    shape: ModelShape,
    machine: Machine,
    lengths: ArrayLike,
    schedule: SparsitySchedule | None = None,
    overheads: Overheads = VLLM_H200,
) -> StepCost:
    """Predict how many bytes a decode step reads and how many seconds it takes. ``lengths`` ``[B]``
    holds the number of cached tokens in each sequence.

    A step reads the weights (or computes with them, if that takes longer), the KV of dense layers,
    the kept pages of sparse layers, and the landmarks of sequences that are not read in full.
    Layers with a window read at most their window, and linear-attention layers read and write their
    state. KV writes, activations and logits are covered by the overheads.

    Raises ValueError if there are no sequences, or a sequence has no tokens. Raises ConfigError if
    the schedule is for a different model.
    """
    length = np.atleast_1d(np.asarray(lengths, dtype=np.int64))
    if length.size == 0 or length.min() < 1:
        raise ValueError(
            "lengths must contain at least one length, and every length must be at least 1 "
            f"token, got {length.tolist()[:8]}"
        )
    schedule = schedule or DENSE
    schedule.check_model(shape.layers, shape.kv_heads)

    read = schedule.tokens_read(length)
    partial = read < length
    sparse_layers = shape.sparse_layers(schedule.dense_layers) if partial.any() else 0
    bandwidth = machine.read_bytes_s * overheads.read_fraction
    key_bytes = shape.cached_heads * shape.head_dim * shape.kv_bytes
    dense_tokens = shape.cached_tokens(length).sum() - sparse_layers * length.sum()
    kv = 2 * key_bytes * float(dense_tokens + sparse_layers * read.sum())
    landmark_bytes = key_bytes
    if schedule.landmark_dtype != "auto":
        landmark_bytes = shape.cached_heads * shape.head_dim
    ranked_pages = (-(-length[partial] // schedule.page_size)).sum()
    landmarks = landmark_bytes * float(sparse_layers * ranked_pages)
    kv += 2 * shape.state_bytes * length.size
    weights = shape.weights_read(length.size) * shape.weight_bytes

    overhead_s = (overheads.layer_s + machine.all_reduce_s) * shape.layers
    overhead_s += overheads.sparse_layer_s * sparse_layers
    overhead_s += (overheads.row_s + overheads.lists_s) * length.size
    weight_s = max(weights / bandwidth, 2 * shape.active_weights * length.size / machine.flops)
    attention_s = (kv + landmarks) / bandwidth
    device_s = overhead_s + weight_s + attention_s
    overhead_s += max(0.0, overheads.host_s * length.size - device_s)
    return StepCost(
        weights,
        kv,
        landmarks,
        overhead_s,
        weight_s,
        attention_s,
        overhead_s + weight_s + attention_s,
    )


@dataclass(frozen=True)
class RolloutEstimate:
    """A simulated rollout: seconds by cause, and batch statistics."""

    overhead_s: float
    weight_s: float
    attention_s: float
    prefill_s: float  # prefill of prompts, and of responses recomputed after preemption
    seconds: float  # sum of the seconds above
    drain_s: float  # the part of ``seconds`` after the last response entered the batch
    tokens: int
    mean_batch: float
    preemptions: int

    def __str__(self) -> str:
        shares = (
            f"{self.attention_s / self.seconds:.0%} attention, "
            f"{self.drain_s / self.seconds:.0%} draining"
        )
        speed = f"{self.tokens / self.seconds:,.0f} tokens/s, batch {self.mean_batch:.1f}"
        return f"{self.seconds:.1f} s, {speed}, {shares}"


def response_lengths(
    median: float, cutoff: int, count: int, spread: float = 0.7, seed: int = 0
) -> NDArray[np.int64]:
    """Draw ``count`` log-normal response lengths, cut off at ``cutoff`` tokens. ``spread`` is the
    standard deviation of the logarithm.
    """
    return (
        np.random.default_rng(seed)
        .lognormal(np.log(median), spread, count)
        .clip(1, cutoff)
        .astype(np.int64)
    )


def _kv_room(shape: ModelShape, machine: Machine) -> int:
    """Compute how many tokens fit in memory next to the weights, added up over layers as in
    ``ModelShape.cached_tokens``.
    """
    weight_bytes = (shape.weights + shape.embedding) * shape.weight_bytes
    free = MEMORY_FRACTION * machine.memory_bytes - weight_bytes
    return max(0, int(free // (shape.layer_width * shape.kv_bytes)))


def kv_capacity(shape: ModelShape, machine: Machine) -> int:
    """Compute how many tokens of KV cache fit in memory next to the weights. If some layers have a
    window, this is the length of the longest sequence that fits.
    """
    room = _kv_room(shape, machine)
    within = room // shape.kv_layers
    if within < shape.window:
        return within
    return (room - len(shape.window_layers) * shape.window) // shape.full_layers


def sequences_held(shape: ModelShape, machine: Machine, length: int) -> int:
    """Compute how many sequences of ``length`` tokens fit in memory next to the weights."""
    return _kv_room(shape, machine) // int(shape.cached_tokens(length))


def simulate_rollout(
    shape: ModelShape,
    machine: Machine,
    responses: ArrayLike,
    schedule: SparsitySchedule | None = None,
    prompt: int = 256,
    max_batch: int = 256,
    overheads: Overheads = VLLM_H200,
    *,
    price: Callable[[NDArray[np.int64]], StepCost] | None = None,
) -> RolloutEstimate:
    """Simulate continuous batching of ``responses`` (lengths in tokens, in serving order) on one
    machine. KV memory limits the batch size.

    A response enters the batch once its tokens so far fit and leave room for the batch to grow.
    When memory runs out, the last response to enter is preempted and recomputed later. Reading
    fewer pages doesn't shrink the cache, so dense and sparse rollouts are batched alike. ``price``
    maps lengths to the step cost; it defaults to ``decode_step``.

    Raises ConfigError if a single response does not fit in memory. Raises ValueError if there are
    no responses, or a response is empty.
    """
    final = np.atleast_1d(np.asarray(responses, dtype=np.int64))
    if final.size == 0 or final.min() < 1:
        raise ValueError(
            "responses must contain at least one length, and every length must be at least 1 "
            f"token, got {final.tolist()[:8]}"
        )
    capacity = kv_capacity(shape, machine)
    room = _kv_room(shape, machine)

    def needed(lengths: NDArray[np.int64]) -> int:
        return int(shape.cached_tokens(lengths).sum())

    if prompt + final.max() > capacity:
        need = (
            f"{prompt + final.max()} tokens do not fit alongside {shape.name} on one {machine.name}"
        )
        raise ConfigError(
            f"{need}, which has room for {capacity}; use a larger GPU, several GPUs, "
            "or shorter responses"
        )

    # for each waiting response: the cached tokens, and the tokens left to sample
    waiting = deque((prompt, int(n)) for n in final)
    # the same for running responses
    length = np.empty(0, np.int64)
    left = np.empty(0, np.int64)
    spent = np.zeros(3)
    prefilled = 0
    drain_s = 0.0
    steps = 0
    preemptions = 0

    while waiting or left.size:
        while waiting and left.size < max_batch:
            if left.size and needed(np.append(length, waiting[0][0]) + CHUNK) > room:
                break
            cached, more = waiting.popleft()
            length = np.append(length, cached)
            left = np.append(left, more)
            prefilled += cached

        most = int(min(left.min(), CHUNK))
        if needed(length + most) <= room:
            advance = most
        else:
            shorter = range(1, most)
            advance = bisect_right(shorter, room, key=lambda more: needed(length + more))
        if advance < 1:
            waiting.appendleft((int(length[-1]), int(left[-1])))
            length = length[:-1]
            left = left[:-1]
            preemptions += 1
            continue

        middle = length + (advance + 1) // 2
        step = price(middle) if price else decode_step(shape, machine, middle, schedule, overheads)
        spent += advance * np.array([step.overhead_s, step.weight_s, step.attention_s])
        drain_s = 0.0 if waiting else drain_s + advance * step.seconds
        length = length + advance
        left = left - advance
        steps += advance
        length = length[left > 0]
        left = left[left > 0]

    overhead_s, weight_s, attention_s = spent.tolist()
    prefill_s = 2 * shape.active_weights * prefilled / (PREFILL_MFU * machine.flops)
    total = overhead_s + weight_s + attention_s + prefill_s
    n = int(final.sum())
    return RolloutEstimate(
        overhead_s, weight_s, attention_s, prefill_s, total, drain_s, n, n / steps, preemptions
    )


def train_seconds(shape: ModelShape, machine: Machine, totals: ArrayLike) -> tuple[float, float]:
    """Predict how many seconds a step's log-probs and its update take.

    Log-probs take one forward pass. An update costs as much as four: one forward pass, one to
    recompute activations, and a backward pass that counts as two. FLOPs are counted for the weights
    and for causal attention, i.e. half of the T x T matrix, or less in layers with a window.

    Args:
        totals: sequence lengths in tokens, prompt plus response.
    """
    total = np.asarray(totals, dtype=np.float64)
    seen = np.minimum(total, shape.window)
    # twice the number of pairs of a token and one that it attends to, over all layers
    pairs = shape.full_layers * (total**2).sum()
    pairs += len(shape.window_layers) * (seen * (2 * total - seen)).sum()
    attention = 2 * shape.heads * shape.head_dim * pairs
    forward = float(2 * shape.active_weights * total.sum() + attention)
    return forward / (SCORE_MFU * machine.flops), 4 * forward / (UPDATE_MFU * machine.flops)


@dataclass(frozen=True)
class Prediction:
    """A dense and a sparse rollout of the same responses, and the resulting speed-up of an RL
    step.
    """

    dense: RolloutEstimate
    sparse: RolloutEstimate
    train_s: float  # seconds for the rest of the RL step
    speedup: float  # rollout speed-up
    step_speedup: float


def predict(
    shape: ModelShape,
    machine: Machine,
    responses: ArrayLike,
    schedule: SparsitySchedule,
    prompt: int = 256,
    max_batch: int = 256,
    overheads: Overheads = VLLM_H200,
    *,
    rollout_share: float | None = None,
) -> Prediction:
    """Predict the speed-up of a rollout, and of an RL step on the same machine.

    ``rollout_share`` is the rollout's share of a dense RL step's time. If not given, the training
    time is predicted from FLOPs. Raises the same errors as ``simulate_rollout``.
    """
    batching = (prompt, max_batch, overheads)
    dense = simulate_rollout(shape, machine, responses, None, *batching)
    sparse = simulate_rollout(shape, machine, responses, schedule, *batching)
    if rollout_share is None:
        train_s = sum(train_seconds(shape, machine, prompt + np.asarray(responses)))
    else:
        train_s = dense.seconds * (1 / rollout_share - 1)
    speedup = dense.seconds / sparse.seconds
    step_speedup = (dense.seconds + train_s) / (sparse.seconds + train_s)
    return Prediction(dense, sparse, train_s, speedup, step_speedup)
