"""Results of ``sparrow tune``, saved in the user's cache folder with one file per GPU, attention
shape and Triton version. The launcher reads the file once per process. If the file doesn't exist,
the launcher uses the shipped configurations.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

from sparrow.attention.decode import DecodeBatch, DeviceLimits, device_limits
from sparrow.attention.triton.tuning import LaunchConfig
from sparrow.attention.triton.variants import (
    ATTEND,
    FACTORS,
    RANK,
    AttendTile,
    RankTile,
    Variant,
)
from sparrow.errors import ConfigError
from sparrow.files import cache_folder, check_folder, write_text

FORMAT = 1  # bump this when kernel changes make old results useless


@dataclass(frozen=True)
class Target:
    """The GPU, attention shape and Triton version that a file is for."""

    gpu: str
    multiprocessors: int
    shared_memory: int
    triton: str
    kv_heads: int
    group: int
    head_dim: int
    cache_dtype: str  # torch dtype name without ``torch.``
    page_size: int

    @classmethod
    def on(
        cls,
        device: torch.device,
        *,
        kv_heads: int,
        group: int,
        head_dim: int,
        dtype: torch.dtype,
        page_size: int,
    ) -> Target:
        """Return the target for a model of this shape on the GPU ``device``."""
        limits = device_limits(device)
        return cls(
            torch.cuda.get_device_name(device),
            limits.multiprocessors,
            limits.shared_memory,
            triton.__version__,
            kv_heads,
            group,
            head_dim,
            str(dtype).removeprefix("torch."),
            page_size,
        )

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the cache."""
        dtype = getattr(torch, self.cache_dtype)
        assert isinstance(dtype, torch.dtype)
        return dtype

    @property
    def head_bytes(self) -> int:
        """Bytes per cached head, including the kernels' padding."""
        return triton.next_power_of_2(self.head_dim) * self.dtype.itemsize

    @property
    def limits(self) -> DeviceLimits:
        return DeviceLimits(self.multiprocessors, self.shared_memory)

    @property
    def path(self) -> Path:
        """The file that stores the results for this target."""
        shape = f"{self.kv_heads}-{self.group}-{self.head_dim}-{self.cache_dtype}"
        name = f"{self.gpu}-{shape}-pages{self.page_size}-triton{self.triton}"
        return cache_folder() / "tuned" / f"{re.sub(r'[^A-Za-z0-9.]+', '-', name)}.json"


@dataclass(frozen=True)
class Measurement:
    """Decode step times in microseconds for one layer, with ``pages`` pages kept by score."""

    pages: int
    shipped_us: float
    tuned_us: float
    limit_us: float  # time to read the same bytes at full memory bandwidth


@dataclass(frozen=True)
class Cell:
    """The fastest variant for one batch size."""

    batch: int
    variant: Variant
    measured: tuple[Measurement, ...]


@dataclass(frozen=True)
class Choices:
    """The contents of a saved file."""

    target: Target
    cells: tuple[Cell, ...]

    def of(self, rows: int) -> Variant:
        """Return the variant for a batch of ``rows`` sequences, which is the one tuned for the
        closest batch size (by ratio). Ties go to the smaller size.
        """
        return min(self.cells, key=lambda cell: abs(math.log(rows / cell.batch))).variant

    def save(self) -> Path:
        """Write the file and return its path. Raises ConfigError if it can't be written."""
        path = self.target.path
        check_folder(path.parent)
        write_text(path, json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")
        return path

    @classmethod
    def load(cls, target: Target) -> Choices | None:
        """Load the results for ``target``, or return None if it was never tuned.

        Raises ConfigError if the file can't be read, is corrupt, or is for another target.
        """
        path = target.path
        if not path.exists():
            return None
        remedy = "delete it, or run sparrow tune again"
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
            if record["format"] != FORMAT:
                raise ConfigError(
                    f"{path} has format {record['format']!r}, but this version of Sparrow reads "
                    f"format {FORMAT}; {remedy}"
                )
            written = Target(**record["target"])
            cells = tuple(_cell(cell) for cell in record["cells"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
            raise ConfigError(
                f"{path} was not written by sparrow tune ({reason}); {remedy}"
            ) from error
        if written != target:
            ours = asdict(target)
            wrong = {name: x for name, x in asdict(written).items() if x != ours[name]}
            expected = {name: ours[name] for name in wrong}
            raise ConfigError(f"{path} is for {wrong}, expected {expected}; {remedy}")
        if not cells:
            raise ConfigError(f"{path} has no cells, expected at least one; {remedy}")
        return cls(target, cells)


def _cell(record: Mapping[str, Any]) -> Cell:
    """Parse a cell. Raises ValueError, KeyError or TypeError if it's malformed."""
    batch = record["batch"]
    if type(batch) is not int or batch < 1:
        raise ValueError(f"batch is {batch!r}, expected an integer of at least 1")
    measured = tuple(Measurement(**row) for row in record["measured"])
    return Cell(batch, _variant(record["variant"]), measured)


def _variant(record: Mapping[str, Any]) -> Variant:
    """Parse a variant. Accept only values that ``sparrow tune`` tries, because the kernels don't
    check their launch parameters.

    Raises ValueError, KeyError or TypeError if the record is malformed.
    """
    attend = None if record["attend"] is None else AttendTile(**record["attend"])
    rank = None if record["rank"] is None else RankTile(**record["rank"])
    variant = Variant(attend, rank, record["extra"], record["splits"])
    for name, value, known in (
        ("attend", attend, (None, *ATTEND)),
        ("rank", rank, (None, *RANK)),
        ("extra", variant.extra, (1.0, *FACTORS)),
        ("splits", variant.splits, (1.0, *FACTORS)),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}, which sparrow tune never chooses")
    return variant


@cache
def read(
    device: torch.device,
    kv_heads: int,
    group: int,
    head_dim: int,
    dtype: torch.dtype,
    page_size: int,
) -> Choices | None:
    """Return the tuning results for a model of this shape on ``device``, or None if there are none.
    Each file is read once per process.

    Raises ConfigError if the file can't be read, is corrupt, or is for another target.
    """
    if device.type != "cuda":
        return None
    return Choices.load(
        Target.on(
            device,
            kv_heads=kv_heads,
            group=group,
            head_dim=head_dim,
            dtype=dtype,
            page_size=page_size,
        )
    )


def tuned(batch: DecodeBatch, shipped: LaunchConfig) -> LaunchConfig:
    """Return the configuration for a batch: the tuned variant of ``shipped``, or ``shipped`` itself
    if this GPU and shape were never tuned. Steps with several new tokens per sequence are never
    tuned, so they always use ``shipped``.

    The result only depends on shapes, so it stays valid when a captured graph is replayed.
    """
    if batch.tokens > 1:
        return shipped
    return _tuned(
        shipped,
        len(batch.length_B),
        batch.q_BHD.device,
        batch.kv_heads,
        batch.group,
        batch.head_dim,
        batch.k_cache.dtype,
        batch.layout.page_size,
    )


@cache
def _tuned(shipped: LaunchConfig, rows: int, device: torch.device, *sizes: Any) -> LaunchConfig:
    choices = read(device, *sizes)
    if choices is None:
        return shipped
    target = choices.target
    return choices.of(rows).of(shipped, target.kv_heads, target.head_bytes, target.limits)
