"""Read Sparrow's settings for a vLLM engine, and check that this version of vLLM supports them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, NamedTuple

from sparrow.decoding import Decoding
from sparrow.errors import ConfigError, UnsupportedModel, refuse
from sparrow.vllm import kv_cache, versions
from sparrow.vllm.lossless import setup

if TYPE_CHECKING:
    from sparrow.attention import Implementation

KEY = "sparrow"  # where Sparrow's settings live in vLLM's ``additional_config``
# This setting names the decode kernels. If it's unset, the fastest supported ones are used.
KERNELS_KEY = "sparrow_kernels"
# for frameworks that can't pass options to vLLM
MODE_ENVIRONMENT = "SPARROW_MODE"
ENVIRONMENT = "SPARROW_SCHEDULE"
KERNELS_ENVIRONMENT = "SPARROW_KERNELS"  # names the decode kernels
KERNELS = ("cuda", "triton")
KV_CACHE_DTYPES = ("auto", "float16", "bfloat16", "float32", *kv_cache.STORED)


def from_environment() -> Decoding | None:
    """Read ``SPARROW_MODE`` and ``SPARROW_SCHEDULE``. Return None if both are unset or empty.

    A schedule without a mode means lossy mode. In lossless mode, the schedule is the draft
    schedule. To set more options, write the mode as JSON, as in ``additional_config``.

    Raises ConfigError if ``Decoding.load`` cannot read the values, or if a schedule is set along
    with a JSON mode.
    """
    mode, schedule = (os.environ.get(name, "").strip() for name in (MODE_ENVIRONMENT, ENVIRONMENT))
    try:
        return _decoding(mode, schedule)
    except ConfigError as error:
        given = {MODE_ENVIRONMENT: mode, ENVIRONMENT: schedule}
        where = " and ".join(f"{name}={value!r}" for name, value in given.items() if value)
        raise ConfigError(f"cannot use {where} from the environment: {error}") from error


def _decoding(mode: str, schedule: str) -> Decoding | None:
    """Read the values of the two environment variables, which may be empty."""
    if not mode:
        return Decoding.lossy(schedule) if schedule else None
    if mode.startswith("{"):
        if schedule:
            raise ConfigError(
                f"{MODE_ENVIRONMENT} already contains all settings; unset {ENVIRONMENT}"
            )
        return Decoding.load(mode)
    key = "draft_schedule" if mode == "lossless" else "schedule"
    return Decoding.load({"mode": mode, **({key: schedule} if schedule else {})})


@contextlib.contextmanager
def variables(values: Mapping[str, str | None]) -> Iterator[None]:
    """Set environment variables inside the context, and restore them afterwards. None unsets a
    variable.
    """
    before = {name: os.environ.get(name) for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def is_ours_but_unset(arguments: Any) -> bool:
    """Return whether vLLM's ``EngineArgs`` name Sparrow's attention backend, but neither they nor
    the environment say how to decode.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    if setup.backend_of(arguments) != "CUSTOM" or requested(arguments) is not None:
        return False
    custom = AttentionBackendEnum.CUSTOM  # another plugin may have registered its own backend
    return custom.is_overridden() and custom.get_path().startswith("sparrow.")


def _set(values: Mapping[str, str | None]) -> None:
    for name, value in values.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def store(arguments: Any, decoding: Decoding, on_cpu: bool) -> None:
    """Write the engine's decoding settings into vLLM's ``EngineArgs``, whether they came from
    ``additional_config`` or from the environment.

    The engine then keeps its settings even if the environment changes. The settings also become
    part of vLLM's cache key for compiled models, so that engines with different settings don't
    share a compiled model.

    On a GPU, an engine whose mode is set in the environment gets Sparrow's backend, unless the
    engine names another backend. Sparrow's backend is requested as ``CUSTOM``, because
    ``FLASH_ATTN`` still means vLLM's own backend if an earlier engine in this process started
    without Sparrow's variables.
    """
    by_environment = additional(arguments, KEY) is None
    arguments.additional_config = {
        **(arguments.additional_config or {}),
        KEY: decoding.to_dict(),
    }
    if by_environment and not on_cpu and setup.backend_of(arguments) is None:
        arguments.attention_backend = "CUSTOM"


