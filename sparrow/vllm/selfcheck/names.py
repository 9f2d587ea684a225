"""Check that vLLM has the names and parameters that Sparrow uses."""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from typing import Any

from sparrow.vllm import versions
from sparrow.vllm.selfcheck.refusal import refusal


def locate(target: str) -> tuple[Any, str, Any]:
    """Find ``module:name`` or ``module:Class.name``. Return the owner of the name, the name itself,
    and the object it refers to.

    Raises ImportError or AttributeError if this vLLM has no such name.
    """
    module, _, path = target.partition(":")
    owner: Any = import_module(module)
    *outer, name = path.split(".")
    for each in outer:
        owner = getattr(owner, each)
    return owner, name, getattr(owner, name)


def check_name(target: str, parameters: Iterable[str] = ()) -> None:
    """Check that vLLM has this name.

    Raises ConfigError if the name, or one of its parameters or fields, is missing.
    """
    try:
        found = locate(target)[2]
    except (ImportError, AttributeError) as error:
        raise refusal(f"{target} is missing ({error})") from error
    if not parameters:
        return
    names: Iterable[Any] = (
        fields(found) if is_dataclass(found) else inspect.signature(found).parameters.values()
    )
    there = {each.name for each in names}
    for name in parameters:
        if name not in there:
            raise refusal(f"{target} has no parameter {name!r}")


@dataclass(frozen=True)
class Read:
    """A name in vLLM that Sparrow uses as is, with the parameters or fields it needs."""

    target: str
    parameters: tuple[str, ...] = ()


