"""The sparse attention backend, written once: two mixins over whatever backend vLLM has for the device.

Prefill, and the layers a schedule keeps dense, stay vLLM's own. Decode steps of the other layers read the
pages that ``sparrow.attention`` selects. A page's landmark lies in the padded tail of the KV block the page
is in, so vLLM accounts for it, and the landmarks are shared, reused or freed with their block.

Shapes: B decode rows, N block tokens, P page size, K kv heads, D head dim, M blocks of the longest sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from inspect import signature
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.model_executor.models.utils import extract_layer_index
from vllm.v1.attention.backends.utils import split_decodes_and_prefills

from sparrow import attention
from sparrow.errors import ConfigError
from sparrow.vllm import config
from sparrow.vllm.runtime import Runtime, find

if TYPE_CHECKING:
    VLLMClass = Any  # the mixins below are combined with a class of vLLM's
else:
    VLLMClass = object


@dataclass(frozen=True)
class Step:
    """What the builder tells the sparse layers about one batch, whose decode rows come first."""

    rows: int  # sequences with one query token
    lengths: Tensor  # int32 [B], cached tokens of these rows, 0 in the padding rows of a CUDA graph
    # int32 [B], pages kept by score, ``ALL_PAGES`` for rows that are still in prefill; written by the first attention
    # layer
    top_k: Tensor
    block_table: Tensor  # int32 [B, M]
    prefill: Any  # vLLM's own metadata of the remaining rows, None if there are none
    # int32 [B], ``ALL_PAGES`` in every row; only for draft steps, whose dense layers run Sparrow's kernels too
    everything: Tensor | None = None
    may_reuse_plan: bool = True  # whether layers may reuse a plan where ``attach`` found they can


class SparseBuilder(VLLMClass):
    """Mixin over a vLLM metadata builder: splits a batch, once per step."""

    is_prefilling: Tensor | None = None  # set by the adapter where vLLM itself does not pass it on

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.runtime = find(vllm_config)
        self._max_blocks = -(-vllm_config.model_config.max_model_len // kv_cache_spec.block_size)
        if self.runtime is not None and not self.runtime.is_lossless:
            self._init_reorder_batch_threshold(1)

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Never: a shared prefix would be read whole."""
        return False

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        """vLLM's metadata, with a ``Step`` as its attribute ``sparrow`` if the engine has a schedule."""
        common = common_attn_metadata
        if self.runtime is None:
            return super().build(common_prefix_len, common, fast_build)
        metadata = super().build(0, common, fast_build)
        if self.runtime.is_lossless:
            # Whatever vLLM itself runs is dense: prefill, verification, and steps without drafts.
            metadata.sparrow = Step(
                rows=0, lengths=common.seq_lens[:0], top_k=self.runtime.begin_step(0, None),
                block_table=common.block_table_tensor[:0], prefill=metadata,
            )  # fmt: skip
            return metadata
        rows, prefills, tokens, prefill_tokens = split_decodes_and_prefills(common, decode_threshold=1)
        prefill = None
        if prefills:
            # Leaves out the schedule that FlashAttention 3 computes ahead: its one buffer belongs to the full batch.
            prefill = super().build(0, _tail(common, rows, tokens, prefills, prefill_tokens), fast_build=True)
        is_prefilling = self.is_prefilling if common.is_prefilling is None else common.is_prefilling
        metadata.sparrow = Step(
            rows=rows,
            lengths=common.seq_lens[:rows],
            top_k=self.runtime.begin_step(rows, is_prefilling),
            block_table=common.block_table_tensor[:rows, : self._max_blocks],
            prefill=prefill,
        )
        return metadata


def _tail(common: Any, rows: int, tokens: int, prefills: int, prefill_tokens: int) -> Any:
    """The batch without its first ``rows`` sequences, which have ``tokens`` query tokens."""
    upper_bound = common.seq_lens_cpu_upper_bound
    return common.replace(
        query_start_loc=common.query_start_loc[rows:] - tokens,
        query_start_loc_cpu=common.query_start_loc_cpu[rows:] - tokens,
        seq_lens=common.seq_lens[rows:],
        seq_lens_cpu_upper_bound=None if upper_bound is None else upper_bound[rows:],
        is_prefilling=None,
        num_reqs=prefills,
        num_actual_tokens=prefill_tokens,
        block_table_tensor=common.block_table_tensor[rows:],
        slot_mapping=common.slot_mapping[tokens:],
    )


