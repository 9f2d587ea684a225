"""A program's own time, to which limits apply: the time that it spends running or sleeping, but not
waiting for a processor.

Linux reports how long a thread has waited for a processor. Where it does not, a program that gets
less than a twentieth of a processor is taken to be asleep unless it is known to be runnable.
"""

from __future__ import annotations

import time

STARVED = 10
"""A program that gets no processor time is stopped after this many times its limit."""
# A program that ran for less than this share of the time between two checks is taken to be asleep.
_AWAKE = 1 / 20


class OwnTime:
    """Counts the time that a program spends, excluding waits for a processor, and compares it with
    a limit. The count starts when this object is created.

    Args:
        limit_s: seconds that the program may spend.
    """

    def __init__(self, limit_s: float) -> None:
        self.spent_s = 0.0
        self._limit_s = limit_s
        self._start = time.monotonic()

    def count(
        self,
        waited_s: float,
        ran_s: float,
        runnable: bool = False,
        queued_s: float | None = None,
    ) -> None:
        """Count the time between two checks: ``waited_s`` of wall-clock time, of which the program
        ran for ``ran_s`` and waited for a processor for ``queued_s``, if known.

        A ``runnable`` program would use a processor if it got one, so it is not asleep.
        """
        ran_s = min(ran_s, waited_s)
        if queued_s is not None:
            self.spent_s += max(ran_s, waited_s - queued_s)
            return
        asleep = ran_s < waited_s * _AWAKE and not runnable
        self.spent_s += waited_s if asleep else ran_s

    @property
    def left_s(self) -> float:
        """The seconds that the program has left, at least zero."""
        return max(0.0, self._limit_s - self.spent_s)

    @property
    def over(self) -> bool:
        """Whether the program has no time left, or gets too little processor time to be worth
        waiting for.
        """
        return not self.left_s or time.monotonic() - self._start > STARVED * self._limit_s
