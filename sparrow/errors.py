"""Errors that a user can act on. The command line prints their one-sentence messages without a
traceback.
"""

import traceback
from collections.abc import Iterable


def place(error: BaseException) -> str:
    """Describe an error raised outside Sparrow, for use in a message. The description includes
    where the error was raised, as in ``KeyError: 'x' (tasks.py, line 7, in verify)``.
    """
    described = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return described
    last = frames[-1]
    return f"{described} ({last.filename}, line {last.lineno}, in {last.name})"


class SparrowError(Exception):
    """A problem the user can fix. The message says what the value was, what was expected, and what
    to do about it.
    """


class ConfigError(SparrowError):
    """Raised for a setting, schedule or file that cannot be used as it is."""


class PromptError(ConfigError):
    """Raised for a prompt that an engine cannot use; ``index`` is its position in the list of
    prompts, and ``reason`` says why.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"prompt {index} {reason}")
        self.index = index
        self.reason = reason


class TaskError(SparrowError):
    """Raised if a task raises an exception instead of returning a problem."""


class UnsupportedModel(SparrowError):
    """Raised for a model whose attention cannot be routed through Sparrow."""


class RewardError(SparrowError):
    """Raised if a verifier raises an exception, or returns something other than a finite number."""


class TrainingDiverged(SparrowError):
    """Raised if logits, a loss, a gradient or an importance ratio is no longer usable."""


class EngineError(SparrowError):
    """Raised if a generation engine dies, hangs or refuses a request."""


class ProcessLost(SparrowError):
    """Raised if one of the run's processes dies or hangs, so that the others can't continue."""


class CheckpointError(SparrowError):
    """Raised if a checkpoint cannot be written or read."""


def refuse(
    error: type[SparrowError], cases: Iterable[tuple[bool, str]], before: str, after: str = ""
) -> None:
    """Raise ``error`` for the first condition that's true.

    ``cases`` are pairs of a condition and its description. The message is ``before``, then the
    description, then ``after``.
    """
    for holds, name in cases:
        if holds:
            raise error(f"{before}{name}{after}")
