"""Choose how much drafts read, by picking the budget with the most tokens per second.

The draft length is chosen for the current budget (``draft_length``). Once it has settled,
neighbouring budgets are tried at the same draft length.
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
from sparrow.vllm.lossless.plan import Choice

TRY_BUDGETS = 48
"""Neighbouring budgets are tried after this many cycles with drafts, then after twice as many, four
times as many, and so on. These trials never coincide with the cycles that re-time dense steps.
"""
BUDGET_PROBES = 5
"""Another budget is tried for this many cycles in a row. The first of these cycles is not timed."""
BUDGET_LEAD = 0.02
"""To replace the current budget, another one must be faster by at least this fraction."""


class DraftBudget:
    """Chooses the draft budget for each cycle, as an index into ``Measured.budgets``."""

    def __init__(self, measured: Measured) -> None:
        self.base = measured.budgets.index(1.0)
        self._measured = measured
        self._in_use: dict[Batch, int] = {}

    def in_use(self, batch: Batch) -> int:
        """Return the current budget for a batch. A new kind of batch starts with the budget of the
        nearest kind, provided that kind is close enough.
        """
        budget = self._in_use.get(batch)
        if budget is None:
            nearest = min(self._in_use, key=lambda other: distance(other, batch), default=None)
            is_near = nearest is not None and distance(nearest, batch) <= REACH
            budget = self._in_use[nearest] if nearest and is_near else self.base
            self._in_use[batch] = budget
        return budget

    def choose(self, batch: Batch, choice: Choice) -> int:
        """Choose the budget for the next cycle, which drafts according to ``choice``."""
        budget = self.in_use(batch)
        budgets = len(self._measured.budgets)
        if budgets == 1:
            return budget
        case = self._measured.find(batch, budget)
        if case is None or case.settled != choice or case.drafting < TRY_BUDGETS:
            return budget
        cycles = case.drafting
        since = cycles - (TRY_BUDGETS << (cycles // TRY_BUDGETS).bit_length() - 1)
        others = [b for b in (budget - 1, budget + 1) if 0 <= b < budgets]
        if since < BUDGET_PROBES * len(others):
            return others[since // BUDGET_PROBES]
        if since == BUDGET_PROBES * len(others) + UNDER_WAY:
            self._compare(case, others, choice)
        return budget

    def _compare(self, case: Case, others: Iterable[int], choice: Choice) -> None:
        """Switch to one of the ``others`` if drafting was faster with it."""
        ours = self._measured.speed(case, choice, typical(case.seconds[choice]))
        speed = {case: (1 + BUDGET_LEAD) * ours}
        for budget in others:
            other = self._measured.find(case.batch, budget)
            times = () if other is None else other.seconds.get(choice, ())
            if other is not None and len(times) >= BUDGET_PROBES - 1:
                speed[other] = self._measured.speed(other, choice, typical(times))
        best = max(speed, key=speed.__getitem__)
        if best is not case:
            self._in_use[case.batch] = best.budget
            best.in_use = choice
            best.cycles = case.cycles
            best.drafting = case.drafting
