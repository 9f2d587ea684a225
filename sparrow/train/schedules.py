"""Movers of the schedule between steps: the closed loop and the guard.

They share one interface: each proposes the schedule of the next rollouts, given the one in force,
the measurements under it, and the proposal of the mover before it. docs/method.md ("Closed loop and
guard") says what they do, and why.

The closed loop raises budgets in proportion to the rejected share 1 - p5 and lowers them with its
cube root. That share falls with the pages read, as a power of them between -0.7 (the median of the
published tables for p5 0.75 to 0.92) and -4 (the bundled reasoner near p5 0.97): a raise must
suffice where the share falls slowly, and a cut must not go too far where it is steep.

A relative tau is held by the relative p5 (``mismatch.tau``), in which the rejected share is due to
sparsity alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from sparrow.mismatch import BinMismatch, MismatchReport, Tau
from sparrow.mismatch.tokens import left_open
from sparrow.schedule import ALL_PAGES, SparsitySchedule
from sparrow.train.config import TrainConfig

STEP_UP = 2.0  # in one step, the pages read in a bin at most double,
STEP_DOWN = 0.75  # or fall by at most a quarter
# A bin has room while the rejected share is at most this part of what tau allows; the rest is the
# hysteresis.
ROOM = 0.9
PATIENCE = 2  # consecutive steps in which a bin must have room before it is lowered
MIN_SEQUENCES = 8
"""A bin that fewer responses reach is never lowered, and is raised only if its whole interval is
below tau.
"""

# the guard's second sign: p1 of all tokens is below this fraction of its highest value so far
FALLEN = 0.5


class Control(NamedTuple):
    """The last decision of the closed loop."""

    schedule: SparsitySchedule  # for the next rollouts
    room_steps: tuple[int, ...] = ()  # per length bin, the consecutive steps in which it had room
    floor: tuple[int, ...] = ()  # per length bin, the top-k below which it is no longer lowered


def next_schedule(control: Control, bins: Sequence[BinMismatch], tau: float) -> Control:
    """One turn of the closed loop.

    A bin that rejects too much is raised at once, in proportion to the excess. A bin with room is
    lowered a third of the way, after ``PATIENCE`` steps, but not to a budget that has failed, nor
    below one that left no room. Bins that hold nothing but prompts follow the first bin that can be
    judged; lengths not seen yet keep their pages. A raised bin also raises the longer ones that
    would otherwise read less than it does.

    Args:
        control: the schedule that the rollouts were sampled under, and the loop's memory.
        bins: the rollouts' tail in the schedule's own bins, over all processes, on the scale of
            ``tau``.
        tau: what the bins have to hold, in (0, 1).

    Returns:
        The next schedule, in the same layout, with at least as many bins.
    """
    schedule = control.schedule
    always = control.schedule.sink_pages + control.schedule.recent_pages
    # The last entry of the table is for all longer lengths; only those before it are moved.
    count = max(len(schedule.top_k) - 1, *(b.bin + 1 for b in bins))
    room_steps = [*control.room_steps, *[0] * count][:count]
    floor = [*control.floor, *[0] * count][:count]
    table = [min(k, _whole(schedule, i)) for i, k in enumerate(_extended(schedule, count))]

    judged = set()
    for b in bins:
        enough = b.n_sequences >= MIN_SEQUENCES and not math.isnan(b.interval_low)
        rejected = (1 - (b.interval_low if enough else b.interval_high)) / (1 - tau)
        i = b.bin
        k = table[b.bin]
        had_room = room_steps[b.bin]

        room_steps[i] = 0
        if rejected > 1:
            floor[i] = max(floor[i], k + 1)
            raised = max(_raised(k + always, rejected) - always, floor[i])
            table[i] = min(raised, _whole(schedule, i))
        elif enough and rejected > ROOM:
            floor[i] = max(floor[i], k)
        elif enough:
            room_steps[i] = had_room + 1
            if room_steps[i] == PATIENCE:
                lowered = math.floor((k + always) * max(STEP_DOWN, math.cbrt(rejected))) - always
                table[i] = min(k, max(lowered, floor[i], 0))
                room_steps[i] = 0
        if enough or rejected > 1:
            judged.add(i)

    for i in reversed(range(max(judged, default=0))):
        if i not in judged:
            table[i] = min(table[i], table[i + 1])
    moved = _monotone(schedule, [*table, schedule.top_k[-1]])
    return Control(moved, tuple(room_steps), tuple(floor))


def raise_bins(schedule: SparsitySchedule, bins: Sequence[BinMismatch]) -> SparsitySchedule:
    """Return the schedule with 1.5 times as many pages read in ``bins``."""
    always = schedule.sink_pages + schedule.recent_pages
    table = _extended(schedule, max(len(schedule.top_k) - 1, *(b.bin + 1 for b in bins)))
    for b in bins:
        table[b.bin] = min(_raised(table[b.bin] + always, 1.5) - always, ALL_PAGES)
    return _monotone(schedule, [*table, schedule.top_k[-1]])


def below(bins: Sequence[BinMismatch], threshold: float) -> list[BinMismatch]:
    """The bins that enough responses reach and whose p5 is known to be below ``threshold``.

    Only the upper bound on acceptance can show that: with short lists of tokens, the lower bound is
    low wherever the distribution is flat, however close the actor is.
    """
    return [b for b in bins if b.n_sequences >= MIN_SEQUENCES and b.upper_bound < threshold]


class Mover(Protocol):
    """Something that moves the schedule."""

    def propose(
        self, now: SparsitySchedule, proposed: SparsitySchedule, report: MismatchReport
    ) -> SparsitySchedule:
        """The schedule of the next rollouts; ``proposed`` itself if this mover changes nothing.

        Args:
            now: the schedule in force.
            proposed: what the movers before this one propose; ``now`` if none moved it.
            report: the measurements of this step under ``now``, in its bins, over all processes.
        """

    def state(self) -> dict[str, Any]:
        """The memory, which ``load`` takes back after it has been through JSON."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned."""


