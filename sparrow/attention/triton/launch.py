"""Launchers of the Triton kernels: check what can be checked without touching the device, pick tiles, launch.

Shapes: B sequences, H query heads, K kv heads, G = H / K, D head dim, P page size, N pages, M blocks in a row
of the block table, T tokens. An item is one sequence and kv head.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import triton
from torch import Tensor

from sparrow.attention.pages import PageLayout
from sparrow.attention.triton import cache, kernels
from sparrow.attention.triton.division import plan_kernel
from sparrow.attention.triton.tuning import LaunchConfig, choose, device_limits

HEAD_DIMS = (64, 80, 96, 128, 256)
PAGE_SIZES = (8, 16, 32, 64)
QUERY_DTYPES = (torch.float16, torch.bfloat16)
MAX_GROUP = 16
MAX_PAGES = 16384


class DecodeWorkspace:
    """Scratch memory of decode steps, allocated once and shared by all layers; one stream at a time may use it.

    Args:
        max_batch: most sequences in a call (B).
        kv_heads: K.
        group: query heads per kv head (G).
        head_dim: D.
        max_pages: most pages of a sequence, 16,384 at the most.
        device: where the caches are.

    Raises ValueError: more pages than the selection can rank.
    """

    def __init__(
        self, max_batch: int, kv_heads: int, group: int, head_dim: int, max_pages: int, device: torch.device | str
    ) -> None:
        if not 1 <= max_pages <= MAX_PAGES:
            raise ValueError(
                f"a sequence of {max_pages} pages cannot be ranked, expected 1..{MAX_PAGES}; use larger pages or a "
                "shorter maximum length"
            )
        device = torch.empty(0, device=device).device
        self.max_batch, self.kv_heads, self.group, self.head_dim = max_batch, kv_heads, group, head_dim
        self.max_pages = max_pages
        items = max_batch * kv_heads
        parts = items + 5 * device_limits(device).multiprocessors // kv_heads * kv_heads  # more than any launch makes
        # Scores, then in their place the ids of the kept pages; rows of a multiple of 16 so that loads stay aligned.
        self.rows = torch.empty(items, -(-max_pages // 16) * 16, dtype=torch.float32, device=device)
        self.partial = torch.empty(parts, group, head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(parts, 2, group, dtype=torch.float32, device=device)
        self.plan = torch.empty(parts // kv_heads, kernels.ENTRY.value, dtype=torch.int32, device=device)
        # Programs that have arrived at an item, for ranking and for attention; every launch leaves zeros.
        self.counters = torch.zeros(2, items, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Device memory held, in bytes."""
        return sum(x.nbytes for x in (self.rows, self.partial, self.stats, self.plan, self.counters))


