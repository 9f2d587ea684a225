"""A program's own time, which limits count: running and asleep, but not waiting for a busy machine.

Linux says how long a thread has waited for a processor. Where it does not say, or cannot be asked,
a program that gets less than a twentieth of a processor counts as asleep unless it is known to be
runnable.
"""

from __future__ import annotations

import time

STARVED = 10
"""A program that gets no processor is given up after this many times its limit."""
_AWAKE = 1 / 20  # of the time between two looks; a program that ran for less than this was asleep


class OwnTime:
    """The time that a program has spent since now, waiting for the machine aside, and its limit.

    Args:
        limit_s: seconds that it may spend.
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
        """Count the time between two looks: ``waited_s`` by the clock, of which ``ran_s`` on the
        processor and ``queued_s`` ready for it without getting it, if that is known.

        A program that is ``runnable`` asks for the processor, so it is not asleep even if it gets
        none.
        """
        ran_s = min(ran_s, waited_s)
        if queued_s is not None:
            self.spent_s += max(ran_s, waited_s - queued_s)
            return
        asleep = ran_s < waited_s * _AWAKE and not runnable
        self.spent_s += waited_s if asleep else ran_s

    @property
    def left_s(self) -> float:
        """Seconds that it has left, never below zero."""
        return max(0.0, self._limit_s - self.spent_s)

    @property
    def over(self) -> bool:
        """True if no time is left, or the program gets so little of the processor that it is given
        up.
        """
        return not self.left_s or time.monotonic() - self._start > STARVED * self._limit_s
