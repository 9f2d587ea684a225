"""A dial between lossless and lossy decoding. It finds the length beyond which verification can be
skipped, because acceptance is high enough in the tail and skipping saves time.

Length bins below that length are lossless, and bins above it are lossy. A lossless bin turns lossy
once its drafts' p5 is high enough, and back to lossless if its unverified tokens' p5 turns out too
low. docs/dial.md explains the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import inf, isinf, isnan
from typing import Any, Literal

from sparrow.cost import Machine, ModelShape, decode_step, sequences_held
from sparrow.cost.lossless import DraftSetup, lossless_step
from sparrow.mismatch import BinMismatch, Tau
from sparrow.mismatch.bootstrap import plain
from sparrow.schedule import SparsitySchedule

MIN_SEQUENCES = 8
"""Number of responses that must reach a bin before it can turn lossy. With fewer responses, a lossy
bin only turns back if its whole p5 interval is below tau.
"""
# A bin only turns lossy if lossy decoding is predicted to be at least this many times as fast as
# lossless decoding. It turns back if lossy decoding is predicted to be slower.
FASTER = 1.01
# steps before a failed bin is retried; doubles with each further failure
WAIT = 8

Price = Callable[[int, float], tuple[float, float]]
"""(length in tokens, mean draft acceptance) -> seconds per token, lossless and lossy."""


@dataclass(frozen=True)
class DialBin:
    """The dial's verdict on lengths in [start, end), and the measurements behind it."""

    start: int
    end: int
    mode: Literal["lossless", "lossy"]  # the bin's mode in the measured step
    # p5 on tau's scale. In a lossless bin, this is the drafts' p5. In a lossy bin, it is the
    # unverified tokens' p5
    p5: float
    low: float  # lower limit of the 95 % interval of p5
    tokens: int  # number of tokens behind p5
    lossless_s: float  # predicted seconds per lossless token
    speedup: float  # predicted speed-up of lossy over lossless
    verdict: Literal["ready", "even", "holds", "fails", "waits", "unknown"]
    why: str  # the reason for the verdict, in words

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain JSON types."""
        return plain(asdict(self))


class Dial:
    """Decides after each step how far to verify.

    Args:
        tau: the p5 target for unverified tokens, on the trainer's scale.
        price: predicts the seconds per token in either mode.
    """

    def __init__(self, tau: Tau, price: Price) -> None:
        self._tau = tau
        self._price = price
        # bin -> steps left before it is retried
        self._waits: dict[int, int] = {}
        self._failures: dict[int, int] = {}
        self.verified_up_to = inf
        """The length in tokens, including the prompt, up to which sequences are verified. The first
        lossy bin starts at this length.
        """

    def turn(
        self, drafts: Sequence[BinMismatch], own: Sequence[BinMismatch]
    ) -> tuple[DialBin, ...]:
        """Decide where verification ends in the next rollouts, based on the latest rollouts.

        Args:
            drafts: the measured p5 of draft acceptance in each length bin, and its ceiling if
                known.
            own: the measured p5 of the unverified tokens' acceptance, in the same bins.

        Returns:
            The measured bins, shortest first, each with its verdict.
        """
        self._waits = {b: left - 1 for b, left in self._waits.items() if left > 1}
        lossless = [(b, self._draft_bin(b)) for b in drafts if b.end <= self.verified_up_to]
        lossy = [(b, self._own_bin(b)) for b in own if b.start >= self.verified_up_to]

        failed = [b for b, judged in lossy if judged.verdict == "fails"]
        if failed:
            for b in failed:
                self._failures[b.bin] = self._failures.get(b.bin, 0) + 1
                self._waits[b.bin] = WAIT * 2 ** (self._failures[b.bin] - 1)
            left = [
                b.start
                for b, judged in lossy
                if b.start >= failed[-1].end and judged.verdict == "holds"
            ]
            self.verified_up_to = min(left, default=inf)
        else:
            for b, judged in reversed(lossless):
                if judged.verdict == "ready":
                    self.verified_up_to = b.start
                if judged.verdict not in ("even", "unknown"):
                    break

        return tuple(judged for _, judged in [*lossless, *lossy])

    def _draft_bin(self, b: BinMismatch) -> DialBin:
        """Judge a lossless bin by its drafts."""
        p5 = self._as_scored(b.lower_bound, b.ceiling)
        low = self._as_scored(b.interval_low, b.ceiling)
        lossless_s, speedup = self._priced(b)
        measured = f"{self._tau.statistic} of drafts, {p5:.3f} [at least {low:.3f}],"
        verdict: Literal["ready", "even", "waits", "unknown"]
        if b.n_sequences < MIN_SEQUENCES:
            verdict = "unknown"
            why = f"{b.n_sequences} responses are too few to tell"
        elif not low >= self._tau.value:
            verdict = "waits"
            why = f"{measured} may be below {self._tau}"
        elif b.bin in self._waits:
            verdict = "waits"
            why = f"the bin failed before and will be tried again in {self._waits[b.bin]} steps"
        elif speedup < FASTER:
            verdict = "even" if speedup >= 1 else "waits"
            why = f"lossy would be {speedup:.2f}x as fast as lossless"
        else:
            verdict = "ready"
            why = f"{measured} reaches {self._tau}, and lossy is {speedup:.2f}x as fast"
        return DialBin(
            b.start, b.end, "lossless", p5, low, b.n_tokens, lossless_s, speedup, verdict, why
        )

    def _own_bin(self, b: BinMismatch) -> DialBin:
        """Judge a lossy bin by its unverified tokens."""
        (scaled,) = self._tau.scale([b])
        lossless_s, speedup = self._priced(b)
        p5 = scaled.lower_bound
        low = scaled.interval_low
        enough = b.n_sequences >= MIN_SEQUENCES
        measured = f"{self._tau.statistic} of unverified tokens, {p5:.3f},"
        # With few responses, the bin only fails if its whole interval is below tau. The comparison
        # is negated so that an unknown p5 (nan) fails.
        is_below = not p5 >= self._tau.value
        is_surely_below = scaled.interval_high < self._tau.value
        verdict: Literal["holds", "fails", "unknown"]
        if is_below if enough else is_surely_below:
            verdict = "fails"
            why = f"{measured} is below {self._tau}"
        elif enough and speedup < 1:
            verdict = "fails"
            why = f"lossy is {speedup:.2f}x as fast as lossless"
        elif enough:
            verdict = "holds"
            why = f"{measured} reaches {self._tau}, and lossy is {speedup:.2f}x as fast"
        else:
            verdict = "unknown"
            why = f"{b.n_sequences} responses are too few to tell"
        return DialBin(
            b.start, b.end, "lossy", p5, low, b.n_tokens, lossless_s, speedup, verdict, why
        )

    def _as_scored(self, drafts: float, ceiling: float) -> float:
        """Convert the drafts' p5 from verification to the p5 that the trainer would measure.

        In verification, both distributions come from the same program, so the ceiling is 1. The
        trainer's ceiling is ``ceiling``.
        """
        if self._tau.relative or isnan(ceiling):
            return drafts
        return Tau(drafts, relative=True).level(ceiling)

    def _priced(self, b: BinMismatch) -> tuple[float, float]:
        """Predict the seconds per token of lossless decoding, and how many times as fast lossy
        decoding is.
        """
        lossless_s, lossy_s = self._price((b.start + b.end) // 2, b.mean)
        return lossless_s, lossless_s / lossy_s

    def state(self) -> dict[str, Any]:
        """Return the state for ``load``, as plain JSON types."""
        up_to = None if isinf(self.verified_up_to) else self.verified_up_to
        return {
            "verified_up_to": up_to,
            "waits": list(self._waits.items()),
            "failures": list(self._failures.items()),
        }

    def load(self, state: Mapping[str, Any]) -> None:
        up_to = state["verified_up_to"]
        self.verified_up_to = inf if up_to is None else up_to
        self._waits = dict(state["waits"])
        self._failures = dict(state["failures"])


def gain(bins: Sequence[DialBin], tokens: Mapping[int, int]) -> float:
    """Predict how many times as fast a rollout is as a fully lossless rollout. ``tokens`` maps the
    start of each bin to the number of tokens sampled in that bin.
    """
    lossless_s = [tokens.get(b.start, 0) * b.lossless_s for b in bins]
    speedups = [b.speedup if b.mode == "lossy" else 1.0 for b in bins]
    spent = sum(seconds / speedup for seconds, speedup in zip(lossless_s, speedups, strict=True))
    return sum(lossless_s) / spent if spent else 1.0


def price(
    shape: ModelShape, machine: Machine, schedule: SparsitySchedule, draft_tokens: int, batch: int
) -> Price:
    """Build a ``Price`` from the cost model. ``schedule`` applies to lossy decoding, and to the
    drafts of lossless decoding.

    Args:
        draft_tokens: maximum draft length. The prediction uses whichever draft length from 0 to
            this maximum is fastest.
        batch: the batch size, reduced at lengths where the KV cache wouldn't fit in memory.
    """

    def of(length: int, acceptance: float) -> tuple[float, float]:
        lengths = [length] * max(1, min(batch, sequences_held(shape, machine, length)))
        lossless_s = min(
            lossless_step(shape, machine, lengths, DraftSetup(k, schedule, acceptance)).seconds
            for k in range(draft_tokens + 1)
        )
        return lossless_s, decode_step(shape, machine, lengths, schedule).seconds

    return of
