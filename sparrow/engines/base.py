"""Protocols for engines, which sample responses, and for scorers, which compute log-probs of
tokens. The trainer depends only on this file and ``sparrow.rollout``.
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
    """Counts of an engine's work since the engine was started, or since the last call of
    ``counters``.

    The fields from ``drafted`` to ``choices`` are used only in lossless decoding. A cycle is one
    verification of one sequence.
    """

    # number of cached tokens read by decode steps, including draft steps, summed over sequences and
    # layers
    tokens_read: int
    # number of cached tokens that a dense actor would have read for the same response tokens
    tokens_held: int
    preemptions: int = 0  # number of sequences whose cache was dropped and prefilled again
    drafted: int = 0  # number of drafted tokens
    # number of accepted drafts, including any after the end of a response
    accepted: int = 0
    cycles: int = 0
    # acceptance of drafts, in each cycle up to and including the first rejected draft
    acceptance: DraftAcceptance = field(default_factory=DraftAcceptance.empty, compare=False)
    # acceptance under ``meter_schedule``, measured at the first draft of some cycles
    metered: DraftAcceptance = field(default_factory=DraftAcceptance.empty, compare=False)
    # the choices of an engine that adapts its drafts, in the order of its steps: (number of tokens
    # to draft, budget of the drafts as a multiple of their schedule, guesses per pass, number of
    # steps)
    choices: tuple[tuple[int, float, int, int], ...] = field(default=(), compare=False)
    # number of tokens decoded by a lossy actor, and how many of these tokens read all cached tokens
    # in every layer
    rows: int = 0
    dense_rows: int = 0
    # number of sparse passes of an engine with guesses, each of which made at least one draft
    passes: int = 0
    guessed: int = 0  # number of drafts that are guesses which no sparse pass has checked

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def read_fraction(self) -> float:
        """Tokens read, as a fraction of those that a dense actor would have read; 0 before the
        first step.
        """
        return self.tokens_read / max(self.tokens_held, 1)

    @property
    def dense_fraction(self) -> float:
        """Fraction of the tokens decoded by a lossy actor for which no page was left out; 0 before
        the first token.
        """
        return self.dense_rows / max(self.rows, 1)

    @property
    def tokens_per_cycle(self) -> float:
        """Number of accepted drafts per cycle, plus one token; 0 before the first cycle. The last
        cycle of a response counts in full, even if the response ends within that cycle.
        """
        return (self.accepted + self.cycles) / max(self.cycles, 1)

    @property
    def drafts_per_token(self) -> float:
        """Number of drafted tokens per token produced in cycles; 0 before the first cycle."""
        return self.drafted / max(self.accepted + self.cycles, 1)

    @property
    def drafts_per_pass(self) -> float:
        """Number of drafted tokens per sparse pass over guesses; 0 without guesses."""
        return (self.drafted - self.guessed) / self.passes if self.passes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the counts in plain JSON types, under ``kv`` and, if there were cycles, under
        ``drafts``.
        """
        names: tuple[str, ...] = ("tokens_read", "tokens_held", "preemptions")
        metrics: dict[str, Any] = {
            "kv": {
                "read_fraction": self.read_fraction,
                **{name: getattr(self, name) for name in names},
            }
        }
        if self.rows:
            metrics["kv"]["dense_fraction"] = self.dense_fraction
        if self.cycles:
            names = ("drafted", "accepted", "cycles", "tokens_per_cycle", "drafts_per_token")
            metrics["drafts"] = {name: getattr(self, name) for name in names}
            if self.passes:
                metrics["drafts"]["passes"] = self.passes
                metrics["drafts"]["drafts_per_pass"] = self.drafts_per_pass
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
    """Add up the counts of several engines."""
    return sum(parts[1:], start=parts[0])


class Engine(Protocol):
    """An engine that samples responses of the actor. Implementations: ``hf.HFEngine``,
    ``vllm.VLLMEngine``, ``vllm.VLLMServer``.
    """

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """Sample one response per prompt, in order. To get several responses to a prompt, repeat
        the prompt.

        Raises ConfigError if a prompt leaves no room for a response in the model's context.
        """

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the policy's weights, which are given by Hugging Face parameter name. Tied weights
        are passed only once.
        """

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Use another schedule from the next ``generate`` on."""

    def counters(self) -> Counters:
        """Return the counts since the last call of this method."""

    def sleep(self) -> None:
        """Free the accelerator's memory until ``wake``. Does nothing if the engine uses no
        accelerator.
        """
        return

    def wake(self) -> None:
        """Wake the engine up from ``sleep``. The weights may need to be updated before the next
        ``generate``.
        """
        return

    def close(self) -> None:
        """Free all resources. The engine cannot be used afterwards."""
        return


@runtime_checkable
class PartVerifier(Protocol):
    """An engine in mode auto, which verifies only a part of each response. Implementation:
    ``hf.HFEngine``.
    """

    def verify_up_to(self, length: float) -> None:
        """Verify tokens only up to ``length``, from the next ``generate`` on.

        A token is verified if ``page_end`` of the number of cached tokens when it is sampled,
        including those of the prompt, is below ``length``. ``Rollout.verification`` contains the
        number of verified tokens.

        Raises ConfigError if the engine was started in a mode other than auto.
        """


@runtime_checkable
class DraftReplayer(Protocol):
    """An engine that can repeat another engine's choices of how much to draft, which depend on
    measured speed. Implementation: ``vllm.VLLMEngine``.
    """

    def replay(self, choices: Sequence[tuple[int, float, int, int]]) -> None:
        """Repeat these ``Counters.choices`` until ``counters`` is called. With the same seeds, the
        samples are then the same as well.

        Raises ConfigError if one of the choices is not among those of this engine.
        """


class Scorer(Protocol):
    """A scorer, which computes log-probs of sampled tokens under any schedule. The only
    implementation is ``hf.HFEngine``, because vLLM cannot score in this way.
    """

    def score(
        self, rollouts: Sequence[Rollout], schedule: SparsitySchedule, temperature: float
    ) -> list[Scores]:
        """Compute teacher-forced log-probs of the rollouts under ``schedule``. For log-probs of the
        policy, pass ``SparsitySchedule.dense()``.
        """


class Ranker(Protocol):
    """An object that ranks sampled tokens in the dense model's distributions. Implementation:
    ``hf.HFEngine``.
    """

    def rank(
        self, rollouts: Sequence[Rollout], sampling: Sampling, common: float
    ) -> list[Standing]:
        """Rank the tokens in a dense teacher-forced pass, with the temperature, top-k and top-p of
        ``sampling``. Tokens with a probability of at least ``common`` count as common.
        """


class ListScorer(Protocol):
    """An object that lists the dense model's most likely tokens. Implementations:
    ``vllm.stock.StockEngine``, ``vllm.stock.StockServer``.
    """

    def top_lists(self, rollouts: Sequence[Rollout], n: int) -> list[TopLists]:
        """List the ``n`` most likely tokens at each position, in a prefill of prompt and
        response.
        """

    def close(self) -> None:
        """Free all resources."""
        return
