"""Split a batch across programs. The plan is made on the device, once per step, and shared by all
attention kernels.

Planning is needed because rollout rows differ in length, and a step is only as fast as its slowest
program. The Triton and CUDA kernels read the same plan. Each plan entry is one part of a row,
computed by K programs (one per kv head). It consists of ``PLAN_ENTRY`` int32s: the row, the part,
the row's number of parts, the slot of the row's first part, the row's length and its top_k, and two
unused ones for alignment. If budgets differ between heads, the plan uses the mean budget. The plan
is still valid for every layer, because each program splits the pages of its own head into the row's
number of parts.

Shapes: R rows (sequences), T new tokens each, S rows or candidate sizes processed at a time.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from sparrow.attention.decode import PLAN_ENTRY, DecodeBatch, DecodeWorkspace
from sparrow.attention.pages import ALL_PAGES

ENTRY = tl.constexpr(PLAN_ENTRY)
EVERY_PAGE = tl.constexpr(ALL_PAGES)
SIZES = tl.constexpr(16)  # number of part sizes to try


@dataclass(frozen=True)
class Division:
    """What a launch requires of the plan."""

    # programs beyond one per item, for additional parts; a multiple of the number of KV heads
    extra_programs: int
    resident_programs: int  # programs that run at the same time
    part_tokens: int  # minimum number of kept tokens per part
    ranks: bool  # whether a row's first program ranks the pages while the others wait


def divide(batch: DecodeBatch, workspace: DecodeWorkspace, division: Division) -> None:
    """Write the plan to the workspace. It is valid for all layers with these lengths and budgets.

    Raises ValueError if the number of extra programs is not a multiple of the number of kv heads,
    which would leave some programs without a plan entry, or if the plan does not fit in the
    workspace.
    """
    B = len(batch.length_B)
    K = batch.kv_heads
    layout = batch.layout
    if division.extra_programs % K:
        raise ValueError(
            f"extra_programs must be a multiple of the {K} kv heads, got {division.extra_programs}"
        )
    entries = B + division.extra_programs // K
    if entries > len(workspace.plan):
        raise ValueError(
            f"the plan has {entries} entries, but the workspace has room for "
            f"{len(workspace.plan)}; launch fewer extra programs, or create a larger workspace"
        )
    plan_kernel[(1,)](
        batch.length_B,
        batch.top_k_B,
        workspace.plan,
        B,
        division.extra_programs // K,
        division.resident_programs // K,
        P=layout.page_size,
        SINK=layout.sink_pages,
        RECENT=layout.recent_pages,
        T=batch.tokens,
        MIN_PART=division.part_tokens,
        ROWS=max(128, triton.next_power_of_2(B)),
        RANKS=division.ranks,
        num_warps=4,
    )


@triton.jit
def page_counts(
    length, top_k, P: tl.constexpr, SINK: tl.constexpr, RECENT: tl.constexpr, T: tl.constexpr
):
    """Return four counts for a row: all pages, pages ranked by score, ranked pages to keep, and all
    kept tokens.

    The last T of the row's ``length`` tokens are new, and the first new token selects the pages.
    """
    pages = (length + P - 1) // P
    selected_from = (tl.maximum(length - (T - 1), 0) + P - 1) // P
    ranked = tl.maximum(selected_from - SINK - RECENT, 0)
    budget = tl.minimum(ranked, tl.maximum(top_k, 0))
    return pages, ranked, budget, length - (ranked - budget) * P


@triton.jit
def of_head(top_k, head_budgets, head):
    """Return the top-k of one head, which is ``top_k`` times the head's budget. Head budgets are in
    units of 1 / 256. If ``head_budgets`` is None, every head gets ``top_k``.
    """
    if head_budgets is not None:
        relative = tl.load(head_budgets + head).to(tl.int64)
        own = tl.minimum((top_k.to(tl.int64) * relative + 128) >> 8, EVERY_PAGE)
        top_k = tl.where(top_k >= EVERY_PAGE, EVERY_PAGE, own).to(tl.int32)
    return top_k


@triton.jit(do_not_specialize=["count", "extra", "resident"])
def plan_kernel(
    length,
    top_k,
    plan,
    count,
    extra,
    resident,
    P: tl.constexpr,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    T: tl.constexpr,
    MIN_PART: tl.constexpr,
    ROWS: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Split a batch into parts that are as small as possible, with at most ``extra`` more parts
    than rows.

    Rows with at most 1 / ``resident`` of all kept tokens stay whole. Rows not much longer than
    average also stay whole, unless twice as many rows could run at once. Parts are sorted by work,
    largest first, and a row's first part comes before its other parts. Unused entries are set to
    row ``count``.
    """
    r = tl.arange(0, ROWS)
    length_R = tl.load(length + r, mask=r < count, other=0)
    top_k_R = tl.load(top_k + r, mask=r < count, other=0)
    tokens_R, ranking_R = _work(length_R, top_k_R, P, SINK, RECENT, T, RANKS)
    total = tl.sum(tokens_R)
    whole = tl.where(2 * count <= resident, 0, total // count * 17 // 16)
    low = tl.maximum(
        tl.maximum(MIN_PART, total // (count + extra)), tl.maximum(whole, total // resident)
    )
    # This size never needs more than ``extra`` additional parts.
    high = tl.maximum(low, total // extra + 1)
    size_S = high - (high - low) // (SIZES - 1) * tl.arange(0, SIZES)
    needed_S = tl.sum(tl.maximum(tokens_R - 1, 0)[:, None] // size_S[None, :], 0)
    size = tl.min(tl.where(needed_S <= extra, size_S, high))
    more_R = tl.maximum(tokens_R - 1, 0) // size
    first_R, further_R = _order_of_work(tokens_R, ranking_R, more_R, r, P, ROWS)
    used = tl.sum(more_R)
    before_R = tl.cumsum(more_R) - more_R
    first_entry_R = tl.zeros((ROWS,), tl.int32)
    further_entry_R = tl.zeros((ROWS,), tl.int32)
    for begin in range(0, count, SIZES):
        s = begin + tl.arange(0, SIZES)
        length_S = tl.load(length + s, mask=s < count, other=0)
        top_k_S = tl.load(top_k + s, mask=s < count, other=0)
        tokens_S, ranking_S = _work(length_S, top_k_S, P, SINK, RECENT, T, RANKS)
        more_S = tl.maximum(tokens_S - 1, 0) // size
        first_S, further_S = _order_of_work(tokens_S, ranking_S, more_S, s, P, ROWS)
        first_S = tl.where(s < count, first_S, -1)
        first_entry_R += _count_before(first_R, first_S, further_S, more_S)
        further_entry_R += _count_before(further_R, first_S, further_S, more_S)
    for part in range(tl.max(more_R) + 1):
        entry_R = plan + tl.where(part == 0, first_entry_R, further_entry_R + part - 1) * ENTRY
        mine = (r < count) & (part <= more_R)
        tl.store(entry_R, r, mask=mine)
        tl.store(entry_R + 1, part, mask=mine)
        tl.store(entry_R + 2, more_R + 1, mask=mine)
        tl.store(entry_R + 3, r + before_R, mask=mine)
        tl.store(entry_R + 4, length_R, mask=mine)
        tl.store(entry_R + 5, top_k_R, mask=mine)
    for first in range(used, extra, ROWS):
        tl.store(plan + (count + first + r) * ENTRY, count, mask=first + r < extra)


@triton.jit
def _work(
    length_R,
    top_k_R,
    P: tl.constexpr,
    SINK: tl.constexpr,
    RECENT: tl.constexpr,
    T: tl.constexpr,
    RANKS: tl.constexpr,
):
    """Return each row's number of kept tokens and the cost of ranking its pages. The cost is given
    as the number of tokens that could be read in the same time.
    """
    _pages, ranked, budget, tokens_R = page_counts(length_R, top_k_R, P, SINK, RECENT, T)
    return tokens_R, tl.where((budget > 0) & (budget < ranked) & RANKS, ranked // 2, 0)


@triton.jit
def _order_of_work(tokens_R, ranking_R, more_R, r, P: tl.constexpr, ROWS: tl.constexpr):
    """Return sort keys for each row's first part and for its other parts. The keys are unique, and
    order parts by their work in whole pages.
    """
    part_R = tokens_R // (more_R + 1)
    last_R = ROWS - 1 - r
    return ((part_R + ranking_R) // P * 2 + 1) * ROWS + last_R, part_R // P * 2 * ROWS + last_R


@triton.jit
def _count_before(order_R, first_S, further_S, more_S):
    """For each sort key in ``order_R``, count how many parts of the S rows come before it."""
    first = (first_S[None, :] > order_R[:, None]).to(tl.int32)
    further = (further_S[None, :] > order_R[:, None]).to(tl.int32)
    return tl.sum(first + further * more_S[None, :], 1)
