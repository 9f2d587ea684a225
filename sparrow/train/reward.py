"""Pure functions for the parts of a reward: the verifier's verdict, a bonus for stating an answer,
and an overlong penalty.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparrow.train.config import RewardConfig


def overlong_penalty(tokens: int, limit: int, window: int) -> float:
    """Return the overlong penalty. It is 0 up to ``limit - window`` tokens, and then falls linearly
    to -1 at ``limit`` tokens.

    Source: DAPO, arXiv 2503.14476, equation 13, where ``window`` is called L_cache.
    """
    return -max(0.0, min(1.0, (tokens - (limit - window)) / window))


def reward_parts(
    correct: float, stated: bool, tokens: int, limit: int, config: RewardConfig
) -> dict[str, float]:
    """Return the parts of one response's reward, keyed by name. The parts add up to the reward.

    The verifier's verdict (``correct``) is always a part. Depending on ``config``, there is also a
    bonus for stating any answer, and a length penalty. ``limit`` is the maximum response length in
    tokens.
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
    """Compute metrics over responses. Each response is given as its source and its reward parts.

    The metrics are the ``mean`` and ``std`` of the reward. If there are several parts, ``parts``
    has the mean of each. If there are several sources, ``sources`` has the mean reward of each.
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
