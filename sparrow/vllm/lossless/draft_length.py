"""Choose how many tokens to draft, and how to use guesses, by picking whatever gave the most tokens
per second in similar batches.

In each case (``measured.Case``), promising choices are timed before the fastest one is used. Every
few cycles, speeds are compared again. Now and then, other choices are timed again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from sparrow.vllm.lossless.measured import (
    DENSE_PROBES,
    TRIED,
    UNDER_WAY,
    Case,
    Measured,
)
from sparrow.vllm.lossless.plan import Choice, Guessed, drafts_of
from sparrow.vllm.lossless.setup import passes_of

THINK_EVERY = 8
THINK_DENSE = 32
"""Speeds are compared once in this many cycles: ``THINK_EVERY`` while drafting, and ``THINK_DENSE``
otherwise. Comparisons cost host time, so they are rare.
"""
WATCHED = 2
"""While nothing is drafted, only this many cycles are timed after a comparison, because timing
costs host time too.
"""
TRY_AGAIN = 4096
TRY_AGAIN_MOST = 16384
"""Losing choices are tried again after ``TRY_AGAIN`` cycles, because acceptance may have changed in
the meantime. They are then tried each time the number of cycles has doubled, and eventually every
``TRY_AGAIN_MOST`` cycles. Trials are rare because each costs about 30 ms for one sequence.
"""
RETIME = 320
"""Once in this many cycles, a choice that nearly won is timed again, because a batch's first times
are the least reliable.
"""
DENSE_AGAIN = 8
"""Dense steps are timed again after this many cycles with drafts, then after twice as many, four
times as many, and so on. A batch's first times may have been unusually long, and lossless decoding
must not be slower than dense decoding.
"""
DENSE_NEAR = 0.7
"""Don't bother re-timing dense steps unless the fastest one reached this share of the best speed.
"""
HOPELESS = 0.95
"""Don't try a choice if its expected speed, whether predicted or estimated from copied times, is
below this share of the best speed. Nor did a choice nearly win if its speed is below this share.
"""


class DraftLength:
    """Chooses the number of drafts for each cycle, and how to use guesses.

    Args:
        choices: the options, including 0 (no drafting).
        measured: the times and acceptance rates to base choices on.
    """

    def __init__(self, choices: Iterable[Choice], measured: Measured) -> None:
        choices = sorted(choices, key=drafts_of)
        numbers = [k for k in choices if not isinstance(k, Guessed)]
        guessed = [k for k in choices if isinstance(k, Guessed) and not k.alone]
        alone = [k for k in choices if isinstance(k, Guessed) and k.alone]
        self.choices: tuple[Choice, ...] = (*numbers, *guessed, *alone)
        # Kinds of drafts, in the order in which they are tried while nothing is known. Guesses
        # alone come first, because their cycles are hardly longer than dense steps.
        self._kinds: list[list[Choice]] = [[*numbers]]
        if alone:
            self._kinds.insert(0, [0, *alone])
        if guessed:
            self._kinds.append([0, *guessed])
        self.chosen: Counter[Choice] = Counter()  # number of cycles, by choice
        self.is_watching = True  # whether to time the latest cycle
        # number of cycles left to run without drafts before the next choice, which comes earlier if
        # the batch size changes
        self.repeats = 0
        self._repeated_case: Case | None = None  # the case ``repeats`` applies to
        self._measured = measured

    def count_repeated(self, cycles: int) -> None:
        """Count cycles without drafts that have passed since the latest choice.

        Args:
            cycles: at most ``repeats``.
        """
        if cycles and self._repeated_case is not None:
            self._repeated_case.cycles += cycles
            self.chosen[0] += cycles

    def choose(self, case: Case) -> Choice:
        """Choose how the next cycle drafts."""
        self.repeats = 0
        self.is_watching = True
        case.cycles += 1
        current = case.settled
        if current is not None:
            case.drafting = case.drafting + 1 if current else 0
        if current and self._dense_is_due(case):
            # Before the first of these dense steps, forget the old times, which may be misleading.
            if case.drafting.bit_count() == 1:
                case.seconds.pop(0, None)
            choice: Choice = 0
        elif current is not None and (
            since := case.cycles % (THINK_EVERY if current else THINK_DENSE)
        ):
            choice = current
            self.is_watching = bool(current) or since <= WATCHED
            if not current:
                self._may_repeat(case, (WATCHED if self.is_watching else THINK_DENSE - 1) - since)
        else:
            choice = self._compare(case, current)
        self.chosen[choice] += 1
        return choice

    def _compare(self, case: Case, current: Choice | None) -> Choice:
        """Choose what is fastest, or what still needs timing."""
        self._forget_some_times(case, current)
        promising = self._promising(case)
        untimed = next((k for k in promising if not self._measured.is_timed(case, k)), None)
        case.is_being_timed = untimed is not None
        if untimed is not None:
            return self._try(case, untimed)
        speed = self._measured.speeds(case)
        choice = case.in_use = max(speed, key=speed.__getitem__)
        if not choice and case.cycles % THINK_DENSE == 0:
            self._may_repeat(case, WATCHED)
        return choice

    def _forget_some_times(self, case: Case, current: Choice | None) -> None:
        """Forget the times of choices that are due for re-timing: either all losers or one that
        nearly won. In the first case, copied times are forgotten for good, so that every choice is
        tried again.
        """
        cycle = case.cycles
        if cycle % TRY_AGAIN_MOST == 0 or (cycle >= TRY_AGAIN and cycle.bit_count() == 1):
            case.copied = {}
            case.may_copy = False
            for choice in self.choices:
                if choice != current:
                    self._measured.forget(case, choice)
        elif cycle % RETIME == 0:
            speed = self._measured.speeds(case)
            near = [k for k in speed if k != current and speed[k] >= HOPELESS * max(speed.values())]
            if near:
                case.seconds.pop(near[cycle // RETIME % len(near)])

    def _may_repeat(self, case: Case, cycles: int) -> None:
        """Let this many more cycles run without drafts before the next choice."""
        self.repeats = cycles
        self._repeated_case = case

    def _try(self, case: Case, choice: Choice) -> Choice:
        """Return this choice, or the fastest known one while the times of the new choice's first
        cycles have yet to come in.
        """
        if not choice or len(self._measured.seen(case, choice)) >= TRIED:
            return choice
        begun = case.begun[choice] % (TRIED + UNDER_WAY) + 1
        case.begun[choice] = begun
        if begun <= TRIED:
            return choice
        speed = self._measured.expected_speeds(case)
        return max(speed, key=speed.__getitem__, default=choice)

    def _dense_is_due(self, case: Case) -> bool:
        cycles = case.drafting
        # number of cycles since the count was last a power of two
        since = cycles - (1 << cycles.bit_length() - 1)
        if cycles < DENSE_AGAIN or since >= DENSE_PROBES:
            return False
        speed = self._measured.expected_speeds(case)
        dense_seconds = case.seconds.get(0, ())
        fastest = max((self._measured.speed(case, 0, s) for s in dense_seconds), default=0.0)
        return max(fastest, speed.get(0, math.inf)) >= DENSE_NEAR * max(speed.values(), default=0.0)

    def _promising(self, case: Case) -> list[Choice]:
        """List the choices worth timing, starting with the one that is expected to be fastest. Each
        kind of drafts adds one choice whose time is unknown: the one with the highest predicted
        speed, if this choice is worth trying, or if nothing can be predicted yet, the one with the
        fewest drafts. Choices without a prediction come last.
        """
        known = self._measured.known(case)
        speed = self._measured.expected_speeds(case)

        def is_worth_timing(choice: Choice, expected: float) -> bool:
            share = HOPELESS - self._measured.doubt(case, choice)
            return expected >= share * max(speed.values())

        expected = dict(speed)
        unpredicted = []
        for kind in self._kinds:
            unknown = [k for k in kind if k not in known]
            alike = {k: known[k] for k in kind if k in known}
            predicted = {
                k: self._measured.speed(case, k, seconds)
                for k in unknown
                if (seconds := self._predicted(k, alike, known)) is not None
            }
            if predicted:
                choice = max(predicted, key=predicted.__getitem__)
                expected[choice] = predicted[choice]
            else:
                unpredicted += unknown[:1]
        promising = [
            k
            for k in sorted(expected, key=lambda k: -expected[k])
            # A choice that has just begun to be tried is timed to the end.
            if is_worth_timing(k, expected[k]) or (k not in speed and case.seconds.get(k))
        ]
        return promising + unpredicted

    def _predicted(
        self, choice: Choice, alike: dict[Choice, float], known: dict[Choice, float]
    ) -> float | None:
        """Predict a cycle's time in seconds from the known times. Return None if there are too few
        of these. A cycle of guesses alone is never predicted, so that it is always tried. Trying it
        costs little, because it takes hardly longer than a dense step.

        Args:
            alike: the known times for the same kind of drafts, and for cycles without drafts.
        """
        drafts = drafts_of(choice)
        if len(alike) >= 2:
            # This assumes that each draft takes the same time.
            times = sorted((drafts_of(k), seconds) for k, seconds in alike.items())
            (a, at_a), (b, at_b) = times[-2:]
            predicted = at_b + (drafts - b) * (at_b - at_a) / (b - a)
            return predicted if predicted > 0 else None
        if isinstance(choice, Guessed) and not choice.alone and {0, drafts} <= known.keys():
            # A pass over guesses takes at least as long as a draft without guesses.
            return known[0] + (known[drafts] - known[0]) * passes_of(drafts) / drafts
        return None
