"""One-sentence errors, with a reason and a remedy, for vLLM engines that do not start."""

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
"""Pairs of a lower-case phrase and a remedy. If vLLM's reason contains the phrase, the remedy
applies. The first match wins.
"""
ADVICE = ("Try ", "See ", "Please ", "If ", "Consider ", "Decrease ", "Increase ")
"""Sentences in vLLM's message that start with one of these words are advice, not part of the
reason.
"""


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Turn vLLM's exceptions during startup into an EngineError, and log the traceback at level
    DEBUG. Other exceptions pass through unchanged.
    """
    try:
        yield
    except Exception as error:
        # vLLM raises an AttributeError for some options of the wrong type, and a bare Exception if
        # a worker process dies.
        if (
            not isinstance(error, ValueError | RuntimeError | TypeError | AttributeError)
            and type(error) is not Exception
        ):
            raise
        log.debug("vLLM did not start", exc_info=True)
        raise EngineError(f"vLLM did not start: {sentence(error)}") from error


@contextlib.contextmanager
def undone_if_refused() -> Iterator[None]:
    """If vLLM does not start, clean up after it, but keep the trainer's process groups."""
    from vllm.distributed import cleanup_dist_env_and_memory

    was_initialized = torch.distributed.is_initialized()
    try:
        yield
    except BaseException:
        if not was_initialized:
            cleanup_dist_env_and_memory()
        raise


def sentence(error: Exception) -> str:
    """Return the reason for the error and a remedy, in one sentence."""
    reason = _reason(error)
    found = (remedy for words, remedy in REMEDIES if words in reason.lower())
    remedy = next(found, "change the engine's options")
    return f"{reason}; {remedy}"


def _reason(error: Exception) -> str:
    """Extract the reason from an error's text, dropping the advice that vLLM and torch add."""
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
    """Lowercase a sentence's first letter so that it can follow a semicolon, but leave acronyms
    alone.
    """
    first = sentence[:1]
    second = sentence[1:2]
    return first.lower() + sentence[1:] if second.islower() else sentence
