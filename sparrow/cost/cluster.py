"""Predict the cost of a whole run on several GPUs: how much memory it needs and, per decoding mode,
how long each phase of a step takes.

``sparrow.cost.roofline`` covers a single engine. Here, several engines (of one or more GPUs each)
and shards of the training state share the GPUs. ``docs/cost.md`` lists the assumptions. All
predictions are calculated; nothing is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import ArrayLike

from sparrow.cost import roofline
from sparrow.cost.lossless import predict_lossless
from sparrow.cost.roofline import (
    MEMORY_FRACTION,
    VLLM_H200,
    Machine,
    Overheads,
    RolloutEstimate,
)
from sparrow.cost.shapes import ModelShape
from sparrow.errors import ConfigError
from sparrow.schedule import SparsitySchedule

STATE_BYTES = 12  # bytes per parameter between steps: a float32 weight and AdamW's two moments
GRADIENT_BYTES = 4
# bytes for one chunk of logits in the log-prob pass: three float32 copies for 4096 tokens and a
# vocabulary of 152K
HEAD_BYTES = 7.5e9
# activation bytes per token per hidden unit in the current layer; each layer whose activations are
# kept adds 2 bytes
LAYER_BYTES = 34
LINK_BYTES_S = 350e9  # GPU to GPU on the same host
NETWORK_BYTES_S = 40e9  # GPU to GPU on another host
HOST_BYTES_S = 13e9  # GPU to host memory and back, measured in vLLM's sleep mode
# measured seconds to send a response token to all processes twice (after the rollout, and again
# with its log-probs)
GATHER_S = 1.4e-6
# vLLM's default share of GPU memory; with this share, weights and KV cache get MEMORY_FRACTION
VLLM_SHARE = 0.9
# share of GPU memory that an engine and the training state may use together; the rest is for the
# driver and NCCL
MOST_SHARE = 0.97
# seconds per all-reduce; a tensor-parallel engine needs two per layer in every pass
ALL_REDUCE_S = 15e-6


@dataclass(frozen=True)
class Cluster:
    """GPUs of one kind."""

    machine: Machine  # a single GPU
    gpus: int  # number of GPUs; hosts are filled one after another
    tensor_parallel: int = 1  # number of GPUs per engine
    host: int = 8  # number of GPUs per host

    def __post_init__(self) -> None:
        if self.tensor_parallel < 1 or self.gpus < 1 or self.gpus % self.tensor_parallel:
            raise ConfigError(
                f"{self.gpus} GPUs cannot be split into engines of {self.tensor_parallel} GPUs; "
                "choose a tensor_parallel that divides the number of GPUs"
            )

    @property
    def engines(self) -> int:
        return self.gpus // self.tensor_parallel

    @property
    def exchange_bytes_s(self) -> float:
        """Bandwidth, in bytes per second, at which a GPU receives other GPUs' shards. It depends on
        whether the cluster has more than one host.
        """
        return LINK_BYTES_S if self.gpus <= self.host else NETWORK_BYTES_S


@dataclass(frozen=True)
class Memory:
    """Bytes used per GPU in training and in a rollout, and the number of full-length responses that
    fit in an engine's cache.
    """

    state: float
    gradients: float
    activations: float
    engine_weights: float
    kv: float
    full_responses: int


@dataclass(frozen=True)
class Step:
    """Seconds per RL step, by phase. ``imbalance`` is the slowest engine's rollout time relative to
    the mean over engines.
    """

    rollout: float
    score: float
    update: float
    sync: float
    imbalance: float

    @property
    def seconds(self) -> float:
        return self.rollout + self.score + self.update + self.sync


@dataclass(frozen=True)
class Plan:
    memory: Memory
    dense: Step
    sparse: Step | None  # None without a schedule
    lossless: Step | None = None  # None without a draft acceptance


def training_bytes(
    shape: ModelShape,
    cluster: Cluster,
    longest: int,
    token_budget: int = 32768,
    recompute: bool = True,
) -> tuple[float, float, float]:
    """Compute the bytes per GPU that training needs for its state, for gradients, and for the
    activations of one pass. For the arguments, see ``fit``.
    """
    parameters = shape.weights + shape.embedding
    width = shape.heads * shape.head_dim
    state = STATE_BYTES * parameters / cluster.gpus
    gradients = GRADIENT_BYTES * parameters / cluster.gpus
    # Three layers in bf16: the current one, the next one, and the gradient of the previous one.
    gathered = 3 * 2 * parameters / shape.layers
    kept = 2 * shape.layers + LAYER_BYTES if recompute else LAYER_BYTES * shape.layers
    activations = max(token_budget, longest) * width * kept + HEAD_BYTES + gathered
    return state, gradients, activations


def training_shortage(
    shape: ModelShape,
    cluster: Cluster,
    longest: int,
    token_budget: int = 32768,
    recompute: bool = True,
) -> str | None:
    """Say how much memory training needs, if it needs more than there is. Return None if training
    fits. For the arguments, see ``fit``.
    """
    needed = training_bytes(shape, cluster, longest, token_budget, recompute)
    available = MEMORY_FRACTION * cluster.machine.memory_bytes
    if sum(needed) <= available:
        return None
    return (
        f"training {shape.name} on {cluster.gpus} {cluster.machine.name} needs "
        f"{sum(needed) / 2**30:.0f} GiB per GPU, including {needed[-1] / 2**30:.0f} GiB for "
        f"activations, but only {available / 2**30:.0f} GiB are available"
    )


def fit(
    shape: ModelShape,
    cluster: Cluster,
    longest: int,
    token_budget: int = 32768,
    colocated: bool = True,
    recompute: bool = True,
    engine_share: float | None = None,
    trains: bool = True,
) -> Memory:
    """Compute the bytes needed per GPU. Weights, moments and gradients are sharded over all GPUs
    (FSDP2), and vLLM sleeps during training.

    Args:
        longest: length of the longest sequence in tokens, prompt plus response.
        token_budget: padded tokens per training pass.
        colocated: whether engines run on the training GPUs; if so, they share memory with the
            sharded training state during rollouts.
        recompute: whether activations are recomputed layer by layer in the backward pass (gradient
            checkpointing).
        engine_share: share of a GPU's memory that vLLM may use (``gpu_memory_utilization``). None
            means all free memory.
        trains: whether the GPUs train at all; if not, engines get the memory that training would
            take.

    Raises ConfigError if training or a single response does not fit in memory, or if the
    model's heads cannot be divided among an engine's GPUs.
    """
    state = gradients = activations = 0.0
    if trains:
        training = (shape, cluster, longest, token_budget, recompute)
        if shortage := training_shortage(*training):
            remedy = "recompute activations (optimizer.gradient_checkpointing)"
            if recompute:
                remedy = "use more GPUs or fewer tokens"
            raise ConfigError(f"{shortage}; {remedy}")
        state, gradients, activations = training_bytes(*training)

    memory = cluster.machine.memory_bytes
    reserved = _reserved(cluster, state, colocated, engine_share)
    if colocated and engine_share and state + engine_share * memory > MOST_SHARE * memory:
        raise ConfigError(
            f"gpu_memory_utilization is {engine_share:g} of {memory / 2**30:.0f} GiB, but training "
            f"keeps {state / 2**30:.0f} GiB on the same GPU; lower gpu_memory_utilization to at "
            f"most {MOST_SHARE - state / memory:.2f}"
        )
    held = _tokens_held(shape, cluster, reserved)
    if held < longest:
        enough = _enough_gpus(shape, cluster, reserved, longest)
        remedy = (
            f"set tensor_parallel to {enough}" if enough else "use more GPUs or shorter responses"
        )
        raise ConfigError(
            f"an engine of {cluster.tensor_parallel} {cluster.machine.name} has room for "
            f"{held:,} tokens alongside {shape.name}{' and its training state' if state else ''}, "
            f"but a sequence may be {longest:,} tokens long; {remedy}"
        )
    cached = engine_shape(shape, cluster)
    engine = engine_machine(cluster, reserved)
    kv = int(cached.cached_tokens(held)) * cached.layer_width * cached.kv_bytes
    weights = (shape.weights + shape.embedding) * shape.weight_bytes / cluster.tensor_parallel
    responses = roofline.sequences_held(cached, engine, longest)
    return Memory(state, gradients, activations, weights, kv / cluster.tensor_parallel, responses)


def _reserved(cluster: Cluster, state: float, colocated: bool, engine_share: float | None) -> float:
    """Return the bytes per GPU that an engine can't use: the training state or what
    ``gpu_memory_utilization`` leaves free, whichever is larger.
    """
    left = (
        0.0 if engine_share is None else (VLLM_SHARE - engine_share) * cluster.machine.memory_bytes
    )
    return max(state if colocated else 0.0, left)


def _tokens_held(shape: ModelShape, cluster: Cluster, reserved: float) -> int:
    """Return how many tokens an engine's KV cache holds."""
    return roofline.kv_capacity(engine_shape(shape, cluster), engine_machine(cluster, reserved))


