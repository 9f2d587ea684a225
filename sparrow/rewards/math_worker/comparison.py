r"""Compare two mathematical answers with math-verify.

There are three steps: ``typography.plain`` rewrites an answer as LaTeX that the parser can read,
``wording.misread`` rejects answers that math-verify would misread, and ``same`` runs math-verify's
comparison. ``docs/math-verify/`` lists fixes to math-verify and its parser, with examples. Each fix
would make a rule here unnecessary.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from .typography import TEXT, plain
from .wording import choice, is_prose, misread, same_bases, same_time, same_words, words

_PERCENT = re.compile(r"\s*(?:\\?%|\b(?:percent|percentage|pct)\b)\s*$")
_TRIGONOMETRIC = re.compile(r"\\(?:operatorname\{cis\}|sin|cos|tan|cot|sec|csc)(?![a-z])")
_OPEN_END = re.compile(r"(?:[-+*/=<>^_,(]|\\(?:cdot|times|div|pm|frac|le|ge|ne|to|cup|cap))\s*$")
_VARIABLE = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z](?![a-zA-Z])")
_COUNT = re.compile(
    r"(-?(?:\d+(?:\.\d+)?|\\frac\{\d+\}\{\d+\}))\s*([a-z]{3,}(?: [a-z]+)*|[ckm]?m\^?\{?[23]\}?)"
)
_NAME = r"[a-zA-Z]|\\[a-z]+"
_FLIPPED = re.compile(rf"([^=<>]*\d[^=<>]*)=\s*({_NAME})\s*")
_EQUALS = re.compile(r"(?<![\\<>!:])=")
_APPROXIMATELY = re.compile(r"\\(?:approx|simeq|doteq)(?![a-z])")


def same_choice(answer: str, reference: str) -> bool | None:
    """Compare multiple-choice answers by letter and text. Return None if they can't be compared
    that way.
    """
    given, text = choice(answer)
    expected, wanted = choice(reference)
    if given and re.fullmatch("[A-J]", words(reference)):
        return given == words(reference)
    if expected and re.fullmatch("[A-J]", words(answer)):
        return expected == words(answer)
    if not given or not expected or not text or not wanted:
        return None
    return given == expected and equal(text, wanted)


def chain(answer: str) -> str | None:
    """Shorten ``x = 40 + 2 = 42`` to ``x = 42``, and turn ``5 = x`` into ``x = 5``. Return None if
    the last number differs from the first.

    Mistakes in between are ignored, as in math-verify's own tests.
    """
    if match := _FLIPPED.fullmatch(answer):
        return f"{match[2]} = {match[1]}"
    answer, *approximations = (part.strip() for part in _APPROXIMATELY.split(answer))
    if not answer and len(approximations) == 1:
        return approximations[0]  # the answer is just an approximation

    parts = [part.strip() for part in _EQUALS.split(answer)]
    last = parts[-1]
    if approximations and not _is_number(last):
        return rf"{answer} \approx {approximations[0]}"  # for example, x is about 3
    # Check an approximation only if the answer is a single number. After an equation, an
    # approximation is just a remark, and math-verify's own tests ignore mistakes in such remarks.
    if last == answer and any(
        _is_number(part) and not _approximate(answer, part) for part in approximations
    ):
        return None

    if len(parts) < 2 or re.search(r"[,;<>]|\\(?:le|ge|ne|text|approx)", answer):
        return answer
    numbers = [part for part in parts if _is_number(part)]
    if len(numbers) < 2:
        return answer
    if not same(numbers[0], numbers[-1]) and not _rounded(numbers[0], numbers[-1]):
        return None
    if len(numbers) == len(parts):
        return last
    return f"{parts[0]} = {last}" if last == numbers[-1] else answer


def _is_number(text: str) -> bool:
    readings = parse(text)
    return bool(readings) and getattr(readings[0], "is_number", False)


def _rounded(exact: str, decimal: str) -> bool:
    """Return whether ``exact``, rounded to the number of decimal places in ``decimal``, equals
    ``decimal``.
    """
    match = re.fullmatch(r"-?\d*\.(\d+)", decimal)
    return match is not None and _near(exact, decimal, 10.0 ** -len(match[1]))


def _approximate(exact: str, rounded: str) -> bool:
    """Return whether ``exact`` equals ``rounded``, possibly after rounding ``exact`` to the
    precision of ``rounded``.
    """
    match = re.fullmatch(r"-?(\d*)(?:\.(\d+))?", rounded)
    if match is None:
        return same(rounded, exact)
    zeros = len(match[1]) - len(match[1].rstrip("0"))
    return _near(exact, rounded, 10.0 ** (-len(match[2]) if match[2] else zeros))


def _near(exact: str, decimal: str, place: float) -> bool:
    """Return whether ``decimal`` is within half a ``place`` of ``exact``, allowing for rounding."""
    return bool(abs(parse(exact)[0].evalf() - float(decimal)) <= 0.51 * place)


@lru_cache(maxsize=256)
def parse(answer: str) -> list[Any]:
    """Parse an answer. Return its readings: the expression, if the parser can read one, and then
    the text.

    Readings are cached, because all responses to a problem share one reference.
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
    # The c in ab + c and the h in \\pi r^2 h are not units.
    letter = whole.startswith(text) and re.fullmatch("[a-z]|ab|bc", whole[len(text) :].strip())
    if _OPEN_END.search(text) or (letter and _VARIABLE.search(text.rpartition("=")[2])):
        text = whole

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
    """Read ``i`` as the imaginary unit, unless it is the index of a sum."""
    from sympy import Basic, Function, I, exp

    if not isinstance(expression, Basic):
        return expression
    binding = expression.atoms(Function) | expression.find(lambda e: hasattr(e, "limits"))
    if any(str(symbol) == "i" for part in binding for symbol in getattr(part, "bound_symbols", ())):
        return expression

    units = {symbol: I for symbol in expression.free_symbols if str(symbol) in ("i", "imath")}
    if units:
        expression = expression.xreplace(units)
    cis = Function("cis")
    if expression.has(cis):
        expression = expression.replace(cis, lambda angle: exp(I * angle))
    return expression


