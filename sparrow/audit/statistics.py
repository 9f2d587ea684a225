"""Test whether sampled tokens follow a dense model's distributions.

Let p be the dense model's next-token distribution, given the tokens actually sampled so far. Sort
the vocabulary by p, most likely first. With an independent uniform random number U per token,

    u = P(tokens sorted before it) + U p(token)

is uniform on [0, 1) and independent of all earlier tokens (randomised probability integral
transform; Brockwell, "Universal residuals", Statistics & Probability Letters 2007). The mean of
log p(token) + H(p), where H is the entropy, is zero. Both hold after every prefix, so sums over a
sequence are martingales. Sequences are independent of each other.

To test uniformity, we use the means of the first four orthonormal Legendre polynomials of u
(Neyman's smooth test). To test independence, we use the mean product of neighbours. Standard errors
treat sequences as clusters, p-values come from Student's t, and Holm's procedure corrects for the
number of tests.

These tests only catch a bias that depends on a token's rank. Other biases affect tokens of any
rank, for example if a draft and its replacement share a random number. Such a bias shows up in
repeated contexts, where several responses to a prompt begin with the same tokens. In these
contexts, we compare the counts of likely tokens with p, which catches a bias in any direction. The
statistic is chi-square, written as a sum over pairs of sequences. If samples follow a distribution
r, the mean of the statistic is the chi-square distance sum (r - p)^2 / p. Each sequence is only
compared with earlier ones, so this sum is a martingale as well.

The engine and the scorer round differently, which slightly biases all of these means. So we run the
same tests on samples from dense decoding with the same engine, and base the verdict on the
differences.

Shapes: T tokens (all tokens of an arm, concatenated), n entries per top list, m tests.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
"""Probability of finding a bias of size ``Finding.detectable``."""

LEAST_SEQUENCES = 30
"""With fewer sequences, standard errors are too unreliable for a test."""

MOVED = (0.4330127, 0.4303315, 0.4299346, 0.4298850)
"""Half the mean absolute value of each of the four polynomials.

