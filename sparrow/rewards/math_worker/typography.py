# ruff: noqa: RUF001  (characters that occur in answers)
"""Rewrite answers in various notations as LaTeX that math-verify's parser can read."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable

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
_RAISED = "⁺⁻⁰¹²³⁴⁵⁶⁷⁸⁹ⁿ"
_LOWERED = "₀₁₂₃₄₅₆₇₈₉"
_VULGAR = re.compile("[¼-¾⅐-⅞]")
_DECORATED = re.compile(
    r"\\(?:(?:textcolor|colorbox)\s*\{[^{}]*\}"
    r"|underline|boldsymbol|bm|pmb|mathbf|mathit|mathsf|boxed|fbox)\s*\{"
)
_INVISIBLE = re.compile(
    r"\\color\s*\{[^{}]*\}|\\[hv]?phantom\s*\{[^{}]*\}|\\\(|\\\)"
    r"|\\(?:displaystyle|textstyle|tiny|small|large|Large|LARGE|huge|Huge|bf|rm|it|limits)"
    r"(?![a-zA-Z])"
)
_BRACES = re.compile(r"\{([^{}]*)\}")
# Asterisks around words are Markdown emphasis; between operands, they're powers in Python.
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
TEXT = r"\\(?:text|textbf|textit|textrm|textnormal|mathrm|mbox|operatorname)\s*"
COMMAND = re.compile(TEXT + r"\{([^{}]*)\}")
_PROSE = re.compile(rf"({TEXT}\{{[^{{}}]*\}})")
_LEAD = (
    r"(?:(?:therefore|thus|hence|so|then)\b[\s,]*)?(?:(?:the|our|my|final|correct|required|answer"
    r"|result|solution|value|sum|total|number|probability|area|length|of|to|this|problem|question"
    r"|we|get|have|find|obtain|it|x|y|n)\b[\s,]*)*"
)
_LED = re.compile(
    rf"\s*({TEXT}\{{)?\s*"
    rf"(?:{_LEAD}(?:\b(?:is|are|equals)\b\s*:?|\b(?:answer|result|solution)s?\s*[:=])"
    r"|(?:therefore|thus|hence|so|then|we (?:get|have|find|obtain))\b[\s,:]*)\s*(?=[^\s.])",
    re.IGNORECASE,
)
_BASES = {
    "two": "2",
    "three": "3",
    "four": "4",
    "five": "5",
    "six": "6",
    "seven": "7",
    "eight": "8",
    "nine": "9",
    "ten": "10",
    "eleven": "11",
    "twelve": "12",
    "sixteen": "16",
}
_BASE = rf"(?:base[-\s]*)?({'|'.join(_BASES)}|\d+)"
_SUBSCRIPT = re.compile(
    rf"_\s*(?:\{{\s*{TEXT}\{{\s*{_BASE}\s*\}}\s*\}}"
    rf"|{TEXT}\{{\s*{_BASE}\s*\}}|\{{\s*{_BASE}\s*\}})"
)
_IN_BASE = re.compile(
    rf"(?<=[\dA-F])[\s,]*\(?(?:{TEXT}\{{)?[\s(]*(?:in\s+)?base[-\s]*"
    rf"[\s}}]*({'|'.join(_BASES)}|\d+)[\s)}}]*$"
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
    rf"(?<=[\d}}])(?:\s|~|\\ )*({TEXT}\{{)?(?:\s|~|\\ )*({'|'.join(_SCALES)})s?(?![a-z])"
)


def _mantissa(number: re.Match[str]) -> str:
    whole, digits = number[1].split(".")
    return rf"\frac{{{int(whole + digits)}}}{{{10 ** len(digits)}}}\times "


_REWRITES: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"\\varnothing"), r"\\emptyset "),
    (re.compile(r"\\(?:mathrm|text)\s*\{\s*([ei])\s*\}"), r"\1"),
    (re.compile(r"\\[ij]math(?![a-z])"), "i"),
    (re.compile(r"(?<=\d)j(?![a-zA-Z])"), "i"),  # the imaginary unit in engineering and in Python
    # Treat the mantissa as exact, so that 6.02 \times 10^{23} is compared as a whole number.
    (re.compile(r"(?<![\d.])(\d+\.\d+)\s*\\(?:times|cdot)\s*(?=10\s*\^)"), _mantissa),
    (re.compile(r"\{\s*(\w+)\s*\\choose\s*(\w+)\s*\}"), r"\\binom{\1}{\2}"),
    (re.compile(r"\\degree(?![a-z])"), r"^\\circ "),
    (re.compile(r"\\!\s*"), ""),  # a negative space, as in 1,\!000
    (re.compile(r"(?<!\\)\\[,;: ]|\\q?quad(?![a-z])|~"), " "),
    (re.compile(r"\\\{\s*\\\}"), r"\\emptyset "),
    (re.compile(r"\\sqrt\s*(\[3\])?\s*\(([^()]*)\)"), r"\\sqrt\1{\2}"),
    (re.compile(r"\\sqrt\s*(\[3\])?\s*(\d+|[a-zA-Z])"), r"\\sqrt\1{\2}"),
    (re.compile(r"(?<![\w.])(\d+\.?\d*|\.\d+)[eE]([-+]?\d+)(?!\w)"), r"\1\\times 10^{\2}"),
    # mixed numbers such as 3 1/2
    (re.compile(r"(?<![\d./])(\d+)\s+(\d+)/(\d+)(?![\d.])"), r"\1\\frac{\2}{\3}"),
    # ordinals such as 5^{th}
    (re.compile(rf"(?<=\d)\^?\s*\{{?\s*(?:{TEXT}\{{)?(?:st|nd|rd|th)(?![a-z])[\s}}]*$"), ""),
]
_GROUPED = re.compile(r"(?<![\d.])\d{1,3}(?: \d{3})+(?!\d| \d)")


def plain(answer: str) -> str:
    """Rewrite an answer as plain LaTeX: without colours, Unicode symbols or spacing, and with
    notation such as ``3 1/2``, ``1e-3`` or ``5 million`` replaced.
    """
    text = _ascii(answer)
    text = _INVISIBLE.sub("", text)
    while match := _DECORATED.search(text):
        text = text[: match.start()] + _without_brace(text[match.end() :])
    text = _MONEY.sub("", text)
    text = _VECTOR.sub(lambda m: f"({m[1] or m[2]})", text)

    text = _IN_BASE.sub(lambda m: f"_{{{_BASES.get(m[1], m[1])}}}", text)
    text = _SUBSCRIPT.sub(_numeral, text)
    text = COMMAND.sub(_numbers_of_text, text)
    text = _keyed(_without_lead(text))

    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = _GROUPED.sub(lambda m: m[0].replace(" ", ""), text)
    text = _REPEATING.sub(_fraction, text)
    text = _IN_BRACKETS.sub(_fraction, text)
    text = _ONGOING.sub(_ongoing, text)
    text = _SCALE.sub(lambda m: rf"\times {_SCALES[m[2]]}" + (m[1] or ""), text)

    text = text.strip(" $")
    braces = _BRACES.fullmatch(text)
    return braces[1] if braces else text


def _ascii(text: str) -> str:
    """Rewrite Unicode superscripts, subscripts, fractions and symbols as LaTeX."""

    def plain_digits(sign: re.Match[str]) -> str:
        return unicodedata.normalize("NFKC", sign[0])

    def vulgar_fraction(sign: re.Match[str]) -> str:
        above, below = plain_digits(sign).split("⁄")
        return rf"\frac{{{above}}}{{{below}}}"

    text = re.sub(f"[{_RAISED}]+", lambda m: f"^{{{plain_digits(m)}}}", text)
    text = text.replace("−", "-")
    text = re.sub(f"[{_LOWERED}]+", lambda m: f"_{{{plain_digits(m)}}}", text)
    text = _VULGAR.sub(vulgar_fraction, text)
    return text.translate(_UNICODE)


def _numbers_of_text(command: re.Match[str]) -> str:
    """Replace a text command with its content if the content contains a number or is "percent".
    Leave other commands unchanged.
    """
    is_number = re.search(r"(?<![a-zA-Z])\d|^\s*(?:percent|pct)", command[1])
    return command[1] if is_number else command[0]


def _keyed(text: str) -> str:
    """Rewrite keyboard notation such as ``x**2``, ``sqrt(2)`` or ``pi/4`` as LaTeX."""
    text = _EMPHASIS.sub(r"\2", text)
    while match := _LAST_POWER.search(text):  # from right to left, because 2**3**2 is 2**9
        exponent = f"^{{{match[1]}}}" if match[1] else "^"
        text = text[: match.start()] + exponent + text[match.end() :]
    text = _NAMED.sub(r"\\\1 ", text)

    parts = _PROSE.split(text)
    # odd-indexed parts are commands with words in them
    for place in range(0, len(parts), 2):
        part = _INVERSE.sub(r"\\arc\1", parts[place])
        part = _CALLED.sub(r"\\\1 ", part)
        parts[place] = _SIGN.sub(lambda m: _SIGNS[m[1]], part)

    text = _bracketed("".join(parts), _ROOT_OF, r"\sqrt{", "}")
    text = _bracketed(text, _SIZE_OF, "|", "|")
    return _bracketed(text, _TO_THE, "^{", "}")


def _bracketed(text: str, opening: re.Pattern[str], before: str, after: str) -> str:
    """Replace ``opening`` with ``before``, and the matching closing parenthesis with ``after``.
    ``opening`` must end with a parenthesis.
    """
    while match := opening.search(text):
        rest = text[match.end() :]
        end = _closing(rest, "(", ")")
        if end is None:
            break
        text = text[: match.start()] + before + rest[:end] + after + rest[end + 1 :]
    return text


def _without_lead(text: str) -> str:
    """Remove the lead-in to an answer, as in *The answer is 5*."""
    if match := _LED.match(text):
        text = (match[1] or "") + text[match.end() :]
    return text


def _numeral(subscript: re.Match[str]) -> str:
    base = next(filter(None, subscript.groups()))
    return f"_{{{_BASES.get(base, base)}}}"


def _ongoing(decimal: re.Match[str]) -> str:
    """Rewrite a decimal with an ellipsis as a fraction if its last digits repeat. For example,
    0.1666... is 1/6.
    """
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
    """Remove the closing brace whose opening brace comes just before ``text``."""
    place = _closing(text, "{", "}")
    if place is None:
        return text
    return text[:place] + text[place + 1 :]


def _closing(text: str, opening: str, closing: str) -> int | None:
    """Return the index of the closing bracket whose opening bracket comes just before ``text``."""
    depth = 1
    for place, sign in enumerate(text):
        depth += (sign == opening) - (sign == closing)
        if depth == 0:
            return place
    return None


def _fraction(decimal: re.Match[str]) -> str:
    """Rewrite a repeating decimal as a fraction. For example, 0.1666... is (16 - 1) / 90."""
    return _as_fraction(*decimal.groups())


def _as_fraction(whole: str, fixed: str, repeated: str) -> str:
    above = int(whole + fixed + repeated) - int(whole + fixed or 0)
    below = (10 ** len(repeated) - 1) * 10 ** len(fixed)
    return rf"\frac{{{above}}}{{{below}}}"
