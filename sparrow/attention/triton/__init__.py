"""Triton kernels for page attention."""

from sparrow.attention.triton.forced import teacher_forced
from sparrow.attention.triton.launch import Launches, check, run, store_tokens, update_landmarks
from sparrow.attention.triton.tuning import LaunchConfig

__all__ = [
    "LaunchConfig",
    "Launches",
    "check",
    "run",
    "store_tokens",
    "teacher_forced",
    "update_landmarks",
]
