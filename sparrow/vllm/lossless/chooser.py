"""Choose how many tokens to draft, how to use guesses, and how much the drafts read. The winner is
the combination with the most tokens per second in similar batches, as measured while the engine
runs.

The choice only affects speed. Samples follow the policy no matter what is drafted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from sparrow.vllm.lossless.draft_budget import DraftBudget
from sparrow.vllm.lossless.draft_length import DraftLength
from sparrow.vllm.lossless.measured import Batch, Case, Measured, steps_of
from sparrow.vllm.lossless.plan import Choice, DraftPlan


class DraftChooser:
    """Chooses the draft length (``DraftLength``) and the draft budget (``DraftBudget``) of each
    cycle, based on measurements from earlier cycles (``Measured``).

    Args:
        choices: the options, including 0 (no drafting). Each is a draft length without guesses,
            with guesses, or for guesses alone.
        budgets: budgets to choose from, as multiples of the draft schedule, including 1.
    """

    def __init__(self, choices: Iterable[Choice], budgets: tuple[float, ...] = (1.0,)) -> None:
        self.budgets = budgets
        self.measured = Measured(budgets)
        self.draft_length = DraftLength(choices, self.measured)
        self.draft_budget = DraftBudget(self.measured)
        # current budget for batches like the latest one
        self._budget = self.draft_budget.base

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The options. Those without guesses come first."""
        return self.draft_length.choices

    @property
    def chosen(self) -> Counter[Choice]:
        """Number of cycles for each choice."""
        return self.draft_length.chosen

    @property
    def is_watching(self) -> bool:
        """True if the latest cycle should be observed."""
        return self.draft_length.is_watching

    @property
    def repeats(self) -> int:
        """Number of cycles that still run without drafts before the next choice. If the batch size
        changes, the next choice comes earlier.
        """
        return self.draft_length.repeats

    def settled(self, rows: int, length: float) -> Choice | None:
        """Return the current choice for similar batches, or None while choices are still being
        timed.
        """
        batch = _batch(rows, length)
        case = self.measured.find(batch, self.draft_budget.in_use(batch))
        return None if case is None else case.settled

    def plan(self, rows: int, length: float, repeated: int = 0) -> DraftPlan:
        """Plan the next cycle's drafts; see ``choose`` and ``choose_budget``.

        A cycle without drafts needs no budget. Its time counts towards the current budget.
        """
        choice = self.choose(rows, length, repeated)
        budget = self.choose_budget(rows, length, choice) if choice else self._budget
        return DraftPlan.of(choice, budget)

    def choose(self, rows: int, length: float, repeated: int = 0) -> Choice:
        """Choose how the next cycle drafts.

        Args:
            rows: number of sequences.
            length: mean length of the sequences, in tokens.
            repeated: number of cycles without drafts since the previous choice, at most
                ``repeats``.
        """
        self.draft_length.count_repeated(repeated)
        batch = _batch(rows, length)
        self._budget = self.draft_budget.in_use(batch)
        return self.draft_length.choose(self.measured.case(batch, self._budget))

    def choose_budget(self, rows: int, length: float, choice: Choice) -> int:
        """Choose the draft budget for the next cycle, and return its index in ``budgets``. Call
        this right after ``choose``, and pass the choice that it returned, unless that choice is 0.
        """
        return self.draft_budget.choose(_batch(rows, length), choice)

    def observe(
        self,
        rows: int,
        length: float,
        choice: Choice,
        seconds: float,
        accepted: int,
        judged: int,
        *,
        first: bool = False,
        budget: int | None = None,
    ) -> None:
        """Record the measurements from a cycle in which all sequences drafted alike.

        Args:
            rows: number of sequences.
            length: mean length of the sequences, in tokens.
            choice: how the sequences drafted.
            seconds: time for drafting and verification.
            accepted: number of accepted drafts.
            judged: number of judged drafts. In each sequence, every draft up to and including the
                first rejected one is judged.
            first: whether the previous cycle had a different choice or draft budget. The host may
                have noticed the end of that cycle late, which makes this cycle look too short. This
                cycle's time can therefore rule out a choice, but not support one.
            budget: the draft budget; defaults to the current one for such batches.
        """
        batch = _batch(rows, length)
        in_use = self.draft_budget.in_use(batch)
        case = self.measured.case(batch, in_use if budget is None else budget)
        self.measured.add(case, rows, choice, seconds, accepted, judged, first)

    def in_use(self) -> dict[str, Choice]:
        """Return the current choice for each batch size and mean length, which are rounded as in
        ``Measured``.
        """
        return {
            _name(case.batch): case.in_use
            for case in self._cases_in_use()
            if case.in_use is not None
        }

    def budgets_in_use(self) -> dict[str, float]:
        """Return the budgets for the batches in ``in_use``, as multiples of the draft schedule.
        Budgets of 1 are left out.
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
