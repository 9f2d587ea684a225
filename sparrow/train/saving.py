"""Save checkpoints to resume from, and models in Hugging Face format."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedTokenizerBase

from sparrow.errors import CheckpointError
from sparrow.run.directory import Row, RunDir, TrainerState
from sparrow.train.config import ExportConfig
from sparrow.train.evaluation import best_step
from sparrow.train.learner import Learner
from sparrow.train.pretrained import save_model, save_tokenizer
from sparrow.train.ranks import Ranks, whole


def save_checkpoint(run_dir: RunDir, learner: Learner, state: TrainerState, keep: int) -> None:
    """Write a checkpoint for ``state.step``, and delete all but the newest ``keep``.

    Raises CheckpointError if the checkpoint can't be written. Earlier ones are left alone.
    """
    ranks = learner.ranks
    phase = "checkpoint"

    def write() -> None:
        try:
            learner.accelerator.save_state(str(folder))
        # how torch reports a full disk
        except (RuntimeError, CheckpointException) as error:
            raise OSError(_cut_short(error, folder)) from error
        if ranks.is_main:
            state.save(folder)

    def finish() -> None:
        run_dir.finish("checkpoints", state.step)
        run_dir.remove("checkpoints", run_dir.steps("checkpoints")[:-keep])

    with uninterrupted(), run_dir.write_errors("checkpoints", state.step):
        folder = ranks.on_main(phase, lambda: run_dir.begin("checkpoints", state.step))
        ranks.gather(phase, write)
        ranks.on_main(phase, finish)


def _cut_short(error: BaseException, folder: Path) -> str:
    """Say why torch couldn't write a file. On a full disk, torch's own message just names a line of
    its source code.
    """
    reason, *_ = str(error).splitlines()
    if "inline_container" not in reason and "PytorchStreamWriter" not in reason:
        return reason
    free = shutil.disk_usage(folder).free
    return f"a file was cut short, with {free / 2**20:,.0f} MB left on the disk"


def load_checkpoint(folder: Path, learner: Learner) -> TrainerState:
    """Restore weights, optimiser state and RNG states from ``folder``, and return the trainer
    state.

    Raises CheckpointError if the files are damaged or the model has a different size.
    """
    try:
        with (
            learner.distiller.everything_trains() if learner.distiller else contextlib.nullcontext()
        ):
            learner.accelerator.load_state(str(folder))
        state = TrainerState.load(folder)
    except Exception as error:
        # torch, safetensors, pickle and accelerate can raise just about anything here.
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        first = lines[0] if lines else ""
        reason = next((line for line in lines if "size mismatch" in line), first)
        raise CheckpointError(
            f"cannot continue from {folder} ({type(error).__name__}: {reason}); if sizes differ, "
            "use the model that the run started with; if files are damaged, remove this folder "
            "to continue from the previous checkpoint"
        ) from error
    learner.restore_settings()
    return state


def export(
    learner: Learner, tokenizer: PreTrainedTokenizerBase, model: Path, adapter: Path
) -> None:
    """Write the trained policy and its tokenizer to ``model``, and the actor's adapter (if any) to
    ``adapter``. The policy is saved in its original checkpoint's dtype.
    """
    distiller = learner.distiller
    ranks = learner.ranks
    # Skip tied weights. Each one shares its tensor with a weight that is written anyway.
    tied = learner.model.all_tied_weights_keys
    parameters = dict(learner.model.named_parameters(remove_duplicate=False))
    buffers = [item for item in learner.model.state_dict().items() if item[0] not in parameters]
    adapter_weights = whole(distiller.adapter_weights().items()) if distiller else ()
    weights, phi = (
        {name: weight.cpu() for name, weight in part if ranks.is_main and name not in tied}
        for part in (itertools.chain(learner.policy_weights(), buffers), adapter_weights)
    )

    def write() -> None:
        save_model(learner.model, weights, model)
        save_tokenizer(tokenizer, model)
        if distiller:
            distiller.save(adapter, phi)

    ranks.on_main("export", write)


class Exports:
    """Exports the policy to ``exports/`` in the run directory, periodically and at each new best
    evaluation.

    Keeps the newest ``keep`` periodic exports and the best export so far. Also keeps the export
    that was best at the last checkpoint, in case the run resumes from that checkpoint. Exports from
    before the run was resumed count as periodic unless they were the best for a while, since
    ``every`` may have been different then.
    """

    def __init__(self, config: ExportConfig, run_dir: RunDir, ranks: Ranks) -> None:
        self.config = config
        self.run_dir = run_dir
        self.ranks = ranks
        self._inherited = frozenset(run_dir.steps("exports"))

    def update(
        self,
        learner: Learner,
        tokenizer: PreTrainedTokenizerBase,
        step: int,
        evaluations: Sequence[Row],
    ) -> None:
        """Export the policy if ``step`` is due and not exported yet, and prune old exports.

        Raises CheckpointError if the export can't be written. Earlier ones are left alone.
        """
        if not (self.config.every or self.config.best):
            return
        best = best_step(evaluations) if self.config.best else None
        phase = "export"
        run_dir = self.run_dir
        due = self._periodic(step) or step == best
        if due and step not in self.ranks.on_main(phase, lambda: run_dir.steps("exports")):
            with uninterrupted(), run_dir.write_errors("exports", step):
                folder = self.ranks.on_main(phase, lambda: run_dir.begin("exports", step))
                export(learner, tokenizer, folder, folder / "adapter")
                self.ranks.on_main(phase, lambda: run_dir.finish("exports", step))
        self.ranks.on_main(phase, lambda: self._prune(best, evaluations))

    def _periodic(self, step: int) -> bool:
        return step > 0 and self.config.every is not None and step % self.config.every == 0

    def _prune(self, best: int | None, evaluations: Sequence[Row]) -> None:
        steps = self.run_dir.steps("exports")
        bests = {best}
        once_best = set[int | None]()
        if self.config.best:
            once_best = {best_step(evaluations[: i + 1]) for i in range(len(evaluations))}
            if checkpoint := self.run_dir.last_checkpoint():
                bests.add(best_step([row for row in evaluations if row["step"] <= checkpoint[0]]))
        regular = [s for s in steps if self._periodic(s) or s in self._inherited - once_best]
        kept = {*regular[-self.config.keep :], *bests}
        self.run_dir.remove("exports", set(steps) - kept)
        if steps:
            self.run_dir.mark_best(best)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Hold back Ctrl-C and SIGTERM until the block ends: a half-finished update is worse than a
    short wait.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, frame: pending.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is signal.default_int_handler
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if pending:
        raise KeyboardInterrupt
