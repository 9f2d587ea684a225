"""How a synthetic task's answer is read."""

from __future__ import annotations

import re
from functools import partial

from sparrow.tasks.base import Problem

_ANSWER = re.compile(r"answer: (\d)\s*(?:<eos>\s*)*\Z")


def stated_answer(response: str) -> str | None:
    """The digit of a response that ends in ``answer: <digit>``."""
    match = _ANSWER.search(response)
    return match[1] if match else None


def check_answer(response: str, expected: int) -> float:
    """1.0 if the response ends in ``answer: <expected>``, otherwise 0.0."""
    return float(stated_answer(response) == str(expected))


def answered(id: str, prompt: str, solution: str, answer: int) -> Problem:
    """A problem judged by its final digit."""
    verify = partial(check_answer, expected=answer)
    return Problem(id, prompt, verify, stated_answer, id.split("-")[0], solution)
