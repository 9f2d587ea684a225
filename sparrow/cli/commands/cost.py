"""``sparrow cost``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from sparrow.cli.commands.base import Command
from sparrow.decoding import DraftWeights
from sparrow.errors import ConfigError
from sparrow.schedule import LandmarkDtype, SparsitySchedule
from sparrow.settings import Count, Positive, Probability, Share, require

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from sparrow.cost import ModelShape
    from sparrow.cost.cluster import Cluster

SAMPLES = 8
ACCEPTANCE = 0.94
MOST_RESPONSES = 10_000  # simulating a rollout of this many takes half a minute


@dataclass(frozen=True)
class Cost(Command):
    """Predict rollout and step times on a given GPU for each mode: dense, lossy under a schedule,
    and lossless.
    """

    # The model: qwen3-1.7b, qwen3-4b, qwen3-8b, qwen3-14b, qwen3-30b-a3b, qwen3-next-80b-a3b,
    # olmo-3-7b, olmo-3-32b, gemma-3-27b, reasoner, smollm2, the name of a model on the hub, or the
    # path of a config.json.
    model: str
    schedule: str  # fixed:PAGES, a published table such as qwen3-4b-0.86, or a JSON file.
    gpu: Literal["a100", "h100", "h200", "b200"] = "h200"  # The kind of GPU.
    # Number of GPUs. With more than one, the prediction covers memory and each phase of a step.
    gpus: Count = 1
    tensor_parallel: Count = 1  # GPUs per engine.
    responses: Count = 240  # Responses per rollout, over all GPUs.
    # Responses per prompt, to predict the run's hours. Defaults to 8.
    samples: Count | None = None
    # On several GPUs: number of prompts in the whole run, to predict the run's hours.
    examples: Count | None = None
    median: Positive = 14000  # Median response length in tokens; lengths are log-normal.
    cutoff: Count = 32768  # Longest response in tokens.
    prompt: Count = 256  # Prompt length in tokens.
    max_batch: Count = 256  # Maximum number of sequences decoded together.
    # Lossless: mean acceptance of drafts that read 1,024 tokens, as measured by sparrow measure
    # --mode lossless. The rejected share is assumed to be proportional to the draft budget to the
    # power of -0.7. Defaults to 0.94.
    acceptance: Probability | None = None
    # How landmarks are stored in every mode. Defaults to what the schedule specifies (auto in the
    # published schedules).
    landmark_dtype: LandmarkDtype | None = None
    # Lossless, on one GPU: the weights that drafts use. fp8 halves the weight bytes that a draft
    # reads, but the copy takes up memory. With fp8, set acceptance to the value measured with fp8
    # drafts.
    draft_weights: DraftWeights = "auto"
    # On one GPU: the rollout's share of a dense step's time. If unset, training time is predicted
    # from FLOPs.
    rollout_share: Share | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        several = self.gpus > 1
        share = self.rollout_share
        require(
            self,
            "tensor_parallel",
            several or self.tensor_parallel == 1,
            f"1 on one GPU; set gpus to a multiple of {self.tensor_parallel}",
        )
        require(
            self,
            "responses",
            self.responses <= MOST_RESPONSES,
            f"at most {MOST_RESPONSES:,}, because each of them is simulated",
        )
        require(
            self,
            "median",
            self.median <= self.cutoff,
            f"at most {self.cutoff:,}, the longest response (cutoff)",
        )
        require(
            self,
            "examples",
            several or self.examples is None,
            "left out on one GPU, because hours are only predicted for several GPUs",
        )
        require(
            self,
            "samples",
            self.samples is None or self.examples is not None,
            "left out unless examples is set, because it only changes the predicted hours",
        )
        require(
            self,
            "rollout_share",
            share is None or not several,
            "left out on several GPUs, where every phase is predicted",
        )
        require(
            self,
            "draft_weights",
            self.draft_weights == "auto" or not several,
            "auto on several GPUs",
        )

    def run(self) -> None:
        from sparrow import cost as one_gpu
        from sparrow.cli.terminal import print_rows
        from sparrow.cost import MACHINES, cluster, drafters
        from sparrow.cost.lossless import predict_lossless
        from sparrow.cost.lossless import rows as lossless_rows

        shape = find_shape(self.model)
        self._check_context(shape)
        self._check_lossless(shape)
        lengths = one_gpu.response_lengths(self.median, self.cutoff, self.responses)
        schedule = load_schedule(self.schedule)
        machine = MACHINES[self.gpu]
        if self.landmark_dtype is not None:
            schedule = schedule.replace(landmark_dtype=self.landmark_dtype)
        if self.gpus > 1:
            gpus = cluster.Cluster(machine, self.gpus, self.tensor_parallel)
            rows = self._several_gpus(shape, gpus, lengths, schedule)
        else:
            batching = (self.prompt, self.max_batch)
            lossy = one_gpu.predict(
                shape, machine, lengths, schedule, *batching, rollout_share=self.rollout_share
            )
            lossless = None
            if not shape.is_hybrid:
                lossless = predict_lossless(
                    shape,
                    machine,
                    lengths,
                    lossy.dense,
                    self._acceptance,
                    *batching,
                    landmark_dtype=schedule.landmark_dtype,
                    draft_weights=self.draft_weights,
                )
            rows = lossless_rows(lossy, lossless)
            if lossless is not None:
                rows += drafters.rows(shape, machine, lengths, lossy.dense, lossless, self.prompt)
        machines = f"{self.gpus} {self.gpu.upper()}"
        responses = f"{self.responses} responses of {lengths.mean():,.0f} tokens"
        print_rows(f"{self.model} on {machines}, {responses}, {self.schedule}", rows)

    def _several_gpus(
        self,
        shape: ModelShape,
        gpus: Cluster,
        lengths: NDArray[np.int64],
        schedule: SparsitySchedule,
    ) -> list[tuple[str, str]]:
        """Plan a whole step on several GPUs, or only its rollout if training doesn't fit. Return
        (name, value) pairs for printing.
        """
        from sparrow.cost import cluster

        shortage = cluster.training_shortage(shape, gpus, self.prompt + int(lengths.max()))
        planned = cluster.plan(
            shape,
            gpus,
            lengths,
            schedule,
            self.prompt,
            self.max_batch,
            acceptance=None if shape.is_hybrid else self._acceptance,
            trains=shortage is None,
        )
        if shortage is not None:
            without = (
                "Scoring, the update, the whole step and the run's hours are left out, and engines "
                f"get all memory, because {shortage}; use more GPUs."
            )
            return [*cluster.rollout_rows(planned), ("training", without)]
        steps = None
        if self.examples is not None:
            steps = math.ceil(self.examples * (self.samples or SAMPLES) / self.responses)
        return cluster.rows(planned, steps)

    @property
    def _acceptance(self) -> float:
        return ACCEPTANCE if self.acceptance is None else self.acceptance

    def _check_lossless(self, shape: ModelShape) -> None:
        """Check that no option for lossless mode is set if the model doesn't support this mode.
        Raises ConfigError if one is.
        """
        reason = f"for {self.model}, because lossless mode needs full attention in all layers"
        supported = not shape.is_hybrid
        require(self, "acceptance", supported or self.acceptance is None, f"left out {reason}")
        require(self, "draft_weights", supported or self.draft_weights == "auto", f"auto {reason}")

    def _check_context(self, shape: ModelShape) -> None:
        """Check that the longest sequence fits the model's context. Raises ConfigError if not."""
        longest = self.prompt + self.cutoff
        if shape.context is not None and longest > shape.context:
            raise ConfigError(
                f"a prompt of {self.prompt:,} tokens and a response of {self.cutoff:,} (cutoff) do "
                f"not fit in the {shape.context:,}-token context of {self.model}; lower cutoff "
                "or prompt, or pass a config.json with a larger max_position_embeddings"
            )


