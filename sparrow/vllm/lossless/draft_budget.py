"""Chooses how much drafts read: the budget that gave the most tokens per second.

The number of drafts is chosen for the budget in use (``draft_length``); once it is settled, the
budgets next to that one are tried with it.
"""

from __future__ import annotations

from collections.abc import Iterable

from sparrow.vllm.lossless.measured import (
    REACH,
    UNDER_WAY,
    Batch,
    Case,
    Measured,
    distance,
    typical,
)

TRY_BUDGETS = 48
"""Cycles with drafts after which the neighbouring budgets are tried, and again after twice as many,
four times as many and so on. Dense steps are timed again in cycles other than these.
"""
BUDGET_PROBES = 5
"""Cycles in a row with another budget; the first of them is not timed."""
BUDGET_LEAD = 0.02
"""Share by which another budget must be faster to be used."""


class DraftBudget:
    """Chooses what the drafts of each cycle read, an index of ``Measured.budgets``."""

    def __init__(self, measured: Measured) -> None:
        self.base = measured.budgets.index(1.0)
        self._measured = measured
        self._in_use: dict[Batch, int] = {}

    def in_use(self, batch: Batch) -> int:
        """Return the budget in use for a batch; at first, that of the nearest batch."""
        budget = self._in_use.get(batch)
        if budget is None:
            nearest = min(self._in_use, key=lambda other: distance(other, batch), default=None)
            is_near = nearest is not None and distance(nearest, batch) <= REACH
            budget = self._in_use[nearest] if nearest and is_near else self.base
            self._in_use[batch] = budget
        return budget

    def choose(self, batch: Batch, drafts: int) -> int:
        """Choose the budget of the next cycle, which has this number of drafts."""
        budget = self.in_use(batch)
        budgets = len(self._measured.budgets)
        if budgets == 1:
            return budget
        case = self._measured.find(batch, budget)
        if case is None or case.settled != drafts or case.drafting < TRY_BUDGETS:
            return budget
        cycles = case.drafting
        since = cycles - (TRY_BUDGETS << (cycles // TRY_BUDGETS).bit_length() - 1)
        others = [b for b in (budget - 1, budget + 1) if 0 <= b < budgets]
        if since < BUDGET_PROBES * len(others):
            return others[since // BUDGET_PROBES]
        if since == BUDGET_PROBES * len(others) + UNDER_WAY:
            self._compare(case, others, drafts)
        return budget

    def _compare(self, case: Case, others: Iterable[int], drafts: int) -> None:
        """Switch to one of the ``others`` if this number of drafts was faster with it."""
        ours = self._measured.speed(case, drafts, typical(case.seconds[drafts]))
        speed = {case: (1 + BUDGET_LEAD) * ours}
        for budget in others:
            other = self._measured.find(case.batch, budget)
            times = () if other is None else other.seconds.get(drafts, ())
            if other is not None and len(times) >= BUDGET_PROBES - 1:
                speed[other] = self._measured.speed(other, drafts, typical(times))
        best = max(speed, key=speed.__getitem__)
        if best is not case:
            self._in_use[case.batch] = best.budget
            best.in_use = drafts
            best.cycles = case.cycles
            best.drafting = case.drafting
