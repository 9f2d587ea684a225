"""Test whether sampled tokens follow the distributions that a dense model gave them.

Let p be the dense model's distribution of the next token after what was really sampled before. Sort
the vocabulary by p, likeliest first. With an independent uniform random number U for each token,

    u = P(tokens sorted before it) + U p(token)

is uniform on [0, 1) and independent of everything earlier (randomised probability integral
transform; Brockwell, "Universal residuals", Statistics & Probability Letters 2007). The mean of
log p(token) + H(p), H the entropy, is zero. Both hold after every prefix, so sums over a sequence
are martingales, and sequences are independent of each other.

Uniformity is tested by the means of the first four orthonormal Legendre polynomials of u (Neyman's
smooth test), independence by the mean product of neighbours. Every mean has the standard error of a
mean over clusters, which are the sequences, and a p-value from Student's t. Holm's procedure
corrects for the number of tests.

Both look along the order of p only, and a bias may lie across it: a draft and its replacement that
share one random number move tokens of all ranks. Such a bias shows where a context repeats, that is
where several responses to one prompt begin alike. There the counts of likely tokens are compared
with p, whatever the direction of the bias (a chi-square statistic as a sum over pairs of sequences,
whose mean is the chi-square distance, sum (r - p)^2 / p for samples of r). A sequence is compared
with those before it only, so this is a martingale too.

Engine and scorer round differently, which biases all of these means a little. So the dense decoding
of the same engine is put to the same test, and the verdict is on the differences.

Shapes: T tokens of an arm end to end, n entries of a top list, m tests.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from math import erfc, inf, isfinite, log, log1p, sqrt
from statistics import NormalDist
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]
Status = Literal["exact", "biased", "cannot tell"]
Unit = Literal["share", "nats", "correlation", "chi-square"]

POWER = 0.9
"""The probability with which a bias of the size ``Finding.detectable`` would have been found."""

LEAST_SEQUENCES = 30
"""Fewer sequences give a mean no standard error that can be trusted in its tails."""

MOVED = (0.4330127, 0.4303315, 0.4299346, 0.4298850)
"""Half the mean absolute value of each of the four polynomials.

A mean of delta is that of a density 1 + delta h(u), which has moved the share delta MOVED of all
tokens to another place."""

ROUNDING_RATIO = 2.0
ROUNDING_FLOOR = 1e-4
"""Reported log-probs may differ from scored ones by this multiple of what the dense arm's do, plus
the floor (in nats): a pass over several tokens adds in a different order from a pass over one."""

COMMON = 0.02
"""Tokens of at least this probability are counted one by one where contexts repeat."""

SINGLE_PLACES = 8
"""Places of a cycle that are tested one by one; later drafts are tested together."""


@dataclass(frozen=True)
class Tokens:
    """The tokens of one arm, one sequence after another, as the dense model scores them.

    A token may stand for a cell of several (see ``cells_of_lists``). A token that the truncated
    distribution excludes has ``p`` 0 and ``before`` 1; one whose place is not known has nan.
    """

    before: Floats  # [T], mass of the tokens sorted before it, likeliest first
    p: Floats  # [T], its probability
    entropy: Floats  # [T], of the distribution, in nats
    sequence: Ints  # [T], which sequence it is of, ascending
    # [T], its place in the draft cycle that gave it, from 0; -1 where a prefill or a step without
    # drafts gave it. None where no place is known.
    place: Ints | None = None
    # [T] each, or None where contexts are not to be compared: the token, a number for all that came
    # before it, which tokens after the same share, the mass of tokens of probability ``COMMON`` and
    # more, and whether this is one
    token: Ints | None = None
    context: Ints | None = None
    common: Floats | None = None
    is_common: Flags | None = None
    reported: Floats | None = None  # [T], the log-prob that the engine reported with it
    scored: Floats | None = None  # [T], the dense model's log-prob of the same kind

    def __len__(self) -> int:
        return len(self.p)


@dataclass(frozen=True)
class Mean:
    """A mean over tokens with its standard error over sequences."""

    value: float
    error: float
    tokens: int
    sequences: int


@dataclass(frozen=True)
class Finding:
    """One test. Values are shares of all tokens, nats, a correlation or a chi-square distance, as
    ``unit`` says.
    """

    name: str
    place: str  # ``"all"`` or the place in the cycle
    unit: Unit
    tested: Mean
    dense: Mean | None  # None without a dense arm
    difference: float  # what the verdict is on; without a dense arm, the tested mean
    detectable: float  # a difference of this size would have been found with probability ``POWER``
    p_value: float
    corrected: float  # by Holm


@dataclass(frozen=True)
class Verdict:
    """The outcome of an audit."""

    status: Status
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]
    level: float  # the probability of calling an exact engine biased
    resolution: float  # the share of tokens that an exact engine's audit must be able to see
    detectable: float  # the share of tokens, moved to likelier places, that it would have seen
    notes: tuple[str, ...] = field(default=())  # what could not be tested

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types; what is infinite or unknown is None."""
        plain: dict[str, Any] = _finite(asdict(self))
        return plain


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not isfinite(value) else value


