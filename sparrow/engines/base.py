"""What a rollout is, and what an engine must do. The trainer knows engines only through this file.

Shapes: T response tokens, n entries of a top-n list.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from sparrow.errors import ConfigError
from sparrow.schedule import SparsitySchedule


@dataclass(frozen=True)
class Sampling:
    """How responses are sampled. No top-p or top-k: truncation changes the actor's support."""

    max_new_tokens: int  # responses are cut here (``finish_reason == "length"``)
    # softmax temperature of actor and policy alike; 0 is greedy (log-probs then at temperature 1)
    temperature: float = 1.0
    top_n: int = 20  # length of the recorded lists of most likely tokens; 0 records none
    seed: int = 0  # makes the samples reproducible on the same engine and hardware
    # one for each prompt, so that its samples do not depend on what is sampled beside it; derived from ``seed`` and the
    # prompt's place if left out
    seeds: Sequence[int] | None = None

    def request_seeds(self, count: int) -> list[int]:
        """A seed for each of ``count`` prompts."""
        if self.seeds is not None:
            assert len(self.seeds) == count, f"{len(self.seeds)} seeds for {count} prompts"
            return list(self.seeds)
        return [derived_seed(self.seed, i) for i in range(count)]

    def check(self, prompts: Sequence[Sequence[int]], context: int) -> None:
        """Refuse prompts that leave no room for a response in a context of so many tokens.

        Raises ConfigError: the first such prompt.
        """
        for i, prompt in enumerate(prompts):
            if not 0 < len(prompt) <= context - self.max_new_tokens:
                raise ConfigError(
                    f"prompt {i} has {len(prompt)} tokens, which with max_new_tokens={self.max_new_tokens} does not "
                    f"fit the model's context of {context} (in vLLM, max_model_len); shorten or drop it, or lower "
                    "max_new_tokens"
                )


def derived_seed(*entropy: int) -> int:
    """A seed of 63 bits for each tuple of numbers."""
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True)
class Rollout:
    """One sampled response and what the actor thought of it."""

    prompt_ids: Sequence[int]  # token ids of the prompt
    response_ids: NDArray[np.int64]  # [T], the end-of-sequence token included if it was sampled
    logprobs: NDArray[np.float32]  # [T], the actor's log-prob of each sampled token at the sampling temperature
    top_ids: NDArray[np.int32]  # [T, n], the actor's most likely tokens, best first
    top_logprobs: NDArray[np.float32]  # [T, n], their log-probs
    finish_reason: Literal["stop", "length"]  # ``"stop"`` at an end-of-sequence token, ``"length"`` at the limit

    def __len__(self) -> int:
        return len(self.response_ids)


@dataclass(frozen=True)
class Scores:
    """Log-probs of a rollout's tokens under some model and schedule, at a temperature."""

    logprobs: NDArray[np.float32]  # [T], of the response tokens
    top_logprobs: NDArray[np.float32]  # [T, n], of the rollout's ``top_ids``
    entropy: NDArray[np.float32]  # [T], of the whole distribution, in nats


@dataclass(frozen=True)
class Counters:
    """What an engine has done since it was started or ``counters`` was last called."""

    tokens_read: int  # cached tokens read by decode steps, summed over sequences and layers
    tokens_held: int  # cached tokens a dense actor would have read in the same steps
    preemptions: int = 0  # sequences whose cache was dropped and prefilled anew

    @property
    def read_fraction(self) -> float:
        """What was read of what a dense actor would have read; 0 before the first step."""
        return self.tokens_read / max(self.tokens_held, 1)


def total(parts: Sequence[Counters]) -> Counters:
    """What several engines have done together."""
    return Counters(*(sum(column) for column in zip(*map(astuple, parts), strict=True)))


def split(flat: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    """What is laid end to end, ``[sum of lengths, ...]``, as one array for each response."""
    return np.split(flat, np.cumsum(lengths)[:-1])


class Engine(Protocol):
    """Generates with the sparse actor. Implementations: ``hf.HFEngine``, ``vllm.VLLMEngine``, ``vllm.VLLMServer``."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """One response per prompt, in order; repeat a prompt to sample it more often.

        Raises ConfigError: a prompt that leaves no room for a response in the model's context.
        """

    def score(self, rollouts: Sequence[Rollout], schedule: SparsitySchedule, temperature: float) -> list[Scores]:
        """Teacher-forced log-probs of the rollouts under ``schedule`` (``dense()`` for the policy)."""

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the policy's weights, by Hugging Face parameter name. Tied weights come once."""

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Decode under another schedule from the next ``generate`` on."""

    def counters(self) -> Counters:
        """What was read since the last call."""

    def sleep(self) -> None:
        """Give up the accelerator's memory until ``wake``; does nothing where the engine has none of its own."""
        return

    def wake(self) -> None:
        """Undo ``sleep``. Weights may have to be updated before the next ``generate``."""
        return

    def close(self) -> None:
        """Free everything. The engine cannot be used afterwards."""
        return
