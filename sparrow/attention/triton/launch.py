"""Launchers for the Triton kernels. They check whatever can be checked without a device sync,
choose tile sizes, and launch.

Shapes: as in ``attention/decode.py``; in ``store_tokens``, T is the number of tokens to store.
"""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from sparrow.attention.decode import (
    CachedLayers,
    CacheScales,
    DecodeBatch,
    DecodeWorkspace,
    check_cache,
    check_for_kernels,
    device_limits,
    fp8_lacking,
)
from sparrow.attention.division import Division, divide
from sparrow.attention.int8 import BIAS, exponent_limits
from sparrow.attention.pages import PageLayout
from sparrow.attention.triton import cache, kernels, saved
from sparrow.attention.triton.tuning import LaunchConfig, choose


def check(batch: DecodeBatch, workspace: DecodeWorkspace | None) -> None:
    """Raise ValueError if these kernels don't support the batch."""
    check_for_kernels(batch, workspace)
    check_device(batch.k_cache.device)
    _check_fp8(batch.k_cache, batch.layout)


def run(
    batch: DecodeBatch,
    workspace: DecodeWorkspace | None,
    reuse_plan: bool = False,
    config: LaunchConfig | None = None,
) -> Tensor:
    """Compute one decode step (see ``sparrow.attention.paged_decode``). Tests pass ``config`` to
    override the default configuration.

    With ``reuse_plan``, ranking may start before the previous launch has ended. Only
    ``store_tokens`` allows this, and it must then store only the newest tokens.
    """
    assert workspace is not None  # ``check`` would have raised
    launches = Launches(batch, workspace, config)
    if not reuse_plan:
        launches.plan()
    launches.rank(rank_before_wait=reuse_plan)
    launches.attend()
    return batch.out_BHD


class Launches:
    """The kernel launches of a decode step, as separate methods so that benchmarks can time them
    separately.
    """

    def __init__(
        self, batch: DecodeBatch, workspace: DecodeWorkspace, config: LaunchConfig | None = None
    ) -> None:
        self.batch = batch
        self.workspace = workspace
        layout = batch.layout
        D = batch.head_dim
        padded = triton.next_power_of_2(D)
        columns = batch.group * batch.tokens
        padded_columns = max(16, triton.next_power_of_2(columns))
        shipped = choose(
            batch.items,
            batch.kv_heads,
            padded * batch.k_cache.element_size(),
            device_limits(batch.q_BHD.device),
            padded_columns,
            padded * batch.q_BHD.element_size(),
        )
        self.config = config or saved.tuned(batch, shipped)
        self.constants = dict(
            K=batch.kv_heads,
            G=batch.group,
            T=batch.tokens,
            C=columns,
            CP=padded_columns,
            D=D,
            DP=padded,
            P=layout.page_size,
            PER_BLOCK=batch.pages_per_block,
            SINK=layout.sink_pages,
            RECENT=layout.recent_pages,
        )
        # From Hopper on, a kernel can start before the previous one has ended, and wait for it on
        # the device.
        overlap = _can_overlap(batch.q_BHD)
        self.options = dict(PDL=overlap, launch_pdl=overlap)

    def plan(self) -> None:
        """Split the batch across attention programs. The plan is valid for all layers with these
        lengths and budgets.
        """
        c = self.config
        division = Division(c.extra_programs, c.resident_programs, c.part_tokens, ranks=False)
        divide(self.batch, self.workspace, division)

    def rank(self, rank_before_wait: bool = False) -> None:
        """Rank pages, and fill the workspace's lists of kept pages."""
        b = self.batch
        w = self.workspace
        c = self.config
        scales = b.cache_scales if b.k_cache.dtype == torch.int8 else None
        kernels.rank_kernel[(b.items, c.rank_splits)](
            b.q_BHD,
            b.k_cache,
            b.landmark_cache,
            scales and scales.k,
            b.block_table_BM,
            b.length_B,
            b.top_k_B,
            b.head_budgets_K,
            w.rows,
            w.counters[0],
            c.rank_splits,
            int(rank_before_wait),
            *b.q_BHD.stride()[:2],
            *b.k_cache.stride()[:3],
            *b.landmark_cache.stride()[:3],
            *_strides(scales),
            b.block_table_BM.stride(0),
            w.rows.stride(0),
            BLOCK=max(16, triton.next_power_of_2(b.max_pages)),
            SCORE_TILE=c.score_pages,
            SCORE_STAGES=c.score_stages + 1,
            **self.constants,
            **self.options,
            num_warps=c.rank_warps,
        )

    def attend(self) -> None:
        """Compute attention over the kept pages."""
        b = self.batch
        w = self.workspace
        c = self.config
        scales = self.batch.cache_scales
        kernels.attend_kernel[(b.items + c.extra_programs,)](
            b.q_BHD,
            b.k_cache,
            b.v_cache,
            scales and scales.k,
            scales and scales.v,
            b.head_budgets_K,
            b.block_table_BM,
            b.out_BHD,
            w.rows,
            w.partial,
            w.stats,
            w.counters[1],
            w.plan,
            len(b.length_B),
            *b.q_BHD.stride()[:2],
            *b.k_cache.stride()[:3],
            *_strides(scales),
            b.block_table_BM.stride(0),
            *b.out_BHD.stride()[:2],
            w.rows.stride(0),
            b.scale * math.log2(math.e),
            TILE=c.attend_tokens,
            **self.constants,
            **self.options,
            num_warps=c.attend_warps,
            # Page ids are loaded one step before their tile.
            num_stages=2 * c.attend_stages + 1,
            maxnreg=c.registers,
        )


