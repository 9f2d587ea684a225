"""Judge several responses at once, each with its problem's verifier. If a verifier fails, the error
says where.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
from collections.abc import Sequence
from multiprocessing.pool import ThreadPool
from typing import Any

from sparrow.errors import RewardError, place
from sparrow.tasks.base import Problem

# largest absolute value of a reward; a larger reward would make the spread within its group
# meaningless
LARGEST_REWARD = 1e6
TIME_LIMIT = 300.0  # seconds without a verdict before a verifier is assumed to hang
VERIFYING = 64
"""Number of responses to verify at once. CPU-bound verifiers queue in pools of their own, so a bad
program only delays its own verdict.
"""
CONTINUE = "continue (sparrow train: with --resume, sparrow eval: with the same command)"


def verify_all(
    problems: Sequence[Problem], texts: Sequence[str], time_limit: float = TIME_LIMIT
) -> list[float]:
    """Return each response's reward.

    The time limit applies to the wait for the next verdict, not to each verifier, because a
    verifier may have to wait for a CPU.

    Raises RewardError if a verifier raised an error, returned something other than a finite number,
    or exceeded the time limit.
    """
    rewards: dict[int, float] = {}
    failed: dict[int, BaseException] = {}

    def work(i: int) -> None:
        if i > min(failed, default=i):
            # only the earliest error is raised, so skip any responses after a failed one
            return
        try:
            rewards[i] = verify(problems[i], texts[i])
        except BaseException as error:  # or the pool's thread would die silently
            failed[i] = error

    # The pool's threads are daemons: a hanging thread can't be killed, and must not keep the
    # process alive.
    with ThreadPool(min(VERIFYING, len(texts)) or 1) as pool:
        ended = pool.imap_unordered(work, range(len(texts)))
        try:
            for _ in texts:
                ended.next(time_limit)
        except multiprocessing.TimeoutError:
            if not failed:
                # Responses are started in order, so the first one without a reward has been running
                # longest.
                oldest = min(set(range(len(texts))) - rewards.keys(), default=0)
                raise RewardError(
                    f"the verifier of problem {problems[oldest].id!r} has not returned within "
                    f"{time_limit:g} s; fix it, or raise the limit if this is a training run "
                    f"(reward.time_limit), and {CONTINUE}"
                ) from None
    if failed:
        raise failed[min(failed)]
    return [rewards[i] for i in range(len(texts))]


def verify(problem: Problem, text: str) -> float:
    """Return the reward of one response.

    Raises RewardError if the verifier raised an error, returned something other than a finite
    number, or returned a number whose absolute value exceeds ``LARGEST_REWARD``.
    """
    verifier = f"the verifier of problem {problem.id!r}"
    try:
        reward: Any = problem.verify(text)
    except RewardError:
        raise
    except (Exception, SystemExit) as error:
        raise RewardError(f"{verifier} raised {place(error)}; fix it and {CONTINUE}") from error

    number = math.nan
    if not isinstance(reward, str | bytes | bytearray):  # float() would parse text as a number
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            number = float(reward)
    if not math.isfinite(number):
        raise RewardError(
            f"{verifier} returned {reward!r}, expected a finite number; fix it and {CONTINUE}"
        )
    if abs(number) > LARGEST_REWARD:
        raise RewardError(
            f"{verifier} returned {reward!r}, but the absolute value of a reward must be at most "
            f"{LARGEST_REWARD:g} (rewards are usually in 0..1); scale it and {CONTINUE}"
        )
    return number


def stated(problem: Problem, text: str) -> bool:
    """Return whether a response states an answer, right or wrong.

    Raises RewardError if the problem's ``extract`` raised an error.
    """
    try:
        return problem.extract is not None and problem.extract(text) is not None
    except (Exception, SystemExit) as error:
        raise RewardError(
            f"the extract function of problem {problem.id!r} raised {place(error)}; fix it and "
            f"{CONTINUE}"
        ) from error
