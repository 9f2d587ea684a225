# ruff: noqa: RUF001  (the signs that answers are written with)
r"""The process that compares two mathematical answers with math-verify; started by
``sparrow.rewards.math``.

It is run by path and imports nothing of this package, so that a worker pays for math-verify's
imports alone.

There are three steps: ``plain`` rewrites typography as LaTeX that the parser knows, ``misread``
rejects an answer that math-verify would read as something other than what is written, and ``same``
is math-verify's comparison. What math-verify and its parser should do themselves is listed with its
cases in ``docs/math-verify/``; once they do it, the rule here is removed.
"""

from __future__ import annotations

import ctypes
import json
import logging
import mmap
import os
import re
import resource
import signal
import sys
import unicodedata
from collections.abc import Callable
from functools import lru_cache
from itertools import zip_longest
from typing import Any

MEMORY_BYTES = (
    4 << 30
)  # address space of a worker: sympy can be led to write out numbers of any size
PR_SET_PDEATHSIG = 1  # of Linux's prctl

# Typography
# -----------------------------------------------------------------------------------------------------------

_UNICODE = str.maketrans(
    {
        "−": "-",
        "–": "-",
        "×": r"\times ",
        "·": r"\cdot ",
        "÷": r"\div ",
        "⁄": "/",
        "π": r"\pi ",
        "∞": r"\infty ",
        "≤": r"\le ",
        "≥": r"\ge ",
        "≠": r"\ne ",
        "≈": r"\approx ",
        "±": r"\pm ",
        "∅": r"\emptyset ",
        "∪": r"\cup ",
        "∩": r"\cap ",
        "∈": r"\in ",
        "°": r"^\circ ",
        "º": r"^\circ ",
        "θ": r"\theta ",
        "∛": r"\sqrt[3]",
        "√": r"\sqrt",
        "’": "'",
        "⟨": r"\langle ",
        "⟩": r"\rangle ",
        "…": r"\ldots ",
        "ⅈ": "i",
        **dict.fromkeys("€£¥₹₩₽₪฿¢", ""),
        "\N{NO-BREAK SPACE}": " ",
        "\N{NARROW NO-BREAK SPACE}": " ",
    }
)
_RAISED, _LOWERED = "⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ", "₀₁₂₃₄₅₆₇₈₉"
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_DECORATED = re.compile(
    r"\\(?:(?:textcolor|colorbox)\s*\{[^{}]*\}|underline|boldsymbol|bm|pmb|mathbf|mathit|mathsf|boxed|fbox)\s*\{"
)
_INVISIBLE = re.compile(
    r"\\color\s*\{[^{}]*\}|\\[hv]?phantom\s*\{[^{}]*\}|\\\(|\\\)"
    r"|\\(?:displaystyle|textstyle|tiny|small|large|Large|LARGE|huge|Huge|bf|rm|it|limits)(?![a-zA-Z])"
)
_BRACES = re.compile(r"\{([^{}]*)\}")
# Markdown's emphasis stands around words, Python's power between two operands.
_EMPHASIS = re.compile(r"(?<![\w)}\]*\\])(\*{1,3})(?=[^\s*])(.+?)(?<=[^\s*])\1(?![\w({\\*])")
_LAST_POWER = re.compile(
    r"\s*\*\*\s*([-+]?(?:\d+(?:\.\d+)?|\\?[a-zA-Z]+)(?:\^\{.*?\}+)?|(?=\(|\\))(?!.*\*\*)", re.DOTALL
)
_FUNCTIONS = (
    "arcsin|arccos|arctan|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|ln|log|exp|max|min|gcd|lcm|sqrt"
)
_NAMED = re.compile(rf"\\(?:operatorname|mathrm|text)\s*\{{\s*({_FUNCTIONS})\s*\}}")
_CALLED = re.compile(rf"(?<![\\a-zA-Z])({_FUNCTIONS})(?=\s*[(^_\d\\]|\s+[a-z](?![a-z]))")
_INVERSE = re.compile(r"(?<![\\a-zA-Z])a(sin|cos|tan)(?=\s*\()")
_SIGNS = {"pi": r"\pi ", "theta": r"\theta ", "oo": r"\infty ", "infty": r"\infty "}
_SIGN = re.compile(rf"(?<![\\a-zA-Z])({'|'.join(_SIGNS)})(?![a-zA-Z])")
_ROOT_OF = re.compile(r"\\?(?<![a-zA-Z])sqrt\s*\(")
_SIZE_OF = re.compile(r"(?<![\\a-zA-Z])abs\s*\(")
_TO_THE = re.compile(r"\^\s*\(")
_ONGOING = re.compile(r"(\d*)\.(\d+)\s*(?:\\[lc]?dots(?![a-z])|\.{3,})(?!\s*\d)")
_IN_BRACKETS = re.compile(r"(?<![\d.])(\d*)\.()\((\d+)\)")
_VECTOR = re.compile(
    r"\\langle(?![a-z])([^<>]*?,[^<>]*?)\\rangle(?![a-z])|^\s*<([^<>]*,[^<>]*)>\s*$"
)
_CODES = r"(?:US|AU|CA)?\\?\$|USD|EUR|GBP|JPY|CNY|RMB|INR|CAD|AUD|CHF|Rs\.?|\\(?:pounds|euro|yen)"
_MONEY = re.compile(
    rf"(?<![a-zA-Z\\])(?:{_CODES})(?:\{{\}})?\s*(?=-?\.?\d)|(?<=\d)\s*(?:{_CODES})(?![a-zA-Z])"
)
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mbox|operatorname)\s*"
_COMMAND = re.compile(_TEXT + r"\{([^{}]*)\}")
_PROSE = re.compile(rf"({_TEXT}\{{[^{{}}]*\}})")
_LEAD = (
    r"(?:(?:therefore|thus|hence|so|then)\b[\s,]*)?(?:(?:the|our|my|final|correct|required|answer"
    r"|result|solution|value|sum|total|number|probability|area|length|of|to|this|problem|question"
    r"|we|get|have|find|obtain|it|x|y|n)\b[\s,]*)*"
)
_LED = re.compile(
    rf"\s*({_TEXT}\{{)?\s*(?:{_LEAD}(?:\b(?:is|are|equals)\b\s*:?|\b(?:answer|result|solution)s?\s*[:=])"
    r"|(?:therefore|thus|hence|so|then|we (?:get|have|find|obtain))\b[\s,:]*)\s*(?=[^\s.])",
    re.IGNORECASE,
)
_BASES = {
    name: str(base)
    for base, name in enumerate(
        [
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            "ten",
            "eleven",
            "twelve",
        ],
        2,
    )
} | {"sixteen": "16"}
_BASE = rf"(?:base[-\s]*)?({'|'.join(_BASES)}|\d+)"
_SUBSCRIPT = re.compile(
    rf"_\s*(?:\{{\s*{_TEXT}\{{\s*{_BASE}\s*\}}\s*\}}|{_TEXT}\{{\s*{_BASE}\s*\}}|\{{\s*{_BASE}\s*\}})"
)
_IN_BASE = re.compile(
    rf"(?<=[\dA-F])[\s,]*\(?(?:{_TEXT}\{{)?[\s(]*(?:in\s+)?base[-\s]*[\s}}]*({'|'.join(_BASES)}|\d+)[\s)}}]*$"
)
_SCALES = {
    "ten": "10",
    "dozen": "12",
    "hundred": "100",
    "thousand": "10^{3}",
    "million": "10^{6}",
    "billion": "10^{9}",
    "trillion": "10^{12}",
    "halve": "2^{-1}",
    "third": "3^{-1}",
    "quarter": "4^{-1}",
    "fourth": "4^{-1}",
    "fifth": "5^{-1}",
    "tenth": "10^{-1}",
    "hundredth": "10^{-2}",
    "thousandth": "10^{-3}",
    "millionth": "10^{-6}",
}
_SCALE = re.compile(
    rf"(?<=[\d}}])(?:\s|~|\\ )*({_TEXT}\{{)?(?:\s|~|\\ )*({'|'.join(_SCALES)})s?(?![a-z])"
)


