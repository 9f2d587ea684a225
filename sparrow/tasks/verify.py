"""Judges responses by their problems' verifiers, several at a time; errors name their place in the verifier."""

from __future__ import annotations

import math
import queue
import threading
from collections.abc import Sequence

from sparrow.errors import RewardError, place
from sparrow.tasks.base import Problem

TIME_LIMIT = 300.0  # after this many seconds without any verdict, a verifier is taken to hang
VERIFYING = 64
"""Responses verified at a time. Verifiers that need processors wait for their own pools, so a bad program holds up
only itself."""


def verify_all(problems: Sequence[Problem], texts: Sequence[str], time_limit: float = TIME_LIMIT) -> list[float]:
    """The reward of each response, given its problem.

    The limit is on the time between two verdicts, not on the time of one, since a verifier may wait for processors.

    Raises RewardError: a verifier raised an error, returned something that is not a finite number, or hangs.
    """
    pending: queue.SimpleQueue[int] = queue.SimpleQueue()
    verdicts: queue.SimpleQueue[tuple[int, float | Exception]] = queue.SimpleQueue()
    running: dict[int, None] = {}  # in the order in which they began
    for i in range(len(texts)):
        pending.put(i)

    def work() -> None:
        while True:
            try:
                i = pending.get_nowait()
            except queue.Empty:
                return
            running[i] = None
            try:
                verdicts.put((i, verify(problems[i], texts[i])))
            except Exception as error:
                verdicts.put((i, error))
            del running[i]

    # Daemons, because a thread that hangs cannot be ended and must not keep the process from ending.
    for _ in range(min(VERIFYING, len(texts))):
        threading.Thread(target=work, daemon=True).start()
    rewards = [0.0] * len(texts)
    failed: dict[int, Exception] = {}
    waiting = len(texts)
    try:
        while waiting:
            i, verdict = verdicts.get(timeout=time_limit)
            waiting -= 1
            if isinstance(verdict, Exception):
                failed[i] = verdict
                waiting -= _emptied(pending)  # wait for those already begun, to raise the first error
            else:
                rewards[i] = verdict
    except queue.Empty:
        if not failed:
            oldest = next(iter(dict(running)), 0)
            raise RewardError(
                f"the verifier of problem {problems[oldest].id!r} has not returned in {time_limit:g} s; fix it, or "
                "raise the limit (reward.time_limit), and resume the run"
            ) from None
    finally:
        _emptied(pending)
    if failed:
        raise failed[min(failed)]
    return rewards


def _emptied(pending: queue.SimpleQueue[int]) -> int:
    """Empty the queue; returns how many entries were left in it."""
    count = 0
    while True:
        try:
            pending.get_nowait()
        except queue.Empty:
            return count
        count += 1


def verify(problem: Problem, text: str) -> float:
    """The reward of one response.

    Raises RewardError: the verifier raised, or returned something that is not a finite number.
    """
    try:
        reward = problem.verify(text)
    except Exception as error:
        raise RewardError(
            f"the verifier of problem {problem.id!r} raised {place(error)}; fix it and resume the run"
        ) from error
    try:
        number = float(reward)
    except (TypeError, ValueError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(
            f"the verifier of problem {problem.id!r} returned {reward!r}, expected a finite number; fix it and resume"
        )
    return number


def stated(problem: Problem, text: str) -> bool:
    """Whether a response states an answer, right or wrong.

    Raises RewardError: the problem's ``extract`` raised.
    """
    try:
        return problem.extract is not None and problem.extract(text) is not None
    except Exception as error:
        raise RewardError(
            f"extract of problem {problem.id!r} raised {place(error)}; fix it and resume the run"
        ) from error
