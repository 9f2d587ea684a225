"""Compare answers by their words: text, multiple-choice letters, times of day, and numerals with a
base. Also catch words in an answer that a numeric comparison would miss.
"""

from __future__ import annotations

import re
from itertools import zip_longest

from .typography import COMMAND

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
_ALTERNATIVE = re.compile(r"\b(?:or|and)\b")
_JOINT = re.compile(r"[\s,]*(?:or|and)\s*")
_APART = re.compile(r"(?<![_^\d.])(?<!frac)(?<!frac )\d[\d.]*\s+\d")
# two quantities with units, such as 5 ft 6 in
_SECOND = re.compile(r"\d[^=]*\\text\s*\{(?!\s*(?:or|and|,)\s*\})[^{}]*\}(?!\s*\^)[^=<>\\]*\d")


def words(answer: str) -> str:
    """Strip the LaTeX commands and parentheses around an answer in words. Return an empty string if
    the answer isn't in words.
    """
    text = " ".join(COMMAND.sub(r" \1 ", answer).strip(" $.").split())
    return text.strip("()") if _WORD.fullmatch(text) else ""


def is_prose(text: str) -> bool:
    """Return whether a text consists of whole words. Algebra would read a word as a product of
    letters.
    """
    return _WORDS.fullmatch(text.casefold()) is not None


def same_words(answer: str, reference: str) -> bool:
    """Return whether two texts are the same. Case is ignored in whole words, but not in symbols
    such as ``AB``.
    """
    given = re.split("[ -]", answer)
    expected = re.split("[ -]", reference)
    return all(_same_word(a, r) for a, r in zip_longest(given, expected, fillvalue=""))


def _same_word(a: str, b: str) -> bool:
    if a == b:
        return True
    if a.casefold() != b.casefold():
        return False
    if a.casefold() in _SHORT_WORDS or len(a) > 4:
        return True
    return len(a) > 2 and (a.istitle() or b.istitle())


def misread(answer: str, reference: str) -> bool:
    """Return whether the answer says something that a numeric comparison would miss."""
    said = _said(answer)
    expected = _said(reference)
    if (said - expected) & _HEDGES:
        return True
    texts = [command[1] for command in COMMAND.finditer(answer)]
    if any(_ALTERNATIVE.search(text) and not _JOINT.fullmatch(text) for text in texts):
        return not said & {"or", "and"} <= expected
    if _SECOND.search(answer) and not _SECOND.search(reference):
        return True
    if _CAPITALS.fullmatch(answer) and _CAPITALS.fullmatch(reference):
        return answer != reference
    return bool(_APART.search(answer))


def _said(answer: str) -> set[str]:
    """Collect the words in an answer, in lower case."""
    return set(_LETTERS.findall(COMMAND.sub(r" \1 ", answer).lower()))


_CHOICE = re.compile(
    r"(?:(?:[Oo]ption|[Cc]hoice|[Aa]nswer)\s+)?"
    r"(?:\(([A-J])\)[\s:.]*|([A-J])\s*[:.)](?!\d)\s*|(?<=\w\s)([A-J])$)(.*)",
    re.DOTALL,
)
_CLOCK = re.compile(r"(\d{1,2})(?::(\d{2}))?\s*(?:([ap])\.?\s*m\.?)?", re.IGNORECASE)
_NUMERAL = re.compile(r"\(?([0-9A-F]+)\)?_\{?(\d+)\}?")
_NUMERALS = re.compile(r"(?<![\w\\}])\d[0-9A-F]*_\{?(\d+)\}?")


def choice(answer: str) -> tuple[str, str]:
    """Split a multiple-choice answer such as ``C: text`` into its letter and text. The letter is
    empty if the answer has another form, or if its text names a second letter.
    """
    text = COMMAND.sub(r" \1 ", answer.replace("\\ ", " ").replace("$", " ")).strip()
    match = _CHOICE.fullmatch(text)
    if match is None:
        return "", answer
    letter = match[1] or match[2] or match[3]
    others = re.findall(r"(?<![A-Za-z\\])[B-HJ](?![A-Za-z'])|\([AI]\)", match[4])
    if set(others) - {letter}:
        return "", answer
    return letter, match[4].strip()


def same_time(answer: str, reference: str) -> bool | None:
    """Compare two times of day. Return None if either isn't a time, or if neither has a.m. or p.m.

    Without a.m. or p.m., a time may mean the morning, the afternoon or the 24-hour clock.
    """
    times = []
    for side in (answer, reference):
        match = _CLOCK.fullmatch(" ".join(COMMAND.sub(r" \1 ", side).split()))
        if match is None or not (match[2] or match[3]):
            return None
        minutes = 60 * int(match[1]) + int(match[2] or 0)
        half = (match[3] or "").lower()
        times.append((minutes, half))
    if not any(half for _, half in times):
        return None
    given, expected = (_minutes_of_day(minutes, half) for minutes, half in times)
    return not given.isdisjoint(expected)


def _minutes_of_day(minutes: int, half: str) -> set[int]:
    """Return every minute of the day that a time may mean. ``half`` is ``a``, ``p`` or empty."""
    if half:
        return {minutes % 720 + 720 * (half == "p")}
    return {minutes, (minutes + 720) % 1440}


def same_bases(answer: str, reference: str) -> tuple[str, str] | None:
    """Drop a numeral's base if the other answer has none. Return None if the bases differ."""
    given = _NUMERAL.fullmatch(answer)
    wanted = _NUMERAL.fullmatch(reference)
    if _NUMERALS.search(answer) and _NUMERALS.search(reference):
        same_base = _NUMERALS.findall(answer) == _NUMERALS.findall(reference)
        return (answer, reference) if same_base else None
    if given and not wanted and re.fullmatch("[0-9A-F]+", reference):
        return given[1], reference
    if wanted and not given and re.fullmatch("[0-9A-F]+", answer):
        return answer, wanted[1]
    return answer, reference
