"""The process that compares two mathematical answers with math-verify; started by ``sparrow.rewards.math``.

It is run by path and imports nothing of this package, so that a worker costs math-verify's imports alone.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from functools import lru_cache
from typing import Any

MEMORY_BYTES = 4 << 30  # address space of a worker: sympy can be led to write out numbers of any size

_COMMAND = re.compile(r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mbox|operatorname)\s*\{([^{}]*)\}")
_TEXT = re.compile(r"\(?[a-z][\w' -]*\)?")
_WORDS = re.compile(r"[a-z]{4,}|[a-z]{2,}(?: [a-z]+)+")


@lru_cache(maxsize=256)
def parse(answer: str) -> list[Any]:
    """The readings of an answer, as math-verify gives them. Cached: a group of responses shares one reference."""
    from math_verify import LatexExtractionConfig
    from math_verify import parse as math_verify_parse

    boxed = [LatexExtractionConfig(boxed_match_priority=0)]
    return math_verify_parse(f"\\boxed{{{answer}}}", extraction_config=boxed, parsing_timeout=None)


def words(answer: str) -> str:
    """An answer that is text, without LaTeX commands, case or parentheses around it; empty for other answers."""
    text = " ".join(_COMMAND.sub(r" \1 ", answer).strip(" $.").casefold().split())
    return text.strip("()") if _TEXT.fullmatch(text) else ""


def equal(answer: str, reference: str) -> bool:
    """Whether two answers are the same mathematical object, or the same words.

    A reference in words is compared as words: read as algebra, *Evelyn* is a product of letters in any order.
    """
    from math_verify import verify

    expected = words(reference)
    if expected and words(answer) == expected:
        return True
    if _WORDS.fullmatch(expected):
        return False
    return bool(verify(parse(reference), parse(answer), allow_set_relation_comp=True, timeout_seconds=None))


def main(limit_s: float) -> None:
    """Answer requests, an answer and a reference each, until standard input ends."""
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w")
    equal("\\frac{1}{2}", "0.25 + 0.25")  # the first comparison builds parsers and caches
    replies.write('{"ready": true}\n')
    replies.flush()
    # Libraries that print must not be able to speak in the worker's place.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    for line in sys.stdin:
        # The verifier kills at the limit; should it be gone, the kernel ends this process a little later.
        signal.setitimer(signal.ITIMER_REAL, limit_s + 1)
        try:
            verdict = equal(**json.loads(line))
        except (Exception, MemoryError, RecursionError):
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps({"equal": verdict}) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