def _mantissa(number: re.Match[str]) -> str:
    digits = number[1].replace(".", "")
    return rf"\frac{{{int(digits)}}}{{{10 ** (len(number[1]) - number[1].index('.') - 1)}}}\times "


_REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\\varnothing"), r"\\emptyset "),
    (re.compile(r"\\(?:mathrm|text)\s*\{\s*([ei])\s*\}"), r"\1"),
    (re.compile(r"\\[ij]math(?![a-z])"), "i"),
    (re.compile(r"(?<=\d)j(?![a-zA-Z])"), "i"),  # an engineer's and Python's i
    # The mantissa is exact, so that 6.02 \times 10^{23} is compared as a whole number.
    (re.compile(r"(?<![\d.])(\d+\.\d+)\s*\\(?:times|cdot)\s*(?=10\s*\^)"), _mantissa),
    (re.compile(r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\degree(?![a-z])"), r"^\\circ "),
    (re.compile(r"\\!\s*"), ""),  # a space taken back, as in 1,\!000
    (re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|~"), " "),
    (re.compile(r"\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\sqrt\s*(\[3\])?\s*\(([^()]*)\)"), r"\\sqrt\1{\2}"),
    (re.compile(r"\\sqrt\s*(\[3\])?\s*(\d+|[a-zA-Z])"), r"\\sqrt\1{\2}"),
    (re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?!\w)"), r"\1\\times 10^{\2}"),
    (re.compile(r"(?<![\d./])(\d+)\s+(\d+)/(\d+)(?![\d.])"), r"\1\\frac{\2}{\3}"),  # 3 1/2
    (
        re.compile(rf"(?<=\d)\^?\s*\{{?\s*(?:{_TEXT}\{{)?(?:st|nd|rd|th)(?![a-z])[\s}}]*$"),
        "",
    ),  # 5^{th}
]
_PERCENT = re.compile(r"\s*(?:\\?%|\b(?:percent|percentage|pct)\b)\s*$")
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?!\d| \d)")
_TRIGONOMETRIC = re.compile(r"\\(?:operatorname\{cis\}|sin|cos|tan|cot|sec|csc)(?![a-z])")
_OPEN_END = re.compile(r"(?:[-+*/=<>^_,(]|\\(?:cdot|times|div|pm|frac|le|ge|ne|to|cup|cap))\s*$")
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])")
_COUNT = re.compile(
    r"(-?(?:\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\}))\s*([a-z]{3,}(?: [a-z]+)*|[ckm]?m\^?\{?[23]\}?)"
)


