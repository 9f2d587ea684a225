"""Page-sparse attention in eager torch. It's differentiable, runs on any device and serves as the
spec for the kernels.

Gradients flow through the attention to the kept tokens, but not through page selection, which is
treated as fixed. Source: Sparrow, arXiv 2606.08446, section 2.

Shapes: B sequences, T query tokens, S cached tokens, H query heads, K kv heads, G = H / K, D head
dim, P page size, N pages.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from sparrow.attention.decode import (
    CachedLayers,
    CacheScales,
    DecodeBatch,
    DecodeWorkspace,
    check_landmarks,
    check_shapes,
)
from sparrow.attention.int8 import from_int8, to_int8
from sparrow.attention.pages import (
    FP8,
    FP8_MAX,
    PageLayout,
    landmarks,
    page_count,
    page_scores,
    select_pages,
    to_fp8,
    tokens_at,
)


def decode(
    q_BHD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    start_B: Tensor | None,
    length_B: Tensor,
    top_k_B: Tensor,
    layout: PageLayout,
    scale: float,
    head_budgets_K: Tensor | None = None,
) -> Tensor:
    """Compute one decode step, with each row's newest token attending to the row's kept pages.
    Return ``[B, H, D]``; see ``decode_several``.
    """
    return decode_several(
        q_BHD[:, :, None],
        k_BKSD,
        v_BKSD,
        start_B,
        length_B,
        top_k_B,
        layout,
        scale,
        head_budgets_K,
    )[:, :, 0]


def decode_several(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    start_B: Tensor | None,
    length_B: Tensor,
    top_k_B: Tensor,
    layout: PageLayout,
    scale: float,
    head_budgets_K: Tensor | None = None,
) -> Tensor:
    """Compute one decode step over the T newest tokens of each row, and return ``[B, H, T, D]``.

    The query of the first new token selects the pages for all T tokens. Each token also reads
    itself and the new tokens before it.

    Row b's sequence is in columns ``start_B[b] .. start_B[b] + length_B[b] - 1``, between left
    padding and the unused end of the cache. If ``start_B`` is None, all rows start in column 0.
    Pages are counted from the sequence's first token.
    """
    S = k_BKSD.shape[2]
    P = layout.page_size
    with torch.no_grad():
        marks = _page_landmarks(k_BKSD, start_B, layout)
        scores = page_scores(selecting_query(q_BHTD), marks)
        keep_BKN = _kept_pages(scores, length_B, q_BHTD.shape[2], top_k_B, layout, head_budgets_K)
        token_BKM, seen_BKTM = _kept_tokens(keep_BKN, length_B, q_BHTD.shape[2], P)
        column_BKM = token_BKM
        if start_B is not None:
            column_BKM = token_BKM + start_B[:, None, None]
        column_BKM = column_BKM.clamp(max=S - 1)
    keys = tokens_at(k_BKSD, column_BKM)
    values = tokens_at(v_BKSD, column_BKM)
    return _attend(q_BHTD, keys, values, seen_BKTM, scale)


def check(batch: DecodeBatch, workspace: DecodeWorkspace | None) -> None:
    """Raise ValueError if shapes don't match, or the landmarks don't have the layout's dtype."""
    check_shapes(batch)
    check_landmarks(batch.k_cache, batch.landmark_cache, batch.layout)