def requested(vllm_config: Any) -> Decoding | None:
    """Return the decoding settings in the engine's ``additional_config``, or else in the
    environment. Return None if neither has any; the engine then decodes like stock vLLM.

    Raises ConfigError if ``Decoding.load`` cannot read the settings, or if ``additional_config``
    has another name that begins with "sparrow", in any case, or resembles it.
    """
    given = getattr(vllm_config, "additional_config", None)
    names = (KEY, KERNELS_KEY)
    for name in given if isinstance(given, Mapping) else ():
        spelt = str(name).lower()
        is_meant_for_us = spelt.startswith(KEY) or get_close_matches(spelt, names, cutoff=0.8)
        if is_meant_for_us and name not in names:
            raise ConfigError(f"additional_config has no setting {name!r}, expected one of {names}")
    value = additional(vllm_config, KEY)
    return from_environment() if value is None else Decoding.load(value)


def requested_lossless(vllm_config: Any) -> Decoding | None:
    """Return the decoding settings requested for a lossless engine, or None in other modes."""
    decoding = requested(vllm_config)
    return decoding if decoding is not None and decoding.is_lossless else None


def kernels(vllm_config: Any) -> Implementation | None:
    """Return the name of the decode kernels in the engine's ``additional_config``, or else in the
    environment. None means the fastest kernels that support the model.

    Raises ConfigError if there are no kernels by that name.
    """
    name: Any = (
        additional(vllm_config, KERNELS_KEY) or os.environ.get(KERNELS_ENVIRONMENT, "").strip()
    )
    if name and name not in KERNELS:
        raise ConfigError(f"unknown {KERNELS_KEY} {name!r}, expected one of {KERNELS}")
    return name or None


def additional(vllm_config: Any, key: str) -> Any:
    additional = getattr(vllm_config, "additional_config", None)
    return additional.get(key) if isinstance(additional, Mapping) else None


def check_supported(vllm_config: Any, decoding: Decoding, on_cpu: bool) -> None:
    """Refuse models and vLLM features that would make Sparrow decode densely or incorrectly.

    Raises UnsupportedModel if Sparrow does not support this kind of model or attention, or
    ConfigError if a vLLM feature has to be turned off or the schedule doesn't match the model.
    """
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    cache = vllm_config.cache_config
    name = _name_of(model)
    window = getattr(cache, "sliding_window", None)
    _refuse(
        name,
        (model.use_mla, "multi-head latent attention"),
        (model.is_encoder_decoder, "cross-attention"),
        (model.is_attention_free, "layers without attention"),
        (model.runner_type != "generate", f"the runner {model.runner_type!r}"),
        # vLLM sets this field only if no layer has full attention
        (window is not None, f"a sliding window of {window} tokens in every layer"),
    )
    if (others := _others(model)) is not None:
        check_hybrid(vllm_config, decoding, others)
    spec = vllm_config.speculative_config
    is_lossless = decoding.is_lossless
    dtype = cache.cache_dtype
    cases = (
        (
            getattr(model, "is_mm_prefix_lm", False),
            f"bidirectional attention to images, which {name} has; set language_model_only=True to "
            "serve only its text model",
        ),
        (
            spec is not None and not is_lossless,
            f"speculative decoding ({getattr(spec, 'method', None)}); leave speculative_config out",
        ),
        (
            vllm_config.kv_transfer_config is not None,
            "a KV connector, which would not transfer the landmarks; leave kv_transfer_config out",
        ),
        (
            parallel.decode_context_parallel_size > 1,
            "decode context parallelism; set decode_context_parallel_size=1",
        ),
        (
            getattr(parallel, "prefill_context_parallel_size", 1) > 1,
            "prefill context parallelism; set prefill_context_parallel_size=1",
        ),
        (parallel.use_ubatching, "dual-batch overlap; leave enable_dbo out"),
        (
            dtype not in KV_CACHE_DTYPES,
            f"kv_cache_dtype={dtype!r}; set kv_cache_dtype='auto', 'fp8' or {kv_cache.INT8!r}",
        ),
        (
            dtype == kv_cache.INT8 and is_lossless,
            f"kv_cache_dtype={kv_cache.INT8!r} in lossless mode, because vLLM's own attention "
            "cannot read int8; set kv_cache_dtype='auto' or 'fp8', or mode 'lossy'",
        ),
        (
            bool(getattr(cache, "kv_cache_dtype_skip_layers", None)),
            "a KV cache with more than one dtype; leave kv_cache_dtype_skip_layers out",
        ),
        (
            bool(getattr(cache, "calculate_kv_scales", False)),
            "KV scales calculated by vLLM, because Sparrow sets them itself; "
            "leave calculate_kv_scales out",
        ),
    )
    refuse(ConfigError, cases, "Sparrow does not support ")
    if not on_cpu:
        from sparrow.attention.decode import HEAD_DIMS

        if model.get_head_size() not in HEAD_DIMS:
            raise UnsupportedModel(
                f"{name} has heads of size {model.get_head_size()}, but the decode kernels "
                f"support only the head sizes {HEAD_DIMS}; choose a different model"
            )
    if is_lossless:
        setup.check_supported(vllm_config)
        if decoding.draft_weights == "fp8":
            setup.check_draft_weights(vllm_config, on_cpu)
        if decoding.guess_tokens:
            setup.check_guesses(vllm_config, decoding)
        if decoding.guess_head is not None:
            setup.check_head(vllm_config)
    decoding.schedule.check_model(
        model.get_total_num_hidden_layers(), model.get_total_num_kv_heads()
    )


