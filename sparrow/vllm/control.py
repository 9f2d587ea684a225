"""Sparrow's additions to every vLLM worker: a startup check, and methods for ``collective_rpc``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from sparrow.decoding import Decoding
from sparrow.errors import ConfigError, SparrowError, UnsupportedModel
from sparrow.schedule import SparsitySchedule
from sparrow.vllm import config, kv_cache
from sparrow.vllm.lossless.graphs import most_rows
from sparrow.vllm.lossless.setup import DRAFTS_PER_PASS, draft_choices, passes_of
from sparrow.vllm.runtime import Runtime, attached, find

LOADED_IN_PLACE = ("TRITON", "BATCHED_TRITON")
"""Expert kernels that keep the weights in the layout they are loaded in."""


def sparrow_set_schedule(self: Any, schedule: str | Mapping[str, Any]) -> None:
    """Switch to another schedule from the next step on. The caller must reset the prefix cache
    afterwards.

    Raises ConfigError if the schedule cannot be read, or if it needs a new engine.
    """
    _runtime(self).set_schedule(SparsitySchedule.load(schedule))


def sparrow_counters(self: Any) -> dict[str, int]:
    """Return this worker's counts since the last call, or since the self-check if this is the first
    one.

    ``rows`` is the batch size summed over steps. ``tokens_read`` is how many cached tokens were
    read, and ``tokens_held`` how many a dense actor would have read, both summed over rows and this
    worker's layers. ``pages_read`` is how many pages the sparse layers read. Rows that read
    everything are counted by reason: ``dense_rows_schedule`` (the schedule sets no limit at this
    length, or makes all of this worker's layers dense), ``dense_rows_short`` (the sequence has no
    more pages than would be kept) and ``dense_rows_prefill`` (a one-token prompt chunk, not
    included in ``rows``). ``dense_steps`` is how many steps with decode rows ran entirely on vLLM's
    own attention, because no row skipped a page. With CUDA graphs, only steps that also contain a
    prompt chunk can be dense steps, because the graphs of decode steps always run Sparrow's
    kernels. ``preemptions`` is how often vLLM dropped a sequence's cache and had to prefill the
    sequence again later. With an fp8 KV cache, ``kv_clipped`` is how many tokens had a key or value
    outside the range of its scale, counted once per layer.

    In lossless mode, ``rows`` counts the rows of draft steps, and ``tokens_read`` includes
    verification. ``tokens_held`` is how many tokens dense decoding would have read to get the
    ``emitted`` tokens. ``drafted`` and ``accepted`` count tokens, too. With ``guess_tokens``,
    ``rows`` and ``passes`` count the rows of sparse passes, with or without guesses, and
    ``guessed`` counts the drafts that are guesses. No sparse pass has checked these drafts.
    """
    return _runtime(self).counters()


def sparrow_acceptance(self: Any) -> dict[str, Any]:
    """Report draft acceptance since the last call. Only lossless mode has drafts.

    ``cycles`` counts the dense passes by the number of tokens drafted after each pass. With
    ``guess_tokens``, ``cycles_with_guesses`` has the same counts for drafts made in sparse passes
    over guesses, and ``cycles_with_guesses_alone`` for drafts that are guesses, made without a
    pass. For each length bin, ``bins`` has the number of verified drafts, and the mean and 5th
    percentile of their acceptance. Guesses that no pass has checked are left out. ``acceptance``
    has the same data as counts, for ``DraftAcceptance.from_dict``. If the budget is adaptive,
    ``budgets`` has bins and acceptance for each budget, given as a ``multiple`` of the draft
    schedule. If ``meter_schedule`` is set, ``metered`` has bins and acceptance under that schedule.

    All of this is for drafts that read a dense cache. A lossy actor reads cache entries it wrote
    itself, so its acceptance is lower.
    """
    return _runtime(self).acceptance()


def sparrow_describe(self: Any) -> dict[str, Any]:
    """Describe this worker's backend, schedule and layers. Also describe the latest drafts if the
    engine chooses their budget, or chooses whether they use guesses.
    """
    return _runtime(self).describe()


def sparrow_load_weights(self: Any, weights: Iterable[tuple[str, Tensor]] | str) -> None:
    """Load weights by Hugging Face name, from this process or from a safetensors file. The caller
    must reset the prefix cache afterwards.

    An engine with quantised weights (``quantization="fp8"``) quantises the new weights as well. All
    weights of a layer must then be passed in the same call.

    Raises ConfigError if there are no weights, if the file cannot be read, or if vLLM has changed
    the layout of experts or convolutions. The model then keeps its weights. Also raises ConfigError
    if loading fails, for example because a name or shape doesn't match any of the model's weights,
    or because weights that are quantised together are incomplete. Some of the model's weights may
    then be new.
    """
    _check_convolutions(self.model_runner.model)
    is_quantised = self.vllm_config.quant_config is not None
    if not is_quantised:
        _check_experts(self.model_runner.model)
    if isinstance(weights, str):
        weights = _read(weights, str(self.device))
    given: list[str] = []
    weights = _recorded(weights, given)
    try:
        if is_quantised:
            # This is a generator, so that not all weights have to be in memory at once. It checks
            # for missing weights at the end.
            self.model_runner.reload_weights(
                weights_iterator=_whole(weights, self.model_runner.model)
            )
        else:
            self.model_runner.model.load_weights(weights)
    except SparrowError:
        raise  # from the caller's own iterable
    except Exception as error:
        reason = str(error).partition(". ")[0]  # the rest lists all names in the model
        last = f"the last weight read was {given[-1]!r}" if given else "no weight was read"
        # vLLM keeps the weights of an unfinished quantised layer, and would mix them with new ones.
        remedy = (
            "start a new engine, and pass it all weights of a quantised layer in one call"
            if is_quantised
            else "load all weights again"
        )
        raise ConfigError(
            f"vLLM cannot load these weights ({type(error).__name__}: {reason}; {last}), and the "
            f"model may now hold a mixture of old and new ones; {remedy}, with the Hugging Face "
            "names and the shapes in the checkpoint that the engine was started with"
        ) from error
    if not given:
        raise ConfigError(
            "there were no weights to load; pass pairs of a name and a tensor (an iterator that "
            "has been read yields none)"
        )


def _read(path: str, device: str) -> Iterable[tuple[str, Tensor]]:
    """Read all weights in a safetensors file.

    Raises ConfigError if the file cannot be read.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(path, device=device).items()
    except (OSError, SafetensorError) as error:
        raise ConfigError(
            f"cannot read weights from {path!r} ({error}), so nothing was loaded from it; pass the "
            "path of a complete safetensors file on the machine that vLLM runs on"
        ) from error


