"""Launch configurations for an H200, fitted to other devices' limits; ``benchmarks/kernels.py --tune`` sweeps them.

Nothing is tuned when a user starts. On anything but an H100 or H200 (A100, L40S, B200) the table is a start within
the device's limits and untested.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from sparrow.attention.decode import DeviceLimits


@dataclass(frozen=True)
class LaunchConfig:
    """How one decode step is cut into programs."""

    fused: bool  # one program ranks and attends for each item; else ranking and attention are two launches
    score_pages: int  # landmarks in a tile
    score_stages: int  # tiles of landmarks in flight
    rank_splits: int  # programs that score the pages of an item (two launches only)
    rank_warps: int  # warps of a ranking program (two launches only)
    attend_tokens: int  # tokens in a tile of keys and values
    attend_stages: int  # tiles of keys and values in flight
    extra_programs: int  # that attend besides one for each item, a multiple of the kv heads
    attend_warps: int  # warps of an attending program, and of a fused one
    part_tokens: int  # kept tokens worth a program of their own
    registers: int  # most registers of an attending thread, so that enough programs fit side by side
    resident_programs: int  # attending programs that run at once


@dataclass(frozen=True)
class _Row:
    """Tiles for heads of 256 bytes, up to so many items per multiprocessor; ``resident`` programs fit side by side."""

    items: float
    fused: bool
    resident: int
    score_pages: int
    score_stages: int
    attend_tokens: int
    attend_stages: int


# Few programs need many bytes in flight each; many need to fit side by side.
TABLE = (
    _Row(0.5, False, 1, 128, 3, 128, 2),
    _Row(1.0, True, 1, 128, 3, 128, 2),
    _Row(1.5, True, 3, 128, 2, 64, 2),
    _Row(2.0, True, 2, 128, 3, 64, 2),
    _Row(3.0, True, 3, 128, 2, 64, 2),
)
# Beyond the table three programs of a kind fit side by side, or four of a smaller one: the fuller last wave decides.
THREE, FOUR = TABLE[-1], _Row(math.inf, True, 4, 64, 2, 64, 1)
MAX_SPLITS = 16


def _row(filled: float) -> _Row:
    for row in TABLE:
        if filled <= row.items:
            return row
    return FOUR if filled / 4 / math.ceil(filled / 4) > filled / 3 / math.ceil(filled / 3) else THREE


def extra_programs(items: int, kv_heads: int, limits: DeviceLimits) -> int:
    """Programs for further parts of rows: as many as the items leave room for, where parts wait for nobody; in a fused
    launch two per multiprocessor, but never so many that they fill the device: they may wait for others to start.

    A grid beyond the device's room is spread unevenly, even if most of its programs find nothing to do.
    """
    row = _row(items / limits.multiprocessors)
    room = row.resident * limits.multiprocessors - items
    if row.fused:
        room = min(2, row.resident) * limits.multiprocessors - kv_heads
    return max(1, room // kv_heads) * kv_heads


@cache
def choose(items: int, kv_heads: int, head_bytes: int, limits: DeviceLimits) -> LaunchConfig:
    """The configuration for ``items`` (sequences x ``kv_heads``) and cached heads of ``head_bytes``, a power of 2.

    It depends on shapes alone, so that a captured graph replays what it was captured with.
    """
    row = _row(items / limits.multiprocessors)
    tokens = max(16, min(128, row.attend_tokens * 256 // head_bytes))
    # Tiles stop growing at 128 rows; heads narrower than that allows have more of them in flight.
    more = max(1, min(2, 256 * row.attend_tokens // (head_bytes * tokens)))
    config = LaunchConfig(
        fused=row.fused,
        score_pages=max(16, min(128, row.score_pages * 256 // head_bytes)),
        score_stages=row.score_stages * more,
        rank_splits=1 if row.fused else max(1, min(MAX_SPLITS, row.resident * limits.multiprocessors // items)),
        rank_warps=4,
        attend_tokens=tokens,
        attend_stages=row.attend_stages * more,
        extra_programs=extra_programs(items, kv_heads, limits),
        attend_warps=4,
        part_tokens=tokens,
        registers=min(255, 65536 // (128 * row.resident) // 8 * 8),
        resident_programs=row.resident * limits.multiprocessors,
    )
    return _fit(config, head_bytes, limits)


def _fit(config: LaunchConfig, head_bytes: int, limits: DeviceLimits) -> LaunchConfig:
    """``config`` with fewer tiles in flight, then smaller ones, until its buffers fit the device."""
    spare = limits.shared_memory - 16 * 1024  # queries, page ids and reductions
    while config.attend_stages * config.attend_tokens * 2 * head_bytes > spare:
        if config.attend_stages > 1:
            config = replace(config, attend_stages=config.attend_stages - 1)
        else:
            config = replace(config, attend_tokens=config.attend_tokens // 2)
    while config.score_stages * config.score_pages * head_bytes > spare:
        config = replace(config, score_pages=config.score_pages // 2)
    return config
