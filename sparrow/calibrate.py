"""The cheapest schedule whose tail holds a target, for any model.

The published way samples the model anew at each of 18 budgets. Here trajectories are sampled once and
scored at every budget by teacher-forced sparse passes, which compute what decoding would have computed; and
as a pass may give every length bin a budget of its own, all bins are searched at once.
This module only searches: it is handed ``measure`` and knows no engine. Source: Sparrow, arXiv 2606.08446,
section 4; the error bars, the borrowing and the search are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from sparrow.errors import ConfigError
from sparrow.mismatch import PercentileInterval, percentile_by_bin_interval, plain
from sparrow.schedule import ALL_PAGES, SparsitySchedule

PERCENTILE = 5
WIDE = 1.5  # between budgets further apart than this factor, p5 is not taken to be a straight line
AROUND = 0.75, 4 / 3  # what is tried around a schedule, in parts of its pages


class Acceptance(NamedTuple):
    """Acceptance rates of all measured tokens: rate float64, position and sequence id int64, each ``[T]``."""

    alpha: np.ndarray
    position: np.ndarray
    sequence: np.ndarray


Measure = Callable[[SparsitySchedule], Acceptance]
"""Acceptance of the actor under a schedule, on trajectories of the caller's choice; the same ones at every call."""

Curves = dict[tuple[int, ...], tuple[PercentileInterval, ...]]
"""Of every pass: top-k by bin -> tail by bin."""


@dataclass(frozen=True)
class BinChoice:
    """What was chosen in one length bin, and on what evidence.

    Attributes:
        start, end: lengths in tokens.
        top_k: pages in the schedule.
        p5, lower, upper: the tail at that budget and its confidence interval, interpolated; NaN for a dense bin.
        n_tokens, n_sequences: what they were computed from.
        borrowed: the bin alone had too few sequences, so its neighbours were pooled in, and half as many pages again
            were taken unless only longer lengths were there to be pooled.
    """

    start: int
    end: int
    top_k: int
    p5: float
    lower: float
    upper: float
    n_tokens: int
    n_sequences: int
    borrowed: bool


@dataclass(frozen=True)
class Calibration:
    """A schedule with the measurements behind it.

    Attributes:
        schedule: dense beyond the last measured bin.
        bins: one choice per measured bin.
        curves: the tail by bin, of every pass.
    """

    schedule: SparsitySchedule
    bins: tuple[BinChoice, ...]
    curves: Curves


def calibrate(
    measure: Measure,
    trials: Sequence[SparsitySchedule],
    target: float = 0.86,
    fewest: int = 0,
    refine: int = 3,
    min_sequences: int = 20,
    seed: int = 0,
    provenance: Mapping[str, Any] | None = None,
) -> Calibration:
    """The cheapest schedule, monotone in length, whose p5 has a lower confidence limit of ``target`` in every bin.

    Between two measured budgets the limit is taken to rise in a straight line. It rises ever more slowly in truth, so
    this errs towards more pages; brackets wider than ``WIDE`` are bisected first.

    Args:
        measure: acceptance under a schedule; called once per pass.
        trials: schedules to measure first, all of one layout.
        target: what the lower end of the 95 % interval of p5 must reach.
        fewest: pages below which no bin is searched.
        refine: passes after the trials, at most. Each tries, in every bin where it is not settled, more pages if none
            yet will do, fewer if all will, and otherwise the middle between those that fail and those that will do.
        min_sequences: a bin that fewer sequences reach borrows from other lengths, shorter ones first.
        seed: of the bootstrap.
        provenance: recorded in the schedule, with the evidence.

    Raises:
        ConfigError: no trials, a target outside (0, 1), or fewer than ``min_sequences`` sequences in all.
    """
    if not trials or not 0 < target < 1:
        raise ConfigError(f"need at least one budget and a target between 0 and 1, got {len(trials)} and {target}")
    layout = trials[0].replace(provenance={})
    curves: Curves = {}
    own: dict[int, int] = {}  # bin -> sequences that reach it; the same in every pass

    def add(trial: SparsitySchedule) -> None:
        found = measure(trial)
        own.update((b, len(sequences)) for b, sequences in sorted(_reaching(found, layout.bin_tokens).items()))
        pages = tuple(trial.top_k[min(b, len(trial.top_k) - 1)] for b in own)
        curves[pages] = tuple(_tail(found, layout.bin_tokens, min_sequences, seed))

    for trial in trials:
        add(trial)
    for _ in range(refine):
        if (wanted := _wanted(_by_bin(curves), target, fewest, layout.page_size)) is None:
            break
        add(layout.replace(top_k=_table(own, wanted)))
    bins: list[BinChoice] = []
    for tried, n in zip(_by_bin(curves), own.values(), strict=True):
        bins.append(_bin_choice(tried, target, n < min_sequences, bins[-1].top_k if bins else None))
    evidence = {
        "curves": {
            " ".join(map(str, pages if len(set(pages)) > 1 else pages[:1])): [
                plain([t.start, t.end, t.estimate, t.lower, t.upper]) for t in tail
            ]
            for pages, tail in curves.items()
        },
        "target": target,
        "measured_up_to": bins[-1].end,
        "bins": [plain(asdict(b)) for b in bins],
    }
    table = (*_table(own, (b.top_k for b in bins)), ALL_PAGES)
    schedule = layout.replace(top_k=table, provenance={**(provenance or {}), **evidence})
    return Calibration(schedule, tuple(bins), curves)


