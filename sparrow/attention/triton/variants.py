"""Variants of the shipped launch configurations, for ``sparrow tune`` to choose from.

A variant is a set of changes to whatever ``tuning.choose`` returns for a batch, so it also works
for other batch sizes. A variant with no changes is the shipped configuration.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparrow.attention.decode import MOST_EXTRA, DeviceLimits
from sparrow.attention.triton.tuning import LaunchConfig, registers_per_thread, rows_per_tile

MOST_SPLITS = 64


@dataclass(frozen=True)
class AttendTile:
    """Launch parameters for the attention kernel, with 256-byte heads."""

    tokens: int  # tokens per tile of keys and values
    stages: int  # tiles in flight
    warps: int  # warps per program
    resident: int  # programs that should fit on an SM


@dataclass(frozen=True)
class RankTile:
    """Launch parameters for the ranking kernel, with 256-byte heads."""

    pages: int  # landmarks per tile
    stages: int  # tiles in flight
    warps: int  # warps per program


# The first entries have few programs with many bytes in flight each. The last entries have many
# programs with few bytes each, and need the least shared memory.
ATTEND = (
    AttendTile(128, 2, 4, 1),
    AttendTile(128, 3, 4, 1),
    AttendTile(128, 2, 8, 1),
    AttendTile(128, 1, 4, 3),
    AttendTile(64, 3, 4, 2),
    AttendTile(64, 2, 4, 3),
    AttendTile(64, 1, 4, 4),
    AttendTile(64, 2, 8, 2),
    AttendTile(32, 3, 4, 3),
    AttendTile(32, 2, 4, 4),
)
RANK = (
    RankTile(128, 3, 4),
    RankTile(128, 2, 4),
    RankTile(64, 2, 4),
    RankTile(64, 4, 4),
    RankTile(64, 2, 8),
)
FACTORS = (0.5, 2.0, 4.0)


@dataclass(frozen=True)
class Variant:
    """Changes to a shipped configuration; the defaults change nothing."""

    attend: AttendTile | None = None
    rank: RankTile | None = None
    extra: float = 1.0  # multiplier for the extra programs, which compute additional parts of rows
    splits: float = 1.0  # multiplier for the programs that rank an item

    def __str__(self) -> str:
        parts = []
        if self.attend is not None:
            a = self.attend
            parts.append(f"{a.stages} x {a.tokens} tokens, {a.warps} warps, {a.resident} resident")
        if self.extra != 1:
            parts.append(f"{self.extra:g}x the extra programs")
        if self.rank is not None:
            parts.append(
                f"{self.rank.stages} x {self.rank.pages} landmarks, {self.rank.warps} warps"
            )
        if self.splits != 1:
            parts.append(f"{self.splits:g}x the ranking programs")
        return "; ".join(parts) or "as shipped"

    def of(
        self, shipped: LaunchConfig, kv_heads: int, head_bytes: int, limits: DeviceLimits
    ) -> LaunchConfig:
        """Apply the changes to ``shipped``.

        ``head_bytes`` is the size of a cached head in bytes, a power of 2.
        """
        config = shipped
        if self.attend is not None:
            tokens = rows_per_tile(self.attend.tokens, head_bytes)
            config = replace(
                config,
                attend_tokens=tokens,
                attend_stages=self.attend.stages,
                attend_warps=self.attend.warps,
                part_tokens=tokens,
                registers=registers_per_thread(self.attend.warps, self.attend.resident),
                resident_programs=self.attend.resident * limits.multiprocessors,
            )
        if self.rank is not None:
            config = replace(
                config,
                score_pages=rows_per_tile(self.rank.pages, head_bytes),
                score_stages=self.rank.stages,
                rank_warps=self.rank.warps,
            )
        if self.extra != 1:
            most = MOST_EXTRA * limits.multiprocessors // kv_heads
            parts = min(most, int(self.extra * config.extra_programs) // kv_heads)
            config = replace(config, extra_programs=max(1, parts) * kv_heads)
        if self.splits != 1:
            splits = min(MOST_SPLITS, int(self.splits * config.rank_splits))
            config = replace(config, rank_splits=max(1, splits))
        return config


def fits(config: LaunchConfig, head_bytes: int, limits: DeviceLimits) -> bool:
    """Return whether the tiles in flight fit in shared memory. Even if the tiles fit, the compiled
    kernel may need more shared memory than the device has.
    """
    attend = config.attend_stages * config.attend_tokens * 2 * head_bytes
    score = config.score_stages * config.score_pages * head_bytes
    return max(attend, score) <= limits.shared_memory
