"""How many tokens to draft, and what drafts read: what gave the most tokens per second in similar
batches, as measured while running.

Nothing here changes what is sampled, only how fast: any drafts are exact.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable
from statistics import fmean

from sparrow.decoding import acceptance_at

PROBES, DENSE_PROBES = 4, 6
"""Cycles timed with a number of drafts, and dense steps, before anything is concluded about them:
all else is compared with dense steps, and theirs are the times that scatter most."""
DENSE_ALIKE, ALIKE = 3, 1.03
"""So many dense steps are enough if the longest of them takes no more than this times the shortest.
"""
THINK_EVERY, THINK_DENSE = 8, 32
"""Cycles between two comparisons of speed, which cost the host time, with drafts in use and
without.
"""
WATCHED = 2
"""Cycles after a comparison whose times are noted where no drafts are in use: noting them costs the
host time too.
"""
TRY_AGAIN, TRY_AGAIN_MOST = 4096, 16384
"""The numbers that lost are tried again after so many cycles, after twice as many and so on, and in
the end every
``TRY_AGAIN_MOST``: acceptance may have changed while nothing was drafted, but a trial costs one
sequence some 30 ms."""
RETIME = 320
"""Cycles after which a number that nearly won is timed again: the first times of a batch are the
least reliable.
"""
DENSE_AGAIN = 8
"""Cycles with drafts after which dense steps are timed anew, as they are after twice as many, four
times as many and so
on: the first times of a batch may have been slow, and lossless decoding must not be slower than
dense."""
DENSE_NEAR = 0.7
"""Dense steps are timed again only if the fastest of them had this share of the best speed; else
they cannot win.
"""
DENSE_LEAD = 0.06
"""By how much drafting must be faster than dense decoding to be chosen: times scatter by as much
where steps wait for the host, and a wrong choice there would make lossless decoding the slower one.
"""
HOPELESS = 0.95
"""A number of drafts is not tried if its speed, predicted or at the nearest batch, is below this
share of the best.
"""
GIVE_UP = 0.85
"""A number of drafts is not timed to the end if its speed at its fastest time so far is below this
share of dense's.
"""
PRIOR = (9.0, 10.0)
"""Drafts accepted and judged that are assumed before any was seen."""
TRIED, UNDER_WAY = 2, 3
"""Cycles with a new number of drafts before the chooser waits for their times, and cycles until
these must have come: a number that loses is not used again while its first times are still under
way. One time alone decides nothing, since it may be slow by chance."""
REACH = 2
"""How many steps away a batch may be for its times to be taken over."""
FORGET = 0.98
"""Factor by which each cycle weights the drafts accepted and judged before it."""
TRY_BUDGETS = 48
"""Cycles with drafts after which they are tried with the budgets next to theirs, as they are after
twice as many, four times as many and so on; at other cycles than those in which dense steps are
timed anew."""
BUDGET_PROBES = 5
"""Cycles in a row with another budget; the first of them is not timed."""
BUDGET_LEAD = 0.02
"""By how much another budget must be faster to be taken."""
BUDGET_PRIOR = 500.0
"""Drafts judged that count for the acceptance to expect with a budget that was not tried yet: five
cycles judge few.
"""


def tokens_per_cycle(acceptance: float, drafts: int) -> float:
    """Tokens that a cycle gives a sequence, if each draft has this chance of acceptance (arXiv
    2211.17192, eq. 1).
    """
    return drafts + 1.0 if acceptance >= 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


Batch = tuple[int, int]  # steps of the number of sequences, and of their mean length
Key = tuple[int, int, int]  # a batch, and what its drafts read: an index of ``DraftLength.budgets``


class DraftLength:
    """Chooses the number of drafts of each cycle, and what they read.

    Batches are told apart by the number of sequences and by their mean length, both in steps of a
    factor of sqrt(2). A new batch takes over what is known of the nearest one, so that little is
    timed anew as sequences grow and end. The number of drafts is chosen for the budget in use; once
    it is settled, the budgets next to it are tried with it.

    Args:
        choices: numbers of drafts to choose from, 0 (no drafting) included.
        budgets: what drafts may read, in multiples of the draft schedule, 1 included.
    """

    def __init__(self, choices: Iterable[int], budgets: tuple[float, ...] = (1.0,)) -> None:
        self.choices, self.budgets = tuple(sorted(choices)), budgets
        self.chosen: Counter[int] = Counter()  # cycles by number of drafts
        self.is_watching = True  # whether the cycle chosen last is to be observed
        # Further cycles without drafts before the chooser must be asked again, if as many sequences
        # run.
        self.repeats = 0
        self.budget = budgets.index(1.0)  # in use for the batches of that cycle
        self._seconds: dict[Key, dict[int, deque[float]]] = {}
        self._first_seconds: dict[
            tuple[Key, int], float
        ] = {}  # of the first cycle after some with other drafts
        self._begun: Counter[tuple[Key, int]] = (
            Counter()
        )  # cycles since a number was first tried; see ``_try``
        self._taken_over: dict[
            Key, dict[int, float]
        ] = {}  # seconds of a cycle at the nearest batch
        self._verdicts: dict[
            tuple[int, int], list[float]
        ] = {}  # by length and budget: accepted, judged
        self._budget_of: dict[Batch, int] = {}  # the budget in use
        self._in_use: dict[Key, int] = {}
        self._being_timed: set[Key] = set()
        self._cycles: Counter[Key] = Counter()
        self._repeated_key: Key | None = None  # of the batch that ``repeats`` is about
        self._drafting: Counter[Key] = Counter()  # cycles since drafts came into use

    def settled(self, rows: int, length: float) -> int | None:
        """The number of drafts in use for similar batches; None while other numbers are being
        timed.
        """
        return self._settled(self._key(rows, length))

    def choose(self, rows: int, length: float, repeated: int = 0) -> int:
        """How many drafts the next cycle has, for ``rows`` sequences of mean ``length`` (tokens).

        Args: repeated: cycles without drafts that followed the choice before this one, at most
            ``repeats``.
        """
        if repeated and self._repeated_key is not None:
            self._cycles[self._repeated_key] += repeated
            self.chosen[0] += repeated
        self.repeats = 0
        key = self._key(rows, length)
        self.budget = key[2]
        if key not in self._seconds:
            self._take_over(key)
        self._cycles[key] = cycle = self._cycles[key] + 1
        current = self._settled(key)
        self.is_watching = True
        if current is not None:
            self._drafting[key] = self._drafting[key] + 1 if current else 0
        if current and self._dense_is_due(key):
            if (
                self._drafting[key].bit_count() == 1
            ):  # the first of these steps: what was timed before may mislead
                self._seconds[key].pop(0, None)
            self.chosen[0] += 1
            return 0
        if current is not None and (since := cycle % (THINK_EVERY if current else THINK_DENSE)):
            self.chosen[current] += 1
            self.is_watching = bool(current) or since <= WATCHED
            if not current:
                self._may_repeat(key, (WATCHED if self.is_watching else THINK_DENSE - 1) - since)
            return current
        timed = self._seconds[key]
        if cycle % TRY_AGAIN_MOST == 0 or (cycle >= TRY_AGAIN and cycle.bit_count() == 1):
            self._taken_over[key] = {}
            for drafts in self.choices:
                if drafts != current:
                    timed.pop(drafts, None)
        elif cycle % RETIME == 0:
            speed = self._speeds(key)
            near = [k for k in speed if k != current and speed[k] >= HOPELESS * max(speed.values())]
            if near:
                timed.pop(near[cycle // RETIME % len(near)])
        choice = next((k for k in self._promising(key) if not self._is_timed(key, k)), None)
        if choice is not None:
            self._being_timed.add(key)
            choice = self._try(key, choice)
        else:
            self._being_timed.discard(key)
            speed = self._speeds(key)
            choice = self._in_use[key] = max(speed, key=speed.__getitem__)
            if not choice and cycle % THINK_DENSE == 0:
                self._may_repeat(key, WATCHED)
        self.chosen[choice] += 1
        return choice

    def _may_repeat(self, key: Key, cycles: int) -> None:
        """Have so many further cycles of these batches draft nothing without asking."""
        self.repeats, self._repeated_key = cycles, key

    def choose_budget(self, rows: int, length: float, drafts: int) -> int:
        """What the drafts of the next cycle read, an index of ``budgets``; called after ``choose``,
        with its result if that is not 0."""
        key = self._key(rows, length)
        budget = key[2]
        if len(self.budgets) == 1 or self._settled(key) != drafts:
            return budget
        cycles = self._drafting[key]
        if cycles < TRY_BUDGETS:
            return budget
        since = cycles - (TRY_BUDGETS << (cycles // TRY_BUDGETS).bit_length() - 1)
        others = [b for b in (budget - 1, budget + 1) if 0 <= b < len(self.budgets)]
        if since < BUDGET_PROBES * len(others):
            return others[since // BUDGET_PROBES]
        if since == BUDGET_PROBES * len(others) + UNDER_WAY:
            self._compare_budgets(key, others, drafts)
        return budget

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
        key = self._key(rows, length)
        key = key if budget is None else (*key[:2], budget)
        if key not in self._seconds:
            self._take_over(key)
        if first:
            self._first_seconds[key, drafts] = seconds
        else:
            self._seconds[key].setdefault(drafts, deque(maxlen=12)).append(seconds)
        if judged:
            verdicts = self._verdicts.setdefault(key[1:], self._judged(*key[1:]))
            for i, count in enumerate((accepted, judged)):
                verdicts[i] = FORGET * verdicts[i] + count

    def in_use(self) -> dict[str, int]:
        """The numbers of drafts in use, by sequences and mean length (rounded to the steps told
        apart).
        """
        return {
            _name(key): drafts
            for key, drafts in sorted(self._in_use.items())
            if self._budget(key[:2]) == key[2]
        }

    def budgets_in_use(self) -> dict[str, float]:
        """What drafts read, in multiples of their schedule, for the batches of ``in_use`` where it
        is another one.
        """
        others = (
            (key, self.budgets[key[2]])
            for key in sorted(self._in_use)
            if self._budget(key[:2]) == key[2]
        )
        return {_name(key): multiple for key, multiple in others if multiple != 1}

    def _key(self, rows: int, length: float) -> Key:
        batch = (_step(rows), _step(length))
        return (*batch, self._budget(batch))

    def _budget(self, batch: Batch) -> int:
        """The budget in use for a batch, at first that of the nearest one."""
        budget = self._budget_of.get(batch)
        if budget is None:
            nearest = min(self._budget_of, key=lambda other: _steps(other, batch), default=None)
            is_near = nearest is not None and _steps(nearest, batch) <= REACH
            budget = self._budget_of[nearest] if nearest and is_near else self.budgets.index(1.0)
            self._budget_of[batch] = budget
        return budget

    def _compare_budgets(self, key: Key, others: Iterable[int], drafts: int) -> None:
        """Use another of these budgets if so many drafts were faster with it."""
        speed = {
            key: (1 + BUDGET_LEAD) * self._speed(key, drafts, _typical(self._seconds[key][drafts]))
        }
        for other in ((*key[:2], budget) for budget in others):
            times = self._seconds.get(other, {}).get(drafts, ())
            if len(times) >= BUDGET_PROBES - 1:
                speed[other] = self._speed(other, drafts, _typical(times))
        best = max(speed, key=speed.__getitem__)
        if best != key:
            self._budget_of[key[:2]] = best[2]
            self._in_use[best] = drafts
            self._cycles[best], self._drafting[best] = self._cycles[key], self._drafting[key]

    def _settled(self, key: Key) -> int | None:
        return None if key in self._being_timed else self._in_use.get(key)

    def _take_over(self, key: Key) -> None:
        """Begin with the times of the nearest batch that has any, and go on counting its cycles."""
        near = (k for k in self._seconds if _steps(k[:2], key[:2]) <= REACH and self._known(k))
        nearest = min(
            near, key=lambda k: (abs(k[2] - key[2]), _steps(k[:2], key[:2])), default=None
        )
        self._seconds[key], self._taken_over[key] = {}, {}
        if nearest is not None:
            self._taken_over[key] = self._known(nearest)
            self._cycles[key] = self._cycles[nearest]
            self._drafting[key] = self._drafting[nearest]

    def _known(self, key: Key) -> dict[int, float]:
        """Seconds of a cycle with each number of drafts: as timed here if often enough, else as
        expected.
        """
        timed = {k: _typical(of) for k, of in self._seconds[key].items() if self._is_timed(key, k)}
        expected = self._taken_over[key]
        known = {**expected, **timed}
        if both := expected.keys() & timed.keys():
            fewest = min(both)
            more, factor = timed[fewest] - expected[fewest], timed[fewest] / expected[fewest]
            for drafts in expected.keys() - timed.keys():
                known[drafts] = factor * expected[drafts]
                # Longer sequences slow verification alone, which adds as much to any number of
                # drafts. Where a cycle got shorter, one without drafts saves less than one with
                # drafts.
                if more > 0 or drafts > fewest:
                    known[drafts] = min(known[drafts], expected[drafts] + more)
        return known

    def _is_timed(self, key: Key, drafts: int) -> bool:
        """Whether a number of drafts was timed often enough, or is too slow to be worth more."""
        times = self._seconds[key].get(drafts, ())
        if not drafts:
            alike = len(times) >= DENSE_ALIKE and max(times) <= ALIKE * min(times)
            return alike or len(times) >= DENSE_PROBES
        if len(times) >= PROBES:
            return True
        seen = self._seen(key, drafts)
        if len(seen) < TRIED or not self._is_timed(key, 0):
            return False
        return self._speed(key, drafts, min(seen)) < GIVE_UP * self._speed(
            key, 0, _typical(self._seconds[key][0])
        )

    def _seen(self, key: Key, drafts: int) -> list[float]:
        """All times with a number of drafts, that of a first cycle among them."""
        first = self._first_seconds.get((key, drafts))
        return [*self._seconds[key].get(drafts, ()), *([] if first is None else [first])]

    def _try(self, key: Key, drafts: int) -> int:
        """This number, or the fastest known one while the times of its first cycles are under way."""
        if not drafts or len(self._seen(key, drafts)) >= TRIED:
            return drafts
        self._begun[key, drafts] = begun = self._begun[key, drafts] % (TRIED + UNDER_WAY) + 1
        if begun <= TRIED:
            return drafts
        speed = self._expected(key)
        return max(speed, key=speed.__getitem__, default=drafts)

    def _judged(self, length: int, budget: int) -> list[float]:
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

    def _speed(self, key: Key, drafts: int, seconds: float) -> float:
        """Tokens per second of a sequence with so many drafts; dense decoding has its lead in it."""
        lead, (accepted, judged) = 1.0 if drafts else 1 + DENSE_LEAD, self._judged(*key[1:])
        return lead * tokens_per_cycle(accepted / judged, drafts) / seconds

    def _speeds(self, key: Key) -> dict[int, float]:
        """Tokens per second of a sequence with each number of drafts that was timed in such
        batches.
        """
        timed = self._seconds[key]
        return {
            k: self._speed(key, k, _typical(of))
            for k, of in timed.items()
            if self._is_timed(key, k)
        }

    def _expected(self, key: Key) -> dict[int, float]:
        """Tokens per second of a sequence with each number of drafts, as timed or as expected."""
        return {k: self._speed(key, k, seconds) for k, seconds in self._known(key).items()}

    def _dense_is_due(self, key: Key) -> bool:
        cycles = self._drafting[key]
        if (
            cycles < DENSE_AGAIN or cycles - (1 << cycles.bit_length() - 1) >= DENSE_PROBES
        ):  # after a power of two
            return False
        speed = self._expected(key)
        fastest = max(
            (self._speed(key, 0, seconds) for seconds in self._seconds[key].get(0, ())), default=0.0
        )
        return max(fastest, speed.get(0, math.inf)) >= DENSE_NEAR * max(speed.values())

    def _promising(self, key: Key) -> list[int]:
        """The numbers of drafts worth timing, the fastest known first; at most one unknown number,
        the smallest.
        """
        known, speed = self._known(key), self._expected(key)
        promising = [
            k
            for k in sorted(speed, key=lambda k: -speed[k])
            if speed[k] >= HOPELESS * max(speed.values())
        ]
        drafts = next((k for k in self.choices if k not in known), None)
        if drafts is None:
            return promising
        if len(known) < 2 or len(self._seconds[key].get(drafts, ())) > 0:
            return [*promising, drafts]
        (a, at_a), (b, at_b) = sorted(known.items())[-2:]
        predicted = at_b + (drafts - b) * (at_b - at_a) / (b - a)  # each draft adds the same time
        if predicted <= 0 or self._speed(key, drafts, predicted) >= HOPELESS * max(speed.values()):
            promising.append(drafts)
        return promising


def _typical(seconds: Iterable[float]) -> float:
    """The mean of the middle half: a host that looks late finds one cycle too long, and the next
    too short.
    """
    ordered = sorted(seconds)
    outer = len(ordered) // 4
    return fmean(ordered[outer : len(ordered) - outer])


def _step(value: float) -> int:
    return round(2 * math.log2(max(value, 1.0)))


def _steps(batch: Batch, other: Batch) -> int:
    return max(abs(a - b) for a, b in zip(batch, other, strict=True))


def _name(key: Key) -> str:
    return f"{2 ** (key[0] / 2):.0f} x {2 ** (key[1] / 2):.0f}"
