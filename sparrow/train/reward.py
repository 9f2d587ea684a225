"""Pure functions for the parts of a reward: the verifier's verdict, a bonus for stating an answer,
and an overlong penalty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparrow.train.config import RewardConfig


def overlong_penalty(tokens: int, limit: int, window: int) -> float:
    """Return 0 for up to ``limit - window`` tokens. Beyond that, the penalty grows linearly to -1
    at ``limit`` tokens.

    Source: DAPO, arXiv 2503.14476, equation 13, where ``window`` is called L_cache.
    """
    return -max(0.0, min(1.0, (tokens - (limit - window)) / window))


def reward_parts(
    correct: float, stated: bool, tokens: int, limit: int, config: RewardConfig
) -> dict[str, float]:
    """Compute one response's reward parts, by name. They add up to the reward.

    The parts are the verifier's verdict (``correct``) and, depending on ``config``, a bonus for
    stating an answer, right or wrong, and a length penalty. ``limit`` is the maximum response
    length in tokens.
    """
    parts = {"correct": correct}
    if config.format:
        parts["format"] = config.format * stated
    if config.overlong == "penalty":
        parts["overlong"] = overlong_penalty(
            tokens, limit, config.overlong_window or max(1, limit // 5)
        )
    return parts


def reward_metrics(rewards: Sequence[tuple[str, Mapping[str, float]]]) -> dict[str, Any]:
    """Compute metrics over responses, each given as its source and its reward parts.

    The metrics are the ``mean`` and ``std`` of the reward; if there are several parts, the mean of
    each in ``parts``; and if there are several sources, the mean reward of each in ``sources``.
    """
    sources, parts = zip(*rewards, strict=True)
    totals = np.array([sum(p.values()) for p in parts])
    metrics: dict[str, Any] = {"mean": totals.mean(), "std": totals.std()}
    if len(parts[0]) > 1:
        metrics["parts"] = {}
        for name in parts[0]:
            metrics["parts"][name] = float(np.mean([p[name] for p in parts]))
    if len(set(sources)) > 1:
        metrics["sources"] = {
            name: totals[np.equal(sources, name)].mean() for name in sorted(set(sources))
        }
    return metrics
