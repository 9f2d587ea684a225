"""Predict the cost and speed-up of sparse and lossless decoding, on one engine or on a cluster."""

from typing import TYPE_CHECKING

from sparrow import _moved
from sparrow.cost.roofline import (
    MACHINES,
    MEMORY_FRACTION,
    VLLM_H200,
    Machine,
    Overheads,
    Prediction,
    RolloutEstimate,
    StepCost,
    decode_step,
    kv_capacity,
    predict,
    response_lengths,
    sequences_held,
    simulate_rollout,
    train_seconds,
)
from sparrow.cost.shapes import SHAPES, Experts, ModelShape

if not TYPE_CHECKING:
    __getattr__ = _moved.attributes_of(__name__)
