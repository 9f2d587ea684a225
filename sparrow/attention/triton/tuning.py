"""Launch configurations for an H200, fitted to other devices' limits;
``benchmarks/decode_kernels.py`` times them.

Nothing is tuned when a user starts. On anything but an H100 or H200 (A100, L40S, B200) they are an
untested start within the device's limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from sparrow.attention.decode import DeviceLimits


@dataclass(frozen=True)
class LaunchConfig:
    """The division of one decode step into programs."""

    score_pages: int  # landmarks in a tile
    score_stages: int  # tiles of landmarks in flight
    rank_splits: int  # programs that score the pages of an item
    rank_warps: int  # warps of a ranking program
    attend_tokens: int  # tokens in a tile of keys and values
    attend_stages: int  # tiles of keys and values in flight
    extra_programs: int  # attending programs besides one for each item; a multiple of the kv heads
    attend_warps: int  # warps of an attending program
    part_tokens: int  # kept tokens that are worth another program
    # most registers of an attending thread, so that enough programs fit side by side
    registers: int
    resident_programs: int  # attending programs that run at once


@dataclass(frozen=True)
class _Tiles:
    """Tiles for heads of 256 bytes, and the attending programs that are to fit on one processor."""

    resident: int
    score_pages: int
    score_stages: int
    attend_tokens: int
    attend_stages: int


# Few programs need many bytes in flight each; many need to fit side by side.
ONE = _Tiles(1, 128, 3, 128, 2)
THREE = _Tiles(3, 128, 2, 64, 2)
FOUR = _Tiles(4, 64, 2, 64, 1)
MAX_SPLITS = 16


def _tiles(items: int, multiprocessors: int) -> _Tiles:
    filled = items / multiprocessors
    if filled <= 1:
        return ONE

    def last_wave(resident: int) -> float:
        """Occupancy of the waves of programs, of which the last may be nearly empty."""
        return filled / resident / math.ceil(filled / resident)

    return FOUR if last_wave(4) > last_wave(3) else THREE


def extra_programs(items: int, kv_heads: int, multiprocessors: int) -> int:
    """Programs for further parts of rows: as many as the items leave room for or, if there are more
    items than multiprocessors, about two for every multiprocessor.

    A grid beyond the device's room is spread unevenly, even if most of its programs find nothing to
    do.
    """
    room = multiprocessors - items if items <= multiprocessors else 2 * multiprocessors - kv_heads
    return max(1, room // kv_heads) * kv_heads


@cache
def choose(items: int, kv_heads: int, head_bytes: int, limits: DeviceLimits) -> LaunchConfig:
    """The configuration for ``items`` (sequences x ``kv_heads``) and cached heads of
    ``head_bytes``, a power of 2.

    It depends on shapes alone, so that a captured graph replays what it was captured with.
    """
    tiles = _tiles(items, limits.multiprocessors)
    tokens = max(16, min(128, tiles.attend_tokens * 256 // head_bytes))
    # Tiles stop growing at 128 rows; heads too narrow to fill larger ones have more of them in
    # flight.
    more = max(1, min(2, 256 * tiles.attend_tokens // (head_bytes * tokens)))
    config = LaunchConfig(
        score_pages=max(16, min(128, tiles.score_pages * 256 // head_bytes)),
        score_stages=tiles.score_stages * more,
        rank_splits=max(1, min(MAX_SPLITS, limits.multiprocessors // items)),
        rank_warps=4,
        attend_tokens=tokens,
        attend_stages=tiles.attend_stages * more,
        extra_programs=extra_programs(items, kv_heads, limits.multiprocessors),
        attend_warps=4,
        part_tokens=tokens,
        registers=min(255, 65536 // (128 * tiles.resident) // 8 * 8),
        resident_programs=tiles.resident * limits.multiprocessors,
    )
    return _fit(config, head_bytes, limits)


def _fit(config: LaunchConfig, head_bytes: int, limits: DeviceLimits) -> LaunchConfig:
    """``config`` with fewer tiles in flight, then smaller ones, until its buffers fit."""
    spare = limits.shared_memory - 16 * 1024  # queries, page ids and reductions
    while config.attend_stages * config.attend_tokens * 2 * head_bytes > spare:
        if config.attend_stages > 1:
            config = replace(config, attend_stages=config.attend_stages - 1)
        else:
            config = replace(config, attend_tokens=config.attend_tokens // 2)
    while config.score_stages * config.score_pages * head_bytes > spare:
        config = replace(config, score_pages=config.score_pages // 2)
    return config
