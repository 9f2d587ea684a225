"""Movers that adjust the schedule between steps: the closed loop and the guard.

Each mover gets the current schedule, the measurements under it and the previous mover's proposal,
and proposes a schedule for the next rollouts. docs/method.md ("Closed loop and guard") explains
what they do and why.

The closed loop raises a budget in proportion to the rejected share 1 - p5, and lowers it in
proportion to the cube root of that share. The rejected share follows a power law in the pages read,
with an exponent between -0.7 and -4. The exponent -0.7 is the median of the published tables for p5
0.75 to 0.92, and -4 is the bundled reasoner's exponent near p5 0.97. A raise has to be enough where
the share falls slowly, and a cut must not overshoot where it falls steeply.

A relative tau is compared with relative p5 (``mismatch.tau``), so that only sparsity contributes to
the rejected share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from sparrow.mismatch import BinMismatch, MismatchReport, Tau
from sparrow.mismatch.tokens import left_open
from sparrow.schedule import ALL_PAGES, BUDGET_UNIT, SparsitySchedule
from sparrow.train.config import TrainConfig

STEP_UP = 2.0  # largest per-step factor on a bin's pages read
STEP_DOWN = 0.75  # smallest per-step factor on a bin's pages read
# A bin has room to go lower if it rejects at most this fraction of what tau allows. The gap to 1 is
# the hysteresis.
ROOM = 0.9
PATIENCE = 2  # consecutive steps with room before a bin is lowered
MIN_SEQUENCES = 8
"""How many responses must reach a bin before its budget can be lowered. With fewer responses, the
budget is raised only if the bin's whole p5 interval is below tau.
"""

# The guard also warns if p1 over all tokens falls below this fraction of its best so far.
FALLEN = 0.5


class Control(NamedTuple):
    """The closed loop's last decision."""

    schedule: SparsitySchedule  # schedule for the next rollouts
    # per length bin: consecutive steps with room
    room_steps: tuple[int, ...] = ()
    floor: tuple[int, ...] = ()  # per length bin: the top-k it is never lowered below


def next_schedule(control: Control, bins: Sequence[BinMismatch], tau: float) -> Control:
    """Take one step of the closed loop.

    A bin that rejects too much is raised at once, in proportion to the excess. A bin that has had
    room for ``PATIENCE`` steps is lowered in proportion to the cube root of what it rejects. It is
    never lowered to a budget that has failed, or below a budget that left no room. Shorter bins
    that cannot be judged, because they contain only prompts or few responses reach them, follow the
    next longer bin down to their own limit. Bins that no response has reached yet keep their pages.
    Longer bins that would read less than a shorter bin are raised to match.

    Args:
        control: the schedule the rollouts were sampled under, and the loop's state.
        bins: the acceptance tail of all processes' rollouts. The bins are the schedule's, and
            acceptance is relative if ``tau`` is relative.
        tau: the target for every bin, in (0, 1).

    Returns:
        The next schedule, in the same layout, with at least as many bins.
    """
    schedule = control.schedule
    always = control.schedule.sink_pages + control.schedule.recent_pages
    # The table's last entry covers all longer lengths, so only the earlier entries change.
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
            table[i] = min(table[i], max(table[i + 1], floor[i]))
    moved = _monotone(schedule, [*table, schedule.top_k[-1]])
    return Control(moved, tuple(room_steps), tuple(floor))


def raise_bins(schedule: SparsitySchedule, bins: Sequence[BinMismatch]) -> SparsitySchedule:
    """Return the schedule with 1.5 times as many pages in ``bins``."""
    always = schedule.sink_pages + schedule.recent_pages
    table = _extended(schedule, max(len(schedule.top_k) - 1, *(b.bin + 1 for b in bins)))
    for b in bins:
        table[b.bin] = min(_raised(table[b.bin] + always, 1.5) - always, ALL_PAGES)
    return _monotone(schedule, [*table, schedule.top_k[-1]])


def below(bins: Sequence[BinMismatch], threshold: float) -> list[BinMismatch]:
    """Select the bins with enough responses whose p5 is certainly below ``threshold``.

    Only the upper bound on acceptance, with its interval, can show this. If few top tokens are
    recorded, the lower bound is low wherever the distribution is flat, even if the actor is close
    to the policy.
    """
    return [b for b in bins if b.n_sequences >= MIN_SEQUENCES and b.verdict(threshold) == "below"]


