"""Set up lossless mode before a model is loaded: configure vLLM, and refuse unsupported setups.

vLLM's ``speculative_config`` names the model as its own draft model (method ``draft_model``). If a
head guesses (``guess_head``), the head is named as the draft model instead (method ``eagle3``).
vLLM's speculator would load a second copy of the model, or draft with the head alone, so
``sparrow.vllm.lossless.speculator`` replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import copy
from typing import Any

from sparrow.decoding import Decoding
from sparrow.errors import ConfigError, refuse
from sparrow.vllm import versions
from sparrow.vllm.lossless import graphs

_CLAIM = "_sparrow_drafts"  # attribute of a ``speculative_config`` that lossless mode uses
SCHEDULER = "sparrow.vllm.lossless.scheduler.LosslessScheduler"
ALLOWED_SPECULATION = (
    "rejection_sample_method",
    "synthetic_acceptance_rates",
    "synthetic_acceptance_length",
)
"""Options of vLLM's ``speculative_config`` that users may set in lossless mode."""
REFUSED_OPTIONS = {
    "structured_outputs": "the grammar would have to read all drafts on the host",
    "logprob_token_ids": "vLLM does not report these log-probs for tokens that it verifies",
}
"""Request options that lossless mode refuses, and why."""
DRAFTS_PER_PASS = 2.5
"""Number of ``draft_tokens`` per sparse pass in a cycle with guesses. Where guessing from history
pays off, a pass makes about two drafts (``studies/cascade/history.py``), but rows differ. With a
pass for every two drafts, most rows would have all their drafts before the last pass.
"""


def passes_of(draft_tokens: int) -> int:
    """Return how many sparse passes a cycle needs for ``draft_tokens`` drafts with guesses."""
    return max(1, round(draft_tokens / DRAFTS_PER_PASS))


def draft_choices(decoding: Decoding) -> tuple[int, ...]:
    """List the possible draft lengths. If drafting is not adaptive, ``draft_tokens`` is the only
    one. If drafting is adaptive, the list also has 0 and about 1/3 and 2/3 of ``draft_tokens``.
    """
    k = decoding.draft_tokens
    if not decoding.adapt_draft_tokens:
        return (k,)
    return tuple(sorted({round(k * part / 3) for part in range(4)}))


def drafts_alone(choices: Iterable[int]) -> int:
    """Return the number of drafts in a cycle without sparse passes, where all drafts are guesses.
    This is the smallest draft length other than 0. vLLM captures graphs only for draft lengths, and
    longer sequences of guesses are seldom right.
    """
    return min(k for k in choices if k)


def prepare(arguments: Any, decoding: Decoding, on_cpu: bool) -> None:
    """Fill in vLLM's ``EngineArgs`` for lossless mode. Calling this twice is harmless.

    Raises ConfigError if this version of vLLM does not support lossless mode, or if an option
    conflicts with it.
    """
    versions.check(on_cpu)
    if decoding.guess_head is not None:
        versions.check_head()
        # Programs that update the model's weights don't have the head's weights. The head's weights
        # must therefore survive even a sleep that drops all other weights.
        kept = arguments.sleep_preserve_parameter_names
        arguments.sleep_preserve_parameter_names = [*dict.fromkeys([*kept, "draft.*"])]
    arguments.speculative_config = _speculative_config(arguments, decoding)
    if decoding.adapt_draft_tokens:
        _set_scheduler(arguments)
    if arguments.async_scheduling is None:
        arguments.async_scheduling = True
    if not on_cpu:
        _set_gpu_options(arguments, decoding)