A mean of delta corresponds to a density of 1 + delta h(u): a share ``delta * MOVED`` of all tokens
has moved."""

ROUNDING_RATIO = 2.0
ROUNDING_FLOOR = 1e-4
"""The mean difference between reported and scored log-probs may be at most ``ROUNDING_RATIO`` times
that of the dense arm, plus ``ROUNDING_FLOOR`` nats. Some extra difference is expected, because a
pass over several tokens doesn't sum in the same order as a pass over one.
"""

LARGE: Mapping[Unit, float] = {"nats": 0.1, "correlation": 0.05, "chi-square": 0.05}
LARGE_GAP = 0.25
"""If a mean of the dense arm is larger than this, or a share is larger than ``resolution``,
rounding can't be the cause, not even in bfloat16. ``LARGE_GAP`` is for reported log-probs, in nats.
With twice this gap in the dense arm, no engine could fail, because gaps are capped at 1.
"""

COMMON = 0.02
"""In repeated contexts, tokens with at least this probability are counted individually."""

SINGLE_PLACES = 8
"""Test this many positions of a draft cycle individually, and all later positions together."""


@dataclass(frozen=True)
class Tokens:
    """All tokens of an arm, concatenated and scored by the dense model.

    An entry may stand for a cell of several tokens (see ``cells_of_lists``). Tokens excluded by
    truncation have ``p`` 0 and ``before`` 1. If a token's rank is unknown, ``p`` and ``before`` are
    nan.
    """

    # [T], total probability of the likelier tokens, which are sorted before this one
    before: Floats
    p: Floats  # [T], the token's probability
    entropy: Floats  # [T], entropy of the distribution, in nats
    sequence: Ints  # [T], index of the token's sequence, in ascending order
    # [T], the token's position in its draft cycle, from 0; -1 for tokens from a prefill or a step
    # without drafts. None if positions are unknown.
    place: Ints | None = None
    # The next four fields are ``[T]``, or None if contexts are not compared. A token is common if
    # its probability is at least ``COMMON``.
    token: Ints | None = None
    # context id; positions preceded by the same tokens have the same id
    context: Ints | None = None
    common: Floats | None = None  # total probability of the common tokens
    is_common: Flags | None = None  # whether the sampled token is common
    reported: Floats | None = None  # [T], log-prob reported by the engine
    # [T], the same log-prob computed by the dense model; nan if unknown
    scored: Floats | None = None

    def __len__(self) -> int:
        return len(self.p)


@dataclass(frozen=True)
class Mean:
    """A mean over tokens, with its standard error (clustered by sequence)."""

    value: float
    error: float
    tokens: int
    sequences: int


@dataclass(frozen=True)
class Finding:
    """One test's result. Depending on ``unit``, values are shares of all tokens, log-probs in nats,
    correlations or chi-square distances.
    """

    name: str
    place: str  # ``"all"``, or the position in the draft cycle
    unit: Unit
    tested: Mean
    dense: Mean | None  # None without a dense arm
    # tested mean minus dense mean, which counts as 0 without a dense arm. For reported log-probs,
    # the excess over what rounding allows.
    difference: float
    # a difference this large would have been found with probability ``POWER``
    detectable: float
    p_value: float
    corrected: float  # p-value after Holm's correction


@dataclass(frozen=True)
class Verdict:
    """The outcome of an audit."""

    status: Status
    reasons: tuple[str, ...]
    findings: tuple[Finding, ...]
    level: float  # probability of calling an exact engine biased
    resolution: float  # the largest ``detectable`` for calling an engine exact
    # a bias that moves this share of the tokens to likelier ranks would have been detected
    detectable: float
    notes: tuple[str, ...] = field(default=())  # what couldn't be tested

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain JSON types; infinite and unknown values become None."""
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
    """Compare an engine's tokens with the dense model's distributions, and with tokens that the
    same engine decoded densely.

    Args:
        dense: tokens from dense decoding with the same engine and prompts, but different random
            numbers. Without them, rounding differences between engine and scorer count as bias.
        seed: seed for the random numbers U.
    """
    tests, notes = _tests(tested, dense, np.random.default_rng(seed))
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
        reasons = [
            f"{few} sequences are too few for a standard error; sample at least {LEAST_SEQUENCES}"
        ]
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
    tested: Tokens, dense: Tokens | None, rng: np.random.Generator
) -> tuple[list[_Test], list[str]]:
    """Run all tests. Return their results, and notes on what couldn't be tested."""
    tests: list[_Test] = []
    notes: list[str] = []
    ours = _values(tested, rng)
    dense_means: dict[str, Mean] = {}
    if dense is not None:
        theirs = _values(dense, rng)
        dense_means = {name: _mean(values, dense.sequence) for name, values in theirs.items()}

    for name, unit in _NAMES.items():
        if name not in ours or (dense is not None and name not in dense_means):
            notes.append(f"{name} (no context occurs twice)")
            continue
        own = _mean(ours[name], tested.sequence)
        tests.append(_compared(name, "all", unit, own, dense_means.get(name)))

    if tested.place is None:
        notes.append("single positions in the draft cycle (the positions are unknown)")
    else:
        for place, where in places(tested.place, tested.sequence).items():
            few = len(np.unique(tested.sequence[where]))
            if few < LEAST_SEQUENCES:
                notes.append(f"{place} (only {few} sequences reach it)")
                continue
            for name in _AT_PLACES:
                # Only the tested arm has positions, so compare with all of the dense arm's tokens.
                own = _mean(np.where(where, ours[name], np.nan), tested.sequence)
                tests.append(_compared(name, place, _NAMES[name], own, dense_means.get(name)))

    if (reported := _reported(tested, dense)) is not None:
        tests.append(reported)
    else:
        notes.append("reported log-probs (none were reported, or none could be scored)")
    return tests, notes


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
    """For every test, compute the value of each token, ``[T]``. Undefined values are nan."""
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
    """Compare each token with tokens of earlier sequences in the same context. Return one value per
    token, ``[T]``. The mean of these values is the chi-square distance of common tokens, averaged
    over pairs.

    The first token of each response is tested separately. It usually comes from the prefill,
    without drafts. First tokens also form the most pairs, so their noise would hide a bias in later
    tokens.
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
    """For each entry, count the earlier entries with the same keys, ``[T]``."""
    return _earlier_sum(_numbered(keys), np.ones(len(keys[0]), dtype=bool))


def _earlier_sum(key: Ints, counted: Flags) -> Floats:
    """For each entry, count the earlier ``counted`` entries with the same key, ``[T]``."""
    order = np.argsort(key, kind="stable")
    before: Ints = np.cumsum(counted[order]) - counted[order]
    starts = np.flatnonzero(np.diff(key[order], prepend=key[order][:1] - 1))
    sizes = np.diff(starts, append=len(key))
    result = np.empty(len(key))
    result[order] = before - np.repeat(before[starts], sizes)
    return result


def _numbered(keys: tuple[Ints, ...]) -> Ints:
    """Number the distinct combinations of keys."""
    _, number = np.unique(np.stack(keys, 1), axis=0, return_inverse=True)
    return number.reshape(-1).astype(np.int64)


def legendre(u: Floats) -> Floats:
    """Evaluate the first four orthonormal Legendre polynomials on [0, 1], ``[4, T]``."""
    x = 2 * u - 1
    columns = np.polynomial.legendre.legvander(x, 4).T[1:].astype(np.float64)
    norms: Floats = np.sqrt(2.0 * np.arange(1, 5) + 1)
    return columns * norms[:, None]


def places(place: Ints, sequence: Ints) -> dict[str, Flags]:
    """Return a token mask for each position in the draft cycle, by display name.

    We group tokens by position rather than by whether the draft was accepted. Acceptance depends on
    the token itself, so neither accepted drafts nor replacements follow the dense model's
    distribution on their own. In contrast, whether a position is reached only depends on earlier
    tokens.
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
    """Test (one-sided) whether reported log-probs are further off than rounding explains."""
    if tested.reported is None or tested.scored is None:
        return None
    ours = _mean(_gap(tested.reported, tested.scored), tested.sequence)
    if not ours.tokens:
        return None
    theirs = None
    allowed = ROUNDING_FLOOR
    error = ours.error
    if dense is not None and dense.reported is not None and dense.scored is not None:
        theirs = _mean(_gap(dense.reported, dense.scored), dense.sequence)
        if not theirs.tokens:
            return None
        allowed += ROUNDING_RATIO * theirs.value
        error = sqrt(ours.error**2 + (ROUNDING_RATIO * theirs.error) ** 2)
    freedom = max(ours.sequences - 1, 1)
    beyond = ours.value - allowed
    p_value = _tail(beyond / error, freedom) if error > 0 else float(beyond <= 0)
    return _Test(_REPORTED, "all", "nats", ours, theirs, beyond, error, freedom, p_value)


