"""What the user asked for, and whether vLLM can be made to do it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from sparrow.errors import ConfigError, UnsupportedModel
from sparrow.schedule import SparsitySchedule

KEY = "sparrow"  # the entry of vLLM's ``additional_config`` that holds a schedule
KERNELS_KEY = "sparrow_kernels"  # the entry that says which kernels decode, where not the best that can
ENVIRONMENT = "SPARROW_SCHEDULE"  # the variable that holds one for frameworks that pass nothing to vLLM
KERNELS_ENVIRONMENT = "SPARROW_KERNELS"  # likewise for kernels
KERNELS = ("cuda", "triton")
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32")
"""The model's own precision; a quantised cache would need landmarks and scales of its own."""


def from_environment() -> SparsitySchedule | None:
    """The schedule in ``SPARROW_SCHEDULE``, or None if it is unset or empty."""
    text = os.environ.get(ENVIRONMENT, "").strip()
    return SparsitySchedule.load(text) if text else None


def requested(vllm_config: Any) -> SparsitySchedule | None:
    """The schedule an engine was asked to decode under: ``additional_config`` first, then the environment."""
    value = _additional(vllm_config, KEY)
    return from_environment() if value is None else SparsitySchedule.load(value)


def kernels(vllm_config: Any) -> str | None:
    """The kernels an engine was asked to decode with, ``additional_config`` first; None: the best that can.

    Raises ConfigError: there are none of that name.
    """
    name = _additional(vllm_config, KERNELS_KEY) or os.environ.get(KERNELS_ENVIRONMENT, "").strip()
    if name and name not in KERNELS:
        raise ConfigError(f"unknown {KERNELS_KEY} {name!r}, expected one of {KERNELS}")
    return name or None


def _additional(vllm_config: Any, key: str) -> Any:
    additional = getattr(vllm_config, "additional_config", None)
    return additional.get(key) if isinstance(additional, Mapping) else None


def check_supported(vllm_config: Any, schedule: SparsitySchedule, on_cpu: bool) -> None:
    """Refuse, by name, what would be decoded densely or wrongly.

    Raises UnsupportedModel: a kind of model or attention Sparrow does not select pages from. ConfigError: a vLLM
    feature that has to be switched off, or a schedule that does not match the model.
    """
    model, parallel, cache = vllm_config.model_config, vllm_config.parallel_config, vllm_config.cache_config
    name = getattr(model, "architecture", None) or model.model
    _refuse(
        name,
        (model.use_mla, "multi-head latent attention"),
        (model.is_encoder_decoder, "cross-attention"),
        (model.is_hybrid or model.is_attention_free, "layers without attention"),
        (model.runner_type != "generate", f"the runner {model.runner_type!r}"),
    )
    spec, transfer = vllm_config.speculative_config, vllm_config.kv_transfer_config
    for is_used, feature, remedy in (
        (spec is not None, f"speculative decoding ({getattr(spec, 'method', None)})", "drop speculative_config"),
        (transfer is not None, "a KV connector", "drop kv_transfer_config: it would not carry the landmarks"),
        (parallel.decode_context_parallel_size > 1, "decode context parallelism", "set decode_context_parallel_size=1"),
        (getattr(parallel, "prefill_context_parallel_size", 1) > 1, "prefill context parallelism", "set it to 1"),
        (parallel.use_ubatching, "dual-batch overlap", "drop enable_dbo"),
        (
            cache.cache_dtype not in KV_CACHE_DTYPES,
            f"kv_cache_dtype={cache.cache_dtype!r}",
            "set kv_cache_dtype='auto'",
        ),
    ):
        if is_used:
            raise ConfigError(f"Sparrow does not decode with {feature}; {remedy}")
    if not on_cpu:
        from sparrow.attention.triton.launch import HEAD_DIMS

        if model.get_head_size() not in HEAD_DIMS:
            raise UnsupportedModel(f"{name} has heads of {model.get_head_size()}; the decode kernels take {HEAD_DIMS}")
    schedule.check_model(model.get_total_num_hidden_layers())


def check_layer(asked: Mapping[str, Any]) -> None:
    """Refuse, by name, an attention layer whose decode is not plain softmax over the whole sequence.

    Args:
        asked: the arguments of vLLM's attention implementation.

    Raises UnsupportedModel: such a layer.
    """
    dtype, window, kind = asked["kv_cache_dtype"], asked["sliding_window"], asked["attn_type"]
    _refuse(
        "an attention layer",
        (dtype not in KV_CACHE_DTYPES, f"a KV cache in {dtype!r}"),
        (window is not None, f"a sliding window of {window} tokens"),
        (kind != "decoder", f"attention of the type {getattr(kind, 'value', kind)!r}"),
        (asked["alibi_slopes"] is not None, "ALiBi"),
        (bool(asked["logits_soft_cap"]), f"soft-capped logits ({asked['logits_soft_cap']})"),
        (asked["sinks"] is not None, "attention sinks"),
        (asked["kv_sharing_target_layer_name"] is not None, "a KV cache shared with another layer"),
    )


def _refuse(what: str, *kinds: tuple[bool, str]) -> None:
    for is_kind, kind in kinds:
        if is_kind:
            raise UnsupportedModel(
                f"{what} has {kind}, but Sparrow selects pages from full causal self-attention only; "
                "choose another model, or start vLLM without a schedule"
            )
