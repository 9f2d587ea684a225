"""A run directory, read back from its files while the run goes on or after it ended.

A run that is being written may end in half a line; that line is left out. Numbers that a step did not record, or
recorded as null, are nan.

Shapes: S steps, N length bins, counted from length 0 (a bin that no response of a step reached is nan there).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from math import nan
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow.errors import ConfigError
from sparrow.mismatch import BetaTail, BinMismatch, Histogram
from sparrow.schedule import SparsitySchedule

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
Row = Mapping[str, Any]

CONFIG, METRICS, ROLLOUTS = "config.json", "metrics.jsonl", "rollouts.jsonl"


@dataclass(frozen=True)
class RunLog:
    """What a run recorded.

    Attributes:
        run_dir: where it was read from.
        config: the resolved configuration, ``config.json``.
        metrics: one row per finished step, at least one.
        rollouts: the sampled responses of the first and of the last step that logged any.
        initial_schedule: what the run started with; None if its configuration does not hold the table.
        schedule: what it decoded under at its newest checkpoint; before the first, the initial one.
    """

    run_dir: Path
    config: Row
    metrics: tuple[Row, ...]
    rollouts: tuple[Row, ...] = ()
    initial_schedule: SparsitySchedule | None = None
    schedule: SparsitySchedule | None = None

    @classmethod
    def load(cls, run_dir: str | Path) -> RunLog:
        """Read a run directory.

        Raises:
            ConfigError: not a run directory, a run without a finished step, or a damaged file.
        """
        path = Path(run_dir)
        if not (path / CONFIG).is_file():
            raise ConfigError(f"{path} holds no {CONFIG}, so it is no run directory; give the run_dir of a run")
        config = _parse((path / CONFIG).read_bytes(), str(path / CONFIG))
        metrics = tuple(_rows(path / METRICS))
        if not metrics:
            raise ConfigError(f"{path} holds no finished step ({METRICS} is missing or empty); try again after step 1")
        table = config.get("schedule")
        initial = SparsitySchedule.from_dict(table) if isinstance(table, Mapping) else None
        return cls(
            run_dir=path,
            config=config,
            metrics=metrics,
            rollouts=_first_and_last(_rows(path / ROLLOUTS)),
            initial_schedule=initial,
            schedule=_checkpointed_schedule(path) or initial,
        )

    @property
    def tau(self) -> float:
        """The 5th percentile of acceptance that the run was to hold; nan if not recorded."""
        return _number(_get(self.config, ("train", "tau")))

    @property
    def planned_steps(self) -> int | None:
        """The step that the run ends with."""
        return _get(self.config, ("train", "steps"))

    @property
    def steps(self) -> IntArray:
        """Step numbers, int64 [S]."""
        return np.array([row["step"] for row in self.metrics], dtype=np.int64)

    def series(self, *keys: str) -> FloatArray:
        """The number under nested ``keys`` at each step, float64 [S]."""
        return np.array([_number(_get(row, keys)) for row in self.metrics])

    def sources(self) -> list[str]:
        """The datasets or tasks whose rewards are recorded apart."""
        return list(dict.fromkeys(name for row in self.metrics for name in _get(row, ("reward", "sources")) or ()))

    def first_and_last(self, values: FloatArray) -> tuple[float, float, int]:
        """Means over the first and over the last few of ``values`` [S], and how many: a quarter of them, 1 to 10."""
        count = max(1, min(10, len(values) // 4))
        return nan_mean(values[:count]), nan_mean(values[-count:]), count

    def bins(self, index: int = -1) -> tuple[BinMismatch, ...]:
        """Mismatch by length bin at one step, by rising length; ``index`` into the recorded steps."""
        found = _get(self.metrics[index], ("mismatch", "bins")) or ()
        return tuple(BinMismatch(**_known(BinMismatch, row)) for row in found)

    def tail_by_step(self) -> FloatArray:
        """The percentile of acceptance (lower bound) by step and length bin, float64 [S, N]."""
        by_step = [self.bins(index) for index in range(len(self.metrics))]
        count = max((b.bin + 1 for bins in by_step for b in bins), default=0)
        tail_SN = np.full((len(by_step), count), nan)
        for index, bins in enumerate(by_step):
            for b in bins:
                tail_SN[index, b.bin] = b.lower_bound
        return tail_SN

    def schedules(self) -> tuple[SparsitySchedule, ...]:
        """What the rollouts of each step were decoded under, [S]; empty if the run did not record it."""
        tables = [_get(row, ("schedule", "top_k")) for row in self.metrics]
        if self.initial_schedule is None or not all(tables):
            return ()
        layout = self.initial_schedule.to_dict()
        return tuple(SparsitySchedule.from_dict({**layout, "top_k": table}) for table in tables)

    @property
    def bin_tokens(self) -> int | None:
        """Width of a length bin in tokens."""
        return _get(self.metrics[-1], ("mismatch", "bin_tokens"))

    @property
    def percentile(self) -> float:
        """Which percentile the tail is measured by, in 0..100."""
        found = _number(_get(self.metrics[-1], ("mismatch", "percentile")))
        return 5.0 if np.isnan(found) else found

    def histogram(self, name: str, index: int = -1) -> Histogram | None:
        """``histogram`` (of acceptance) or ``log_histogram`` (of 1 - acceptance) of one step."""
        found = _get(self.metrics[index], ("mismatch", name))
        return Histogram(tuple(found["edges"]), tuple(found["counts"])) if found else None

    def beta_tail(self, index: int = -1) -> BetaTail | None:
        """The Beta distribution fitted to the tail at one step."""
        found = _get(self.metrics[index], ("mismatch", "beta_tail"))
        return BetaTail(**_known(BetaTail, found)) if found else None

    def kv_read(self) -> float:
        """Share of the cached tokens that decoding read, over the whole run."""
        held = float(np.nansum(self.series("kv", "tokens_held")))
        return float(np.nansum(self.series("kv", "tokens_read"))) / held if held else nan

    def tokens_kept(self) -> float:
        """Share of the response tokens that the correction left in the loss, over the whole run."""
        masked, tokens = self.series("correction", "masked_fraction"), self.series("response", "tokens")
        known = np.isfinite(masked) & np.isfinite(tokens)
        return float(1 - np.average(masked[known], weights=tokens[known])) if tokens[known].sum() else nan


def nan_mean(values: FloatArray) -> float:
    """Mean of the finite values; nan if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else nan


