"""Read a run directory during or after the run.

A last line still being written is ignored. A number is nan if it was recorded as null or not
recorded.

Shapes: S steps, E evaluations, N length bins starting at length 0. A bin's value is nan if none of
    the step's responses reached the bin.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields, replace
from math import inf, nan
from operator import attrgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sparrow.errors import ConfigError
from sparrow.mismatch import BinMismatch, Tau
from sparrow.mismatch.drafts import DraftBin
from sparrow.mismatch.tail import FloatArray
from sparrow.run.directory import (
    EVALUATIONS,
    METRICS,
    RECORDED,
    ROLLOUTS,
    LoggedResponse,
    Row,
    RunConfig,
    read_rows,
)
from sparrow.schedule import SparsitySchedule, auto_start


@dataclass(frozen=True)
class DraftStatistics:
    """Draft statistics for a lossless run."""

    drafts_per_token: float
    tokens_per_cycle: float
    # exact draft acceptance by length bin, from the last step that drafted
    bins: tuple[DraftBin, ...]
    # exact acceptance that drafts would have had under meter_schedule
    metered: tuple[DraftBin, ...]


@dataclass(frozen=True)
class RunLog:
    """The record of a run."""

    run_dir: Path  # where the log was read from
    train: Row  # the resolved command-line options, from ``config.json``
    metrics: tuple[Row, ...]  # one row per finished step, at least one
    # [S], the schedule of each step's rollouts
    schedules: tuple[SparsitySchedule, ...]
    evaluations: tuple[Row, ...] = ()  # one row per evaluation

    @classmethod
    def load(cls, run_dir: str | Path) -> RunLog:
        """Read a run directory.

        Raises ConfigError if ``run_dir`` is not a run directory, no step is finished, or a file is
        damaged.
        """
        path = Path(run_dir)
        config = RunConfig.load(path)
        metrics = tuple(row for row, _ in read_rows(path / METRICS))
        if not metrics:
            raise ConfigError(
                f"{path} has no finished step ({METRICS} is missing or empty); "
                "try again after step 1"
            )
        for row in metrics:
            if missing := RECORDED - set(row):
                raise ConfigError(
                    f"step {row['step']} of {path / METRICS} has no {min(missing)!r}; "
                    "restore the line from a copy"
                )
        start = config.schedule
        tables = (
            SparsitySchedule.from_dict({**start.to_dict(), **row["schedule"]}) for row in metrics
        )
        # Give any schedule equal to the start schedule the same provenance, which contains the
        # start schedule's name.
        schedules = tuple(
            start if table == start else table.replace(provenance={}) for table in tables
        )
        evaluations = tuple(row for row, _ in read_rows(path / EVALUATIONS))
        return cls(path, config.train, metrics, schedules, evaluations)

    def responses(self, steps: Collection[int]) -> list[LoggedResponse]:
        """Read the logged responses of ``steps``. They aren't kept in memory, since the responses
        of a whole run may take many gigabytes.

        Raises ConfigError if the file is damaged.
        """
        rows = read_rows(self.run_dir / ROLLOUTS)
        return [LoggedResponse.from_row(row, where) for row, where in rows if row["step"] in steps]

    @property
    def tau(self) -> Tau:
        """This run's target for the 5th percentile of acceptance."""
        return Tau.chosen(self.train["tau"], self.train.get("relative_tau"))

    @property
    def is_sparse(self) -> bool:
        """Whether samples may come from a sparse actor, i.e. whether acceptance is compared with
        tau. False for dense and lossless runs.
        """
        if self._mode == "lossless":
            return False
        return (
            self.follows_p5
            or self._is_distilled
            or not all(table.is_dense for table in self.schedules)
        )

    @property
    def follows_p5(self) -> bool:
        """Whether the schedule is adjusted to the measured p5."""
        return auto_start(self.train.get("schedule")) is not None

    @property
    def _mode(self) -> str | None:
        return (self.train.get("rollout") or {}).get("mode")

    @property
    def _is_distilled(self) -> bool:
        return bool((self.train.get("distill") or {}).get("enabled"))

    def dense_up_to(self, index: int = -1) -> float:
        """Return the length up to which the dense policy sampled at the step with index ``index``.
        Return infinity if the dense policy sampled every token.
        """
        row = self.metrics[index]
        if "dense_up_to" in row:
            return inf if row["dense_up_to"] is None else row["dense_up_to"]
        # Older versions did not record ``dense_up_to``.
        if self._mode == "lossless":
            return inf
        if self._is_distilled:
            return 0
        verified_up_to = row["dial"]["verified_up_to"] if "dial" in row else 0
        return max(
            inf if verified_up_to is None else verified_up_to, self.schedules[index].dense_up_to
        )

    @property
    def bin_tokens(self) -> int:
        """Width of a length bin in tokens."""
        return self.metrics[-1]["mismatch"]["bin_tokens"]

    @property
    def steps(self) -> NDArray[np.int64]:
        """Step numbers, int64 [S]."""
        return np.array([row["step"] for row in self.metrics], dtype=np.int64)

    def series(self, *keys: str) -> FloatArray:
        """Read the number at the nested path ``keys`` for each step. The result is float64 [S]."""
        values = (_get(row, keys) for row in self.metrics)
        return np.array(
            [value if isinstance(value, int | float) else nan for value in values], dtype=float
        )

    @property
    def evaluated(self) -> NDArray[np.int64]:
        """Steps after which the policy was evaluated, int64 [E]."""
        return np.array([row["step"] for row in self.evaluations], dtype=np.int64)

    def benchmarks(self) -> list[str]:
        """List the benchmarks that the policy was evaluated on."""
        return list(dict.fromkeys(name for row in self.evaluations for name in row["eval"]))

    def scores(self, benchmark: str, *keys: str) -> FloatArray:
        """Read a benchmark's number at the nested path ``keys`` for each evaluation. The result is
        float64 [E].
        """
        values = (_get(row["eval"], (benchmark, *keys)) for row in self.evaluations)
        return np.array([_number(value) for value in values], dtype=float)

    def sources(self) -> list[str]:
        """List the datasets or tasks with separately recorded rewards."""
        return list(
            dict.fromkeys(
                name for row in self.metrics for name in _get(row, ("reward", "sources")) or ()
            )
        )

    def first_and_last(self, values: FloatArray) -> tuple[float, float, int]:
        """Return the mean of the first n values, the mean of the last n values, and n. The shape of
        ``values`` is [S], and n is S / 4 clamped to 1..10.
        """
        count = max(1, min(10, len(values) // 4))
        return nan_mean(values[:count]), nan_mean(values[-count:]), count

    def bins(self, index: int = -1) -> tuple[BinMismatch, ...]:
        """Read the mismatch in each length bin at the step with index ``index``. The bins are in
        ascending order.
        """
        rows = self.metrics[index]["mismatch"]["bins"]
        names = [field.name for field in fields(BinMismatch)]
        bins = []
        for row in rows:
            b = BinMismatch(**{name: _number(row[name]) for name in names if name in row})
            # In older versions' logs, the upper bound has no interval, but equal bounds share one.
            if "upper_bound_high" not in row and b.lower_bound == b.upper_bound:
                b = replace(b, upper_bound_high=b.interval_high)
            bins.append(b)
        return tuple(bins)

    def sparse_bins(self, index: int = -1) -> tuple[BinMismatch, ...]:
        """Select the ``bins`` in which a sparse actor sampled. In other bins, acceptance bounds
        mean nothing.
        """
        up_to = self.dense_up_to(index)
        return tuple(b for b in self.bins(index) if b.end > up_to)

    def throughput(self) -> FloatArray:
        """Compute the response tokens per second of rollout time at each step. The result is
        float64 [S].
        """
        seconds = self.series("seconds", "rollout")
        return self.series("response", "tokens") / np.where(seconds > 0, seconds, nan)

    def tail_by_step(self) -> FloatArray:
        """Return the sparse actor's p5 (lower bound) at each step and in each length bin, as
        float64 [S, N]. The p5 is relative if tau is relative.
        """
        return self._by_step(attrgetter("lower_bound"))

    def upper_tail_by_step(self) -> FloatArray:
        """Return the upper bounds on p5, in the same form as ``tail_by_step``."""
        return self._by_step(attrgetter("upper_bound"))

    def _by_step(self, bound: Callable[[BinMismatch], float]) -> FloatArray:
        steps = range(len(self.metrics))
        bins_by_step = [self.tau.scale(self.sparse_bins(index)) for index in steps]
        count = max((b.bin + 1 for index in steps for b in self.bins(index)), default=0)
        tail_SN = np.full((len(bins_by_step), count), nan)
        for index, bins in enumerate(bins_by_step):
            for b in bins:
                tail_SN[index, b.bin] = bound(b)
        return tail_SN

    def histogram(self, index: int = -1) -> tuple[FloatArray, FloatArray]:
        """Read the acceptance histogram's counts and edges at the step with the given ``index``."""
        found = self.metrics[index]["mismatch"]["histogram"]
        return np.array(found["counts"], dtype=float), np.array(found["edges"], dtype=float)

    def kv_read(self) -> float:
        """Compute the share of cached tokens read by decode steps over the whole run; nan if
        nothing was decoded.
        """
        held = float(self.series("kv", "tokens_held").sum())
        return float(self.series("kv", "tokens_read").sum()) / held if held else nan

    def drafting(self) -> DraftStatistics | None:
        """Summarise drafting over the whole run; None if no step was lossless."""
        drafted, accepted, cycles = (
            np.nansum(self.series("drafts", key)) for key in ("drafted", "accepted", "cycles")
        )
        if not cycles:
            return None
        # Steps whose drafts were all guesses have no bins.
        steps = [drafts for row in reversed(self.metrics) if (drafts := row.get("drafts"))]
        last = next((drafts for drafts in steps if drafts.get("bins")), steps[0])
        bins = (
            tuple(DraftBin(**b) for b in drafts.get("bins", ()))
            for drafts in (last, last.get("metered", {}))
        )
        return DraftStatistics(drafted / (accepted + cycles), (accepted + cycles) / cycles, *bins)

    def tokens_kept(self) -> float:
        """Compute the share of the run's response tokens that the correction kept in the loss."""
        masked = self.series("correction", "masked_fraction")
        tokens = self.series("response", "tokens")
        return float(1 - np.average(masked, weights=tokens))


def nan_mean(values: FloatArray) -> float:
    """Return the mean of the finite values; nan if there are none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else nan


def _number(value: Any) -> Any:
    return nan if value is None else value


def _get(row: Any, keys: tuple[str, ...]) -> Any:
    for key in keys:
        row = row.get(key) if isinstance(row, Mapping) else None
    return row
