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

import json
import logging
import os
import re
import resource
import signal
import sys
import unicodedata
from functools import lru_cache
from itertools import zip_longest
from typing import Any

MEMORY_BYTES = (
    4 << 30
)  # address space of a worker: sympy can be led to write out numbers of any size

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
    r"\\color\s*\{[^{}]*\}|\\[hv]?phantom\s*\{[^{}]*\}|\*\*|\\\(|\\\)"
    r"|\\(?:displaystyle|textstyle|tiny|small|large|Large|LARGE|huge|Huge|bf|rm|it|limits)(?![a-zA-Z])"
)
_BRACES = re.compile(r"\{([^{}]*)\}")
_REPEATING = re.compile(r"(\d*)\.(\d*)\\(?:overline|bar|dot)\s*\{?(\d+)\}?")
_TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mbox|operatorname)\s*"
_COMMAND = re.compile(_TEXT + r"\{([^{}]*)\}")
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
_REWRITES = [
    (re.compile(r"\\varnothing"), r"\\emptyset "),
    (re.compile(r"\\mathrm\s*\{\s*([ei])\s*\}"), r"\1"),
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
_TRIGONOMETRIC = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![a-z])")
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
    text = _COMMAND.sub(
        lambda m: m[1] if re.search(r"(?<![a-zA-Z])\d|^\s*(?:percent|pct)", m[1]) else m[0], text
    )
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _GROUPED.sub(lambda m: m[0].replace(" ", ""), text)
    text = _REPEATING.sub(_fraction, text)
    text = _SCALE.sub(lambda m: rf"\times {_SCALES[m[2]]}" + (m[1] or ""), text).strip(" $")
    return _BRACES.fullmatch(text)[1] if _BRACES.fullmatch(text) else text  # type: ignore[index]


def _without_brace(text: str) -> str:
    """Text that follows an opening brace, without the brace that closes it."""
    depth = 1
    for place, sign in enumerate(text):
        depth += (sign == "{") - (sign == "}")
        if depth == 0:
            return text[:place] + text[place + 1 :]
    return text


def _fraction(decimal: re.Match[str]) -> str:
    """A repeating decimal as a fraction: 0.1666... is (16 - 1) / 90."""
    whole, fixed, repeated = decimal.groups()
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


# Comparison
# -----------------------------------------------------------------------------------------------------------


def chain(answer: str) -> str | None:
    """``x = 40 + 2 = 42`` as ``x = 42``, and ``5 = x`` as ``x = 5``; None if the last number
    differs from the first.

    A slip between these two numbers is pardoned, as in math-verify's own tests.
    """
    if match := _FLIPPED.fullmatch(answer):
        return f"{match[2]} = {match[1]}"
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


@lru_cache(maxsize=256)
def parse(answer: str) -> list[Any]:
    """The readings of an answer: an expression if there is one, and the text. Cached: a group
    shares one reference.
    """
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
            is_real=not should_treat_as_complex(text),
            convert_degrees=bool(_TRIGONOMETRIC.search(text)),
            normalization_config=None,
            conversion_config=ConversionConfig(lowercase_symbols=False),
        )
    except Exception:
        return [text]
    return [expression, text]


def same(answer: str, reference: str) -> bool:
    """math-verify's comparison; it is by name for assignments, and exact for decimals against
    irrational numbers.
    """
    expected, given = parse(reference), parse(answer)
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

    return bool(verify(reference, answer, allow_set_relation_comp=True, timeout_seconds=None))


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


def main(wall_s: float) -> None:
    """Answer requests, each of which is an answer and a reference, until standard input ends."""
    logging.disable(logging.CRITICAL)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    replies = os.fdopen(os.dup(1), "w")
    equal("\\frac{1}{2}", "0.25 + 0.25")  # the first comparison builds parsers and caches
    replies.write('{"ready": true}\n')
    replies.flush()
    # A library that prints must not be able to reply in the worker's place.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    for line in sys.stdin:
        # The verifier kills this process at the limit; if the verifier is gone, the kernel does a
        # little later.
        signal.setitimer(signal.ITIMER_REAL, wall_s + 1)
        try:
            verdict = equal(**json.loads(line))
        except (Exception, MemoryError, RecursionError):
            verdict = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        replies.write(json.dumps({"equal": verdict}) + "\n")
        replies.flush()


if __name__ == "__main__":
    main(float(sys.argv[1]))