def plain(answer: str) -> str:
    """The answer in LaTeX without typography: colours, Unicode's signs, spaces, ``3 1/2``,
    ``1e-3``, ``5 million``.
    """
    text = re.sub(f"[{_RAISED}]+", lambda m: f"^{{{unicodedata.normalize('NFKC', m[0])}}}", answer)
    text = re.sub(
        f"[{_LOWERED}]+",
        lambda m: f"_{{{unicodedata.normalize('NFKC', m[0])}}}",
        text.replace("−", "-"),
    )
    text = _VULGAR.sub(
        lambda m: r"\frac{{{}}}{{{}}}".format(*unicodedata.normalize("NFKC", m[0]).split("⁄")), text
    )
    text = _INVISIBLE.sub("", text.translate(_UNICODE))
    while match := _DECORATED.search(text):
        text = text[: match.start()] + _without_brace(text[match.end() :])
    text = _VECTOR.sub(lambda m: f"({m[1] or m[2]})", _MONEY.sub("", text))
    text = _IN_BASE.sub(lambda m: f"_{{{_BASES.get(m[1], m[1])}}}", text)
    text = _SUBSCRIPT.sub(_numeral, text)
    text = _COMMAND.sub(
        lambda m: m[1] if re.search(r"(?<![a-zA-Z])\d|^\s*(?:percent|pct)", m[1]) else m[0], text
    )
    text = _keyed(_without_lead(text))
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _GROUPED.sub(lambda m: m[0].replace(" ", ""), text)
    text = _IN_BRACKETS.sub(_fraction, _REPEATING.sub(_fraction, text))
    text = _ONGOING.sub(_ongoing, text)
    text = _SCALE.sub(lambda m: rf"\times {_SCALES[m[2]]}" + (m[1] or ""), text).strip(" $")
    return _BRACES.fullmatch(text)[1] if _BRACES.fullmatch(text) else text  # type: ignore[index]


def _keyed(text: str) -> str:
    """An answer as typed on a keyboard, in LaTeX: ``x**2``, ``sqrt(2)``, ``pi/4``, ``ln(2)``."""
    text = _EMPHASIS.sub(r"\2", text)
    while match := _LAST_POWER.search(text):  # from the right: 2**3**2 is 2**9
        exponent = f"^{{{match[1]}}}" if match[1] else "^"
        text = text[: match.start()] + exponent + text[match.end() :]
    text = _NAMED.sub(r"\\\1 ", text)
    parts = _PROSE.split(text)
    for place in range(0, len(parts), 2):  # between them stands text in words
        part = _CALLED.sub(r"\\\1 ", _INVERSE.sub(r"\\arc\1", parts[place]))
        parts[place] = _SIGN.sub(lambda m: _SIGNS[m[1]], part)
    text = _bracketed("".join(parts), _ROOT_OF, r"\sqrt{", "}")
    text = _bracketed(text, _SIZE_OF, "|", "|")
    return _bracketed(text, _TO_THE, "^{", "}")


def _bracketed(text: str, opening: re.Pattern[str], before: str, after: str) -> str:
    """Text in which ``opening``, which ends in a parenthesis, and the parenthesis that closes it are
    replaced.
    """
    while match := opening.search(text):
        rest = text[match.end() :]
        if (end := _closing(rest, "(", ")")) is None:
            break
        text = text[: match.start()] + before + rest[:end] + after + rest[end + 1 :]
    return text