def around(schedule: SparsitySchedule, fewest: int) -> list[SparsitySchedule]:
    """A schedule that was found, a sparser and a fuller one, to search on what the actor writes; none if it is dense.

    The others keep their last budget at lengths that were not measured, where the schedule itself is dense.
    """
    if schedule.is_dense:
        return []
    tables = [[k if k >= ALL_PAGES else max(fewest, math.ceil(k * factor)) for k in schedule.top_k[:-1]]
              for factor in AROUND]  # fmt: skip
    return [schedule, *(schedule.replace(top_k=tuple(table), provenance={}) for table in tables)]


def _table(bins: Iterable[int], pages: Iterable[int]) -> tuple[int, ...]:
    """A schedule's table that does not shrink. Bins before the first hold prompts only; its budget serves them."""
    rising = np.maximum.accumulate(list(pages)).tolist()
    return (rising[0],) * min(bins) + tuple(rising)


Tried = dict[int, PercentileInterval]
"""Of one bin: top-k -> tail, in order."""


def _by_bin(curves: Curves) -> list[Tried]:
    columns = zip(*(zip(*each, strict=True) for each in curves.items()), strict=True)
    return [dict(sorted(column, key=lambda each: each[0])) for column in columns]


def _enough(tried: Tried, target: float) -> tuple[int | None, int]:
    """The largest budget that fails below the smallest whose lower limit meets the target, and that one."""
    enough = next((k for k, tail in tried.items() if tail.lower >= target), ALL_PAGES)
    return max((k for k in tried if k < enough), default=None), enough


def _wanted(by_bin: Sequence[Tried], target: float, fewest: int, page_size: int) -> list[int] | None:
    """What to measure next in every bin, or again where a bin is settled; None if all are."""
    wanted, settled, needed = [], True, -1
    for tried in by_bin:
        fails, enough = _enough(tried, target)
        pages = enough
        if enough == ALL_PAGES:
            if fails is not None:
                pages = 2 * fails + 1 if fails * page_size < tried[fails].end else fails
        elif fails is None:
            pages = max(fewest, math.floor(enough * AROUND[0]))
        elif enough - fails > 1 and enough > WIDE * fails:
            pages = (fails + enough) // 2
        if pages <= needed and enough < ALL_PAGES:  # a shorter bin needs more
            pages = enough
        settled &= pages in tried
        needed = max(needed, -1 if fails is None else fails)
        wanted.append(pages)
    return None if settled else wanted


def _bin_choice(tried: Tried, target: float, borrowed: bool, at_least: int | None) -> BinChoice:
    """The cheapest budget of a bin whose lower limit meets the target, no cheaper than in the bin before."""
    fails, top_k = _enough(tried, target)
    if fails is not None and top_k < ALL_PAGES:
        low, high = tried[fails].lower, tried[top_k].lower
        top_k = fails + math.ceil((top_k - fails) * (target - low) / (high - low))
    if borrowed and at_least is not None:
        # Pooled shorter lengths flatter the bin, whose own tail is lower.
        top_k = min(ALL_PAGES, math.ceil(WIDE * top_k))
    top_k = max(top_k, at_least or 0)
    p5, lower, upper = (
        float(np.interp(top_k, list(tried), [getattr(tail, name) for tail in tried.values()]))
        if top_k < ALL_PAGES
        else math.nan
        for name in ("estimate", "lower", "upper")
    )
    tail = next(iter(tried.values()))
    return BinChoice(tail.start, tail.end, top_k, p5, lower, upper, tail.n_tokens, tail.n_sequences, borrowed)


def _tail(found: Acceptance, bin_tokens: int, min_sequences: int, seed: int) -> list[PercentileInterval]:
    """p5 by bin; one that too few sequences reach is pooled with shorter ones, and only then with longer ones."""
    bins = found.position // bin_tokens
    reaching = _reaching(found, bin_tokens)
    everyone = set().union(*reaching.values())
    if len(everyone) < min_sequences:
        raise ConfigError(
            f"{len(everyone)} sequences were measured, at least {min_sequences} are needed for an interval; sample more"
        )
    tail = []
    for b in sorted(reaching):
        pooled, chosen = set(reaching[b]), [b]
        others = sorted((x for x in reaching if x < b), reverse=True) + sorted(x for x in reaching if x > b)
        for x in others:
            if len(pooled) >= min_sequences:
                break
            pooled |= reaching[x]
            chosen.append(x)
        inside = np.isin(bins, chosen)
        # Position 0 puts everything that was pooled into a single bin.
        (interval,) = percentile_by_bin_interval(
            found.alpha[inside], np.zeros(inside.sum(), np.int64), found.sequence[inside], 1, PERCENTILE, seed=seed
        )
        tail.append(
            PercentileInterval(
                b, b * bin_tokens, (b + 1) * bin_tokens, interval.n_tokens, interval.n_sequences,
                interval.estimate, interval.lower, interval.upper,
            )
        )  # fmt: skip
    return tail


def _reaching(found: Acceptance, bin_tokens: int) -> dict[int, set[int]]:
    """Bin -> the sequences with a token in it."""
    bins = found.position // bin_tokens
    return {int(b): set(np.unique(found.sequence[bins == b]).tolist()) for b in np.unique(bins)}
