"""The data of one training step: rollouts, their rewards, and their scores under the dense policy.

Shapes: B responses, T response tokens (right-padded), n top tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sparrow.mismatch.tokens import TokenAcceptance
from sparrow.model.scoring import Batch
from sparrow.rollout import Rollout
from sparrow.tasks import Problem


@dataclass(frozen=True)
class Group:
    """The responses to one prompt."""

    problem: Problem  # the problem behind the prompt
    rollouts: list[Rollout]
    parts: list[dict[str, float]]  # per response: reward parts by name

    @property
    def rewards(self) -> list[float]:
        return [sum(parts.values()) for parts in self.parts]


@dataclass
class Experience:
    """The data of one training step. Entry i of each field from ``problems`` to ``groups`` belongs
    to response i.
    """

    problems: list[Problem]  # each response's problem
    rollouts: list[Rollout]  # the responses
    rewards: np.ndarray  # float64 [B]
    groups: np.ndarray  # int64 [B], group ids; responses to the same prompt share one
    drawn: list[Group]  # every sampled group, including replaced ones
    cursor: int  # index of the next problem to draw

    @classmethod
    def join(cls, groups: list[Group], drawn: list[Group], cursor: int) -> Experience:
        """Join the responses of ``groups``, one group after another."""
        sizes = [len(group.rollouts) for group in groups]
        return cls(
            problems=[group.problem for group in groups for _ in group.rollouts],
            rollouts=[r for group in groups for r in group.rollouts],
            rewards=np.array([reward for group in groups for reward in group.rewards]),
            groups=np.repeat(np.arange(len(groups)), sizes),
            drawn=drawn,
            cursor=cursor,
        )

    @property
    def truncated(self) -> np.ndarray:
        """Whether each response was cut off at the maximum length, bool ``[B]``."""
        return np.array([r.finish_reason == "length" for r in self.rollouts])

    @property
    def lengths(self) -> list[int]:
        """Each response's length in tokens, including its prompt."""
        return [len(r.prompt_ids) + len(r) for r in self.rollouts]

    def batch(self, rows: Sequence[int], device: torch.device, with_top: bool = False) -> Batch:
        return Batch.of([self.rollouts[i] for i in rows], device, with_top)


@dataclass
class Assessment:
    """The rollouts' scores under the dense policy."""

    logp_BT: Tensor  # float32 log-probs of the sampled tokens under the policy, zero on padding
    logq_BT: Tensor  # the same under the actor
    mask_BT: Tensor  # bool, true on response tokens
    # per response: the policy's log-probs for the rollout's top-n tokens, float32 [T, n]
    policy_top: list[np.ndarray]
    acceptances: list[TokenAcceptance]  # per response: bounds on token acceptance rates
    # ``sum_v min(q, p / lambda)`` over the actor's top-n tokens, for Jackpot's correction
    obrs_z_BT: Tensor
    # float32 log-probs under the reference policy, if ``loss.beta`` is above 0
    ref_logp_BT: Tensor | None = None


def pad(rows: Sequence[np.ndarray]) -> Tensor:
    """Join rows of different lengths into one right-padded tensor. Padding is zero or false."""
    return torch.nn.utils.rnn.pad_sequence(
        [torch.from_numpy(np.asarray(r)) for r in rows], batch_first=True
    )
