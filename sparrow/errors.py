"""Errors that a user can act on. The command line prints their one-sentence messages without a
traceback.
"""

import traceback
from collections.abc import Iterable


def place(error: BaseException) -> str:
    """Describe, for a message, an error from code outside Sparrow and where it was raised:
    ``KeyError: 'x' (tasks.py, line 7, in verify)``.
    """
    described = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return described
    last = frames[-1]
    return f"{described} ({last.filename}, line {last.lineno}, in {last.name})"


class SparrowError(Exception):
    """A problem that the user can fix. The message states the value, what was expected, and the
    remedy.
    """


class ConfigError(SparrowError):
    """An error for a setting, a schedule or a file that cannot be used as it is."""


class PromptError(ConfigError):
    """An error for a prompt that an engine cannot use; ``index`` is its position in the list of
    prompts, and ``reason`` says why.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"prompt {index} {reason}")
        self.index = index
        self.reason = reason


class TaskError(SparrowError):
    """An error for a task that raised an exception instead of returning a problem."""


class UnsupportedModel(SparrowError):
    """An error for a model whose attention cannot be routed through Sparrow."""


class RewardError(SparrowError):
    """An error for a verifier that raised an exception, or returned something other than a finite
    number.
    """


class TrainingDiverged(SparrowError):
    """An error for logits, a loss, a gradient or an importance ratio that is no longer usable."""


class EngineError(SparrowError):
    """An error for a generation engine that died, hangs or refused a request."""


class ProcessLost(SparrowError):
    """An error for a process of the run that died or hangs, so that the other processes cannot
    continue.
    """


class CheckpointError(SparrowError):
    """An error for a checkpoint that could not be written or read."""


def refuse(
    error: type[SparrowError], cases: Iterable[tuple[bool, str]], before: str, after: str = ""
) -> None:
    """Raise ``error`` for the first condition that is true.

    ``cases`` are pairs of a condition and its name. The message consists of ``before``, the name
    and ``after``.
    """
    for holds, name in cases:
        if holds:
            raise error(f"{before}{name}{after}")