class ClosedLoop:
    """Holds tau in every bin, see ``next_schedule``."""

    def __init__(self, tau: Tau) -> None:
        self._tau = tau
        self._room_steps: tuple[int, ...] = ()
        self._floor: tuple[int, ...] = ()

    def propose(
        self, now: SparsitySchedule, proposed: SparsitySchedule, report: MismatchReport
    ) -> SparsitySchedule:
        control = Control(now, self._room_steps, self._floor)
        bins = self._tau.scale(report.bins)
        schedule, self._room_steps, self._floor = next_schedule(control, bins, self._tau.value)
        return schedule

    def state(self) -> dict[str, Any]:
        return {"room_steps": self._room_steps, "floor": self._floor}

    def load(self, state: Mapping[str, Any]) -> None:
        # as checkpoints of 0.1.0 have it
        room_steps = state["room_steps"] if "room_steps" in state else state["calm"]
        self._room_steps = tuple(room_steps)
        self._floor = tuple(state["floor"])


class Guard:
    """Watches for a p5 that is too low in a length bin, and for a fall in p1 of all tokens; see
    ``GuardConfig``.

    It judges by the upper bound on acceptance, which is certain, and says what the actor's lists of
    tokens leave open.
    """

    def __init__(self, config: TrainConfig) -> None:
        self._config = config.guard
        self._top_n = config.rollout.top_n
        tau = Tau.chosen(config.tau, config.relative_tau)
        threshold = config.guard.threshold
        self._threshold = tau._replace(value=tau.value - 0.02 if threshold is None else threshold)
        self._lossless = config.rollout.mode == "lossless"
        self._best_p1 = 0.0
        self._reads_all = False
        self._left_open: str | None = None
        self._steps_open = 0
        self.steps_below = 0  # consecutive steps with one of the two signs

    def propose(
        self, now: SparsitySchedule, proposed: SparsitySchedule, report: MismatchReport
    ) -> SparsitySchedule:
        bins = report.bins
        failing = below(self._threshold.scale(bins), self._threshold.value)
        fallen = report.p1_upper < FALLEN * self._best_p1
        self._best_p1 = max(self._best_p1, report.p1)
        self.steps_below = self.steps_below + 1 if failing or fallen else 0
        # Where samples come from all that is cached, nothing is held to tau.
        judged = [
            b
            for b in bins
            if b.n_sequences >= MIN_SEQUENCES
            and not self._lossless
            and _pages(now, b) < _whole(now, b.bin)
        ]
        self._left_open = left_open(judged, self._threshold, self._top_n, "rollout.top_n")
        self._steps_open = self._steps_open + 1 if self._left_open else 0
        sparse = [b for b in failing or bins if _pages(now, b) < _whole(now, b.bin)]
        self._reads_all = self._lossless or not sparse
        if not (self.alarm and self._config.action == "raise"):
            return proposed
        # Bins that another mover has already raised are not raised twice.
        unraised = [b for b in sparse if _pages(proposed, b) <= _pages(now, b)]
        return _densest(raise_bins(now, unraised), proposed) if unraised else proposed

    @property
    def alarm(self) -> bool:
        """True once the signs have been there for long enough to act."""
        return self.steps_below >= self._config.patience

    @property
    def stops(self) -> bool:
        """True if the run is to stop."""
        return self.alarm and self._config.action == "stop"

    @property
    def warning(self) -> str | None:
        """The warning to give after this step; once each time a sign has been there for
        ``patience`` steps in a row.
        """
        if self.steps_below == self._config.patience:
            return self.reason
        if self._steps_open == self._config.patience:
            return self._left_open
        return None

    @property
    def reason(self) -> str:
        """The reason for the alarm, and the remedy."""
        symptom = (
            f"{self._threshold.statistic} of acceptance has been below {self._threshold.value:g}"
        )
        prefix = f"{symptom}, or p1 below half of its best, for "
        if self._reads_all:
            return (
                f"{prefix}{self.steps_below} steps, though samples come from all that is cached: "
                "not sparsity is the cause, but weights that did not reach the engine, or its "
                "precision, temperature or another difference to the policy's model"
            )
        return (
            f"{prefix}{self.steps_below} steps, so training "
            "may collapse; a denser schedule prevents it"
        )

    @property
    def remedy(self) -> str:
        """The options that resume a run from the checkpoint at which the guard has stopped it."""
        if self._reads_all:
            return "--resume goes on from it once the cause is mended"
        return "--resume --guard.action raise goes on from it with more pages"

    def state(self) -> dict[str, Any]:
        return {"best_p1": self._best_p1, "steps_below": self.steps_below}

    def load(self, state: Mapping[str, Any]) -> None:
        self._best_p1 = state["best_p1"]
        self.steps_below = state["steps_below"]


