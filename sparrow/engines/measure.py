"""Measure how far an engine's actor deviates from the dense policy on sampled responses.

The engine samples tokens, and a scorer scores them. They may be the same object.
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
from sparrow.schedule import SparsitySchedule

log = logging.getLogger(__name__)

SHORTEST_LISTS = 20
LONGEST_LISTS = 1280
LENGTHEN = 4
"""Unless the user sets a length, the actor's top-n lists start with ``SHORTEST_LISTS`` tokens. The
length then grows by a factor of ``LENGTHEN``, up to ``LONGEST_LISTS``, until the lists are long
enough to show whether the target is met.
"""


def lengthened(sampling: Sampling, bins: Sequence[BinMismatch], p5: float) -> Sampling | None:
    """Return the sampling parameters with longer top-n lists. Return None if the lists are long
    enough, or already have the maximum length.

    The lists are long enough if they show, for every bin, whether the bin's tail reaches ``p5``.
    The same test serves a relative target. If the tail could only reach it with longer lists, the
    current lists also make the relative p5 too low (``mismatch.tau``). If it could not, rounding
    keeps it low, and longer lists would not help.
    """
    top_n = min(sampling.top_n * LENGTHEN, LONGEST_LISTS)
    if top_n <= sampling.top_n or not left_open(
        bins, Tau(p5, relative=False), sampling.top_n, "--top-n"
    ):
        return None
    log.warning(
        "lists of %d tokens are too short to show whether p5 reaches %g; sampling again with "
        "lists of %d",
        sampling.top_n,
        p5,
        top_n,
    )
    return replace(sampling, top_n=top_n)


class Comparison(NamedTuple):
    """A comparison of an actor's samples with the dense model."""

    acceptances: list[TokenAcceptance]  # one per response
    off_policy: np.ndarray  # float64 [T], |log p - log q| for all sampled tokens, concatenated


def compare(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    schedule: SparsitySchedule,
) -> Comparison:
    """Sample with the engine's actor under ``schedule``, and compare each sampled token with the
    dense model. Afterwards, the engine's counters cover just these samples.

    Args:
        engine: samples the responses.
        scorer: scores the responses, with the same weights; an ``HFEngine`` can do both.
        prompts: the prompts' token ids.
        sampling: the sampling parameters; lists of ``top_n`` tokens are used to bound the
            acceptance rate.
        schedule: the actor's schedule.
    """
    engine.counters()  # reset, so that earlier samples don't count
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
    """Return each response's acceptance; see ``compare``."""
    return compare(engine, scorer, prompts, sampling, schedule).acceptances


def measure_ceiling(
    engine: Engine,
    scorer: Scorer,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling,
    schedule: SparsitySchedule,
) -> Ceiling:
    """Measure the p5 of dense rollouts in each of ``schedule``'s length bins.

    The arguments are the same as for ``measure``. To measure the ceiling for an actor, use the same
    engine, scorer and list length as for the actor. At most ``CEILING_RESPONSES`` prompts are
    sampled, evenly spread over ``prompts``.
    """
    chosen = (
        np.linspace(0, len(prompts) - 1, min(CEILING_RESPONSES, len(prompts))).round().astype(int)
    )
    dense = schedule.reading_everything()
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
    """Sample rollouts under ``schedule``. The engine is awake only during this call, so that the
    scorer can use the device memory afterwards.
    """
    engine.wake()
    engine.set_schedule(schedule)
    rollouts = engine.generate(prompts, sampling)
    engine.sleep()
    return rollouts
