"""Triton kernels for page-sparse decoding: rank pages, then attend to the kept ones.

A row's kept pages are listed by page id, in sequence order. The "kept tokens" are the tokens in
these pages, concatenated. They are numbered consecutively, whatever the page size, and only the
last page may be partly filled. Lengths and top_k are read on the device, and the grid only depends
on shapes, so a captured CUDA graph stays valid when lengths and budgets change. For what the
kernels compute, see ``pages.py``.

Each row has T new tokens. The first new token's query ranks the pages. All C = G * T queries of an
item read the kept pages, and each query sees the new tokens up to its own. The new tokens come last
among the kept tokens.

Shapes: B sequences, T new tokens each, H query heads, K kv heads, G = H / K, C = G * T queries per
item (padded to CP), D head dim, P page size, N pages, M blocks in a block table row. An item is a
(sequence, kv head) pair. A cache block has PER_BLOCK = block tokens / P pages; page id = block *
PER_BLOCK + page within the block.
"""

import triton
import triton.language as tl

from sparrow.attention.division import ENTRY, of_head, page_counts
from sparrow.attention.triton.cache import complete_page, scale_of
from sparrow.attention.triton.score import page_scores, ranking_query

LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)
# The threshold search splits the score range this many times, which is enough for ordinary scores.
# In harder cases (ties, or an outlier stretching the range), it continues on the scores' bit
# patterns, for at most 21 more steps.
FLOAT_STEPS = tl.constexpr(12)


@triton.jit
def _split_work(work, split, used, TILE: tl.constexpr):
    """Divide ``work`` into ``used`` ranges of whole tiles. Return range number ``split``."""
    size = (work + TILE * used - 1) // (TILE * used) * TILE
    begin = tl.minimum(split * size, work)
    return begin, tl.minimum(begin + size, work)


@triton.jit
def _arrives_last(counter, expected):
    """Count this program as arrived, and return whether it's the last of ``expected``. The last one
    sees everything the others have stored.
    """
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _order(bits):
    """Map float bits to an int32 that sorts like the float. It's its own inverse."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def load_rows(base, offset_T, D: tl.constexpr, DP: tl.constexpr):
    """Load rows of ``D`` elements, zero-padded to ``DP``."""
    d = tl.arange(0, DP)
    rows = base + offset_T[:, None] + d[None, :]
    return tl.load(rows) if D == DP else tl.load(rows, mask=(d < D)[None, :], other=0.0)


@triton.jit
def _load_block_rows(base_T1, block_T, inside_T, stride_block, D: tl.constexpr, DP: tl.constexpr):
    """Load one row of ``D`` elements from each block, and pad it with zeros to ``DP``. The row is
    at ``base_T1`` plus the block's offset. Rows where ``inside`` is False are all zeros.
    """
    d = tl.arange(0, DP)
    rows = base_T1 + d[None, :] + (block_T.to(tl.int64) * stride_block)[:, None]
    mask = inside_T[:, None] if D == DP else inside_T[:, None] & (d < D)[None, :]
    return tl.load(rows, mask=mask, other=0.0)


@triton.jit
def _score(
    query,
    landmark,
    table,
    row,
    begin,
    end,
    stride_block,
    stride_page,
    D: tl.constexpr,
    DP: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write scores for pages ``begin .. end - 1`` to ``row``."""
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        n = first + tl.arange(0, TILE)
        block = tl.load(table + n // PER_BLOCK, mask=n < end, other=0)
        base = landmark + ((n % PER_BLOCK) * stride_page)[:, None]
        marks = _load_block_rows(base, block, n < end, stride_block, D, DP)
        tl.store(row + n, page_scores(query, marks), mask=n < end)


@triton.jit
def above_and_tied(score, is_ranked, ranked, budget):
    """Return which ranked pages score above the threshold, which are tied at the threshold, and how
    many of the tied pages to keep. In total, ``budget`` pages are kept.

    This is a ternary search: each step counts the scores that reach each of two guesses. It stops
    when exactly ``budget`` scores reach a guess, or only one possible value is left.
    """
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 equals 0.0
    key = tl.where(is_ranked, _order(score.to(tl.int32, bitcast=True)), LOWEST)
    # at_low = count(key >= low), at_high = count(key >= high), at_high <= budget <= at_low
    low = tl.min(tl.where(is_ranked, key, HIGHEST), 0)
    high = tl.max(key, 0) + 1
    low = tl.where(budget == 0, high, low)
    high = tl.where(budget == ranked, low, high)
    at_low = ranked
    at_high = 0
    step = 0
    while (at_low > budget) & (low + 1 < high):
        if step < FLOAT_STEPS:
            low_score = _order(low).to(tl.float32, bitcast=True)
            width = _order(high).to(tl.float32, bitcast=True) - low_score
            first = _order((low_score + width * (1 / 3)).to(tl.int32, bitcast=True))
            second = _order((low_score + width * (2 / 3)).to(tl.int32, bitcast=True))
        else:
            # The difference may overflow an int32, but fits in a uint32.
            third = ((high - low).to(tl.uint32) // 3).to(tl.int32)
            first = low + third
            second = high - third
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, first), high - 1)
        # Get both counts from one sum. The upper half holds the count for the second guess.
        count = tl.sum(tl.where(key >= second, 0x10001, tl.where(key >= first, 1, 0)), 0)
        at_first = count & 0xFFFF
        at_second = count >> 16
        low = tl.where(at_second >= budget, second, tl.where(at_first >= budget, first, low))
        at_low = tl.where(
            at_second >= budget, at_second, tl.where(at_first >= budget, at_first, at_low)
        )
        high = tl.where(at_second >= budget, high, tl.where(at_first >= budget, second, first))
        at_high = tl.where(
            at_second >= budget, at_high, tl.where(at_first >= budget, at_second, at_first)
        )
        step += 1
    above = is_ranked & (key >= high)
    return above, is_ranked & (key >= low) & ~above, budget - at_high


