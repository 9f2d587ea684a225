"""Triton kernels for the output and gradients of teacher-forced page attention. The pages have been
selected by ``forced_select``.

Queries are split into tiles of BT consecutive positions times the G heads of a group. For each page
and tile, a bit mask says which positions keep the page (``masks``: bit i is the tile's i-th
position). Each tile has a list of the pages kept by any of its positions, and the tile's program
reads only these pages. The key and value gradients use the same bits the other way round. Each run
of adjacent pages has a list of the positions that keep any page of the run, and one program per run
reads only these positions. There are no atomic adds, so results are bitwise deterministic.

Everything is indexed by position in the sequence. Columns before a row's start and after its end
are never read.

Shapes: B sequences, T columns, H query heads, K kv heads, G = H / K (padded to GP), D head dim
(padded to DP), P page size, N pages. An item is a (sequence, kv head) pair.
"""

import triton
import triton.language as tl

from sparrow.attention.triton.forced_select import tile_rows
from sparrow.attention.triton.kernels import load_rows


@triton.jit
def _pages_before(tile, size, count, P: tl.constexpr, BT: tl.constexpr):
    """Count the listed pages that end before the tile begins. The other listed pages contain the
    tile's own tokens.
    """
    last = tl.minimum(tile * BT + BT, size) - 1
    return count - (last // P + 1 - (tile * BT + 1) // P)


@triton.jit
def _tokens(entry, slot, end, NP: tl.constexpr, P: tl.constexpr):
    """Return the token positions in NP listed pages, concatenated. For each token, also return a
    bit mask of the tile's positions that keep it. Masks are empty beyond ``end``.
    """
    token = entry.to(tl.int32)[:, None] * P + tl.arange(0, P)[None, :]
    mask = tl.where(slot < end, (entry >> 32).to(tl.int32), 0)
    mask = tl.broadcast_to(mask[:, None], (NP, P))
    return tl.reshape(token, (NP * P,)), tl.reshape(mask, (NP * P,))


@triton.jit
def _attend(
    q_MD,
    k,
    v,
    lists,
    begin,
    end,
    size,
    bit,
    position,
    acc,
    total,
    maximum,
    scale_log2,
    stride_k,
    stride_v,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    NP: tl.constexpr,
):
    # Load list entries one step early, so that the software pipeline has no dependent loads.
    slot = begin + tl.arange(0, NP)
    entry = tl.load(lists + tl.maximum(tl.minimum(slot, end - 1), 0))
    for _ in range(begin, end, NP):
        token, mask = _tokens(entry, slot, end, NP, P)
        slot += NP
        entry = tl.load(lists + tl.maximum(tl.minimum(slot, end - 1), 0))
        source = tl.minimum(token, size - 1) if CAUSAL else token
        k_ND = load_rows(k, source * stride_k, D, DP)
        logit = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee")
        seen = (mask[None, :] & bit[:, None]) != 0
        if CAUSAL:
            seen = seen & (token[None, :] <= position[:, None])
        logit = tl.where(seen, logit, float("-inf"))
        highest = tl.maximum(maximum, tl.max(logit, 1) * scale_log2)
        weight = tl.exp2(logit * scale_log2 - highest[:, None])
        shrink = tl.exp2(maximum - highest)
        v_ND = load_rows(v, source * stride_v, D, DP)
        acc = tl.dot(weight.to(v_ND.dtype), v_ND, acc * shrink[:, None], input_precision="ieee")
        total = total * shrink + tl.sum(weight, 1)
        maximum = highest
    return acc, total, maximum


@triton.jit
def forward_kernel(
    q,
    k,
    v,
    out,
    lse,
    start,
    length,
    lists,
    counts,
    scale_log2,
    stride_q_row,
    stride_q_head,
    stride_q_token,
    stride_k_row,
    stride_k_head,
    stride_k_token,
    stride_v_row,
    stride_v_head,
    stride_v_token,
    stride_out_row,
    stride_out_head,
    stride_out_token,
    T,
    N,
    TILES,
    K: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    BT: tl.constexpr,
    NP: tl.constexpr,
):
    """Compute one tile's attention to its listed pages, and the base-2 log of each row's softmax
    denominator.
    """
    tile = TILES - 1 - tl.program_id(0)  # run the most expensive tiles (the last ones) first
    item = tl.program_id(1).to(tl.int64)
    b = item // K
    size = tl.load(length + b).to(tl.int32)
    if tile * BT < size:
        base = tl.load(start + b).to(tl.int64)
        position, head, bit, inside = tile_rows(tile, size, BT, GP, G)
        head += (item % K).to(tl.int32) * G
        q_MD = load_rows(
            q + b * stride_q_row, (base + position) * stride_q_token + head * stride_q_head, D, DP
        )
        k += b * stride_k_row + item % K * stride_k_head + base * stride_k_token
        v += b * stride_v_row + item % K * stride_v_head + base * stride_v_token
        lists += (item * TILES + tile) * N
        count = tl.load(counts + item * TILES + tile)
        maximum = tl.full((BT * GP,), -1e30, tl.float32)
        total = tl.zeros((BT * GP,), tl.float32)
        acc = tl.zeros((BT * GP, DP), tl.float32)
        before = _pages_before(tile, size, count, P, BT)
        acc, total, maximum = _attend(
            q_MD,
            k,
            v,
            lists,
            0,
            before,
            size,
            bit,
            position,
            acc,
            total,
            maximum,
            scale_log2,
            stride_k_token,
            stride_v_token,
            False,
            D,
            DP,
            P,
            NP,
        )
        acc, total, maximum = _attend(
            q_MD,
            k,
            v,
            lists,
            before,
            count,
            size,
            bit,
            position,
            acc,
            total,
            maximum,
            scale_log2,
            stride_k_token,
            stride_v_token,
            True,
            D,
            DP,
            P,
            NP,
        )
        d = tl.arange(0, DP)
        place = (base + position) * stride_out_token + head * stride_out_head
        result = (acc / total[:, None]).to(out.dtype.element_ty)
        there = inside[:, None] & (d < D)[None, :]
        tl.store(out + b * stride_out_row + place[:, None] + d[None, :], result, mask=there)
        tl.store(lse + (b * K * G + head) * T + position, maximum + tl.log2(total), mask=inside)


@triton.jit
def _differentiate(
    q_MD,
    do_MD,
    k,
    v,
    lists,
    begin,
    end,
    size,
    bit,
    position,
    lse_M,
    delta_M,
    acc,
    scale_log2,
    stride_k,
    stride_v,
    CAUSAL: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    NP: tl.constexpr,
):
    slot = begin + tl.arange(0, NP)
    entry = tl.load(lists + tl.maximum(tl.minimum(slot, end - 1), 0))
    for _ in range(begin, end, NP):
        token, mask = _tokens(entry, slot, end, NP, P)
        slot += NP
        entry = tl.load(lists + tl.maximum(tl.minimum(slot, end - 1), 0))
        source = tl.minimum(token, size - 1) if CAUSAL else token
        k_ND = load_rows(k, source * stride_k, D, DP)
        v_ND = load_rows(v, source * stride_v, D, DP)
        logit = tl.dot(q_MD, tl.trans(k_ND), input_precision="ieee") * scale_log2
        seen = (mask[None, :] & bit[:, None]) != 0
        if CAUSAL:
            seen = seen & (token[None, :] <= position[:, None])
        weight = tl.where(seen, tl.exp2(logit - lse_M[:, None]), 0.0)
        d_weight = tl.dot(do_MD, tl.trans(v_ND), input_precision="ieee")
        d_logit = weight * (d_weight - delta_M[:, None])
        acc = tl.dot(d_logit.to(k_ND.dtype), k_ND, acc, input_precision="ieee")
    return acc


@triton.jit
def query_gradient_kernel(
    q,
    k,
    v,
    out,
    d_out,
    d_q,
    lse,
    delta,
    start,
    length,
    lists,
    counts,
    scale,
    scale_log2,
    stride_q_row,
    stride_q_head,
    stride_q_token,
    stride_k_row,
    stride_k_head,
    stride_k_token,
    stride_v_row,
    stride_v_head,
    stride_v_token,
    stride_out_row,
    stride_out_head,
    stride_out_token,
    stride_do_row,
    stride_do_head,
    stride_do_token,
    stride_dq_row,
    stride_dq_head,
    stride_dq_token,
    T,
    N,
    TILES,
    K: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    BT: tl.constexpr,
    NP: tl.constexpr,
):
    """Compute one tile's query gradients from its listed pages. Also compute ``delta``, the dot
    product of each row's output with its gradient.
    """
    tile = TILES - 1 - tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    b = item // K
    size = tl.load(length + b).to(tl.int32)
    if tile * BT < size:
        base = tl.load(start + b).to(tl.int64)
        position, head, bit, inside = tile_rows(tile, size, BT, GP, G)
        head += (item % K).to(tl.int32) * G
        column = base + position
        q_MD = load_rows(
            q + b * stride_q_row, column * stride_q_token + head * stride_q_head, D, DP
        )
        do_MD = load_rows(
            d_out + b * stride_do_row, column * stride_do_token + head * stride_do_head, D, DP
        )
        out_MD = load_rows(
            out + b * stride_out_row, column * stride_out_token + head * stride_out_head, D, DP
        )
        stat = (b * K * G + head) * T + position
        lse_M = tl.load(lse + stat)
        delta_M = tl.sum(do_MD.to(tl.float32) * out_MD.to(tl.float32), 1)
        tl.store(delta + stat, delta_M, mask=inside)
        k += b * stride_k_row + item % K * stride_k_head + base * stride_k_token
        v += b * stride_v_row + item % K * stride_v_head + base * stride_v_token
        lists += (item * TILES + tile) * N
        count = tl.load(counts + item * TILES + tile)
        acc = tl.zeros((BT * GP, DP), tl.float32)
        before = _pages_before(tile, size, count, P, BT)
        acc = _differentiate(
            q_MD,
            do_MD,
            k,
            v,
            lists,
            0,
            before,
            size,
            bit,
            position,
            lse_M,
            delta_M,
            acc,
            scale_log2,
            stride_k_token,
            stride_v_token,
            False,
            D,
            DP,
            P,
            NP,
        )
        acc = _differentiate(
            q_MD,
            do_MD,
            k,
            v,
            lists,
            before,
            count,
            size,
            bit,
            position,
            lse_M,
            delta_M,
            acc,
            scale_log2,
            stride_k_token,
            stride_v_token,
            True,
            D,
            DP,
            P,
            NP,
        )
        d = tl.arange(0, DP)
        place = column * stride_dq_token + head * stride_dq_head
        result = (acc * scale).to(d_q.dtype.element_ty)
        there = inside[:, None] & (d < D)[None, :]
        tl.store(d_q + b * stride_dq_row + place[:, None] + d[None, :], result, mask=there)


@triton.jit
def _readers(
    masks, place, row, tiles, n, N, ROWS: tl.constexpr, BT: tl.constexpr, PAGES: tl.constexpr
):
    """Return the pages kept by the positions of ROWS tiles, as bits ``[ROWS, BT, runs]``. Bit i
    stands for the run's i-th page.
    """
    tile = row + tl.arange(0, ROWS)
    bits = tl.zeros((ROWS, BT, n.shape[0]), tl.int32)
    for i in tl.static_range(PAGES):
        page = n * PAGES + i
        there = (tile < tiles)[:, None] & (page < N)[None, :]
        mask = tl.load(
            masks + place + tile.to(tl.int64)[:, None] * N + page[None, :], mask=there, other=0
        )
        bits += ((mask[:, None, :] >> tl.arange(0, BT)[None, :, None]) & 1) << i
    return bits


@triton.jit
def reader_count_kernel(
    masks,
    length,
    counts,
    N,
    TILES,
    RUNS,
    K: tl.constexpr,
    BT: tl.constexpr,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
):
    """For each run of pages, count the positions that keep a page of the run, ``[B, K, RUNS]``."""
    item = tl.program_id(1).to(tl.int64)
    tiles = (tl.load(length + item // K).to(tl.int32) + BT - 1) // BT
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    total = tl.zeros((ROWS, BT, BN), tl.int32)
    for row in range(0, tiles, ROWS):
        total += (_readers(masks, item * TILES * N, row, tiles, n, N, ROWS, BT, PAGES) != 0).to(
            tl.int32
        )
    tl.store(counts + item * RUNS + n, tl.sum(tl.sum(total, 0), 0), mask=n < RUNS)


@triton.jit
def reader_list_kernel(
    masks,
    length,
    ends,
    readers,
    N,
    TILES,
    RUNS,
    K: tl.constexpr,
    BT: tl.constexpr,
    PAGES: tl.constexpr,
    ROWS: tl.constexpr,
    BN: tl.constexpr,
):
    """For each run of pages, list the positions that keep any page of the run, in ascending order.
    The low PAGES bits of an entry say which pages the position keeps.
    """
    item = tl.program_id(1).to(tl.int64)
    tiles = (tl.load(length + item // K).to(tl.int32) + BT - 1) // BT
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    cell = item * RUNS + n
    place = tl.load(ends + cell - 1, mask=(n < RUNS) & (cell > 0), other=0)
    t = tl.arange(0, ROWS * BT)
    for row in range(0, tiles, ROWS):
        bits = _readers(masks, item * TILES * N, row, tiles, n, N, ROWS, BT, PAGES)
        bits = tl.reshape(bits, (ROWS * BT, BN))
        listed = (bits != 0).to(tl.int32)
        before = tl.cumsum(listed, 0) - listed
        entry = ((row * BT + t) << PAGES)[:, None] | bits
        tl.store(readers + place[None, :] + before, entry, mask=bits != 0)
        place += tl.sum(listed, 0)


@triton.jit
def _add(total, lost, part, COMPENSATED: tl.constexpr):
    """Return ``total + part`` and, if COMPENSATED, the rounding error of the sum (Kahan
    summation).
    """
    if COMPENSATED:
        part -= lost
        before = total
        total += part
        lost = (total - before) - part
    else:
        total += part
    return total, lost


@triton.jit
def key_gradient_kernel(
    q,
    k,
    v,
    d_out,
    d_k,
    d_v,
    lse,
    delta,
    start,
    length,
    ends,
    readers,
    scale,
    scale_log2,
    stride_q_row,
    stride_q_head,
    stride_q_token,
    stride_k_row,
    stride_k_head,
    stride_k_token,
    stride_v_row,
    stride_v_head,
    stride_v_token,
    stride_do_row,
    stride_do_head,
    stride_do_token,
    stride_dk_row,
    stride_dk_head,
    stride_dk_token,
    stride_dv_row,
    stride_dv_head,
    stride_dv_token,
    T,
    RUNS,
    K: tl.constexpr,
    G: tl.constexpr,
    GP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    PAGES: tl.constexpr,
    KEYS: tl.constexpr,
    BT: tl.constexpr,
):
    """Compute the key and value gradients of one run of pages. The program loops over the positions
    that keep any page of the run, BT at a time.

    Float32 sums are compensated. Every position keeps the first page, so the rounding error in the
    first page's sums would otherwise grow with the length.
    """
    COMPENSATED: tl.constexpr = q.dtype.element_ty == tl.float32
    run = tl.program_id(0)
    item = tl.program_id(1).to(tl.int64)
    b = item // K
    size = tl.load(length + b).to(tl.int32)
    if run * PAGES * P < size:
        base = tl.load(start + b).to(tl.int64)
        j = tl.arange(0, KEYS)
        token = run * PAGES * P + j
        own = (j < PAGES * P) & (token < size)
        page_bit = tl.where(own, 1 << tl.minimum(j // P, PAGES - 1), 0)
        source = base + tl.minimum(token, size - 1)
        k_ND = load_rows(
            k + b * stride_k_row + item % K * stride_k_head, source * stride_k_token, D, DP
        )
        v_ND = load_rows(
            v + b * stride_v_row + item % K * stride_v_head, source * stride_v_token, D, DP
        )
        cell = item * RUNS + run
        begin = tl.load(ends + cell - 1, mask=cell > 0, other=0)
        count = (tl.load(ends + cell) - begin).to(tl.int32)
        readers += begin
        row = tl.arange(0, BT * GP)
        head = (item % K).to(tl.int32) * G + tl.minimum(row % GP, G - 1)
        q += b * stride_q_row + base * stride_q_token
        d_out += b * stride_do_row + base * stride_do_token
        stat = (b * K * G + head) * T
        dk_ND = tl.zeros((KEYS, DP), tl.float32)
        dv_ND = tl.zeros((KEYS, DP), tl.float32)
        dk_lost = dk_ND
        dv_lost = dv_ND
        reader = tl.arange(0, BT)
        entry = tl.load(readers + tl.minimum(reader, count - 1))
        for _ in range(0, count, BT):
            kept = tl.where(
                (reader < count)[:, None] & (tl.arange(0, GP) < G)[None, :], entry[:, None], 0
            )
            kept = tl.reshape(kept, (BT * GP,))
            position = tl.reshape(tl.broadcast_to((entry >> PAGES)[:, None], (BT, GP)), (BT * GP,))
            reader += BT
            entry = tl.load(readers + tl.minimum(reader, count - 1))
            q_MD = load_rows(q, position * stride_q_token + head * stride_q_head, D, DP)
            do_MD = load_rows(d_out, position * stride_do_token + head * stride_do_head, D, DP)
            lse_M = tl.load(lse + stat + position)
            delta_M = tl.load(delta + stat + position)
            logit = tl.dot(k_ND, tl.trans(q_MD), input_precision="ieee") * scale_log2
            seen = ((kept[None, :] & page_bit[:, None]) != 0) & (
                token[:, None] <= position[None, :]
            )
            weight = tl.where(seen, tl.exp2(logit - lse_M[None, :]), 0.0)
            part = tl.dot(weight.to(do_MD.dtype), do_MD, input_precision="ieee")
            dv_ND, dv_lost = _add(dv_ND, dv_lost, part, COMPENSATED)
            d_weight = tl.dot(v_ND, tl.trans(do_MD), input_precision="ieee")
            d_logit = weight * (d_weight - delta_M[None, :])
            part = tl.dot(d_logit.to(q_MD.dtype), q_MD, input_precision="ieee")
            dk_ND, dk_lost = _add(dk_ND, dk_lost, part, COMPENSATED)
        d = tl.arange(0, DP)
        cells = own[:, None] & (d < D)[None, :]
        d_k += b * stride_dk_row + item % K * stride_dk_head
        d_v += b * stride_dv_row + item % K * stride_dv_head
        dk_ND = (dk_ND * scale).to(d_k.dtype.element_ty)
        tl.store(d_k + (source * stride_dk_token)[:, None] + d[None, :], dk_ND, mask=cells)
        tl.store(
            d_v + (source * stride_dv_token)[:, None] + d[None, :],
            dv_ND.to(d_v.dtype.element_ty),
            mask=cells,
        )
