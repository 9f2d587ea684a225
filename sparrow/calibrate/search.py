"""Search for the cheapest schedule whose tail meets a target.

The search is independent of model and engine: the caller passes in a ``measure`` function. The
method comes from Sparrow (arXiv 2606.08446, section 4). This version also computes confidence
intervals, borrows tokens from shorter lengths, and chooses a separate budget for each bin
(docs/calibration.md).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from sparrow.errors import ConfigError
from sparrow.mismatch import (
    MIN_SEQUENCES,
    PercentileInterval,
    percentile_by_bin_interval,
    plain,
    relative_span,
)
from sparrow.schedule import ALL_PAGES, SparsitySchedule

PERCENTILE = 5
# If two budgets are further apart than this factor, measure one in between before interpolating p5.
WIDE = 1.5
STEP = 4 / 3  # first factor to try on a budget that is too small or needlessly large


class Acceptance(NamedTuple):
    """Acceptance of all measured tokens: rates (float64), positions and sequence ids (int64), each
    ``[T]``.
    """

    alpha: np.ndarray
    position: np.ndarray
    sequence: np.ndarray


Measure = Callable[[SparsitySchedule], Acceptance]
"""Measures the actor's acceptance under a schedule. All calls use the same trajectories."""

# maps the top-k values of a pass (one per bin) to the bins' tails
Curves = dict[tuple[int, ...], tuple[PercentileInterval, ...]]


@dataclass(frozen=True)
class BinChoice:
    """The budget chosen for a length bin, and the evidence for it."""

    # length range in tokens; the first bin may span several schedule bins (see ``calibrate``)
    start: int
    end: int
    top_k: int  # pages kept by score in this bin
    # interpolated p5 at ``top_k``, with its confidence interval; NaN for a dense bin
    p5: float
    lower: float
    upper: float
    # the sample behind p5 and its interval
    n_tokens: int
    n_sequences: int
    # whether the bin had too few tokens of its own; such a bin borrows tokens from shorter lengths
    # and gets 1.5 times as many pages
    borrowed: bool
    # p5 of dense rollouts in this bin, and its interval; NaN if not measured
    ceiling: float = math.nan
    ceiling_lower: float = math.nan
    ceiling_upper: float = math.nan


@dataclass(frozen=True)
class Calibration:
    """A schedule and the measurements behind it."""

    schedule: SparsitySchedule  # dense beyond the last measured bin
    bins: tuple[BinChoice, ...]  # one choice per measured bin
    curves: Curves  # the bins' tails in every pass


