"""What a task is: problems by index, each with a prompt and a verifier."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Problem:
    """One prompt and how to judge a response to it."""

    id: str  # stable name, the same for the same problem in every run
    prompt: str  # text given to the model
    # response text -> reward in [0, 1]; pure, and picklable so that it can run in another process
    verify: Callable[[str], float]
    # the answer that a response states, right or wrong, None if it states none; may be left out
    extract: Callable[[str], str | None] | None = None
    source: str = ""  # the task or dataset it comes from, by which rewards are reported
    solution: str | None = None  # a reference response where one is known


class Task(Protocol):
    """Problems by index. A pure function of its arguments, so a sampler resumes from ``(seed, cursor)`` alone."""

    def problem(self, index: int, seed: int = 0) -> Problem:
        """Problem ``index`` of the stream ``seed``; distinct seeds serve as splits."""
