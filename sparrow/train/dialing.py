"""Collect a step's measurements for the dial, and build its run log entry. The rule itself is in
``sparrow.train.dial``.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import isinf
from typing import Any

import numpy as np

from sparrow.mismatch import BinMismatch, Ceiling
from sparrow.mismatch.tokens import TokenAcceptance, pool
from sparrow.rollout import Rollout
from sparrow.schedule import SparsitySchedule
from sparrow.train.dial import Dial, gain


def verified(
    rollouts: Sequence[Rollout], acceptances: Sequence[TokenAcceptance]
) -> list[TokenAcceptance]:
    """Select the verified tokens of each response. Their acceptance only reflects numerical
    differences between engine and trainer, not sparsity.
    """
    return [
        _part(bounds, slice(None, _verified(r)))
        for r, bounds in zip(rollouts, acceptances, strict=True)
    ]


def unverified(
    rollouts: Sequence[Rollout], acceptances: Sequence[TokenAcceptance]
) -> list[TokenAcceptance]:
    """Select the unverified tokens of each response."""
    return [
        _part(bounds, slice(_verified(r), None))
        for r, bounds in zip(rollouts, acceptances, strict=True)
    ]


def _part(bounds: TokenAcceptance, tokens: slice) -> TokenAcceptance:
    return TokenAcceptance(bounds.lower[tokens], bounds.upper[tokens], bounds.position[tokens])


def drafted(rollouts: Sequence[Rollout], schedule: SparsitySchedule) -> list[TokenAcceptance]:
    """Collect the verified drafts' exact acceptance. A draft's position is the length for which its
    pages were scheduled.
    """
    drafts = []
    for r in rollouts:
        alpha = r.verification.acceptance if r.verification else np.zeros(0, np.float32)
        offset = np.flatnonzero(~np.isnan(alpha))
        exact = alpha[offset]
        position = schedule.page_end(len(r.prompt_ids) + offset)
        drafts.append(TokenAcceptance(exact, exact, position))
    return drafts


def tail(
    responses: Sequence[TokenAcceptance], bin_tokens: int, seed: int
) -> tuple[BinMismatch, ...]:
    """Compute the tail in each length bin. Return an empty tuple if there are no tokens."""
    nonempty = [r for r in responses if r.lower.size]
    return pool(nonempty, bin_tokens, seed).bins if nonempty else ()


def turn(
    dial: Dial,
    rollouts: Sequence[Rollout],
    acceptances: Sequence[TokenAcceptance],
    schedule: SparsitySchedule,
    ceiling: Ceiling,
    seed: int,
) -> dict[str, Any]:
    """Adjust the dial after a step. Return the run log entry: the length up to which responses were
    verified, and each length bin's mode with the reason for it.

    Args:
        rollouts: the step's rollouts, from all processes.
        acceptances: each rollout's acceptance.
        schedule: the schedule for drafts and unverified steps.
        ceiling: the p5 of dense rollouts.
        seed: the bootstrap seed.
    """
    width = schedule.bin_tokens
    up_to = dial.verified_up_to
    own = unverified(rollouts, acceptances)
    drafts = ceiling.beside(tail(drafted(rollouts, schedule), width, seed))
    bins = dial.turn(drafts, tail(own, width, seed))
    sampled = np.bincount(np.concatenate([a.position for a in acceptances]) // width)
    return {
        "verified_up_to": None if isinf(up_to) else up_to,
        "unverified_fraction": sum(a.lower.size for a in own) / sum(map(len, rollouts)),
        "speedup": gain(bins, {i * width: int(n) for i, n in enumerate(sampled)}),
        "bins": [b.to_dict() for b in bins],
    }


def _verified(rollout: Rollout) -> int:
    assert rollout.verification is not None, "an engine in mode auto must record what it verified"
    return rollout.verification.tokens
