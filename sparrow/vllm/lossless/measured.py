"""Measurements of the batches of a running engine: times by number of drafts, and acceptance.

A case groups batches with the same budget and a similar number of sequences and mean length, each
rounded to a power of sqrt(2). A new case starts with the times of the nearest existing case, so
little needs to be timed again as sequences grow and end.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import fmean

from sparrow.decoding import acceptance_at
from sparrow.vllm.lossless.plan import Choice, Guessed, drafts_of

PROBES = 4
DENSE_PROBES = 6
"""Before speeds are compared, each number of drafts is timed for ``PROBES`` cycles, and dense
decoding for ``DENSE_PROBES`` steps. Dense decoding is timed for longer because everything is
compared with dense steps, whose times scatter most.
"""
DENSE_ALIKE = 3
ALIKE = 1.03
"""``DENSE_ALIKE`` dense steps are enough if the longest step takes at most ``ALIKE`` times as long
as the shortest step.
"""
TRIED = 2
UNDER_WAY = 3
"""The chooser tries a new number of drafts in ``TRIED`` cycles. It then waits for ``UNDER_WAY``
cycles until their times are known, so that a number that turns out to be slow is not used in the
meantime. A single time is not enough, because it may be long by chance.
"""
DENSE_LEAD = 0.06
"""Relative gain in speed over dense decoding above which drafting is chosen. When steps wait for
the host, times scatter by as much as this gain, and a wrong choice would make lossless decoding
slower than dense decoding.
"""
GIVE_UP = 0.85
"""The timing of a number of drafts is cut short if its speed, even at the shortest time so far, is
below this share of the dense speed.
"""
PRIOR = (9.0, 10.0)
"""Number of accepted drafts and number of judged drafts that are assumed before there are
measurements.
"""
BUDGET_PRIOR = 500.0
"""Weight, in judged drafts, of the acceptance that is expected for a budget that was not tried yet.
The weight is large because few drafts are judged in the five cycles of a trial.
"""
GUESSED_PRIOR = 4.0
GUESSED_NEAR = 32.0
"""Weights, in cycles of one sequence, of the number of accepted drafts that is expected before a
number of drafts with guesses was tried at a length: ``GUESSED_NEAR`` if it was tried at another
length. With guesses, the drafts of a cycle are one observation, because their acceptance depends on
the place.
"""
GUESSED_CYCLES = 100.0
"""Weight at which the number of accepted drafts with guesses is known well enough in any case."""
GUESSED_SCATTER = 0.5
"""Standard deviation of the number of tokens of a cycle with guesses, relative to its mean."""
FEW_ROWS = 8
"""With fewer sequences, what is known about drafts with guesses is forgotten more slowly."""
REACH = 2
"""Largest distance, in steps, from a new case to a case whose times it may copy."""
FORGET = 0.98
"""Factor by which the weight of earlier accepted and judged drafts is multiplied in each cycle."""
KEPT = 12
"""Number of latest times kept for each number of drafts."""

Batch = tuple[int, int]
"""The number of sequences and their mean length, both as numbers of steps of a factor of
sqrt(2).
"""


@dataclass(slots=True, eq=False)
class Case:
    """A class of batches with similar numbers of sequences, similar lengths, and the same budget.

    The keys of the dictionaries are choices.
    """

    batch: Batch
    budget: int  # an index into ``Measured.budgets``
    # times of the latest cycles, in seconds
    seconds: dict[Choice, deque[float]] = field(default_factory=dict)
    # time of the first cycle after the choice or the budget changed, in seconds
    first_seconds: dict[Choice, float] = field(default_factory=dict)
    # time of a cycle in seconds, copied from the nearest case when this case was new
    taken_over: dict[Choice, float] = field(default_factory=dict)
    # number of cycles since each choice was first tried
    begun: Counter[Choice] = field(default_factory=Counter)
    in_use: Choice | None = None  # the choice that won the latest comparison
    is_being_timed: bool = False  # whether different choices are being timed
    cycles: int = 0
    drafting: int = 0  # number of cycles since drafts came into use

    @property
    def settled(self) -> Choice | None:
        """The choice in use; None while different choices are being timed."""
        return None if self.is_being_timed else self.in_use


class Measured:
    """Times and acceptance by case.

    Args:
        budgets: the budgets of drafts, as multiples of the draft schedule.
    """

    def __init__(self, budgets: tuple[float, ...]) -> None:
        self.budgets = budgets
        self.cases: dict[tuple[Batch, int], Case] = {}
        # number of accepted drafts and number of judged drafts, by length and budget
        self._verdicts: dict[tuple[int, int], list[float]] = {}
        # for drafts with guesses: number of accepted drafts and number of cycles, summed over
        # sequences, by length, budget and choice
        self._yields: dict[tuple[int, int, Guessed], list[float]] = {}

    def find(self, batch: Batch, budget: int) -> Case | None:
        return self.cases.get((batch, budget))

    def case(self, batch: Batch, budget: int) -> Case:
        """Return the case of these batches. A new case starts with the times and cycle counts of
        the nearest case that has times.
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
        self,
        case: Case,
        rows: int,
        choice: Choice,
        seconds: float,
        accepted: int,
        judged: int,
        first: bool,
    ) -> None:
        """Record one cycle; see ``DraftChooser.observe``."""
        if first:
            case.first_seconds[choice] = seconds
        else:
            case.seconds.setdefault(choice, deque(maxlen=KEPT)).append(seconds)
        length = case.batch[1]
        if isinstance(choice, Guessed):
            counts = self._yields.setdefault(
                (length, case.budget, choice), self.yielded(length, case.budget, choice)
            )
            added = (accepted, rows)
            factor = FORGET ** min(1.0, rows / FEW_ROWS)
        elif judged:
            counts = self._verdicts.setdefault(
                (length, case.budget), self.judged(length, case.budget)
            )
            added = (accepted, judged)
            factor = FORGET
        else:
            return
        counts[:] = (factor * before + now for before, now in zip(counts, added, strict=True))

    def forget(self, case: Case, choice: Choice) -> None:
        """Forget the times of a choice, so that it can be timed again. With guesses, also forget
        most of what is known about the number of accepted drafts.
        """
        case.seconds.pop(choice, None)
        if isinstance(choice, Guessed):
            counts = self._yields.get((case.batch[1], case.budget, choice))
            if counts is not None:
                counts[:] = GUESSED_PRIOR * counts[0] / counts[1], GUESSED_PRIOR

    def known(self, case: Case) -> dict[Choice, float]:
        """Return the seconds per cycle, by choice. For a choice that was timed often enough in this
        case, this is the measured time. For other choices, it is the time that is expected from the
        times that the case copied.
        """
        timed = {k: typical(of) for k, of in case.seconds.items() if self.is_timed(case, k)}
        expected = case.taken_over
        known = {**expected, **timed}
        if both := expected.keys() & timed.keys():
            fewest = min(both, key=drafts_of)
            more = timed[fewest] - expected[fewest]
            factor = timed[fewest] / expected[fewest]
            for choice in expected.keys() - timed.keys():
                known[choice] = factor * expected[choice]
                # Longer sequences only slow down verification, and thereby add the same time for
                # any number of drafts. If cycles have become shorter, a cycle without drafts saves
                # less time than a cycle with drafts.
                if more > 0 or drafts_of(choice) > drafts_of(fewest):
                    known[choice] = min(known[choice], expected[choice] + more)
        return known

    def is_timed(self, case: Case, choice: Choice) -> bool:
        """Return whether a choice was timed often enough, or is clearly too slow."""
        times = case.seconds.get(choice, ())
        if not choice:
            alike = len(times) >= DENSE_ALIKE and max(times) <= ALIKE * min(times)
            return alike or len(times) >= DENSE_PROBES
        if len(times) >= PROBES and self._is_clear(case, choice):
            return True
        seen = self.seen(case, choice)
        if len(seen) < TRIED or not self.is_timed(case, 0):
            return False
        dense = self.speed(case, 0, typical(case.seconds[0]))
        # With guesses, few cycles say little about how many drafts are accepted.
        plain = self._without_guesses(case.batch[1], case.budget, drafts_of(choice))
        return max(self.tokens(case, choice), plain) < GIVE_UP * dense * min(seen)

    def _is_clear(self, case: Case, choice: Choice) -> bool:
        """Return whether enough cycles with guesses were judged: the fewer, the more their speed
        differs from that of every other choice. Without guesses, any number of cycles is enough.
        """
        if not isinstance(choice, Guessed):
            return True
        if self.yielded(case.batch[1], case.budget, choice)[1] >= GUESSED_CYCLES:
            return True
        ours = self.speed(case, choice, typical(case.seconds[choice]))
        others = [
            self.speed(case, k, typical(times))
            for k, times in case.seconds.items()
            if k != choice and len(times) >= DENSE_ALIKE
        ]
        return not others or abs(ours / max(others) - 1) > 2 * self.doubt(case, choice)

    def doubt(self, case: Case, choice: Choice) -> float:
        """Return the relative standard error of the number of tokens per cycle. With guesses, this
        number scatters by about half its mean. Without guesses, the error counts as 0.
        """
        if not isinstance(choice, Guessed):
            return 0.0
        return GUESSED_SCATTER * self.yielded(case.batch[1], case.budget, choice)[1] ** -0.5

    def seen(self, case: Case, choice: Choice) -> list[float]:
        """List the times of all cycles with this choice, including the time of a first cycle."""
        first = case.first_seconds.get(choice)
        return [*case.seconds.get(choice, ()), *([] if first is None else [first])]

    def judged(self, length: int, budget: int) -> list[float]:
        """Return how many drafts were accepted and how many were judged at this length with this
        budget. At first, these numbers are estimated from the nearest length and budget; the weight
        of this estimate soon fades.
        """
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

    def yielded(self, length: int, budget: int, choice: Guessed) -> list[float]:
        """Return how many drafts with guesses were accepted at this length with this budget, and in
        how many cycles. At first, these numbers are estimated from the nearest length or number of
        drafts; the weight of this estimate soon fades.
        """
        if (length, budget, choice) in self._yields:
            return self._yields[length, budget, choice]
        nearest = min(
            self._yields,
            key=lambda other: (
                abs(other[1] - budget),
                abs(other[2].drafts - choice.drafts),
                abs(other[0] - length),
            ),
            default=None,
        )
        expected = self._without_guesses(length, budget, choice.drafts)
        weight = GUESSED_PRIOR
        if nearest is not None:
            accepted, cycles = self._yields[nearest]
            plain = self._without_guesses(*nearest[:2], nearest[2].drafts)
            expected *= (1 + accepted / cycles) / plain
            if nearest[1:] == (budget, choice):
                weight = min(GUESSED_NEAR, cycles)
        return [weight * min(max(expected - 1, 0.0), choice.drafts), weight]

    def _without_guesses(self, length: int, budget: int, drafts: int) -> float:
        """Return the expected number of tokens per cycle and sequence without guesses."""
        accepted, judged = self.judged(length, budget)
        return tokens_per_cycle(accepted / judged, drafts)

    def tokens(self, case: Case, choice: Choice) -> float:
        """Return the expected number of tokens per cycle and sequence."""
        length = case.batch[1]
        if isinstance(choice, Guessed):
            accepted, cycles = self.yielded(length, case.budget, choice)
            return 1 + accepted / cycles
        return self._without_guesses(length, case.budget, choice)

    def speed(self, case: Case, choice: Choice, seconds: float) -> float:
        """Return how many tokens per second a sequence gets with this choice. The speed of dense
        decoding is multiplied by ``1 + DENSE_LEAD``.
        """
        lead = 1.0 if choice else 1 + DENSE_LEAD
        return lead * self.tokens(case, choice) / seconds

    def speeds(self, case: Case) -> dict[Choice, float]:
        """Return how many tokens per second a sequence gets, for each choice that was timed in this
        case.
        """
        return {
            k: self.speed(case, k, typical(of))
            for k, of in case.seconds.items()
            if self.is_timed(case, k)
        }

    def expected_speeds(self, case: Case) -> dict[Choice, float]:
        """Return how many tokens per second a sequence gets, as measured or expected, by choice."""
        return {k: self.speed(case, k, seconds) for k, seconds in self.known(case).items()}


def tokens_per_cycle(acceptance: float, drafts: int) -> float:
    """Return the expected number of tokens per cycle and sequence if each draft is accepted with
    this probability (arXiv 2211.17192, eq. 1).
    """
    return drafts + 1.0 if acceptance >= 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def typical(seconds: Iterable[float]) -> float:
    """Return the mean of the middle half of the times. Extreme times are left out because, if the
    host sees the end of a cycle late, that cycle seems too long and the next one too short.
    """
    ordered = sorted(seconds)
    outer = len(ordered) // 4
    return fmean(ordered[outer : len(ordered) - outer])


def steps_of(value: float) -> int:
    """Convert a number of sequences or tokens to a number of steps; each step is a factor of
    sqrt(2).
    """
    return round(2 * math.log2(max(value, 1.0)))


def distance(batch: Batch, other: Batch) -> int:
    """Return the distance between two batches, in steps."""
    return max(abs(a - b) for a, b in zip(batch, other, strict=True))
