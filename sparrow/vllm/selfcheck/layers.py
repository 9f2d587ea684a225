"""Check decode steps of single layers, with keys and values whose attention output is known.

Shapes: B decode rows, T tokens, H query heads, K kv heads, D head dim, P page size, N block tokens,
C candidate queries, M blocks of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from sparrow.attention import CacheScales, reference
from sparrow.attention.pages import landmarks, page_scores
from sparrow.schedule import ALL_PAGES
from sparrow.vllm.kv_cache import tail_of_blocks
from sparrow.vllm.selfcheck.refusal import refusal

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


def bytes_of(layer: Any) -> Tensor:
    """Return all bytes of a layer's KV cache as a view, uint8 [blocks, bytes per block]."""
    cache = layer.kv_cache
    block_bytes = cache[0].nbytes
    if layer.impl.has_landmarks:
        marks = layer.impl.cache_views(layer, cache).landmarks
        block_bytes = marks.data_ptr() - cache.data_ptr() + marks[0].nbytes
    return tail_of_blocks(cache, 0, torch.uint8, (len(cache), block_bytes))


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
            bytes_of(layer)[place.blocks] = 0
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
            if bytes_of(layer)[place.neighbours].any():
                raise refusal(f"{layer.layer_name} stores tokens or landmarks outside their blocks")
        return error
    finally:
        for layer in layers:
            bytes_of(layer)[place.blocks] = 0


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
            raise refusal(
                f"the output of {layer.layer_name} is off by {error:.2g} (new tokens per row: "
                f"{tokens}, rows: {rows}, cache: {layer.kv_cache.dtype}, with "
                f"{'every page' if top_k == ALL_PAGES else 'the best pages'} kept), but rounding "
                f"accounts for at most {bound}"
            )
    return max(by_layer)
