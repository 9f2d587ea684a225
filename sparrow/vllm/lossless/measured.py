"""What was measured of a running engine's batches: times by number of drafts, and acceptance.

Batches are told apart by the number of sequences and by their mean length, both in steps of a
factor of sqrt(2), and by what their drafts read. A new case takes over what is known of the nearest
one, so that little is timed anew as sequences grow and end.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from sparrow.decoding import acceptance_at

PROBES = 4
DENSE_PROBES = 6
"""Cycles timed with a number of drafts, and dense steps, before anything is concluded about them:
all else is compared with dense steps, and theirs are the times that scatter most."""
DENSE_ALIKE = 3
ALIKE = 1.03
"""So many dense steps are enough if the longest of them takes no more than this times the shortest.
"""
TRIED = 2
UNDER_WAY = 3
"""Cycles with a new number of drafts before the chooser waits for their times, and cycles until
these must have come: a number that loses is not used again while its first times are still under
way. One time alone decides nothing, since it may be slow by chance."""
DENSE_LEAD = 0.06
"""By how much drafting must be faster than dense decoding to be chosen: times scatter by as much
where steps wait for the host, and a wrong choice there would make lossless decoding the slower one.
"""
GIVE_UP = 0.85
"""A number of drafts is not timed to the end if its speed at its fastest time so far is below this
share of dense's.
"""
PRIOR = (9.0, 10.0)
"""Drafts accepted and judged that are assumed before any was seen."""
BUDGET_PRIOR = 500.0
"""Drafts judged that count for the acceptance to expect with a budget that was not tried yet: five
cycles judge few.
"""
REACH = 2
"""How many steps away a batch may be for its times to be taken over."""
FORGET = 0.98
"""Factor by which each cycle weights the drafts accepted and judged before it."""
KEPT = 12
"""Times kept of each number of drafts, the latest ones."""

Batch = tuple[int, int]
"""Steps of the number of sequences, and of their mean length."""


@dataclass(slots=True, eq=False)
class Case:
    """Batches of about as many sequences of about one length, whose drafts read one budget.

    Numbers of drafts are keys of the dictionaries.
    """

    batch: Batch
    budget: int  # an index of what drafts may read
    seconds: dict[int, deque[float]] = field(default_factory=dict)  # of the latest cycles
    # of the first cycle after some with other drafts
    first_seconds: dict[int, float] = field(default_factory=dict)
    # of a cycle at the nearest case, when this one was new
    taken_over: dict[int, float] = field(default_factory=dict)
    begun: Counter[int] = field(default_factory=Counter)  # cycles since a number was first tried
    in_use: int | None = None  # the number of drafts chosen last
    is_being_timed: bool = False  # whether other numbers than that one are
    cycles: int = 0
    drafting: int = 0  # cycles since drafts came into use

    @property
    def settled(self) -> int | None:
        """The number of drafts in use; None while others are being timed."""
        return None if self.is_being_timed else self.in_use


class Measured:
    """What is known of each case.

    Args:
        budgets: what drafts may read, in multiples of the draft schedule.
    """

    def __init__(self, budgets: tuple[float, ...]) -> None:
        self.budgets = budgets
        self.cases: dict[tuple[Batch, int], Case] = {}
        # by length and budget: drafts accepted, and drafts judged
        self._verdicts: dict[tuple[int, int], list[float]] = {}

    def find(self, batch: Batch, budget: int) -> Case | None:
        return self.cases.get((batch, budget))

    def case(self, batch: Batch, budget: int) -> Case:
        """The case of these batches; a new one begins with the times of the nearest that has any,
        and goes on counting its cycles.
        """
        case = self.cases.get((batch, budget))
        if case is None:
            case = Case(batch, budget)
            near = (
                other
                for other in self.cases.values()
                if distance(other.batch, batch) <= REACH and self.known(other)
            )
            nearest = min(
                near,
                key=lambda other: (abs(other.budget - budget), distance(other.batch, batch)),
                default=None,
            )
            if nearest is not None:
                case.taken_over = self.known(nearest)
                case.cycles = nearest.cycles
                case.drafting = nearest.drafting
            self.cases[batch, budget] = case
        return case

    def add(
        self, case: Case, drafts: int, seconds: float, accepted: int, judged: int, first: bool
    ) -> None:
        """Note one cycle; see ``DraftChooser.observe``."""
        if first:
            case.first_seconds[drafts] = seconds
        else:
            case.seconds.setdefault(drafts, deque(maxlen=KEPT)).append(seconds)
        if judged:
            length = case.batch[1]
            verdicts = self._verdicts.setdefault(
                (length, case.budget), self.judged(length, case.budget)
            )
            verdicts[0] = FORGET * verdicts[0] + accepted
            verdicts[1] = FORGET * verdicts[1] + judged

    def known(self, case: Case) -> dict[int, float]:
        """Seconds of a cycle with each number of drafts: as timed here if often enough, else as
        expected.
        """
        timed = {k: typical(of) for k, of in case.seconds.items() if self.is_timed(case, k)}
        expected = case.taken_over
        known = {**expected, **timed}
        if both := expected.keys() & timed.keys():
            fewest = min(both)
            more = timed[fewest] - expected[fewest]
            factor = timed[fewest] / expected[fewest]
            for drafts in expected.keys() - timed.keys():
                known[drafts] = factor * expected[drafts]
                # Longer sequences slow verification alone, which adds as much to any number of
                # drafts. Where a cycle got shorter, one without drafts saves less than one with
                # drafts.
                if more > 0 or drafts > fewest:
                    known[drafts] = min(known[drafts], expected[drafts] + more)
        return known

    def is_timed(self, case: Case, drafts: int) -> bool:
        """Whether a number of drafts was timed often enough, or is too slow to be worth more."""
        times = case.seconds.get(drafts, ())
        if not drafts:
            alike = len(times) >= DENSE_ALIKE and max(times) <= ALIKE * min(times)
            return alike or len(times) >= DENSE_PROBES
        if len(times) >= PROBES:
            return True
        seen = self.seen(case, drafts)
        if len(seen) < TRIED or not self.is_timed(case, 0):
            return False
        dense = self.speed(case, 0, typical(case.seconds[0]))
        return self.speed(case, drafts, min(seen)) < GIVE_UP * dense

    def seen(self, case: Case, drafts: int) -> list[float]:
        """All times with a number of drafts, that of a first cycle among them."""
        first = case.first_seconds.get(drafts)
        return [*case.seconds.get(drafts, ()), *([] if first is None else [first])]

    def judged(self, length: int, budget: int) -> list[float]:
        """Drafts accepted and judged at this length with this budget; else those that the nearest
        ones make expected, but scaled to so few that they soon fade."""
        if (length, budget) in self._verdicts:
            return self._verdicts[length, budget]
        if not self._verdicts:
            return list(PRIOR)
        nearest = min(
            self._verdicts, key=lambda other: (abs(other[1] - budget), abs(other[0] - length))
        )
        accepted, judged = self._verdicts[nearest]
        expected = acceptance_at(accepted / judged, self.budgets[budget] / self.budgets[nearest[1]])
        weight = PRIOR[1] if nearest[1] == budget else BUDGET_PRIOR
        return [weight * expected, weight]

    def speed(self, case: Case, drafts: int, seconds: float) -> float:
        """Tokens per second of a sequence with so many drafts; dense decoding has its lead in it."""
        lead = 1.0 if drafts else 1 + DENSE_LEAD
        accepted, judged = self.judged(case.batch[1], case.budget)
        return lead * tokens_per_cycle(accepted / judged, drafts) / seconds

    def speeds(self, case: Case) -> dict[int, float]:
        """Tokens per second of a sequence with each number of drafts that was timed in such
        batches.
        """
        return {
            k: self.speed(case, k, typical(of))
            for k, of in case.seconds.items()
            if self.is_timed(case, k)
        }

    def expected_speeds(self, case: Case) -> dict[int, float]:
        """Tokens per second of a sequence with each number of drafts, as timed or as expected."""
        return {k: self.speed(case, k, seconds) for k, seconds in self.known(case).items()}


def tokens_per_cycle(acceptance: float, drafts: int) -> float:
    """Tokens that a cycle gives a sequence, if each draft has this chance of acceptance (arXiv
    2211.17192, eq. 1).
    """
    return drafts + 1.0 if acceptance >= 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def typical(seconds: Iterable[float]) -> float:
    """The mean of the middle half: a host that looks late finds one cycle too long, and the next
    too short.
    """
    ordered = sorted(seconds)
    outer = len(ordered) // 4
    return fmean(ordered[outer : len(ordered) - outer])


def steps_of(value: float) -> int:
    """A number of sequences or tokens, in steps of a factor of sqrt(2)."""
    return round(2 * math.log2(max(value, 1.0)))


def distance(batch: Batch, other: Batch) -> int:
    """How many steps two batches are apart."""
    return max(abs(a - b) for a, b in zip(batch, other, strict=True))
