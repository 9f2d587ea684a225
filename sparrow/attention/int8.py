"""Keys and values in int8, with one scale per vector of a token and kv head: the one definition of
this format.

A vector is codes from -127 to 127 and one exponent byte e (E8M0): it stands for ``code * 2^(e -
127)``. The scale is the least power of 2 with which no code exceeds 127, so that nothing has to be
calibrated, and nothing is clipped within ``exponent_limits``. Vectors beyond the greatest scale are
clipped, and those below the least lose digits.

Shapes: D elements of a vector.
"""

from __future__ import annotations

import torch
from torch import Tensor

INT8_MAX = 127
BIAS = 127  # the byte of the exponent 0
NOT_FINITE = 255  # the byte of a vector with an infinite element or NaN: all of it reads as NaN


def exponent_limits(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the greatest exponent of a scale for vectors in ``dtype``, which holds ``code *
    scale`` exactly.

    Those of wider dtypes than float16 are 100 apart at the most: relative to the greatest, the
    least is still a normal float32, in which the kernels add weights.
    """
    return (-24, 9) if dtype == torch.float16 else (-50, 50)


def to_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """``x`` ``[..., D]`` as codes, int8, rounded to nearest even, and exponent bytes ``[...]``,
    uint8.
    """
    least, most = exponent_limits(x.dtype)
    x = x.float()
    bits = x.abs().amax(-1).contiguous().view(torch.int32)
    # 127 * 2^e is 1.984375 * 2^(e + 6), of which the mantissa's bits are 0x7E0000: what exceeds it
    # carries over.
    exponent = ((bits + 0x1FFFF) >> 23) - 6
    exponent = exponent.clamp(least + BIAS, most + BIAS).masked_fill(bits >= 0x7F800000, NOT_FINITE)
    codes = (x / scale_of(exponent)[..., None]).round().clamp(-INT8_MAX, INT8_MAX).nan_to_num(0.0)
    return codes.to(torch.int8), exponent.to(torch.uint8)


def scale_of(exponent: Tensor) -> Tensor:
    """Scales, float32, of exponent bytes; 0 for the byte 0, which is never stored."""
    return (exponent.int() << 23).view(torch.float32)


def from_int8(codes: Tensor, exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Vectors ``[..., D]`` in ``dtype`` of codes and exponent bytes ``[...]``."""
    return codes.to(dtype) * scale_of(exponent)[..., None].to(dtype)