def _enough_gpus(shape: ModelShape, cluster: Cluster, reserved: float, longest: int) -> int | None:
    """Return the smallest number of GPUs on one host whose engine holds ``longest`` tokens, or None
    if there is none.
    """
    for n in range(cluster.tensor_parallel + 1, min(cluster.gpus, cluster.host) + 1):
        if cluster.gpus % n or not _divides(shape, n):
            continue
        if _tokens_held(shape, replace(cluster, tensor_parallel=n), reserved) >= longest:
            return n
    return None


def engine_machine(cluster: Cluster, reserved: float = 0.0) -> Machine:
    """Combine an engine's GPUs into one machine. ``reserved`` bytes per GPU are unavailable. With
    more than one GPU, every pass through a layer includes two all-reduces.
    """
    m = cluster.machine
    n = cluster.tensor_parallel
    return Machine(
        m.name,
        n * m.hbm_bytes_s,
        n * m.read_bytes_s,
        n * m.flops,
        n * (m.memory_bytes - reserved / MEMORY_FRACTION),
        2 * ALL_REDUCE_S if n > 1 else 0.0,
    )


def engine_shape(shape: ModelShape, cluster: Cluster) -> ModelShape:
    """Return the shape of the model inside an engine. vLLM splits the KV heads over the engine's
    GPUs. If there are more GPUs than KV heads, it caches each head on several GPUs.

    Raises ConfigError if the heads can't be split that way.
    """
    n = cluster.tensor_parallel
    if not _divides(shape, n):
        raise ConfigError(
            f"the {shape.heads} query heads and {shape.kv_heads} kv heads of {shape.name} "
            f"cannot be divided among the {n} GPUs of an engine; choose a tensor_parallel "
            "that divides both"
        )
    return replace(shape, kv_copies=max(1, n // shape.kv_heads))


def _divides(shape: ModelShape, gpus: int) -> bool:
    """Return whether an engine of so many GPUs can divide the model's heads among them."""
    return shape.heads % gpus == 0 and (shape.kv_heads % gpus == 0 or gpus % shape.kv_heads == 0)


def plan(
    shape: ModelShape,
    cluster: Cluster,
    responses: ArrayLike,
    schedule: SparsitySchedule | None,
    prompt: int = 256,
    max_batch: int = 256,
    token_budget: int = 32768,
    colocated: bool = True,
    overheads: Overheads = VLLM_H200,
    recompute: bool = True,
    engine_share: float | None = None,
    acceptance: float | None = None,
    trains: bool = True,
) -> Plan:
    """Predict one RL step over ``responses`` (lengths in tokens), assigned to engines round-robin
    as in the trainer.

    For ``recompute``, ``engine_share`` and ``trains``, see ``fit``. If the GPUs don't train, a step
    consists of its rollout. For ``acceptance``, see ``predict_lossless``.

    Raises ConfigError if there are fewer responses than engines, and in the same cases as ``fit``.
    """
    lengths = np.atleast_1d(np.asarray(responses, dtype=np.int64))
    if lengths.size < cluster.engines:
        raise ConfigError(
            f"{lengths.size} responses leave some of the {cluster.engines} engines idle; sample at "
            "least one response per engine"
        )
    longest = prompt + int(lengths.max())
    memory = fit(shape, cluster, longest, token_budget, colocated, recompute, engine_share, trains)
    machine = engine_machine(cluster, _reserved(cluster, memory.state, colocated, engine_share))
    engine = engine_shape(shape, cluster)
    shares = [lengths[i :: cluster.engines] for i in range(cluster.engines)]
    gather = GATHER_S * int(lengths.sum()) if cluster.gpus > 1 else 0.0
    score = update = sync = 0.0
    if trains:
        score, update = train_seconds(shape, cluster, prompt + lengths, token_budget)
        score += gather
        sync = sync_seconds(shape, cluster, colocated)

    batching = (prompt, max_batch, overheads)

    def step(runs: Sequence[RolloutEstimate]) -> Step:
        return Step(max(r.seconds for r in runs) + gather, score, update, sync, _imbalance(runs))

    def simulated(kind: SparsitySchedule | None) -> list[RolloutEstimate]:
        return [
            roofline.simulate_rollout(engine, machine, share, kind, *batching) for share in shares
        ]

    dense = simulated(None)
    sparse = None if schedule is None else step(simulated(schedule))
    if acceptance is None:
        return Plan(memory, step(dense), sparse)

    pairs = zip(shares, dense, strict=True)
    stored = "auto" if schedule is None else schedule.landmark_dtype
    lossless = [
        predict_lossless(
            engine, machine, share, run, acceptance, *batching, landmark_dtype=stored
        ).rollout
        for share, run in pairs
    ]
    return Plan(memory, step(dense), sparse, step(lossless))


def train_seconds(
    shape: ModelShape, cluster: Cluster, totals: ArrayLike, token_budget: int = 32768
) -> tuple[float, float]:
    """Predict how many seconds a step's log-probs and its update take. Each takes as long as its
    computation (``roofline.train_seconds``) or as gathering the shards, whichever is longer.
    ``totals`` holds the sequence lengths in tokens.
    """
    score_s, update_s = roofline.train_seconds(shape, cluster.machine, totals)
    passes = max(1.0, np.sum(totals) / token_budget / cluster.gpus)

    # bf16 weights are gathered once for the log-probs and twice for the update; gradients are
    # reduced in float32.
    parameters = shape.weights + shape.embedding
    away = (cluster.gpus - 1) / cluster.gpus * parameters / cluster.exchange_bytes_s
    return (
        max(score_s / cluster.gpus, passes * 2 * away),
        max(update_s / cluster.gpus, passes * (2 + 2 + GRADIENT_BYTES) * away),
    )


def sync_seconds(shape: ModelShape, cluster: Cluster, colocated: bool = True) -> float:
    """Predict how many seconds it takes to gather the float32 shards and send every engine its new
    weights. With colocated engines, the prediction includes the time that vLLM's sleep mode takes
    to move engine weights to host memory and back.
    """
    parameters = shape.weights + shape.embedding
    gathered_s = 4 * parameters * (cluster.gpus - 1) / cluster.gpus / cluster.exchange_bytes_s
    if not colocated:
        return gathered_s
    moved_s = 2 * shape.weight_bytes * parameters / cluster.tensor_parallel / HOST_BYTES_S
    return gathered_s + moved_s


def _imbalance(runs: Sequence[RolloutEstimate]) -> float:
    seconds = [run.seconds for run in runs]
    return max(seconds) * len(seconds) / sum(seconds)


def rows(planned: Plan, steps: int | None = None) -> list[tuple[str, str]]:
    """Return a plan as (name, value) pairs for printing. If the number of ``steps`` is given, the
    pairs include the hours for the whole run.
    """
    gib = 2**30
    m = planned.memory
    training = (
        f"{m.state / gib:.0f} state, {m.gradients / gib:.0f} "
        f"gradients, {m.activations / gib:.0f} activations"
    )
    lines = [("training, GiB per GPU", training), _engine_row(m)]
    for name, step in _steps(planned).items():
        phases = ", ".join(
            f"{phase} {getattr(step, phase):.0f}"
            for phase in ("rollout", "score", "update", "sync")
        )
        hours = f", {steps * step.seconds / 3600:.0f} h per run" if steps else ""
        took = f"{step.seconds:.0f} s: {phases}; imbalance {step.imbalance:.2f}{hours}"
        lines.append((f"{name} step", took))
    return [*lines, ("step speed-up", _speedups(planned, "seconds"))]


def rollout_rows(planned: Plan) -> list[tuple[str, str]]:
    """Return what a plan predicts about rollouts as (name, value) pairs for printing, without
    training and without the other phases of a step.
    """
    lines = [_engine_row(planned.memory)]
    for name, step in _steps(planned).items():
        lines.append((f"{name} rollout", f"{step.rollout:.0f} s; imbalance {step.imbalance:.2f}"))
    return [*lines, ("rollout speed-up", _speedups(planned, "rollout"))]


def _engine_row(memory: Memory) -> tuple[str, str]:
    gib = 2**30
    held = (
        f"{memory.engine_weights / gib:.0f} weights, {memory.kv / gib:.0f} "
        f"KV: {memory.full_responses} full-length responses"
    )
    return "engine, GiB per GPU", held


def _steps(planned: Plan) -> dict[str, Step]:
    """Return the steps of a plan by the name of their mode."""
    modes = {"dense": planned.dense, "lossy": planned.sparse, "lossless": planned.lossless}
    return {name: step for name, step in modes.items() if step is not None}


def _speedups(planned: Plan, phase: str) -> str:
    """List each mode's speed-up over dense, either in one ``phase`` or in all ``seconds``."""
    spent = {mode: getattr(step, phase) for mode, step in _steps(planned).items()}
    dense = spent.pop("dense")
    gains = [f"{dense / seconds:.2f}x {mode}" for mode, seconds in spent.items()]
    return ", ".join(gains) or "only dense was requested"
