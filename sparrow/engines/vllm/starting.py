"""One-sentence errors for a vLLM engine that does not start, which state the reason and the
remedy.
"""

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
    "allow the engine more memory (gpu_memory_utilization, or VLLM_CPU_KVCACHE_SPACE on a CPU), or "
    "limit it to shorter sequences (max_model_len)"
)
LESS_MEMORY = (
    "allow the engine less memory (gpu_memory_utilization), or stop other processes on the device"
)
REMEDIES = (
    ("kv cache", LARGER_CACHE),
    ("cache blocks", LARGER_CACHE),
    ("out of memory", LESS_MEMORY),
    ("free memory", LESS_MEMORY),
    ("background process", "see its error message above"),
    ("initialization failed", "see its error message above"),
)
"""Phrases that vLLM's reason may contain, in lower case, each with its remedy. The first match is
used.
"""
ADVICE = ("Try ", "See ", "Please ", "If ", "Consider ", "Decrease ", "Increase ")
"""Sentences of vLLM's message that begin with these words are advice, and not part of the
reason.
"""


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Turn exceptions that vLLM raises while an engine starts into an EngineError, and log their
    tracebacks at level DEBUG. Exceptions of other types pass through unchanged.
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
    """Return one sentence with the reason for the error and the remedy."""
    reason = _reason(error)
    found = (remedy for words, remedy in REMEDIES if words in reason.lower())
    remedy = next(found, "change the engine's options")
    return f"{reason}; {remedy}"


def _reason(error: Exception) -> str:
    """Extract the reason from an error's text, without the advice that vLLM and torch add."""
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
    """Change the first letter of a sentence to lower case, if necessary, so that the sentence can
    follow a semicolon.
    """
    first = sentence[:1]
    second = sentence[1:2]
    return first.lower() + sentence[1:] if second.islower() else sentence
