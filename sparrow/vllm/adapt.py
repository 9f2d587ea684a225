"""How many tokens to draft: what gave the most tokens per second at like batch and length, as measured while running.

Nothing here changes what is sampled, only how fast: any number of drafts is exact.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict, deque
from collections.abc import Iterable
from statistics import mean

PROBES = 4
"""Cycles timed of a number of drafts before anything is concluded."""
THINK_EVERY = 8
"""Cycles between two comparisons, which cost the host time."""
TRY_AGAIN = 1000
"""Cycles after which what lost is tried again: acceptance may have changed while nothing was drafted."""
RETIME = 320
"""Cycles after which what nearly won is timed again: the first times of a batch are the least reliable."""
MARGIN = 0.01
"""By how much a number of drafts must be faster than the one in use to replace it."""
HOPELESS = 0.9
"""A number of drafts predicted below this share of the best speed, or below it at the length before, is not tried."""
PRIOR = (9.0, 10.0)
"""Drafts accepted and judged before any was seen."""
FORGET = 0.98
"""Weight of what was accepted before, at each cycle."""


def tokens_per_cycle(acceptance: float, drafts: int) -> float:
    """Tokens that a cycle gives a sequence, each draft accepted with this probability (arXiv 2211.17192, eq. 1)."""
    return drafts + 1.0 if acceptance >= 1 else (1 - acceptance ** (drafts + 1)) / (1 - acceptance)


class DraftLength:
    """Chooses the number of drafts of each cycle.

    Batches are told apart by the number of sequences and by their mean length, both in steps of a factor of sqrt(2).

    Args:
        choices: numbers of drafts to choose from, 0 (no drafting) included.
    """

    def __init__(self, choices: Iterable[int]) -> None:
        self.choices = tuple(sorted(choices))
        self.chosen: Counter[int] = Counter()  # cycles by number of drafts
        self._seconds: dict[tuple[int, int], dict[int, deque[float]]] = defaultdict(dict)
        self._verdicts: dict[int, list[float]] = {}  # by length: accepted, judged
        self._in_use: dict[tuple[int, int], int] = {}
        self._being_timed: set[tuple[int, int]] = set()
        self._cycles: Counter[tuple[int, int]] = Counter()

    def acceptance(self, length: float) -> float:
        """Share of the drafts judged lately that were accepted, at like length."""
        accepted, judged = self._verdicts.get(_step(length), PRIOR)
        return accepted / judged

    def settled(self, rows: int, length: float) -> int | None:
        """The number of drafts in use at like batch and length; None while numbers are being timed."""
        key = (_step(rows), _step(length))
        return None if key in self._being_timed else self._in_use.get(key)

    def choose(self, rows: int, length: float) -> int:
        """Drafts of the next cycle for so many sequences of this mean length (tokens)."""
        key = (_step(rows), _step(length))
        self._cycles[key] += 1
        current = self.settled(rows, length)
        if current is not None and self._cycles[key] % THINK_EVERY:
            self.chosen[current] += 1
            return current
        seconds = self._seconds[key]
        if self._cycles[key] % TRY_AGAIN == 0:
            for drafts in self.choices:
                if drafts != self._in_use.get(key):
                    seconds.pop(drafts, None)
        elif self._cycles[key] % RETIME == 0:
            speed = self._speeds(key)
            near = [k for k in speed if k != self._in_use.get(key) and speed[k] >= HOPELESS * max(speed.values())]
            if near:
                seconds.pop(near[self._cycles[key] // RETIME % len(near)])
        choice = next((k for k in self.choices if len(seconds.get(k, ())) < PROBES and self._is_worth(key, k)), None)
        if choice is not None:
            self._being_timed.add(key)
        else:
            self._being_timed.discard(key)
            speed = self._speeds(key)
            best = max(speed, key=speed.__getitem__)
            current = self._in_use.get(key, best)
            choice = best if speed[best] > (1 + MARGIN) * speed.get(current, 0.0) else current
            self._in_use[key] = choice
        self.chosen[choice] += 1
        return choice

    def observe(self, rows: int, length: float, drafts: int, seconds: float, accepted: int, judged: int) -> None:
        """Learn from one cycle of ``rows`` sequences that all had the same number of drafts.

        Args:
            seconds: of the drafts and their verification.
            accepted, judged: drafts accepted, and drafts up to the first rejected one of each sequence.
        """
        self._seconds[_step(rows), _step(length)].setdefault(drafts, deque(maxlen=12)).append(seconds)
        if judged:
            verdicts = self._verdicts.setdefault(_step(length), list(PRIOR))
            for i, count in enumerate((accepted, judged)):
                verdicts[i] = FORGET * verdicts[i] + count

    def in_use(self) -> dict[str, int]:
        """What was settled on, by sequences and mean length (rounded to the steps told apart)."""
        return {f"{2 ** (b / 2):.0f} x {2 ** (n / 2):.0f}": k for (b, n), k in sorted(self._in_use.items())}

    def _speeds(self, key: tuple[int, int]) -> dict[int, float]:
        """Tokens per second of a sequence with each number of drafts timed often enough."""
        return {k: self._speed(key, k, _typical(of)) for k, of in self._seconds[key].items() if len(of) >= PROBES}

    def _speed(self, key: tuple[int, int], drafts: int, seconds: float) -> float:
        return tokens_per_cycle(self.acceptance(2 ** (key[1] / 2)), drafts) / seconds

    def _is_worth(self, key: tuple[int, int], drafts: int) -> bool:
        """Whether to time so many drafts: not where a little shorter sequences, or fewer drafts, have ruled it out."""
        if len(self._seconds[key].get(drafts, ())) > 0:
            return True
        shorter = self._speeds((key[0], key[1] - 1)) if (key[0], key[1] - 1) in self._seconds else {}
        hopeless = {k for k in shorter if shorter[k] < HOPELESS * max(shorter.values())}
        if drafts in hopeless:
            return False
        known = {k: _typical(of) for k, of in self._seconds[key].items() if len(of) >= PROBES}
        if any(k not in known for k in self.choices if k < drafts and k not in hopeless):
            return False  # fewer were ruled out, at this length
        if len(known) < 2:
            return True
        (a, at_a), (b, at_b) = sorted(known.items())[-2:]
        predicted = at_b + (drafts - b) * (at_b - at_a) / (b - a)  # time grows by as much with every draft
        return predicted <= 0 or self._speed(key, drafts, predicted) >= HOPELESS * max(self._speeds(key).values())


def _typical(seconds: Iterable[float]) -> float:
    """The mean without the slowest quarter, in which something else took time."""
    ordered = sorted(seconds)
    return mean(ordered[: max(1, (3 * len(ordered)) // 4)])


def _step(value: float) -> int:
    return round(2 * math.log2(max(value, 1.0)))
