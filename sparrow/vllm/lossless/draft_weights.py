"""An fp8 copy of the model's weights for drafting in lossless mode. All other steps use the real
weights.

Linear layers call a custom op that is opaque to torch.compile. The op chooses between the copy and
the real weights each time it runs or is captured in a CUDA graph. Draft step graphs therefore
multiply in fp8, and vLLM's own graphs in 16 bits. The arithmetic matches vLLM's
``quantization="fp8_per_channel"``, with per-output and per-token scales.

Shapes: T tokens, N outputs, K inputs of a linear layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.utils.torch_utils import direct_register_custom_op

from sparrow.attention.pages import FP8, FP8_MAX
from sparrow.errors import UnsupportedModel

# This is the same as in vLLM's kernel. It keeps the scale valid for rows of zeros.
SMALLEST_SCALE = 1 / (512 * FP8_MAX)
ALIGNED = 16  # both sides of the kernel's matrices must be multiples of this

_drafting = False


@contextmanager
def drafting() -> Iterator[None]:
    """Inside the context, make linear layers use their fp8 copies, if any. The flag is global,
    which is fine because a process runs only one model at a time.
    """
    global _drafting
    _drafting = True
    try:
        yield
    finally:
        _drafting = False


def quantize(rows: Tensor, values: Tensor) -> Tensor:
    """Round ``rows`` to fp8 with per-row scales.

    Args:
        rows: ``[rows, columns]``, contiguous.
        values: output tensor, float8_e4m3fn of the same shape.

    Returns:
        The scales, float32 ``[rows, 1]``.
    """
    # The kernel needs no scratch memory. There may be none left once the KV cache is allocated.
    if rows.is_cuda:
        return ops.scaled_fp8_quant(rows, output=values, use_per_token_if_dynamic=True)[1]
    scale = (rows.float().abs().amax(1, keepdim=True) / FP8_MAX).clamp_(min=SMALLEST_SCALE)
    values.copy_((rows.float() / scale).clamp_(-FP8_MAX, FP8_MAX))
    return scale


def fp8_linear(x_TK: Tensor, bias: Tensor | None, values_NK: Tensor, scales_N1: Tensor) -> Tensor:
    """Round the activations to fp8, and multiply them by the fp8 weights. Return ``[T, N]`` in the
    activations' dtype.
    """
    x8 = torch.empty(x_TK.shape, dtype=FP8, device=x_TK.device)
    scale_T1 = quantize(x_TK.contiguous(), x8)
    if x_TK.is_cuda:
        return ops.cutlass_scaled_mm(x8, values_NK.t(), scale_T1, scales_N1, x_TK.dtype, bias)
    product = linear(x8.float(), values_NK.float()) * scale_T1 * scales_N1.t()
    return (product if bias is None else product + bias).to(x_TK.dtype)


def draft_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, values: Tensor, scales: Tensor
) -> Tensor:
    """Apply a linear layer to ``x`` ``[..., K]``. When drafting, use the fp8 copy (``values`` and
    ``scales``) instead of ``weight`` ``[N, K]``.
    """
    if not _drafting:
        return linear(x, weight, bias)
    return fp8_linear(x.reshape(-1, x.shape[-1]), bias, values, scales).view(*x.shape[:-1], -1)


def _shape(
    x: Tensor, weight: Tensor, bias: Tensor | None, values: Tensor, scales: Tensor
) -> Tensor:
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


_library = torch.library.Library("sparrow", "FRAGMENT")
direct_register_custom_op("draft_linear", draft_linear, fake_impl=_shape, target_lib=_library)


class DraftLinearMethod(UnquantizedLinearMethod):
    """A ``quant_method`` for vLLM's linear layers that holds an fp8 copy of the weight. The copy
    isn't a buffer of the layer, because vLLM saves buffers before sleeping and replaces them when
    reloading weights.
    """

    def __init__(self, layer: Any) -> None:
        weight = layer.weight
        self.values = torch.empty(weight.shape, dtype=FP8, device=weight.device)
        self.scales = torch.empty(len(weight), 1, dtype=torch.float32, device=weight.device)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return torch.ops.sparrow.draft_linear(x, layer.weight, bias, self.values, self.scales)


class DraftWeights:
    """One worker's fp8 copy of the weights, refreshed whenever the weights change.

    Create it after the model is loaded and before it is compiled. It is updated in place, because
    CUDA graphs refer to its tensors by address.

    Raises UnsupportedModel if none of the model's layers can have a copy.
    """

    def __init__(self, model: Any) -> None:
        linears: list[Any] = [layer for layer in model.modules() if isinstance(layer, LinearBase)]
        self._copies = [
            (layer, DraftLinearMethod(layer)) for layer in linears if _can_be_copied(layer)
        ]
        if not self._copies:
            raise UnsupportedModel(
                f"{type(model).__name__} has no 16-bit linear layer whose input and output sizes "
                f"are multiples of {ALIGNED}, which draft_weights 'fp8' needs; leave "
                "draft_weights out"
            )
        kept = [layer for layer in linears if not _can_be_copied(layer)]
        self.kept_layers = len(kept)
        self.kept_bytes = sum(x.nbytes for layer in kept for x in layer.parameters())
        self.bytes = sum(method.values.nbytes + method.scales.nbytes for _, method in self._copies)
        for layer, method in self._copies:
            layer.quant_method = method
        self.is_stale = True
        self.renew()
        load_weights = model.load_weights

        @wraps(load_weights)
        def followed(*args: Any, **kwargs: Any) -> Any:
            self.is_stale = True
            return load_weights(*args, **kwargs)

        # All weights are loaded through this method, except for direct writes to the parameters,
        # which ``patches.follow_weights`` catches.
        model.load_weights = followed

    @torch.inference_mode()
    def renew(self) -> None:
        """Copy the weights again, in place, if they may have changed. Call this before drafting."""
        if self.is_stale:
            for layer, method in self._copies:
                method.scales.copy_(quantize(layer.weight, method.values))
            self.is_stale = False

    def __len__(self) -> int:
        return len(self._copies)

    def describe(self) -> dict[str, Any]:
        """Return the memory used by the copy, and the numbers of linear layers with and without a
        copy. The values have plain types.
        """
        return {
            "draft_weight_bytes": self.bytes,
            "draft_layers": len(self),
            "draft_layers_in_16_bits": self.kept_layers,
        }


def _can_be_copied(layer: Any) -> bool:
    weight = getattr(layer, "weight", None)
    return (
        type(layer.quant_method) is UnquantizedLinearMethod
        and weight is not None
        and weight.ndim == 2
        and weight.is_contiguous()
        and not any(size % ALIGNED for size in weight.shape)
    )