def _gap(reported: Floats, scored: Floats) -> Floats:
    """Compute absolute differences, capped at 1 to keep single tokens from dominating the mean.
    Unknown ones are nan.
    """
    same = reported == scored  # both may be -inf
    gap = np.subtract(reported, scored, out=np.zeros(len(scored)), where=~same)
    return np.minimum(np.abs(gap), 1.0)


def _mean(values: Floats, sequence: Ints) -> Mean:
    """Compute the mean, ignoring nan, and its standard error (clustered by sequence)."""
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
    """Run Welch's two-sided test for a difference between the two arms. If there is no dense arm,
    test whether the mean of the tested arm is nonzero.
    """
    parts = [tested] if dense is None else [tested, dense]
    difference = tested.value - (0.0 if dense is None else dense.value)
    variance = [part.error**2 for part in parts]
    error = sqrt(sum(variance))
    if error == inf:
        return _Test(name, place, unit, tested, dense, difference, error, 1.0, 1.0)
    if error == 0:  # all sequences have the same value, e.g. no token is outside top-k
        differs = difference != 0 and min(p.sequences for p in parts) >= LEAST_SEQUENCES
        return _Test(name, place, unit, tested, dense, difference, error, 1.0, float(not differs))
    freedom = error**4 / sum(
        v**2 / max(part.sequences - 1, 1) for v, part in zip(variance, parts, strict=True)
    )
    p_value = min(1.0, 2 * _tail(abs(difference) / error, freedom))
    return _Test(name, place, unit, tested, dense, difference, error, freedom, p_value)


