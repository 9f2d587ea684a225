"""Launchers and autograd function for the teacher-forced kernels.

Shapes: B sequences, T columns, H query heads, K kv heads, G = H / K, D head dim, P page size, N
pages.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import torch
import triton
from torch import Tensor

from sparrow.attention.decode import MAX_GROUP, MAX_PAGES, device_limits
from sparrow.attention.pages import PageLayout
from sparrow.attention.triton import forced_kernels as kernels
from sparrow.attention.triton import forced_select
from sparrow.attention.triton.launch import check_device

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_DIM = 256
SCORE_BYTES = 2**27  # scratch memory for one chunk's page scores, in bytes
# Tile sizes for heads of 256 bytes. FORWARD_TILES (output) and QUERY_TILES (query gradients) list
# keys per loop iteration, warps and pipeline stages. KEY_TILES (key and value gradients) lists
# query rows per iteration, keys per program, warps and stages.
FORWARD_TILES = (64, 4, 3)
QUERY_TILES = (64, 4, 2)
KEY_TILES = (32, 64, 4, 3)


class Selection(NamedTuple):
    """The pages kept by each position."""

    # int32 [B * K, tiles, N]; bit i is set if position ``tile * BT + i`` keeps the page
    masks: Tensor
    # int64 [B * K, tiles, N]; the pages kept by any position of the tile, in order, with their
    # masks
    lists: Tensor
    counts: Tensor  # int32 [B * K, tiles]; length of each tile's list


class Kept(NamedTuple):
    """Results that a repeated call can reuse."""

    selection: Selection
    out: Tensor
    lse: Tensor


class _Context(Protocol):
    """The autograd context, passed from forward to backward."""

    saved_tensors: tuple[Tensor, ...]
    options: tuple[PageLayout, float]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


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
    head_budgets_K: Tensor | None = None,
    kept: list[Kept] | None = None,
    tokens: int = 1,
) -> Tensor:
    """Compute attention over whole sequences. Every position reads the pages that it would have
    read during decoding; see ``sparrow.attention.teacher_forced``.
    """
    _check(q_BHTD, k_BKTD, v_BKTD, start_B, length_B, prompt_B, top_k_BT, layout)
    if not scale > 0:
        raise ValueError(f"the softmax scale must be positive, got {scale}")
    q, k, v = map(_packed, (q_BHTD, k_BKTD, v_BKTD))
    rows = (start_B, length_B, prompt_B, top_k_BT)
    return _TeacherForced.apply(q, k, v, *rows, head_budgets_K, layout, scale, kept, tokens)


class _TeacherForced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: _Context,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        start: Tensor,
        length: Tensor,
        prompt: Tensor,
        top_k: Tensor,
        head_budgets: Tensor | None,
        layout: PageLayout,
        scale: float,
        kept: list[Kept] | None,
        tokens: int,
    ) -> Tensor:
        if kept:
            selection, out, lse = kept.pop()
        else:
            call = Call(q, k, v, start, length, layout, scale)
            selection = call.select(prompt, top_k, head_budgets, tokens)
            out, lse = call.attend(selection)
            if kept is not None:
                kept.append(Kept(selection, out.detach(), lse))
        ctx.save_for_backward(q, k, v, out, lse, start, length, *selection)
        ctx.options = (layout, scale)
        return out

    @staticmethod
    def backward(ctx: _Context, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, start, length, *selection = ctx.saved_tensors
        call = Call(q, k, v, start, length, *ctx.options)
        d_out = _packed(gradients[0])
        pages = Selection(*selection)
        d_q, delta = call.query_gradient(out, lse, d_out, pages)
        return d_q, *call.key_gradient(lse, delta, d_out, call.readers(pages)), *(None,) * 9


class Call:
    """The kernel launches for one call. Arguments have been checked by ``teacher_forced``."""

    def __init__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        start: Tensor,
        length: Tensor,
        layout: PageLayout,
        scale: float,
    ) -> None:
        B, H, T, D = q.shape
        self.K = k.shape[1]
        self.items = B * self.K
        self.T = T
        self.N = triton.cdiv(T, layout.page_size)
        self.q = q
        self.k = k
        self.v = v
        self.start = start
        self.length = length
        self.layout = layout
        self.scale = scale
        self.log2_scale = scale * 1.4426950408889634
        GP = triton.next_power_of_2(H // self.K)
        self.BT = min(32 if GP <= 2 else 16, 128 // GP)
        self.tile_count = triton.cdiv(T, self.BT)
        self.run_pages = max(1, min(8, KEY_TILES[1] // layout.page_size))
        self.runs = triton.cdiv(self.N, self.run_pages)
        self.heads = dict(
            K=self.K, G=H // self.K, GP=GP, D=D, DP=max(16, triton.next_power_of_2(D))
        )
        self.more_warps = 2 if self.BT * GP > 64 or q.element_size() > 2 else 1
        self.row_bytes = self.heads["DP"] * q.element_size()
        self.shared_memory = device_limits(q.device).shared_memory - 4096

    def step(self, rows: int, resident: int, stages: int) -> int:
        """Return how many rows of two tensors to load per loop iteration: ``rows``, or fewer if
        rows are wide or shared memory is tight.
        """
        rows = rows * 256 // max(256, self.row_bytes)
        while rows > 16 and (resident + 2 * stages * rows) * self.row_bytes > self.shared_memory:
            rows //= 2
        return max(16, rows)

    def tile_options(self, tiles: tuple[int, int, int], resident: int) -> dict[str, int]:
        """Return the launch options for a kernel in which each program loops over one tile's pages.

        Args:
            tiles: tokens per iteration, warps and pipeline stages.
            resident: rows of one tensor that stay in shared memory.
        """
        tokens, warps, stages = tiles
        P = self.layout.page_size
        return dict(
            **self.heads,
            P=P,
            BT=self.BT,
            NP=max(1, self.step(tokens, resident, stages) // P),
            num_warps=warps * self.more_warps,
            num_stages=stages,
        )

    def select(
        self, prompt: Tensor, top_k: Tensor, head_budgets: Tensor | None = None, tokens: int = 1
    ) -> Selection:
        """Select pages for every position, one chunk of positions at a time. ``tokens`` is the
        number of tokens per decode step.
        """
        layout = self.layout
        device = self.q.device
        N = self.N
        P = layout.page_size
        K = self.K
        # Make chunks as large as the score memory allows, rounded down to a power of 2.
        room = 2 ** ((SCORE_BYTES // (4 * N * self.items)).bit_length() - 1)
        C = max(32, min(triton.next_power_of_2(self.T), room))

        marks = self.k.new_empty(self.items, N, self.heads["D"])
        selection = Selection(
            torch.zeros(self.items, self.tile_count, N, dtype=torch.int32, device=device),
            torch.empty(self.items, self.tile_count, N, dtype=torch.int64, device=device),
            torch.empty(self.items, self.tile_count, dtype=torch.int32, device=device),
        )
        forced_select.landmark_kernel[(triton.cdiv(N, 16), self.items)](
            self.k,
            marks,
            self.start,
            self.length,
            *self.k.stride()[:3],
            N,
            K=K,
            D=self.heads["D"],
            DP=self.heads["DP"],
            P=P,
            TILE=16,
            FP8=layout.landmark_dtype == "fp8_e4m3",
            num_warps=2,
        )

        scores = torch.empty(self.items * C * N, dtype=torch.float32, device=device)
        kept = torch.empty(
            self.items * C * triton.next_power_of_2(max(N, 32)) // 32,
            dtype=torch.int32,
            device=device,
        )
        BN = self.step(128, self.BT * self.heads["GP"], 1)
        for first in range(0, self.T, C):
            pages = min(N, triton.cdiv(first + C, P))
            block = triton.next_power_of_2(max(pages, 32))
            tiles = min(C // self.BT, self.tile_count - first // self.BT)
            forced_select.score_kernel[(tiles, triton.cdiv(pages, BN), self.items)](
                self.q,
                marks,
                scores,
                self.start,
                self.length,
                prompt,
                top_k,
                head_budgets,
                *self.q.stride()[:3],
                *top_k.stride(),
                first,
                N,
                pages,
                **self.heads,
                P=P,
                SINK=layout.sink_pages,
                RECENT=layout.recent_pages,
                STEP=tokens,
                C=C,
                BT=self.BT,
                BN=BN,
                num_warps=4,
            )
            forced_select.select_kernel[(min(C, self.T - first), self.items)](
                scores,
                kept,
                self.length,
                prompt,
                top_k,
                head_budgets,
                self.start,
                *top_k.stride(),
                first,
                pages,
                K=K,
                P=P,
                SINK=layout.sink_pages,
                RECENT=layout.recent_pages,
                STEP=tokens,
                C=C,
                BLOCK=block,
                num_warps=max(1, block // 2048),
            )
            forced_select.tile_kernel[(tiles, self.items)](
                kept,
                *selection,
                self.length,
                first,
                N,
                self.tile_count,
                K=K,
                C=C,
                BT=self.BT,
                WORDS=block // 32,
                BW=min(4, block // 32),
                num_warps=4,
            )
        return selection

    def attend(self, selection: Selection) -> tuple[Tensor, Tensor]:
        """Compute the output, and the base-2 log-sum-exp ``[B, H, T]``."""
        B, H, T, D = self.q.shape
        out = self.q.new_zeros(B, T, H, D).transpose(1, 2)
        lse = torch.empty(B, H, T, dtype=torch.float32, device=self.q.device)
        kernels.forward_kernel[(self.tile_count, self.items)](
            self.q,
            self.k,
            self.v,
            out,
            lse,
            self.start,
            self.length,
            selection.lists,
            selection.counts,
            self.log2_scale,
            *self.q.stride()[:3],
            *self.k.stride()[:3],
            *self.v.stride()[:3],
            *out.stride()[:3],
            T,
            self.N,
            self.tile_count,
            **self.tile_options(FORWARD_TILES, self.BT * self.heads["GP"]),
        )
        return out, lse

    def query_gradient(
        self, out: Tensor, lse: Tensor, d_out: Tensor, selection: Selection
    ) -> tuple[Tensor, Tensor]:
        """Compute the query gradients, and ``delta`` ``[B, H, T]``: the dot product of each output
        with its gradient.
        """
        d_q = torch.zeros_like(self.q)
        delta = torch.empty_like(lse)
        kernels.query_gradient_kernel[(self.tile_count, self.items)](
            self.q,
            self.k,
            self.v,
            out,
            d_out,
            d_q,
            lse,
            delta,
            self.start,
            self.length,
            selection.lists,
            selection.counts,
            self.scale,
            self.log2_scale,
            *self.q.stride()[:3],
            *self.k.stride()[:3],
            *self.v.stride()[:3],
            *out.stride()[:3],
            *d_out.stride()[:3],
            *d_q.stride()[:3],
            self.T,
            self.N,
            self.tile_count,
            **self.tile_options(QUERY_TILES, 2 * self.BT * self.heads["GP"]),
        )
        return d_q, delta

    def key_gradient(
        self, lse: Tensor, delta: Tensor, d_out: Tensor, readers: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Compute the key and value gradients."""
        d_k = torch.zeros_like(self.k)
        d_v = torch.zeros_like(self.v)
        rows, _, warps, stages = KEY_TILES
        P = self.layout.page_size
        keys = max(16, P * self.run_pages)
        rows = self.step(rows, 2 * keys, stages)
        kernels.key_gradient_kernel[(self.runs, self.items)](
            self.q,
            self.k,
            self.v,
            d_out,
            d_k,
            d_v,
            lse,
            delta,
            self.start,
            self.length,
            *readers,
            self.scale,
            self.log2_scale,
            *self.q.stride()[:3],
            *self.k.stride()[:3],
            *self.v.stride()[:3],
            *d_out.stride()[:3],
            *d_k.stride()[:3],
            *d_v.stride()[:3],
            self.T,
            self.runs,
            **self.heads,
            P=P,
            PAGES=self.run_pages,
            KEYS=keys,
            BT=rows // self.heads["GP"],
            num_warps=warps,
            num_stages=stages,
        )
        return d_k, d_v

    def readers(self, selection: Selection) -> tuple[Tensor, Tensor]:
        """For each run of pages, list the positions that keep at least one page of the run. Return
        the ends of the lists, ``[B * K * runs]``, and the concatenated lists.
        """
        counts = torch.empty(self.items * self.runs, dtype=torch.int32, device=self.q.device)
        sizes = (self.N, self.tile_count, self.runs)
        shape = dict(K=self.K, BT=self.BT, PAGES=self.run_pages, ROWS=4, BN=8)
        grid = (triton.cdiv(self.runs, 8), self.items)
        kernels.reader_count_kernel[grid](
            selection.masks, self.length, counts, *sizes, **shape, num_warps=4
        )
        ends = counts.cumsum(0)
        readers = torch.empty(int(ends[-1]), dtype=torch.int32, device=self.q.device)
        kernels.reader_list_kernel[grid](
            selection.masks, self.length, ends, readers, *sizes, **shape, num_warps=4
        )
        return ends, readers