def audit(
    tested: Tokens,
    dense: Tokens | None,
    level: float = 0.01,
    resolution: float = 0.05,
    seed: int = 0,
) -> Verdict:
    """Compare an engine's tokens with the dense model's distributions, and with its dense decoding.

    Args:
        dense: the same engine's dense decoding of the same prompts with other random numbers;
            without it, rounding between engine and scorer counts as bias.
        seed: of the numbers U.
    """
    notes: list[str] = []  # ``_tests`` adds to them
    tests = _tests(tested, dense, np.random.default_rng(seed), notes)
    raw = [each for each in tests if each.tested.tokens]
    corrected = holm(np.array([each.p_value for each in raw]))
    strictest = level / max(len(raw), 1)
    findings = tuple(
        Finding(
            each.name,
            each.place,
            each.unit,
            each.tested,
            each.dense,
            each.difference,
            _detectable(each, strictest),
            each.p_value,
            float(adjusted),
        )
        for each, adjusted in zip(raw, corrected, strict=True)
    )

    seen = next((f.detectable for f in findings if f.place == "all" and f.unit == "share"), inf)
    few = min(len(np.unique(arm.sequence)) for arm in (tested, dense) if arm is not None)
    reasons = [_described(f) for f in findings if f.corrected < level]
    status: Status = "biased" if reasons else "exact"
    if few < LEAST_SEQUENCES:
        reasons = [f"{few} sequences give no standard error; sample at least {LEAST_SEQUENCES}"]
        status = "cannot tell"
    elif not reasons:
        reasons = list(_doubts(findings, seen, resolution, strictest))
        status = "cannot tell" if reasons else "exact"
    return Verdict(status, tuple(reasons), findings, level, resolution, seen, tuple(notes))


# --- the tests ---


@dataclass(frozen=True)
class _Test:
    name: str
    place: str
    unit: Unit
    tested: Mean
    dense: Mean | None
    difference: float
    error: float
    freedom: float
    p_value: float


def _tests(
    tested: Tokens, dense: Tokens | None, rng: np.random.Generator, notes: list[str]
) -> Iterator[_Test]:
    ours = _values(tested, rng)
    theirs = None if dense is None else _values(dense, rng)
    for name, unit in _NAMES.items():
        if name not in ours or (theirs is not None and name not in theirs):
            notes.append(f"{name}: no context repeats, so that none can be compared")
            continue
        their = None if dense is None or theirs is None else _mean(theirs[name], dense.sequence)
        yield _compared(name, "all", unit, _mean(ours[name], tested.sequence), their)

    if tested.place is None:
        notes.append("places in the draft cycle are not known; only all tokens together are tested")
    else:
        for place, where in places(tested.place, tested.sequence).items():
            few = len(np.unique(tested.sequence[where]))
            if few < LEAST_SEQUENCES:
                notes.append(f"{place}: reached in {few} sequences only, not tested")
                continue
            for name in _AT_PLACES:
                # Only the tested arm has places; the rounding of the dense arm is that of all its
                # tokens.
                their = (
                    None if dense is None or theirs is None else _mean(theirs[name], dense.sequence)
                )
                own = _mean(np.where(where, ours[name], np.nan), tested.sequence)
                yield _compared(name, place, _NAMES[name], own, their)

    if (reported := _reported(tested, dense)) is not None:
        yield reported
    else:
        notes.append("no log-probs were reported, so they are not compared")


_SHARES = ("u1 (likely tokens)", "u2 (both ends)", "u3", "u4")
_OUTSIDE = "outside top-k and top-p"
_LOG_P = "log p + entropy"
_NEIGHBOURS = "neighbours"
_FIRST = "repeated contexts, first tokens"
_LATER = "repeated contexts, later tokens"
_NAMES: dict[str, Unit] = {
    **dict.fromkeys(_SHARES, "share"),
    _LOG_P: "nats",
    _NEIGHBOURS: "correlation",
    _OUTSIDE: "share",
    _FIRST: "chi-square",
    _LATER: "chi-square",
}
_AT_PLACES = (_SHARES[0], _SHARES[1], _LOG_P)
_REPORTED = "reported log-probs"


