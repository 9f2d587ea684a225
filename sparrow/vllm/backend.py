"""The sparse attention backend: two mixins for vLLM's own backend classes.

vLLM's own attention handles prefill and the schedule's dense layers. In decode steps, all other
layers read only the pages selected by ``sparrow.attention``. Each landmark is stored in the padded
tail of the KV block that holds its page. vLLM thus accounts for the landmark's memory, and shares,
reuses and frees the landmark along with the block. An int8 cache also keeps its scales in this
tail, before the landmarks.

Shapes: B decode rows, N block tokens, P page size, K kv heads, D head dim, M blocks of the longest
sequence.
"""

from __future__ import annotations

from collections.abc import Iterable
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.distributed import get_tensor_model_parallel_rank
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from sparrow import attention
from sparrow.attention.pages import FP8
from sparrow.errors import ConfigError, UnsupportedModel
from sparrow.vllm import config, fp8
from sparrow.vllm.kv_cache import (
    STORED,
    copied_blocks,
    copy_blocks,
    groups,
    tail_of_blocks,
    with_tail,
)
from sparrow.vllm.runtime import Runtime, attached, find

if TYPE_CHECKING:
    VLLMClass = Any  # stands in for the vLLM class a mixin is combined with
else:
    VLLMClass = object


class Prefill(NamedTuple):
    """Batch rows that run vLLM's own attention."""

    tokens: slice  # the rows' tokens in the batch
    # vLLM's metadata for these rows, or None to use the whole batch's. Don't store the batch's
    # metadata here. It refers to the ``Step``, so a reference cycle would keep each step's tensors
    # alive until the garbage collector runs.
    metadata: Any = None
    # blocks of an 8-bit cache to copy for vLLM; None if vLLM reads the cache directly
    blocks: Tensor | None = None


class LayerGroup:
    """The layers in one KV cache group. They all store a token in the same slot, so their landmarks
    can be updated together.

    A single kernel launch for all layers is faster than one per layer, both on the host and in a
    dense step's CUDA graph.
    """

    def __init__(self, layers: Iterable[Any]) -> None:
        self._layers = sorted(
            (x for x in layers if x.impl.has_landmarks),
            key=lambda x: extract_layer_index(x.layer_name),
        )
        self._caches: attention.CachedLayers | None = None
        for layer in self._layers:
            layer.impl.group = self

    def ends_with(self, layer: Any) -> bool:
        """Return whether this layer is the last in the group to write its keys."""
        return layer is self._layers[-1]

    def set_dense(self, step: Step) -> None:
        """Set the step that the layers use if vLLM's metadata has none."""
        for layer in self._layers:
            layer.impl.dense_step = step

    def update_landmarks(self, slot_mapping_T: Tensor) -> None:
        """Write the landmarks of the pages that these slots complete, in all layers. Call this
        after the last layer has stored its keys.
        """
        impl = self._layers[-1].impl
        # All layers have run by now, so their caches exist. If vLLM replaces the KV cache, it also
        # creates a new builder, so these never go stale.
        if self._caches is None:
            self._caches = attention.CachedLayers(
                [layer.impl.cached_keys() for layer in self._layers]
            )
        attention.update_landmarks(
            self._caches,
            slot_mapping_T,
            layout=impl.runtime.layout,
            implementation=impl.kernels.implementation,
        )


class Step(NamedTuple):
    """The builder's description of a batch for the sparse layers. Decode rows come first."""

    rows: int  # number of decode rows
    # int32 [B], cached tokens per decode row; 0 for rows that only pad a CUDA graph
    lengths: Tensor
    # int32 [B], number of pages kept by score, ``ALL_PAGES`` for rows still in prefill; written by
    # the first attention layer
    top_k: Tensor
    block_table: Tensor  # int32 [B, M]
    prefills: tuple[Prefill, ...]  # the rest of the batch
    # the layers whose landmarks ``prefills`` update; None if there are no prefill rows
    layers: LayerGroup | None = None
    # int32 [B], ``ALL_PAGES`` everywhere; set only if dense layers also run Sparrow's kernels, as
    # in draft steps and with an 8-bit cache
    everything: Tensor | None = None
    # whether plans may be reused; ``attach`` decides which layers reuse the previous layer's plan
    may_reuse_plan: bool = True
    # whether the caller writes ``top_k`` and counts the step before the model runs
    has_page_counts: bool = False
    tokens: int = 1  # new tokens per row, more than one in a pass over guesses


