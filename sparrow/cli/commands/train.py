"""``sparrow train``."""

from __future__ import annotations

import copy
import os
import signal
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparrow import files
from sparrow.cli.commands.train_options import TrainOptions
from sparrow.engines.registry import parse_engine
from sparrow.schedule import auto_start

if TYPE_CHECKING:
    from sparrow.decoding import Decoding
    from sparrow.engines.base import Engine
    from sparrow.train.dial import Dial


@dataclass(frozen=True, kw_only=True)
class Train(TrainOptions):
    """Train a model with GRPO on sparse rollouts. --config FILE reads any of these settings from a
    TOML file; a later file overrides an earlier one, and options on the command line override all
    files.
    """

    def run(self) -> None:
        if self.dry_run is not None:
            from sparrow.cli.commands.dry_run import dry_run

            return dry_run(self)
        from accelerate import DistributedType, PartialState

        from sparrow.cli.loading import (
            check_source,
            context_of,
            load_benchmarks,
            load_model,
            load_problems,
            prompt_room,
        )
        from sparrow.cli.terminal import Progress, note, print_rows
        from sparrow.report import summary_rows
        from sparrow.report.summary import SPARSE_BY
        from sparrow.run import RunDir
        from sparrow.train.trackers import check_trackers
        from sparrow.train.trainer import Trainer

        check_source(self.task, self.dataset)
        check_trackers(self.trackers)
        decoding = self.rollout.decoding(self.schedule)
        closed_loop = auto_start(self.schedule) is not None
        self.check_loras()
        files.check_folder(self.run_dir)
        # Check the run directory now, since the trainer would only report errors after the model
        # and engine are loaded.
        RunDir(self.run_dir, self.resume).check_files()
        # Treat SIGTERM like Ctrl-C, so that the run is saved. Cluster schedulers send SIGTERM to
        # end a run, and launchers send it when another of their processes has died.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        # Every process creates its shards from weights it has loaded itself; by default,
        # transformers would load the weights in only one process.
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
            chat=self.chat,
        )
        tell(f"starting the engine {self.engine}")
        with closing(self._start_engine(model, tokenizer, decoding)) as engine:
            Trainer(
                self,
                model,
                tokenizer,
                task,
                engine,
                engine.schedule,  # a server's own draft schedule, unless another one was given
                Progress(self.steps) if main_process else lambda event, metrics: None,
                closed_loop,
                self._dial(model, decoding),
                benchmarks,
            ).train()
        # If the run is not distributed, any process group belongs to the caller.
        if PartialState().distributed_type is not DistributedType.NO:
            PartialState().destroy_process_group()
        if main_process:
            print_rows(f"run {self.run_dir}", summary_rows(self.run_dir))
            print(f"to draw figures, run sparrow report {self.run_dir}")

    def _start_engine(self, model: Any, tokenizer: Any, decoding: Decoding) -> Engine:
        from sparrow.cli.loading import load_engine
        from sparrow.train.ranks import asked_to_shard

        # The actor normally shares the policy's weights. A distilled actor needs its own weights,
        # and so does an actor with a merged LoRA. Sharded weights can't be shared either, since all
        # processes have to work together to use them.
        own = self.distill.enabled or self.lora.r or asked_to_shard()
        actor = (
            copy.deepcopy(model) if own and parse_engine(self.engine).kind.shares_model else model
        )
        return load_engine(
            self.engine, self.model, actor, tokenizer, decoding, self.optimizer.precision
        )

    def _dial(self, model: Any, decoding: Decoding) -> Dial | None:
        if decoding.mode != "auto":
            return None
        from sparrow.cost import MACHINES, ModelShape
        from sparrow.mismatch import Tau
        from sparrow.train.dial import Dial, price

        shape = ModelShape.from_config(model.config.to_dict())
        responses = self.rollout.prompts * self.rollout.samples
        costs = price(
            shape, MACHINES[self.machine], decoding.schedule, decoding.draft_tokens, responses
        )
        return Dial(Tau.chosen(self.tau, self.relative_tau), costs)

    def interrupted(self) -> str:
        from sparrow.run.directory import METRICS

        if not any(Path(self.run_dir, "checkpoints").glob("step-*")):
            # Whatever the directory contains, it is not a run.
            if not Path(self.run_dir, METRICS).exists():
                return "interrupted before the first step; run the same command again to start over"
            return f"interrupted before the first checkpoint; remove {self.run_dir} to start over"
        return (
            f"interrupted; 'sparrow train --resume --run-dir {self.run_dir}' continues from the last "
            "checkpoint"
        )