def _tail(t: float, freedom: float) -> float:
    """Compute P(Student's t > t), using Wallace's approximation (Annals of Mathematical Statistics
    1959).
    """
    z = (8 * freedom + 1) / (8 * freedom + 3) * sqrt(freedom * log1p(t * t / freedom))
    upper = erfc(z / sqrt(2)) / 2
    return upper if t >= 0 else 1 - upper


def holm(p_values: Floats) -> Floats:
    """Correct p-values ``[m]`` for multiple testing (Holm, Scandinavian Journal of Statistics,
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
    """Compute the smallest difference that Holm's strictest step finds with probability
    ``POWER``.
    """
    # The event that this test counts never occurred. If it affected this share of all tokens, we
    # would almost certainly have seen it.
    if test.error == 0:
        return -log(level) / max(test.tested.tokens, 1)
    normal = NormalDist()
    threshold = -normal.inv_cdf(level if test.name == _REPORTED else level / 2)
    # Compute Student's t quantile by inverting the approximation in ``_tail``.
    shrunk = threshold * (8 * test.freedom + 3) / (8 * test.freedom + 1)
    quantile = sqrt(test.freedom * np.expm1(shrunk**2 / test.freedom))
    return float((quantile + normal.inv_cdf(POWER)) * test.error)


def _doubts(
    findings: tuple[Finding, ...], seen: float, resolution: float, strictest: float
) -> Iterator[str]:
    """Yield reasons not to call the engine exact even though no bias was found."""
    if seen == inf:
        yield (
            "no token's rank is known, because the lists of likely tokens are too short; request "
            "longer lists (--lists), or score with transformers (--scorer hf)"
        )
    elif seen > resolution:
        yield (
            f"a bias that moves up to {seen:.2%} of the tokens could have gone undetected, but the "
            f"limit is {resolution:.2%}; sample about {(seen / resolution) ** 2:.1f} times as many "
            "tokens"
        )
    for f in findings:
        if f.dense is None or f.place != "all":
            continue
        limit = LARGE_GAP if f.name == _REPORTED else LARGE.get(f.unit, resolution)
        off = abs(f.dense.value)
        if off > limit and off > -NormalDist().inv_cdf(strictest / 2) * f.dense.error:
            yield _doubt(f, f.dense.value, limit)


def _doubt(finding: Finding, value: float, limit: float) -> str:
    """Explain that the dense arm's mean is too large for a comparison, and how to change that."""
    if finding.name == _REPORTED:
        return (
            f"the dense arm's own reported log-probs are off by {value:.3f} nats on average, but "
            f"the limit is {limit:g}; set --logprobs to the kind that the engines report, or to "
            "none"
        )
    what = {
        "share": f"shifts {abs(value):.2%} of the tokens ({finding.name})",
        "nats": f"has a mean {finding.name} of {value:+.3f} nats, but the limit is {limit:g}",
        "correlation": f"has a correlation of {value:+.3f} between neighbours, but the limit is "
        f"{limit:g}",
        "chi-square": f"is a chi-square distance of {value:.3f} from the scorer ({finding.name}), "
        f"but the limit is {limit:g}",
    }[finding.unit]
    remedy = "score with the same weights, temperature and truncation as the engine"
    if finding.unit == "correlation":
        remedy = f"draw every token with its own random number, and {remedy}"
    return f"the dense arm itself {what}; {remedy}"


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
    """Values for the fields of ``Tokens``, each ``[T]``. ``known`` marks the positions whose lists
    are long enough for these values.
    """

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
    """Compute the values for ``Tokens`` from top-n lists, as far as possible.

    All tokens missing from a list are lumped into one cell. For cells, u is still uniform, and
    log p + H is still zero on average; we just can't see a bias within a cell. Positions are
    skipped if the list is too short for the temperature or truncation. Whether a position is
    skipped depends only on earlier tokens.

    Args:
        top_logprobs: ``[T, n]`` at temperature 1, most likely first.
        index: ``[T]``, the sampled token's index in the list, or -1 if it isn't listed.
    """
    n = top_logprobs.shape[1]
    known = np.ones(len(index), dtype=bool)
    kept = n if top_k is None else min(top_k, n)
    whole = top_k is not None and top_k <= n  # the list has every token that can be sampled
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
