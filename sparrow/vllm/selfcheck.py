"""The self-check every engine runs at startup.

``check_names`` runs before memory is allocated. It checks that vLLM has all the private names and
parameters that Sparrow replaces or uses. ``run`` is called after the warm-up. It runs decode steps
of every layer on that layer's KV cache, plus a few steps of the whole model, and compares the
results with the correct ones. Both raise a ConfigError that says in one sentence what is wrong.

Shapes: B decode rows, T tokens, H query heads, K kv heads, D head dim, P page size, N block tokens,
k drafts, V vocabulary.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, is_dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sparrow.attention import CacheScales, reference
from sparrow.attention.pages import landmarks, page_scores
from sparrow.decoding import Decoding
from sparrow.errors import ConfigError
from sparrow.schedule import ALL_PAGES
from sparrow.vllm import versions
from sparrow.vllm.kv_cache import tail_of_blocks
from sparrow.vllm.lossless import setup
from sparrow.vllm.lossless.drafter import Drafter
from sparrow.vllm.runtime import attached

PAGES_BY_SCORE = 2
RANKED_PAGES = 6
"""The check's sparse decode steps rank ``RANKED_PAGES`` pages and keep the best
``PAGES_BY_SCORE``.
"""
CANDIDATES = 32
SCORE_SPREAD = 2.4
"""Queries are sampled to give token scores a standard deviation of ``SCORE_SPREAD``, which puts
most of the weight on a few tokens. Each query is the best of ``CANDIDATES`` (see ``_decisive``).
"""
OUTPUT_BOUNDS = {torch.float32: 1e-4, torch.float16: 0.006, torch.bfloat16: 0.03}
"""Largest allowed difference between a layer's outputs and outputs computed in float32, keyed by
the query dtype. Values are between -1 and 1. Keys and values are exact in all dtypes, so the only
error is rounding in the kernels.
"""
STEP_TOKENS = 160
"""Maximum length of the sequence used to check the model."""
LOG_PROB_BOUNDS = {4: 1e-3, 2: 0.2}
FP8_WEIGHTS_BOUND = 0.5
"""Largest allowed distance from a dense pass's log-probs, keyed by the model dtype's size in bytes.
The distance is relative to the spread of the dense log-probs. No distance is exactly 0, because
passes of different shapes round differently. ``FP8_WEIGHTS_BOUND`` is for drafting with 8-bit
weights.
"""


# --- names ---


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
        raise _refusal(f"{target} is missing ({error})") from error
    if not parameters:
        return
    names: Iterable[Any] = (
        fields(found) if is_dataclass(found) else inspect.signature(found).parameters.values()
    )
    there = {each.name for each in names}
    for name in parameters:
        if name not in there:
            raise _refusal(f"{target} has no parameter {name!r}")


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


def _refusal(what: str) -> ConfigError:
    import vllm

    return ConfigError(
        f"Sparrow's self-check failed in vLLM {vllm.__version__} with torch "
        f"{torch.__version__}: {what}; install vllm {', '.join(versions.PROVEN)}, or start "
        "vLLM without Sparrow"
    )


# --- the check of an engine ---


@dataclass(frozen=True)
class Differences:
    """The largest differences found in a passing check."""

    layers: float  # in attention outputs
    steps: float  # in log-probs, relative to their spread


@torch.inference_mode()
def run(worker: Any, runtime: Any) -> Differences:
    """Check a worker's kernels, graphs and cache before it serves requests. Every worker runs the
    same check.

    The check clears the cache blocks it used, but its steps do show up in the counters.

    Raises ConfigError if the engine computes a wrong result.
    """
    from vllm.logger import init_logger

    started = time.perf_counter()
    layers = layers_of(worker.vllm_config)
    speculator = worker.model_runner.speculator if runtime.is_lossless else None
    if speculator is not None:
        check_addresses(speculator.drafter)
    layers_differ = check_layers(layers, runtime, worker.vllm_config.model_config)
    steps_differ = 0.0
    with _unmetered(runtime):
        if speculator is None:
            steps_differ = check_steps(worker, runtime, None, layers)
        else:
            planned = speculator.plan
            for kind in _kinds_of_drafts(runtime.decoding):
                speculator.plan = planned._replace(**kind)
                steps_differ = max(steps_differ, check_steps(worker, runtime, speculator, layers))
            speculator.plan = planned
    milliseconds = 1000 * (time.perf_counter() - started)
    init_logger("vllm.sparrow").info(
        f"Sparrow's self-check passed in {milliseconds:.0f} ms (layers differ by up to "
        f"{layers_differ:.2g}, log-probs by {steps_differ:.2g} times their spread) with "
        f"{versions.known()}"
    )
    return Differences(layers_differ, steps_differ)


def _kinds_of_drafts(decoding: Decoding) -> list[dict[str, bool]]:
    """Return the kinds of drafts an engine uses, as fields of a ``DraftPlan``."""
    without = {"guesses": False, "alone": False}
    judged = {"guesses": True, "alone": False}
    alone = {"guesses": True, "alone": True}
    if not decoding.guess_tokens:
        return [without]
    return [without, judged, alone] if decoding.adapt_draft_tokens else [judged]


def layers_of(vllm_config: Any) -> list[Any]:
    """List the model's layers that run Sparrow's attention, in order. Leave out the layers of a
    head that guesses.
    """
    from vllm.model_executor.models.utils import extract_layer_index

    ours = [layer for layer in attached(vllm_config).values() if not layer.impl.is_of_head]
    return sorted(ours, key=lambda layer: extract_layer_index(layer.layer_name))


def _bytes_of(layer: Any) -> Tensor:
    """Return all bytes of a layer's KV cache as a view, uint8 [blocks, bytes per block]."""
    cache = layer.kv_cache
    block_bytes = cache[0].nbytes
    if layer.impl.has_landmarks:
        marks = layer.impl.cache_views(layer, cache).landmarks
        block_bytes = marks.data_ptr() - cache.data_ptr() + marks[0].nbytes
    return tail_of_blocks(cache, 0, torch.uint8, (len(cache), block_bytes))


