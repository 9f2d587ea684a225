"""Triton kernels of page attention."""

from sparrow.attention.triton.forced import teacher_forced
from sparrow.attention.triton.launch import DecodeWorkspace, paged_decode, store_tokens, update_landmarks
from sparrow.attention.triton.tuning import LaunchConfig

__all__ = ["DecodeWorkspace", "LaunchConfig", "paged_decode", "store_tokens", "teacher_forced", "update_landmarks"]
