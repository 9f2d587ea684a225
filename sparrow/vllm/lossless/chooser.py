"""How many tokens to draft, and what drafts read: what gave the most tokens per second in similar
batches, as measured while running.

Nothing here changes what is sampled, only how fast: any drafts are exact.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from sparrow.vllm.lossless.draft_budget import DraftBudget
from sparrow.vllm.lossless.draft_length import DraftLength
from sparrow.vllm.lossless.measured import Batch, Case, Measured, steps_of
from sparrow.vllm.lossless.plan import DraftPlan


class DraftChooser:
    """Chooses the number of drafts of each cycle (``DraftLength``), and what they read
    (``DraftBudget``), by what was measured of the cycles before (``Measured``).

    Args:
        choices: numbers of drafts to choose from, 0 (no drafting) included.
        budgets: what drafts may read, in multiples of the draft schedule, 1 included.
    """

    def __init__(self, choices: Iterable[int], budgets: tuple[float, ...] = (1.0,)) -> None:
        self.budgets = budgets
        self.measured = Measured(budgets)
        self.draft_length = DraftLength(choices, self.measured)
        self.draft_budget = DraftBudget(self.measured)
        self._budget = self.draft_budget.base  # in use for the batches of the cycle chosen last

    @property
    def choices(self) -> tuple[int, ...]:
        """Numbers of drafts to choose from."""
        return self.draft_length.choices

    @property
    def chosen(self) -> Counter[int]:
        """Cycles by number of drafts."""
        return self.draft_length.chosen

    @property
    def is_watching(self) -> bool:
        """Whether the cycle chosen last is to be observed."""
        return self.draft_length.is_watching

    @property
    def repeats(self) -> int:
        """Further cycles without drafts before the chooser must be asked again, if as many
        sequences run.
        """
        return self.draft_length.repeats

    def settled(self, rows: int, length: float) -> int | None:
        """The number of drafts in use for similar batches; None while other numbers are being
        timed.
        """
        batch = _batch(rows, length)
        case = self.measured.find(batch, self.draft_budget.in_use(batch))
        return None if case is None else case.settled

    def plan(self, rows: int, length: float, repeated: int = 0) -> DraftPlan:
        """What to draft in the next cycle; see ``choose`` and ``choose_budget``.

        What drafts would read is not asked of a cycle without any: it is timed for batches with the
        budget in use.
        """
        tokens = self.choose(rows, length, repeated)
        budget = self.choose_budget(rows, length, tokens) if tokens else self._budget
        return DraftPlan(tokens, budget)

    def choose(self, rows: int, length: float, repeated: int = 0) -> int:
        """How many drafts the next cycle has, for ``rows`` sequences of mean ``length`` (tokens).

        Args: repeated: cycles without drafts that followed the choice before this one, at most
            ``repeats``.
        """
        self.draft_length.count_repeated(repeated)
        batch = _batch(rows, length)
        self._budget = self.draft_budget.in_use(batch)
        return self.draft_length.choose(self.measured.case(batch, self._budget))

    def choose_budget(self, rows: int, length: float, drafts: int) -> int:
        """What the drafts of the next cycle read, an index of ``budgets``; called after ``choose``,
        with its result if that is not 0."""
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
        """Learn from one cycle of ``rows`` sequences that all had the same number of drafts.

        Args: seconds: time of the drafts and their verification. accepted, judged: drafts accepted,
            and drafts up to the first rejected one of each sequence. first: the cycle before had
            other drafts. The host may have been late to see its end, which makes this one
                seem short, so that its time can speak against the number only.
            budget: what the drafts read, if not what is in use for such batches.
        """
        batch = _batch(rows, length)
        in_use = self.draft_budget.in_use(batch)
        case = self.measured.case(batch, in_use if budget is None else budget)
        self.measured.add(case, drafts, seconds, accepted, judged, first)

    def in_use(self) -> dict[str, int]:
        """The numbers of drafts in use, by sequences and mean length (rounded to the steps told
        apart).
        """
        return {
            _name(case.batch): case.in_use
            for case in self._cases_in_use()
            if case.in_use is not None
        }

    def budgets_in_use(self) -> dict[str, float]:
        """What drafts read, in multiples of their schedule, for the batches of ``in_use`` where it
        is another one.
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
