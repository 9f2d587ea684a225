"""Separate a response's thinking from its conclusion."""

from __future__ import annotations

import re

# Thinking delimiters: the tags of Qwen, DeepSeek and others, then those of Magistral, Kimi and
# Sky-T1.
_DELIMITER = re.compile(
    r"(<(?:think|thinking|thought|reasoning|seed:think)>"
    r"|\[THINK\]|◁think▷|<\|begin_of_thought\|>)"
    r"|</(?:think|thinking|thought|reasoning|seed:think)>"
    r"|\[/THINK\]|◁/think▷|<\|end_of_thought\|>",
    re.IGNORECASE,
)


def conclusion(response: str) -> str | None:
    """Return the text after the thinking, or the whole response if it has no thinking delimiters.
    Return None if the response was cut off mid-thinking.

    A chat template may open the thinking in the prompt, so the first delimiter may be a closing
    one.
    """
    delimiters = list(_DELIMITER.finditer(response))
    if not delimiters:
        return response
    last = delimiters[-1]
    is_opening = last[1] is not None
    return None if is_opening else response[last.end() :]