class Others(NamedTuple):
    """The layers of a hybrid model that do not have full attention. They are vLLM's own: Sparrow
    neither changes nor counts them.
    """

    what: str
    why_not_lossless: str


STATES = Others(
    "a state instead of a KV cache in some layers",
    "a rejected draft cannot be removed from a state",
)
WINDOWS = Others(
    "a sliding window in some layers", "draft steps only support layers with full attention"
)


def _others(model: Any) -> Others | None:
    """Return what a hybrid model has instead of full attention, or None if its config doesn't
    mention any such layers.
    """
    if model.is_hybrid:
        return STATES
    text = getattr(model, "hf_text_config", None)
    has_windows = "sliding_attention" in (getattr(text, "layer_types", None) or ())
    return WINDOWS if has_windows and getattr(text, "sliding_window", None) else None


def check_hybrid(vllm_config: Any, decoding: Decoding, others: Others) -> None:
    """Refuse settings that do not work with a hybrid model, where only some layers have full
    attention.

    Raises ConfigError if a setting has to be changed, or if vLLM is too old.
    """
    versions.check_hybrid()
    name = _name_of(vllm_config.model_config)
    cache = vllm_config.cache_config
    cases = (
        (
            decoding.is_lossless,
            f"mode 'lossless', because {others.why_not_lossless}; set mode 'lossy'",
        ),
        (
            bool(decoding.schedule.head_budgets),
            "head_budgets, whose mean would include layers without full attention; "
            "leave head_budgets out",
        ),
        (
            cache.cache_dtype in kv_cache.STORED,
            f"kv_cache_dtype={cache.cache_dtype!r}, which has not been tested; "
            "set kv_cache_dtype='auto'",
        ),
        (
            cache.prefix_match_unit is not None,
            f"prefix_match_unit={cache.prefix_match_unit}, because vLLM would copy parts of blocks "
            "without their landmarks; leave prefix_match_unit out",
        ),
    )
    refuse(ConfigError, cases, f"{name} has {others.what}, for which Sparrow does not support ")


def _name_of(model: Any) -> str:
    return getattr(model, "architecture", None) or model.model


def check_layer(asked: Mapping[str, Any]) -> None:
    """Refuse any attention layer that doesn't compute plain softmax attention over the whole
    sequence or a sliding window.

    Args:
        asked: the arguments of vLLM's attention implementation.

    Raises UnsupportedModel if Sparrow does not support the layer.
    """
    dtype = asked["kv_cache_dtype"]
    kind = asked["attn_type"]
    _refuse(
        "an attention layer",
        (dtype not in KV_CACHE_DTYPES, f"a KV cache in {dtype!r}"),
        (kind != "decoder", f"attention of the type {getattr(kind, 'value', kind)!r}"),
        (asked["alibi_slopes"] is not None, "ALiBi"),
        (bool(asked["logits_soft_cap"]), f"soft-capped logits ({asked['logits_soft_cap']})"),
        (asked["sinks"] is not None, "attention sinks"),
        (asked["kv_sharing_target_layer_name"] is not None, "a KV cache shared with another layer"),
    )


def _refuse(what: str, *kinds: tuple[bool, str]) -> None:
    remedy = "choose another model, or start vLLM without a schedule"
    only = f", but Sparrow needs full causal self-attention; {remedy}"
    refuse(UnsupportedModel, kinds, f"{what} has ", only)