def _values(tokens: Tokens, rng: np.random.Generator) -> dict[str, Floats]:
    """The tested quantities of every token, ``[T]``; nan where one has none."""
    inside = tokens.p > 0
    u = tokens.before + rng.random(len(tokens)) * tokens.p
    h = legendre(np.where(inside, np.clip(u, 0, 1), np.nan))
    log_p = np.log(tokens.p, out=np.full(len(tokens), np.nan), where=inside)
    product = np.full(len(tokens), np.nan)
    follows = tokens.sequence[1:] == tokens.sequence[:-1]
    product[1:][follows] = (h[0][1:] * h[0][:-1])[follows]
    shares = {
        name: np.where(inside, moved * each, np.nan)
        for name, moved, each in zip(_SHARES, MOVED, h, strict=True)
    }
    return {
        **shares,
        _LOG_P: log_p + tokens.entropy,
        _NEIGHBOURS: product,
        _OUTSIDE: np.where(np.isnan(tokens.p), np.nan, tokens.p == 0),
        **_repeated(tokens),
    }


def _repeated(tokens: Tokens) -> dict[str, Floats]:
    """Pairs with earlier sequences of the same context, ``[T]``; the mean is the chi-square
    distance of common tokens, averaged over pairs.

    First tokens come from the prefill, mostly without drafts, and make the most pairs; their noise
    would hide a bias of later tokens.
    """
    if tokens.context is None or tokens.token is None or tokens.is_common is None:
        return {}
    assert tokens.common is not None
    usable = np.flatnonzero(~np.isnan(tokens.p))
    context = tokens.context[usable]
    common = tokens.is_common[usable]
    earlier = _earlier(context)
    alike = _earlier(context, tokens.token[usable])
    earlier_common = _earlier_sum(context, common)
    matches = np.divide(alike, tokens.p[usable], out=np.zeros(len(usable)), where=common)
    pairs = matches - earlier * common - earlier_common + earlier * tokens.common[usable]

    first = np.ones(len(tokens), dtype=bool)
    first[1:] = tokens.sequence[1:] != tokens.sequence[:-1]
    found = {}
    for name, where in ((_FIRST, first[usable]), (_LATER, ~first[usable])):
        where = where & (earlier > 0)
        if len(np.unique(tokens.sequence[usable][where])) >= LEAST_SEQUENCES:
            value = np.full(len(tokens), np.nan)
            value[usable[where]] = pairs[where] * where.sum() / earlier[where].sum()
            found[name] = value
    return found


def _earlier(*keys: Ints) -> Floats:
    """The number of earlier entries with the same keys, ``[T]``."""
    return _earlier_sum(_numbered(keys), np.ones(len(keys[0]), dtype=bool))


def _earlier_sum(key: Ints, counted: Flags) -> Floats:
    """The number of earlier entries with the same key that are ``counted``, ``[T]``."""
    order = np.argsort(key, kind="stable")
    before: Ints = np.cumsum(counted[order]) - counted[order]
    starts = np.flatnonzero(np.diff(key[order], prepend=key[order][:1] - 1))
    sizes = np.diff(starts, append=len(key))
    result = np.empty(len(key))
    result[order] = before - np.repeat(before[starts], sizes)
    return result


def _numbered(keys: tuple[Ints, ...]) -> Ints:
    """One number for each combination of keys."""
    _, number = np.unique(np.stack(keys, 1), axis=0, return_inverse=True)
    return number.reshape(-1).astype(np.int64)


def legendre(u: Floats) -> Floats:
    """The first four Legendre polynomials on [0, 1], orthonormal, ``[4, T]``."""
    x = 2 * u - 1
    columns = np.polynomial.legendre.legvander(x, 4).T[1:].astype(np.float64)
    norms: Floats = np.sqrt(2.0 * np.arange(1, 5) + 1)
    return columns * norms[:, None]


