"""Lossless mode before a model is loaded: how vLLM is configured, and what it cannot do.

vLLM's ``speculative_config`` names the model as its own draft model (method ``draft_model``).
``sparrow.vllm.lossless.speculator`` then replaces the speculator that would load a second copy of
it.
"""

from __future__ import annotations

from typing import Any

from sparrow.decoding import Decoding
from sparrow.errors import ConfigError, refuse
from sparrow.vllm import versions
from sparrow.vllm.lossless import graphs

ENGINE_KEY = "sparrow"  # the entry of vLLM's ``additional_config`` that says how to decode
SCHEDULER = "sparrow.vllm.lossless.scheduler.LosslessScheduler"


def draft_choices(decoding: Decoding) -> tuple[int, ...]:
    """List the numbers of drafts that a cycle may have: ``draft_tokens``, or if the number adapts,
    0, 1/3, 2/3 and all of ``draft_tokens``.
    """
    k = decoding.draft_tokens
    return (
        tuple(sorted({round(k * part / 3) for part in range(4)}))
        if decoding.adapt_draft_tokens
        else (k,)
    )


def prepare(arguments: Any, decoding: Decoding, on_cpu: bool) -> None:
    """Complete vLLM's ``EngineArgs`` for lossless mode; a second call on the result changes
    nothing.

    Raises ConfigError: a version of vLLM that this mode cannot run in, or an option that it
    excludes.
    """
    versions.check(on_cpu)
    k = decoding.draft_tokens
    wanted: dict[str, Any] = {
        "method": "draft_model",
        "model": arguments.model,
        "num_speculative_tokens": k,
        "draft_sample_method": "probabilistic",
    }
    if decoding.adapt_draft_tokens:
        # Lists the numbers of drafts to make graphs for; the scheduler picks one before each step.
        ranges = [(n, n, drafts) for n, drafts in enumerate(draft_choices(decoding), start=1)]
        wanted["num_speculative_tokens_per_batch_size"] = ranges
    asked = arguments.speculative_config
    allowed = {
        "rejection_sample_method",
        "synthetic_acceptance_rates",
        "synthetic_acceptance_length",
    }
    own = {name: value for name, value in (asked or {}).items() if name not in allowed}
    if own and any(own.get(name) != value for name, value in wanted.items()):
        raise ConfigError(
            f"mode 'lossless' makes vLLM's speculative_config itself, got {asked}; "
            "leave it out, or leave out Sparrow"
        )
    method = (asked or {}).get("rejection_sample_method", "standard")
    if decoding.drafter_invariant and method != "standard":
        raise ConfigError(
            "drafter_invariant verifies by drawing the tokens, not by rejecting drafts, but "
            f"rejection_sample_method is {method!r}; leave one of them out"
        )
    arguments.speculative_config = {**(asked or {}), **wanted}
    if decoding.adapt_draft_tokens:
        if arguments.scheduler_cls not in (None, SCHEDULER):
            raise ConfigError(
                "mode 'lossless' chooses the number of drafts in vLLM's scheduler, but "
                f"scheduler_cls is {arguments.scheduler_cls!r}; leave it out, or set "
                "adapt_draft_tokens to false"
            )
        if arguments.async_scheduling is False:
            raise ConfigError(
                "async_scheduling=False and a number of drafts that adapts exclude each other; "
                "leave async_scheduling out, or set adapt_draft_tokens to false"
            )
        arguments.scheduler_cls = SCHEDULER
    if arguments.async_scheduling is None:
        arguments.async_scheduling = True
    if on_cpu:
        return
    if arguments.attention_backend is None and "CUSTOM" not in str(arguments.attention_config):
        arguments.attention_backend = "CUSTOM"
    compilation = arguments.compilation_config
    sizes = (arguments.cudagraph_capture_sizes, arguments.max_cudagraph_capture_size)
    theirs = (
        getattr(compilation, name, None)
        for name in ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    )
    if not arguments.enforce_eager and not any((*sizes, *theirs)):
        rows = arguments.max_num_seqs or graphs.DEFAULT_ROWS
        arguments.cudagraph_capture_sizes = graphs.capture_sizes(rows, draft_choices(decoding))


def is_ours(speculative_config: Any) -> bool:
    """Return whether vLLM speculates as in lossless mode, with the model as its own draft model."""
    if speculative_config is None or speculative_config.method != "draft_model":
        return False
    return bool(speculative_config.model == speculative_config.target_model_config.model)


def check_supported(vllm_config: Any) -> None:
    """Refuse an engine that would draft densely, with a second copy of the model, or not at all.

    Raises ConfigError: such an engine.
    """
    parallel = vllm_config.parallel_config
    cases = (
        (
            vllm_config.speculative_config is None,
            "vLLM was not told to speculate: "
            "the engine was not made from vLLM's EngineArgs; make it so",
        ),
        (
            not vllm_config.use_v2_model_runner,
            "it needs vLLM's V2 model runner, which this model, device or "
            "VLLM_USE_V2_MODEL_RUNNER rules out; use mode 'lossy', or start vLLM without Sparrow",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            "it does not run with pipeline parallelism; use tensor parallelism",
        ),
        (
            parallel.data_parallel_size > 1,
            "it does not run with vLLM's data parallelism; start an engine for each part",
        ),
        (
            vllm_config.lora_config is not None,
            "its drafts would not follow the adapter of each request; drop "
            "enable_lora and load merged weights, or use mode 'lossy'",
        ),
    )
    refuse(ConfigError, cases, "mode 'lossless': ")


def check_draft_weights(vllm_config: Any, on_cpu: bool) -> None:
    """Refuse an engine whose drafts cannot multiply with an fp8 copy of the weights.

    Raises ConfigError: such an engine.
    """
    import torch
    from vllm import envs
    from vllm.platforms import current_platform

    model = vllm_config.model_config
    in_16_bits = (torch.bfloat16, torch.float16)
    has_fp8 = on_cpu or (current_platform.is_cuda() and current_platform.has_device_capability(89))
    cases = (
        (
            vllm_config.quant_config is not None,
            f"vLLM quantises the weights already ({model.quantization})",
        ),
        (model.is_moe, "the weights of experts have no copy, and they are most of the model"),
        (
            envs.VLLM_BATCH_INVARIANT,
            "vLLM's batch-invariant mode has kernels of its own; unset VLLM_BATCH_INVARIANT",
        ),
        (
            not on_cpu and model.dtype not in in_16_bits,
            f"vLLM's fp8 kernels give 16 bits, and the model's dtype is {model.dtype}",
        ),
        (not has_fp8, "the GPU has no fp8 products (compute capability 8.9 and later have)"),
    )
    refuse(ConfigError, cases, "draft_weights 'fp8': ", "; or leave draft_weights out")


def check_request(sampling: Any) -> None:
    """Refuse a request (vLLM's ``SamplingParams``) that drafting and verifying cannot serve.

    Raises ValueError for such a request; vLLM's server then answers with HTTP 400.
    """
    for name in ("structured_outputs", "min_p", "logit_bias"):
        value = getattr(sampling, name)
        if value:
            raise ValueError(
                f"mode 'lossless' does not serve {name}, got {value!r}; "
                "leave it out, or start vLLM without Sparrow"
            )
