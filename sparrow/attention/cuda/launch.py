"""Launcher of the CUDA kernel: what it can serve, how a batch is cut into programs, what it is handed.

Shapes as in ``attention/triton/launch.py``, whose plan of a batch and scratch memory it shares.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from typing import Any

import torch

from sparrow.attention.cuda.compile import Kernel
from sparrow.attention.triton.launch import QUERY_DTYPES, DecodeStep
from sparrow.attention.triton.tuning import DeviceLimits, LaunchConfig

PAGE_SIZE, HEAD_DIMS, MAX_GROUP = 16, (64, 128), 8
FEW = 0.3  # items per multiprocessor
BINS, CANDIDATES = 1024, 256
SHARED = 16  # words of decode.cu's struct ``Shared``, besides 3 for each warp


@dataclass(frozen=True)
class CudaConfig:
    """How one decode step is cut into programs."""

    warps: int  # of a program: a power of 2
    stages: int  # pages in flight per warp
    resident: int  # programs that are to fit on a multiprocessor
    parts: int = 1  # that every row is cut into, about; if 1, those far longer than the mean are
    part_pages: int = 8  # kept pages worth a program of their own

    def shared_bytes(self, head_dim: int, capacity: int) -> int:
        """Shared memory of a program whose rows have up to ``capacity`` pages."""
        ring = self.warps * self.stages * 2 * PAGE_SIZE * 2 * head_dim
        return ring + capacity * 4 + capacity // 4 + BINS * 4 + CANDIDATES * 8 + 4 * SHARED + 12 * self.warps


@cache
def choose(items: int, head_dim: int, capacity: int, limits: DeviceLimits) -> CudaConfig:
    """The configuration for so many sequences x kv heads, of up to ``capacity`` pages."""
    if items <= limits.multiprocessors:
        config = CudaConfig(warps=8, stages=3, resident=1)
    else:  # between one and one and a half for each multiprocessor, whole rows would leave a third of them idle
        config = CudaConfig(warps=4, stages=3, resident=2, parts=4 if items <= 1.5 * limits.multiprocessors else 1)
    while config.shared_bytes(head_dim, capacity) > (limits.shared_memory + 1024) // config.resident - 1024:
        config = replace(config, stages=config.stages - 1) if config.stages > 1 else replace(config, resident=1)
    return config


class _Arguments(ctypes.Structure):
    """``Args`` of decode.cu."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (
            "q", "k", "v", "marks", "table", "out", "rows", "partial", "stats", "ready", "counters", "plan",
        )),
        *((name, ctypes.c_longlong) for name in (
            "q_row", "q_head", "block", "head", "token", "mark_block", "mark_page", "mark_head", "table_row", "out_row",
            "out_head", "rows_row",
        )),
        ("scale_log2", ctypes.c_float), ("v_scale", ctypes.c_float),
        ("count", ctypes.c_int), ("early", ctypes.c_int), ("capacity", ctypes.c_int),
    )  # fmt: skip


class CudaStep(DecodeStep):
    """A decode step by the CUDA kernel.

    A few rows leave most multiprocessors idle unless several programs rank one, which Triton's launches do: they are
    taken then, unless a ``config`` is given.

    Raises ValueError: what the kernel cannot serve.
    """

    cuda: CudaConfig | None

    def configure(self, config: Any) -> LaunchConfig:
        """What the plan of the batch is to know of ``config``, or of the shipped one."""
        self._check()
        given: CudaConfig | None = config
        if given is None and self.items <= FEW * self.limits.multiprocessors:
            self.cuda = None
            return super().configure(None)
        self.capacity = -(-self.pages // 32) * 32
        self.cuda = given or choose(self.items, self.shape["D"], self.capacity, self.limits)
        return _division(self.cuda, self.items, self.shape["K"], self.limits.multiprocessors)

    def _check(self) -> None:
        shape, (keys, values) = self.shape, self.caches
        if why_not := refusal(shape["P"], shape["D"], shape["G"], keys.dtype, self.q.device):
            raise ValueError(why_not)
        tensors = (("keys", keys), ("values", values), ("landmarks", self.landmarks), ("queries", self.q))
        for name, x in tensors:
            if x.data_ptr() % 16 or any(stride % 8 for stride in x.stride()[:-1]):
                raise ValueError(f"the CUDA kernel copies 16 bytes at a time: {name} must be aligned to that")

    def attend(self) -> None:
        """Ranks and attends, in one launch; a few rows are ranked before."""
        if self.cuda is None:
            return super().attend()
        w, shape, c = self.workspace, self.shape, self.cuda
        defines = {name: shape[name] for name in ("D", "G", "K", "PER_BLOCK", "SINK", "RECENT")}
        defines |= dict(
            BF16=int(self.q.dtype == torch.bfloat16), WARPS=c.warps, STAGES=c.stages, RESIDENT=c.resident,
            BINS=BINS, CANDIDATES=CANDIDATES,
        )  # fmt: skip
        kernel = _kernel(tuple(defines.items()), c.shared_bytes(shape["D"], self.capacity), self.q.device)
        tensors = (
            self.q, *self.caches, self.landmarks, self.table, self.out, w.rows, w.partial, w.stats,
            *w.counters, w.plan,
        )  # fmt: skip
        strides = (
            *self.q.stride()[:2], *self.kv_strides, *self.landmarks.stride()[:3], self.table.stride(0),
            *self.out.stride()[:2], w.rows.stride(0),
        )  # fmt: skip
        arguments = _Arguments(
            *(x.data_ptr() for x in tensors), *strides, *self.scales, len(self.table), self.early, self.capacity
        )
        kernel(self.items + self.config.shares, 32 * c.warps, arguments)


@cache
def _kernel(defines: tuple[tuple[str, int], ...], shared_bytes: int, device: torch.device) -> Kernel:
    return Kernel("decode.cu", "attend", dict(defines), shared_bytes, device)


@cache
def _division(config: CudaConfig, items: int, kv_heads: int, multiprocessors: int) -> LaunchConfig:
    """What the plan of a batch is to know. Parts wait for their row's first, which starts before and never waits."""
    shares, places = min(2, config.resident) * multiprocessors - kv_heads, config.resident * multiprocessors
    if config.parts > 1:
        shares, places = (config.parts - 1) * items, 2**30  # as small as that many parts allow
    return LaunchConfig(
        fused=True, score_pages=16, score_stages=1, rank_splits=1, rank_warps=4, attend_tokens=PAGE_SIZE,
        attend_stages=config.stages, shares=max(1, shares // kv_heads) * kv_heads, attend_warps=config.warps,
        part_tokens=config.part_pages * PAGE_SIZE, registers=255, places=places,
    )  # fmt: skip


def refusal(page_size: int, head_dim: int, group: int, dtype: torch.dtype, device: torch.device) -> str:
    """Why the kernel cannot serve such a model there, in a sentence; empty if it can."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) != (9, 0):
        return "the CUDA kernel is for Hopper GPUs (H100, H200); take Triton's"
    if find_spec("cuda") is None or find_spec("cuda.bindings") is None:
        return "the CUDA kernel is compiled with cuda-bindings, which are not installed; take Triton's"
    if page_size != PAGE_SIZE or head_dim not in HEAD_DIMS or group > MAX_GROUP or dtype not in QUERY_DTYPES:
        return (
            f"the CUDA kernel takes pages of {PAGE_SIZE}, head dims {HEAD_DIMS}, groups up to {MAX_GROUP} and 16-bit "
            f"caches, got pages of {page_size}, head dim {head_dim}, group {group} and {dtype}; take Triton's"
        )
    return ""
