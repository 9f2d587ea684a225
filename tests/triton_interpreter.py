"""Repairs Triton 3.6's interpreter when imported; without effect on anything else.

It multiplies bfloat16 bits as integers, rounds downcasts to bfloat16 and float8 wrongly, and cannot use a scalar as
a loop bound with NumPy 2.4.
"""

import numpy as np
import torch
import triton.runtime.interpreter as interpreter
from triton import language as tl

_upcast, _dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
_patch_tensor = interpreter._patch_lang_tensor
_TORCH = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}


def _convert_float(data, source, target, rounding):
    if source != tl.float32 or target not in _TORCH:
        return _upcast(data, source, target, rounding)
    bits = torch.from_numpy(np.ascontiguousarray(data).reshape(-1)).to(_TORCH[target])
    raw = torch.uint16 if target == tl.bfloat16 else torch.uint8
    return bits.view(raw).numpy().reshape(data.shape)


def _create_dot(self, a, b, d, precision, imprecise):
    if a.dtype.scalar == tl.bfloat16:
        a, b = self.cast_impl(a, tl.float32), self.cast_impl(b, tl.float32)
    return _dot(self, a, b, d, precision, imprecise)


def _patch_lang_tensor(tensor, scope):
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter._convert_float = _convert_float
interpreter.InterpreterBuilder.create_dot = _create_dot
