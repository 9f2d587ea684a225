"""A CUDA kernel for page-sparse decoding on Hopper GPUs, compiled where it runs."""

from sparrow.attention.cuda.launch import CudaConfig, CudaStep, refusal

__all__ = ["CudaConfig", "CudaStep", "refusal"]
