"""Check a worker's kernels, CUDA graphs and cache before it serves requests."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sparrow.decoding import Decoding
from sparrow.vllm import versions
from sparrow.vllm.lossless.drafter import Drafter
from sparrow.vllm.runtime import layers_of
from sparrow.vllm.selfcheck import layers, steps
from sparrow.vllm.selfcheck.refusal import refusal


@dataclass(frozen=True)
class Differences:
    """The largest differences found in a passing check."""

    layers: float  # in attention outputs
    steps: float  # in log-probs, relative to their spread


@torch.inference_mode()
def check_engine(worker: Any, runtime: Any) -> Differences:
    """Check a worker's kernels, graphs and cache before it serves requests. Every worker runs the
    same check.

    The check clears the cache blocks it used, but its steps do show up in the counters.

    Raises ConfigError if the engine computes a wrong result.
    """
    from vllm.logger import init_logger

    started = time.perf_counter()
    sparrow_layers = layers_of(worker.vllm_config)
    speculator = worker.model_runner.speculator if runtime.is_lossless else None
    if speculator is not None:
        check_addresses(speculator.drafter)
    layers_differ = layers.check_layers(sparrow_layers, runtime, worker.vllm_config.model_config)
    steps_differ = 0.0
    with _unmetered(runtime):
        if speculator is None:
            steps_differ = steps.check_steps(worker, runtime, None, sparrow_layers)
        else:
            planned = speculator.plan
            for kind in _kinds_of_drafts(runtime.decoding):
                speculator.plan = planned._replace(**kind)
                differ = steps.check_steps(worker, runtime, speculator, sparrow_layers)
                steps_differ = max(steps_differ, differ)
            speculator.plan = planned
    milliseconds = 1000 * (time.perf_counter() - started)
    init_logger("vllm.sparrow").info(
        f"Sparrow's self-check passed in {milliseconds:.0f} ms (layers differ by up to "
        f"{layers_differ:.2g}, log-probs by {steps_differ:.2g} times their spread) with "
        f"{versions.known()}"
    )
    return Differences(layers_differ, steps_differ)


def _kinds_of_drafts(decoding: Decoding) -> list[dict[str, bool]]:
    """Return the kinds of drafts an engine uses, as fields of a ``DraftPlan``."""
    without = {"guesses": False, "alone": False}
    judged = {"guesses": True, "alone": False}
    alone = {"guesses": True, "alone": True}
    if not decoding.guess_tokens:
        return [without]
    return [without, judged, alone] if decoding.adapt_draft_tokens else [judged]


def check_addresses(drafter: Drafter) -> None:
    """Check that no tensor has moved since the CUDA graphs of draft steps were captured.

    Raises ConfigError if one has.
    """
    now = drafter.addresses()
    for name, address in drafter.captured_over.items():
        if now.get(name) != address:
            raise refusal(
                f"{name} has moved in memory since the CUDA graphs of draft steps were captured"
            )


@contextmanager
def _unmetered(runtime: Any) -> Iterator[None]:
    """Inside the context, stop measuring ``meter_schedule``."""
    meter = runtime.drafting.meter
    metered = None if meter is None else meter.metered
    if metered is not None:
        meter.metered = None
    try:
        yield
    finally:
        if metered is not None:
            meter.metered = metered