def _speculative_config(arguments: Any, decoding: Decoding) -> dict[str, Any]:
    """Return the ``speculative_config`` for lossless mode, which keeps the user's options for
    rejection sampling.

    Raises ConfigError if the user has set any other option, unless it has the same value.
    """
    wanted: dict[str, Any] = {
        "method": "draft_model" if decoding.guess_head is None else "eagle3",
        "model": decoding.guess_head or arguments.model,
        "num_speculative_tokens": decoding.draft_tokens,
        "draft_sample_method": "probabilistic",
        # vLLM captures graphs for each of these draft lengths. If the number of drafts is adaptive,
        # the scheduler picks one before each step. If there is only one, the table still matters:
        # without it, vLLM gives a new request whose prompt is cached except for one token drafts
        # that nobody made. vLLM before 0.31 then verifies them against another request's.
        "num_speculative_tokens_per_batch_size": [
            (n, n, drafts) for n, drafts in enumerate(draft_choices(decoding), start=1)
        ],
    }
    asked = arguments.speculative_config or {}
    if not isinstance(asked, Mapping):
        raise _set_by_us(asked)
    own = {name: value for name, value in asked.items() if name not in ALLOWED_SPECULATION}
    if own and any(own.get(name) != value for name, value in wanted.items()):
        raise _set_by_us(asked)
    method = asked.get("rejection_sample_method", "standard")
    if decoding.drafter_invariant and method != "standard":
        raise ConfigError(
            "drafter_invariant verifies by sampling tokens, not by rejecting drafts, but "
            f"rejection_sample_method is {method!r}; leave out one of the two options"
        )
    return {**asked, **wanted}


def _set_by_us(asked: Any) -> ConfigError:
    """Make the error for a user's own ``speculative_config``."""
    return ConfigError(
        f"mode 'lossless' sets vLLM's speculative_config itself, got {asked!r}; leave "
        "speculative_config out, or start vLLM without Sparrow"
    )


def _set_scheduler(arguments: Any) -> None:
    """Set the scheduler that chooses the number of drafts. Raises ConfigError if an option
    conflicts with it.
    """
    if arguments.scheduler_cls not in (None, SCHEDULER):
        raise ConfigError(
            "mode 'lossless' chooses the number of drafts in vLLM's scheduler, but "
            f"scheduler_cls is {arguments.scheduler_cls!r}; leave scheduler_cls out, or set "
            "adapt_draft_tokens to false"
        )
    if arguments.async_scheduling is False:
        raise ConfigError(
            "async_scheduling=False does not work with an adaptive number of drafts; leave "
            "async_scheduling out, or set adapt_draft_tokens to false"
        )
    arguments.scheduler_cls = SCHEDULER


def backend_of(arguments: Any) -> str | None:
    """Return the name of the attention backend in vLLM's ``EngineArgs``, or None if it is left to
    vLLM.
    """
    asked = arguments.attention_config
    named = asked.get("backend") if isinstance(asked, Mapping) else getattr(asked, "backend", None)
    backend = arguments.attention_backend or named
    name = getattr(backend, "name", backend)  # vLLM takes strings, and makes them enums
    return None if name is None or name.lower() == "auto" else name.upper()


def _set_gpu_options(arguments: Any, decoding: Decoding) -> None:
    """Set Sparrow's attention backend, and the sizes of CUDA graphs unless the user has chosen
    others.

    Raises ConfigError if the user has chosen a backend of vLLM's own.
    """
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    named = backend_of(arguments)
    if named is None:
        arguments.attention_backend = "CUSTOM"
    elif named != "CUSTOM" and not AttentionBackendEnum[named].is_overridden():
        raise ConfigError(
            "mode 'lossless' drafts with Sparrow's attention backend, which is 'CUSTOM', but the "
            f"attention backend is {named!r}; leave attention_backend and the backend in "
            "attention_config out"
        )
    names = ("cudagraph_capture_sizes", "max_cudagraph_capture_size")
    sizes = [getattr(arguments, name) for name in names]
    sizes += [getattr(arguments.compilation_config, name, None) for name in names]
    if not arguments.enforce_eager and not any(sizes):
        rows = arguments.max_num_seqs or graphs.DEFAULT_ROWS
        arguments.cudagraph_capture_sizes = graphs.capture_sizes(rows, draft_choices(decoding))