def _recorded(
    weights: Iterable[tuple[str, Tensor]], given: list[str]
) -> Iterable[tuple[str, Tensor]]:
    """Yield ``weights``, and add each one's name to ``given`` first."""
    for name, weight in weights:
        given.append(name)
        yield name, weight


def _check_experts(model: Any) -> None:
    """Refuse new weights if vLLM has changed the experts' layout to suit its kernel. vLLM would
    write the new weights as if the experts still had their original layout.

    Raises ConfigError if the model has such experts.
    """
    for layer in model.modules():
        backend = getattr(getattr(layer, "quant_method", None), "unquantized_backend", None)
        if backend is not None and backend.name not in LOADED_IN_PLACE:
            raise ConfigError(
                f"vLLM's {backend.value} kernel has rearranged the model's experts, so new weights "
                "cannot be loaded into them; on a GPU, start the engine with "
                "moe_backend='triton', or load the weights into a new engine"
            )


def _check_convolutions(model: Any) -> None:
    """Refuse new weights for a hybrid model if vLLM has packed the weights of its convolutions, as
    it does on CPUs.

    Raises ConfigError if the model has such convolutions.
    """
    if any(hasattr(layer, "_cpu_unpacked_conv_weight") for layer in model.modules()):
        raise ConfigError(
            "vLLM has packed the weights of the model's convolutions for its CPU kernels, so new "
            "weights cannot be loaded into them; use a GPU, or load the weights into a new engine"
        )


def _whole(weights: Iterable[tuple[str, Tensor]], model: Any) -> Iterable[tuple[str, Tensor]]:
    """Yield ``weights``, and check at the end that they are complete. If they include one of the
    matrices that vLLM quantises together, they must include all of them.

    Raises ValueError if a matrix is missing.
    """
    given = set()
    for name, weight in weights:
        given.add(name)
        yield name, weight
    for parts in getattr(model, "packed_modules_mapping", {}).values():
        for name in given:
            part = next((each for each in parts if f".{each}." in name), None)
            missing = [
                each
                for each in parts
                if part and name.replace(f".{part}.", f".{each}.") not in given
            ]
            if missing:
                raise ValueError(
                    f"{name} is quantised together with {missing}, which are missing from this call"
                )


