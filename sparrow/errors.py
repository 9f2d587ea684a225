"""Errors a user can act on. The command line prints their one sentence and no traceback."""

import traceback
from collections.abc import Iterable


def place(error: BaseException) -> str:
    """What code outside Sparrow raised and where, for a message: ``KeyError: 'x' (tasks.py, line 7,
    in verify)``.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = (
        f" ({frames[-1].filename}, line {frames[-1].lineno}, in {frames[-1].name})"
        if frames
        else ""
    )
    return f"{type(error).__name__}: {error}{where}"


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
        self.index, self.reason = index, reason


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
    """A process of the run that died or hangs, so that the processes can no longer work together."""


class CheckpointError(SparrowError):
    """A checkpoint that could not be written or read."""


def refuse(
    error: type[SparrowError], cases: Iterable[tuple[bool, str]], before: str, after: str = ""
) -> None:
    """Raises ``error``: the first case that holds, named between ``before`` and ``after``."""
    for holds, name in cases:
        if holds:
            raise error(f"{before}{name}{after}")
