"""Launch the CUDA kernel: check its limits, prepare its arguments, and split the batch.

Shapes: as in ``attention/decode.py``.
"""

from __future__ import annotations

import ctypes
import math
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from sparrow.attention.cuda.compile import Kernel
from sparrow.attention.decode import (
    CACHES_IN_8_BITS,
    MAX_GROUP,
    QUERY_DTYPES,
    DecodeBatch,
    DecodeWorkspace,
    DeviceLimits,
    check_for_kernels,
    device_limits,
)
from sparrow.attention.division import Division, divide
from sparrow.attention.pages import FP8

PAGE_SIZE = 16
HEAD_DIMS = (64, 128, 256)
# Maximum number of queries (group x new tokens) that read the same pages, by head dim. Registers
# are the limit, because they hold each query's accumulator.
MAX_QUERIES = {64: 32, 128: 32, 256: 16}
BINS = 1024
CANDIDATES = 256
SHARED = 16  # words in ``Shared`` in program.cuh, not counting 3 words per warp
# Below this number of items per SM, Triton is faster because it ranks each row with several
# programs.
FEW_ITEMS = 0.3


@dataclass(frozen=True)
class CudaConfig:
    """Launch parameters that control how a decode step is split into programs."""

    warps: int  # warps per program, a power of 2
    stages: int  # pages in flight per warp
    resident: int  # programs that should fit on an SM
    # rough number of parts per row; if 1, only rows much longer than average are split
    parts: int = 1
    part_pages: int = 8  # minimum number of kept pages per part
    # whether every part of a row ranks the row's pages; if not, the first part ranks them and the
    # others wait for its list
    each_ranks: bool = False

    def shared_bytes(self, key_bytes: int, capacity: int) -> int:
        """Compute a program's shared memory, in bytes, for rows of up to ``capacity`` pages. A key
        takes ``key_bytes`` bytes, including its scale.
        """
        ring = self.warps * self.stages * 2 * PAGE_SIZE * key_bytes
        pages = capacity * 4 + capacity // 4
        selection = BINS * 4 + CANDIDATES * 8
        return ring + pages + selection + 4 * SHARED + 12 * self.warps

    def division(self, items: int, kv_heads: int, multiprocessors: int) -> Division:
        """Return the ``Division`` used to plan a step.

        The first part of a row may rank pages for the row's other parts. The first part starts
        before the others and never waits for them, so there's no deadlock.
        """
        if self.parts > 1:
            # Treat all programs as resident, so that parts are as small as the number of programs
            # allows.
            extra = (self.parts - 1) * items
            resident = 2**30
        else:
            extra = min(2, self.resident) * multiprocessors - kv_heads
            resident = self.resident * multiprocessors
        return Division(
            extra_programs=max(1, extra // kv_heads) * kv_heads,
            resident_programs=resident,
            part_tokens=self.part_pages * PAGE_SIZE,
            ranks=True,
        )


@cache
def choose_config(
    items: int,
    head_dim: int,
    capacity: int,
    limits: DeviceLimits,
    dtype: torch.dtype = torch.bfloat16,
    queries: int = 1,
) -> CudaConfig:
    """Choose the configuration for a batch whose cache has dtype ``dtype``.

    ``items`` is the number of items (sequences x kv heads). ``queries`` (group x new tokens) and
    ``capacity`` (the maximum number of pages) are per item.
    """
    if items <= limits.multiprocessors:
        config = CudaConfig(warps=8, stages=3, resident=1)
    else:
        # With 1 to 1.5 items per SM, a third of the SMs would be idle unless rows are split.
        parts = 4 if items <= 1.5 * limits.multiprocessors else 1
        config = CudaConfig(warps=4, stages=3, resident=2, parts=parts)
    # Use more stages for smaller elements and fewer warps for larger heads, to keep the bytes in
    # flight constant.
    config = replace(config, stages=config.stages * 2 // dtype.itemsize)
    if head_dim * dtype.itemsize > 256:
        config = replace(config, warps=config.warps // 2)

    def fits(config: CudaConfig) -> bool:
        needed = config.shared_bytes(key_bytes(head_dim, dtype), capacity)
        return needed <= (limits.shared_memory + 1024) // config.resident - 1024

    # The page buffers must be large enough to hold the queries' results in float32.
    least = -(-max(16, queries) // (8 * dtype.itemsize))
    while config.stages > least and not fits(config):
        config = replace(config, stages=config.stages - 1)
    return config if fits(config) else replace(config, resident=1)


def key_bytes(head_dim: int, dtype: torch.dtype) -> int:
    """Return the bytes of a cached key per token and head, including the scale of an int8 key."""
    return head_dim * dtype.itemsize + (dtype == torch.int8)


def few_rows(kv_heads: int, device: torch.device) -> int:
    """Return the largest batch size at which the Triton kernels still beat this kernel."""
    return int(FEW_ITEMS * device_limits(device).multiprocessors) // kv_heads


def unsupported_reason(
    page_size: int,
    head_dim: int,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int = 1,
) -> str | None:
    """Return a sentence that says why the kernel can't decode this kind of model on ``device`` with
    ``tokens`` new tokens per step, or None if it can.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "the CUDA kernel needs a Hopper GPU (H100, H200); use the Triton kernels"
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return (
            "compiling the CUDA kernel needs cuda-bindings, which is not installed; install it, or "
            "use the Triton kernels"
        )
    if (
        page_size != PAGE_SIZE
        or head_dim not in HEAD_DIMS
        or group > MAX_GROUP
        or dtype not in (*QUERY_DTYPES, *CACHES_IN_8_BITS)
    ):
        return (
            f"the CUDA kernel supports pages of {PAGE_SIZE}, head dims {HEAD_DIMS}, groups up to "
            f"{MAX_GROUP} and 16-bit or 8-bit caches, got pages of {page_size}, head dim "
            f"{head_dim}, group {group} and {dtype}; use the Triton kernels"
        )
    most = min(PAGE_SIZE, MAX_QUERIES[head_dim] // group)
    if tokens > most:
        return (
            f"with head dim {head_dim} and group {group}, the CUDA kernel decodes at most "
            f"{most} new tokens per sequence at a time, got {tokens}; use the Triton kernels"
        )
    return None


def check(batch: DecodeBatch, workspace: DecodeWorkspace | None) -> None:
    """Raise ValueError if this kernel doesn't support the batch."""
    check_for_kernels(batch, workspace)
    reason = unsupported_reason(
        batch.layout.page_size,
        batch.head_dim,
        batch.group,
        batch.k_cache.dtype,
        batch.q_BHD.device,
        batch.tokens,
    )
    if reason:
        raise ValueError(reason)
    tensors = dict(
        keys=batch.k_cache,
        values=batch.v_cache,
        landmarks=batch.landmark_cache,
        queries=batch.q_BHD,
    )
    if batch.cache_scales is not None and batch.k_cache.dtype == torch.int8:
        tensors |= {
            "scales of keys": batch.cache_scales.k,
            "scales of values": batch.cache_scales.v,
        }
    for name, x in tensors.items():
        if x.data_ptr() % 16 or any(stride * x.element_size() % 16 for stride in x.stride()[:-1]):
            raise ValueError(f"the CUDA kernel copies 16 bytes at a time; align {name} to 16 bytes")


def run(
    batch: DecodeBatch,
    workspace: DecodeWorkspace | None,
    reuse_plan: bool = False,
    config: CudaConfig | None = None,
) -> Tensor:
    """Compute one decode step (see ``sparrow.attention.paged_decode``). Tests pass ``config`` to
    override the default configuration.

    With ``reuse_plan``, ranking may start before the previous launch has ended. Only
    ``triton.store_tokens`` allows this, and it must then store only the newest tokens.
    """
    assert workspace is not None  # ``check`` would have raised
    launches = Launches(batch, workspace, config)
    if not reuse_plan:
        launches.plan()
    launches.attend(rank_before_wait=reuse_plan)
    return batch.out_BHD


class _Arguments(ctypes.Structure):
    """Keep in sync with the struct ``Args`` in program.cuh."""

    _fields_ = (
        *(
            (name, ctypes.c_void_p)
            for name in (
                "q",
                "k",
                "v",
                "landmarks",
                "table",
                "out",
                "rows",
                "partial",
                "stats",
                "ready",
                "counters",
                "plan",
                "k_scales",
                "v_scales",
                "head_budgets",
            )
        ),
        *(
            (name, ctypes.c_longlong)
            for name in (
                "q_row",
                "q_head",
                "block",
                "head",
                "token",
                "landmark_block",
                "landmark_page",
                "landmark_head",
                "table_row",
                "out_row",
                "out_head",
                "rows_row",
            )
        ),
        ("scale_log2", ctypes.c_float),
        ("count", ctypes.c_int),
        ("rank_before_wait", ctypes.c_int),
        ("capacity", ctypes.c_int),
        ("scale_block", ctypes.c_longlong),
        ("scale_head", ctypes.c_longlong),
    )


class Launches:
    """The two launches of a decode step, plan and attention. They are separate methods so that
    benchmarks can time them separately.
    """

    def __init__(
        self, batch: DecodeBatch, workspace: DecodeWorkspace, config: CudaConfig | None = None
    ) -> None:
        limits = device_limits(batch.q_BHD.device)
        self.batch = batch
        self.workspace = workspace
        self.capacity = -(-batch.max_pages // 32) * 32
        self.config = config or choose_config(
            batch.items,
            batch.head_dim,
            self.capacity,
            limits,
            batch.k_cache.dtype,
            batch.group * batch.tokens,
        )
        self.division = self.config.division(batch.items, batch.kv_heads, limits.multiprocessors)

    def plan(self) -> None:
        """Split the batch across programs. The plan is valid for all layers with the same lengths
        and budgets.
        """
        divide(self.batch, self.workspace, self.division)

    @property
    def defines(self) -> dict[str, int]:
        """Macros to compile the kernel with."""
        b = self.batch
        c = self.config
        return dict(
            D=b.head_dim,
            G=b.group,
            K=b.kv_heads,
            NEW_TOKENS=b.tokens,
            PER_BLOCK=b.pages_per_block,
            SINK=b.layout.sink_pages,
            RECENT=b.layout.recent_pages,
            BF16=int(b.q_BHD.dtype == torch.bfloat16),
            FP8_CACHE=int(b.k_cache.dtype == FP8),
            INT8_CACHE=int(b.k_cache.dtype == torch.int8),
            FP8_LANDMARKS=int(b.landmark_cache.dtype == FP8),
            WARPS=c.warps,
            STAGES=c.stages,
            RESIDENT=c.resident,
            EACH_RANKS=int(c.each_ranks),
            BINS=BINS,
            CANDIDATES=CANDIDATES,
        )

    def attend(self, rank_before_wait: bool = False) -> None:
        """Rank and select pages and compute attention, all in one launch."""
        b = self.batch
        w = self.workspace
        c = self.config
        scales = self.batch.cache_scales
        shared_bytes = c.shared_bytes(key_bytes(b.head_dim, b.k_cache.dtype), self.capacity)
        kernel = _kernel(tuple(self.defines.items()), shared_bytes, b.q_BHD.device)
        tensors = (
            b.q_BHD,
            b.k_cache,
            b.v_cache,
            b.landmark_cache,
            b.block_table_BM,
            b.out_BHD,
            w.rows,
            w.partial,
            w.stats,
            *w.counters,
            w.plan,
            scales and scales.k,
            scales and scales.v,
            b.head_budgets_K,
        )
        strides = (
            *b.q_BHD.stride()[:2],
            *b.k_cache.stride()[:3],
            *b.landmark_cache.stride()[:3],
            b.block_table_BM.stride(0),
            *b.out_BHD.stride()[:2],
            w.rows.stride(0),
        )
        arguments = _Arguments(
            *(None if x is None else x.data_ptr() for x in tensors),
            *strides,
            b.scale * math.log2(math.e),
            len(b.length_B),
            int(rank_before_wait),
            self.capacity,
            *((0, 0) if scales is None else scales.strides),
        )
        kernel(b.items + self.division.extra_programs, 32 * c.warps, arguments)


@cache
def _kernel(
    defines: tuple[tuple[str, int], ...], shared_bytes: int, device: torch.device
) -> Kernel:
    return Kernel("decode.cu", "attend", dict(defines), shared_bytes, device)
