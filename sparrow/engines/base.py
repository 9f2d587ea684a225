"""Protocols for engines, which sample responses, and scorers, which compute token log-probs. The
trainer depends only on this file and ``sparrow.rollout``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from sparrow.decoding import DraftChoice
from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.rollout import Rollout, Sampling, Scores, Standing, TopLists
from sparrow.schedule import SparsitySchedule


@dataclass(frozen=True)
class Counters:
    """Counts of an engine's work since it started, or since the last call to ``counters``.

    Only lossless decoding uses ``passes``, ``guessed`` and the fields from ``drafted`` to
    ``choices``. A cycle is one verification of one sequence.
    """

    # cached tokens read by decode steps, including draft steps, summed over sequences and layers
    tokens_read: int
    # cached tokens a dense actor would have read for the same response tokens
    tokens_held: int
    preemptions: int = 0  # number of sequences whose cache was dropped and prefilled again
    drafted: int = 0  # number of drafted tokens
    # number of accepted drafts, including any past the end of a response
    accepted: int = 0
    cycles: int = 0
    # acceptance of each cycle's drafts, up to and including the first rejected draft
    acceptance: DraftAcceptance = field(default_factory=DraftAcceptance.empty, compare=False)
    # acceptance under ``meter_schedule``, measured at the first draft of some cycles
    metered: DraftAcceptance = field(default_factory=DraftAcceptance.empty, compare=False)
    # choices made by an engine with adaptive drafting, in step order
    choices: tuple[DraftChoice, ...] = field(default=(), compare=False)
    # number of tokens decoded by a lossy actor; ``dense_rows`` counts those for which every layer
    # read the whole cache
    rows: int = 0
    dense_rows: int = 0
    # number of sparse passes in an engine with guesses; each made at least one draft
    passes: int = 0
    guessed: int = 0  # number of drafts that are guesses no sparse pass has checked

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def read_fraction(self) -> float:
        """Tokens read, as a fraction of what a dense actor would have read; 0 before the first
        step.
        """
        return self.tokens_read / max(self.tokens_held, 1)

    @property
    def dense_fraction(self) -> float:
        """Fraction of a lossy actor's tokens that were decoded without skipping any page; 0 before
        the first token.
        """
        return self.dense_rows / max(self.rows, 1)

    @property
    def tokens_per_cycle(self) -> float:
        """Accepted drafts per cycle, plus one; 0 before the first cycle. A response's last cycle
        counts in full, even if the response ends in the middle of this cycle.
        """
        return (self.accepted + self.cycles) / max(self.cycles, 1)

    @property
    def drafts_per_token(self) -> float:
        """Drafted tokens per token produced in cycles; 0 before the first cycle."""
        return self.drafted / max(self.accepted + self.cycles, 1)

    @property
    def drafts_per_pass(self) -> float:
        """Drafted tokens per sparse pass, not counting unchecked guesses; 0 without guesses."""
        return (self.drafted - self.guessed) / self.passes if self.passes else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the counts as plain JSON types under ``kv`` and, if any cycles ran, ``drafts``."""
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
            if self.passes or self.guessed:
                metrics["drafts"]["guessed"] = self.guessed
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
    """An engine samples responses from the actor. Implementations: ``hf.HFEngine``,
    ``vllm.VLLMEngine``, ``vllm.VLLMServer``.
    """

    @property
    def schedule(self) -> SparsitySchedule:
        """The current schedule for decode steps, or for drafts in lossless mode."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """Sample one response per prompt, in order. Repeat a prompt to get several responses.

        Raises ConfigError if a prompt leaves no room for a response in the model's context.
        """

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the policy's weights by Hugging Face parameter name. Tied weights are passed only
        once.
        """

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Switch to another schedule from the next ``generate`` on."""

    def counters(self) -> Counters:
        """Return the counts since the last call."""

    def sleep(self) -> None:
        """Free accelerator memory until ``wake``. This does nothing without an accelerator."""
        return

    def wake(self) -> None:
        """Wake up from ``sleep``. The weights may need updating before the next ``generate``."""
        return

    def close(self) -> None:
        """Free all resources. The engine cannot be used afterwards."""
        return


@runtime_checkable
class PartVerifier(Protocol):
    """An engine for mode auto, which verifies only part of each response. Implementation:
    ``hf.HFEngine``.
    """

    def verify_up_to(self, length: float) -> None:
        """Verify tokens only up to ``length``, from the next ``generate`` on.

        A token is verified if ``page_end(n)`` is below ``length``. Here, n is the number of cached
        tokens, including the prompt, when the token is sampled. ``Rollout.verification`` says how
        many tokens were verified.

        Raises ConfigError if the engine was not started in mode auto.
        """


@runtime_checkable
class DraftReplayer(Protocol):
    """An engine that can replay draft choices recorded by another engine. These choices depend on
    measured speed, so seeds don't determine them. Implementation: ``vllm.VLLMEngine``.
    """

    def replay(self, choices: Sequence[DraftChoice]) -> None:
        """Replay these ``Counters.choices`` until ``counters`` is called. With the same seeds, this
        gives the same samples.

        Raises ConfigError if this engine can't make one of these choices.
        """


class Scorer(Protocol):
    """A scorer computes log-probs of sampled tokens under any schedule. The only implementation is
    ``hf.HFEngine``, because vLLM can't do this.
    """

    def score(
        self, rollouts: Sequence[Rollout], schedule: SparsitySchedule, temperature: float
    ) -> list[Scores]:
        """Compute the rollouts' log-probs under ``schedule`` by teacher forcing. Pass
        ``SparsitySchedule.dense()`` to get the policy's log-probs.
        """


class Ranker(Protocol):
    """Ranks sampled tokens in the dense model's distributions. Implementation: ``hf.HFEngine``."""

    def rank(
        self, rollouts: Sequence[Rollout], sampling: Sampling, common: float
    ) -> list[Standing]:
        """Rank the tokens in a dense teacher-forced pass, with the temperature, top-k and top-p
        from ``sampling``. Tokens with a probability of at least ``common`` count as common.
        """


class ListScorer(Protocol):
    """Lists the dense model's most likely tokens. Implementations: ``vllm.stock.StockEngine``,
    ``vllm.stock.StockServer``.
    """

    def top_lists(self, rollouts: Sequence[Rollout], n: int) -> list[TopLists]:
        """List the ``n`` most likely tokens at each response position. The lists come from a
        prefill of the prompt and the response, which must leave room for a token in the context.
        """

    def close(self) -> None:
        """Free all resources."""
        return