def update_landmarks(layers: CachedLayers, slot_mapping_T: Tensor, layout: PageLayout) -> None:
    """Recompute the landmarks of the pages completed by these slots; see
    ``sparrow.attention.update_landmarks``.
    """
    k_cache = layers.keys
    landmark_cache = layers.landmarks
    check_cache(k_cache, landmark_cache, layout)
    check_device(k_cache.device)
    _check_fp8(k_cache, layout)
    T = slot_mapping_T.shape[0]
    K = k_cache.shape[1]
    D = k_cache.shape[3]
    if T == 0:
        return
    slots = layout.page_size  # so that each program gets about one page in prefill
    cache.landmark_kernel[(triton.cdiv(T, slots), K, len(layers.caches))](
        k_cache,
        landmark_cache,
        layers.scales,
        layers.distance_L3,
        slot_mapping_T,
        T,
        *k_cache.stride()[:3],
        *landmark_cache.stride()[:3],
        *((0, 0) if layers.scales is None else layers.scales.stride()[:2]),
        D=D,
        DP=triton.next_power_of_2(D),
        P=layout.page_size,
        PER_BLOCK=landmark_cache.shape[1],
        SLOTS=slots,
        num_warps=1,
    )


def store_tokens(
    key_TKD: Tensor,
    value_TKD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slot_mapping_T: Tensor,
    scales: CacheScales | None = None,
    clipped: Tensor | None = None,
) -> None:
    """Store each token's keys and values in its slot, skipping tokens with slot -1. For the cache
    layout, see ``DecodeBatch``.

    A float8_e4m3fn cache needs ``scales`` and ``clipped``, int64 ``[1]``. Keys and values beyond
    448 times their scale are clamped, and the number of affected tokens is added to ``clipped``.
    For an int8 cache, ``scales`` is written too. If the next launch on the stream is a decode step
    with ``reuse_plan``, it may start ranking pages while tokens are still being stored.
    """
    (T,) = slot_mapping_T.shape
    (_, K, D) = key_TKD.shape
    overlap = _can_overlap(k_cache)
    if T == 0:
        return
    least, most = (exponent + BIAS for exponent in exponent_limits(key_TKD.dtype))
    cache.store_kernel[(T,)](
        key_TKD,
        value_TKD,
        k_cache,
        v_cache,
        scales and scales.k,
        scales and scales.v,
        clipped,
        slot_mapping_T,
        *key_TKD.stride()[:2],
        *value_TKD.stride()[:2],
        *k_cache.stride()[:3],
        *_strides(scales),
        K=K,
        KP=triton.next_power_of_2(K),
        D=D,
        DP=triton.next_power_of_2(D),
        TOKENS=k_cache.shape[2],
        LEAST=least,
        MOST=most,
        PDL=overlap,
        launch_pdl=overlap,
        num_warps=4,
    )


def _strides(scales: CacheScales | None) -> tuple[int, int]:
    return (0, 0) if scales is None else scales.strides


def _can_overlap(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (9, 0)


def check_device(device: torch.device) -> None:
    """Raise ValueError if Triton kernels don't run on ``device``. In Triton's interpreter, they
    also run on a CPU.
    """
    interpreted = not isinstance(kernels.attend_kernel, triton.JITFunction)
    if device.type == "cpu" and not interpreted:
        raise ValueError(
            "the Triton kernels need a GPU, got tensors on the CPU; use implementation='reference'"
        )


def _check_fp8(k_cache: Tensor, layout: PageLayout) -> None:
    if lacking := fp8_lacking(k_cache.device, k_cache.dtype, layout.landmark_dtype):
        raise ValueError(lacking)