_RELATION = re.compile(r"[<>≠]|\\(?:leq?|geq?|lt|gt|neq?)(?:slant)?(?![a-z])")
_OR = re.compile(rf"[\s,]*(?:{TEXT}\{{\s*or\s*\}}|\\lor(?![a-z])|\\vee(?![a-z])|\bor\b)\s*")
_ALSO = re.compile(rf",|{TEXT}\{{\s*and\s*\}}|\\land(?![a-z])|\\wedge(?![a-z])|\band\b")


@lru_cache(maxsize=256)
def region(answer: str) -> tuple[str, Any] | None:
    """Read several inequalities in one variable, joined by *or*, *and* or commas. Return the
    variable and the set of real solutions. Return None for other answers.

    A comma means *and*. If no number satisfies all the inequalities, a comma means *or* instead.
    """
    from sympy import Intersection, Union

    if not _RELATION.search(answer):
        return None

    def together(alternative: str) -> list[Any]:
        return [reading(part) for part in _ALSO.split(alternative) if part.strip()]

    alternatives = [together(alternative) for alternative in _OR.split(answer)]
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
    """Parse ``part`` as a relation with a free symbol. Return None if it is anything else."""
    from math_verify.grader import is_relation

    relation = _parsed(part)[0]
    return relation if is_relation(relation) and relation.free_symbols else None


