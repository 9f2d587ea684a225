"""Advantages from one scalar reward per response: no critic, the baseline comes from the prompt's other responses.

Shapes: B responses. Rows with the same group id are responses to the same prompt; groups may differ in size and their
rows may be in any order. Rewards may be of any real dtype; advantages are float32 [B] and carry no gradient.

Every function returns the advantages and the metric zero_variance_fraction, the share of groups whose rewards are all
equal, and raises ValueError if shapes disagree, the batch is empty or a reward is not finite.
"""

from typing import NamedTuple, assert_never

import torch
from torch import Tensor

from sparrow.train.config import AdvantageKind


class _Groups(NamedTuple):
    """Per row [B]: its reward and what is known of its group."""

    reward: Tensor  # float64
    group: Tensor  # its index, counted from 0
    size: Tensor  # float64
    total: Tensor  # float64, of the group's rewards
    varies: Tensor  # bool, the group holds at least two different rewards
    metrics: dict[str, float]


def _group(rewards_B: Tensor, groups_B: Tensor) -> _Groups:
    if rewards_B.ndim != 1 or rewards_B.shape != groups_B.shape or not len(rewards_B):
        raise ValueError(
            f"rewards have shape {tuple(rewards_B.shape)} and groups {tuple(groups_B.shape)}; "
            "pass two vectors of the same, non-zero length."
        )
    if groups_B.is_floating_point():
        raise ValueError(f"groups have dtype {groups_B.dtype}; pass integer group ids.")
    r_B = rewards_B.detach().double()
    if not r_B.isfinite().all():
        row = int((~r_B.isfinite()).nonzero()[0])
        raise ValueError(f"reward {row} is {r_B[row].item()}; every reward must be a finite number, fix its verifier.")

    _, group_B, size = groups_B.unique(return_inverse=True, return_counts=True)
    total = r_B.new_zeros(len(size)).index_add_(0, group_B, r_B)
    low = r_B.new_zeros(len(size)).scatter_reduce_(0, group_B, r_B, "amin", include_self=False)
    high = r_B.new_zeros(len(size)).scatter_reduce_(0, group_B, r_B, "amax", include_self=False)
    varies = high > low  # exact, where a standard deviation of equal rewards need not round to 0
    metrics = {"zero_variance_fraction": 1.0 - varies.double().mean().item()}
    return _Groups(r_B, group_B, size.double()[group_B], total[group_B], varies[group_B], metrics)


def grpo(
    rewards_B: Tensor, groups_B: Tensor, *, divide_by_std: bool = True, eps: float = 1e-6
) -> tuple[Tensor, dict[str, float]]:
    """A = (r - mean) / (std + eps) within the group; 0 in a group whose rewards are all equal.

    The standard deviation is the sample one (n - 1). DeepSeekMath (GRPO), arXiv 2402.03300, section 4.1.2.
    divide_by_std=False leaves the division out: Dr. GRPO, arXiv 2503.20783, section 3.2.
    """
    g = _group(rewards_B, groups_B)
    deviation_B = torch.where(g.varies, g.reward - g.total / g.size, 0.0)
    if divide_by_std:
        squares = torch.zeros_like(deviation_B).index_add_(0, g.group, deviation_B.square())
        deviation_B = deviation_B / ((squares[g.group] / (g.size - 1).clamp(min=1)).sqrt() + eps)
    return deviation_B.float(), g.metrics


def rloo(rewards_B: Tensor, groups_B: Tensor) -> tuple[Tensor, dict[str, float]]:
    """A = r - mean reward of the *other* responses of the group; 0 for a group of one, which has no others.

    Back to Basics, arXiv 2402.14740, REINFORCE leave-one-out.
    """
    g = _group(rewards_B, groups_B)
    others_B = (g.total - g.reward) / (g.size - 1).clamp(min=1)
    return torch.where(g.varies, g.reward - others_B, 0.0).float(), g.metrics


def remax(rewards_B: Tensor, groups_B: Tensor, baseline_B: Tensor) -> tuple[Tensor, dict[str, float]]:
    """A = r - reward of the greedy response to the same prompt, which baseline_B [B] repeats for each row.

    A group of equal rewards keeps its advantage here: the greedy response may have done better or worse.
    ReMax, arXiv 2310.10505, Algorithm 1. Raises ValueError if the baseline's shape differs from the rewards'.
    """
    g = _group(rewards_B, groups_B)
    if baseline_B.shape != rewards_B.shape:
        raise ValueError(
            f"baseline has shape {tuple(baseline_B.shape)}, rewards {tuple(rewards_B.shape)}; "
            "repeat each prompt's greedy reward for all its responses."
        )
    return (g.reward - baseline_B.detach().double()).float(), g.metrics


def compute_advantages(
    kind: AdvantageKind, rewards_B: Tensor, groups_B: Tensor, baseline_B: Tensor | None = None
) -> tuple[Tensor, dict[str, float]]:
    """Advantages float32 [B] of the named kind, and metrics; the baseline is for `remax` alone, which needs it."""
    if baseline_B is not None and kind != "remax":
        raise ValueError(f"{kind} advantages take no baseline; leave it out, or use remax.")
    match kind:
        case "grpo":
            return grpo(rewards_B, groups_B)
        case "dr_grpo":
            return grpo(rewards_B, groups_B, divide_by_std=False)
        case "rloo":
            return rloo(rewards_B, groups_B)
        case "remax":
            if baseline_B is None:
                raise ValueError("remax advantages need the greedy rewards; pass baseline_B, or use rloo.")
            return remax(rewards_B, groups_B, baseline_B)
        case _:
            assert_never(kind)
