"""CUDA kernel for page-sparse decoding on Hopper GPUs, compiled at run time."""

from sparrow.attention.cuda.launch import (
    CudaConfig,
    Launches,
    check,
    few_rows,
    run,
    unsupported_reason,
)

__all__ = [
    "CudaConfig",
    "Launches",
    "check",
    "few_rows",
    "run",
    "unsupported_reason",
]