def load_schedule(spec: str) -> SparsitySchedule:
    """Load a schedule.

    Raises the same errors as ``SparsitySchedule.load``, and ConfigError if the file is a
    measurement.
    """
    try:
        return SparsitySchedule.load(spec)
    except ConfigError as error:
        from sparrow.report import is_measurement

        if not is_measurement(Path(spec)):
            raise
        raise ConfigError(
            f"{spec} is a measurement from sparrow measure, not a schedule; pass a schedule from "
            "sparrow calibrate, a published table or fixed:PAGES"
        ) from error


def is_known(model: str) -> bool:
    """Return whether ``model`` is a name in ``SHAPES`` rather than a path."""
    from sparrow.cost import SHAPES

    return not Path(model).exists() and _short(model) in SHAPES


def _short(model: str) -> str:
    """Shorten a name to the form used in ``SHAPES``."""
    return model.removeprefix("Qwen/").lower()


def find_shape(model: str) -> ModelShape:
    """Return a model's shape. ``model`` is the model's folder or ``config.json``, a name in
    ``SHAPES``, ``reasoner``, ``smollm2``, or a name on the hub.

    Raises the same errors as ``ModelShape.from_config`` and ``model_path``, and ConfigError if the
    hub can't be reached.
    """
    from sparrow.cost import SHAPES, ModelShape

    if Path(model).exists():
        return ModelShape.from_config(model)
    if is_known(model):
        return SHAPES[_short(model)]
    from sparrow.cli.loading import OWN_NAMES, model_path
    from sparrow.engines.hf import load_config

    if model in OWN_NAMES:
        return ModelShape.from_config(model_path(model))
    try:
        config = load_config(model)
    except ConfigError as error:
        known = ", ".join((*SHAPES, *OWN_NAMES))
        raise ConfigError(f"{error}; the built-in models are {known}") from error
    return ModelShape.from_config(config)