class DecodeStep:
    """One sparse decode step over a paged cache, checked, and its launches; see ``sparrow.attention.paged_decode``.

    Args:
        config: tiles to use in place of the table's; for benchmarks.
        planned: the call before had the same lengths, budgets and config: divide the work as it did. If the launch just
            before overlaps with its successor, as only ``store_tokens`` here does, nothing but the newest tokens may
            depend on it.

    Raises ValueError: what the kernels cannot serve.
    """

    def __init__(
        self,
        q_BHD: Tensor,
        k_cache: Tensor,
        v_cache: Tensor,
        landmark_cache: Tensor,
        block_table_BM: Tensor,
        length_B: Tensor,
        top_k_B: Tensor,
        layout: PageLayout,
        scale: float,
        k_scale: float,
        v_scale: float,
        out_BHD: Tensor,
        workspace: DecodeWorkspace,
        config: Any = None,
        planned: bool = False,
    ) -> None:
        B, H, D = q_BHD.shape
        K = k_cache.shape[1]
        per_block = _check_cache(k_cache, landmark_cache, layout)
        pages = block_table_BM.shape[1] * per_block
        _check_decode(q_BHD, k_cache, v_cache, block_table_BM, length_B, top_k_B, out_BHD, workspace, pages)
        padded = triton.next_power_of_2(D)
        self.items, self.pages, self.limits = B * K, pages, device_limits(q_BHD.device)
        # Launches begin while the one before ends, and wait for it on the device; before Hopper they cannot.
        self.overlap = _can_overlap(q_BHD)
        self.early = int(planned)
        self.q, self.out, self.caches, self.landmarks = q_BHD, out_BHD, (k_cache, v_cache), landmark_cache
        self.table, self.rows_B, self.workspace = block_table_BM, (length_B, top_k_B), workspace
        self.kv_strides = k_cache.stride()[:3]
        self.scales = (scale * k_scale * math.log2(math.e), v_scale)
        self.shape = dict(
            K=K, G=H // K, GP=16, D=D, DP=padded, P=layout.page_size, PER_BLOCK=per_block,
            SINK=layout.sink_pages, RECENT=layout.recent_pages, BLOCK=max(16, triton.next_power_of_2(pages)),
        )  # fmt: skip
        self.config = self.configure(config)
        self.shape |= dict(SCORE_TILE=self.config.score_pages, SCORE_STAGES=self.config.score_stages + 1)

    def configure(self, config: Any) -> LaunchConfig:
        """How the batch is cut: as ``config`` says, or the table."""
        head_bytes = self.shape["DP"] * self.caches[0].element_size()
        given: LaunchConfig | None = config
        return given or choose(self.items, self.shape["K"], head_bytes, self.limits)

    def run(self) -> Tensor:
        """Everything that is to be launched; returns what ``out`` was."""
        if not self.early:
            self.plan()
        if not self.config.fused:
            self.rank()
        self.attend()
        return self.out

    def plan(self) -> None:
        """Divides the batch among the programs that attend; good for every layer with these lengths and budgets."""
        w, c, shape, count = self.workspace, self.config, self.shape, len(self.table)
        plan_kernel[(1,)](
            *self.rows_B, w.plan, count, c.shares // shape["K"], c.places // shape["K"],
            **{name: shape[name] for name in ("P", "SINK", "RECENT")}, MIN_PART=c.part_tokens,
            ROWS=max(128, triton.next_power_of_2(count)), FUSED=c.fused, num_warps=4,
        )  # fmt: skip

    def rank(self) -> None:
        """Before the attention, unless it is fused: fills the workspace's lists of kept pages."""
        w, c = self.workspace, self.config
        kernels.rank_kernel[(self.items, c.rank_splits)](
            self.q, self.caches[0], self.landmarks, self.table, *self.rows_B, w.rows, w.counters[0],
            c.rank_splits, self.early, *self.q.stride()[:2], *self.kv_strides, *self.landmarks.stride()[:3],
            self.table.stride(0), w.rows.stride(0), **self.shape, PDL=self.overlap, launch_pdl=self.overlap,
            num_warps=c.rank_warps,
        )  # fmt: skip

    def attend(self) -> None:
        """Attention over the kept pages, which a fused launch ranks itself."""
        w, c = self.workspace, self.config
        kernels.attend_kernel[(self.items + c.shares,)](
            self.q, *self.caches, self.landmarks, self.table, self.out, w.rows, w.partial, w.stats, *w.counters, w.plan,
            len(self.table), self.early, *self.q.stride()[:2], *self.kv_strides,
            *self.landmarks.stride()[:3], self.table.stride(0), *self.out.stride()[:2], w.rows.stride(0), *self.scales,
            **self.shape, TILE=c.attend_tokens, FUSED=c.fused, FP8=self.caches[0].dtype == torch.float8_e4m3fn,
            PDL=self.overlap, launch_pdl=self.overlap,
            num_warps=c.attend_warps, num_stages=2 * c.attend_stages + 1,  # a tile waits for its page ids first
            maxnreg=c.registers,
        )  # fmt: skip


def update_landmarks(k_cache: Tensor, landmark_cache: Tensor, slot_mapping_T: Tensor, layout: PageLayout) -> None:
    """Recomputes the landmarks of the pages that these slots complete; see ``sparrow.attention.update_landmarks``."""
    per_block = _check_cache(k_cache, landmark_cache, layout)
    _check_device(k_cache)
    T, K, D = slot_mapping_T.shape[0], k_cache.shape[1], k_cache.shape[3]
    if T == 0:
        return
    slots = layout.page_size  # of prefill, where about one page is completed in so many slots
    cache.landmark_kernel[(triton.cdiv(T, slots), K)](
        k_cache, landmark_cache, slot_mapping_T, T, *k_cache.stride()[:3], *landmark_cache.stride()[:3],
        D=D, DP=triton.next_power_of_2(D), P=layout.page_size, PER_BLOCK=per_block, SLOTS=slots, num_warps=1,
    )  # fmt: skip


def store_tokens(key_TKD: Tensor, value_TKD: Tensor, k_cache: Tensor, v_cache: Tensor, slot_mapping_T: Tensor) -> None:
    """Stores keys and values in the slots of tokens, -1 for none; caches as for ``DecodeStep``.

    A step that is ``planned``, if it comes next on the stream, ranks pages meanwhile.
    """
    (T,), (_, K, D), overlap = slot_mapping_T.shape, key_TKD.shape, _can_overlap(k_cache)
    if T == 0:
        return
    cache.store_kernel[(T,)](
        key_TKD, value_TKD, k_cache, v_cache, slot_mapping_T, *key_TKD.stride()[:2], *value_TKD.stride()[:2],
        *k_cache.stride()[:3], K=K, KP=triton.next_power_of_2(K), D=D, DP=triton.next_power_of_2(D),
        TOKENS=k_cache.shape[2], PDL=overlap, launch_pdl=overlap, num_warps=4,
    )  # fmt: skip


