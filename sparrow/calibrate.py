"""The cheapest schedule whose tail holds a target, for any model.

The published way samples the model anew at each of 18 budgets. Here trajectories are sampled once and
scored at every budget by teacher-forced sparse passes, which compute what decoding would have computed.
This module only searches: it is handed ``measure`` and knows no engine. Source: Sparrow, arXiv 2606.08446,
section 4; the error bars, the borrowing and the bisection are ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from sparrow.errors import ConfigError
from sparrow.mismatch import PercentileInterval, percentile_by_bin_interval
from sparrow.schedule import ALL_PAGES, SparsitySchedule

PERCENTILE = 5
WIDE = 1.5  # between budgets further apart than this factor, p5 is not taken to be a straight line


class Acceptance(NamedTuple):
    """Acceptance rates of all measured tokens: rate float64, position and sequence id int64, each ``[T]``."""

    alpha: np.ndarray
    position: np.ndarray
    sequence: np.ndarray


Measure = Callable[[SparsitySchedule], Acceptance]
"""Acceptance of the actor under a schedule, on trajectories of the caller's choice."""

Curves = dict[int, tuple[PercentileInterval, ...]]
"""Top-k -> tail by bin."""


@dataclass(frozen=True)
class BinChoice:
    """What was chosen in one length bin, and on what evidence.

    Attributes:
        start, end: lengths in tokens.
        top_k: pages in the schedule.
        p5, lower, upper: the tail at that budget and its confidence interval, interpolated; NaN for a dense bin.
        n_tokens, n_sequences: what they were computed from.
        borrowed: the bin alone had too few sequences, so its neighbours were pooled in, and one budget more was taken
            unless only longer lengths were there to be pooled.
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
        curves: top-k -> tail by bin, for every budget measured.
    """

    schedule: SparsitySchedule
    bins: tuple[BinChoice, ...]
    curves: Curves


def calibrate(
    measure: Measure,
    budgets: Sequence[int],
    target: float = 0.86,
    layout: SparsitySchedule | None = None,
    refine: int = 3,
    min_sequences: int = 20,
    seed: int = 0,
    provenance: Mapping[str, Any] | None = None,
) -> Calibration:
    """The cheapest schedule, monotone in length, whose p5 has a lower confidence limit of ``target`` in every bin.

    Between two measured budgets the limit is taken to rise in a straight line. It rises ever more slowly in truth, so
    this errs towards more pages; brackets wider than ``WIDE`` are bisected first.

    Args:
        measure: acceptance under a schedule; called once per budget with ``fixed`` schedules.
        budgets: top-k values to try first, in any order; larger ones follow by themselves where none of them will do.
        target: what the lower end of the 95 % interval of p5 must reach.
        layout: gives page size, bins and dense layers; the published ones by default.
        refine: rounds of bisection between the budget that fails and the one that passes.
        min_sequences: a bin that fewer sequences reach borrows from other lengths, shorter ones first.
        seed: of the bootstrap.
        provenance: recorded in the schedule, with the evidence.

    Raises:
        ConfigError: no budgets, a target outside (0, 1), or fewer than ``min_sequences`` sequences in all.
    """
    if not budgets or not 0 < target < 1:
        raise ConfigError(f"need at least one budget and a target between 0 and 1, got {list(budgets)} and {target}")
    layout = layout or SparsitySchedule.dense()
    curves: Curves = {}
    own: list[int] = []  # sequences that reach each bin; the same at every budget

    def add(top_k: int) -> None:
        found = measure(layout.replace(top_k=(top_k,)))
        curves[top_k] = tuple(_tail(found, layout.bin_tokens, min_sequences, seed))
        own[:] = [len(sequences) for _, sequences in sorted(_reaching(found, layout.bin_tokens).items())]

    for top_k in sorted(set(budgets)):
        add(top_k)
    while any(tail.lower < target and max(curves) * layout.page_size < tail.end for tail in curves[max(curves)]):
        add(2 * max(curves) + 1)
    for _ in range(refine):
        for middle in sorted({(a + b) // 2 for a, b in _brackets(curves, target) if b - a > 1 and b > WIDE * a}):
            add(middle)
    bins: list[BinChoice] = []
    for i, n in enumerate(own):
        bins.append(_choose(curves, i, target, n < min_sequences, bins[-1].top_k if bins else None))
    # Bins before the first measured one hold prompts only; the first measured budget serves them.
    table = [bins[0].top_k] * (bins[0].start // layout.bin_tokens) + [b.top_k for b in bins] + [ALL_PAGES]
    table_of_curves = {
        str(k): [[c.start, c.end, *_plain({"p5": c.estimate, "low": c.lower, "high": c.upper}).values()] for c in curve]
        for k, curve in sorted(curves.items())
    }
    evidence = {
        "curves": table_of_curves,
        "target": target,
        "measured_up_to": bins[-1].end,
        "bins": [_plain(asdict(b)) for b in bins],
    }
    schedule = layout.replace(top_k=tuple(table), provenance={**(provenance or {}), **evidence})
    return Calibration(schedule, tuple(bins), curves)


def ladder(found: Calibration) -> list[int]:
    """Budgets around those found, for another search on trajectories of the actor itself; none if all is dense."""
    sparse = [b.top_k for b in found.bins if b.top_k < ALL_PAGES]
    if not sparse:
        return []
    low, high = 0.75 * min(sparse), max(sparse) / 0.75 + 1
    steps = math.ceil(math.log(high / max(low, 1)) / math.log(WIDE))
    return sorted({round(k) for k in np.geomspace(max(low, 1), high, steps + 1)})


def _choose(curves: Curves, i: int, target: float, borrowed: bool, at_least: int | None) -> BinChoice:
    """The cheapest budget of bin ``i`` whose lower limit meets the target, no cheaper than in the bin before."""
    tried = sorted(curves)
    top_k = next((k for k in tried if curves[k][i].lower >= target), ALL_PAGES)
    if borrowed and at_least is not None:
        # Pooled shorter lengths flatter the bin, whose own tail is lower: take the next budget.
        top_k = next((k for k in tried if k > top_k), ALL_PAGES)
    elif tried[0] < top_k < ALL_PAGES:
        fails = tried[tried.index(top_k) - 1]
        low, high = curves[fails][i].lower, curves[top_k][i].lower
        top_k = fails + math.ceil((top_k - fails) * (target - low) / (high - low))
    top_k = max(top_k, at_least or 0)
    p5, lower, upper = (
        float(np.interp(top_k, tried, [getattr(curves[k][i], name) for k in tried])) if top_k < ALL_PAGES else math.nan
        for name in ("estimate", "lower", "upper")
    )
    tail = curves[tried[0]][i]
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


def _brackets(curves: Curves, target: float) -> set[tuple[int, int]]:
    """Per bin, the largest budget that fails below the smallest that passes."""
    tried = sorted(curves)
    brackets = set()
    for i in range(len(curves[tried[0]])):
        passing = [k for k in tried if curves[k][i].lower >= target]
        if passing and passing[0] != tried[0]:
            brackets.add((tried[tried.index(passing[0]) - 1], passing[0]))
    return brackets


def _plain(values: dict[str, Any]) -> dict[str, Any]:
    return {k: None if isinstance(v, float) and math.isnan(v) else v for k, v in values.items()}
