"""Measures how far an engine's actor is from the dense policy, on responses that it samples.

The engine samples and a scorer scores the same tokens; they may be one object.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from sparrow.engines.base import Engine, Scorer
from sparrow.mismatch import BinMismatch, Ceiling, Tau
from sparrow.mismatch.ceiling import CEILING_RESPONSES
from sparrow.mismatch.tokens import TokenAcceptance, left_open, pool, token_acceptance
from sparrow.rollout import Rollout, Sampling
from sparrow.schedule import ALL_PAGES, SparsitySchedule

log = logging.getLogger(__name__)

SHORTEST_LISTS = 20
LONGEST_LISTS = 1280
LENGTHEN = 4
"""Lengths of the actor's lists of tokens where none is given: the first, the longest, and the
factor by which lists grow as long as they leave open whether the target is met."""


def lengthened(sampling: Sampling, bins: Sequence[BinMismatch], p5: float) -> Sampling | None:
    """The same sampling with longer lists of tokens; None if the present lists show for all
    ``bins`` whether the tail reaches ``p5``, or if they already have the greatest length."""
    top_n = min(sampling.top_n * LENGTHEN, LONGEST_LISTS)
    if top_n <= sampling.top_n or not left_open(
        bins, Tau(p5, relative=False), sampling.top_n, "--top-n"
    ):
        return None
    log.warning(
        "lists of %d tokens leave open whether p5 reaches %g; sampling again with %d",
        sampling.top_n,
        p5,
        top_n,
    )
    return replace(sampling, top_n=top_n)


class Comparison(NamedTuple):
    """Samples of an actor beside the dense model."""

    acceptances: list[TokenAcceptance]  # of each response
    off_policy: np.ndarray  # float64 [T], |log p - log q| of all sampled tokens, end to end


def compare(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    schedule: SparsitySchedule,
) -> Comparison:
    """Sample with the engine's actor under ``schedule`` and compare with the dense model, token by
    token. Afterwards the engine's counters cover these samples only.

    Args:
        engine, scorer: both with the same weights; may be one object, as ``HFEngine`` is both.
        prompts: token ids.
        sampling: how responses are sampled; its lists of ``top_n`` tokens bound the acceptance
            rate.
        schedule: the schedule of the actor.
    """
    engine.counters()  # forget what was sampled before
    rollouts = sample(engine, prompts, sampling, schedule)
    policy = scorer.score(rollouts, SparsitySchedule.dense(), sampling.temperature)
    pairs = list(zip(rollouts, policy, strict=True))
    off_policy = [np.abs(p.logprobs.astype(np.float64) - r.logprobs) for r, p in pairs]
    acceptances = [token_acceptance(r, p.top_logprobs, schedule) for r, p in pairs]
    return Comparison(acceptances, np.concatenate(off_policy))


def measure(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    schedule: SparsitySchedule,
) -> list[TokenAcceptance]:
    """The acceptance of each response of ``compare``."""
    return compare(engine, scorer, prompts, sampling, schedule).acceptances


def measure_ceiling(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    schedule: SparsitySchedule,
) -> Ceiling:
    """The p5 of dense rollouts with the same engine, scorer and lists, in the length bins of
    ``schedule``.

    Arguments as in ``measure``; at most ``CEILING_RESPONSES`` prompts, spread evenly over all, are
    sampled.
    """
    chosen = (
        np.linspace(0, len(prompts) - 1, min(CEILING_RESPONSES, len(prompts))).round().astype(int)
    )
    dense = schedule.replace(top_k=(ALL_PAGES,))
    ceiling = Ceiling()
    ceiling.measure(
        pool(
            measure(engine, scorer, [prompts[i] for i in chosen], sampling, dense),
            schedule.bin_tokens,
            sampling.seed,
        )
    )
    return ceiling


def sample(
    engine: Engine, prompts: Sequence[Sequence[int]], sampling: Sampling, schedule: SparsitySchedule
) -> list[Rollout]:
    """Rollouts under ``schedule``; the engine is awake only meanwhile, so that the scorer fits on
    its device.
    """
    engine.wake()
    engine.set_schedule(schedule)
    rollouts = engine.generate(prompts, sampling)
    engine.sleep()
    return rollouts