def calibrate(
    measure: Measure,
    trials: Sequence[SparsitySchedule],
    target: float = 0.86,
    fewest: int = 0,
    refine: int = 3,
    seed: int = 0,
    provenance: Mapping[str, Any] | None = None,
    ceiling: Acceptance | None = None,
    relative: bool = False,
) -> Calibration:
    """Find the cheapest schedule that keeps p5's lower confidence limit at ``target`` or above in
    every bin. Budgets never decrease with length.

    Between two measured budgets, the limit is interpolated linearly in log budget. The limit
    flattens towards larger budgets even on that scale, so interpolation errs on the side of more
    pages. Brackets wider than ``WIDE`` are bisected first.

    A bin has too few tokens if fewer than ``MIN_SEQUENCES`` sequences reach it or fewer than
    ``MIN_SEQUENCES`` of its tokens would lie below p5. The first bins are merged until they have
    enough tokens. A later bin with too few tokens borrows some from shorter lengths.

    Args:
        measure: returns the acceptance under a schedule; called once per pass.
        trials: schedules to measure first, all with the same layout.
        target: the value that the lower end of p5's 95 % interval must reach.
        fewest: minimum number of pages to try in any bin.
        refine: maximum number of passes after the trials. In every unsettled bin, a pass tries more
            pages if no budget has met the target yet, and fewer pages if all budgets have.
            Otherwise, it tries a budget halfway between the largest one that failed and the
            smallest one that passed.
        seed: seed for the bootstrap.
        provenance: recorded in the schedule, together with the evidence.
        ceiling: the acceptance that the same tokens would have had with dense sampling.
        relative: apply the target to p5 relative to that ceiling (see ``mismatch.tau``) rather than
            to p5 itself.

    Raises ConfigError if there are no trials, the target is outside (0, 1), or there are too few
    tokens in total.
    """
    if not trials or not 0 < target < 1:
        raise ConfigError(
            f"need at least one budget and a target between 0 and 1, got {len(trials)} "
            f"budgets and a target of {target}"
        )
    layout = trials[0].replace(provenance={})
    curves: Curves = {}
    judged: Curves = {}  # ``curves`` on the target's scale
    thin: dict[int, bool] = {}  # whether a bin has too few tokens; the same in every pass

    def tails(acceptance: Acceptance) -> tuple[PercentileInterval, ...]:
        bins = _joined(acceptance, layout.bin_tokens)
        thin.update((int(b), _is_thin(acceptance, bins == b)) for b in np.unique(bins))
        return tuple(_tail(acceptance, bins, layout.bin_tokens, seed))

    best = tails(ceiling) if ceiling else ()

    def add(trial: SparsitySchedule) -> None:
        curve = tails(measure(trial))
        pages = tuple(trial.top_k[min(b, len(trial.top_k) - 1)] for b in thin)
        curves[pages] = curve
        judged[pages] = (
            tuple(_relative(*pair) for pair in zip(curve, best, strict=True)) if relative else curve
        )

    for trial in trials:
        add(trial)
    for _ in range(refine):
        if (wanted := _wanted(_by_bin(judged), target, fewest, layout.page_size)) is None:
            break
        add(layout.replace(top_k=_table(thin, wanted)))
    bins: list[BinChoice] = []
    for i, (tried, absolute, borrowed) in enumerate(
        zip(_by_bin(judged), _by_bin(curves), thin.values(), strict=True)
    ):
        choice = _bin_choice(tried, absolute, target, borrowed, bins[-1].top_k if bins else 0)
        if best:
            choice = replace(
                choice,
                ceiling=best[i].estimate,
                ceiling_lower=best[i].lower,
                ceiling_upper=best[i].upper,
            )
        bins.append(choice)
    evidence = {
        "curves": {
            " ".join(map(str, pages if len(set(pages)) > 1 else pages[:1])): [
                plain([t.start, t.end, t.estimate, t.lower, t.upper]) for t in tail
            ]
            for pages, tail in curves.items()
        },
        "relative_target" if relative else "target": target,
        "measured_up_to": bins[-1].end,
        "bins": [plain(asdict(b)) for b in bins],
    }
    table = (*_table(thin, (b.top_k for b in bins)), ALL_PAGES)
    schedule = layout.replace(top_k=table, provenance={**(provenance or {}), **evidence})
    return Calibration(schedule, tuple(bins), curves)


def _table(bins: Iterable[int], pages: Iterable[int]) -> tuple[int, ...]:
    """Build a schedule's table from ``bins`` (ascending) and their budgets ``pages``, so that
    budgets never decrease with length.

    Bins that weren't measured (prompt-only, merged into the first bin, or between short and long
    prompts) get the next longer bin's budget.
    """
    measured = list(bins)
    rising = np.maximum.accumulate(list(pages)).tolist()
    return tuple(rising[i] for i in np.searchsorted(measured, range(measured[-1] + 1)))


Tried = dict[int, PercentileInterval]  # top-k, ascending -> one bin's tail


def _by_bin(curves: Curves) -> list[Tried]:
    columns = zip(*(zip(*each, strict=True) for each in curves.items()), strict=True)
    return [dict(sorted(column, key=lambda each: each[0])) for column in columns]


def _enough(tried: Tried, target: float) -> tuple[int | None, int]:
    """Find the smallest budget tried so far whose lower limit meets the target. Return a pair: the
    next smaller budget that was tried (or None), and the budget found.
    """
    enough = next((k for k, tail in tried.items() if tail.lower >= target), ALL_PAGES)
    return max((k for k in tried if k < enough), default=None), enough


def _wanted(
    by_bin: Sequence[Tried], target: float, fewest: int, page_size: int
) -> list[int] | None:
    """Pick the budget to measure next in every bin. A settled bin gets a budget that has already
    been measured. Return None once all bins are settled.
    """
    wanted: list[int] = []
    settled = True
    needed = -1
    for tried in by_bin:
        fails, enough = _enough(tried, target)
        pages = enough
        if enough == ALL_PAGES:
            # Only dense decoding has been tried here: no earlier search reached this length.
            if fails is None:
                pages = wanted[-1] if wanted else ALL_PAGES
            elif fails * page_size < tried[fails].end:
                pages = 2 * fails + 1 if len(tried) > 1 else max(fails + 1, math.ceil(fails * STEP))
            else:
                pages = fails
        elif fails is None:
            pages = max(fewest, math.floor(enough / STEP))
        elif enough - fails > 1 and enough > WIDE * fails:
            pages = (fails + enough) // 2
        if pages <= needed and enough < ALL_PAGES:  # a shorter bin needs more pages
            pages = enough
        settled &= pages in tried
        needed = max(needed, -1 if fails is None else fails)
        wanted.append(pages)
    return None if settled else wanted


