"""Protocols: engines sample, scorers score. The trainer knows them only through this file and
``sparrow.rollout``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.rollout import Rollout, Sampling, Scores, Standing, TopLists
from sparrow.schedule import SparsitySchedule


@dataclass(frozen=True)
class Counters:
    """Counts of an engine's work since it was started or ``counters`` was last called.

    The fields from ``drafted`` on are about lossless decoding only; a cycle is one verification of
    one sequence.
    """

    # cached tokens read by decode steps, summed over sequences and layers; drafts count too
    tokens_read: int
    tokens_held: int  # cached tokens a dense actor would have read for the same response tokens
    preemptions: int = 0  # sequences whose cache was dropped and prefilled anew
    drafted: int = 0  # tokens drafted
    # drafts that verification kept, whether or not the response had ended before them
    accepted: int = 0
    cycles: int = 0
    # acceptance of every draft that verification looked at: those up to the first rejected one of a
    # cycle
    acceptance: DraftAcceptance = field(default_factory=DraftAcceptance.empty, compare=False)
    # acceptance of what ``meter_schedule`` would have sampled in place of first drafts, on a sample
    # of cycles
    metered: DraftAcceptance = field(default_factory=DraftAcceptance.empty, compare=False)
    # choices of an engine that adapts its drafts, in the order of its steps: how many tokens to
    # draft, what drafts read in multiples of their schedule, and for how many steps
    choices: tuple[tuple[int, float, int], ...] = field(default=(), compare=False)

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def read_fraction(self) -> float:
        """Tokens read, as a share of those that a dense actor reads; 0 before the first step."""
        return self.tokens_read / max(self.tokens_held, 1)

    @property
    def tokens_per_cycle(self) -> float:
        """Accepted drafts and one token more; 0 before the first cycle. The end of a response cuts
        its last cycle.
        """
        return (self.accepted + self.cycles) / max(self.cycles, 1)

    @property
    def drafts_per_token(self) -> float:
        """Tokens drafted for each token that cycles gave; 0 before the first cycle."""
        return self.drafted / max(self.accepted + self.cycles, 1)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON types: ``kv``, and ``drafts`` if there were cycles."""
        names: tuple[str, ...] = ("tokens_read", "tokens_held", "preemptions")
        metrics: dict[str, Any] = {
            "kv": {
                "read_fraction": self.read_fraction,
                **{name: getattr(self, name) for name in names},
            }
        }
        if self.cycles:
            names = ("drafted", "accepted", "cycles", "tokens_per_cycle", "drafts_per_token")
            metrics["drafts"] = {name: getattr(self, name) for name in names}
            metrics["drafts"] |= _plain(self.acceptance)
            if self.metered.drafts:
                metrics["drafts"]["metered"] = _plain(self.metered)
            if self.choices:
                metrics["drafts"]["choices"] = [list(choice) for choice in self.choices]
        return metrics


def _plain(alpha: DraftAcceptance) -> dict[str, Any]:
    if not alpha.drafts:
        return {}
    return {
        "acceptance": alpha.mean,
        "p5": alpha.percentile(5),
        "bins": [asdict(b) for b in alpha.bins()],
    }


def total(parts: Sequence[Counters]) -> Counters:
    """Add the counts of several engines."""
    return sum(parts[1:], start=parts[0])


class Engine(Protocol):
    """A sampler with the actor. Implementations: ``hf.HFEngine``, ``vllm.VLLMEngine``,
    ``vllm.VLLMServer``.
    """

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """One response per prompt, in order; repeat a prompt to sample it more often.

        Raises ConfigError: a prompt that leaves no room for a response in the model's context.
        """

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the policy's weights, by Hugging Face parameter name. Tied weights come once."""

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Decode under another schedule from the next ``generate`` on."""

    def counters(self) -> Counters:
        """The counts since the last call."""

    def sleep(self) -> None:
        """Give up the accelerator's memory until ``wake``; does nothing where the engine holds
        none.
        """
        return

    def wake(self) -> None:
        """Undo ``sleep``. Weights may have to be updated before the next ``generate``."""
        return

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards."""
        return


@runtime_checkable
class PartVerifier(Protocol):
    """An engine in ``mode=auto``. Implementation: ``hf.HFEngine``."""

    def verify_up_to(self, length: float) -> None:
        """From the next ``generate`` on, verify the tokens that are sampled while ``page_end`` of
        the number of cached tokens, the prompt's included, is below ``length``, and none after
        them. ``Rollout.verification`` says how many.

        Raises ConfigError: the engine was started in another mode.
        """


@runtime_checkable
class DraftReplayer(Protocol):
    """An engine that can repeat the drafts that another one chose by its speed. Implementation:
    ``vllm.VLLMEngine``.
    """

    def replay(self, choices: Sequence[tuple[int, float, int]]) -> None:
        """Repeat these ``Counters.choices`` until ``counters`` is called; with the same seeds,
        samples are the same.

        Raises ConfigError: drafts that this engine does not choose among.
        """


class Scorer(Protocol):
    """A scorer of sampled tokens under any schedule. Implementation: ``hf.HFEngine``; vLLM cannot
    do this.
    """

    def score(
        self, rollouts: Sequence[Rollout], schedule: SparsitySchedule, temperature: float
    ) -> list[Scores]:
        """Compute teacher-forced log-probs of the rollouts under ``schedule`` (``dense()`` for the
        policy).
        """


class Ranker(Protocol):
    """A ranker of sampled tokens in the dense model's distributions. Implementation:
    ``hf.HFEngine``.
    """

    def rank(
        self, rollouts: Sequence[Rollout], sampling: Sampling, common: float
    ) -> list[Standing]:
        """Rank by a dense teacher-forced pass at the temperature, top-k and top-p of ``sampling``;
        tokens of at least the probability ``common`` count as common.
        """


class ListScorer(Protocol):
    """A source of lists of the dense model's likeliest tokens. Implementations:
    ``vllm.stock.StockEngine``, ``vllm.stock.StockServer``.
    """

    def top_lists(self, rollouts: Sequence[Rollout], n: int) -> list[TopLists]:
        """List them by a prefill of prompt and response, in which nothing is drafted."""

    def close(self) -> None:
        """Free everything."""
        return
