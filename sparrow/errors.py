"""Errors a user can act on. The command line prints their one sentence and no traceback."""

import traceback
from collections.abc import Iterable


def place(error: BaseException) -> str:
    """Describe an error of code outside Sparrow and where it was raised, for a message: ``KeyError:
    'x' (tasks.py, line 7, in verify)``.
    """
    described = f"{type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return described
    last = frames[-1]
    return f"{described} ({last.filename}, line {last.lineno}, in {last.name})"


class SparrowError(Exception):
    """Something the user can fix; the message gives the value, what was expected and the remedy."""


class ConfigError(SparrowError):
    """A setting, schedule or file that cannot be used as it is."""


class PromptError(ConfigError):
    """A prompt that an engine cannot take; ``index`` is its place among those given, ``reason``
    says why.
    """

    def __init__(self, index: int, reason: str) -> None:
        super().__init__(f"prompt {index} {reason}")
        self.index = index
        self.reason = reason


class TaskError(SparrowError):
    """A task that raised instead of giving a problem."""


class UnsupportedModel(SparrowError):
    """A model whose attention cannot be routed through Sparrow."""


class RewardError(SparrowError):
    """A verifier that raised or returned something that is not a finite number."""


class TrainingDiverged(SparrowError):
    """Logits, a loss, a gradient or an importance ratio that are no longer usable."""


class EngineError(SparrowError):
    """A generation engine that died, hangs or refused a request."""


class ProcessLost(SparrowError):
    """A process of the run that died or hangs, so that the others cannot go on."""


class CheckpointError(SparrowError):
    """A checkpoint that could not be written or read."""


def refuse(
    error: type[SparrowError], cases: Iterable[tuple[bool, str]], before: str, after: str = ""
) -> None:
    """Raise ``error`` for the first condition that is true.

    ``cases`` are conditions and their names; the message is ``before``, the name, and ``after``.
    """
    for holds, name in cases:
        if holds:
            raise error(f"{before}{name}{after}")