class Mover(Protocol):
    """Adjusts the schedule between steps."""

    def propose(
        self, now: SparsitySchedule, proposed: SparsitySchedule, report: MismatchReport
    ) -> SparsitySchedule:
        """Propose a schedule for the next rollouts. A mover that changes nothing returns
        ``proposed`` itself.

        Args:
            now: the current schedule.
            proposed: what the previous movers proposed; ``now`` itself if none of them changed it.
            report: this step's measurements, pooled over all processes. They were made under
                ``now``, and use its length bins.
        """

    def state(self) -> dict[str, Any]:
        """Return the state for ``load``, as plain JSON types."""

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by ``state``."""


class ClosedLoop:
    """Keeps p5 at tau in every bin; see ``next_schedule``."""

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
        # version 0.1.0 checkpoints call this "calm"
        room_steps = state["room_steps"] if "room_steps" in state else state["calm"]
        self._room_steps = tuple(room_steps)
        self._floor = tuple(state["floor"])


class Guard:
    """Warns if a length bin's p5 is too low or p1 over all tokens has dropped; see ``GuardConfig``.

    The guard uses the upper bound on acceptance, so a small number of recorded top tokens never
    triggers this warning. If there are too few top tokens to judge p5, a separate warning says so.
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
        # consecutive steps with at least one of the two warning signs
        self.steps_below = 0

    def propose(
        self, now: SparsitySchedule, proposed: SparsitySchedule, report: MismatchReport
    ) -> SparsitySchedule:
        bins = report.bins
        failing = below(self._threshold.scale(bins), self._threshold.value)
        fallen = report.p1_upper < FALLEN * self._best_p1
        self._best_p1 = max(self._best_p1, report.p1)
        self.steps_below = self.steps_below + 1 if failing or fallen else 0
        # Bins that read the whole cache aren't judged against tau.
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
        # Don't raise bins that ``proposed`` already raises.
        unraised = [b for b in sparse if _pages(proposed, b) <= _pages(now, b)]
        return _densest(raise_bins(now, unraised), proposed) if unraised else proposed

    @property
    def alarm(self) -> bool:
        """True once warning signs have lasted long enough for the guard to act."""
        return self.steps_below >= self._config.patience

    @property
    def stops(self) -> bool:
        """True if the run should stop."""
        return self.alarm and self._config.action == "stop"

    @property
    def warning(self) -> str | None:
        """The warning to log after this step, if any. A warning is given once warning signs have
        lasted ``patience`` steps in a row. It is not repeated until the signs have cleared.
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
        prefix = f"{symptom}, or p1 below half of its best value, for "
        if self._reads_all:
            return (
                f"{prefix}{self.steps_below} steps, although samples read the whole cache; "
                "sparsity is not the cause, so check that new weights reach the engine, and "
                "that engine and policy agree in precision, temperature and model"
            )
        return (
            f"{prefix}{self.steps_below} steps, so training "
            "may collapse; a denser schedule prevents it"
        )

    @property
    def remedy(self) -> str:
        """Options for resuming from the checkpoint at which the guard stopped the run."""
        if self._reads_all:
            return "--resume continues from there once the cause is fixed"
        return "--resume --guard.action raise continues from there with more pages"

    def state(self) -> dict[str, Any]:
        return {"best_p1": self._best_p1, "steps_below": self.steps_below}

    def load(self, state: Mapping[str, Any]) -> None:
        self._best_p1 = state["best_p1"]
        self.steps_below = state["steps_below"]


class Movers:
    """All of a run's schedule movers, in the order in which they propose schedules.

    Args:
        config: the run's config.
        closed_loop: whether to adjust the schedule to measured p5.
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
        """Return the schedule for the next rollouts. ``report`` was measured under ``now``."""
        proposed = now
        for mover in self._movers.values():
            proposed = mover.propose(now, proposed, report)
        return proposed

    def complaint(self, report: MismatchReport) -> str | None:
        """Return a complaint if even dense rollouts fall short of tau, or can't be shown to reach
        it. The complaint is made at most once.
        """
        if not self._asks or self._said:
            return None
        message = self._tau.out_of_reach(report.bins)
        self._said = message is not None
        return message

    def state(self) -> dict[str, Any]:
        """Return every mover's state, keyed by the mover's name."""
        return {name: mover.state() for name, mover in self._movers.items()}

    def load(self, state: Mapping[str, Any]) -> None:
        """Restore a state returned by ``state``. A mover that was off when the state was saved
        starts afresh.
        """
        for name, mover in self._movers.items():
            if name in state:
                mover.load(state[name])


def _raised(pages: int, rejected: float) -> int:
    return max(pages + 1, math.ceil(pages * min(STEP_UP, rejected)))


def _whole(schedule: SparsitySchedule, i: int) -> int:
    """Return the top-k at which bin ``i`` is dense, so that every head reads the whole cache."""
    pages = math.ceil((i + 1) * schedule.bin_tokens / schedule.page_size)
    by_score = max(0, pages - schedule.sink_pages - schedule.recent_pages)
    least = int(schedule.sparse_budget_units.min())  # the head with the smallest budget decides
    if by_score and not least:
        return ALL_PAGES
    # A head's share of the top-k is rounded half up.
    needed = math.ceil((by_score * BUDGET_UNIT - BUDGET_UNIT // 2) / max(least, 1))
    return min(max(0, needed), ALL_PAGES)


def _pages(schedule: SparsitySchedule, b: BinMismatch) -> int:
    """Return a length bin's top-k."""
    return int(schedule.pages(b.end - schedule.page_size))


def _densest(a: SparsitySchedule, b: SparsitySchedule) -> SparsitySchedule:
    """Merge two schedules, taking the denser of ``a`` and ``b`` at every length. If they differ in
    more than top-k, return ``a``.
    """
    if a.replace(top_k=b.top_k) != b:
        return a
    count = max(len(a.top_k), len(b.top_k))
    return a.replace(top_k=tuple(map(max, _extended(a, count), _extended(b, count))))


def _extended(schedule: SparsitySchedule, count: int) -> list[int]:
    """Return the table's first ``count`` entries, repeating the last one if there are fewer."""
    return [schedule.top_k[min(i, len(schedule.top_k) - 1)] for i in range(count)]


def _monotone(schedule: SparsitySchedule, table: list[int]) -> SparsitySchedule:
    return schedule.replace(top_k=tuple(np.maximum.accumulate(table).tolist()))
