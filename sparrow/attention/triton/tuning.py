"""Launch configurations for an H200, adapted to other devices' limits. To time them, run
``benchmarks/decode_kernels.py``.

Nothing is tuned at run time, but ``sparrow tune`` can choose variants of these configurations ahead
of time (see ``saved``). On anything other than an H100 or H200 (such as A100, L40S or B200), the
configurations respect the device's limits, but are untested.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from sparrow.attention.decode import DeviceLimits


@dataclass(frozen=True)
class LaunchConfig:
    """Launch parameters that control how a decode step is split into programs."""

    score_pages: int  # landmarks per tile
    score_stages: int  # landmark tiles in flight
    rank_splits: int  # programs scoring the pages of an item
    rank_warps: int  # warps per ranking program
    attend_tokens: int  # tokens per tile of keys and values
    attend_stages: int  # tiles of keys and values in flight
    # attention programs beyond one per item; a multiple of the number of KV heads
    extra_programs: int
    attend_warps: int  # warps per attention program
    part_tokens: int  # minimum number of kept tokens per part
    # max registers per attention thread, low enough for the resident programs to fit
    registers: int
    resident_programs: int  # attention programs that run at the same time


@dataclass(frozen=True)
class _Tiles:
    """Tile sizes for 256-byte heads, and how many attention programs should fit on an SM."""

    resident: int
    score_pages: int
    score_stages: int
    attend_tokens: int
    attend_stages: int


# If there are few programs, each needs many bytes in flight. If there are many, several must fit on
# an SM.
ONE = _Tiles(1, 128, 3, 128, 2)
THREE = _Tiles(3, 128, 2, 64, 2)
FOUR = _Tiles(4, 64, 2, 64, 1)
ATTEND_WARPS = 4
MAX_SPLITS = 16


def _tiles(items: int, multiprocessors: int) -> _Tiles:
    filled = items / multiprocessors
    if filled <= 1:
        return ONE

    def last_wave(resident: int) -> float:
        """Return the average occupancy over all waves. The average is low if the last wave is
        nearly empty.
        """
        return filled / resident / math.ceil(filled / resident)

    return FOUR if last_wave(4) > last_wave(3) else THREE


def extra_programs(items: int, kv_heads: int, multiprocessors: int) -> int:
    """Return how many programs to launch beyond one per item, for additional parts of rows. These
    programs fill the SMs that have no item. With more items than SMs, there are about two such
    programs per SM.

    More programs wouldn't help. A grid that is too large to run all at once is spread unevenly over
    the SMs, even if most of its programs have nothing to do.
    """
    room = multiprocessors - items if items <= multiprocessors else 2 * multiprocessors - kv_heads
    return max(1, room // kv_heads) * kv_heads


def rows_per_tile(of_256_bytes: int, head_bytes: int) -> int:
    """Convert a tile size from 256-byte rows to rows of ``head_bytes`` bytes, clamped to the range
    that the kernels support.
    """
    return max(16, min(128, of_256_bytes * 256 // head_bytes))


def registers_per_thread(warps: int, resident: int) -> int:
    """Return how many registers a thread may use so that ``resident`` programs of ``warps`` warps
    fit on an SM.
    """
    threads = 32 * warps * resident
    return min(255, 65536 // threads // 8 * 8)


@cache
def choose(
    items: int,
    kv_heads: int,
    head_bytes: int,
    limits: DeviceLimits,
    queries: int = 16,
    query_bytes: int = 512,
) -> LaunchConfig:
    """Choose the configuration for a batch of ``items`` items (sequences x ``kv_heads``).

    ``head_bytes`` is the size of a cached head in bytes, a power of 2. ``queries`` is the number of
    queries per item, and ``query_bytes`` is the size of a query in bytes. All three include
    padding.

    The result only depends on shapes, so it stays valid when a captured graph is replayed.
    """
    tiles = _tiles(items, limits.multiprocessors)
    tokens = rows_per_tile(tiles.attend_tokens, head_bytes)
    # Tiles are capped at 128 rows. If heads are so narrow that tiles reach the cap, keep more tiles
    # in flight instead.
    more = max(1, min(2, 256 * tiles.attend_tokens // (head_bytes * tokens)))
    config = LaunchConfig(
        score_pages=rows_per_tile(tiles.score_pages, head_bytes),
        score_stages=tiles.score_stages * more,
        rank_splits=max(1, min(MAX_SPLITS, limits.multiprocessors // items)),
        rank_warps=4,
        attend_tokens=tokens,
        attend_stages=tiles.attend_stages * more,
        extra_programs=extra_programs(items, kv_heads, limits.multiprocessors),
        attend_warps=ATTEND_WARPS,
        part_tokens=tokens,
        registers=registers_per_thread(ATTEND_WARPS, tiles.resident),
        resident_programs=tiles.resident * limits.multiprocessors,
    )
    return _fit(config, head_bytes, queries, query_bytes, limits)


def attend_bytes(config: LaunchConfig, head_bytes: int, queries: int, query_bytes: int) -> int:
    """Return an upper bound on an attention program's shared memory, in bytes: keys and values in
    flight, queries, one tile's weights, and page ids. The bound allows at least 16 KiB for
    everything other than keys and values.
    """
    tiles = config.attend_stages * config.attend_tokens * 2 * head_bytes
    weights = queries * config.attend_tokens * 2
    return tiles + max(16 * 1024, queries * query_bytes + weights + 16 * config.attend_tokens)


def _fit(
    config: LaunchConfig, head_bytes: int, queries: int, query_bytes: int, limits: DeviceLimits
) -> LaunchConfig:
    """Reduce the number of tiles in flight, then the tile size, until the buffers fit."""
    spare = limits.shared_memory - 16 * 1024  # leave 16 KiB for page ids and reductions
    while attend_bytes(config, head_bytes, queries, query_bytes) > limits.shared_memory:
        if config.attend_stages > 1:
            config = replace(config, attend_stages=config.attend_stages - 1)
        else:
            config = replace(config, attend_tokens=config.attend_tokens // 2)
    while config.score_stages * config.score_pages * head_bytes > spare:
        config = replace(config, score_pages=config.score_pages // 2)
    return config