def _relative(tail: PercentileInterval, ceiling: PercentileInterval) -> PercentileInterval:
    spans = ((t.estimate, t.lower, t.upper) for t in (tail, ceiling))
    estimate, lower, upper = relative_span(*spans)
    return replace(tail, estimate=estimate, lower=lower, upper=upper)


def _bin_choice(
    tried: Tried, absolute: Tried, target: float, borrowed: bool, at_least: int
) -> BinChoice:
    """Pick the cheapest budget whose lower limit meets the target in a bin. The result is never
    less than ``at_least``, the budget of the previous bin.

    ``absolute`` holds the measured tails. ``tried`` holds the same tails on the target's scale.
    """
    fails, top_k = _enough(tried, target)
    if fails is not None and top_k < ALL_PAGES:
        low = tried[fails].lower
        high = tried[top_k].lower
        top_k = math.ceil(
            (1 + fails) * ((1 + top_k) / (1 + fails)) ** ((target - low) / (high - low)) - 1
        )
    if borrowed:
        # Tokens borrowed from shorter lengths make the bin's tail look better than it is.
        top_k = min(ALL_PAGES, math.ceil(WIDE * top_k))
    top_k = max(top_k, at_least)
    p5, lower, upper = (
        float(
            np.interp(
                np.log1p(top_k),
                np.log1p(list(absolute)),
                [getattr(x, name) for x in absolute.values()],
            )
        )
        if top_k < ALL_PAGES
        else math.nan
        for name in ("estimate", "lower", "upper")
    )
    tail = next(iter(tried.values()))
    return BinChoice(
        tail.start, tail.end, top_k, p5, lower, upper, tail.n_tokens, tail.n_sequences, borrowed
    )


def _is_thin(acceptance: Acceptance, inside: np.ndarray) -> bool:
    """Return whether ``inside`` (bool ``[T]``) selects too few tokens. There are too few if they
    come from too few sequences, or if too few tokens lie below p5.
    """
    tokens = int(inside.sum())
    sequences = len(np.unique(acceptance.sequence[inside]))
    return tokens * PERCENTILE < 100 * MIN_SEQUENCES or sequences < MIN_SEQUENCES


def _joined(acceptance: Acceptance, bin_tokens: int) -> np.ndarray:
    """Return each token's bin, int64 ``[T]``. The first bins are merged until they have enough
    tokens between them.
    """
    bins = acceptance.position // bin_tokens
    for b in np.unique(bins):
        if not _is_thin(acceptance, bins <= b):
            return np.maximum(bins, b)
    raise ConfigError(
        f"{len(bins)} tokens from {len(np.unique(acceptance.sequence))} sequences were measured, "
        f"but a confidence interval needs at least {100 * MIN_SEQUENCES // PERCENTILE} tokens from "
        f"{MIN_SEQUENCES} sequences; sample more"
    )


def _tail(
    acceptance: Acceptance, bins: np.ndarray, bin_tokens: int, seed: int
) -> list[PercentileInterval]:
    """Compute each bin's p5. Bins with too few tokens also use tokens from shorter lengths."""
    tail: list[PercentileInterval] = []
    for b in np.unique(bins):
        first = b
        while _is_thin(acceptance, inside := (bins >= first) & (bins <= b)) and first > bins.min():
            first -= 1
        alpha = acceptance.alpha[inside]
        sequence = acceptance.sequence[inside]
        # Put all pooled tokens into one bin by setting their positions to 0.
        position = np.zeros(len(alpha), np.int64)
        (interval,) = percentile_by_bin_interval(
            alpha, position, sequence, 1, PERCENTILE, seed=seed
        )
        start = b if tail else acceptance.position.min() // bin_tokens
        tail.append(
            replace(
                interval, bin=int(b), start=int(start * bin_tokens), end=int((b + 1) * bin_tokens)
            )
        )
    return tail