def places(place: Ints, sequence: Ints) -> dict[str, Flags]:
    """Masks of the tokens at each place of a draft cycle, by the name that readers see.

    A place is defined by what its token follows, not by the fate of the draft there: whether a
    token is an accepted draft or a replacement depends on the token itself, and neither alone is
    distributed as the dense model says. Whether a place is reached at all depends on earlier tokens
    only.
    """
    last = int(place.max(initial=-1))
    if last < 1:
        return {}
    named = {f"draft {i + 1}": place == i for i in range(min(last, SINGLE_PLACES))}
    if last > SINGLE_PLACES:
        later = (place >= SINGLE_PLACES) & (place < last)
        named[f"drafts {SINGLE_PLACES + 1} to {last}"] = later
    named["bonus token"] = place == last
    after = np.zeros(len(place), dtype=bool)
    earlier = place[:-1]
    cut = (earlier >= 0) & (earlier < last) & (sequence[1:] == sequence[:-1])
    after[1:] = (place[1:] == 0) & cut
    named["first after a rejection"] = after
    return named


def _reported(tested: Tokens, dense: Tokens | None) -> _Test | None:
    """Test whether the reported log-probs are off by more than rounding, one-sided."""
    if tested.reported is None or tested.scored is None:
        return None
    ours = _mean(_gap(tested.reported, tested.scored), tested.sequence)
    theirs = None
    allowed = ROUNDING_FLOOR
    error = ours.error
    if dense is not None and dense.reported is not None and dense.scored is not None:
        theirs = _mean(_gap(dense.reported, dense.scored), dense.sequence)
        allowed += ROUNDING_RATIO * theirs.value
        error = sqrt(ours.error**2 + (ROUNDING_RATIO * theirs.error) ** 2)
    freedom = max(ours.sequences - 1, 1)
    beyond = ours.value - allowed
    p_value = _tail(beyond / error, freedom) if error > 0 else float(beyond <= 0)
    return _Test(_REPORTED, "all", "nats", ours, theirs, beyond, error, freedom, p_value)


def _gap(reported: Floats, scored: Floats) -> Floats:
    """Absolute differences, at most 1 each, so that one token cannot hide the others."""
    with np.errstate(invalid="ignore"):
        gap = np.abs(reported - scored)
    return np.where(np.isnan(gap), 0.0, np.minimum(gap, 1.0))


def _mean(values: Floats, sequence: Ints) -> Mean:
    """The mean of what is not nan, and its standard error with sequences as clusters."""
    known = ~np.isnan(values)
    if not known.any():
        return Mean(0.0, inf, 0, 0)
    _, cluster = np.unique(sequence[known], return_inverse=True)
    count = np.bincount(cluster)
    total = np.bincount(cluster, weights=values[known])
    mean = total.sum() / count.sum()
    many = len(count)
    residual = total - mean * count
    spread = float((residual**2).sum())
    error = sqrt(spread * many / (many - 1)) / count.sum() if many > 1 else inf
    return Mean(float(mean), error, int(count.sum()), many)


def _compared(
    name: str,
    place: str,
    unit: Unit,
    tested: Mean,
    dense: Mean | None,
) -> _Test:
    """Test the difference of the two arms, or the mean alone, against zero; two-sided, by Welch."""
    parts = [tested] if dense is None else [tested, dense]
    difference = tested.value - (0.0 if dense is None else dense.value)
    variance = [part.error**2 for part in parts]
    error = sqrt(sum(variance))
    if error == inf:
        return _Test(name, place, unit, tested, dense, difference, error, 1.0, 1.0)
    if error == 0:  # all sequences alike, such as none or all tokens outside top-k
        differs = difference != 0 and min(p.sequences for p in parts) >= LEAST_SEQUENCES
        return _Test(name, place, unit, tested, dense, difference, error, 1.0, float(not differs))
    freedom = error**4 / sum(
        v**2 / max(part.sequences - 1, 1) for v, part in zip(variance, parts, strict=True)
    )
    p_value = min(1.0, 2 * _tail(abs(difference) / error, freedom))
    return _Test(name, place, unit, tested, dense, difference, error, freedom, p_value)


def _tail(t: float, freedom: float) -> float:
    """P(Student's t > t), by Wallace's approximation (Annals of Mathematical Statistics 1959)."""
    z = (8 * freedom + 1) / (8 * freedom + 3) * sqrt(freedom * log1p(t * t / freedom))
    upper = erfc(z / sqrt(2)) / 2
    return upper if t >= 0 else 1 - upper


def holm(p_values: Floats) -> Floats:
    """P-values ``[m]`` corrected for their number (Holm, Scandinavian Journal of Statistics,
    1979).
    """
    m = len(p_values)
    order = np.argsort(p_values)
    stepped = np.maximum.accumulate(p_values[order] * (m - np.arange(m)))
    corrected = np.empty(m)
    corrected[order] = np.minimum(stepped, 1)
    return corrected


