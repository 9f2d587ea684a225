"""The int8 format for keys and values, with one scale per token and kv head.

A vector is stored as codes from -127 to 127 and an exponent byte e (E8M0); each element is
``code * 2^(e - 127)``. The scale is the smallest power of 2 that keeps all codes within 127, so no
calibration is needed. Nothing is clipped as long as the scale is within ``exponent_limits``.
Vectors that need a larger scale are clipped, and vectors that need a smaller scale lose precision.

Shapes: D elements per vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT8_MAX = 127
BIAS = 127  # exponent byte of the scale 2^0
NOT_FINITE = 255  # marks a vector with an inf or NaN; all its elements read as NaN


def exponent_limits(dtype: torch.dtype) -> tuple[int, int]:
    """Return the smallest and largest scale exponents for which ``code * scale`` is exact in
    ``dtype``.

    The kernels accumulate in float32. For dtypes with a wider range than float16, the limits are
    100 apart, so that the smallest scale divided by the largest is a normal float32.
    """
    return (-24, 9) if dtype == torch.float16 else (-50, 50)


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Convert ``x`` ``[..., D]`` to int8 codes ``[..., D]``, rounded to nearest even, and uint8
    exponent bytes ``[...]``.
    """
    least, most = exponent_limits(x.dtype)
    x = x.float()
    bits = x.abs().amax(-1).contiguous().view(torch.int32)
    # 127 * 2^e is 1.984375 * 2^(e + 6), with mantissa bits 0x7E0000. Adding 0x1FFFF to a float's
    # bits carries into the exponent if and only if its mantissa is larger than that.
    exponent = ((bits + 0x1FFFF) >> 23) - 6
    exponent = exponent.clamp(least + BIAS, most + BIAS).masked_fill(bits >= 0x7F800000, NOT_FINITE)
    codes = (x / scale_of(exponent)[..., None]).round().clamp(-INT8_MAX, INT8_MAX).nan_to_num(0.0)
    return codes.to(torch.int8), exponent.to(torch.uint8)


def scale_of(exponent: Tensor) -> Tensor:
    """Convert exponent bytes to float32 scales. Byte 0 gives 0, but is never stored."""
    return (exponent.int() << 23).view(torch.float32)


def from_int8(codes: Tensor, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert codes ``[..., D]`` and exponent bytes ``[...]`` to vectors ``[..., D]`` in
    ``dtype``.
    """
    return codes.to(dtype) * scale_of(exponent)[..., None].to(dtype)