class Movers:
    """All that moves a run's schedule, in the order in which they propose.

    Args:
        config: the run's.
        closed_loop: whether the schedule follows the measured p5.
    """

    def __init__(self, config: TrainConfig, closed_loop: bool) -> None:
        self.guard = Guard(config)
        self._tau = Tau.chosen(config.tau, config.relative_tau)
        self._asks = closed_loop or config.rollout.mode == "auto"
        self._said = False
        self._movers: dict[str, Mover] = (
            {"closed_loop": ClosedLoop(self._tau)} if closed_loop else {}
        )
        self._movers["guard"] = self.guard

    def next(self, now: SparsitySchedule, report: MismatchReport) -> SparsitySchedule:
        """The schedule of the next rollouts after ``now``, under which the report was measured."""
        proposed = now
        for mover in self._movers.values():
            proposed = mover.propose(now, proposed, report)
        return proposed

    def complaint(self, report: MismatchReport) -> str | None:
        """A message, given once, if tau has to be held but even dense rollouts do not, or cannot be
        shown to.
        """
        if not self._asks or self._said:
            return None
        message = self._tau.out_of_reach(report.bins)
        self._said = message is not None
        return message

    def state(self) -> dict[str, Any]:
        """The memory of all movers, by name."""
        return {name: mover.state() for name, mover in self._movers.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore what ``state`` returned; a mover that was off at the time starts anew."""
        for name, mover in self._movers.items():
            if name in state:
                mover.load(state[name])


def _raised(pages: int, rejected: float) -> int:
    return max(pages + 1, math.ceil(pages * min(STEP_UP, rejected)))


def _whole(schedule: SparsitySchedule, i: int) -> int:
    """The top-k with which bin ``i`` is dense."""
    pages = math.ceil((i + 1) * schedule.bin_tokens / schedule.page_size)
    return max(0, pages - schedule.sink_pages - schedule.recent_pages)


def _pages(schedule: SparsitySchedule, b: BinMismatch) -> int:
    """The top-k of a length bin."""
    return int(schedule.pages(b.end - schedule.page_size))


def _densest(a: SparsitySchedule, b: SparsitySchedule) -> SparsitySchedule:
    """A schedule that reads as much as the denser of the two at every length; ``a`` if they differ
    beyond top-k.
    """
    if a.replace(top_k=b.top_k) != b:
        return a
    count = max(len(a.top_k), len(b.top_k))
    return a.replace(top_k=tuple(map(max, _extended(a, count), _extended(b, count))))


def _extended(schedule: SparsitySchedule, count: int) -> list[int]:
    """The first ``count`` entries of the table, whose last entry is repeated as needed."""
    return [schedule.top_k[min(i, len(schedule.top_k) - 1)] for i in range(count)]


def _monotone(schedule: SparsitySchedule, table: list[int]) -> SparsitySchedule:
    return schedule.replace(top_k=tuple(np.maximum.accumulate(table).tolist()))
