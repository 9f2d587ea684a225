"""Plain data types, without torch: sampling parameters, rollouts and their log-probs.

Shapes: T response tokens, n entries per top-n list.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from sparrow.errors import ConfigError, PromptError

LOWEST_TEMPERATURE = 0.01
"""The lowest temperature above 0. vLLM would raise a lower one to this, and logits divided by it
could overflow.
"""


@dataclass(frozen=True)
class Sampling:
    """Sampling parameters.

    Raises ConfigError if ``max_new_tokens``, ``temperature``, ``top_n``, a seed, ``top_k`` or
    ``top_p`` is out of range.
    """

    max_new_tokens: int  # longer responses are cut off, with ``finish_reason`` "length"
    # softmax temperature for both actor and policy; 0 means greedy, with log-probs at temperature 1
    temperature: float = 1.0
    # how many of the most likely tokens to record at each position; 0 for none
    top_n: int = 20
    seed: int = 0  # samples are reproducible on the same engine and hardware
    # one seed per prompt, so that a prompt's samples don't depend on the other prompts in the call.
    # By default, the seeds are derived from ``seed`` and the prompts' indices
    seeds: Sequence[int] | None = None
    # Sample only from the ``top_k`` most likely tokens and, among these, only from the smallest set
    # with a total probability of ``top_p``. Both apply to actor and policy. They are for evaluation
    # only, because off-policy corrections need full support.
    top_k: int | None = None
    top_p: float = 1.0

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 1), ("top_n", 0)):
            count = getattr(self, name)
            if count < least:
                raise ConfigError(f"{name} is {count}, but must be at least {least}")
        if not 0 <= self.temperature < math.inf:
            raise ConfigError(
                f"temperature is {self.temperature}, but must be finite and at least 0"
            )
        if 0 < self.temperature < LOWEST_TEMPERATURE:
            raise ConfigError(
                f"temperature is {self.temperature}, but must be 0, for the most likely token, or at "
                f"least {LOWEST_TEMPERATURE}"
            )
        for seed in (self.seed, *(self.seeds or ())):
            if not 0 <= seed < 2**63:
                raise ConfigError(f"seed is {seed}, but must be at least 0 and less than 2**63")
        if self.top_k is not None and self.top_k < 1:
            raise ConfigError(
                f"top_k is {self.top_k}, but must be at least 1; leave it out to sample from all "
                "tokens"
            )
        if not 0 < self.top_p <= 1:
            raise ConfigError(
                f"top_p is {self.top_p}, but must be greater than 0 and at most 1; leave it out to "
                "sample from all tokens"
            )

    def request_seeds(self, count: int) -> list[int]:
        """Return a seed for each of ``count`` prompts.

        Raises ConfigError if ``seeds`` has a different number of seeds.
        """
        if self.seeds is None:
            return [derived_seed(self.seed, i) for i in range(count)]
        if len(self.seeds) != count:
            raise ConfigError(
                f"seeds has {len(self.seeds)} seeds, but there are {count} prompts; pass one seed "
                "per prompt, or leave seeds out"
            )
        return list(self.seeds)

    @property
    def truncated(self) -> bool:
        return self.top_k is not None or self.top_p < 1

    def check(
        self,
        prompts: Sequence[Sequence[int]],
        context: float = math.inf,
        vocabulary: int | None = None,
    ) -> None:
        """Check that no prompt is text or empty, that each leaves room for a response in a context
        of ``context`` tokens, and that the model has an embedding for each token.

        Args:
            context: infinite if it isn't known.
            vocabulary: the number of the model's token ids; None if it isn't known.

        Raises PromptError if a prompt is text, empty or too long, or has an unknown token id. The
        error names the first such prompt.
        """
        for i, prompt in enumerate(prompts):
            if isinstance(prompt, str):
                raise PromptError(
                    i, f"is the text {prompt[:40]!r}; encode it with the model's tokenizer"
                )
            if not len(prompt):
                raise PromptError(
                    i,
                    "has no tokens; remove it, or check that it was encoded with the model's "
                    "tokenizer",
                )
            if len(prompt) > context - self.max_new_tokens:
                raise PromptError(
                    i,
                    f"has {len(prompt)} tokens, which together with "
                    f"max_new_tokens={self.max_new_tokens} do not fit in the model's context of "
                    f"{context} (in vLLM, max_model_len); shorten or remove the prompt, or lower "
                    "max_new_tokens",
                )
            if vocabulary is not None and not 0 <= min(prompt) <= max(prompt) < vocabulary:
                unknown = max(prompt) if max(prompt) >= vocabulary else min(prompt)
                raise PromptError(
                    i,
                    f"has the token id {unknown}, but the model's ids go from 0 to "
                    f"{vocabulary - 1}; encode it with the model's own tokenizer",
                )


def derived_seed(*entropy: int) -> int:
    """Derive a 63-bit seed from a tuple of numbers."""
    return int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0] >> 1)


@dataclass(frozen=True)
class Verification:
    """The part of a response that was verified, for engines that stop verifying partway through.

    The first ``tokens`` tokens are samples from the dense policy. Later tokens are samples from the
    sparse actor. Verification couldn't make them exact, because they depend on a cache written by
    sparse steps.
    """

    tokens: int
    # ``[tokens]``, the probability of keeping each token's draft; nan where no draft was verified
    acceptance: NDArray[np.float32]


@dataclass(frozen=True)
class Rollout:
    """One sampled response with the actor's log-probs."""

    prompt_ids: Sequence[int]  # token ids of the prompt
    response_ids: NDArray[np.int64]  # [T], including the end-of-sequence token if it was sampled
    # [T], the actor's log-prob of each sampled token at the sampling temperature
    logprobs: NDArray[np.float32]
    top_ids: NDArray[np.int32]  # [T, n], the actor's most likely tokens, best first
    top_logprobs: NDArray[np.float32]  # [T, n], log-probs of ``top_ids``
    # ``"stop"`` if an end-of-sequence token was sampled, ``"length"`` if the limit was reached
    finish_reason: Literal["stop", "length"]
    # only set in mode auto; in other modes, all tokens are sampled the same way
    verification: Verification | None = None
    # [T], each token's position in its draft cycle, from 0; -1 for tokens from a prefill or a step
    # without drafts. None if the engine doesn't report positions
    cycle_place: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.response_ids)


