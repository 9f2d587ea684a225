"""Triton kernels of page-sparse decoding: rank pages, attend to the kept ones, keep landmarks up to date.

A row's kept pages are a list of page ids in the order of the sequence; "kept tokens" are the tokens of that
list laid end to end, so one index runs over them whatever the page size, and only the last page is partly
filled. Everything about a row (length, top_k) is read on the device and the grid depends on shapes alone, so
a captured CUDA graph stays right while lengths and budgets change. ``pages.py`` is what these kernels answer to.

Shapes: B sequences, H query heads, K kv heads, G = H / K, D head dim, P page size, N pages, M blocks in a row
of the block table. An item is one sequence and kv head. PER_BLOCK = block tokens / P pages of P tokens make a
block of the cache; page id = block * PER_BLOCK + page within the block.
"""

import triton
import triton.language as tl

LOWEST = tl.constexpr(-(2**31))
HIGHEST = tl.constexpr(2**31 - 1)
# Steps that split the range of scores as floats; they suffice for ordinary scores. What is left (an outlier
# that stretches the range, ties) is finished on their bit patterns, in at most 21 further steps.
FLOAT_STEPS = tl.constexpr(12)


@triton.jit
def _plan(length, top_k, P: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr):
    """Pages of a row, pages ranked by score, how many of those are kept, and tokens in all kept pages."""
    pages = (length + P - 1) // P
    ranked = tl.maximum(pages - SINK - RECENT, 0)
    budget = tl.minimum(ranked, tl.maximum(top_k, 0))
    return pages, ranked, budget, length - (ranked - budget) * P


@triton.jit
def _share(work, split, used, TILE: tl.constexpr):
    """The part of ``work``, in whole tiles, of one of ``used`` splits."""
    share = (work + TILE * used - 1) // (TILE * used) * TILE
    begin = tl.minimum(split * share, work)
    return begin, tl.minimum(begin + share, work)


@triton.jit
def _arrives_last(counter, expected):
    """Whether all other of the ``expected`` programs have arrived before; their stores are then visible."""
    tl.debug_barrier()
    last = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu") == expected - 1
    if last:
        tl.store(counter, 0)
    return last


@triton.jit
def _order(bits):
    """Maps the bits of a float to an int32 of the same order, and back."""
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _load_rows(base, offset_T, D: tl.constexpr, DP: tl.constexpr):
    """Rows of ``D`` elements, zeros up to ``DP``."""
    d = tl.arange(0, DP)
    places = base + offset_T[:, None] + d[None, :]
    return tl.load(places) if D == DP else tl.load(places, mask=(d < D)[None, :], other=0.0)


