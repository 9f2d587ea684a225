"""A CUDA kernel for page-sparse decoding on Hopper GPUs, compiled on the machine that runs it."""

from sparrow.attention.cuda.launch import (
    MOST_TOKENS,
    CudaConfig,
    Launches,
    check,
    few_rows,
    run,
    unsupported_reason,
)

__all__ = [
    "MOST_TOKENS",
    "CudaConfig",
    "Launches",
    "check",
    "few_rows",
    "run",
    "unsupported_reason",
]
