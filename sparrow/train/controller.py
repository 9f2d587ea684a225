"""The closed loop: pages follow the measured tail, bin by bin, so that no calibration run is needed; and its guard.

Every step measures p5 of acceptance by length bin for nothing, because the dense log-probs are computed anyway. What
decides is the lower limit of p5's interval, as in calibration: a bin must hold tau surely, and a bin with few
responses has a wide interval and stays dearer. While a bin is dense its p5 is 1 and says nothing of the sparse actor;
the bound on a step is what makes going down from there safe.

Budgets are raised in proportion to the rejected share 1 - p5 and lowered with its cube root, for it falls with the
pages read as their power -0.7 (the published tables for p5 0.75 to 0.92, median) to -4 (the bundled reasoner near p5
0.97): a raise must suffice where it is slow, a cut must not go too far where it is steep. A budget that left no room
is the bin's floor from then on. So every bin settles, whatever the noise; and the loop does not take back the pages
that come free as the policy grows surer, which would hold p5 and lose the reward (docs/stability.md).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sparrow.errors import ConfigError
from sparrow.mismatch import BinMismatch, Histogram, MismatchReport
from sparrow.schedule import ALL_PAGES, SparsitySchedule
from sparrow.train.config import TrainConfig

STEP_UP = 2.0  # pages read in a bin at most double in a step,
STEP_DOWN = 0.75  # and lose at most a quarter
ROOM = 0.9  # A bin has room while the rejected share is at most this part of what tau allows: the gap is the hysteresis
PATIENCE = 2  # steps in a row that a bin must have room before it is lowered
MIN_SEQUENCES = 8
"""A bin that fewer responses reach is never lowered, and raised only where its whole interval is below tau."""

FALLEN = 0.5  # the guard's other sign: p1 of all tokens below this part of its highest value so far


class Control(NamedTuple):
    """What the closed loop decided last."""

    schedule: SparsitySchedule  # for the next rollouts
    calm: tuple[int, ...] = ()  # per length bin, the steps in a row that it had room
    floor: tuple[int, ...] = ()  # per length bin, the top-k below which it is not lowered any more


def next_schedule(control: Control, bins: Sequence[BinMismatch], tau: float) -> Control:
    """One turn of the closed loop.

    A bin is raised at once, in proportion to how much too much it rejects; one with room is lowered a third of the
    way, after ``PATIENCE`` steps, but not to a budget that has failed, nor below one that left no room. Bins that hold
    no more than prompts follow the first that can be judged; lengths not seen yet keep what they have. A raised bin
    raises the longer ones with it where they would otherwise read less.

    Args:
        control: the schedule that the rollouts were sampled under, and the memory.
        bins: their tail in the schedule's own bins, over all processes.
        tau: the p5 to hold, in (0, 1).

    Returns:
        The next schedule, in the same layout, with at least as many bins.
    """
    schedule, always = control.schedule, control.schedule.sink_pages + control.schedule.recent_pages
    # The last entry of the table is for all longer lengths; only those before it are moved.
    count = max(len(schedule.top_k) - 1, *(b.bin + 1 for b in bins))
    calm, floor = ([*memory, *[0] * count][:count] for memory in (control.calm, control.floor))
    table = [min(k, _whole(schedule, i)) for i, k in enumerate(_extended(schedule, count))]
    judged = set()
    for b in bins:
        enough = b.n_sequences >= MIN_SEQUENCES
        rejected = (1 - (b.interval_low if enough else b.interval_high)) / (1 - tau)
        i, k, had_room = b.bin, table[b.bin], calm[b.bin]
        calm[i] = 0
        if rejected > 1:
            floor[i] = max(floor[i], k + 1)
            table[i] = min(max(_raised(k + always, rejected) - always, floor[i]), _whole(schedule, i))
        elif enough and rejected > ROOM:
            floor[i] = max(floor[i], k)
        elif enough:
            calm[i] = had_room + 1
            if calm[i] == PATIENCE:
                lowered = math.floor((k + always) * max(STEP_DOWN, math.cbrt(rejected))) - always
                table[i] = min(k, max(lowered, floor[i], 0))
                calm[i] = 0
        if enough or rejected > 1:
            judged.add(i)
    for i in reversed(range(max(judged, default=0))):
        if i not in judged:
            table[i] = min(table[i], table[i + 1])
    return Control(_monotone(schedule, [*table, schedule.top_k[-1]]), tuple(calm), tuple(floor))


def raise_bins(schedule: SparsitySchedule, bins: Sequence[BinMismatch]) -> SparsitySchedule:
    """The schedule with half as many pages again read in ``bins``."""
    always = schedule.sink_pages + schedule.recent_pages
    table = _extended(schedule, max(len(schedule.top_k) - 1, *(b.bin + 1 for b in bins)))
    for b in bins:
        table[b.bin] = min(_raised(table[b.bin] + always, 1.5) - always, ALL_PAGES)
    return _monotone(schedule, [*table, schedule.top_k[-1]])


def below(bins: Sequence[BinMismatch], threshold: float) -> list[BinMismatch]:
    """The bins, of those that enough responses reach, whose p5 is below ``threshold``."""
    return [b for b in bins if b.n_sequences >= MIN_SEQUENCES and b.lower_bound < threshold]


def p1(histogram: Histogram) -> float:
    """The 1st percentile of acceptance, up to the width of the histogram's bins."""
    below_upper_edge = np.cumsum(histogram.counts)
    return histogram.edges[1 + int(np.searchsorted(below_upper_edge, 0.01 * below_upper_edge[-1]))]


