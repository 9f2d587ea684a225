"""Extract programs from responses, and judge them by running tests (``sandbox.judge``)."""

from __future__ import annotations

import os
import re
import textwrap
import threading
from functools import cache

from sparrow.rewards.sandbox import Isolation, Judge, Limits, Tests
from sparrow.rewards.thinking import conclusion

_FENCE = re.compile(
    r"(?P<indent>[ \t]*+(?:(?:[-*+]|\d{1,9}[.)])[ \t]++)?+)"
    r"(?:(?P<mark>`{3,}+|~{3,}+)[ \t]*+(?P<language>\w*+)(?!.*```))"
)
_QUOTES = re.compile(r"\"{3}|'{3}")


def extract_code(response: str) -> str | None:
    """Extract the last fenced block after the thinking. Blocks marked as Python take precedence.
    Return None if there is no block, or if the response was cut off mid-thinking.

    Fences are backticks or tildes, as in Markdown. If a fence is indented, for example in a list,
    the code is dedented to match. An unclosed block runs to the end of the response, and a closing
    fence may come at the end of a line of code. Without any fences, the last block indented by four
    spaces or a tab is used.
    """
    text = conclusion(response)
    if text is None:
        return None

    blocks: dict[bool, str] = {}
    opened: re.Match[str] | None = None
    lines: list[str] = []
    quoted = False  # whether the line is inside a multi-line string, judging by the quotes so far

    def close() -> None:
        assert opened is not None
        is_python = opened["language"].lower() in ("python", "python3", "py")
        blocks[is_python] = "".join(line + "\n" for line in lines)

    for line in text.split("\n"):
        if opened is None:
            if opened := _FENCE.match(line):
                lines = []
                quoted = False
            continue
        mark = opened["mark"]
        bare = line.strip()
        indent = len(line) - len(line.lstrip())
        if bare.startswith(mark) and not bare.strip(mark[0]) and indent < len(opened["indent"]) + 4:
            close()
            opened = None
        elif bare.endswith(mark) and not quoted and "#" not in line and not _QUOTES.search(line):
            lines.append(_unindented(line.rstrip()[: -len(mark)], opened["indent"]))
            close()
            opened = None
        else:
            quoted ^= len(_QUOTES.findall(line)) % 2 == 1
            lines.append(_unindented(line, opened["indent"]))

    while lines and not lines[-1].strip():
        lines.pop()
    if opened is not None and lines:
        close()
    if not blocks:
        return _indented(text)
    return blocks.get(True, blocks.get(False))


def _unindented(line: str, indent: str) -> str:
    """Remove the fence's indentation from a line, or as much of it as the line has."""
    return line[min(len(indent), len(line) - len(line.lstrip())) :]


def _indented(text: str) -> str | None:
    """Extract the last block of indented lines that follows an empty line."""
    last: list[str] = []
    block: list[str] | None = None
    empty = True
    for line in [*text.split("\n"), "."]:
        if line.startswith(("    ", "\t")) and line.strip():
            if block is None and empty:
                block = []
            if block is not None:
                block.append(line)
        elif not line.strip():
            if block is not None:
                block.append("")
        elif block is not None:
            last = block
            block = None
        empty = not line.strip()
    if not last:
        return None
    return textwrap.dedent("\n".join(last).strip("\n")) + "\n"


class CodeVerifier(Judge):
    """A ``Judge`` that first extracts the program from a response. Takes the same arguments."""

    def __call__(self, response: str, answer: Tests) -> float:
        """Return 1.0 if the response's program passes every test in ``answer``, otherwise 0.0."""
        code = extract_code(response)
        return float(code is not None and self.judge(code, answer).passed)


_lock = threading.Lock()


@cache
def _shared(pid: int, limits: Limits, isolation: Isolation) -> CodeVerifier:
    return CodeVerifier(limits, isolation)


def verify_code(
    response: str, answer: Tests, *, limits: Limits | None = None, isolation: Isolation = "auto"
) -> float:
    """Return 1.0 if the program in the response passes every test in ``answer``, otherwise 0.0.

    Calls with the same limits and isolation share one pool of workers, one per CPU.

    Raises RewardError if programs cannot be run on this machine with the requested isolation.
    Raises ValueError if the tests aren't one of the three kinds.
    """
    with _lock:
        verifier = _shared(os.getpid(), limits or Limits(), isolation)
    return verifier(response, answer)