@triton.jit
def _select_block(
    table,
    row,
    pages,
    ranked,
    budget,
    SINK: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Replace the scores in ``row`` with the ids of the kept pages, in order. ``BLOCK`` must be at
    least ``pages``.

    Ties at the threshold go to the earlier pages.
    """
    n = tl.arange(0, BLOCK)
    inside = n < pages
    is_ranked = (n >= SINK) & (n < SINK + ranked)
    block = tl.load(table + n // PER_BLOCK, mask=inside, other=0)
    is_scored = is_ranked & (budget > 0) & (budget < ranked)
    score = tl.load(row + n, mask=is_scored, other=0.0)
    above, tied, need = above_and_tied(score, is_ranked, ranked, budget)
    kept = above | (inside & ~is_ranked)
    both = kept.to(tl.int32) + (tied.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    tied_before = before >> 16
    position = (before & 0xFFFF) + tl.minimum(tied_before, need)
    tl.debug_barrier()  # wait until all scores have been read, since the list overwrites them
    ids = row.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(
        ids + position, block * PER_BLOCK + n % PER_BLOCK, mask=kept | (tied & (tied_before < need))
    )


@triton.jit
def _select(
    table,
    row,
    pages,
    ranked,
    budget,
    SINK: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Call ``_select_block`` with a width that fits the row, so that short rows are cheap even in a
    wide table.
    """
    if (BLOCK > 256) & (pages <= 256):
        _select_block(table, row, pages, ranked, budget, SINK, PER_BLOCK, 256)
    elif (BLOCK > 2048) & (pages <= 2048):
        _select_block(table, row, pages, ranked, budget, SINK, PER_BLOCK, 2048)
    else:
        _select_block(table, row, pages, ranked, budget, SINK, PER_BLOCK, BLOCK)


@triton.jit
def _queries(
    q,
    stride_row,
    stride_head,
    G: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    """Load an item's queries, starting with the first new token's."""
    c = tl.arange(0, CP)
    d = tl.arange(0, DP)
    return tl.load(
        q + ((c // G) * stride_row + (c % G) * stride_head)[:, None] + d[None, :],
        mask=(c < C)[:, None] & (d < D)[None, :],
        other=0.0,
    )


@triton.jit
def _attend(
    q_CD,
    ids,
    k,
    v,
    k_scales,
    v_scales,
    begin,
    end,
    tokens,
    listed,
    stride_block,
    stride_token,
    stride_scale_block,
    scale_log2,
    G: tl.constexpr,
    T: tl.constexpr,
    CP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Compute softmax attention over the kept tokens ``begin .. end - 1`` of ``tokens``. Return the
    unnormalised output, and each query's softmax sum and maximum logit (in base 2).

    If ``listed`` is True, ``ids`` are page ids. Otherwise, all pages are kept, and ``ids`` are
    block ids from the block table. ``begin`` must be the start of a page. e4m3 keys and values are
    cast to the query dtype without applying their scales. int8 keys and values are multiplied by
    their scales first, which is exact in the query dtype.
    """
    maximum = tl.full((CP,), -1e30, tl.float32)
    total = tl.zeros((CP,), tl.float32)
    acc = tl.zeros((CP, DP), tl.float32)
    r = tl.arange(0, TILE)
    for first in range(begin, end, TILE):
        inside = first + r < end  # tokens beyond the end may be NaN, and 0 * NaN is NaN
        if TILE % P == 0:
            n = first // P + r // P
            token = r % P  # the same in every tile; only the block changes
        else:
            n = (first + r) // P
            token = (first + r) % P
        if PER_BLOCK == 1:
            block = tl.load(ids + n, mask=inside, other=0)
        else:
            entry = tl.load(ids + tl.where(listed, n, n // PER_BLOCK), mask=inside, other=0)
            page = tl.where(listed, entry, entry * PER_BLOCK + n % PER_BLOCK)
            block = page // PER_BLOCK
            token += (page % PER_BLOCK) * P
        k_TD = _load_block_rows(
            k + token[:, None] * stride_token, block, inside, stride_block, D, DP
        )
        if k.dtype.element_ty == tl.int8:
            at = block.to(tl.int64) * stride_scale_block + token
            k_TD = (
                k_TD.to(tl.float32)
                * scale_of(tl.load(k_scales + at, mask=inside, other=127))[:, None]
            )
        logit = tl.dot(q_CD, tl.trans(k_TD.to(q_CD.dtype))) * scale_log2
        logit = tl.where(inside[None, :], logit, float("-inf"))
        if T > 1:
            seen_C = tokens - (T - 1) + tl.arange(0, CP) // G
            logit = tl.where((first + r)[None, :] < seen_C[:, None], logit, float("-inf"))
        highest = tl.maximum(maximum, tl.max(logit, 1))
        weight = tl.exp2(logit - highest[:, None])
        shrink = tl.exp2(maximum - highest)
        v_TD = _load_block_rows(
            v + token[:, None] * stride_token, block, inside, stride_block, D, DP
        )
        if k.dtype.element_ty == tl.int8:
            v_TD = (
                v_TD.to(tl.float32)
                * scale_of(tl.load(v_scales + at, mask=inside, other=127))[:, None]
            )
        acc = acc * shrink[:, None] + tl.dot(weight.to(q_CD.dtype), v_TD.to(q_CD.dtype))
        total = total * shrink + tl.sum(weight, 1)
        maximum = highest
    return acc, total, maximum


@triton.jit
def _store_output(
    out,
    stride_row,
    stride_head,
    acc,
    total,
    v_scale,
    G: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
):
    c = tl.arange(0, CP)
    d = tl.arange(0, DP)
    total = tl.where(total > 0.0, total, 1.0)  # a row without tokens returns zeros
    result = acc * (v_scale / total)[:, None]
    mask = (c < C)[:, None] & (d < D)[None, :]
    tl.store(
        out + ((c // G) * stride_row + (c % G) * stride_head)[:, None] + d[None, :],
        result.to(out.dtype.element_ty),
        mask=mask,
    )


@triton.jit(
    do_not_specialize=["splits", "rank_before_wait"],
    do_not_specialize_on_alignment=["head_budgets"],
)
def rank_kernel(
    q,
    k_cache,
    landmarks,
    key_scales,
    table,
    length,
    top_k,
    head_budgets,
    rows,
    counters,
    splits,
    rank_before_wait,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_head,
    stride_token,
    stride_mark_block,
    stride_mark_page,
    stride_mark_head,
    stride_scale_block,
    stride_scale_head,
    stride_table,
    stride_rows,
    K: tl.constexpr,
    G: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    BLOCK: tl.constexpr,
    SCORE_TILE: tl.constexpr,
    SCORE_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Score each item's pages in several programs. The last program to finish selects the pages.

    With ``rank_before_wait``, ranking doesn't wait for the previous launch. In that case, the
    previous launch may only store the newest tokens. ``key_scales`` holds the scales of int8 keys.
    It is None for other dtypes.
    """
    if PDL:
        if rank_before_wait == 0:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    item = tl.program_id(0)
    split = tl.program_id(1)
    b = (item // K).to(tl.int64)
    head = (item % K).to(tl.int64)
    tokens_in_row = tl.load(length + b)
    q += b * T * stride_q_row + head * G * stride_q_head
    query = ranking_query(q, stride_q_head, G, D, DP)
    own_top_k = of_head(tl.load(top_k + b), head_budgets, head)
    pages, ranked, budget, _ = page_counts(tokens_in_row, own_top_k, P, SINK, RECENT, T)
    to_score = tl.where((budget > 0) & (budget < ranked), ranked, 0)
    used = tl.minimum(tl.maximum((to_score + SCORE_TILE - 1) // SCORE_TILE, 1), splits)
    table += b * stride_table
    row = rows + item.to(tl.int64) * stride_rows
    landmarks += head * stride_mark_head
    if (split < used) & (budget < ranked):
        begin, end = _split_work(to_score, split, used, SCORE_TILE)
        _score(
            query,
            landmarks,
            table,
            row,
            SINK + begin,
            SINK + end,
            stride_mark_block,
            stride_mark_page,
            D,
            DP,
            PER_BLOCK,
            SCORE_TILE,
            SCORE_STAGES,
        )
        tl.debug_barrier()
        last = used == 1
        if used > 1:
            last = _arrives_last(counters + item, used)
        if last:
            _select(table, row, pages, ranked, budget, SINK, PER_BLOCK, BLOCK)
    if PDL:
        tl.extra.cuda.gdc_wait()
    if split == 0:
        if key_scales is not None:
            key_scales += head * stride_scale_head
        # Since T <= P, the new tokens fill at most one page.
        whole = tokens_in_row // P * P
        complete_page(
            k_cache + head * stride_head,
            landmarks,
            key_scales,
            table,
            tl.where(whole > tokens_in_row - T, whole, 0),
            stride_block,
            stride_token,
            stride_mark_block,
            stride_mark_page,
            stride_scale_block,
            D,
            DP,
            P,
            PER_BLOCK,
        )


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["head_budgets"])
def attend_kernel(
    q,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    head_budgets,
    table,
    out,
    rows,
    partial,
    stats,
    counters,
    plan,
    count,
    stride_q_row,
    stride_q_head,
    stride_block,
    stride_head,
    stride_token,
    stride_scale_block,
    stride_scale_head,
    stride_table,
    stride_out_row,
    stride_out_head,
    stride_rows,
    scale_log2,
    K: tl.constexpr,
    G: tl.constexpr,
    T: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    TILE: tl.constexpr,
    PDL: tl.constexpr,
):
    """Compute attention. Each program attends to one part of an item's kept tokens.

    The last program to finish an item adds up all parts of the item in order, so the result doesn't
    depend on timing.
    """
    work = tl.program_id(0)
    entry = plan + work // K * ENTRY
    b = tl.load(entry)
    if b < count:
        part = tl.load(entry + 1)
        parts = tl.load(entry + 2)
        slot = tl.load(entry + 3) * K + work % K
        at = b.to(tl.int64)
        head = (work % K).to(tl.int64)
        item = at * K + head
        own_top_k = of_head(tl.load(entry + 5), head_budgets, head)
        _pages, ranked, budget, tokens = page_counts(
            tl.load(entry + 4), own_top_k, P, SINK, RECENT, T
        )
        q += at * T * stride_q_row + head * G * stride_q_head
        q_CD = _queries(q, stride_q_row, stride_q_head, G, C, CP, D, DP)
        k_cache += head * stride_head
        table += at * stride_table
        listed = budget < ranked
        ids = (rows + item * stride_rows).to(tl.pointer_type(tl.int32), bitcast=True)
        size = ((tokens + parts - 1) // parts + P - 1) // P * P
        begin = part * size
        v_scale = 1.0
        if k_cache.dtype.element_ty == tl.float8e4nv:
            scale_log2 *= tl.load(k_scales + head)
            v_scale = tl.load(v_scales + head)
        if k_cache.dtype.element_ty == tl.int8:
            k_scales += head * stride_scale_head
            v_scales += head * stride_scale_head
        if PDL:
            tl.extra.cuda.gdc_wait()
        acc, total, maximum = _attend(
            q_CD,
            tl.where(listed, ids, table),
            k_cache,
            v_cache + head * stride_head,
            k_scales,
            v_scales,
            begin,
            tl.minimum(begin + size, tokens),
            tokens,
            listed,
            stride_block,
            stride_token,
            stride_scale_block,
            scale_log2,
            G,
            T,
            CP,
            D,
            DP,
            P,
            PER_BLOCK,
            TILE,
        )
        out += at * T * stride_out_row + head * G * stride_out_head
        if parts == 1:
            _store_output(
                out, stride_out_row, stride_out_head, acc, total, v_scale, G, C, CP, D, DP
            )
        else:
            c = tl.arange(0, CP)
            d = tl.arange(0, DP)
            cell = c[:, None] * D + d[None, :]
            mask = (c < C)[:, None] & (d < D)[None, :]
            own = (slot + part * K).to(tl.int64)
            tl.store(partial + own * C * D + cell, acc, mask=mask)
            tl.store(stats + own * 2 * C + c, maximum, mask=c < C)
            tl.store(stats + own * 2 * C + C + c, total, mask=c < C)
            if _arrives_last(counters + item, parts):
                maximum = tl.full((CP,), -1e30, tl.float32)
                total = tl.zeros((CP,), tl.float32)
                acc = tl.zeros((CP, DP), tl.float32)
                for i in tl.range(parts, loop_unroll_factor=4):
                    other = (slot + i * K).to(tl.int64)
                    its_maximum = tl.load(stats + other * 2 * C + c, mask=c < C, other=-1e30)
                    highest = tl.maximum(maximum, its_maximum)
                    shrink = tl.exp2(maximum - highest)
                    weight = tl.exp2(its_maximum - highest)
                    total = total * shrink + weight * tl.load(
                        stats + other * 2 * C + C + c, mask=c < C, other=0.0
                    )
                    theirs = tl.load(partial + other * C * D + cell, mask=mask, other=0.0)
                    acc = acc * shrink[:, None] + weight[:, None] * theirs
                    maximum = highest
                _store_output(
                    out, stride_out_row, stride_out_head, acc, total, v_scale, G, C, CP, D, DP
                )
