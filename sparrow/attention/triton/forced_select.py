"""Triton kernels that select pages for teacher forcing. They produce a page bitmap per position,
and a page list per tile of positions.

Shapes: as in ``forced_kernels``, with C positions per chunk.
"""

import triton
import triton.language as tl

from sparrow.attention.division import of_head, page_counts
from sparrow.attention.triton.cache import round_to_e4m3
from sparrow.attention.triton.kernels import above_and_tied, load_rows
from sparrow.attention.triton.score import tile_scores


@triton.jit
def landmark_kernel(
    k,
    landmarks,
    start,
    length,
    stride_row,
    stride_head,
    stride_token,
    N,
    K: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    TILE: tl.constexpr,
    FP8: tl.constexpr,
):
    """Compute the mean keys of full pages, ``[B, K, N, D]``, with zeros for other pages. With FP8,
    means are rounded to e4m3 values, but still stored in the keys' dtype.
    """
    item = tl.program_id(1).to(tl.int64)
    b = item // K
    n = tl.program_id(0) * TILE + tl.arange(0, TILE)
    d = tl.arange(0, DP)
    full = (n < tl.load(length + b) // P)[:, None] & (d < D)[None, :]
    k += b * stride_row + item % K * stride_head
    token = tl.load(start + b).to(tl.int64) + n * P
    total = tl.zeros((TILE, DP), tl.float32)
    for p in range(P):
        total += tl.load(
            k + (token + p)[:, None] * stride_token + d[None, :], mask=full, other=0.0
        ).to(tl.float32)
    mean = total / P
    if FP8:
        mean = round_to_e4m3(mean)
    mean = mean.to(landmarks.dtype.element_ty)
    tl.store(
        landmarks + (item * N + n[:, None]) * D + d[None, :],
        mean,
        mask=(n < N)[:, None] & (d < D)[None, :],
    )


@triton.jit
def tile_rows(tile, size, BT: tl.constexpr, GP: tl.constexpr, G: tl.constexpr):
    """For each row of a tile, return its position and head (clamped to the valid range), the bit
    that stands for the position in masks, and whether the row is valid.
    """
    row = tl.arange(0, BT * GP)
    position = tile * BT + row // GP
    head = row % GP
    inside = (position < size) & (head < G)
    return tl.minimum(position, size - 1), tl.minimum(head, G - 1), 1 << (row // GP), inside


@triton.jit
def selecting_position(position, prompt, STEP: tl.constexpr):
    """Return the position whose query selects the pages for ``position``: the first position in the
    same decode step. Each step has STEP tokens.
    """
    since_prompt = position - prompt
    return tl.where(since_prompt < 0, position, position - since_prompt % STEP)


@triton.jit(do_not_specialize_on_alignment=["head_budgets"])
def score_kernel(
    q,
    landmarks,
    scores,
    start,
    length,
    prompt,
    top_k,
    head_budgets,
    stride_row,
    stride_head,
    stride_token,
    stride_top_k_row,
    stride_top_k_token,
    first,
    N,
    pages,
    K: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    STEP: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute page scores ``[B, K, C, pages]`` for C positions, starting at ``first``. Scores are
    summed over the group, since the sum ranks pages the same way as the mean.

    Tiles where every position keeps every page are skipped.
    """
    item = tl.program_id(2).to(tl.int64)
    b = item // K
    size = tl.load(length + b).to(tl.int32)
    tile = first // BT + tl.program_id(0)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    position, head, _, inside = tile_rows(tile, size, BT, GP, G)
    position = selecting_position(position, tl.load(prompt + b).to(tl.int32), STEP)
    top = tl.load(
        top_k + b * stride_top_k_row + (tl.load(start + b) + position) * stride_top_k_token,
        mask=inside,
    )
    top = of_head(top, head_budgets, item % K)
    is_sparse = (
        inside & (position >= tl.load(prompt + b)) & (position // P + 1 - SINK - RECENT > top)
    )
    pages_below = tl.max(tl.where(is_sparse, position // P + 1 - RECENT, 0), 0)
    if tl.program_id(1) * BN < pages_below:
        q += b * stride_row + item % K * G * stride_head
        q_MD = load_rows(
            q, (tl.load(start + b) + position) * stride_token + head * stride_head, D, DP
        )
        marks_ND = load_rows(landmarks + item * N * D, tl.minimum(n, N - 1) * D, D, DP)
        score = tile_scores(q_MD, marks_ND, G, GP, BT, BN)
        row = tl.program_id(0) * BT + tl.arange(0, BT)
        tl.store(
            scores + (item * C + row[:, None]) * pages + n[None, :],
            score,
            mask=(n < pages)[None, :],
        )


@triton.jit(do_not_specialize_on_alignment=["head_budgets"])
def select_kernel(
    scores,
    kept,
    length,
    prompt,
    top_k,
    head_budgets,
    start,
    stride_top_k_row,
    stride_top_k_token,
    first,
    pages,
    K: tl.constexpr,
    P: tl.constexpr,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    STEP: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Select pages like ``select_pages``, and store the pages kept by each position as bits,
    ``[B, K, C, BLOCK / 32]``.
    """
    item = tl.program_id(1).to(tl.int64)
    b = item // K
    position = first + tl.program_id(0)
    if position < tl.load(length + b):
        selecting = selecting_position(position, tl.load(prompt + b).to(tl.int32), STEP)
        top = tl.load(
            top_k + b * stride_top_k_row + (tl.load(start + b) + selecting) * stride_top_k_token
        ).to(tl.int32)
        top = of_head(top, head_budgets, item % K)
        _own, ranked, budget, _ = page_counts(selecting + 1, top, P, SINK, RECENT, 1)
        own = position // P + 1
        budget = tl.where(position < tl.load(prompt + b), ranked, budget)
        row = item * C + tl.program_id(0)
        n = tl.arange(0, BLOCK)
        is_ranked = (n >= SINK) & (n < SINK + ranked)
        is_scored = is_ranked & (budget > 0) & (budget < ranked)
        score = tl.load(scores + row * pages + n, mask=is_scored, other=0.0)
        above, tied, need = above_and_tied(score, is_ranked, ranked, budget)
        tied_before = tl.cumsum(tied.to(tl.int32), 0) - tied.to(tl.int32)
        keep = above | (tied & (tied_before < need)) | ((n < own) & ~is_ranked)
        word = tl.sum(
            tl.reshape(keep.to(tl.int32), (BLOCK // 32, 32)) << tl.arange(0, 32)[None, :], 1
        )
        tl.store(kept + row * (BLOCK // 32) + tl.arange(0, BLOCK // 32), word)


@triton.jit
def tile_kernel(
    kept,
    masks,
    lists,
    counts,
    length,
    first,
    N,
    TILES,
    K: tl.constexpr,
    C: tl.constexpr,
    BT: tl.constexpr,
    WORDS: tl.constexpr,
    BW: tl.constexpr,
):
    """Turn a chunk's bits into a mask per tile and page, with one bit per position in the tile.
    Also list each tile's pages with non-empty masks.

    List entries have the page in the lower half and the mask in the upper half.
    """
    item = tl.program_id(1).to(tl.int64)
    size = tl.load(length + item // K).to(tl.int32)
    tile = first // BT + tl.program_id(0)
    t = tl.arange(0, BT)
    inside = tile * BT + t < size
    row = item * C + tl.program_id(0) * BT + t
    place = (item * TILES + tile) * N
    count = 0
    if tile * BT < size:
        for w in range(0, WORDS, BW):
            word = tl.load(
                kept + row[:, None] * WORDS + w + tl.arange(0, BW)[None, :],
                mask=inside[:, None],
                other=0,
            )
            bit = (word[:, :, None] >> tl.arange(0, 32)[None, None, :]) & 1
            mask = tl.reshape(tl.sum(bit << t[:, None, None], 0), (BW * 32,))
            n = w * 32 + tl.arange(0, BW * 32)
            tl.store(masks + place + n, mask, mask=n < N)
            listed = (mask != 0).to(tl.int32)
            entry = n.to(tl.int64) | (mask.to(tl.int64) << 32)
            tl.store(lists + place + count + tl.cumsum(listed, 0) - listed, entry, mask=mask != 0)
            count += tl.sum(listed, 0)
    tl.store(counts + item * TILES + tile, count)