def _without_lead(text: str) -> str:
    """An answer without the words that introduce it, as in *The answer is 5*."""
    if match := _LED.match(text):
        text = (match[1] or "") + text[match.end() :]
    return text


def _numeral(subscript: re.Match[str]) -> str:
    base = next(filter(None, subscript.groups()))
    return f"_{{{_BASES.get(base, base)}}}"


def _ongoing(decimal: re.Match[str]) -> str:
    """A decimal that goes on, as a fraction if its last digits repeat: 0.1666... is 1/6."""
    whole, digits = decimal.groups()
    for length in range(1, len(digits) // 2 + 1):
        repeated = digits[-length:]
        fixed = digits
        while fixed.endswith(repeated):
            fixed = fixed[:-length]
        if len(digits) - len(fixed) >= 2 * length:
            return _as_fraction(whole, fixed, repeated)
    return f"{whole}.{digits}"


def _without_brace(text: str) -> str:
    """Text that follows an opening brace, without the brace that closes it."""
    place = _closing(text, "{", "}")
    return text if place is None else text[:place] + text[place + 1 :]


def _closing(text: str, opening: str, closing: str) -> int | None:
    """The place of the bracket that closes one which was opened before ``text``."""
    depth = 1
    for place, sign in enumerate(text):
        depth += (sign == opening) - (sign == closing)
        if depth == 0:
            return place
    return None


def _fraction(decimal: re.Match[str]) -> str:
    """A repeating decimal as a fraction: 0.1666... is (16 - 1) / 90."""
    return _as_fraction(*decimal.groups())


def _as_fraction(whole: str, fixed: str, repeated: str) -> str:
    below = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    return rf"\frac{{{int(whole + fixed + repeated) - int(whole + fixed or 0)}}}{{{below}}}"


# What would be misread
# ------------------------------------------------------------------------------------------------

_WORD = re.compile(r"\(?[A-Za-z][\w' -]*\)?")
_WORDS = re.compile(r"[a-z]{4,}|[a-z]{2,}(?: [a-z]+)+")
_SHORT_WORDS = {
    "no",
    "yes",
    "odd",
    "all",
    "any",
    "one",
    "two",
    "six",
    "ten",
    "none",
    "even",
    "true",
}
_CAPITALS = re.compile(r"(\\[a-zA-Z]+)?\s*\{?[A-Z]{2,}\}?")
_HEDGES = frozenset(
    (
        "not",
        "isn't",
        "doesn't",
        "don't",
        "can't",
        "cannot",
        "never",
        "wrong",
        "incorrect",
        "false",
        "maybe",
        "perhaps",
        "possibly",
        "probably",
        "likely",
        "either",
        "neither",
        "nor",
        "but",
        "except",
        "unless",
        "if",
        "instead",
        "rather",
        "guess",
        "unsure",
        "unknown",
        "uncertain",
        "than",
        "squared",
        "cubed",
        "factorial",
        "plus",
        "minus",
        "times",
        "divided",
    )
)
_LETTERS = re.compile(r"(?<![\\a-z])[a-z']+")
_ALTERNATIVE, _JOINT = re.compile(r"\b(?:or|and)\b"), re.compile(r"[\s,]*(?:or|and)\s*")
_APART = re.compile(r"(?<![_^\d.])(?<!frac)(?<!frac )\d[\d.]*\s+\d")
_SECOND = re.compile(
    r"\d[^=]*\\text\s*\{(?!\s*(?:or|and|,)\s*\})[^{}]*\}(?!\s*\^)[^=<>\\]*\d"
)  # 5 ft 6 in
_NAME = r"[a-zA-Z]|\\[a-z]+"
_FLIPPED = re.compile(rf"([^=<>]*\d[^=<>]*)=\s*({_NAME})\s*")
_EQUALS = re.compile(r"(?<![\\<>!:])=")
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq|doteq)(?![a-z])")


def words(answer: str) -> str:
    """An answer that is text, without LaTeX commands and parentheses around it; empty for other
    answers.
    """
    text = " ".join(_COMMAND.sub(r" \1 ", answer).strip(" $.").split())
    return text.strip("()") if _WORD.fullmatch(text) else ""


def same_words(answer: str, reference: str) -> bool:
    """Whether two texts are the same; the case of letters counts in symbols such as ``AB``, not in
    whole words.
    """
    pairs = list(
        zip_longest(*(re.split("[ -]", side) for side in (answer, reference)), fillvalue="")
    )
    return all(a == r or (a.casefold() == r.casefold() and _is_word(a, r)) for a, r in pairs)


