"""Model scores: mean@k, unbiased pass@k and majority@k, with confidence intervals from resampling
problems.

Shapes: N problems, k responses per problem.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike


@dataclass(frozen=True)
class Score:
    """A mean over problems, with a 95 % bootstrap interval from resampling problems."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_at_k(rewards_Nk: ArrayLike) -> Score:
    """Average the rewards of all responses. The interval comes from resampling problems."""
    return _over_problems(_rewards(rewards_Nk).mean(1))


def pass_at_k(rewards_Nk: ArrayLike, k: int) -> Score:
    """Estimate the probability that at least one of ``k`` responses is right. The estimate is
    unbiased, and uses all n >= k responses to each problem.

    If c of the n responses are right (have a reward of at least 1), the estimate is 1 - C(n - c, k)
    / C(n, k). See Chen et al., arXiv 2107.03374, equation 1.

    Raises ValueError if ``k`` is not between 1 and the number of responses per problem.
    """
    rewards = _rewards(rewards_Nk)
    n = rewards.shape[1]
    if not 1 <= k <= n:
        raise ValueError(f"pass@k needs 1 <= k <= {n} responses per problem, got k={k}")
    right = (rewards >= 1).sum(1).tolist()
    passed = [1 - math.comb(n - c, k) / math.comb(n, k) for c in right]
    return _over_problems(np.array(passed))


def majority_at_k(rewards_Nk: ArrayLike, answers: Sequence[Sequence[str | None]]) -> Score:
    """Score the most frequent answer to each problem. Responses without an answer (None) have no
    vote. If several answers tie, the score is the mean of their scores.

    Raises ValueError if the number of answers differs from the number of rewards.
    """
    rewards = _rewards(rewards_Nk)
    if [len(a) for a in answers] != [rewards.shape[1]] * len(rewards):
        raise ValueError(
            f"majority@k needs one answer per reward, but the rewards have shape {rewards.shape}, and "
            f"the numbers of answers per problem are {[len(a) for a in answers]}"
        )
    won = []
    for reward, given in zip(rewards, answers, strict=True):
        votes = Counter(answer for answer in given if answer is not None)
        most = max(votes.values(), default=0)
        winners = [answer for answer, count in votes.items() if count == most]
        # The same answer may get different rewards, for example if one response has the wrong
        # format. An answer therefore scores the mean reward of the responses that give it.
        means = []
        for winner in winners:
            of_winner = [r for r, a in zip(reward, given, strict=True) if a == winner]
            means.append(np.mean(of_winner))
        won.append(float(np.mean(means)) if means else 0.0)
    return _over_problems(np.array(won))


def _rewards(rewards_Nk: ArrayLike) -> np.ndarray:
    rewards = np.asarray(rewards_Nk, np.float64)
    if rewards.ndim != 2 or not rewards.size or not np.isfinite(rewards).all():
        raise ValueError(
            f"rewards must be finite, with shape [problems, responses], got shape {rewards.shape}"
        )
    return rewards


def _over_problems(values: np.ndarray) -> Score:
    rng = np.random.default_rng(0)
    means = values[rng.integers(0, len(values), (1000, len(values)))].mean(1)
    low, high = np.percentile(means, [2.5, 97.5])
    value = float(values[0])
    if (values == value).all() and 0 <= value <= 1:
        # Resampling equal values gives no interval. With 97.5 % confidence, at most the share
        # ``unseen`` of all problems would score differently. The lower limit assumes that these
        # problems all score 0, and the upper limit that they all score 1.
        unseen = 1 - 0.025 ** (1 / len(values))
        low = value * (1 - unseen)
        high = value + (1 - value) * unseen
    return Score(float(values.mean()), float(low), float(high))
