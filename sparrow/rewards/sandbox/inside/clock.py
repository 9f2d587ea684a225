"""Measure a program's own time: the time it spends running or sleeping, but not waiting for a CPU.
A program's time limits apply to its own time.

Linux can report how long a thread has waited for a CPU. Without this report, a program that gets
less than a twentieth of a CPU is assumed to be asleep, unless it's known to be runnable.
"""

from __future__ import annotations

import time

STARVED = 10
"""A program that gets no CPU time is stopped after this many times its limit."""
# A program that ran for less than this share of the time between two checks is assumed to be
# asleep.
_AWAKE = 1 / 20


class OwnTime:
    """Measures a program's own time, which excludes waits for a CPU, against a limit. The clock
    starts when this object is created.

    Args:
        limit_s: limit on the program's own time, in seconds.
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
        """Count the ``waited_s`` seconds of wall-clock time between two checks. The program ran for
        ``ran_s`` of them. If known, ``queued_s`` is how long the program waited for a CPU.

        A ``runnable`` program would run if it got a CPU, so it isn't asleep.
        """
        ran_s = min(ran_s, waited_s)
        if queued_s is not None:
            self.spent_s += max(ran_s, waited_s - queued_s)
            return
        asleep = ran_s < waited_s * _AWAKE and not runnable
        self.spent_s += waited_s if asleep else ran_s

    @property
    def left_s(self) -> float:
        """Seconds the program has left, at least zero."""
        return max(0.0, self._limit_s - self.spent_s)

    @property
    def over(self) -> bool:
        """Whether the program is out of time, or gets too little CPU time to be worth waiting for."""
        return not self.left_s or time.monotonic() - self._start > STARVED * self._limit_s
