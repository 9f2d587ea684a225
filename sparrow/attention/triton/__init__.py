"""Triton kernels of page attention."""

from sparrow.attention.triton.forced import teacher_forced
from sparrow.attention.triton.launch import DecodeStep, DecodeWorkspace, store_tokens, update_landmarks
from sparrow.attention.triton.tuning import LaunchConfig

__all__ = ["DecodeStep", "DecodeWorkspace", "LaunchConfig", "store_tokens", "teacher_forced", "update_landmarks"]