def sparrow_renew_kv_scales(self: Any) -> None:
    """Let the next prefill set the fp8 KV cache scales again. Use this after loading new weights.
    The cache must be empty before that prefill.

    Raises ConfigError if the engine has no fp8 KV cache, or if vLLM sets the scales, as in lossless
    mode.
    """
    runtime = _runtime(self)
    cache = runtime.cache.fp8
    if runtime.cache.in_8_bits == torch.int8:
        raise ConfigError(
            f"with kv_cache_dtype={kv_cache.INT8!r}, every token has scales of its own, so "
            "there are none to renew; remove the call"
        )
    if cache is None:
        raise ConfigError(
            "this vLLM engine has no fp8 KV cache, so it has no scales; "
            "start it with kv_cache_dtype='fp8'"
        )
    if not cache.sets_scales:
        raise ConfigError(
            "in lossless mode, vLLM sets the scales of an fp8 KV cache, and they never change; "
            "remove the call"
        )
    cache.renew()


def sparrow_renew_draft_weights(self: Any) -> None:
    """Copy the draft weights again before the next drafts. Call this only after writing to the
    model's parameters directly. After vLLM's own updates, the draft weights are copied without this
    call.

    Raises ConfigError if drafts don't use a copy of the weights.
    """
    runtime = _runtime(self)
    if runtime.drafting.weights is None:
        raise ConfigError(
            "this vLLM engine has no separate copy of the weights for drafts; start it with mode "
            "'lossless' and draft_weights 'fp8'"
        )
    runtime.renew_draft_weights()


METHODS = (
    sparrow_set_schedule,
    sparrow_counters,
    sparrow_acceptance,
    sparrow_describe,
    sparrow_load_weights,
    sparrow_renew_kv_scales,
    sparrow_renew_draft_weights,
)


def _runtime(worker: Any) -> Runtime:
    runtime = find(worker.vllm_config)
    if runtime is None:
        raise ConfigError(
            "this vLLM engine decodes densely because it was started without a Sparrow schedule; "
            "restart the engine with a schedule"
        )
    return runtime


def between_graphs(vllm_config: Any) -> tuple[int, int]:
    """If vLLM captures decode steps separately, return the nearest captured batch sizes below and
    above ``max_num_seqs``. Otherwise, return ``max_num_seqs`` twice.

    vLLM doesn't capture decode steps with more than ``max_num_seqs`` sequences, so batches larger
    than the lower of these sizes have no CUDA graph.
    """
    mode = vllm_config.compilation_config.cudagraph_mode
    most = vllm_config.scheduler_config.max_num_seqs
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or []
    if mode is None or not mode.separate_routine() or not any(size >= most for size in sizes):
        return most, most
    return max((size for size in sizes if size <= most), default=0), min(
        size for size in sizes if size >= most
    )


def rows_with_graphs(vllm_config: Any, decoding: Decoding) -> int:
    """Return up to how many sequences lossless mode has CUDA graphs for, whatever it drafts.

    Return ``max_num_seqs`` if vLLM captures no decode steps at all, as on a CPU.
    """
    most = vllm_config.scheduler_config.max_num_seqs
    mode = vllm_config.compilation_config.cudagraph_mode
    if mode is None or not mode.has_full_cudagraphs():
        return most
    sizes = vllm_config.compilation_config.cudagraph_capture_sizes or []
    return most_rows(sizes, most, draft_choices(decoding))