def same(answer: str, reference: str) -> bool:
    """Compare two answers with math-verify. Assignments are compared by name. If the reference is
    irrational, decimals are compared exactly.
    """
    our_region = region(answer)
    their_region = region(reference)
    if our_region and their_region and our_region[0] != their_region[0]:
        return False  # inequalities in different variables

    expected = parse(reference)
    given = parse(answer)
    our_components = components(given[0])
    their_components = components(expected[0])
    has_matrix = is_matrix(given[0]) or is_matrix(expected[0])
    if our_components and their_components and has_matrix:
        if len(our_components) != len(their_components):
            return False
        return all(map(_verify, their_components, our_components))

    ours = assignments(given[0])
    theirs = assignments(expected[0])
    if ours and theirs:
        if ours.keys() != theirs.keys():
            return False
        return all(_verify(theirs[name], ours[name]) for name in ours)
    if len(ours) > 1 and (values := coordinates(expected[0])):
        if len(values) != len(ours):
            return False
        return all(_verify(v, ours[n]) for v, n in zip(values, sorted(ours), strict=True))

    if irrational(expected[0]):
        given = [exact(reading) for reading in given]
        value = given[0].rhs if getattr(given[0], "is_Equality", False) else given[0]
        if getattr(value, "is_rational", False) and expected[0].is_number:
            # Return early: sympy would search for a power of ten that equals a power of two.
            return False
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
    """Return the decimal place of the smallest number's first digit. Return 0 if all numbers are at
    least 1.

    math-verify compares a fixed number of decimal places. Adding the returned number makes it
    compare a fixed number of significant digits.
    """
    from sympy import Basic, preorder_traversal

    places = 0
    for reading in readings:
        expression = reading[0] if isinstance(reading, list) else reading
        if not isinstance(expression, Basic):
            continue
        for part in preorder_traversal(expression):
            if getattr(part, "is_number", False) and (value := abs(part.evalf(2))).is_Float:
                _, mantissa, exponent, bits = value._mpf_
                if mantissa:  # 0.30103 is log10(2)
                    places = max(places, -((exponent + bits - 1) * 30103 // 100000))
    return places


def is_matrix(expression: Any) -> bool:
    from sympy import MatrixBase

    return isinstance(expression, MatrixBase) and 1 in expression.shape


def components(expression: Any) -> list[Any]:
    """Return the components of a row vector, a column vector or a tuple. Return an empty list for
    other expressions.
    """
    return list(expression) if is_matrix(expression) else coordinates(expression)


def coordinates(expression: Any) -> list[Any]:
    """Return the values of a tuple. An open interval counts as a tuple, because the parser may read
    a pair as an interval. Return an empty list for other expressions.
    """
    from sympy import Interval, Tuple

    if isinstance(expression, Interval) and expression.is_open:
        return [expression.start, expression.end]
    return list(expression.args) if isinstance(expression, Tuple) else []


def assignments(expression: Any) -> dict[str, Any]:
    """Read assignments such as ``x = 1, y = 2`` or ``(x, y) = (1, 2)``. Return the values by name,
    or an empty dict for other expressions.
    """
    from sympy import Eq, FiniteSet, Symbol

    parts = expression.args if isinstance(expression, FiniteSet) else [expression]
    if len(parts) == 1 and isinstance(parts[0], Eq):
        names = coordinates(parts[0].lhs)
        values = coordinates(parts[0].rhs)
        if len(names) != len(values) or not names:
            return {}
    elif parts and all(isinstance(part, Eq) for part in parts):
        names = [part.lhs for part in parts]
        values = [part.rhs for part in parts]
    else:
        return {}
    known = dict(zip(map(str, names), values, strict=True))
    if len(known) < len(names) or not all(isinstance(name, Symbol) for name in names):
        return {}
    return known


def irrational(expression: Any) -> bool:
    """Return whether an expression contains an irrational number such as pi, and no decimals."""
    from sympy import Basic, Float, preorder_traversal, simplify

    if not isinstance(expression, Basic) or expression.has(Float):
        return False
    value = expression.doit()
    parts = preorder_traversal(simplify(value) if value.is_number else value)
    return any(getattr(part, "is_number", False) and not part.is_rational for part in parts)


def exact(expression: Any) -> Any:
    """Replace the decimals in an expression with the equivalent fractions."""
    from sympy import Basic, Float, Rational

    if not isinstance(expression, Basic):
        return expression
    fractions = {number: Rational(str(number)) for number in expression.atoms(Float)}
    return expression.xreplace(fractions)


def equal(answer: str, reference: str) -> bool:
    """Return whether two answers are the same mathematical object or the same words.

    A reference in words is compared as text. Parsed as algebra, *Evelyn* would be a product of its
    letters, and their order wouldn't matter.
    """
    answer = plain(answer)
    reference = plain(reference)
    for judged in (same_choice(answer, reference), same_time(answer, reference)):
        if judged is not None:
            return judged

    numerals = same_bases(answer, reference)
    if numerals is None:
        return False
    answer, reference = numerals

    expected = words(reference)
    if expected and same_words(words(answer), expected):
        return True
    if is_prose(expected) or misread(answer, reference):
        return False

    answer_in_percent = _PERCENT.search(answer) is not None
    reference_in_percent = _PERCENT.search(reference) is not None
    answer = _PERCENT.sub("", answer)
    reference = _PERCENT.sub("", reference)
    if _is_number(reference) and (counted := _COUNT.fullmatch(answer)):
        answer = counted[1]  # such as 18 dollars
    kept = chain(answer)
    if kept is None:
        return False

    given = {kept}
    wanted = {chain(reference) or reference}
    if answer_in_percent and not reference_in_percent:
        given.add(rf"\frac{{{kept}}}{{100}}")
    if reference_in_percent and not answer_in_percent:
        wanted |= {rf"\frac{{{side}}}{{100}}" for side in wanted}
    return any(same(a, r) for a in given for r in wanted)
