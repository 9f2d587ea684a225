"""The choice of how many tokens to draft and how much the drafts read: the combination that yielded
the most tokens per second in similar batches, as measured while the engine runs.

The choice affects only speed; samples follow the policy whatever is drafted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from sparrow.vllm.lossless.draft_budget import DraftBudget
from sparrow.vllm.lossless.draft_length import DraftLength
from sparrow.vllm.lossless.measured import Batch, Case, Measured, steps_of
from sparrow.vllm.lossless.plan import DraftPlan


class DraftChooser:
    """The chooser of the number of drafts in each cycle (``DraftLength``) and of their budget
    (``DraftBudget``), based on measurements of earlier cycles (``Measured``).

    Args:
        choices: numbers of drafts to choose from, including 0 (no drafting).
        budgets: budgets to choose from, as multiples of the draft schedule, including 1.
    """

    def __init__(self, choices: Iterable[int], budgets: tuple[float, ...] = (1.0,)) -> None:
        self.budgets = budgets
        self.measured = Measured(budgets)
        self.draft_length = DraftLength(choices, self.measured)
        self.draft_budget = DraftBudget(self.measured)
        self._budget = self.draft_budget.base  # in use for batches like the latest cycle's

    @property
    def choices(self) -> tuple[int, ...]:
        """Numbers of drafts to choose from."""
        return self.draft_length.choices

    @property
    def chosen(self) -> Counter[int]:
        """Numbers of cycles, by number of drafts."""
        return self.draft_length.chosen

    @property
    def is_watching(self) -> bool:
        """True if the latest chosen cycle is to be observed."""
        return self.draft_length.is_watching

    @property
    def repeats(self) -> int:
        """Number of further cycles without drafts for which no new choice is needed, as long as the
        number of sequences does not change.
        """
        return self.draft_length.repeats

    def settled(self, rows: int, length: float) -> int | None:
        """Return the number of drafts in use for similar batches; None while different numbers are
        being timed.
        """
        batch = _batch(rows, length)
        case = self.measured.find(batch, self.draft_budget.in_use(batch))
        return None if case is None else case.settled

    def plan(self, rows: int, length: float, repeated: int = 0) -> DraftPlan:
        """Plan the drafts of the next cycle; see ``choose`` and ``choose_budget``.

        No budget is chosen for a cycle without drafts; the time of such a cycle counts for the
        budget in use.
        """
        tokens = self.choose(rows, length, repeated)
        budget = self.choose_budget(rows, length, tokens) if tokens else self._budget
        return DraftPlan(tokens, budget)

    def choose(self, rows: int, length: float, repeated: int = 0) -> int:
        """Choose the number of drafts in the next cycle, for ``rows`` sequences of mean ``length``
        (tokens).

        Args:
            repeated: number of cycles without drafts, at most ``repeats``, that have followed the
                previous choice.
        """
        self.draft_length.count_repeated(repeated)
        batch = _batch(rows, length)
        self._budget = self.draft_budget.in_use(batch)
        return self.draft_length.choose(self.measured.case(batch, self._budget))

    def choose_budget(self, rows: int, length: float, drafts: int) -> int:
        """Choose the budget of the drafts in the next cycle, an index of ``budgets``. If ``choose``
        returned a number above 0, this method is called next, with that number.
        """
        return self.draft_budget.choose(_batch(rows, length), drafts)

    def observe(
        self,
        rows: int,
        length: float,
        drafts: int,
        seconds: float,
        accepted: int,
        judged: int,
        *,
        first: bool = False,
        budget: int | None = None,
    ) -> None:
        """Record the measurements of a cycle of ``rows`` sequences with the same number of drafts.

        Args:
            seconds: time of the drafts and their verification.
            accepted: number of accepted drafts.
            judged: number of drafts up to and including the first rejected one of each sequence.
            first: whether the previous cycle had a different number of drafts or budget. The host
                may have seen the end of that cycle late, which makes this one seem short, so this
                time can rule out a number of drafts but not speak for it.
            budget: the budget of the drafts; by default, the one in use for such batches.
        """
        batch = _batch(rows, length)
        in_use = self.draft_budget.in_use(batch)
        case = self.measured.case(batch, in_use if budget is None else budget)
        self.measured.add(case, drafts, seconds, accepted, judged, first)

    def in_use(self) -> dict[str, int]:
        """Return the numbers of drafts in use, by number of sequences and mean length, both rounded
        to the steps of ``Measured``.
        """
        return {
            _name(case.batch): case.in_use
            for case in self._cases_in_use()
            if case.in_use is not None
        }

    def budgets_in_use(self) -> dict[str, float]:
        """Return the budgets for the batches in ``in_use``, as multiples of the draft schedule;
        batches with the multiple 1 are omitted.
        """
        read = {_name(case.batch): self.budgets[case.budget] for case in self._cases_in_use()}
        return {name: multiple for name, multiple in read.items() if multiple != 1}

    def _cases_in_use(self) -> Iterator[Case]:
        for _, case in sorted(self.measured.cases.items()):
            if case.in_use is not None and self.draft_budget.in_use(case.batch) == case.budget:
                yield case


def _batch(rows: int, length: float) -> Batch:
    return steps_of(rows), steps_of(length)


def _name(batch: Batch) -> str:
    return f"{2 ** (batch[0] / 2):.0f} x {2 ** (batch[1] / 2):.0f}"
