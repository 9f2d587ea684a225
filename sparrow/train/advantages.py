"""Compute advantages from one scalar reward per response. There is no critic: baselines come from
the rewards for the same prompt.

Shapes: B responses. Rows with the same group id are responses to the same prompt. Groups may differ
in size, and rows may be in any order.
"""

from typing import assert_never

import torch
from torch import Tensor

from sparrow.train.config import AdvantageKind

EPS = 1e-6  # added to the std before dividing by it


def compute_advantages(
    kind: AdvantageKind, rewards_B: Tensor, groups_B: Tensor
) -> tuple[Tensor, dict[str, float]]:
    """Return the advantages (float32 [B], detached) and the metric zero_variance_fraction: the
    share of groups with all-equal rewards.

    With the mean and the (sample) standard deviation of the group's rewards r:
      grpo     (r - mean) / (std + EPS)         DeepSeekMath, arXiv 2402.03300, section 4.1.2
      dr_grpo  r - mean                         Dr. GRPO, arXiv 2503.20783, section 3.2
      rloo     r - mean of the other responses  Back to Basics, arXiv 2402.14740
    Groups with all-equal rewards get zero advantages.

    Args:
        rewards_B: one reward per response, of any real dtype.
        groups_B: integer group ids.

    Raises ValueError if shapes disagree, the batch is empty, group ids are not integers, or a
    reward is not finite.
    """
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
        raise ValueError(
            f"reward {row} is {r_B[row].item()}, but must be a finite number; fix its verifier."
        )

    _, group_B, size = groups_B.unique(return_inverse=True, return_counts=True)
    zero = r_B.new_zeros(len(size))
    low = zero.scatter_reduce(0, group_B, r_B, "amin", include_self=False)
    high = zero.scatter_reduce(0, group_B, r_B, "amax", include_self=False)
    # Compare min and max, which is exact. Rounding can make the std of equal rewards nonzero.
    varies = high > low
    metrics = {"zero_variance_fraction": 1.0 - varies.double().mean().item()}

    mean = zero.index_add(0, group_B, r_B) / size
    deviation_B = torch.where(varies[group_B], r_B - mean[group_B], 0.0)
    other_count = (size - 1).clamp(min=1)
    match kind:
        case "grpo":
            std = (zero.index_add(0, group_B, deviation_B.square()) / other_count).sqrt()
            advantage_B = deviation_B / (std[group_B] + EPS)
        case "dr_grpo":
            advantage_B = deviation_B
        case "rloo":  # equals r - (n mean - r) / (n - 1)
            advantage_B = deviation_B * (size / other_count)[group_B]
        case _:
            assert_never(kind)
    return advantage_B.float(), metrics