class Steering:
    """What moves the schedule between steps, and its memory: the closed loop if there is one, or else the guard.

    Args:
        config: the run's.
        schedule: what the run starts with.
        closed_loop: the schedule follows the measured p5.

    Raises ConfigError: something else moves the schedule too, or the tail is in other bins than the schedule's.
    """

    def __init__(self, config: TrainConfig, schedule: SparsitySchedule, closed_loop: bool) -> None:
        self._guard, self._tau, self._closed_loop = config.guard, config.tau, closed_loop
        given = config.guard.threshold
        self._threshold = config.tau - 0.02 if given is None else given
        self._calm: tuple[int, ...] = ()
        self._floor: tuple[int, ...] = ()
        self._best_p1 = 0.0
        self.steps_below = 0  # steps in a row with one of the guard's signs
        if closed_loop and config.distill.step_down:
            raise ConfigError("schedule auto and distill.step_down both move the schedule; choose one of them")
        moves = closed_loop or config.guard.action == "raise"
        if moves and config.bin_tokens not in (None, schedule.bin_tokens):
            raise ConfigError(
                f"bin_tokens is {config.bin_tokens}, but schedule auto and guard.action raise need the tail in the "
                f"schedule's own bins of {schedule.bin_tokens} tokens; leave bin_tokens out"
            )

    def turn(self, schedule: SparsitySchedule, report: MismatchReport) -> SparsitySchedule:
        """The schedule after ``schedule``, under which ``report`` was measured, over all processes."""
        failing, lowest = below(report.bins, self._threshold), p1(report.histogram)
        self._best_p1 = max(self._best_p1, lowest)
        self.steps_below = self.steps_below + 1 if failing or lowest < FALLEN * self._best_p1 else 0
        if self._closed_loop:
            control = Control(schedule, self._calm, self._floor)
            schedule, self._calm, self._floor = next_schedule(control, report.bins, self._tau)
        elif self.alarm and self._guard.action == "raise":
            schedule = raise_bins(schedule, failing or report.bins)
        return schedule

    @property
    def alarm(self) -> bool:
        """Whether the guard has seen its signs for long enough to act."""
        return self.steps_below >= self._guard.patience

    @property
    def warning(self) -> str:
        """What the guard says."""
        return (
            f"p5 of acceptance has been below {self._threshold:g}, or p1 below half of its best, for "
            f"{self.steps_below} steps, so training may collapse; a denser schedule prevents it"
        )

    def state(self) -> dict[str, Any]:
        """The memory, for ``load`` after a detour through JSON."""
        return {
            "calm": self._calm, "floor": self._floor, "best_p1": self._best_p1, "steps_below": self.steps_below,
        }  # fmt: skip

    def load(self, state: Mapping[str, Any]) -> None:
        """Go on from what ``state`` returned."""
        self._calm, self._floor = tuple(state["calm"]), tuple(state["floor"])
        self._best_p1, self.steps_below = state["best_p1"], state["steps_below"]


def _raised(pages: int, rejected: float) -> int:
    return max(pages + 1, math.ceil(pages * min(STEP_UP, rejected)))


def _whole(schedule: SparsitySchedule, i: int) -> int:
    """The top-k with which bin ``i`` is dense."""
    pages = math.ceil((i + 1) * schedule.bin_tokens / schedule.page_size)
    return max(0, pages - schedule.sink_pages - schedule.recent_pages)


def _extended(schedule: SparsitySchedule, count: int) -> list[int]:
    """The first ``count`` entries of the table."""
    return [schedule.top_k[min(i, len(schedule.top_k) - 1)] for i in range(count)]


def _monotone(schedule: SparsitySchedule, table: list[int]) -> SparsitySchedule:
    return schedule.replace(top_k=tuple(np.maximum.accumulate(table).tolist()))