# --- addresses in draft step CUDA graphs ---


def check_addresses(drafter: Drafter) -> None:
    """Check that no tensor has moved since the CUDA graphs of draft steps were captured.

    Raises ConfigError if one has.
    """
    now = drafter.addresses()
    for name, address in drafter.captured_over.items():
        if now.get(name) != address:
            raise _refusal(
                f"{name} has moved in memory since the CUDA graphs of draft steps were captured"
            )


# --- decode steps of single layers ---


@dataclass(frozen=True)
class Known:
    """One layer's keys, values and queries, with a known attention output."""

    # float32; all values are multiples of 1/4 from -1 to 1, which are exact in every dtype
    key_KTD: Tensor
    value_KTD: Tensor
    key_scale_K: (
        Tensor  # keys and values are multiplied by these scales before the layer stores them
    )
    value_scale_K: Tensor
    query_BHD: Tensor  # in the model's dtype


@dataclass(frozen=True)
class Place:
    """The blocks and slots that hold the check's tokens in every layer's cache."""

    table_M: Tensor  # int32, the tokens' blocks
    slots_T: Tensor  # int64
    neighbours: list[int]  # blocks that must stay empty

    @property
    def blocks(self) -> list[int]:
        return [*self.table_M.tolist(), *self.neighbours]


def check_layers(layers: list[Any], runtime: Any, model: Any) -> float:
    """Store known keys and values in every layer's cache as the engine would, and run decode steps
    that read them.

    The outputs must match those of ``attention.reference``, which computes its own landmarks. They
    must match with all pages kept (i.e. plain attention) and with just a few. Nothing may be stored
    outside the tokens' blocks.

    Args:
        layers: the layers, in model order. Those that run only vLLM's own attention are skipped.
        model: vLLM's ``ModelConfig``.

    Returns the largest output error, or 0 if there are no layers to check.

    Raises ConfigError if a layer fails one of these checks.
    """
    layers = [layer for layer in layers if layer.impl.has_landmarks]
    if not layers:
        return 0.0
    caches = [layer.impl.cache_views(layer, layer.kv_cache) for layer in layers]
    place = _place(caches[0].keys, runtime.layout, model.max_model_len)
    most_rows = min(max(2, runtime.model.kernels.few_rows + 1), len(runtime.pages.top_k))
    most_tokens = runtime.decoding.guess_tokens + 1
    try:
        for layer in layers:
            _bytes_of(layer)[place.blocks] = 0
        known = [
            _known(layer, runtime, model.dtype, most_rows * most_tokens, len(place.slots_T), seed)
            for seed, layer in enumerate(layers)
        ]
        _store(layers, runtime, known, place, model.dtype)
        error = max(
            _decode(layers, runtime, known, place, rows, tokens, top_k)
            for rows in sorted({1, most_rows})
            for tokens in sorted({1, most_tokens})
            for top_k in (ALL_PAGES, PAGES_BY_SCORE)
        )
        for layer in layers:
            if _bytes_of(layer)[place.neighbours].any():
                raise _refusal(
                    f"{layer.layer_name} stores tokens or landmarks outside their blocks"
                )
        return error
    finally:
        for layer in layers:
            _bytes_of(layer)[place.blocks] = 0


