"""One call that measures p5 in your own training loop and returns scalars to log."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Sample a response to each prompt under ``schedule`` and compare it with the dense model,
    token by token.

        logger.log(measured(model, tokenizer, prompts, "qwen3-4b-0.86", max_new_tokens=4096), step)

    The names are those of ``sparrow.mismatch.metrics``. Afterwards the model is as it was: its
    attention, its modes and its gradients.

    Args:
        model, tokenizer: of transformers, the model whole on one device.
        prompts: token ids, as the loop feeds them.
        schedule: what the actor may read, as ``Decoding.load`` takes it; or ``"dense"``, which
            gives the ceiling, the most that lists of ``top_n`` tokens can show.
        max_new_tokens: responses are cut here.
        temperature: that of the loop's rollouts, above 0.
        top_n: length of the lists that bound the acceptance rate.
        seed: seeds the samples.

    Raises ConfigError: no prompts, a prompt without room for a response, or a schedule that does
    not fit. UnsupportedModel: a model that cannot be decoded sparsely.
    """
    if not len(prompts):
        raise ConfigError("there are no prompts to measure on; give the token ids of one or more")
    if not temperature > 0:
        raise ConfigError(
            f"temperature is {temperature!r}, but a greedy actor "
            "has no acceptance rate; use that of the rollouts"
        )

    decoding = Decoding.load(schedule)
    if decoding.is_lossless:
        raise ConfigError(
            "lossless samples are the dense policy's, so there is nothing to measure; give the "
            "schedule of lossy rollouts"
        )

    sampling = Sampling(max_new_tokens, temperature, top_n, seed)
    engine = HFEngine(model, decoding, eos_ids(model, tokenizer))
    try:
        found = measure(engine, engine, prompts, sampling, decoding.schedule)
    finally:
        engine.close()
    report = pool(found, decoding.schedule.bin_tokens, seed)
    ceiling = Ceiling()
    if decoding.schedule.is_dense:
        ceiling.measure(report)
    return mismatch_metrics(ceiling.on(report), decoding.schedule.dense_up_to)