@dataclass(frozen=True)
class Scores:
    """Log-probs of a rollout's tokens under one model, schedule and temperature."""

    logprobs: NDArray[np.float32]  # [T], log-probs of the response tokens
    top_logprobs: NDArray[np.float32]  # [T, n], log-probs of the rollout's ``top_ids``
    entropy: NDArray[np.float32]  # [T], entropy of the whole distribution, in nats


@dataclass(frozen=True)
class Standing:
    """Where a rollout's tokens rank in the dense model's distributions, from which they should have
    been sampled. All fields are ``[T]``.

    Tokens cut by top-k or top-p have ``p`` 0 and ``before`` 1.
    """

    # total probability of all more likely tokens and of equally likely tokens with smaller ids
    before: NDArray[np.float64]
    p: NDArray[np.float64]  # the token's own probability
    entropy: NDArray[np.float64]  # entropy of the distribution, in nats
    # total probability of the common tokens: those with at least a given probability
    common: NDArray[np.float64]
    is_common: NDArray[np.bool_]  # whether the token is one of the common tokens
    # log-probs after temperature and truncation; nan where only the probability of a group of
    # tokens is known
    logprobs: NDArray[np.float64]
    raw_logprobs: NDArray[np.float64]  # log-probs at temperature 1 and without truncation


@dataclass(frozen=True)
class TopLists:
    """The dense model's most likely tokens at each position of a rollout, at temperature 1 and
    without truncation.
    """

    logprobs: NDArray[np.float32]  # [T], log-probs of the rollout's own tokens
    top_ids: NDArray[np.int32]  # [T, n], the most likely tokens, best first
    top_logprobs: NDArray[np.float32]  # [T, n], log-probs of ``top_ids``


def split(flat: NDArray[Any], lengths: Sequence[int]) -> list[NDArray[Any]]:
    """Split an array of concatenated responses into one array per response. The first axis of
    ``flat`` covers the tokens of all responses.
    """
    ends = np.cumsum(lengths, dtype=np.int64)
    return np.split(flat, ends)[:-1]