class CacheViews(NamedTuple):
    """Views into a layer's KV cache."""

    keys: Tensor  # [blocks, K, N, D]
    values: Tensor  # [blocks, K, N, D]
    landmarks: Tensor  # [blocks, N / P, K, D]
    # set only for an 8-bit cache; int8 scales are views into the cache, but fp8 scales are not
    scales: attention.CacheScales | None


class SparseBuilder(VLLMClass):
    """Mixin for a vLLM metadata builder. It splits each batch into decode rows and prefill rows.
    vLLM creates one builder per group of layers. In a group without full attention, the builder
    behaves like vLLM's own.

    Raises UnsupportedModel if the full-attention layers need more than one builder in lossy mode.
    """

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = attached(vllm_config)
        ours = [layers[name] for name in layer_names if name in layers]
        self.runtime = find(vllm_config) if ours else None
        if self.runtime is not None and not self.runtime.is_lossless and len(ours) < len(layers):
            # Each group has a builder of its own, and each builder would count the step's rows.
            raise UnsupportedModel(
                f"vLLM splits the model's {len(layers)} layers with full attention into groups of "
                f"{len(ours)}, each with its own KV blocks, but Sparrow supports only one such "
                "group; set disable_hybrid_kv_cache_manager=True if the other layers have a "
                "sliding window (they then cache whole sequences too), choose a different model, "
                "or start vLLM without a schedule"
            )
        for layer in ours:
            layer.impl.forget_cache()
        self._layers = LayerGroup(ours)
        self._max_blocks = -(-vllm_config.model_config.max_model_len // kv_cache_spec.block_size)
        if self.runtime is None:
            return
        if not self.runtime.is_lossless:
            self._init_reorder_batch_threshold(1)
            mode = vllm_config.compilation_config.cudagraph_mode
            # True if decode steps may be captured in CUDA graphs. The graphs run Sparrow's kernels
            # at any length.
            self._captures_decode = mode is not None and mode.has_full_cudagraphs()
            return
        # In lossless mode, vLLM itself only runs dense passes: prefill, verification, and steps
        # without drafts. The layers use a dense step by default, so vLLM's metadata needs no
        # change.
        nothing = torch.empty(0, dtype=torch.int32, device=device)
        whole_batch = Prefill(slice(None))
        self._layers.set_dense(
            Step(0, nothing, nothing, nothing.view(0, 1), (whole_batch,), self._layers)
        )

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """If there is a schedule, disable cascade attention, which would read shared prefixes
        densely.
        """
        return self.runtime is None and super().use_cascade_attention(*args, **kwargs)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> Any:
        """Build vLLM's metadata. In lossy mode, its ``sparrow`` attribute holds the ``Step``."""
        common = common_attn_metadata
        if self.runtime is None or self.runtime.is_lossless:
            return super().build(common_prefix_len, common, fast_build)
        metadata = super().build(0, common, fast_build)
        rows, prefill_rows, tokens, _ = split_decodes_and_prefills(common, decode_threshold=1)
        top_k = self.runtime.begin_step(rows, common.is_prefilling)
        block_table = common.block_table_tensor[:rows, : self._max_blocks]
        lengths = common.seq_lens[:rows]
        if self._runs_densely(common, rows, prefill_rows):
            self.runtime.begin_dense_step(lengths)
            whole_batch = (Prefill(slice(None)),)
            metadata.sparrow = Step(
                0, lengths[:0], top_k[:0], block_table[:0], whole_batch, self._layers
            )
            return metadata
        prefills: list[Prefill] = []
        if self.runtime.cache.in_8_bits is not None:
            if prefill_rows or not (
                self.runtime.cache.fp8 is None or self.runtime.cache.fp8.is_set
            ):
                prefills = self._copied_prefills(common, rows)
        elif prefill_rows:
            # ``fast_build`` skips FlashAttention 3's ahead-of-time scheduling. vLLM has only one
            # buffer for the result, and the full batch needs that buffer.
            rest = super().build(0, _rows(common, rows, rows + prefill_rows), fast_build=True)
            prefills = [Prefill(slice(tokens, None), rest)]
        metadata.sparrow = Step(
            rows=rows,
            lengths=lengths,
            top_k=top_k,
            block_table=block_table,
            prefills=tuple(prefills),
            layers=self._layers,
            everything=None
            if self.runtime.cache.in_8_bits is None
            else self.runtime.pages.everything(rows),
        )
        return metadata

    def _runs_densely(self, common: Any, rows: int, prefill_rows: int) -> bool:
        """Return whether to run vLLM's own attention on the whole batch, in one call per layer.
        That's possible if no decode row skips any page, and the step isn't replayed from a CUDA
        graph.

        Sparrow's kernels would give the same result, but would take two calls per layer, which
        costs more host time.
        """
        assert self.runtime is not None
        if self.runtime.cache.in_8_bits is not None or (self._captures_decode and not prefill_rows):
            return False
        upper_bound = common.seq_lens_cpu_upper_bound
        known = None if upper_bound is None else upper_bound[:rows]
        return self.runtime.reads_everything(known)

    def _copied_prefills(self, common: Any, rows: int) -> list[Prefill]:
        """Split the prefill rows, which follow the first ``rows`` rows, into groups. Each group
        reads a copy of its KV blocks.
        """
        assert self.runtime is not None
        upper_bound = common.seq_lens_cpu_upper_bound
        start = common.query_start_loc_cpu.numpy()
        lengths = (common.seq_lens.cpu() if upper_bound is None else upper_bound).numpy()[
            : common.num_reqs
        ]
        block_tokens = self.kv_cache_spec.block_size
        if self.runtime.cache.fp8 is not None:
            flags = common.is_prefilling
            in_prefill = 0 if flags is None else int(np.count_nonzero(flags.numpy()[:rows]))
            table = common.block_table_tensor[: common.num_reqs]
            computed = lengths - np.diff(start)[: common.num_reqs]
            self.runtime.cache.fp8.begin_step(in_prefill, table, computed, block_tokens)
        lengths = lengths[rows:]
        prefills = []
        for first, last in groups(lengths) if len(lengths) else ():
            part = _rows(common, rows + first, rows + last)
            copied = copied_blocks(part.block_table_tensor, lengths[first:last], block_tokens)
            metadata = super().build(
                0, part.replace(block_table_tensor=copied.table), fast_build=True
            )
            tokens = slice(int(start[rows + first]), int(start[rows + last]))
            prefills.append(Prefill(tokens, metadata, copied.blocks))
        return prefills


def _rows(common: Any, first: int, last: int) -> Any:
    """Select sequences ``first`` to ``last - 1``. The last one may end in padding tokens."""
    upper_bound = common.seq_lens_cpu_upper_bound
    start = common.query_start_loc_cpu
    begin = int(start[first])
    end = common.num_actual_tokens if last == common.num_reqs else int(start[last])
    return common.replace(
        query_start_loc=common.query_start_loc[first : last + 1] - begin,
        query_start_loc_cpu=start[first : last + 1] - begin,
        seq_lens=common.seq_lens[first:last],
        seq_lens_cpu_upper_bound=None if upper_bound is None else upper_bound[first:last],
        is_prefilling=None,
        num_reqs=last - first,
        num_actual_tokens=end - begin,
        block_table_tensor=common.block_table_tensor[first:last],
        slot_mapping=common.slot_mapping[begin:end],
    )


class SparseImpl(VLLMClass):
    """Mixin for a vLLM attention implementation. It adds landmarks and sparse decode steps to layers
    that are attached to a runtime. Other layers behave like vLLM's own.
    """

    kernels: attention.Choice  # decode kernels, chosen when the layer is attached
    runtime: Runtime | None = None
    is_sparse_layer = False
    # True for layers that are vLLM's own in a hybrid model; they are never attached to a runtime
    has_window = False
    # True for sparse layers; in lossless mode or with an 8-bit cache, true for all layers
    has_landmarks = False
    # True for the layers of a head that guesses: they read everything, and have no landmarks
    is_of_head = False
    fp8_scales: fp8.LayerScales | None = None  # only for an fp8 cache
    # budgets of this worker's heads; set for sparse layers if the schedule has head budgets
    head_budgets: Tensor | None = None
    # layers whose landmarks are updated together with this one's
    group: LayerGroup | None = None
    dense_step: Step | None = None  # for the batches vLLM itself runs in lossless mode
    begins_step = False
    begins_decode = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        asked = signature(super().__init__).bind(*args, **kwargs)
        asked.apply_defaults()
        config.check_layer(asked.arguments)
        vllm_config = get_current_vllm_config()
        decoding = config.requested(vllm_config)
        self.has_window = asked.arguments["sliding_window"] is not None
        if self.has_window and decoding is not None:
            config.check_hybrid(vllm_config, decoding, config.WINDOWS)
        is_lossless = decoding is not None and decoding.is_lossless
        if asked.arguments["kv_cache_dtype"] in STORED and not is_lossless:
            asked.arguments["kv_cache_dtype"] = "auto"  # vLLM's attention reads a 16-bit copy
        super().__init__(*asked.args, **asked.kwargs)
        if asked.arguments["kv_cache_dtype"] not in STORED:
            self.supports_quant_query_input = False
        self._viewed: Tensor | None = None
        self._cached_views: CacheViews | None = None

    def key_value(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values ``[blocks, K, N, D]`` as views into the layer's cache."""
        raise NotImplementedError

    def make_workspace(
        self, max_rows: int, max_pages: int, tokens: int, device: torch.device
    ) -> Any:
        """Allocate the scratch memory that all layers share in decode steps. Each row has up to
        ``tokens`` new tokens per step. Return None if no scratch memory is needed.
        """

    @property
    def is_in_8_bits(self) -> bool:
        """True if the layer's cache is 8-bit and only Sparrow's kernels read it directly. In that
        case, Sparrow's kernels run every decode step, and vLLM's own attention reads a 16-bit copy.

        False in lossless mode, where vLLM's own attention reads the 8-bit cache in dense passes.
        """
        runtime = self.runtime
        return (
            runtime is not None and runtime.cache.in_8_bits is not None and not runtime.is_lossless
        )

    @property
    def decodes_next(self) -> bool:
        """True if Sparrow's decode kernel may run next in this layer. In lossless mode, that only
        happens in draft steps.
        """
        runtime = self.runtime
        return (
            (self.is_sparse_layer or self.is_of_head)
            and runtime is not None
            and (runtime.drafting.is_running or not runtime.is_lossless)
        )

    def cache_views(self, layer: Any, kv_cache: Tensor) -> CacheViews:
        """Return views of the layer's cached keys, values, landmarks and scales."""
        if self._viewed is not kv_cache or self._cached_views is None:
            assert self.runtime is not None
            keys, values = self.key_value(layer, kv_cache)
            if (stored := self.runtime.cache.in_8_bits) is not None:
                keys = keys.view(stored)
                values = values.view(stored)
            blocks, K, N, D = keys.shape
            pages = N // self.runtime.layout.page_size
            interior = 2 * K * N * D * kv_cache.itemsize
            scales_end = interior + (2 * K * N if keys.dtype == torch.int8 else 0)
            dtype = self.runtime.cache.landmark_dtype
            block = kv_cache.stride(0) * kv_cache.itemsize
            if block < scales_end + pages * K * D * dtype.itemsize:
                raise ConfigError(
                    f"a KV block of {block} bytes has no room for {pages} landmarks after its first "
                    f"{scales_end} bytes; start vLLM without the plugin or option that changes the "
                    "layout of its KV cache"
                )
            marks = tail_of_blocks(kv_cache, scales_end, dtype, (blocks, pages, K, D))
            scales = None if self.fp8_scales is None else self.fp8_scales.values
            # Each head's key scales are followed by its value scales. Both are contiguous and
            # aligned.
            if keys.dtype == torch.int8:
                exponents = tail_of_blocks(kv_cache, interior, torch.uint8, (blocks, K, 2, N))
                scales = attention.CacheScales(exponents[:, :, 0], exponents[:, :, 1])
            self._viewed = kv_cache
            self._cached_views = CacheViews(keys, values, marks, scales)
        return self._cached_views

    def forget_cache(self) -> None:
        """Drop the views of the layer's latest cache, so that its memory can be freed."""
        self._viewed = None
        self._cached_views = None

    def cached_keys(self) -> tuple[Tensor, ...]:
        """Return the keys and landmarks in the layer's latest cache, plus the key scales if the
        cache is int8.
        """
        assert self._cached_views is not None, "the layer has not run since its cache was created"
        keys, _, marks, scales = self._cached_views
        return (
            (keys, marks) if scales is None or keys.dtype != torch.int8 else (keys, marks, scales.k)
        )

    def store(
        self,
        layer: Any,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        slot_mapping: Tensor,
        store_tokens: Any,
    ) -> None:
        """Write new keys and values with ``store_tokens`` from either
        ``sparrow.attention.reference`` or ``sparrow.attention.triton``.
        """
        clipped = None
        if self.fp8_scales is not None:
            self.fp8_scales.set_once(key, value, slot_mapping)
            clipped = self.fp8_scales.cache.clipped
        keys, values, _, scales = self.cache_views(layer, kv_cache)
        store_tokens(key, value, keys, values, slot_mapping, scales, clipped)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: Any,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Compute a layer's attention. ``query`` and ``output`` are ``[tokens, heads, D]``."""
        step: Step | None = (
            None if attn_metadata is None else getattr(attn_metadata, "sparrow", self.dense_step)
        )
        if self.begins_step and step is not None and step.rows and not step.has_page_counts:
            assert self.runtime is not None
            self.runtime.look_up(step.lengths)
        if step is None or not (self.has_landmarks or self.is_of_head):
            return super().forward(
                layer,
                query,
                key,
                value,
                kv_cache,
                attn_metadata,
                output,
                output_scale,
                output_block_scale,
            )
        assert self.runtime is not None
        B = step.rows
        decoded = B * step.tokens
        keys, values, marks, scales = self.cache_views(layer, kv_cache)
        for part in step.prefills:
            cache = self._copy(layer, query, kv_cache, part.blocks)
            at = part.tokens
            metadata = attn_metadata if part.metadata is None else part.metadata
            super().forward(layer, query[at], key[at], value[at], cache, metadata, output[at])
            if step.layers is not None and step.layers.ends_with(layer):
                step.layers.update_landmarks(metadata.slot_mapping)
        if B:
            if query.dtype == FP8:  # vLLM rounds queries to fp8 for its own attention
                query = query[:decoded].to(output.dtype) * layer._q_scale.to(output.dtype)
            top_k = (
                step.top_k if self.is_sparse_layer or step.everything is None else step.everything
            )
            kernels = self.kernels if step.tokens == 1 else self.runtime.model.pass_kernels
            attention.paged_decode(
                query[:decoded],
                keys,
                values,
                marks,
                step.block_table,
                step.lengths,
                top_k,
                layout=self.runtime.layout,
                scale=self.scale,
                out=output[:decoded],
                implementation=kernels.of(B),
                cache_scales=scales,
                workspace=self.runtime.model.workspace,
                head_budgets_K=self.head_budgets,
                reuse_plan=step.may_reuse_plan and not self.begins_decode,
                tokens=step.tokens,
            )
        return output

    def _copy(self, layer: Any, query: Tensor, kv_cache: Tensor, blocks: Tensor | None) -> Tensor:
        """Return the cache that vLLM's own attention should read. For an 8-bit cache, this is a
        copy of these blocks in the queries' dtype.
        """
        keys, values, _, scales = self.cache_views(layer, kv_cache)
        if blocks is None or scales is None:
            return kv_cache
        copy = torch.empty(
            (len(blocks), *kv_cache.shape[1:]), dtype=query.dtype, device=query.device
        )
        to_keys, to_values = self.key_value(layer, copy)
        copy_blocks(keys, blocks, scales.k, to_keys)
        copy_blocks(values, blocks, scales.v, to_values)
        return copy


def attach(layer: Any, spec: Any, vllm_config: Any) -> Any:
    """Connect a layer to its worker's runtime, and return the layer's KV cache spec with padding
    for landmarks and int8 scales.

    Raises ConfigError if KV blocks are not made up of whole pages, or if vLLM already pads them for
    something else.
    """
    decoding = config.requested(vllm_config)
    assert decoding is not None
    schedule = decoding.schedule
    if spec.block_size % schedule.page_size:
        raise ConfigError(
            f"vLLM's KV blocks of {spec.block_size} tokens cannot be divided into pages of "
            f"{schedule.page_size} tokens; set block_size to a multiple of {schedule.page_size}"
        )
    if getattr(spec, "page_size_padded", None) is not None:
        raise ConfigError(
            "vLLM already pads this model's KV blocks, so Sparrow cannot store landmarks in "
            "the padding; choose a different model, or start vLLM without a schedule"
        )
    runtime = find(vllm_config)
    if getattr(layer, "is_draft_layer", False):
        assert runtime is not None, "the head's layers come after the model's"
        layer.impl.runtime = runtime
        layer.impl.is_of_head = True
        layer.impl.begins_decode = True
        layer.impl.kernels = runtime.model.kernels
        # The same padding makes these blocks as large as those of the model's layers. vLLM then
        # keeps one block table for all layers.
        return with_tail(spec, schedule.page_size, runtime.cache.landmark_dtype, None)[0]
    if runtime is None:
        scheduler = vllm_config.scheduler_config
        graph_rows = (
            getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None) or 0
        )
        max_rows = max(scheduler.max_num_seqs, graph_rows)
        device = layer._k_scale.device
        max_length = vllm_config.model_config.max_model_len
        runtime = Runtime(
            decoding, max_rows, max(max_length, scheduler.max_num_batched_tokens), device
        )
        runtime.model.backend = f"{type(layer.impl).__module__}.{type(layer.impl).__qualname__}"
        max_pages = -(-max_length // spec.block_size) * spec.block_size // schedule.page_size
        runtime.model.workspace = layer.impl.make_workspace(
            max_rows, max_pages, decoding.guess_tokens + 1, device
        )
        stored = runtime.cache.in_8_bits = STORED.get(vllm_config.cache_config.cache_dtype)
        runtime.cache.fp8 = fp8.Fp8Cache(device, not runtime.is_lossless) if stored == FP8 else None
        runtime.model.quantization = vllm_config.model_config.quantization
        model_dtype = vllm_config.model_config.dtype if stored else spec.dtype
        runtime.cache.landmark_dtype = runtime.layout.landmark_type(model_dtype)
        sizes: dict[str, Any] = dict(
            page_size=schedule.page_size,
            head_dim=spec.head_size,
            kv_heads=spec.num_kv_heads,
            group=layer.impl.num_queries_per_kv,
            dtype=stored or spec.dtype,
            device=device,
            landmark_dtype=schedule.landmark_dtype,
        )
        asked = config.kernels(vllm_config)
        runtime.model.kernels = attention.choose(asked, **sizes)
        if decoding.guess_tokens:
            tokens = decoding.guess_tokens + 1
            runtime.model.pass_kernels = attention.choose(asked, **sizes, tokens=tokens)
        # Layers are attached in model order, so this is the first one.
        layer.impl.begins_step = True
    index = extract_layer_index(layer.layer_name)
    layer.impl.is_sparse_layer = index not in schedule.dense_layers
    stored = runtime.cache.in_8_bits
    layer.impl.has_landmarks = (
        layer.impl.is_sparse_layer or runtime.is_lossless or stored is not None
    )
    if runtime.cache.fp8 is not None and layer.impl.fp8_scales is None:
        layer.impl.fp8_scales = fp8.LayerScales(spec.num_kv_heads, runtime.cache.fp8, layer)
    layer.impl.kernels = runtime.model.kernels
    if layer.impl.runtime is None:
        layer.impl.runtime = runtime
        if layer.impl.is_sparse_layer and schedule.head_budgets:
            rank = get_tensor_model_parallel_rank()
            ranks = vllm_config.parallel_config.tensor_parallel_size
            layer.impl.head_budgets = runtime.head_budgets(index, spec.num_kv_heads, rank, ranks)
        (
            runtime.model.sparse_layers
            if layer.impl.is_sparse_layer
            else runtime.model.dense_layers
        ).append(index)
        # A plan splits a step's work among thread blocks. A layer can reuse the previous layer's
        # plan if both decode with the same page counts.
        if layer.impl.has_landmarks:
            layer.impl.begins_decode = runtime.model.last_decoded is not layer.impl.is_sparse_layer
            runtime.model.last_decoded = layer.impl.is_sparse_layer
    spec, runtime.cache.landmark_share = with_tail(
        spec, schedule.page_size, runtime.cache.landmark_dtype, stored
    )
    return spec


def is_requested() -> bool:
    """Return whether the engine being built should decode with Sparrow."""
    return config.requested(get_current_vllm_config()) is not None
