"""The protocols of engines, which sample, and of scorers, which score. The trainer depends only on
this file and ``sparrow.rollout``.
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
    """Counts of an engine's work since the engine was started or ``counters`` was last called.

    The fields from ``drafted`` to ``choices`` are for lossless decoding only; a cycle is one
    verification of one sequence.
    """

    # cached tokens read by decode steps, including draft steps, summed over sequences and layers
    tokens_read: int
    # cached tokens that a dense actor would have read for the same response tokens
    tokens_held: int
    preemptions: int = 0  # sequences whose cache was dropped and prefilled again
    drafted: int = 0  # number of drafted tokens
    # number of accepted drafts, including any after the end of a response
    accepted: int = 0
    cycles: int = 0
    # acceptance of every draft up to and including the first rejected one of its cycle
    acceptance: DraftAcceptance = field(default_factory=DraftAcceptance.empty, compare=False)
    # acceptance that ``meter_schedule`` would have had at the first drafts of some cycles
    metered: DraftAcceptance = field(default_factory=DraftAcceptance.empty, compare=False)
    # the choices of an engine that adapts its drafts, in the order of its steps: (tokens to draft,
    # the drafts' budget as a multiple of their schedule, number of steps)
    choices: tuple[tuple[int, float, int], ...] = field(default=(), compare=False)
    # tokens decoded by a lossy actor, and how many of them read all cached tokens in every layer
    rows: int = 0
    dense_rows: int = 0
    passes: int = 0  # sparse passes over guesses, each of which yielded one draft or more
    guessed: int = 0  # drafts that are guesses and not the result of a sparse pass

    def __add__(self, other: Counters) -> Counters:
        return Counters(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def read_fraction(self) -> float:
        """Tokens read, as a share of those that a dense actor would have read; 0 before the first
        step.
        """
        return self.tokens_read / max(self.tokens_held, 1)

    @property
    def dense_fraction(self) -> float:
        """Share of the tokens decoded by a lossy actor that left no page out; 0 before the first."""
        return self.dense_rows / max(self.rows, 1)

    @property
    def tokens_per_cycle(self) -> float:
        """Accepted drafts per cycle, plus one token; 0 before the first cycle. The last cycle of a
        response counts in full, even if the response ends within it.
        """
        return (self.accepted + self.cycles) / max(self.cycles, 1)

    @property
    def drafts_per_token(self) -> float:
        """Tokens drafted per token that cycles produced; 0 before the first cycle."""
        return self.drafted / max(self.accepted + self.cycles, 1)

    @property
    def drafts_per_pass(self) -> float:
        """Tokens drafted per sparse pass over guesses; 0 without guesses."""
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
    """Add the counts of several engines."""
    return sum(parts[1:], start=parts[0])


class Engine(Protocol):
    """A sampler of the actor's responses. Implementations: ``hf.HFEngine``, ``vllm.VLLMEngine``,
    ``vllm.VLLMServer``.
    """

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """Sample one response per prompt, in order; repeat a prompt for several responses to it.

        Raises ConfigError: a prompt leaves no room for a response in the model's context.
        """

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the policy's weights by Hugging Face parameter name. Tied weights are passed once."""

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Change the schedule from the next ``generate`` on."""

    def counters(self) -> Counters:
        """Return the counts since the last call."""

    def sleep(self) -> None:
        """Free the accelerator's memory until ``wake``; does nothing if the engine uses none."""
        return

    def wake(self) -> None:
        """End the sleep. The weights may have to be updated before the next ``generate``."""
        return

    def close(self) -> None:
        """Free all resources. The engine cannot be used afterwards."""
        return


@runtime_checkable
class PartVerifier(Protocol):
    """An engine in ``mode=auto``. Implementation: ``hf.HFEngine``."""

    def verify_up_to(self, length: float) -> None:
        """Verify tokens only up to ``length``, from the next ``generate`` on.

        A token is verified if it is sampled while ``page_end`` of the number of cached tokens,
        including those of the prompt, is below ``length``. ``Rollout.verification`` contains the
        number of verified tokens.

        Raises ConfigError: the engine was started in a mode other than auto.
        """


@runtime_checkable
class DraftReplayer(Protocol):
    """An engine that can repeat the draft choices that another engine based on measured speed.
    Implementation: ``vllm.VLLMEngine``.
    """

    def replay(self, choices: Sequence[tuple[int, float, int]]) -> None:
        """Repeat these ``Counters.choices`` until ``counters`` is called; with the same seeds, the
        samples are the same as well.

        Raises ConfigError: a number of drafts or a budget is not among the choices of this engine.
        """


class Scorer(Protocol):
    """A scorer of sampled tokens under any schedule. The only implementation is ``hf.HFEngine``,
    since vLLM cannot score this way.
    """

    def score(
        self, rollouts: Sequence[Rollout], schedule: SparsitySchedule, temperature: float
    ) -> list[Scores]:
        """Compute teacher-forced log-probs of the rollouts under ``schedule``; the policy's
        schedule is ``SparsitySchedule.dense()``.
        """


class Ranker(Protocol):
    """A source of the ranks of sampled tokens in the dense model's distributions. Implementation:
    ``hf.HFEngine``.
    """

    def rank(
        self, rollouts: Sequence[Rollout], sampling: Sampling, common: float
    ) -> list[Standing]:
        """Rank the tokens with a dense teacher-forced pass at the temperature, top-k and top-p of
        ``sampling``; tokens with a probability of at least ``common`` count as common.
        """


class ListScorer(Protocol):
    """A source of lists of the dense model's most likely tokens. Implementations:
    ``vllm.stock.StockEngine``, ``vllm.stock.StockServer``.
    """

    def top_lists(self, rollouts: Sequence[Rollout], n: int) -> list[TopLists]:
        """List the ``n`` most likely tokens at each position, by prefilling prompt and response
        without drafts.
        """

    def close(self) -> None:
        """Free all resources."""
        return
