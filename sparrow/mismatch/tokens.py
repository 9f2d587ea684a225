"""Compute a rollout's per-token acceptance, for a trainer or a probe, and pool tokens into one
report.

Shapes: T response tokens, n entries in the actor's top-n list.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sparrow.mismatch.acceptance import acceptance_bounds
from sparrow.mismatch.bootstrap import BinMismatch, MismatchReport, mismatch_report
from sparrow.mismatch.tau import Tau
from sparrow.rollout import Rollout
from sparrow.schedule import SparsitySchedule


class TokenAcceptance(NamedTuple):
    """Bounds on each response token's acceptance rate, float64 ``[T]``, and token positions, int64
    ``[T]``.
    """

    lower: np.ndarray
    upper: np.ndarray
    position: np.ndarray


def token_acceptance(
    rollout: Rollout,
    policy_top_logprobs: np.ndarray,
    schedule: SparsitySchedule,
    actor_top_logprobs: np.ndarray | None = None,
) -> TokenAcceptance:
    """Compute one response's acceptance from the policy's log-probs ``[T, n]`` of the tokens in the
    rollout's top-n lists.

    The actor's log-probs come from the rollout, unless ``actor_top_logprobs`` is given. For
    example, these log-probs may come from teacher forcing under another schedule. A token's
    position is the number of cached tokens when the token was sampled, rounded up to the end of the
    page. The schedule was looked up at this length, so a report's bins line up with the schedule's
    bins.
    """
    actor = rollout.top_logprobs if actor_top_logprobs is None else actor_top_logprobs
    bounds = acceptance_bounds(rollout.top_ids, actor, policy_top_logprobs)
    cached = len(rollout.prompt_ids) + np.arange(len(rollout))
    return TokenAcceptance(bounds.lower, bounds.upper, schedule.page_end(cached))


def flatten(
    responses: Sequence[TokenAcceptance],
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Concatenate the tokens of all responses. Return their lower bounds, upper bounds, positions
    and response indices, each ``[T]``.
    """
    lower, upper, position = (np.concatenate(x) for x in zip(*responses, strict=True))
    lengths = [len(response.lower) for response in responses]
    number = np.repeat(np.arange(len(responses)), lengths)
    return lower, upper, position, number


def pool(responses: Sequence[TokenAcceptance], bin_tokens: int, seed: int = 0) -> MismatchReport:
    """Build one report over all responses. Its intervals come from resampling whole responses."""
    return mismatch_report(*flatten(responses), bin_tokens, seed=seed)


def left_open(bins: Sequence[BinMismatch], tau: Tau, top_n: int, option: str) -> str | None:
    """Return a message if the actor's top-n lists are too short to tell whether a bin's p5 reaches
    ``tau``. Otherwise, return None. The message names the bin or, if there are several, the one
    with the lowest p5.

    Args:
        bins: a report's bins.
        tau: the p5 target.
        top_n: list length.
        option: name of the setting for ``top_n``.
    """
    still = (b for b in tau.scale(bins) if b.lower_bound < tau.value <= b.upper_bound)
    b = min(still, key=lambda b: b.lower_bound, default=None)
    if b is None:
        return None
    return (
        f"whether {tau.statistic} of acceptance reaches {tau.value:g} is unknown at lengths "
        f"{b.start}-{b.end}, because with the actor's lists of {top_n} tokens, {tau.statistic} may "
        f"be anywhere between {b.lower_bound:.3f} and {b.upper_bound:.3f}; use longer lists "
        f"({option})"
    )