def _packed(x: Tensor) -> Tensor:
    """Make the head dim contiguous, as the kernels require."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    start: Tensor,
    length: Tensor,
    prompt: Tensor,
    top_k: Tensor,
    layout: PageLayout,
) -> None:
    B, H, T, D = q.shape
    P = layout.page_size
    check_device(q.device)
    if P & (P - 1) or P > 64:
        raise ValueError(
            f"there is no kernel for pages of {P} tokens, expected a power of 2 up to 64; use "
            "implementation='reference'"
        )
    if D > MAX_HEAD_DIM or H // k.shape[1] > MAX_GROUP or triton.cdiv(T, P) > MAX_PAGES:
        raise ValueError(
            f"the kernels support head dims up to {MAX_HEAD_DIM}, {MAX_GROUP} query heads per kv "
            f"head and {MAX_PAGES} pages, got {D}, {H // k.shape[1]} and {triton.cdiv(T, P)}; use "
            "implementation='reference'"
        )
    if q.dtype not in DTYPES or not q.dtype == k.dtype == v.dtype:
        raise ValueError(
            "q, k and v must all be float16, bfloat16 or "
            f"float32, got {q.dtype}, {k.dtype} and {v.dtype}"
        )
    if any(x.shape[1] * x.stride(1) >= 2**31 or T * x.stride(2) >= 2**31 for x in (q, k, v)):
        raise ValueError(
            f"sequences of {T} columns need offsets beyond 32 bits; split the batch or the heads"
        )
    for name, x, shape in (
        ("start_B", start, (B,)),
        ("length_B", length, (B,)),
        ("prompt_B", prompt, (B,)),
        ("top_k_BT", top_k, (B, T)),
    ):
        if x.shape != shape or x.device != q.device or x.is_floating_point():
            got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
            raise ValueError(f"{name} must be integers of shape {shape} on {q.device}, got {got}")
