"""Measure p5 in your own training loop with a single call that returns scalars to log."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from sparrow.decoding import Decoding
from sparrow.engines.hf import HFEngine, eos_ids
from sparrow.engines.measure import measure
from sparrow.errors import ConfigError
from sparrow.mismatch import Ceiling, mismatch_metrics
from sparrow.mismatch.tokens import pool
from sparrow.rollout import Sampling


def measured(
    model: Any,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    schedule: Any,
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_n: int = 20,
    seed: int = 0,
) -> dict[str, float]:
    """Sample a response to each prompt under ``schedule``, and compare each sampled token with the
    dense model.

        logger.log(measured(model, tokenizer, prompts, "qwen3-4b-0.86", max_new_tokens=4096), step)

    See ``sparrow.mismatch.metrics`` for the scalars' names. The model's attention, training modes
    and gradients are left as they were.

    Args:
        model: a transformers model on a single device.
        tokenizer: the model's tokenizer.
        prompts: token ids, as the loop passes them to the model.
        schedule: the actor's schedule, in any form that ``Decoding.load`` accepts; ``"dense"``
            measures the ceiling, which is the highest p5 that lists of ``top_n`` tokens can show.
        max_new_tokens: the maximum response length, in tokens.
        temperature: the loop's rollout temperature, above 0.
        top_n: number of top tokens per position used to bound the acceptance rate.
        seed: the sampling seed.

    Raises ConfigError if there are no prompts, a prompt leaves no room for a response, or the
    schedule does not match the model. Raises UnsupportedModel if the model cannot be decoded
    sparsely.
    """
    if not len(prompts):
        raise ConfigError(
            "measuring acceptance needs at least one prompt, got none; pass the token ids of "
            "a prompt"
        )
    if not temperature > 0:
        raise ConfigError(
            f"temperature is {temperature!r}, but a greedy actor has no acceptance rate; "
            "pass the temperature of the rollouts"
        )

    decoding = Decoding.load(schedule)
    if decoding.is_lossless:
        raise ConfigError(
            "lossless samples follow the dense policy, so there is no mismatch to measure; pass "
            "the schedule of lossy rollouts"
        )

    sampling = Sampling(max_new_tokens, temperature, top_n, seed)
    with closing(HFEngine(model, decoding, eos_ids(model, tokenizer))) as engine:
        found = measure(engine, engine, prompts, sampling, decoding.schedule)
    report = pool(found, decoding.schedule.bin_tokens, seed)
    ceiling = Ceiling()
    if decoding.schedule.is_dense:
        ceiling.measure(report)
    return mismatch_metrics(ceiling.on(report), decoding.schedule.dense_up_to)