def check(vllm_config: Any) -> None:
    """If an engine has a schedule, check that every layer follows it, and log how the engine
    decodes.

    Raises UnsupportedModel if an attention layer runs another backend, or if every attention layer
    has a sliding window. Raises ConfigError if the speculator in lossless mode is not Sparrow's.
    """
    from vllm.logger import init_logger
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.mamba.abstract import MambaBase

    if config.requested(vllm_config) is None:
        return
    ours = attached(vllm_config)
    layers = vllm_config.compilation_config.static_forward_context
    for name, layer in layers.items():
        if (
            isinstance(layer, AttentionLayerBase)
            and not isinstance(layer, MambaBase)
            and not getattr(getattr(layer, "impl", None), "has_window", False)
            and name not in ours
        ):
            backend = layer.get_attn_backend()
            raise UnsupportedModel(
                f"a Sparrow schedule was given, but layer {name} runs "
                f"{backend.__module__}.{backend.__qualname__}; pass attention_backend='CUSTOM', "
                "and set VLLM_PLUGINS=sparrow if another plugin has registered that backend"
            )
    runtime = find(vllm_config)
    if runtime is None:
        if any(getattr(getattr(x, "impl", None), "has_window", False) for x in layers.values()):
            raise UnsupportedModel(
                "all attention layers in this worker have a sliding window, but Sparrow only "
                "selects pages in layers with full attention; choose another model, lower "
                "pipeline_parallel_size if it is greater than 1, or start vLLM without a schedule"
            )
        return
    # A child of vLLM's own logger, so that vLLM's handlers and VLLM_LOGGING_LEVEL apply.
    logger = init_logger("vllm.sparrow")
    schedule = runtime.schedule
    decoding = runtime.decoding
    stored = runtime.cache.in_8_bits
    model = runtime.model
    drafting = runtime.drafting
    pages = (
        f"top-k pages of {schedule.page_size} tokens per bin of {schedule.bin_tokens} tokens: "
        f"{schedule.to_dict()['top_k']}"
    )
    landmarks = (
        f"landmarks ({schedule.landmark_dtype}) take {100 * runtime.cache.landmark_share:.1f}% of "
        "the KV cache"
    )
    if not runtime.is_lossless:
        cache = (
            ""
            if stored is None
            else f", which is in {kv_cache.NAMES[stored]} ({kv_cache.SCALES[stored]})"
        )
        logger.info(
            f"Sparrow decodes layers {model.sparse_layers} sparsely with {model.backend} "
            f"({model.kernels}), layers {model.dense_layers} densely; {pages}; {landmarks}{cache}"
        )
        below, above = between_graphs(vllm_config)
        if below < above:
            logger.warning(
                f"Steps of {below + 1} to {vllm_config.scheduler_config.max_num_seqs} sequences "
                "will run without a CUDA graph, which can take several times as long; set "
                f"max_num_seqs to {below} or {above}, for which vLLM captures graphs"
            )
        return
    if drafting.meter is None:
        raise ConfigError(
            "mode 'lossless': vLLM created a speculator that is not Sparrow's; "
            "leave speculative_config out"
        )
    if (metered := drafting.meter.metered) is not None:
        logger.info(
            f"Once every {decoding.meter_cycles} cycles, Sparrow also measures the acceptance "
            "under meter_schedule (dense layers: "
            f"{list(metered.schedule.dense_layers) or 'none'}; top-k pages per bin of "
            f"{metered.schedule.bin_tokens} tokens: {metered.schedule.to_dict()['top_k']})"
        )
    if (copies := drafting.weights) is not None:
        logger.info(
            f"Drafts use fp8 copies of {len(copies)} linear layers "
            f"({copies.bytes / 2**30:.2f} GiB); {copies.kept_layers} other linear layers "
            f"({copies.kept_bytes / 2**30:.2f} GiB), the embedding and the output layer are "
            "not copied"
        )
    tokens = (
        f"0 to {decoding.draft_tokens}" if decoding.adapt_draft_tokens else decoding.draft_tokens
    )
    budgets = ", or half or twice as many where that is faster" if len(runtime.budgets) > 1 else ""
    drawn = " by drawing with the same random numbers" if decoding.drafter_invariant else ""
    cache = (
        ""
        if stored is None
        else f"; samples follow the policy with a KV cache in {kv_cache.NAMES[stored]}"
    )
    steps = "sparse steps"
    if decoding.guess_tokens:
        source = "history" if decoding.guess_head is None else f"the head {decoding.guess_head!r}"
        if decoding.lookup_min:
            source += f", or from history where {decoding.lookup_min} or more tokens repeat,"
        guesses = f"{decoding.guess_tokens} guesses from {source} ({model.pass_kernels})"
        steps = (
            f"sparse steps, one sparse pass over {guesses} for every {DRAFTS_PER_PASS} drafts, or "
            "guesses alone"
            if decoding.adapt_draft_tokens
            else f"{passes_of(decoding.draft_tokens)} sparse passes over {guesses}"
        )
    logger.info(
        f"Sparrow is lossless: {steps} draft {tokens} tokens ({model.backend}, "
        f"{model.kernels}; dense layers: {model.dense_layers or 'none'}; {pages}{budgets}), "
        f"and vLLM's dense attention verifies them{drawn}{cache}. Draft logits take "
        f"{drafting.logits_bytes / 2**30:.2f} GiB, {landmarks}, and drafts take cache space "
        f"for up to {decoding.draft_tokens} tokens per sequence"
    )
    most = rows_with_graphs(vllm_config, decoding)
    if most < vllm_config.scheduler_config.max_num_seqs:
        tokens = decoding.draft_tokens + 1
        logger.warning(
            f"Steps of more than {most} sequences may run without a CUDA graph, which can take "
            f"several times as long; set max_num_seqs to {most}, or to as many as you need and "
            f"max_num_batched_tokens to at least {tokens} times as many, and leave "
            "cudagraph_capture_sizes and max_cudagraph_capture_size out"
        )
