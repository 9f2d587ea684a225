"""Importing this module repairs Triton 3.6's interpreter, and does nothing else.

The interpreter multiplies bfloat16 bits as integers, rounds downcasts to bfloat16 incorrectly, and
cannot use a scalar as a loop bound with NumPy 2.4. Nor does it detect invalid memory accesses:
here, a load or store outside the storage of the tensors passed to a kernel raises ``IndexError``.
Finally, the interpreter patches ``triton.language`` again in every function that a kernel calls,
which can take longer than the function itself; here, it is patched only once per launch.
"""

import numpy as np
import torch
import triton.runtime.interpreter as interpreter
from triton import language as tl

_upcast, _dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot
_load, _store = (
    interpreter.InterpreterBuilder.create_masked_load,
    interpreter.InterpreterBuilder.create_masked_store,
)
_patch_tensor, _arguments = interpreter._patch_lang_tensor, interpreter.GridExecutor._init_args_hst
_patch_language = interpreter._patch_lang


def _convert_float(data, source, target, rounding):
    if (source, target) != (tl.float32, tl.bfloat16):
        return _upcast(data, source, target, rounding)
    bits = torch.from_numpy(np.ascontiguousarray(data).reshape(-1)).bfloat16()
    return bits.view(torch.uint16).numpy().reshape(data.shape)


def _create_dot(self, a, b, d, precision, imprecise):
    if a.dtype.scalar == tl.bfloat16:
        a, b = self.cast_impl(a, tl.float32), self.cast_impl(b, tl.float32)
    return _dot(self, a, b, d, precision, imprecise)


def _patch_lang_tensor(tensor, scope):
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


def _patch_lang(fn):
    modules = [x for x in fn.__globals__.values() if x is tl or x is tl.core]
    is_patched = not any(tl.core.is_builtin(module.load) for module in modules)
    return interpreter._LangPatchScope() if is_patched else _patch_language(fn)


_storages = np.zeros(
    (0, 2), np.uint64
)  # first and last byte of each tensor passed to the running kernel, in order


def _init_args_hst(self, arguments, options):
    global _storages
    arguments, options = found = _arguments(self, arguments, options)
    tensors = (x for x in (*arguments, *options.values()) if hasattr(x, "untyped_storage"))
    storages = [x.untyped_storage() for x in tensors]
    _storages = np.array(
        sorted((s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages), np.uint64
    )
    return found


def _check(pointers, mask):
    places = pointers.data[mask.data.astype(bool)].astype(np.uint64)
    storage = np.searchsorted(_storages[:, 0], places, side="right") - 1
    width = pointers.get_element_ty().primitive_bitwidth // 8
    if (storage < 0).any() or (places + np.uint64(width) > _storages[storage, 1]).any():
        raise IndexError("a kernel reads or writes outside the tensors it was given")


def _create_masked_load(self, pointers, mask, *rest):
    _check(pointers, mask)
    return _load(self, pointers, mask, *rest)


def _create_masked_store(self, pointers, value, mask, *rest):
    _check(pointers, mask)
    return _store(self, pointers, value, mask, *rest)


interpreter._patch_lang = _patch_lang
interpreter._patch_lang_tensor = _patch_lang_tensor
interpreter._convert_float = _convert_float
interpreter.InterpreterBuilder.create_dot = _create_dot
interpreter.InterpreterBuilder.create_masked_load = _create_masked_load
interpreter.InterpreterBuilder.create_masked_store = _create_masked_store
interpreter.GridExecutor._init_args_hst = _init_args_hst