class SparseImpl(VLLMClass):
    """Mixin over a vLLM attention implementation: one layer's landmarks and sparse decode."""

    kernels: attention.Choice  # what decodes, chosen when the layer is attached
    runtime: Runtime | None = None
    is_sparse_layer = False
    has_landmarks = False  # true for sparse layers, and in lossless mode for all
    begins_step = False
    begins_decode = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        asked = signature(super().__init__).bind(*args, **kwargs)
        asked.apply_defaults()
        config.check_layer(asked.arguments)
        super().__init__(*args, **kwargs)
        self._viewed: Tensor | None = None

    def key_value(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[blocks, K, N, D]`` as views of the layer's cache."""
        raise NotImplementedError

    def make_workspace(self, max_rows: int, max_pages: int, device: torch.device) -> Any:
        """Scratch memory for the decode steps of all layers, if the implementation needs any."""

    def _views(self, layer: Any, kv_cache: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, values ``[blocks, K, N, D]`` and landmarks ``[blocks, N / P, K, D]``."""
        if self._viewed is not kv_cache:
            assert self.runtime is not None
            keys, values = self.key_value(layer, kv_cache)
            blocks, K, N, D = keys.shape
            pages, interior = N // self.runtime.layout.page_size, 2 * K * N * D * kv_cache.itemsize
            dtype, block = self.runtime.layout.landmark_type(kv_cache.dtype), kv_cache.stride(0) * kv_cache.itemsize
            if block < interior + pages * K * D * dtype.itemsize:
                raise ConfigError(
                    f"a KV block takes {block} bytes, leaving no room for its {pages} landmarks after {interior}; "
                    "another plugin or option rearranges vLLM's KV cache: start without it"
                )
            tail = kv_cache.storage_offset() * kv_cache.itemsize + interior
            marks = torch.empty(0, dtype=dtype, device=kv_cache.device).set_(
                kv_cache.untyped_storage(), tail // dtype.itemsize, (blocks, pages, K, D),
                (block // dtype.itemsize, K * D, D, 1),
            )  # fmt: skip
            self._viewed, self._cached_views = kv_cache, (keys, values, marks)
        return self._cached_views

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
        """Attention of one layer; ``query`` and ``output`` are ``[tokens, heads, D]``."""
        step: Step | None = getattr(attn_metadata, "sparrow", None)
        if self.begins_step and step is not None and step.rows:
            assert self.runtime is not None
            self.runtime.look_up(step.lengths)
        if step is None or not self.has_landmarks:
            return super().forward(
                layer, query, key, value, kv_cache, attn_metadata, output, output_scale, output_block_scale
            )
        assert self.runtime is not None
        B = step.rows
        keys, values, marks = self._views(layer, kv_cache)
        if step.prefill is not None:
            super().forward(layer, query[B:], key[B:], value[B:], kv_cache, step.prefill, output[B:])
            attention.update_landmarks(
                keys, marks, step.prefill.slot_mapping, layout=self.runtime.layout,
                implementation=self.kernels.implementation,
            )  # fmt: skip
        if B:
            top_k = step.top_k if self.is_sparse_layer or step.everything is None else step.everything
            attention.paged_decode(
                query[:B], keys, values, marks, step.block_table, step.lengths, top_k,
                layout=self.runtime.layout, scale=self.scale, out=output[:B], implementation=self.kernels.of(B),
                workspace=self.runtime.workspace, reuse_plan=step.may_reuse_plan and not self.begins_decode,
            )  # fmt: skip
        return output


def attach(layer: Any, spec: Any, vllm_config: Any) -> Any:
    """Tie a layer to its worker's runtime and make room for its landmarks; returns the padded KV cache spec.

    Raises ConfigError: blocks that do not hold whole pages, or that vLLM pads for another purpose.
    """
    decoding = config.requested(vllm_config)
    assert decoding is not None
    schedule = decoding.schedule
    if spec.block_size % schedule.page_size:
        raise ConfigError(
            f"vLLM's KV blocks hold {spec.block_size} tokens, not whole pages of {schedule.page_size}; "
            f"set block_size to a multiple of {schedule.page_size}"
        )
    if getattr(spec, "page_size_padded", None) is not None:
        raise ConfigError("vLLM pads this model's KV blocks for itself; Sparrow cannot put landmarks there")
    runtime = find(vllm_config)
    if runtime is None:
        scheduler = vllm_config.scheduler_config
        graph_rows = getattr(vllm_config.compilation_config, "max_cudagraph_capture_size", None) or 0
        max_rows, device = max(scheduler.max_num_seqs, graph_rows), layer._k_scale.device
        max_length = vllm_config.model_config.max_model_len
        runtime = Runtime(decoding, max_rows, max(max_length, scheduler.max_num_batched_tokens), device)
        runtime.backend = f"{type(layer.impl).__module__}.{type(layer.impl).__qualname__}"
        max_pages = -(-max_length // spec.block_size) * spec.block_size // schedule.page_size
        runtime.workspace = layer.impl.make_workspace(max_rows, max_pages, device)
        runtime.kernels = attention.choose(
            config.kernels(vllm_config), page_size=schedule.page_size, head_dim=spec.head_size,
            kv_heads=spec.num_kv_heads, group=layer.impl.num_queries_per_kv, dtype=spec.dtype,
            device=device, landmark_dtype=schedule.landmark_dtype,
        )  # fmt: skip
        layer.impl.begins_step = True  # vLLM asks in the order of the model, so this layer is the first
    index = extract_layer_index(layer.layer_name)
    layer.impl.is_sparse_layer = index not in schedule.dense_layers
    layer.impl.has_landmarks = layer.impl.is_sparse_layer or runtime.is_lossless
    layer.impl.kernels = runtime.kernels
    if layer.impl.runtime is None:
        layer.impl.runtime = runtime
        (runtime.sparse_layers if layer.impl.is_sparse_layer else runtime.dense_layers).append(index)
        # The kernels' division of a step's work holds for the next layer that decodes with the same page counts.
        if layer.impl.has_landmarks:
            layer.impl.begins_decode = runtime.last_decoded is not layer.impl.is_sparse_layer
            runtime.last_decoded = layer.impl.is_sparse_layer
    elements = spec.block_size // schedule.page_size * spec.num_kv_heads * spec.head_size
    marks = elements * runtime.layout.landmark_type(spec.dtype).itemsize
    marks = -(-marks // spec.dtype.itemsize) * spec.dtype.itemsize
    runtime.landmark_share = marks / (spec.page_size_bytes + marks)
    return replace(spec, page_size_padded=spec.page_size_bytes + marks)


def is_requested() -> bool:
    """Whether the engine being built was asked to decode with Sparrow."""
    return config.requested(get_current_vllm_config()) is not None
