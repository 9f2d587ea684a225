"""What keeps a vLLM engine from starting, in one sentence: vLLM's reason, and what to do."""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

import torch
from pydantic import ValidationError

from sparrow.errors import EngineError

log = logging.getLogger(__name__)

LARGER_CACHE = (
    "leave the engine more memory (gpu_memory_utilization; on a CPU VLLM_CPU_KVCACHE_SPACE), or "
    "ask for shorter sequences (max_model_len)"
)
LESS_MEMORY = (
    "let the engine take less memory (gpu_memory_utilization), or end what else runs on the device"
)
REMEDIES = (
    ("kv cache", LARGER_CACHE),
    ("cache blocks", LARGER_CACHE),
    ("out of memory", LESS_MEMORY),
    ("free memory", LESS_MEMORY),
    ("background process", "its message is above"),
    ("initialization failed", "its message is above"),
)
"""What a reason may say, in lower case, and what helps then; the first that is found counts."""
ADVICE = ("Try ", "See ", "Please ", "If ", "Consider ", "Decrease ", "Increase ")
"""How the sentences of a message begin that are no part of the reason."""


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Turn what vLLM raises while an engine starts into an EngineError; its traceback is logged at
    level DEBUG. Errors of other kinds are left as they are.
    """
    try:
        yield
    except Exception as error:
        # If a worker process dies, vLLM raises a bare Exception.
        if (
            not isinstance(error, ValueError | RuntimeError | TypeError)
            and type(error) is not Exception
        ):
            raise
        log.debug("vLLM did not start", exc_info=True)
        raise EngineError(f"vLLM did not start: {sentence(error)}") from error


def sentence(error: Exception) -> str:
    """The reason and the remedy."""
    reason = _reason(error)
    found = (remedy for words, remedy in REMEDIES if words in reason.lower())
    return f"{reason}; {next(found, 'change the options of the engine')}"


def _reason(error: Exception) -> str:
    """Extract the reason from an error's text, without the advice of vLLM and torch."""
    if isinstance(error, ValidationError):
        found = error.errors()[0]
        name = ".".join(map(str, found["loc"]))
        text = found["msg"].removeprefix("Value error, ")
        text = f"{name}: {text}" if name else text
    else:
        text = str(error).strip()
    line = text.partition("\n")[0] or type(error).__name__
    if isinstance(error, torch.OutOfMemoryError):
        line = line.partition(". Of the allocated")[0]
    parts = [part.strip() for part in re.split(r"\.\s+", line.rstrip(". "))]
    first, *more = [part for part in parts if not part.startswith(ADVICE)] or [line]
    return "; ".join([first, *map(_continued, more)])


def _continued(sentence: str) -> str:
    """Write a sentence so that it can follow a semicolon."""
    first = sentence[:1]
    second = sentence[1:2]
    return first.lower() + sentence[1:] if second.islower() else sentence
