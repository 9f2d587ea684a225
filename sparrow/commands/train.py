"""``sparrow train``."""

from __future__ import annotations

import copy
import os
import re
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparrow import files
from sparrow.commands.base import Command
from sparrow.errors import ConfigError
from sparrow.mode import AUTO_ELSEWHERE
from sparrow.train.config import TrainConfig

if TYPE_CHECKING:
    from sparrow.dial import Dial
    from sparrow.engines.base import Engine
    from sparrow.mode import Decoding


@dataclass(frozen=True, kw_only=True)
class Train(TrainConfig, Command):
    """Train a model with GRPO on sparse rollouts. --config FILE takes any of these settings from a
    TOML file; of several files the later wins, and options beside them win over all."""

    # A Hugging Face causal language model, by name or path; reasoner is the small one that comes
    # with Sparrow.
    model: str
    task: str | None = None  # A synthetic task with its options, such as trace:lines=24.
    # In place of a task: files of questions and answers, or known datasets with their options, such
    # as gsm8k:path=train.jsonl. Several are mixed, each drawn from as often as its option weight
    # says (1).
    dataset: tuple[str, ...] = ()
    # What the actor may read: dense, fixed:PAGES, a published table such as qwen3-4b-0.86, or a
    # JSON file. auto starts dense and follows the measured p5 so that it holds tau; auto:SCHEDULE
    # starts from any of these, in its layout. With --rollout.mode lossless there is none.
    schedule: str = "dense"
    # What generates the rollouts: hf, vllm, vllm with options (vllm:gpu_memory_utilization=0.5), or
    # http://host:port, several of them with commas between.
    engine: str = "hf"
    # Load nothing: check settings, data and the model's config.json, and predict memory and hours
    # on this machine: a100, h100, h200 or b200 with options, as in h200:gpus=8,median=9000
    # (responses' median length; unset: 0.43 of rollout.max-new-tokens) or acceptance=0.95 (of
    # lossless drafts).
    dry_run: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rollout.mode == "auto" and self.engine != "hf":
            raise ConfigError(f"engine is {self.engine!r}, but {AUTO_ELSEWHERE}")

    def run(self) -> None:
        if self.dry_run is not None:
            from sparrow.commands.dry_run import dry_run

            return dry_run(self)
        from accelerate import DistributedType, PartialState

        from sparrow.loading import (
            context_of,
            load_benchmarks,
            load_model,
            load_problems,
            prompt_room,
        )
        from sparrow.report import summary_rows
        from sparrow.report.summary import SPARSE_BY
        from sparrow.run import RunDir
        from sparrow.terminal import Progress, note, print_rows
        from sparrow.train.trackers import check_trackers
        from sparrow.train.trainer import Trainer

        check_trackers(self.trackers)
        decoding = self.rollout.decoding(self.schedule)
        closed_loop = re.match(r"auto(:|$)", self.schedule) is not None
        files.check_folder(self.run_dir)
        RunDir(
            self.run_dir, self.resume
        )  # refuses what the trainer would refuse once model and engine are loaded
        # Schedulers end a run with SIGTERM, as do launchers of which another process died; save
        # then as after Ctrl-C.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # Every process takes its shards from weights that it loaded itself; otherwise transformers
        # would leave the weights empty in all processes but one.
        os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] = "false"
        main_process = PartialState().is_main_process
        tell: Any = note if main_process else lambda text: None
        if decoding.mode == "dense" and not closed_loop:
            tell(f"rollouts are dense; {SPARSE_BY}")
        tell(f"loading {self.model}")
        model, tokenizer = load_model(self.model)
        room = prompt_room(context_of(model), self.engine, self.rollout.max_new_tokens)
        tell(f"reading {self.task or ', '.join(self.dataset)}")
        task = load_problems(
            self.task, self.dataset, tokenizer, room, self.reward.function, self.chat
        )
        limit = self.eval.max_new_tokens or self.rollout.max_new_tokens
        benchmarks = load_benchmarks(
            self.eval.benchmark,
            self.eval.limit,
            tokenizer,
            prompt_room(context_of(model), self.engine, limit),
            self.reward.function,
            self.chat,
        )
        tell(f"starting the engine {self.engine}")
        engine = self._start_engine(model, tokenizer, decoding)
        try:
            Trainer(
                self,
                model,
                tokenizer,
                task,
                engine,
                decoding.schedule,
                Progress(self.steps) if main_process else lambda event, metrics: None,
                closed_loop,
                self._dial(model, decoding),
                benchmarks,
            ).train()
        finally:
            engine.close()
        if (
            PartialState().distributed_type is not DistributedType.NO
        ):  # else a group, if any, is not ours
            PartialState().destroy_process_group()
        if main_process:
            print_rows(f"run {self.run_dir}", summary_rows(self.run_dir))
            print(f"figures: sparrow report {self.run_dir}")

    def _start_engine(self, model: Any, tokenizer: Any, decoding: Decoding) -> Engine:
        from sparrow.loading import load_engine
        from sparrow.train.ranks import asked_to_shard

        # The actor needs its own copy of the weights if it is distilled, if a LoRA is merged for
        # it, or if the policy's are sharded, since those need all processes; otherwise the two
        # share weights.
        own = self.distill.enabled or self.lora.r or asked_to_shard()
        actor = copy.deepcopy(model) if own and self.engine == "hf" else model
        return load_engine(
            self.engine, self.model, actor, tokenizer, decoding, self.optimizer.precision
        )

    def _dial(self, model: Any, decoding: Decoding) -> Dial | None:
        if decoding.mode != "auto":
            return None
        from sparrow.cost import MACHINES, ModelShape
        from sparrow.dial import Dial, price
        from sparrow.mismatch import Tau

        shape, responses = (
            ModelShape.from_config(model.config.to_dict()),
            self.rollout.prompts * self.rollout.samples,
        )
        costs = price(
            shape, MACHINES[self.machine], decoding.schedule, decoding.draft_tokens, responses
        )
        return Dial(Tau.chosen(self.tau, self.relative_tau), costs)

    def interrupted(self) -> str:
        from sparrow.run.directory import METRICS

        if not any(Path(self.run_dir, "checkpoints").glob("step-*")):
            if not Path(
                self.run_dir, METRICS
            ).exists():  # nothing of a run is there, but perhaps other files are
                return "interrupted before the first step; the same command starts again"
            return f"interrupted before the first checkpoint; remove {self.run_dir} to start again"
        return f"interrupted; 'sparrow train --resume --run-dir {self.run_dir}' goes on from the last checkpoint"