def _is_word(*spellings: str) -> bool:
    word = spellings[0]
    return (
        word.casefold() in _SHORT_WORDS
        or len(word) > 4
        or (len(word) > 2 and any(s.istitle() for s in spellings))
    )


def misread(answer: str, reference: str) -> bool:
    """Whether the answer says something that the comparison would not see."""
    said, expected = (
        set(_LETTERS.findall(_COMMAND.sub(r" \1 ", side).lower())) for side in (answer, reference)
    )
    if (said - expected) & _HEDGES:
        return True
    texts = [command[1] for command in _COMMAND.finditer(answer)]
    if any(_ALTERNATIVE.search(text) and not _JOINT.fullmatch(text) for text in texts):
        return not said & {"or", "and"} <= expected
    if _SECOND.search(answer) and not _SECOND.search(reference):
        return True
    if _CAPITALS.fullmatch(answer) and _CAPITALS.fullmatch(reference):
        return answer != reference
    return bool(_APART.search(answer))


_CHOICE = re.compile(
    r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s+)?"
    r"(?:\(([A-J])\)[\s:.]*|([A-J])\s*[:.)](?!\d)\s*|(?<=\w\s)([A-J])$)(.*)",
    re.DOTALL,
)
_CLOCK = re.compile(r"(\d{1,2})(?::(\d{2}))?\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)
_NUMERAL = re.compile(r"\(?([0-9A-F]+)\)?_\{?(\d+)\}?")
_NUMERALS = re.compile(r"(?<![\w\\}])\d[0-9A-F]*_\{?(\d+)\}?")


def choice(answer: str) -> tuple[str, str]:
    """The letter and the text of a choice such as ``C: text``; an empty letter for other answers.

    A text that names another choice leaves it open which is meant.
    """
    text = _COMMAND.sub(r" \1 ", answer.replace("\\ ", " ").replace("$", " ")).strip()
    match = _CHOICE.fullmatch(text)
    if match is None:
        return "", answer
    letter = match[1] or match[2] or match[3]
    others = re.findall(r"(?<![A-Za-z\\])[B-HJ](?![A-Za-z'])|\([AI]\)", match[4])
    return ("", answer) if set(others) - {letter} else (letter, match[4].strip())


def same_choice(answer: str, reference: str) -> bool | None:
    """Whether two answers are the same choice; None if they do not have letters."""
    (given, text), (expected, wanted) = choice(answer), choice(reference)
    if given and re.fullmatch("[A-J]", words(reference)):
        return given == words(reference)
    if expected and re.fullmatch("[A-J]", words(answer)):
        return expected == words(answer)
    if not given or not expected or not text or not wanted:
        return None
    return given == expected and equal(text, wanted)


def same_time(answer: str, reference: str) -> bool | None:
    """Whether two answers are the same time of day; None if neither says a.m. or p.m.

    A time that does not say it may be either, or is on a clock of 24 hours.
    """
    times = []
    for side in (answer, reference):
        match = _CLOCK.fullmatch(" ".join(_COMMAND.sub(r" \1 ", side).split()))
        if match is None or not (match[2] or match[3]):
            return None
        times.append((60 * int(match[1]) + int(match[2] or 0), (match[3] or "").lower()))
    if not any(half for _, half in times):
        return None
    possible = [
        {minutes % 720 + 720 * (half == "p")} if half else {minutes, (minutes + 720) % 1440}
        for minutes, half in times
    ]
    return not possible[0].isdisjoint(possible[1])


def same_bases(answer: str, reference: str) -> tuple[str, str] | None:
    """Two answers without the base of a numeral where the other has none; None if bases differ."""
    given, wanted = _NUMERAL.fullmatch(answer), _NUMERAL.fullmatch(reference)
    if _NUMERALS.search(answer) and _NUMERALS.search(reference):
        bases = [_NUMERALS.findall(side) for side in (answer, reference)]
        return (answer, reference) if bases[0] == bases[1] else None
    if given and not wanted and re.fullmatch("[0-9A-F]+", reference):
        return given[1], reference
    if wanted and not given and re.fullmatch("[0-9A-F]+", answer):
        return answer, wanted[1]
    return answer, reference


# Comparison
# -----------------------------------------------------------------------------------------------------------


def chain(answer: str) -> str | None:
    """``x = 40 + 2 = 42`` as ``x = 42``, and ``5 = x`` as ``x = 5``; None if the last number
    differs from the first.

    A slip between these two numbers is pardoned, as in math-verify's own tests.
    """
    if match := _FLIPPED.fullmatch(answer):
        return f"{match[2]} = {match[1]}"
    answer, *approximations = (part.strip() for part in _APPROXIMATELY.split(answer))
    if not answer and len(approximations) == 1:
        return approximations[0]  # only an approximation is stated
    last = _EQUALS.split(answer)[-1].strip()
    if approximations and not _is_number(last):
        return rf"{answer} \approx {approximations[0]}"  # x is about 3
    # After an equation, an approximation is a gloss: in Math-Verify's labels a slip there is pardoned.
    if last == answer and any(
        _is_number(part) and not _approximate(answer, part) for part in approximations
    ):
        return None
    parts = [part.strip() for part in _EQUALS.split(answer)]
    if len(parts) < 2 or re.search(r"[,;<>]|\\(?:le|ge|ne|text|approx)", answer):
        return answer
    numbers = [part for part in parts if _is_number(part)]
    if (
        len(numbers) > 1
        and not same(numbers[0], numbers[-1])
        and not _rounded(numbers[0], numbers[-1])
    ):
        return None
    if len(numbers) == len(parts):
        return parts[-1]
    return f"{parts[0]} = {parts[-1]}" if len(numbers) > 1 and parts[-1] == numbers[-1] else answer


def _is_number(text: str) -> bool:
    readings = parse(text)
    return bool(readings) and getattr(readings[0], "is_number", False)


def _rounded(exact: str, decimal: str) -> bool:
    """Whether ``decimal`` is ``exact`` rounded to as many places as ``decimal`` has."""
    match = re.fullmatch(r"-?\d*\.(\d+)", decimal)
    return match is not None and bool(
        abs(parse(exact)[0].evalf() - float(decimal)) <= 0.51 * 10.0 ** -len(match[1])
    )


def _approximate(exact: str, rounded: str) -> bool:
    """Whether ``rounded`` is ``exact`` rounded to the places that it shows, or equal to it."""
    if match := re.fullmatch(r"-?(\d*)(?:\.(\d+))?", rounded):
        zeros = len(match[1]) - len(match[1].rstrip("0"))
        place = 10.0 ** (-len(match[2]) if match[2] else zeros)
        return bool(abs(parse(exact)[0].evalf() - float(rounded)) <= 0.51 * place)
    return same(rounded, exact)


@lru_cache(maxsize=256)
def parse(answer: str) -> list[Any]:
    """The readings of an answer: an expression if there is one, and the text. Cached: a group
    shares one reference.
    """
    if found := region(answer):
        return [found[1], answer]
    return _parsed(answer)


def _parsed(answer: str) -> list[Any]:
    from latex2sympy2_extended import NormalizationConfig, latex2sympy, normalize_latex
    from latex2sympy2_extended.latex2sympy2 import ConversionConfig
    from math_verify.grader import should_treat_as_complex

    style = {"basic_latex": True, "malformed_operators": True, "nits": True, "boxed": "none"}
    text = normalize_latex(answer, NormalizationConfig(units=True, **style))
    whole = normalize_latex(answer, NormalizationConfig(units=False, **style))
    letter = whole.startswith(text) and re.fullmatch("[a-z]|ab|bc", whole[len(text) :].strip())
    if _OPEN_END.search(text) or (letter and _VARIABLE.search(text.rpartition("=")[2])):
        text = whole  # neither the c of ab + c nor the h of \\pi r^2 h is a unit
    try:
        expression = latex2sympy(
            text,
            is_real=not (should_treat_as_complex(text) or _UNIT_I.search(text)),
            convert_degrees=bool(_TRIGONOMETRIC.search(text)),
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception:
        return [text]
    return [imaginary(expression), text]


_UNIT_I = re.compile(r"(?<![\\a-zA-Z])i(?![a-zA-Z])|\\[ij]math(?![a-z])")


def imaginary(expression: Any) -> Any:
    """The expression with ``i`` as the imaginary unit, unless it counts the terms of a sum."""
    from sympy import Basic, Function, I, exp

    if not isinstance(expression, Basic) or any(
        str(symbol) == "i"
        for part in expression.atoms(Function) | expression.find(lambda e: hasattr(e, "limits"))
        for symbol in getattr(part, "bound_symbols", ())
    ):
        return expression
    units = {symbol: I for symbol in expression.free_symbols if str(symbol) in ("i", "imath")}
    if units:
        expression = expression.xreplace(units)
    cis = Function("cis")
    if expression.has(cis):
        expression = expression.replace(cis, lambda angle: exp(I * angle))
    return expression


_RELATION = re.compile(r"[<>≠]|\\(?:leq?|geq?|lt|gt|neq?)(?:slant)?(?![a-z])")
_OR = re.compile(rf"[\s,]*(?:{_TEXT}\{{\s*or\s*\}}|\\lor(?![a-z])|\\vee(?![a-z])|\bor\b)\s*")
_ALSO = re.compile(rf",|{_TEXT}\{{\s*and\s*\}}|\\land(?![a-z])|\\wedge(?![a-z])|\band\b")


@lru_cache(maxsize=256)
def region(answer: str) -> tuple[str, Any] | None:
    """The variable and the real numbers for which several inequalities hold, joined by *or*, *and*
    or commas; None for other answers.

    Inequalities with commas between hold together, unless no number satisfies all of them.
    """
    from sympy import Intersection, Union

    if not _RELATION.search(answer):
        return None
    alternatives = [
        [reading(part) for part in _ALSO.split(one) if part.strip()] for one in _OR.split(answer)
    ]
    conditions = [condition for one in alternatives for condition in one]
    if len(conditions) < 2 or any(condition is None for condition in conditions):
        return None
    names = {str(symbol) for condition in conditions for symbol in condition.free_symbols}
    if len(names) != 1:
        return None
    try:
        sets = [Intersection(*(each.as_set() for each in one)) for one in alternatives]
        found = Union(*sets)
        if len(alternatives) == 1 and found.is_empty:
            found = Union(*(condition.as_set() for condition in conditions))
    except (NotImplementedError, TypeError, ValueError, AttributeError):
        return None
    return names.pop(), found


def reading(part: str) -> Any:
    """A relation with a free symbol; None if ``part`` is something else."""
    from math_verify.grader import is_relation

    relation = _parsed(part)[0]
    return relation if is_relation(relation) and relation.free_symbols else None


def same(answer: str, reference: str) -> bool:
    """math-verify's comparison; it is by name for assignments, and exact for decimals against
    irrational numbers.
    """
    regions = region(answer), region(reference)
    if regions[0] and regions[1] and regions[0][0] != regions[1][0]:
        return False
    expected, given = parse(reference), parse(answer)
    vectors = [components(side[0]) for side in (given, expected)]
    if all(vectors) and any(is_matrix(side[0]) for side in (given, expected)):
        return len(vectors[0]) == len(vectors[1]) and all(map(_verify, vectors[1], vectors[0]))
    ours, theirs = (assignments(side[0]) for side in (given, expected))
    if ours and theirs:
        return ours.keys() == theirs.keys() and all(
            _verify(theirs[name], ours[name]) for name in ours
        )
    if ours and len(ours) > 1 and (values := coordinates(expected[0])):
        return len(values) == len(ours) and all(
            _verify(v, ours[n]) for v, n in zip(values, sorted(ours), strict=True)
        )
    if irrational(expected[0]):
        given = [exact(reading) for reading in given]
        value = given[0].rhs if getattr(given[0], "is_Equality", False) else given[0]
        if getattr(value, "is_rational", False) and expected[0].is_number:
            return False  # before sympy looks for a power of ten that is a power of two
    return _verify(expected, given)


def _verify(reference: Any, answer: Any) -> bool:
    from math_verify import verify

    places = smallest(reference, answer)
    return bool(
        verify(
            reference,
            answer,
            float_rounding=6 if places <= 3 else 5 + places,
            numeric_precision=15 + places,
            allow_set_relation_comp=True,
            timeout_seconds=None,
        )
    )


def smallest(*readings: Any) -> int:
    """Decimal places before the first digit of the smallest number in expressions, 0 from 1 on.

    math-verify compares to a number of places; with so many more it compares to that many digits.
    """
    from sympy import Basic, preorder_traversal

    places = 0
    for reading in readings:
        expression = reading[0] if isinstance(reading, list) else reading
        for part in preorder_traversal(expression) if isinstance(expression, Basic) else ():
            if getattr(part, "is_number", False) and (value := abs(part.evalf(2))).is_Float:
                _, mantissa, exponent, bits = value._mpf_
                if mantissa:
                    places = max(places, -((exponent + bits - 1) * 30103 // 100000))
    return places


def is_matrix(expression: Any) -> bool:
    from sympy import MatrixBase

    return isinstance(expression, MatrixBase) and 1 in expression.shape


def components(expression: Any) -> list[Any]:
    """The components of a row, a column or a tuple; empty for other expressions."""
    return list(expression) if is_matrix(expression) else coordinates(expression)


def coordinates(expression: Any) -> list[Any]:
    """The values of a tuple; a tuple of two numbers may have been read as an open interval.
    Otherwise empty.
    """
    from sympy import Interval, Tuple

    if isinstance(expression, Interval) and expression.is_open:
        return [expression.start, expression.end]
    return list(expression.args) if isinstance(expression, Tuple) else []


def assignments(expression: Any) -> dict[str, Any]:
    """Name to value if an expression is ``x = 1, y = 2`` or ``(x, y) = (1, 2)``, otherwise empty."""
    from sympy import Eq, FiniteSet, Symbol

    parts = expression.args if isinstance(expression, FiniteSet) else [expression]
    if len(parts) == 1 and isinstance(parts[0], Eq):
        names, values = coordinates(parts[0].lhs), coordinates(parts[0].rhs)
        if len(names) != len(values) or not names:
            return {}
    elif parts and all(isinstance(part, Eq) for part in parts):
        names, values = [part.lhs for part in parts], [part.rhs for part in parts]
    else:
        return {}
    known = dict(zip(map(str, names), values, strict=True))
    return (
        known
        if len(known) == len(names) and all(isinstance(name, Symbol) for name in names)
        else {}
    )


def irrational(expression: Any) -> bool:
    """Whether an expression without decimals contains a number such as a root or pi."""
    from sympy import Basic, Float, preorder_traversal, simplify

    if not isinstance(expression, Basic) or expression.has(Float):
        return False
    value = expression.doit()
    parts = preorder_traversal(simplify(value) if value.is_number else value)
    return any(getattr(part, "is_number", False) and not part.is_rational for part in parts)


def exact(expression: Any) -> Any:
    """The expression with each decimal replaced by the fraction that equals it."""
    from sympy import Basic, Float, Rational

    if not isinstance(expression, Basic):
        return expression
    return expression.xreplace(
        {number: Rational(str(number)) for number in expression.atoms(Float)}
    )


def equal(answer: str, reference: str) -> bool:
    """Whether two answers are the same mathematical object, or the same words.

    A reference in words is compared as words: read as algebra, *Evelyn* is a product of letters in
    any order.
    """
    answer, reference = plain(answer), plain(reference)
    for judged in (same_choice(answer, reference), same_time(answer, reference)):
        if judged is not None:
            return judged
    if (numerals := same_bases(answer, reference)) is None:
        return False
    answer, reference = numerals
    expected = words(reference)
    if expected and same_words(words(answer), expected):
        return True
    if _WORDS.fullmatch(expected.casefold()) or misread(answer, reference):
        return False
    percent = [_PERCENT.search(side) is not None for side in (answer, reference)]
    answer, reference = (_PERCENT.sub("", side) for side in (answer, reference))
    if _is_number(reference) and (counted := _COUNT.fullmatch(answer)):
        answer = counted[1]  # 18 dollars
    kept = chain(answer)
    if kept is None:
        return False
    given = {kept}
    wanted = {chain(reference) or reference}
    if percent == [True, False]:
        given.add(rf"\frac{{{kept}}}{{100}}")
    if percent == [False, True]:
        wanted |= {rf"\frac{{{side}}}{{100}}" for side in wanted}
    return any(same(a, r) for a in given for r in wanted)


def main() -> int:
    """Fork the process that answers requests, and another whenever one was ended at its limit.

    Forked, it has the libraries and their caches without importing them. Returns the exit status.
    """
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.dup(1)
    equal("\\frac{1}{2}", "0.25 + 0.25")  # the first comparison builds parsers and caches
    # A library that prints must not be able to reply in the worker's place.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    busy = mmap.mmap(-1, 1)  # shared with the forked process: 1 while a request awaits its reply
    os.write(replies, b'{"ready": true}\n')
    while True:
        busy[0] = 0
        pid = os.fork()
        if pid == 0:
            end_with_parent()
            serve(replies, busy)
            os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if not os.WIFSIGNALED(status):
            return os.waitstatus_to_exitcode(status)
        if busy[0]:
            os.write(replies, b'{"equal": false, "lost": true}\n')


def end_with_parent() -> None:
    """Have the kernel end this process with the one that forked it, however that ends: it would
    hold the pipe open, and its caller would wait for it until its limit.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def serve(replies: int, busy: mmap.mmap) -> None:
    """Answer requests, each an answer, a reference and limits, until standard input ends.

    The kernel ends this process where a comparison has used its processor seconds or its seconds by
    the clock: neither timer has a handler.
    """
    for line in sys.stdin:
        request = json.loads(line)
        limit_s, wall_s = request.pop("limit_s"), request.pop("wall_s")
        busy[0] = 1
        signal.setitimer(signal.ITIMER_PROF, limit_s)
        signal.setitimer(signal.ITIMER_REAL, wall_s)
        try:
            verdict = equal(**request)
        except (Exception, MemoryError, RecursionError):
            verdict = False
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        busy[0] = 0
        os.write(replies, json.dumps({"equal": verdict}).encode() + b"\n")


if __name__ == "__main__":
    sys.exit(main())