def claim(speculative_config: Any) -> None:
    """Mark this ``speculative_config`` as belonging to lossless mode. Copies of it keep the mark."""
    object.__setattr__(speculative_config, _CLAIM, True)


def is_ours(speculative_config: Any) -> bool:
    """Return whether this ``speculative_config`` belongs to lossless mode."""
    return getattr(speculative_config, _CLAIM, False)


def check_supported(vllm_config: Any) -> None:
    """Refuse an engine that would not draft, would draft densely, or would draft with a second copy
    of the model.

    Raises ConfigError if lossless mode does not support the engine's configuration.
    """
    parallel = vllm_config.parallel_config
    cases = (
        (
            vllm_config.speculative_config is None,
            "vLLM has no speculative_config, because the engine was not created from vLLM's "
            "EngineArgs; create it from EngineArgs",
        ),
        (
            not vllm_config.use_v2_model_runner,
            "it needs vLLM's V2 model runner, which this model, this device or the variable "
            "VLLM_USE_V2_MODEL_RUNNER rules out; use mode 'lossy', or start vLLM without Sparrow",
        ),
        (
            parallel.pipeline_parallel_size > 1,
            "it does not support pipeline parallelism; use tensor parallelism",
        ),
        (
            # For dense models, vLLM's data-parallel ranks are independent, and
            # ``data_parallel_size`` is 1 in each worker.
            parallel.data_parallel_size > 1 and vllm_config.model_config.is_moe,
            "it does not support vLLM's data parallelism for mixtures of experts, where all ranks "
            "must run the same passes although each drafts for its own requests; start one engine "
            "per rank with data_parallel_size=1",
        ),
    )
    refuse(ConfigError, cases, "mode 'lossless': ")