@triton.jit
def _score(
    q_D, landmark, table, row, begin, end, stride_block, stride_page,
    D: tl.constexpr, DP: tl.constexpr, PER_BLOCK: tl.constexpr, TILE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Writes the scores of pages ``begin .. end - 1`` to ``row``."""
    for first in tl.range(begin, end, TILE, num_stages=STAGES):
        n = tl.minimum(first + tl.arange(0, TILE), end - 1)
        block = tl.load(table + n // PER_BLOCK).to(tl.int64)
        marks = _load_rows(landmark, block * stride_block + (n % PER_BLOCK) * stride_page, D, DP)
        tl.store(row + n, tl.sum(marks.to(tl.float32) * q_D[None, :], 1))


@triton.jit
def _split(score, is_ranked, ranked, budget):
    """Which ranked pages are surely among the ``budget`` best, which tie for the rest, and how many of these to take.

    The threshold is found by counting how many scores reach two guesses a step, until exactly ``budget`` do or
    a single value is left.
    """
    score = tl.where(score == 0.0, 0.0, score)  # -0.0 equals 0.0
    key = tl.where(is_ranked, _order(score.to(tl.int32, bitcast=True)), LOWEST)
    # at_low keys reach low and at_high reach high, with at_high <= budget <= at_low.
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
            third = ((high - low).to(tl.uint32) // 3).to(tl.int32)  # the difference can exceed an int32
            first = low + third
            second = high - third
        first = tl.minimum(tl.maximum(first, low + 1), high - 1)
        second = tl.minimum(tl.maximum(second, first), high - 1)
        # Both counts in one sum: the upper half counts the keys that reach the second guess.
        count = tl.sum(tl.where(key >= second, 0x10001, tl.where(key >= first, 1, 0)), 0)
        at_first = count & 0xFFFF
        at_second = count >> 16
        low = tl.where(at_second >= budget, second, tl.where(at_first >= budget, first, low))
        at_low = tl.where(at_second >= budget, at_second, tl.where(at_first >= budget, at_first, at_low))
        high = tl.where(at_second >= budget, high, tl.where(at_first >= budget, second, first))
        at_high = tl.where(at_second >= budget, at_high, tl.where(at_first >= budget, at_second, at_first))
        step += 1
    sure = is_ranked & (key >= high)
    return sure, is_ranked & (key >= low) & ~sure, budget - at_high


@triton.jit
def _select_block(
    table, row, pages, ranked, budget,
    SINK: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replaces the scores in ``row`` by the ids of the kept pages, in order; ``BLOCK`` is at least ``pages``.

    Of equal scores at the threshold the earlier pages are taken.
    """
    n = tl.arange(0, BLOCK)
    inside = n < pages
    is_ranked = (n >= SINK) & (n < SINK + ranked)
    block = tl.load(table + n // PER_BLOCK, mask=inside, other=0)
    is_scored = is_ranked & (budget > 0) & (budget < ranked)
    score = tl.load(row + n, mask=is_scored, other=0.0)
    sure, level, need = _split(score, is_ranked, ranked, budget)
    sure = sure | (inside & ~is_ranked)
    both = sure.to(tl.int32) + (level.to(tl.int32) << 16)
    before = tl.cumsum(both, 0) - both
    level_before = before >> 16
    position = (before & 0xFFFF) + tl.minimum(level_before, need)
    tl.debug_barrier()  # every thread has read its scores before the list overwrites them
    ids = row.to(tl.pointer_type(tl.int32), bitcast=True)
    tl.store(ids + position, block * PER_BLOCK + n % PER_BLOCK, mask=sure | (level & (level_before < need)))


@triton.jit
def _select(
    table, row, pages, ranked, budget,
    SINK: tl.constexpr, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """``_select_block`` at a width that fits the row, so that short rows in a wide table stay cheap."""
    if BLOCK > 2048:
        if pages <= 2048:
            _select_block(table, row, pages, ranked, budget, SINK, PER_BLOCK, 2048)
        else:
            _select_block(table, row, pages, ranked, budget, SINK, PER_BLOCK, BLOCK)
    else:
        _select_block(table, row, pages, ranked, budget, SINK, PER_BLOCK, BLOCK)


@triton.jit
def _mean_query(q, stride_head, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    d = tl.arange(0, DP)
    total = tl.zeros((DP,), tl.float32)
    for g in tl.static_range(G):
        total += tl.load(q + g * stride_head + d, mask=d < D, other=0.0).to(tl.float32)
    return tl.div_rn(total, tl.full((DP,), G, tl.float32))


@triton.jit
def _group_queries(q, stride_head, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    return tl.load(q + g[:, None] * stride_head + d[None, :], mask=(g < G)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _attend(
    q_GD, k, v, ids, begin, end, stride_k_block, stride_k_token, stride_v_block, stride_v_token, scale_log2,
    GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, PER_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):  # fmt: skip
    """Softmax over kept tokens ``begin .. end - 1``: unnormalised output, sum and maximum (base-2 logits) per head."""
    maximum = tl.full((GP,), -1e30, tl.float32)
    total = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, DP), tl.float32)
    for first in range(begin, end, TILE):
        inside = first + tl.arange(0, TILE) < end
        # Past the end the last token stands in: what lies beyond a sequence may be NaN, and 0 * NaN is NaN.
        t = tl.minimum(first + tl.arange(0, TILE), end - 1)
        page = tl.load(ids + t // P)
        block = (page // PER_BLOCK).to(tl.int64)
        token = (page % PER_BLOCK) * P + t % P
        k_TD = _load_rows(k, block * stride_k_block + token * stride_k_token, D, DP)
        logit = tl.dot(q_GD, tl.trans(k_TD.to(q_GD.dtype))) * scale_log2
        logit = tl.where(inside[None, :], logit, float("-inf"))
        highest = tl.maximum(maximum, tl.max(logit, 1))
        weight = tl.exp2(logit - highest[:, None])
        shrink = tl.exp2(maximum - highest)
        v_TD = _load_rows(v, block * stride_v_block + token * stride_v_token, D, DP)
        acc = acc * shrink[:, None] + tl.dot(weight.to(q_GD.dtype), v_TD.to(q_GD.dtype))
        total = total * shrink + tl.sum(weight, 1)
        maximum = highest
    return acc, total, maximum


@triton.jit
def _store_output(
    out, stride_head, acc, total, v_scale, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr
):
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    total = tl.where(total > 0.0, total, 1.0)  # a row without tokens returns zeros
    result = acc * (v_scale / total)[:, None]
    mask = (g < G)[:, None] & (d < D)[None, :]
    tl.store(out + g[:, None] * stride_head + d[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def decode_kernel(
    q, k_cache, v_cache, landmarks, table, length, top_k, out, rows,
    stride_q_row, stride_q_head, stride_k_block, stride_k_head, stride_k_token,
    stride_v_block, stride_v_head, stride_v_token, stride_mark_block, stride_mark_page, stride_mark_head,
    stride_table, stride_out_row, stride_out_head, stride_rows, scale_log2, v_scale,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
    PER_BLOCK: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, BLOCK: tl.constexpr,
    SCORE_TILE: tl.constexpr, SCORE_STAGES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """One program ranks, selects and attends for one item: for batches that fill the device without splitting.

    The launch ends with its longest row: a single row that keeps everything among sparse ones is read by one program
    per kv head, at a few per cent of the device's bandwidth.
    """
    item = tl.program_id(0)
    b = (item // K).to(tl.int64)
    head = (item % K).to(tl.int64)
    q += b * stride_q_row + head * G * stride_q_head
    q_GD = _group_queries(q, stride_q_head, G, GP, D, DP)
    q_D = _mean_query(q, stride_q_head, G, D, DP)
    pages, ranked, budget, tokens = _plan(tl.load(length + b), tl.load(top_k + b), P, SINK, RECENT)
    table += b * stride_table
    row = rows + item.to(tl.int64) * stride_rows
    if (budget > 0) & (budget < ranked):
        _score(
            q_D, landmarks + head * stride_mark_head, table, row, SINK, SINK + ranked, stride_mark_block,
            stride_mark_page, D, DP, PER_BLOCK, SCORE_TILE, SCORE_STAGES,
        )  # fmt: skip
        tl.debug_barrier()
    _select(table, row, pages, ranked, budget, SINK, PER_BLOCK, BLOCK)
    tl.debug_barrier()
    acc, total, _ = _attend(
        q_GD, k_cache + head * stride_k_head, v_cache + head * stride_v_head,
        row.to(tl.pointer_type(tl.int32), bitcast=True), 0, tokens,
        stride_k_block, stride_k_token, stride_v_block, stride_v_token, scale_log2, GP, D, DP, P, PER_BLOCK, TILE,
    )  # fmt: skip
    out += b * stride_out_row + head * G * stride_out_head
    _store_output(out, stride_out_head, acc, total, v_scale, G, GP, D, DP)


@triton.jit
def rank_kernel(
    q, landmarks, table, length, top_k, rows, counters,
    stride_q_row, stride_q_head, stride_mark_block, stride_mark_page, stride_mark_head, stride_table, stride_rows,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
    PER_BLOCK: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, BLOCK: tl.constexpr,
    SCORE_TILE: tl.constexpr, SCORE_STAGES: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Several programs score the pages of an item; the last to finish selects."""
    item = tl.program_id(0)
    split = tl.program_id(1)
    b = (item // K).to(tl.int64)
    head = (item % K).to(tl.int64)
    q_D = _mean_query(q + b * stride_q_row + head * G * stride_q_head, stride_q_head, G, D, DP)
    pages, ranked, budget, _ = _plan(tl.load(length + b), tl.load(top_k + b), P, SINK, RECENT)
    to_score = tl.where((budget > 0) & (budget < ranked), ranked, 0)
    used = tl.minimum(tl.maximum((to_score + SCORE_TILE - 1) // SCORE_TILE, 1), SPLITS)
    table += b * stride_table
    row = rows + item.to(tl.int64) * stride_rows
    if split < used:
        begin, end = _share(to_score, split, used, SCORE_TILE)
        _score(
            q_D, landmarks + head * stride_mark_head, table, row, SINK + begin, SINK + end, stride_mark_block,
            stride_mark_page, D, DP, PER_BLOCK, SCORE_TILE, SCORE_STAGES,
        )  # fmt: skip
        if _arrives_last(counters + item, used):
            _select(table, row, pages, ranked, budget, SINK, PER_BLOCK, BLOCK)


@triton.jit
def attend_kernel(
    q, k_cache, v_cache, length, top_k, out, rows, partial, stats, counters,
    stride_q_row, stride_q_head, stride_k_block, stride_k_head, stride_k_token,
    stride_v_block, stride_v_head, stride_v_token, stride_out_row, stride_out_head, stride_rows, scale_log2, v_scale,
    K: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr,
    PER_BLOCK: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, TILE: tl.constexpr,
    SPLITS: tl.constexpr, SPLIT_TOKENS: tl.constexpr,
):  # fmt: skip
    """Several programs attend to the kept tokens of an item, as many as its tokens are worth; the last combines.

    The parts are added in the order of the splits, whoever adds them: the result does not depend on timing.
    """
    item = tl.program_id(0)
    split = tl.program_id(1)
    b = (item // K).to(tl.int64)
    head = (item % K).to(tl.int64)
    q_GD = _group_queries(q + b * stride_q_row + head * G * stride_q_head, stride_q_head, G, GP, D, DP)
    _, _, _, tokens = _plan(tl.load(length + b), tl.load(top_k + b), P, SINK, RECENT)
    used = tl.minimum(tl.maximum((tokens + SPLIT_TOKENS - 1) // SPLIT_TOKENS, 1), SPLITS)
    if split < used:
        begin, end = _share(tokens, split, used, TILE)
        acc, total, maximum = _attend(
            q_GD, k_cache + head * stride_k_head, v_cache + head * stride_v_head,
            (rows + item.to(tl.int64) * stride_rows).to(tl.pointer_type(tl.int32), bitcast=True), begin, end,
            stride_k_block, stride_k_token, stride_v_block, stride_v_token, scale_log2, GP, D, DP, P, PER_BLOCK, TILE,
        )  # fmt: skip
        out += b * stride_out_row + head * G * stride_out_head
        if used == 1:
            _store_output(out, stride_out_head, acc, total, v_scale, G, GP, D, DP)
        else:
            g = tl.arange(0, GP)
            d = tl.arange(0, DP)
            heads = g < G
            cell = g[:, None] * D + d[None, :]
            mask = heads[:, None] & (d < D)[None, :]
            slot = item.to(tl.int64) * SPLITS
            tl.store(partial + (slot + split) * G * D + cell, acc, mask=mask)
            tl.store(stats + (slot + split) * 2 * G + g, maximum, mask=heads)
            tl.store(stats + (slot + split) * 2 * G + G + g, total, mask=heads)
            if _arrives_last(counters + item, used):
                highest = tl.full((GP,), -1e30, tl.float32)
                for s in tl.static_range(SPLITS):
                    there = heads & (s < used)
                    highest = tl.maximum(highest, tl.load(stats + (slot + s) * 2 * G + g, mask=there, other=-1e30))
                acc = tl.zeros((GP, DP), tl.float32)
                total = tl.zeros((GP,), tl.float32)
                for s in tl.static_range(SPLITS):
                    there = heads & (s < used)
                    weight = tl.exp2(tl.load(stats + (slot + s) * 2 * G + g, mask=there, other=-1e30) - highest)
                    total += weight * tl.load(stats + (slot + s) * 2 * G + G + g, mask=there, other=0.0)
                    part = tl.load(partial + (slot + s) * G * D + cell, mask=mask & (s < used), other=0.0)
                    acc += weight[:, None] * part
                _store_output(out, stride_out_head, acc, total, v_scale, G, GP, D, DP)


@triton.jit
def landmark_kernel(
    k_cache, landmarks, slots, count,
    stride_k_block, stride_k_head, stride_k_token, stride_mark_block, stride_mark_page, stride_mark_head,
    D: tl.constexpr, DP: tl.constexpr, P: tl.constexpr, PER_BLOCK: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Recomputes the mean key of every page whose last slot is among this program's ``SLOTS`` slots."""
    head = tl.program_id(1).to(tl.int64)
    i = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    d = tl.arange(0, DP)
    slot = tl.load(slots + i, mask=i < count, other=-1).to(tl.int64)
    pending = tl.where((slot >= 0) & (slot % P == P - 1), slot // P, -1)
    page = tl.max(pending, 0)
    while page >= 0:
        block = page // PER_BLOCK
        token = (page % PER_BLOCK) * P + tl.arange(0, P)
        keys = k_cache + block * stride_k_block + head * stride_k_head
        k_PD = tl.load(keys + token[:, None] * stride_k_token + d[None, :], mask=(d < D)[None, :], other=0.0)
        mark = landmarks + block * stride_mark_block + page % PER_BLOCK * stride_mark_page + head * stride_mark_head
        mean = tl.sum(k_PD.to(tl.float32), 0) / P
        tl.store(mark + d, mean.to(landmarks.dtype.element_ty), mask=d < D)
        pending = tl.where(pending == page, -1, pending)
        page = tl.max(pending, 0)
