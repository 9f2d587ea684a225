"""Measurements from a running engine: acceptance, and how long a cycle takes with each choice
(``plan.Choice``).

A case groups batches with the same budget and a similar batch size and mean length, each rounded to
a power of sqrt(2). In each case, more and more becomes known about a choice's cycle time:

- at first, it is copied from the cases around this one, if it was measured there;
- after ``TRIED`` cycles with this choice (more for dense steps), a mean replaces the copy;
- once the choice is timed (``Measured.is_timed``), its speed is compared with that of others.

Thanks to the copies, hopeless choices need not be timed again as sequences grow and finish.
Acceptance does not depend on the batch size, so batches of all sizes share what is known about it.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean

from sparrow.decoding import acceptance_at
from sparrow.vllm.lossless.plan import Choice, Guessed, drafts_of

PROBES = 4
DENSE_PROBES = 6
"""Before comparing speeds, time each choice for ``PROBES`` cycles, and dense decoding (choice 0)
for ``DENSE_PROBES`` steps. Dense decoding is timed more often because everything is compared with
it, and its times are the noisiest.
"""
DENSE_ALIKE = 3
ALIKE = 1.03
"""``DENSE_ALIKE`` dense steps are enough if the slowest takes at most ``ALIKE`` times as long as
the fastest.
"""
TRIED = 2
UNDER_WAY = 3
"""A new choice is tried for ``TRIED`` cycles. Until their times come in, the next ``UNDER_WAY``
cycles use the fastest known choice, because the new one may be slow. Trying it for a single cycle
isn't enough, because any cycle may be slow by chance.
"""
INTERRUPTED = 2.0
"""While a choice has been timed for fewer than ``PROBES`` cycles, ignore those that took over
``INTERRUPTED`` times as long as its fastest. Something else must have kept the host busy.
"""
DENSE_LEAD = 0.06
"""To be chosen, drafting must be faster than dense decoding by at least this fraction. When steps
are host-bound, times vary by about this much, and a wrong choice would make lossless decoding
slower than dense decoding.
"""
GIVE_UP = 0.85
"""Stop timing a choice early if even its fastest cycle so far is below this share of the dense
speed.
"""
PRIOR = (9.0, 10.0)
"""Accepted and judged drafts to assume before there are any measurements."""
BUDGET_PRIOR = 500.0
"""An untried budget's expected acceptance has the weight of this many judged drafts. The weight is
large because a five-cycle trial judges few drafts.
"""
GUESSED_PRIOR = 4.0
GUESSED_NEAR = 32.0
"""Weights, in cycles of one sequence, for estimates of accepted drafts with guesses.
``GUESSED_PRIOR`` is for a choice that has never been tried. ``GUESSED_NEAR`` is the largest weight
for a choice that has been tried at another length. With guesses, a whole cycle is one observation,
because acceptance depends on the position in the text.
"""
GUESSED_CYCLES = 100.0
"""After this many cycles of one sequence, the number of accepted drafts with guesses counts as
known.
"""
GUESSED_SCATTER = 0.5
"""Standard deviation of tokens per cycle with guesses, relative to the mean."""
FEW_ROWS = 8
"""In batches with fewer rows than this, measurements with guesses are forgotten more slowly."""
REACH = 2
"""A case copies times from cases at most this many steps away."""
AROUND = sorted(
    product(range(-REACH, REACH + 1), repeat=2), key=lambda step: (max(map(abs, step)), step)
)
"""Steps in batch size and length to the cases around a case, nearest first."""
FORGET = 0.98
"""In each cycle, the counts of accepted and judged drafts decay by this factor."""
KEPT = 12
"""Number of recent times to keep per choice."""

Batch = tuple[int, int]
"""Batch size and mean length, both as steps on a log scale with base sqrt(2)."""


@dataclass(slots=True, eq=False)
class Case:
    """Batches with similar sizes, similar lengths, and the same budget.

    The dictionaries are keyed by choice.
    """

    batch: Batch
    budget: int  # an index into ``Measured.budgets``
    # latest cycle times, in seconds
    seconds: dict[Choice, deque[float]] = field(default_factory=dict)
    # time of the first cycle after a change of choice or budget, in seconds
    first_seconds: dict[Choice, float] = field(default_factory=dict)
    # estimated cycle times in seconds, copied from the cases around this one
    copied: dict[Choice, float] = field(default_factory=dict)
    may_copy: bool = True  # whether to copy more of them when batches come back to this case
    # number of the latest cycle in each choice's latest trial (see ``UNDER_WAY``)
    begun: Counter[Choice] = field(default_factory=Counter)
    in_use: Choice | None = None  # the choice that won the latest comparison
    is_being_timed: bool = False  # whether choices are still being timed
    cycles: int = 0
    drafting: int = 0  # cycles since drafting started

    @property
    def settled(self) -> Choice | None:
        """The current choice; None while choices are still being timed."""
        return None if self.is_being_timed else self.in_use


class Measured:
    """The times and acceptance of each case.

    Args:
        budgets: the draft budgets, as multiples of the draft schedule.
    """

    def __init__(self, budgets: tuple[float, ...]) -> None:
        self.budgets = budgets
        self.cases: dict[tuple[Batch, int], Case] = {}
        self._latest_case: Case | None = None
        # accepted and judged drafts, keyed by length and budget
        self._verdicts: dict[tuple[int, int], list[float]] = {}
        # accepted drafts and cycles of choices with guesses, summed over sequences and keyed by
        # length, budget and choice
        self._yields: dict[tuple[int, int, Guessed], list[float]] = {}

    def find(self, batch: Batch, budget: int) -> Case | None:
        return self.cases.get((batch, budget))

    def case(self, batch: Batch, budget: int) -> Case:
        """Return the case for these batches. Whenever this is not the same case as in the previous
        call, it copies times from the cases around it. A new case also starts with the cycle counts
        of the nearest one.
        """
        case = self.cases.get((batch, budget))
        if case is not None and case is self._latest_case:
            return case
        if case is None:
            case = Case(batch, budget)
            nearest = next(self._around(case), None)
            if nearest is not None:
                case.cycles = nearest.cycles
                case.drafting = nearest.drafting
            self.cases[batch, budget] = case
        self._latest_case = case
        if case.may_copy:
            self._copy_times(case)
        return case

    def _copy_times(self, case: Case) -> None:
        """Copy times from the cases around this one. For each choice, the first of these counts:

        1. its time in the nearest case that measured it;
        2. the time that this case copied earlier. It is not scaled again, because estimates would
           drift if they were scaled whenever batches come back to this case;
        3. the time that the nearest case has copied.

        Times of different cases are scaled to each other.
        """
        around = list(self._around(case))
        copied: dict[Choice, float] = {}
        for other in around:
            copied |= rescaled(self._measured_in(other), copied)
        copied = case.copied | copied
        for other in around:
            copied |= rescaled(other.copied, copied)
        case.copied = copied

    def _around(self, case: Case) -> Iterator[Case]:
        """Yield the other cases around this one that have any times, nearest first. Cases with the
        same budget come before cases with other budgets.
        """
        rows, length = case.batch
        budgets = sorted(range(len(self.budgets)), key=lambda budget: abs(budget - case.budget))
        for budget in budgets:
            for more_rows, more_length in AROUND:
                other = self.cases.get(((rows + more_rows, length + more_length), budget))
                if other is not None and other is not case and (other.seconds or other.copied):
                    yield other

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
        """Forget a choice's times so that it gets timed again. With guesses, also forget most of
        what is known about its acceptance.
        """
        case.seconds.pop(choice, None)
        if isinstance(choice, Guessed):
            counts = self._yields.get((case.batch[1], case.budget, choice))
            if counts is not None:
                counts[:] = GUESSED_PRIOR * counts[0] / counts[1], GUESSED_PRIOR

    def known(self, case: Case) -> dict[Choice, float]:
        """Return the measured or estimated seconds per cycle, keyed by choice. The estimates are
        copied times, scaled to those that were measured.
        """
        here = self._measured_in(case)
        return here | rescaled(case.copied, here)

    def _measured_in(self, case: Case) -> dict[Choice, float]:
        """Return the seconds per cycle of the choices that have been tried in this case. For
        drafts, a few cycles are enough, because a cycle's time is known long before acceptance is.
        The times of dense steps are noisier, and other times are scaled by them, so dense decoding
        counts only once it is timed.
        """
        return {
            k: typical(of) if len(of) >= PROBES or not k else uninterrupted(of)
            for k, of in case.seconds.items()
            if (k and len(of) >= TRIED) or self.is_timed(case, k)
        }

    def is_timed(self, case: Case, choice: Choice) -> bool:
        """Return whether a choice was timed in this case often enough for a comparison, or is
        clearly too slow.
        """
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
        # With guesses, a few cycles say little about acceptance.
        at_first = self._tokens_at_first(case.batch[1], case.budget, choice)
        return max(self.tokens(case, choice), at_first) < GIVE_UP * dense * min(seen)

    def _is_clear(self, case: Case, choice: Choice) -> bool:
        """Return whether a choice with guesses has seen enough cycles. A choice whose speed differs
        more from the other speeds needs fewer cycles. Losing takes fewer cycles than winning,
        because timing a slow choice costs the most. Return True for any choice without guesses.
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
        if not others:
            return True
        lead = ours / max(others) - 1
        doubt = self.doubt(case, choice)
        return lead > 2 * doubt or lead < -doubt

    def doubt(self, case: Case, choice: Choice) -> float:
        """Return the relative standard error of tokens per cycle. Without guesses, it is taken to
        be 0.
        """
        if not isinstance(choice, Guessed):
            return 0.0
        return GUESSED_SCATTER * self.yielded(case.batch[1], case.budget, choice)[1] ** -0.5

    def seen(self, case: Case, choice: Choice) -> list[float]:
        """List all cycle times for this choice, including the first cycle after a change."""
        first = case.first_seconds.get(choice)
        return [*case.seconds.get(choice, ()), *([] if first is None else [first])]

    def judged(self, length: int, budget: int) -> list[float]:
        """Return two counts for this length and budget: the accepted drafts and the judged drafts.
        They start from an estimate based on the nearest length and budget, whose weight soon fades.
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
        """Return the number of accepted drafts and the number of cycles for a choice with guesses,
        at this length with this budget. The counts start from an estimate, whose weight soon fades.
        The estimate uses the nearest budget, draft length and sequence length, but never mixes
        guesses alone with other drafts.
        """
        if (length, budget, choice) in self._yields:
            return self._yields[length, budget, choice]
        nearest = min(
            (key for key in self._yields if key[2].alone == choice.alone),
            key=lambda other: (
                abs(other[1] - budget),
                abs(other[2].drafts - choice.drafts),
                abs(other[0] - length),
            ),
            default=None,
        )
        expected = self._tokens_at_first(length, budget, choice)
        weight = GUESSED_PRIOR
        if nearest is not None:
            accepted, cycles = self._yields[nearest]
            expected *= (1 + accepted / cycles) / self._tokens_at_first(*nearest)
            if nearest[1:] == (budget, choice):
                weight = min(GUESSED_NEAR, cycles)
        return [weight * min(max(expected - 1, 0.0), choice.drafts), weight]

    def _tokens_at_first(self, length: int, budget: int, choice: Choice) -> float:
        """Return the number of tokens per sequence per cycle that the acceptance of single drafts
        suggests. With guesses, this is only a first estimate: acceptance is assumed to be the same
        as without. For guesses alone, it is assumed to be ``PRIOR``, because the actor does not
        draft them.
        """
        is_alone = isinstance(choice, Guessed) and choice.alone
        accepted, judged = PRIOR if is_alone else self.judged(length, budget)
        return tokens_per_cycle(accepted / judged, drafts_of(choice))

    def tokens(self, case: Case, choice: Choice) -> float:
        """Return the expected number of tokens per sequence per cycle."""
        length = case.batch[1]
        if isinstance(choice, Guessed):
            accepted, cycles = self.yielded(length, case.budget, choice)
            return 1 + accepted / cycles
        return self._tokens_at_first(length, case.budget, choice)

    def speed(self, case: Case, choice: Choice, seconds: float) -> float:
        """Return the tokens per second per sequence with this choice. Dense decoding gets a head
        start of ``DENSE_LEAD``.
        """
        lead = 1.0 if choice else 1 + DENSE_LEAD
        return lead * self.tokens(case, choice) / seconds

    def speeds(self, case: Case) -> dict[Choice, float]:
        """Return the tokens per second per sequence for each choice tried in this case."""
        return {k: self.speed(case, k, seconds) for k, seconds in self._measured_in(case).items()}

    def expected_speeds(self, case: Case) -> dict[Choice, float]:
        """Return the tokens per second per sequence for each choice whose cycle time has been
        measured in this case or can be estimated.
        """
        return {k: self.speed(case, k, seconds) for k, seconds in self.known(case).items()}


def tokens_per_cycle(acceptance: float, drafts: int) -> float:
    """Return the expected number of tokens per sequence per cycle if each draft is accepted with
    this probability (arXiv 2211.17192, eq. 1).
    """
    return drafts + 1.0 if acceptance >= 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


def rescaled(
    expected: Mapping[Choice, float], timed: Mapping[Choice, float]
) -> dict[Choice, float]:
    """Adjust expected cycle times to more reliable ones. Return the adjusted times of the choices
    that have no reliable one.

    Args:
        expected: times from another case, keyed by choice.
        timed: the more reliable times, keyed by choice.
    """
    both = expected.keys() & timed.keys()
    untimed = {k: seconds for k, seconds in expected.items() if k not in timed}
    if not both:
        return untimed
    fewest = min(both, key=drafts_of)
    more = timed[fewest] - expected[fewest]
    factor = timed[fewest] / expected[fewest]
    adjusted = {}
    for choice, seconds in untimed.items():
        adjusted[choice] = factor * seconds
        # Longer sequences only slow down verification, and the time they add is the same for any
        # draft length. If cycles have become shorter, a cycle without drafts saves less time than a
        # cycle with drafts.
        if more > 0 or drafts_of(choice) > drafts_of(fewest):
            adjusted[choice] = min(adjusted[choice], seconds + more)
    return adjusted


def typical(seconds: Iterable[float]) -> float:
    """Return the mean of the middle half of the times. Extremes are dropped, because the host may
    be late to notice the end of a cycle. That cycle then looks too long, and the next one too
    short.
    """
    ordered = sorted(seconds)
    outer = len(ordered) // 4
    return fmean(ordered[outer : len(ordered) - outer])


def uninterrupted(seconds: Collection[float]) -> float:
    """Return the mean of the times, without cycles that a pause of the host must have prolonged.
    ``typical`` would not drop any of so few times.
    """
    longest = INTERRUPTED * min(seconds)
    return fmean(time for time in seconds if time <= longest)


def steps_of(value: float) -> int:
    """Round a number of sequences or tokens to a step on a log scale with base sqrt(2)."""
    return round(2 * math.log2(max(value, 1.0)))


def distance(batch: Batch, other: Batch) -> int:
    """Return the distance between two batches, in steps."""
    return max(abs(a - b) for a, b in zip(batch, other, strict=True))
