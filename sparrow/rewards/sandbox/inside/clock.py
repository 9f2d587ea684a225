"""A program's own time, to which limits apply: the time that it runs or sleeps, but not the time
that it waits for a processor.

Linux reports how long a thread has waited for a processor. If this is not available, a program that
gets less than a twentieth of a processor is taken to be asleep, unless it is known to be runnable.
"""

from __future__ import annotations

import time

STARVED = 10
"""A program that gets no processor time is stopped after this many times its limit."""
# A program is taken to be asleep if it ran for less than this share of the time between two checks.
_AWAKE = 1 / 20


class OwnTime:
    """The time that a program spends from now on, excluding waits for a processor, and the limit on
    this time.

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

        A program that is ``runnable`` could use a processor, so it is not asleep even if it gets
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
        """The number of seconds that the program has left, at least zero."""
        return max(0.0, self._limit_s - self.spent_s)

    @property
    def over(self) -> bool:
        """True if the program has no time left, or gets so little processor time that it is given
        up.
        """
        return not self.left_s or time.monotonic() - self._start > STARVED * self._limit_s
