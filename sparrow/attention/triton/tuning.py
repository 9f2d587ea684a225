"""Launch configurations for an H200, which are adapted to the limits of other devices.
``benchmarks/decode_kernels.py`` times them.

Nothing is tuned at run time. The command ``sparrow tune`` can choose variants of these
configurations beforehand (see ``saved``). On devices other than an H100 or H200 (such as A100, L40S
or B200), the configurations respect the device's limits but are untested.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cache

from sparrow.attention.decode import DeviceLimits


@dataclass(frozen=True)
class LaunchConfig:
    """Launch parameters, which determine how a decode step is divided into programs."""

    score_pages: int  # number of landmarks per tile
    score_stages: int  # number of tiles of landmarks in flight
    rank_splits: int  # number of programs that score the pages of an item
    rank_warps: int  # number of warps per ranking program
    attend_tokens: int  # number of tokens per tile of keys and values
    attend_stages: int  # number of tiles of keys and values in flight
    # number of attention programs beyond one per item; a multiple of the number of KV heads
    extra_programs: int
    attend_warps: int  # number of warps per attention program
    part_tokens: int  # minimum number of kept tokens per part
    # maximum number of registers per attention thread, low enough for the resident programs to fit
    registers: int
    resident_programs: int  # number of attention programs that run at the same time


@dataclass(frozen=True)
class _Tiles:
    """Tile sizes for heads of 256 bytes, and the number of attention programs that should fit on a
    multiprocessor.
    """

    resident: int
    score_pages: int
    score_stages: int
    attend_tokens: int
    attend_stages: int


# If there are few programs, each needs many bytes in flight; if there are many, several must fit on
# a multiprocessor.
ONE = _Tiles(1, 128, 3, 128, 2)
THREE = _Tiles(3, 128, 2, 64, 2)
FOUR = _Tiles(4, 64, 2, 64, 1)
MAX_SPLITS = 16


def _tiles(items: int, multiprocessors: int) -> _Tiles:
    filled = items / multiprocessors
    if filled <= 1:
        return ONE

    def last_wave(resident: int) -> float:
        """Return the average occupancy of the waves in which programs run. It is low if the last
        wave is nearly empty.
        """
        return filled / resident / math.ceil(filled / resident)

    return FOUR if last_wave(4) > last_wave(3) else THREE


def extra_programs(items: int, kv_heads: int, multiprocessors: int) -> int:
    """Return how many programs compute further parts of rows, in addition to the one program per
    item: one for each multiprocessor without an item or, if there are more items than
    multiprocessors, about two per multiprocessor.

    More programs would not help: a grid that is larger than the device can run at once is
    distributed unevenly, even if most of its programs have nothing to do.
    """
    room = multiprocessors - items if items <= multiprocessors else 2 * multiprocessors - kv_heads
    return max(1, room // kv_heads) * kv_heads


@cache
def choose(
    items: int,
    kv_heads: int,
    head_bytes: int,
    limits: DeviceLimits,
    queries: int = 16,
    query_bytes: int = 512,
) -> LaunchConfig:
    """Choose the configuration for ``items`` (sequences x ``kv_heads``) and cached heads of
    ``head_bytes`` bytes, which must be a power of 2. Each item has ``queries`` queries of
    ``query_bytes`` bytes, including padding.

    The choice depends on shapes alone, so it remains valid when a captured graph is replayed.
    """
    tiles = _tiles(items, limits.multiprocessors)
    tokens = max(16, min(128, tiles.attend_tokens * 256 // head_bytes))
    # Tiles have at most 128 rows. If heads are so narrow that this limit applies, more tiles are
    # kept in flight instead.
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
    return _fit(config, head_bytes, queries, query_bytes, limits)


def attend_bytes(config: LaunchConfig, head_bytes: int, queries: int, query_bytes: int) -> int:
    """Return an upper bound on the shared memory of an attention program, in bytes, for the keys
    and values in flight, the queries, their weights for one tile, and page ids. It allows at least
    16 KiB for everything except keys and values.
    """
    tiles = config.attend_stages * config.attend_tokens * 2 * head_bytes
    weights = queries * config.attend_tokens * 2
    return tiles + max(16 * 1024, queries * query_bytes + weights + 16 * config.attend_tokens)


def _fit(
    config: LaunchConfig, head_bytes: int, queries: int, query_bytes: int, limits: DeviceLimits
) -> LaunchConfig:
    """Reduce the number of tiles in flight, and then the size of tiles, until the buffers fit."""
    spare = limits.shared_memory - 16 * 1024  # 16 KiB are reserved for page ids and reductions
    while attend_bytes(config, head_bytes, queries, query_bytes) > limits.shared_memory:
        if config.attend_stages > 1:
            config = replace(config, attend_stages=config.attend_stages - 1)
        else:
            config = replace(config, attend_tokens=config.attend_tokens // 2)
    while config.score_stages * config.score_pages * head_bytes > spare:
        config = replace(config, score_pages=config.score_pages // 2)
    return config