# --- the verdict ---


def _detectable(test: _Test, level: float) -> float:
    """The difference that the strictest step of the correction finds with probability ``POWER``."""
    if test.error == 0:  # nothing was seen: a share as large as this would have been
        return -log(level) / max(test.tested.tokens, 1)
    normal = NormalDist()
    threshold = -normal.inv_cdf(level if test.name == _REPORTED else level / 2)
    # A Student's quantile by the inverse of the approximation in ``_tail``.
    shrunk = threshold * (8 * test.freedom + 3) / (8 * test.freedom + 1)
    quantile = sqrt(test.freedom * np.expm1(shrunk**2 / test.freedom))
    return float((quantile + normal.inv_cdf(POWER)) * test.error)


def _doubts(
    findings: tuple[Finding, ...], seen: float, resolution: float, strictest: float
) -> Iterator[str]:
    """Reasons for which no bias was found but exactness is not shown either."""
    if seen > resolution:
        yield (
            f"a bias of up to {seen:.2%} of the tokens could have stayed unseen, more than "
            f"{resolution:.2%}; sample about {(seen / resolution) ** 2:.1f} times as many tokens"
        )
    for f in findings:
        if f.dense is None or f.place != "all" or f.unit != "share":
            continue
        off = abs(f.dense.value)
        if off > resolution and off > -NormalDist().inv_cdf(strictest / 2) * f.dense.error:
            yield (
                f"the dense arm itself is off by {off:.2%} of the tokens ({f.name}); score with "
                "the weights, the temperature and the truncation that the engine samples with"
            )


def _described(finding: Finding) -> str:
    size = {
        "share": f"{finding.difference:+.3%} of the tokens",
        "nats": f"{finding.difference:+.5f} nats",
        "correlation": f"{finding.difference:+.4f}",
        "chi-square": f"a chi-square distance of {finding.difference:.4f}",
    }[finding.unit]
    return f"{finding.name}, {finding.place}: {size}, corrected p = {finding.corrected:.1e}"


# --- tokens of top lists ---


class Cells(NamedTuple):
    """Values as in ``Tokens``, ``[T]`` each, and a mask of those that a list determines."""

    before: Floats
    p: Floats
    entropy: Floats
    common: Floats
    is_common: Flags
    known: Flags


def cells_of_lists(
    top_logprobs: Floats,
    index: Ints,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    common: float = COMMON,
) -> Cells:
    """Compute from lists of the likeliest tokens all that they determine.

    All tokens that a list leaves out become one cell. u stays uniform and log p + H of the cells
    stays zero on average; what is lost is any bias among the tokens of that cell. A truncation that
    the list does not determine leaves a place out, which depends on earlier tokens only.

    Args:
        top_logprobs: ``[T, n]`` at temperature 1, best first.
        index: ``[T]``, the sampled token's place in its list; -1 if it is in none.
    """
    n = top_logprobs.shape[1]
    known = np.ones(len(index), dtype=bool)
    kept = n if top_k is None else min(top_k, n)
    whole = top_k is not None and top_k <= n  # the list holds all that may be sampled
    mass = np.exp(top_logprobs[:, :kept] / temperature)
    if whole:
        mass = mass / mass.sum(1, keepdims=True)
        rest = np.zeros(len(index))
    else:
        known &= temperature == 1 and top_k is None
        rest = np.clip(1 - mass.sum(1), 0, 1)

    ahead = np.cumsum(mass, axis=1) - mass
    if top_p < 1:
        known &= (rest == 0) | (mass.sum(1) >= top_p)
        mass = np.where(ahead < top_p, mass, 0.0)
        total = mass.sum(1, keepdims=True)
        mass = mass / total
        ahead = np.minimum(ahead / total, 1.0)
        rest = np.zeros(len(index))

    listed = (index >= 0) & (index < kept)
    row = np.arange(len(index))
    column = np.clip(index, 0, kept - 1)
    p = np.where(listed, mass[row, column], rest)
    before = np.where(listed, ahead[row, column], 1 - rest)
    cells = np.concatenate([mass, rest[:, None]], axis=1)
    logs = np.log(cells, out=np.zeros_like(cells), where=cells > 0)
    is_common = mass >= common
    return Cells(
        before=np.where(p > 0, before, 1.0),
        p=p,
        entropy=-(cells * logs).sum(1),
        common=np.where(is_common, mass, 0.0).sum(1),
        is_common=listed & is_common[row, column],
        known=known,
    )