def _checkpointed_schedule(run_dir: Path) -> SparsitySchedule | None:
    states = sorted(run_dir.glob("checkpoints/step-*/state.json"), key=lambda p: int(p.parent.name[5:]))
    if not states:
        return None
    table = _parse(states[-1].read_bytes(), str(states[-1])).get("schedule")
    return SparsitySchedule.from_dict(table) if table else None


def _first_and_last(rows: Iterator[Row]) -> tuple[Row, ...]:
    """Those of the first and of the last step; the rest may be many gigabytes and is dropped while reading."""
    first: list[Row] = []
    last: list[Row] = []
    for row in rows:
        if not first or row["step"] == first[0]["step"]:
            first.append(row)
            continue
        if last and row["step"] != last[0]["step"]:
            last.clear()
        last.append(row)
    return (*first, *last)


def _rows(path: Path) -> Iterator[Row]:
    """The JSON objects of a file, one a line, each with a step."""
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"line {number} of {path}"
            try:
                row = _parse(line, where)
            except ConfigError:
                if line.endswith(b"\n"):
                    raise
                return  # the last line, being written or cut off by a kill
            if not isinstance(row.get("step"), int):
                raise ConfigError(f"{where} names no step; every line needs one, so remove the line")
            yield row


def _parse(text: bytes, where: str) -> Row:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON ({error}); restore it from a copy or remove it") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{where} holds a {type(found).__name__}, expected a JSON object; restore it or remove it")
    return found


def _get(row: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        row = row.get(key) if isinstance(row, Mapping) else None
    return row


def _number(value: Any) -> float:
    return float(value) if isinstance(value, int | float) else nan


def _known(kind: type, row: Row) -> dict[str, Any]:
    """The fields of dataclass ``kind`` in ``row``, null as nan."""
    return {f.name: nan if row.get(f.name) is None else row[f.name] for f in fields(kind)}
