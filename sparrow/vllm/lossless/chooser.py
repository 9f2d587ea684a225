"""Choose how many tokens to draft, whether with guesses from history, and how much the drafts read.
The choice is the combination that yielded the most tokens per second in similar batches, as
measured while the engine runs.

The choice affects only speed. Samples follow the policy, whatever is drafted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from sparrow.vllm.lossless.draft_budget import DraftBudget
from sparrow.vllm.lossless.draft_length import DraftLength
from sparrow.vllm.lossless.measured import Batch, Case, Measured, steps_of
from sparrow.vllm.lossless.plan import Choice, DraftPlan, Guessed, drafts_of


class DraftChooser:
    """Chooses how each cycle drafts (``DraftLength``) and the budget of the drafts
    (``DraftBudget``), based on measurements of earlier cycles (``Measured``).

    Args:
        choices: numbers of drafts to choose from, with or without guesses, including 0 (no
            drafting).
        budgets: budgets to choose from, as multiples of the draft schedule, including 1.
    """

    def __init__(self, choices: Iterable[Choice], budgets: tuple[float, ...] = (1.0,)) -> None:
        self.budgets = budgets
        self.measured = Measured(budgets)
        self.draft_length = DraftLength(choices, self.measured)
        self.draft_budget = DraftBudget(self.measured)
        # the budget in use for batches like that of the latest cycle
        self._budget = self.draft_budget.base

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Numbers of drafts to choose from, followed by those with guesses."""
        return self.draft_length.choices

    @property
    def chosen(self) -> Counter[Choice]:
        """How many cycles had each choice."""
        return self.draft_length.chosen

    @property
    def is_watching(self) -> bool:
        """True if the cycle that was chosen last should be observed."""
        return self.draft_length.is_watching

    @property
    def repeats(self) -> int:
        """Number of further cycles without drafts that need no new choice, as long as the number of
        sequences does not change.
        """
        return self.draft_length.repeats

    def settled(self, rows: int, length: float) -> Choice | None:
        """Return the choice in use for similar batches. Return None while different choices are
        being timed.
        """
        batch = _batch(rows, length)
        case = self.measured.find(batch, self.draft_budget.in_use(batch))
        return None if case is None else case.settled

    def plan(self, rows: int, length: float, repeated: int = 0) -> DraftPlan:
        """Plan the drafts of the next cycle; see ``choose`` and ``choose_budget``.

        No budget is chosen for a cycle without drafts. The time of such a cycle counts for the
        budget in use.
        """
        choice = self.choose(rows, length, repeated)
        budget = self.choose_budget(rows, length, choice) if choice else self._budget
        return DraftPlan(drafts_of(choice), budget, isinstance(choice, Guessed))

    def choose(self, rows: int, length: float, repeated: int = 0) -> Choice:
        """Choose how the next cycle drafts, which has ``rows`` sequences with a mean length of
        ``length`` tokens.

        Args:
            repeated: number of cycles without drafts that have followed the previous choice; at
                most ``repeats``.
        """
        self.draft_length.count_repeated(repeated)
        batch = _batch(rows, length)
        self._budget = self.draft_budget.in_use(batch)
        return self.draft_length.choose(self.measured.case(batch, self._budget))

    def choose_budget(self, rows: int, length: float, choice: Choice) -> int:
        """Choose the budget of the drafts in the next cycle, and return its index in ``budgets``.
        If ``choose`` has returned a choice other than 0, this method must be called next, with that
        choice.
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
        """Record the measurements of a cycle of ``rows`` sequences, all of which had the drafts of
        this choice.

        Args:
            seconds: time of the drafts and their verification.
            accepted: number of accepted drafts.
            judged: number of drafts that were judged: in each sequence, those up to and including
                the first rejected draft.
            first: whether the previous cycle had a different choice or budget of drafts. The host
                may have seen the end of that cycle late, so this cycle may seem too short. Its time
                can therefore rule out a choice, but not support it.
            budget: the budget of the drafts; by default, the budget in use for such batches.
        """
        batch = _batch(rows, length)
        in_use = self.draft_budget.in_use(batch)
        case = self.measured.case(batch, in_use if budget is None else budget)
        self.measured.add(case, rows, choice, seconds, accepted, judged, first)

    def in_use(self) -> dict[str, Choice]:
        """Return the choices in use, by number of sequences and mean length, both of which are
        rounded to the steps of ``Measured``.
        """
        return {
            _name(case.batch): case.in_use
            for case in self._cases_in_use()
            if case.in_use is not None
        }

    def budgets_in_use(self) -> dict[str, float]:
        """Return the budgets for the batches in ``in_use``, as multiples of the draft schedule.
        Batches with a multiple of 1 are omitted.
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
