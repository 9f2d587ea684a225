"""Compute per-token acceptance rates. The full distributions of actor and policy give exact rates;
top-n lists give bounds.

alpha_t = sum_v min(p_t(v), q_t(v)) = 1 - total variation distance, where p is the dense policy's
distribution and q the sparse actor's, given the same prefix and sampling temperature. alpha_t is
the probability that speculative sampling keeps the actor's token (Leviathan et al., arXiv
2211.17192; Sparrow, arXiv 2606.08446, section 3).

Shapes: T tokens (or any leading shape), V vocabulary, n entries in the actor's list, m entries in
the policy's.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from sparrow.mismatch.tail import FloatArray, IntArray

# Allow probabilities and their sums to exceed 1 by this much. This covers rounding errors, even for
# bfloat16 log-probs of a broad distribution.
ROUNDING = 5e-3


class AcceptanceBounds(NamedTuple):
    """Bounds on the acceptance rate: 0 <= lower <= alpha <= upper <= 1, each float64 [T]."""

    lower: FloatArray
    upper: FloatArray


def acceptance(p_TV: ArrayLike, q_TV: ArrayLike) -> FloatArray:
    """Compute the exact acceptance rate, float64 [...] in [0, 1], given two full distributions
    [..., V] in either order.

    Raises ValueError if the shapes differ, or a row isn't a probability distribution.
    """
    p = np.asarray(p_TV, np.float64)
    q = np.asarray(q_TV, np.float64)
    if p.shape != q.shape or p.ndim == 0:
        raise ValueError(
            f"p_TV has shape {p.shape} and q_TV has {q.shape}; pass two arrays of the same shape "
            "[..., V]."
        )
    for name, rows in (("p_TV", p), ("q_TV", q)):
        total = rows.sum(axis=-1)
        is_distribution = np.all(rows >= 0) and np.all(np.abs(total - 1) <= ROUNDING)
        if not is_distribution:
            raise ValueError(
                f"{name} must contain probabilities that sum to 1 over the last axis, but its "
                f"smallest entry is {rows.min(initial=np.inf):g} and its sums range from "
                f"{total.min(initial=np.inf):g} to {total.max(initial=-np.inf):g}; exponentiate "
                "log-probs and normalise first."
            )
    return np.clip(np.minimum(p, q).sum(axis=-1), 0.0, 1.0)


def acceptance_bounds(
    actor_ids: ArrayLike,
    actor_logprobs: ArrayLike,
    policy_logprobs: ArrayLike,
    policy_ids: ArrayLike | None = None,
) -> AcceptanceBounds:
    """Bound the acceptance rate when only the most likely tokens are known (Sparrow, arXiv
    2606.08446, section 3).

    For a token whose probability is known under both the actor and the policy, min(p, q) is exact.
    All other tokens together contribute at most the smaller of the two leftover masses.

    Args:
        actor_ids: vocabulary ids of the actor's top-n tokens, integer [..., n], in any order.
        actor_logprobs: natural log-probs of these tokens under the actor, [..., n]. -inf marks
            padding, which is needed if the vocabulary has fewer than n tokens. The ids and policy
            log-probs of padding are ignored.
        policy_logprobs: natural log-probs under the policy, [..., n] at `actor_ids`, or [..., m] at
            `policy_ids`.
        policy_ids: ids of the policy's own list, integer [..., m]. Pass these if the two lists
            differ. Only tokens in both lists then count as known. -inf in `policy_logprobs` marks
            padding.

    The bounds, float64 [...], coincide if the lists cover the vocabulary. They're as precise as the
    given log-probs: about 1e-6 for float32.

    Raises ValueError if the shapes don't match, or if ids or log-probs are invalid. Ids must be
    non-negative integers that don't repeat within a row. Log-probs must not be NaN, or positive
    beyond rounding. A row's probabilities must sum to at most 1.
    """
    q, q_ids, known = _read_list("actor", actor_ids, actor_logprobs)

    if policy_ids is None:
        p = _probabilities("policy", policy_logprobs, where=known)
    else:
        listed, p_ids, p_known = _read_list("policy", policy_ids, policy_logprobs)
        if listed.shape[:-1] != q.shape[:-1]:
            raise ValueError(
                f"The lists have shapes {q.shape} and {listed.shape}; pass lists whose shapes "
                "agree on all axes except the last."
            )
        p = np.zeros_like(q)
        matched = np.zeros_like(known)
        # Match one entry at a time, since all pairs [T, n, m] might not fit in memory.
        for entry in range(listed.shape[-1]):
            match = (q_ids == p_ids[..., entry, None]) & known & p_known[..., entry, None]
            np.copyto(p, listed[..., entry, None], where=match)
            matched |= match
        known = matched

    lower = np.minimum(p, q).sum(axis=-1)
    p_left_over = 1 - p.sum(axis=-1, where=known)
    q_left_over = 1 - q.sum(axis=-1, where=known)
    left_over = np.minimum(p_left_over, q_left_over)
    upper = lower + np.maximum(left_over, 0.0)
    return AcceptanceBounds(np.clip(lower, 0.0, 1.0), np.clip(upper, 0.0, 1.0))


def _read_list(
    side: str, ids: ArrayLike, logprobs: ArrayLike
) -> tuple[FloatArray, IntArray, NDArray[np.bool_]]:
    """Check a top-n list, and return its probabilities, ids and a mask of the non-padding entries,
    all [..., n]. Padding gets probability 0.

    Raises ValueError if ids or log-probs are invalid.
    """
    ids = np.asarray(ids)
    if not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"The {side}'s ids have dtype {ids.dtype}; pass integer vocabulary ids.")
    if ids.ndim == 0 or ids.shape != np.shape(logprobs):
        raise ValueError(
            f"The {side}'s ids have shape {ids.shape}, but its log-probs have {np.shape(logprobs)};"
            " pass one log-prob per id."
        )
    probabilities = _probabilities(side, logprobs)
    listed = np.asarray(logprobs) > -np.inf
    if np.any(ids < 0, where=listed):
        raise ValueError(
            f"The {side}'s ids contain {ids[listed].min()}, but ids "
            "start at 0; mark padding with log-probs of -inf."
        )
    # Give padding distinct negative ids, so that its original ids don't count as repeated.
    ordered = np.sort(np.where(listed, ids, -1 - np.arange(ids.shape[-1])), axis=-1)
    repeated = ordered[..., 1:] == ordered[..., :-1]
    if repeated.any():
        raise ValueError(
            f"The {side}'s list contains id {ordered[..., 1:][repeated][0]} twice for one token; "
            "pass each id once."
        )
    return probabilities, ids.astype(np.int64, copy=False), listed


def _probabilities(
    side: str, logprobs: ArrayLike, where: NDArray[np.bool_] | None = None
) -> FloatArray:
    """Compute exp(logprobs), with 0 outside `where`. Raises ValueError if the values can't be
    log-probs of a single distribution.
    """
    values = np.asarray(logprobs, np.float64)
    if where is not None and values.shape != where.shape:
        raise ValueError(
            f"The {side}'s log-probs have shape {values.shape}, but the actor's list has "
            f"{where.shape}; gather the {side}'s log-probs at the actor's ids, or pass policy_ids."
        )
    if np.isnan(values).any():
        raise ValueError(f"The {side}'s log-probs contain NaN; mark missing entries with -inf.")
    if np.any(values > ROUNDING):
        raise ValueError(
            f"The {side}'s log-probs reach {values.max():g}, which is above 0; pass log-softmax, "
            "not logits."
        )
    probabilities = np.exp(values)
    if where is not None:
        probabilities = np.where(where, probabilities, 0.0)
    mass = probabilities.sum(axis=-1)
    if np.any(mass > 1 + ROUNDING):
        raise ValueError(
            f"The {side}'s probabilities sum to {mass.max():g} "
            "for one token; pass log-softmax over the whole vocabulary."
        )
    return probabilities