SCHEDULED = Read(
    "vllm.v1.core.sched.output:SchedulerOutput",
    (
        "scheduled_new_reqs",
        "scheduled_cached_reqs",
        "num_scheduled_tokens",
        "total_num_scheduled_tokens",
        "scheduled_spec_decode_tokens",
        "num_spec_tokens_to_schedule",
        "finished_req_ids",
        "preempted_req_ids",
    ),
)
EVERYWHERE = (
    SCHEDULED,
    Read(
        "vllm.v1.core.sched.output:NewRequestData",
        ("req_id", "prompt_token_ids", "block_ids", "num_computed_tokens", "prefill_token_ids"),
    ),
    Read(
        "vllm.v1.core.sched.output:CachedRequestData",
        ("req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"),
    ),
    Read(
        "vllm.v1.attention.backend:CommonAttentionMetadata",
        (
            "query_start_loc",
            "query_start_loc_cpu",
            "seq_lens",
            "seq_lens_cpu_upper_bound",
            "is_prefilling",
            "num_reqs",
            "num_actual_tokens",
            "block_table_tensor",
            "slot_mapping",
        ),
    ),
    Read("vllm.v1.attention.backend:CommonAttentionMetadata.replace"),
    Read(
        "vllm.v1.kv_cache_interface:FullAttentionSpec",
        ("block_size", "num_kv_heads", "head_size", "dtype", "page_size_padded", "kv_quant_mode"),
    ),
    Read(
        "vllm.v1.attention.backends.utils:split_decodes_and_prefills",
        ("common_attn_metadata", "decode_threshold"),
    ),
    Read("vllm.v1.worker.worker_base:WorkerBase.execute_model", ("scheduler_output",)),
    Read("vllm.v1.worker.worker_base:WorkerBase.sample_tokens", ("grammar_output",)),
    Read("vllm.v1.worker.worker_base:WorkerBase.compile_or_warm_up_model"),
    Read("vllm.model_executor.layers.mamba.abstract:MambaBase"),
)
STORED = ("layer", "key", "value", "kv_cache", "slot_mapping")
ATTENDED = ("layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
BUILT = ("common_prefix_len", "common_attn_metadata", "fast_build")
ON_CUDA = (
    Read("vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.do_kv_cache_update", STORED),
    Read("vllm.v1.attention.backends.flash_attn:FlashAttentionImpl.forward", ATTENDED),
    Read("vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.build", BUILT),
    Read(
        "vllm.v1.attention.backends.flash_attn:FlashAttentionMetadataBuilder.get_cudagraph_support",
        ("vllm_config", "kv_cache_spec"),
    ),
)
ON_CPU = (
    Read("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.do_kv_cache_update", STORED),
    Read("vllm.v1.attention.backends.cpu_attn:CPUAttentionBackendImpl.forward", ATTENDED),
    Read("vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder.build", BUILT),
    Read("vllm.v1.attention.backends.cpu_attn:CPUAttentionMetadataBuilder._set_isa_to_layers"),
)
IN_LOSSLESS_MODE = (
    Read("vllm.config:get_layers_from_vllm_config", ("vllm_config", "layer_type")),
    Read("vllm.distributed.parallel_state:graph_capture", ("device",)),
    Read(
        "vllm.forward_context:set_forward_context",
        ("num_tokens", "cudagraph_runtime_mode", "slot_mapping", "batch_descriptor"),
    ),
    Read("vllm.forward_context:BatchDescriptor", ("num_tokens",)),
    Read(
        "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample",
        (
            "logits",
            "expanded_idx_mapping",
            "temperature",
            "seed",
            "pos",
            "apply_temperature",
            "use_fp64",
        ),
    ),
    Read(
        "vllm.v1.worker.gpu.spec_decode.speculator:DraftModelSpeculator.__init__",
        ("vllm_config", "device"),
    ),
)
WITH_HEAD = (
    Read(
        "vllm.v1.worker.gpu.spec_decode.eagle.utils:load_eagle_model",
        ("target_model", "vllm_config"),
    ),
    Read(
        "vllm.v1.worker.gpu.input_batch:InputBatch",
        ("input_ids", "positions", "query_start_loc", "idx_mapping"),
    ),
    Read("vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.is_draft_layer"),
)
WITH_ADAPTERS = (
    Read(
        "vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta",
        (
            "token_lora_mapping",
            "token_indices_sorted_by_lora_ids",
            "num_tokens_per_lora",
            "lora_token_start_loc",
            "active_lora_ids",
            "no_lora_flag_cpu",
            "num_active_loras_cpu",
        ),
    ),
    Read("vllm.lora.ops.triton_ops.lora_kernel_metadata:LoRAKernelMeta._reset"),
    Read("vllm.lora.punica_wrapper.punica_gpu:PunicaWrapperGPU"),
    Read("vllm.lora.model_manager:DEFAULT_LANGUAGE_WRAPPER_KEY"),
    Read("vllm.lora.model_manager:LoRAModelManager.add_adapter", ("adapter",)),
    Read("vllm.lora.model_manager:LoRAModelManager.lora_slots"),
    Read("vllm.lora.layers:LogitsProcessorWithLoRA"),
)
"""Names in vLLM that Sparrow uses, in addition to those that ``patches`` replaces. ``WITH_HEAD`` is
for lossless mode with ``guess_head``, ``WITH_ADAPTERS`` for lossless mode with LoRA.
"""


def check_names(
    patches: Iterable[Any],
    is_lossless: bool,
    on_cpu: bool,
    has_adapters: bool,
    has_head: bool = False,
) -> None:
    """Check that vLLM has every function and parameter that this engine relies on.

    Args:
        patches: the patches the engine will apply (``patches.Patch``).
        has_adapters: whether the engine supports LoRA (``enable_lora``).
        has_head: whether a head guesses (``guess_head``).

    Raises ConfigError if a name or parameter is missing.
    """
    import vllm

    for patch in patches:
        if patch.applies_to(vllm.__version__):
            check_name(patch.target, patch.parameters)
    reads = EVERYWHERE + (ON_CPU if on_cpu else ON_CUDA)
    for read in reads + (IN_LOSSLESS_MODE if is_lossless else ()):
        check_name(read.target, read.parameters)
    for read in WITH_ADAPTERS if is_lossless and has_adapters else ():
        check_name(read.target, read.parameters)
    for read in WITH_HEAD if has_head else ():
        check_name(read.target, read.parameters)
    if is_lossless:
        sampler = "vllm.v1.worker.gpu.sample.gumbel:gumbel_sample"
        argument = versions.draft_logits_argument()
        check_name(sampler, (argument, f"{argument}_col"))