def _can_overlap(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _check_device(k_cache: Tensor) -> None:
    if k_cache.device.type == "cpu":
        if isinstance(kernels.attend_kernel, triton.JITFunction):  # not Triton's interpreter
            raise ValueError("the kernels run on a GPU, got tensors on the CPU; use implementation='reference'")
    elif k_cache.dtype == torch.float8_e4m3fn and torch.cuda.get_device_capability(k_cache.device) < (8, 9):
        raise ValueError("float8 caches need a GPU of compute capability 8.9 or later; store them in bfloat16")


def _check_cache(k_cache: Tensor, landmark_cache: Tensor, layout: PageLayout) -> int:
    """Pages in a block, after checking that the kernels can serve this cache."""
    blocks, K, block_tokens, D = k_cache.shape
    P = layout.page_size
    if layout.score != "mean_key":
        raise ValueError(f"the kernels rank by mean_key, got a layout with score {layout.score!r}")
    if P not in PAGE_SIZES or block_tokens % P:
        raise ValueError(f"pages of {P} tokens in blocks of {block_tokens}: expected a divisor among {PAGE_SIZES}")
    if D not in HEAD_DIMS:
        raise ValueError(f"head dim {D} has no kernel, expected one of {HEAD_DIMS}; use implementation='reference'")
    if k_cache.dtype not in (*QUERY_DTYPES, torch.float8_e4m3fn):
        raise ValueError(f"caches must be float16, bfloat16 or float8_e4m3fn, got {k_cache.dtype}")
    if landmark_cache.shape != (blocks, block_tokens // P, K, D) or landmark_cache.dtype != k_cache.dtype:
        raise ValueError(
            f"landmarks must be {(blocks, block_tokens // P, K, D)} in {k_cache.dtype}, got "
            f"{tuple(landmark_cache.shape)} in {landmark_cache.dtype}"
        )
    if k_cache.stride(3) != 1 or landmark_cache.stride(3) != 1:
        raise ValueError("keys and landmarks must be contiguous along the head dim")
    return block_tokens // P


def _check_decode(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table_BM: Tensor,
    length_B: Tensor,
    top_k_B: Tensor,
    out_BHD: Tensor,
    workspace: DecodeWorkspace,
    pages: int,
) -> None:
    B, H, D = q_BHD.shape
    K = k_cache.shape[1]
    _check_device(k_cache)
    if q_BHD.dtype not in QUERY_DTYPES or k_cache.dtype not in (q_BHD.dtype, torch.float8_e4m3fn):
        raise ValueError(f"queries must be float16 or bfloat16, as is the cache unless it is float8, got {q_BHD.dtype}")
    if v_cache.shape != k_cache.shape or v_cache.dtype != k_cache.dtype or k_cache.shape[3] != D or H % K:
        raise ValueError(
            f"shapes must agree, got q {tuple(q_BHD.shape)}, k {tuple(k_cache.shape)}, v {tuple(v_cache.shape)}"
        )
    if v_cache.stride() != k_cache.stride():
        raise ValueError(f"keys and values must be strided alike, got {k_cache.stride()} and {v_cache.stride()}")
    if v_cache.dtype == torch.float8_e4m3fn and any(stride % 2 for stride in v_cache.stride()[:3]):
        raise ValueError(f"float8 values are read in pairs and need even strides, got {v_cache.stride()}")
    if out_BHD.shape != q_BHD.shape or not q_BHD.stride(2) == v_cache.stride(3) == out_BHD.stride(2) == 1:
        raise ValueError(f"q, v and out must be contiguous along the head dim, out {tuple(q_BHD.shape)} like q")
    for name, x in (("block_table_BM", block_table_BM), ("length_B", length_B), ("top_k_B", top_k_B)):
        if x.dtype != torch.int32 or x.shape[0] != B or x.stride(-1) != 1:
            raise ValueError(f"{name} must be contiguous int32 with {B} rows, got {x.dtype} {tuple(x.shape)}")
    if (workspace.kv_heads, workspace.group, workspace.head_dim) != (K, H // K, D) or H // K > MAX_GROUP:
        raise ValueError(
            f"{K} kv heads, group {H // K}, head dim {D}, but the workspace is for {workspace.kv_heads}, "
            f"{workspace.group}, {workspace.head_dim}; groups are at most {MAX_GROUP}"
        )
    if workspace.max_batch < B or workspace.max_pages < pages:
        raise ValueError(
            f"{B} sequences of up to {pages} pages do not fit a workspace for {workspace.max_batch} of "
            f"{workspace.max_pages}; make a larger one"
        )