def run(
    batch: DecodeBatch, workspace: DecodeWorkspace | None = None, reuse_plan: bool = False
) -> Tensor:
    """Compute one decode step over a paged cache. Like ``decode_several``, but with cached
    landmarks.

    Cache entries beyond a row's ``length_B`` tokens have no effect, even if they are NaN, and a row
    of length 0 returns zeros. If a new token fills a page, the page's landmark is written. The
    workspace and ``reuse_plan`` are ignored.
    """
    T = batch.tokens
    q_BHTD = batch.q_BHD.unflatten(0, (-1, T)).transpose(1, 2)
    k_cache = batch.k_cache
    layout = batch.layout
    K = batch.kv_heads
    block_tokens = k_cache.shape[2]
    P = layout.page_size
    length_B = batch.length_B.long()
    table_BM = batch.block_table_BM.long()

    with torch.no_grad():
        new_BT = length_B[:, None] - torch.arange(T, 0, -1, device=length_B.device)
        block_BT = table_BM.gather(1, new_BT.clamp(min=0) // block_tokens)
        slot_BT = torch.where(new_BT >= 0, block_BT * block_tokens + new_BT % block_tokens, -1)
        scales = batch.cache_scales
        key_scales = None if scales is None else scales.k
        _update_landmarks(k_cache, batch.landmark_cache, slot_BT.flatten(), layout, key_scales)

        pages_B = page_count(length_B, P)
        n = torch.arange(max(1, int(pages_B.max())), device=q_BHTD.device)
        block_BN = table_BM[:, n * P // block_tokens].where(n < pages_B[:, None], 0)
        marks_BKND = batch.landmark_cache[block_BN, n % (block_tokens // P)].transpose(1, 2)
        scores = page_scores(selecting_query(q_BHTD), marks_BKND)
        top_k_B = batch.top_k_B.long()
        keep_BKN = _kept_pages(scores, length_B, T, top_k_B, layout, batch.head_budgets_K)

        token_BKM, seen_BKTM = _kept_tokens(keep_BKN, length_B, T, P)
        block_BKM = block_BN[:, None].expand(-1, K, -1).gather(-1, token_BKM // P)
        at = (block_BKM, torch.arange(K, device=q_BHTD.device)[:, None], token_BKM % block_tokens)
        if scales is None:
            keys = k_cache[at].to(q_BHTD.dtype)
            values = batch.v_cache[at].to(q_BHTD.dtype)
        else:
            keys = _dequantised(k_cache, scales.k, at, q_BHTD.dtype)
            values = _dequantised(batch.v_cache, scales.v, at, q_BHTD.dtype)
    # Masked tokens may be garbage, even NaN. The last new token sees all of the row's tokens.
    unseen_BKM1 = ~seen_BKTM[:, :, -1, :, None]
    keys = keys.masked_fill(unseen_BKM1, 0.0)
    values = values.masked_fill(unseen_BKM1, 0.0)
    out_BHTD = _attend(q_BHTD, keys, values, seen_BKTM, batch.scale)
    out_BHTD = out_BHTD.masked_fill((length_B == 0)[:, None, None, None], 0.0)
    return batch.out_BHD.copy_(out_BHTD.transpose(1, 2).flatten(0, 1))


def selecting_query(q_BHTD: Tensor) -> Tensor:
    """Return the query that selects pages for all new tokens of a row, ``[B, H, 1, D]``.

    This is the first new token's query. The later tokens may be drafts, and the pages used to
    verify a draft must not depend on that draft.
    """
    return q_BHTD[:, :, :1]


def _attend(
    q_BHTD: Tensor, k_BKMD: Tensor, v_BKMD: Tensor, seen_BKTM: Tensor, scale: float
) -> Tensor:
    """Compute attention of each row's queries over the M tokens gathered for each kv head. The mask
    ``seen_BKTM`` says which of these tokens a query sees.
    """
    T = q_BHTD.shape[2]
    q_BKGTD = q_BHTD.unflatten(1, (k_BKMD.shape[1], -1))
    mask = seen_BKTM[:, :, None].expand(-1, -1, q_BKGTD.shape[2], -1, -1).flatten(2, 3)
    out = F.scaled_dot_product_attention(q_BKGTD.flatten(2, 3), k_BKMD, v_BKMD, mask, scale=scale)
    return out.unflatten(2, (-1, T)).flatten(1, 2)


def _entries(cache: Tensor, at: tuple[Tensor | slice, ...]) -> Tensor:
    """Return ``cache[at]``. Float8 is indexed as uint8, since torch can't index float8 on a CPU."""
    if cache.dtype == FP8:
        return cache.view(torch.uint8)[at].view(FP8)
    return cache[at]


def _dequantised(
    cache: Tensor, scales: Tensor, at: tuple[Tensor, ...], dtype: torch.dtype
) -> Tensor:
    """Dequantise keys or values ``[B, K, T, D]`` from an 8-bit cache."""
    if cache.dtype == torch.int8:
        return from_int8(cache[at], scales[at], dtype)
    return _entries(cache, at).to(dtype) * scales.to(dtype)[:, None, None]


def store_tokens(
    key_TKD: Tensor,
    value_TKD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    scales: CacheScales,
    clipped: Tensor | None = None,
) -> None:
    """Store each token's keys and values in its slot of an 8-bit cache, skipping tokens with slot
    -1. See ``triton.store_tokens``.
    """
    has_slot_T = slot_mapping_T >= 0
    slot = slot_mapping_T[has_slot_T].long()
    block_tokens = k_cache.shape[2]
    at = (slot // block_tokens, slice(None), slot % block_tokens)

    if k_cache.dtype == torch.int8:
        for new_TKD, cache, scale in ((key_TKD, k_cache, scales.k), (value_TKD, v_cache, scales.v)):
            cache[at], scale[at] = to_int8(new_TKD[: len(slot_mapping_T)][has_slot_T])
        return

    assert clipped is not None
    beyond = torch.zeros_like(slot, dtype=torch.bool)
    for new_TKD, cache, scale_K in ((key_TKD, k_cache, scales.k), (value_TKD, v_cache, scales.v)):
        scaled = new_TKD[: len(slot_mapping_T)][has_slot_T].float() / scale_K[:, None]
        beyond |= (scaled.abs() > FP8_MAX).flatten(1).any(1)
        cache.view(torch.uint8)[at] = to_fp8(scaled).view(torch.uint8)
    clipped += beyond.sum()


def update_landmarks(layers: CachedLayers, slot_mapping_T: Tensor, layout: PageLayout) -> None:
    """Recompute, in place, the landmarks of the pages whose last slot is in ``slot_mapping_T``."""
    for k_cache, landmark_cache, *scales in layers.caches:
        key_scales = scales[0] if scales else None
        _update_landmarks(k_cache, landmark_cache, slot_mapping_T, layout, key_scales)


def _update_landmarks(
    k_cache: Tensor,
    landmark_cache: Tensor,
    slot_mapping_T: Tensor,
    layout: PageLayout,
    scales: Tensor | None,
) -> None:
    """Update one layer's landmarks. ``scales`` is only used for int8 keys."""
    check_landmarks(k_cache, landmark_cache, layout)
    block_tokens = k_cache.shape[2]
    P = layout.page_size
    last = slot_mapping_T[(slot_mapping_T >= 0) & (slot_mapping_T % P == P - 1)].long()
    block = last // block_tokens
    token = last % block_tokens
    at = (block[:, None], slice(None), token[:, None] + torch.arange(1 - P, 1, device=last.device))
    keys_TPKD = _entries(k_cache, at)
    dtype = torch.float32 if landmark_cache.dtype == FP8 else landmark_cache.dtype
    if k_cache.dtype == torch.int8:
        assert scales is not None
        keys_TPKD = from_int8(keys_TPKD, scales[at], dtype)
    elif k_cache.dtype == FP8:
        # No need to apply the scale: it's the same for all pages of a head, so the ranking doesn't
        # change.
        keys_TPKD = keys_TPKD.to(dtype)
    landmark_cache[block, token // P] = landmarks(keys_TPKD.transpose(1, 2), layout.landmark_dtype)


def teacher_forced(
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    start_B: Tensor,
    length_B: Tensor,
    prompt_B: Tensor,
    top_k_BT: Tensor,
    layout: PageLayout,
    scale: float,
    query_chunk: int = 256,
    head_budgets_K: Tensor | None = None,
    tokens: int = 1,
) -> Tensor:
    """Compute attention at all query positions at once; see ``sparrow.attention.teacher_forced``.

    After the prompt, the token at position t reads pages selected from the first t + 1 tokens. With
    several ``tokens`` per decode step, the first token of a step selects the pages for all tokens
    of the step. Each token also reads itself and the earlier tokens of the step. Memory grows with
    ``query_chunk * T``; use the kernel for realistic lengths.
    """
    H, T = q_BHTD.shape[1:3]
    K = k_BKTD.shape[1]
    P = layout.page_size
    device = q_BHTD.device
    N = -(-T // P)
    column_T = torch.arange(T, device=device)
    position_BT = column_T - start_B[:, None]
    real_BT = (position_BT >= 0) & (position_BT < length_B[:, None])
    page_BT = (position_BT // P).clamp(0, N - 1)
    # columns of the tokens whose queries select pages
    selecting_BT = column_T - (position_BT - prompt_B[:, None]).clamp(min=0) % tokens
    with torch.no_grad():
        marks = _page_landmarks(k_BKTD, start_B, layout)

    chunks = []
    for q0 in range(0, T, query_chunk):
        now = slice(q0, min(T, q0 + query_chunk))
        position = position_BT[:, now]
        with torch.no_grad():
            causal = (column_T <= column_T[now, None]) & real_BT[:, None] & real_BT[:, now, None]
            selecting = selecting_BT[:, now]
            q_selecting = tokens_at(q_BHTD, selecting[:, None].expand(-1, H, -1))
            length = (selecting - start_B[:, None] + 1).clamp(min=1)
            keep = select_pages(
                page_scores(q_selecting, marks),
                length,
                top_k_BT.gather(1, selecting),
                layout,
                head_budgets_K,
            )
            # Also keep the pages that start within this step; the causal mask hides later tokens.
            keep = (
                keep | (torch.arange(N, device=device) >= page_count(length, P)[..., None])[:, None]
            )
            keep = keep | (position < prompt_B[:, None])[:, None, :, None]
            token_keep = keep.gather(-1, page_BT[:, None, None].expand(-1, K, keep.shape[2], -1))
            mask = (token_keep & causal[:, None]).repeat_interleave(H // K, dim=1)
            padded = ~real_BT[:, now]
            # Let padded queries attend to themselves. A softmax over no keys would be NaN, and so
            # would the gradients, since NaN * 0 is NaN.
            mask = mask | (padded[:, None, :, None] & (column_T == column_T[now, None]))

        out = F.scaled_dot_product_attention(
            q_BHTD[:, :, now], k_BKTD, v_BKTD, attn_mask=mask, scale=scale, enable_gqa=K != H
        )
        chunks.append(out.masked_fill(padded[:, None, :, None], 0.0))
    return torch.cat(chunks, dim=2)


def _kept_pages(
    scores_BK1N: Tensor,
    length_B: Tensor,
    new_tokens: int,
    top_k_B: Tensor,
    layout: PageLayout,
    head_budgets_K: Tensor | None,
) -> Tensor:
    """Select the pages that a decode step reads, bool ``[B, K, N]``.

    The step decodes the ``new_tokens`` newest tokens of each row. It reads the pages that the first
    new token selects, plus the pages that store the other new tokens.
    """
    first_B = length_B - (new_tokens - 1)
    keep_BKN = select_pages(
        scores_BK1N, first_B[:, None], top_k_B[:, None], layout, head_budgets_K
    )[:, :, 0]
    n = torch.arange(keep_BKN.shape[-1], device=keep_BKN.device)
    begun_B1 = page_count(first_B, layout.page_size)[:, None]
    pages_B1 = page_count(length_B, layout.page_size)[:, None]
    return keep_BKN | ((n >= begun_B1) & (n < pages_B1))[:, None]


def _kept_tokens(
    keep_BKN: Tensor, length_B: Tensor, new_tokens: int, page_size: int
) -> tuple[Tensor, Tensor]:
    """Return the positions of all tokens in the kept pages, and a mask of the positions that each
    new token sees.

    The positions ``[B, K, M]`` are in ascending order. The mask has shape ``[B, K, T, M]``. Rows
    are padded to the longest one.
    """
    most = int(keep_BKN.sum(-1).max())
    page_BKX = keep_BKN.int().argsort(dim=-1, descending=True, stable=True)[..., :most]
    token_BKXP = page_BKX[..., None] * page_size + torch.arange(page_size, device=keep_BKN.device)
    is_kept_BKX1 = keep_BKN.gather(-1, page_BKX)[..., None]
    # how many tokens each new token sees, including itself
    seen_BT = length_B[:, None] - torch.arange(new_tokens - 1, -1, -1, device=length_B.device)
    seen_BKTXP = is_kept_BKX1[:, :, None] & (
        token_BKXP[:, :, None] < seen_BT[:, None, :, None, None]
    )
    return token_BKXP.flatten(2), seen_BKTXP.flatten(3)


def _page_landmarks(k_BKSD: Tensor, start_B: Tensor | None, layout: PageLayout) -> Tensor:
    """Compute the landmarks of ``ceil(S / P)`` pages, counted from each row's first token. The last
    page's landmark is zero if S is not a multiple of P.
    """
    K, S = k_BKSD.shape[1:3]
    P = layout.page_size
    whole = S // P
    k = k_BKSD[:, :, : whole * P]
    if start_B is not None:
        column_BT = (start_B[:, None] + torch.arange(whole * P, device=k.device)).clamp(max=S - 1)
        k = tokens_at(k_BKSD, column_BT[:, None].expand(-1, K, -1))
    marks = landmarks(k.unflatten(2, (whole, P)), layout.landmark_dtype)
    missing = -(-S // P) - whole
    return F.pad(marks, (0, 0, 0, missing)) if missing else marks