def check_draft_weights(vllm_config: Any, on_cpu: bool) -> None:
    """Refuse an engine that cannot draft with an fp8 copy of the weights.

    Raises ConfigError if the engine does not support ``draft_weights`` "fp8".
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
            f"vLLM already quantises the weights ({model.quantization})",
        ),
        (model.is_moe, "experts, which are most of the model's weights, cannot be copied"),
        (
            envs.VLLM_BATCH_INVARIANT,
            "vLLM's batch-invariant mode (VLLM_BATCH_INVARIANT) uses its own kernels",
        ),
        (
            not on_cpu and model.dtype not in in_16_bits,
            f"vLLM's fp8 kernels return 16-bit values, but the model's dtype is {model.dtype}",
        ),
        (
            not has_fp8,
            "the GPU cannot multiply in fp8, which needs compute capability 8.9 or later",
        ),
    )
    refuse(ConfigError, cases, "draft_weights 'fp8': ", "; leave draft_weights out")


def check_guesses(vllm_config: Any, decoding: Decoding) -> None:
    """Refuse an engine that does not support guesses.

    Raises ConfigError if the engine does not support ``guess_tokens``.
    """
    from sparrow.attention.decode import MAX_COLUMNS

    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    scheduler = vllm_config.scheduler_config
    speculative = vllm_config.speculative_config
    tokens = decoding.guess_tokens + 1
    page_size = decoding.schedule.page_size
    group = model.get_num_attention_heads(parallel) // model.get_num_kv_heads(parallel)
    read = scheduler.max_num_seqs * tokens
    method = getattr(speculative, "rejection_sample_method", "standard")
    cases = (
        (
            len(decoding.draft_budgets) > 1,
            "adapt_draft_budget has not been tested with guesses; use only one of these options",
        ),
        (
            decoding.drafter_invariant,
            "drafter_invariant has not been tested with guesses; use only one of these options",
        ),
        (
            decoding.meter_schedule is not None,
            "meter_schedule has not been tested with guesses; use only one of these options",
        ),
        (
            method not in ("standard", "synthetic"),
            f"rejection_sample_method {method!r} has not been tested with guesses; use only one of "
            "these options",
        ),
        (
            vllm_config.lora_config is not None,
            "LoRA adapters have not been tested with guesses; leave out guess_tokens or enable_lora",
        ),
        (
            parallel.tensor_parallel_size > 1,
            "tensor parallelism has not been tested with guesses; leave out guess_tokens or "
            "tensor_parallel_size",
        ),
        (
            vllm_config.cache_config.cache_dtype not in ("auto", "float16", "bfloat16", "float32"),
            f"kv_cache_dtype {vllm_config.cache_config.cache_dtype!r} has not been tested with "
            "guesses; use only one of these options",
        ),
        (
            tokens > page_size,
            f"a pass reads at most one page per sequence ({page_size} tokens); set "
            f"guess_tokens to {page_size - 1} or less",
        ),
        (
            tokens * group > MAX_COLUMNS,
            f"a pass has at most {MAX_COLUMNS} queries per kv head, of which each token takes "
            f"{group}; set guess_tokens to {MAX_COLUMNS // group - 1} or less",
        ),
        (
            read > scheduler.max_num_batched_tokens,
            f"a pass of {scheduler.max_num_seqs} sequences reads {read} tokens, more than "
            f"max_num_batched_tokens ({scheduler.max_num_batched_tokens}); lower max_num_seqs or "
            "guess_tokens",
        ),
    )
    refuse(ConfigError, cases, f"guess_tokens={decoding.guess_tokens}: ")


def check_head(vllm_config: Any) -> None:
    """Refuse a head that cannot guess for this model.

    Raises ConfigError if the engine does not support ``guess_head``.
    """
    model = vllm_config.model_config
    parallel = vllm_config.parallel_config
    speculative = vllm_config.speculative_config
    head = speculative.draft_model_config
    settings = head.hf_config
    eagle = getattr(settings, "eagle_config", None) or {}
    read = getattr(settings, "target_hidden_size", None) or settings.hidden_size
    ours, theirs = (
        (
            each.get_num_attention_heads(parallel),
            each.get_num_kv_heads(parallel),
            each.get_head_size(),
            str(each.dtype).removeprefix("torch."),
        )
        for each in (model, head)
    )
    cases = (
        (
            head.get_vocab_size() != model.get_vocab_size(),
            f"its vocabulary has {head.get_vocab_size()} tokens, but the model's has "
            f"{model.get_vocab_size()}",
        ),
        (
            read != model.get_hidden_size(),
            f"it reads hidden states of size {read}, but the model's have size "
            f"{model.get_hidden_size()}",
        ),
        (
            theirs != ours,
            "its heads, kv heads, head size and dtype are {}, {}, {} and {}, but must equal the "
            "model's ({}, {}, {} and {}) to share its KV blocks".format(*theirs, *ours),
        ),
        (
            not eagle.get("use_aux_hidden_state", True),
            "it reads only the model's last hidden state, which has not been tested",
        ),
        (
            bool(speculative.parallel_drafting),
            "it guesses all tokens at once, which has not been tested",
        ),
        (model.is_multimodal_model, "it has not been tested with multimodal models"),
    )
    remedy = "; choose a head that was trained for this model, or leave guess_head out"
    refuse(ConfigError, cases, f"guess_head {speculative.model!r}: ", remedy)


def check_request(sampling: Any) -> None:
    """Check a request (vLLM's ``SamplingParams``) for options that lossless mode does not support.

    Raises ValueError if there are any. vLLM's server then responds with HTTP 400.
    """
    for name, reason in REFUSED_OPTIONS.items():
        value = getattr(sampling, name, None)
        if value:
            raise ValueError(
                f"mode 'lossless' does not support {name}, got {value!r}, because {reason}; "
                f"leave {name} out, or start vLLM without Sparrow"
            )


def without_verified_options(sampling: Any) -> Any:
    """Return a copy of a request (vLLM's ``SamplingParams``) without ``min_p`` and ``logit_bias``.

    vLLM refuses both with speculative decoding, because its V1 model runner ignores them during
    verification. Lossless mode runs on the V2 model runner, which applies them to every verified
    token's logits.
    """
    plain = copy(sampling)
    plain.min_p = 0.0
    plain.logit_bias = None
    return plain