def _place(keys: Tensor, layout: Any, max_length: int) -> Place:
    """Choose blocks for a sequence with more pages than are kept. Blocks are taken backwards from
    the end of the cache. If there are enough, every other block is skipped.
    """
    blocks, _, N, _ = keys.shape
    P = layout.page_size
    pages = layout.sink_pages + layout.recent_pages + RANKED_PAGES
    T = min(pages * P - P // 2, max_length, (blocks - 1) * N)
    M = -(-T // N)
    stride = 2 if blocks > 2 * M else 1
    table = [blocks - 1 - stride * n for n in range(M)]
    neighbours = {block + side for block in table for side in (-1, 1)} - {*table}
    table_M = torch.tensor(table, dtype=torch.int32, device=keys.device)
    token_T = torch.arange(T, device=keys.device)
    return Place(
        table_M,
        table_M[token_T // N].long() * N + token_T % N,
        [block for block in sorted(neighbours) if 0 < block < blocks],
    )


def _known(layer: Any, runtime: Any, dtype: torch.dtype, rows: int, T: int, seed: int) -> Known:
    """Sample keys, values and queries. The query scores vary enough for a few tokens to get most of
    the weight.
    """
    impl = layer.impl
    device = layer.kv_cache.device
    K = impl.num_kv_heads
    H = impl.num_heads
    D = impl.head_size
    draws = torch.Generator().manual_seed(seed)
    drawn = torch.randint(-4, 5, (2, K, T, D), generator=draws) / 4
    key_KTD, value_KTD = drawn.to(device)
    key_scale_K = value_scale_K = torch.ones(K, device=device)
    if impl.fp8_scales is not None:
        scales = impl.fp8_scales.values
        if runtime.is_lossless:  # vLLM stores the tokens here, with its own scales
            scales = CacheScales(layer._k_scale, layer._v_scale)
        key_scale_K = key_scale_K * scales.k
        value_scale_K = value_scale_K * scales.v
    spread_K = SCORE_SPREAD / (0.65 * D**0.5 * impl.scale * key_scale_K)
    query_CBHD = torch.randn(CANDIDATES, rows, H, D, generator=draws).to(device)
    query_CBHD = (query_CBHD * spread_K.repeat_interleave(H // K)[:, None]).to(dtype)
    query_BHD = _decisive(query_CBHD, key_KTD, runtime.layout.page_size)
    return Known(key_KTD, value_KTD, key_scale_K, value_scale_K, query_BHD)


def _decisive(query_CBHD: Tensor, key_KTD: Tensor, page_size: int) -> Tensor:
    """For each row and kv head, pick the one of C candidate queries whose two closest page scores
    are furthest apart.

    The kernel and the reference then rank pages in the same order despite rounding.
    """
    C, B, H, _ = query_CBHD.shape
    K, T, _ = key_KTD.shape
    whole = T // page_size
    if whole < 2:
        return query_CBHD[0]
    key_KNPD = key_KTD[:, : whole * page_size].unflatten(1, (whole, page_size))
    scores = page_scores(query_CBHD.flatten(0, 1)[:, :, None], landmarks(key_KNPD[None]))
    gap_CBK = scores.sort(dim=-1).values.diff(dim=-1).amin((-1, -2)).unflatten(0, (C, B))
    best_BK = gap_CBK.argmax(0)
    row_B1 = torch.arange(B, device=best_BK.device)[:, None]
    head_K = torch.arange(K, device=best_BK.device)
    return query_CBHD.unflatten(2, (K, H // K))[best_BK, row_B1, head_K].flatten(1, 2)


def _store(
    layers: list[Any], runtime: Any, known: list[Known], place: Place, dtype: torch.dtype
) -> None:
    """Store the tokens and their landmarks. The newest token is stored as in a decode step."""
    for layer, own in zip(layers, known, strict=True):
        key_TKD = (own.key_KTD * own.key_scale_K[:, None, None]).transpose(0, 1)
        value_TKD = (own.value_KTD * own.value_scale_K[:, None, None]).transpose(0, 1)
        for at in (slice(None, -1), slice(-1, None)):
            runtime.drafting.is_running = runtime.is_lossless and at.start == -1
            try:
                layer.impl.do_kv_cache_update(
                    layer,
                    key_TKD[at].to(dtype).contiguous(),
                    value_TKD[at].to(dtype).contiguous(),
                    layer.kv_cache,
                    place.slots_T[at],
                )
            finally:
                runtime.drafting.is_running = False
    for group in {id(layer.impl.group): layer.impl.group for layer in layers}.values():
        group.update_landmarks(place.slots_T)


def _decode(
    layers: list[Any],
    runtime: Any,
    known: list[Known],
    place: Place,
    rows: int,
    tokens: int,
    top_k: int,
) -> float:
    """Run one decode step of every layer on rows of different lengths, each with ``tokens`` new
    tokens at the end.

    Returns the largest difference from the known outputs.

    Raises ConfigError if an output is off by more than rounding explains.
    """
    from sparrow.vllm.backend import Step

    T = len(place.slots_T)
    device = place.slots_T.device
    length_B = (T - 5 * torch.arange(rows, device=device)).clamp(min=tokens).int()
    top_k_B = torch.full_like(length_B, top_k)
    everything_B = torch.full_like(length_B, ALL_PAGES)
    step = Step(
        rows=rows,
        lengths=length_B,
        top_k=top_k_B,
        block_table=place.table_M.expand(rows, -1).contiguous(),
        prefills=(),
        everything=everything_B,
        has_page_counts=True,
        tokens=tokens,
    )
    errors = []
    for layer, own in zip(layers, known, strict=True):
        impl = layer.impl
        query_BHD = own.query_BHD[: rows * tokens]
        empty = query_BHD[:, : impl.num_kv_heads]
        output = torch.empty_like(query_BHD)
        metadata = SimpleNamespace(sparrow=step)
        impl.forward(layer, query_BHD, empty, empty, layer.kv_cache, metadata, output)

        group = impl.num_heads // impl.num_kv_heads
        scale_H1 = own.key_scale_K.repeat_interleave(group)[:, None]
        query_BHTD = (query_BHD.float() * scale_H1).unflatten(0, (rows, tokens)).transpose(1, 2)
        expected_BHTD = reference.decode_several(
            query_BHTD,
            own.key_KTD.expand(rows, -1, -1, -1),
            own.value_KTD.expand(rows, -1, -1, -1),
            None,
            length_B.long(),
            (top_k_B if impl.is_sparse_layer else everything_B).long(),
            runtime.layout,
            impl.scale,
            impl.head_budgets,
        )
        expected = expected_BHTD.transpose(1, 2).flatten(0, 1)
        value_scale_H1 = own.value_scale_K.repeat_interleave(group)[:, None]
        errors.append((output.float() / value_scale_H1 - expected).abs().amax())

    bound = OUTPUT_BOUNDS[known[0].query_BHD.dtype]
    by_layer = torch.stack(errors).tolist()
    for layer, error in zip(layers, by_layer, strict=True):
        if not error <= bound:
            raise _refusal(
                f"the output of {layer.layer_name} is off by {error:.2g} (new tokens per row: "
                f"{tokens}, rows: {rows}, cache: {layer.kv_cache.dtype}, with "
                f"{'every page' if top_k == ALL_PAGES else 'the best pages'} kept), but rounding "
                f"accounts for at most {bound}"
            )
    return max(by_layer)


# --- model steps ---


class _Sequence:
    """A sequence to run on a worker as if vLLM's scheduler had scheduled it.

    Args:
        blocks: the block ids for each KV cache group.
    """

    def __init__(self, worker: Any, name: str, blocks: tuple[list[int], ...]) -> None:
        self._worker = worker
        self._name = name
        self._blocks = blocks
        self._computed = 0

    def prefill(self, tokens: list[int], drafts: int) -> int:
        """Prefill a prompt, draft ``drafts`` more tokens, and return the sampled token."""
        from vllm import SamplingParams
        from vllm.v1.core.sched.output import NewRequestData

        request = NewRequestData(
            req_id=self._name,
            prompt_token_ids=tokens,
            mm_features=[],
            sampling_params=SamplingParams(temperature=1.0, seed=1, max_tokens=len(tokens)),
            pooling_params=None,
            block_ids=self._blocks,
            num_computed_tokens=0,
            lora_request=None,
            prefill_token_ids=tokens,
        )
        return self._run(
            len(tokens), scheduled_new_reqs=[request], num_spec_tokens_to_schedule=drafts
        )

    def decode(self, drafts: int) -> int:
        """Run a pass over the newest token and its drafts, and return the first sampled token."""
        from vllm.v1.core.sched.output import CachedRequestData

        cached = CachedRequestData.make_empty()
        cached.req_ids = [self._name]
        cached.num_computed_tokens = [self._computed]
        cached.num_output_tokens = [1]
        cached.new_block_ids = [None]
        drafted = {self._name: [0] * drafts} if drafts else {}
        return self._run(
            1 + drafts, scheduled_cached_reqs=cached, scheduled_spec_decode_tokens=drafted
        )

    def finish(self) -> None:
        step = self._step(finished_req_ids={self._name})
        self._worker.execute_model(step)

    def _step(self, **values: Any) -> Any:
        from vllm.v1.core.sched.output import SchedulerOutput

        step = SchedulerOutput.make_empty()
        if hasattr(step, "num_common_prefix_blocks"):
            step.num_common_prefix_blocks = [0] * len(self._blocks)
        for name, value in values.items():
            setattr(step, name, value)
        return step

    def _run(self, tokens: int, **values: Any) -> int:
        step = self._step(
            num_scheduled_tokens={self._name: tokens}, total_num_scheduled_tokens=tokens, **values
        )
        self._computed += tokens
        output = self._worker.execute_model(step)
        if output is None:
            output = self._worker.sample_tokens(None)
        if hasattr(output, "get_output"):  # with async scheduling, the output is fetched later
            output = output.get_output()
        return int(output.sampled_token_ids[0][0])


def check_steps(worker: Any, runtime: Any, speculator: Any, layers: list[Any]) -> float:
    """Decode a sequence as the engine does, but with all pages kept, and compare its log-probs with
    those of a dense pass over the same tokens.

    In lossless mode, this runs one cycle of drafting and verification, with the kind of drafts that
    ``speculator.plan`` asks for. Drafting is replayed from CUDA graphs if the engine has captured
    any. The draft log-probs are compared with the verification's, and the verification's with a
    dense prefill's.

    Returns the largest distance (see ``distance``), or 0 if this worker has no log-probs to
    compare.

    Raises ConfigError if the log-probs differ by more than rounding explains.
    """
    config = worker.vllm_config
    cache = worker.model_runner.kv_cache_config
    if config.parallel_config.pipeline_parallel_size > 1:  # only the last stage has log-probs
        return 0.0
    k = 0
    if speculator is not None:
        k = min(n for n in setup.draft_choices(runtime.decoding) if n)
    groups = cache.kv_cache_groups
    # available blocks per sequence in each group
    half = (cache.num_blocks - 1) // (2 * len(groups))
    room = min(
        STEP_TOKENS,
        config.model_config.max_model_len,
        config.scheduler_config.max_num_batched_tokens,
        half * min(group.kv_cache_spec.block_size for group in groups),
    )
    T = room - 2 * (k + 1)
    if T < 1:
        return 0.0

    vocabulary = config.model_config.get_vocab_size()
    prompt = [(7919 * n + 13) % vocabulary for n in range(T)]
    # blocks used in each group, and the null block, which a pass over guesses may write to
    used: dict[int, list[int]] = {number: [0] for number in range(len(groups))}
    sequences: list[_Sequence] = []
    for name in ("_sparrow_decode_", "_sparrow_dense_"):
        blocks = []
        for number, group in enumerate(groups):
            count = -(-room // group.kv_cache_spec.block_size)
            first = 1 + (len(sequences) * len(groups) + number) * half
            blocks.append(list(range(first, first + count)))
            used[number].extend(blocks[-1])
        sequences.append(_Sequence(worker, name, tuple(blocks)))
    decoding, dense = sequences

    everything = torch.full_like(runtime.pages.at_length, ALL_PAGES)
    drafted: list[int] = []
    with _logits_of(worker.model_runner.model) as logits, runtime.uncounted(everything):
        sampled = decoding.prefill(prompt, k)
        if speculator is not None:
            drafted = speculator.draft_tokens[0, :k].tolist()
            index = int(speculator.idx_mapping[0])
            drawn_S = speculator.drafter.drawn_S
            drawn = k if drawn_S is None else int(drawn_S[index])
            if (drawn == 0) != speculator.plan.alone:
                raise _refusal(
                    f"a cycle of {k} drafts has {drawn} drafts of the sparse actor, but its plan "
                    f"is {speculator.plan}"
                )
            of_drafts = speculator.draft_logits[index, :k].float()
            _check_guesses(of_drafts[drawn:], speculator.draft_tokens[0, drawn:k])
        logits.clear()
        decoding.decode(k)
        decoded = logits[:1]
        decoding.finish()
        logits.clear()
        dense.prefill([*prompt, sampled, *drafted], 0)
        expected = logits[:1]
        dense.finish()
    for number, group in enumerate(groups):
        for layer in layers:
            if layer.layer_name in group.layer_names:
                # The kernels' blocks may be smaller than the scheduler's.
                parts = len(layer.kv_cache) // cache.num_blocks
                emptied = [block * parts + part for block in used[number] for part in range(parts)]
                _bytes_of(layer)[emptied] = 0

    if not decoded or not expected:  # another worker may have computed the logits
        return 0.0
    bound = LOG_PROB_BOUNDS[config.model_config.dtype.itemsize]
    if speculator is None:
        return _hold(decoded[0], expected[0], bound, "a decode step that keeps every page")
    draft_bound = bound if runtime.drafting.weights is None else FP8_WEIGHTS_BOUND
    differences = [_hold(decoded[0][-1:], expected[0], bound, "verification")]
    if drawn:  # otherwise, all drafts are guesses
        what = "drafts that keep every page"
        differences.append(_hold(of_drafts[:drawn], decoded[0][:drawn], draft_bound, what))
    return max(differences)


def _check_guesses(logits_GV: Tensor, token_G: Tensor) -> None:
    """Check that guesses used as drafts have a distribution with all its mass on the guess.

    Raises ConfigError if one doesn't.
    """
    mass_G1 = logits_GV.softmax(-1).gather(1, token_G.long()[:, None])
    if not (mass_G1 == 1).all():
        raise _refusal(
            "verification would take a guess for a draft of the sparse actor, because the stored "
            "distribution does not have all its mass on the guess"
        )


def _hold(found_TV: Tensor, expected_TV: Tensor, bound: float, what: str) -> float:
    error = distance(found_TV, expected_TV)
    if not error <= bound:
        raise _refusal(
            f"log-probs of {what} differ from those of a dense pass by {error:.2g} times their "
            f"spread, but rounding accounts for at most {bound}"
        )
    return error


def distance(found_TV: Tensor, expected_TV: Tensor) -> float:
    """Return the RMS difference in log-probs, relative to the standard deviation of the expected
    ones. Return infinity if any log-prob is finite in only one of the two tensors.
    """
    V = min(found_TV.shape[-1], expected_TV.shape[-1])
    found, expected = (x[..., :V].double().log_softmax(-1) for x in (found_TV, expected_TV))
    finite = expected.isfinite()
    if not torch.equal(finite, found.isfinite()):
        return float("inf")
    difference = (found - expected)[finite]
    spread = expected[finite].std()
    return float(difference.square().mean().sqrt() / spread.clamp(min=1e-6))


@contextmanager
def _unmetered(runtime: Any) -> Iterator[None]:
    """Inside the context, stop measuring ``meter_schedule``."""
    meter = runtime.drafting.meter
    metered = None if meter is None else meter.metered
    if metered is not None:
        meter.metered = None
    try:
        yield
    finally:
        if metered is not None:
            meter.metered = metered


@contextmanager
def _logits_of(model: Any) -> Iterator[list[Tensor]]:
    """Inside the context, collect copies of the logits that ``compute_logits`` returns. They are
    copied before the sampler modifies them.
    """
    kept: list[Tensor] = []
    own = vars(model).get("compute_logits")
    stock = model.compute_logits

    def compute_logits(*args: Any, **kwargs: Any) -> Any:
        logits = stock(*args, **kwargs)
        if logits is not None:
            kept.append(logits.detach().float().clone())
        return logits

    model.compute_logits = compute_logits
    try:
        yield kept
    finally:
        if own is None:
            del model.compute_logits
        else:
            model.compute_logits = own
