"""Run one of several processes for ``test_ranks``: ``python -m tests.train.ranks_worker SCENARIO
FOLDER``.
"""

import copy
import json
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

from sparrow.engines.hf import HFEngine
from sparrow.errors import SparrowError
from sparrow.tasks import build_tokenizer
from sparrow.train.config import DistillConfig, OptimizerConfig, RolloutConfig, TrainConfig
from sparrow.train.trainer import Trainer
from tests.conftest import tiny_model
from tests.train.test_trainer import SCHEDULE, EarlyWords

PLAIN = TrainConfig(
    steps=3,
    save_every=1,
    seed=5,
    rollout=RolloutConfig(prompts=3, samples=3, max_new_tokens=16, top_n=8, resample=1),
    optimizer=OptimizerConfig(learning_rate=3e-3, token_budget=100, minibatches=2),
)
DISTILLED = replace(
    PLAIN,
    steps=2,
    distill=DistillConfig(enabled=True, rank=4),
    optimizer=OptimizerConfig(learning_rate=3e-3, token_budget=100, gradient_checkpointing=True),
)


def trainer(
    config: TrainConfig, run_dir: Path, task=None, listener=lambda event, metrics: None, seed=0
) -> Trainer:
    tokenizer = build_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), initializer_range=0.1, seed=seed)
    engine = HFEngine(copy.deepcopy(model), SCHEDULE, eos_ids=[tokenizer.eos_token_id])
    made = replace(config, run_dir=str(run_dir))
    return Trainer(made, model, tokenizer, task or EarlyWords(), engine, SCHEDULE, listener)


def shard_on_cpu() -> None:
    """Make accelerate shard a model without GPUs. torch supports this, but accelerate does not."""
    os.environ["ACCELERATE_USE_FSDP"] = "true"
    make = AcceleratorState.__init__

    def made(self, *args, fsdp_plugin=None, **kwargs):
        make(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None:
            self.distributed_type = PartialState._shared_state["distributed_type"] = (
                DistributedType.FSDP
            )
            self.fsdp_plugin = fsdp_plugin

    AcceleratorState.__init__ = made


def agree(folder: Path) -> None:
    trainer(PLAIN, folder / "ddp").train()


def lose(folder: Path) -> None:
    shard_on_cpu()
    stopping(folder)(
        trainer(DISTILLED, folder / "fsdp", listener=dies_after(folder / "fsdp", step=1)).train
    )


def resume(folder: Path) -> None:
    shard_on_cpu()
    resumed = trainer(replace(DISTILLED, resume=True), folder / "fsdp")
    assert resumed.step == 1 and all(
        type(p).__name__ == "DTensor" for p in resumed.learner.plain_scorer.parameters()
    )
    resumed.train()


def dies_after(run: Path, step: int) -> Callable[[str, dict], None]:
    """Return a listener that kills the second process during the update after this step's
    checkpoint.
    """

    def die(event: str, metrics: dict) -> None:
        if (
            os.environ["RANK"] == "1"
            and event == "update"
            and (run / "checkpoints" / f"step-{step}").exists()
        ):
            os.kill(os.getpid(), signal.SIGKILL)

    return die


def stopping(folder: Path) -> Callable[[Callable[[], object]], None]:
    """Return a function that runs a callable, and writes any error that stopped it to this
    process's file.
    """
    told = []

    def stop(run: Callable[[], object]) -> None:
        try:
            run()
        except SparrowError as error:
            told.append(f"{type(error).__name__}: {error}")
        (folder / f"told-{os.environ['RANK']}.json").write_text(json.dumps(told))

    return stop


def fail(folder: Path) -> None:
    rank, stop = int(os.environ["RANK"]), stopping(folder)

    class FailsElsewhere(EarlyWords):
        """A verifier that fails only in the second process."""

        def problem(self, index: int, seed: int = 0):
            return EarlyWords(fail_from=6 if rank else 10**9).problem(index, seed)

    class CannotBeDrawnElsewhere(EarlyWords):
        """A task that fails only in the second process, after the first step."""

        def problem(self, index: int, seed: int = 0):
            if rank and index >= 7:
                raise ConnectionError("no answer")
            return super().problem(index, seed)

    stop(lambda: trainer(PLAIN, folder / "unequal", seed=rank))
    AcceleratorState._reset_state()
    stop(trainer(replace(PLAIN, save_every=9), folder / "reward", FailsElsewhere()).train)
    AcceleratorState._reset_state()
    stop(trainer(replace(PLAIN, save_every=9), folder / "task", CannotBeDrawnElsewhere()).train)
    AcceleratorState._reset_state()
    full = trainer(PLAIN, folder / "disk")
    save = full.accelerator.save_state

    def full_disk(path: str) -> None:
        if rank == 0 and full.step == 2:
            raise OSError(28, "No space left on device")
        save(path)

    full.accelerator.save_state = full_disk
    stop(full.train)
    AcceleratorState._reset_state()
    stop(trainer(PLAIN, folder / "killed", listener=dies_after(folder / "killed", step=2)).train)


if __name__ == "__main__":
    {"agree": agree, "lose": lose, "resume": resume, "fail": fail}[sys.argv[1]](Path(sys.argv[2]))
    if sys.argv[1] in (
        "lose",
        "fail",
    ):  # after its peer has died, torch's own threads may prevent an orderly exit
        sys.stderr.flush()
        os._exit(0)
