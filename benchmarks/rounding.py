"""Round the keys, values or weights of a Qwen3 or Llama in transformers to 8 bits (e4m3 or int8),
the way vLLM with Sparrow does.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn

from sparrow.attention.int8 import from_int8, to_int8
from sparrow.attention.pages import FP8_MAX, to_fp8
from sparrow.vllm.fp8 import power_of_two

Scales = Sequence[tuple[Tensor, Tensor]]
"""Each layer's key and value scales, float32 ``[K]``."""


def through_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """Round ``x`` to e4m3 with this scale, and return it in its own dtype."""
    return (to_fp8(x.float() / scale).float() * scale).to(x.dtype)


def through_int8(x: Tensor) -> Tensor:
    """Round ``x`` to int8 with one scale per vector along the last dimension, like an int8 cache,
    and return it in its own dtype.
    """
    return from_int8(*to_int8(x), x.dtype)


@contextmanager
def _watched(model: Any, change_keys: Any, change_values: Any) -> Iterator[None]:
    """Within this context, the model uses the keys and values that ``change_keys`` and
    ``change_values`` return. Both get a layer's number. ``change_keys`` also gets the layer's keys,
    ``[B, K, T, D]``, after the rotary embedding. ``change_values`` gets its values, ``[B, T, K,
    D]``.
    """
    layer_now = [0]
    modeling = cast(Any, sys.modules[type(model).__module__])
    stock = modeling.apply_rotary_pos_emb

    def rotary(q: Tensor, k: Tensor, *more: Any, **named: Any) -> tuple[Tensor, Tensor]:
        q, k = stock(q, k, *more, **named)
        return q, change_keys(layer_now[0], k)

    with ExitStack() as stack:
        for i, layer in enumerate(model.model.layers):
            attention = layer.self_attn
            before = attention.register_forward_pre_hook(
                lambda *_, i=i: layer_now.__setitem__(0, i)
            )
            stack.callback(before.remove)

            def values(
                module: Any, inputs: Any, v: Tensor, i: int = i, D: int = attention.head_dim
            ) -> Tensor:
                return change_values(i, v.unflatten(-1, (-1, D))).flatten(-2)

            stack.callback(attention.v_proj.register_forward_hook(values).remove)
        stack.callback(setattr, modeling, "apply_rotary_pos_emb", stock)
        modeling.apply_rotary_pos_emb = rotary
        yield


def rounded_cache(model: Any, scales: Scales) -> Any:
    """Return a context in which layer i rounds its keys and values to e4m3 using ``scales[i]``."""
    return _watched(
        model,
        lambda i, k: through_fp8(k, scales[i][0][:, None, None]),
        lambda i, v: through_fp8(v, scales[i][1][:, None]),
    )


def int8_cache(model: Any) -> Any:
    """Return a context in which the model rounds keys and values to int8, with a power-of-2 scale
    per token and head.
    """
    return _watched(model, lambda _, k: through_int8(k), lambda _, v: through_int8(v))


@torch.no_grad()
def scales_of(model: Any, prompt_BT: Tensor) -> Scales:
    """Return the scales Sparrow would set if these prompts were prefilled first."""
    largest: list[dict[int, Tensor]] = [{}, {}]

    def note(which: int, heads: tuple[int, ...]) -> Any:
        def keep(i: int, x: Tensor) -> Tensor:
            largest[which][i] = x.float().abs().amax(heads)
            return x

        return keep

    with _watched(model, note(0, (0, 2, 3)), note(1, (0, 1, 3))):
        model.model(input_ids=prompt_BT, use_cache=False)
    keys, values = ([power_of_two(of[i], model.dtype) for i in range(len(of))] for of in largest)
    return list(zip(keys, values, strict=True))


@contextmanager
def rounded_matrices(model: Any) -> Iterator[None]:
    """Within this context, layers round their weights and inputs to e4m3, like vLLM's
    ``quantization="fp8_per_channel"``. Weights have one scale per output, and inputs have one scale
    per token. Products are exact.
    """

    def per_row(x: Tensor) -> Tensor:
        return through_fp8(x, x.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / FP8_MAX)

    with torch.no_grad(), ExitStack() as stack:
        for module in model.model.layers.modules():
            if isinstance(module, nn.Linear):
                stack.callback(module.weight.copy_, module.weight.clone())
                module.weight.copy_(per_row(module.weight))
                before = module.register_forward_pre_hook(
                    lambda _, inputs: (per_row(inputs[0]), *inputs[1:])
                )
                stack.callback(before.remove)
        yield
