"""The run directory: configuration, metrics, sampled rollouts and checkpoints, written so that a kill loses nothing.

config.json          the resolved configuration
metrics.jsonl        one object per step
rollouts.jsonl       a few responses per step, token by token, with their acceptance rates
checkpoints/step-N/  everything needed to go on after step N
model/               the trained model and its tokenizer, once the run has ended
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparrow.errors import CheckpointError, ConfigError

METRICS, ROLLOUTS, CONFIG = "metrics.jsonl", "rollouts.jsonl", "config.json"


class RunDir:
    """One run's files.

    Raises ConfigError: a directory that already holds a run, unless ``resume``; or nothing to resume.
    """

    def __init__(self, path: str | Path, resume: bool) -> None:
        self.path = Path(path)
        exists = (self.path / METRICS).exists() or self.last_checkpoint() is not None
        if exists and not resume:
            raise ConfigError(f"{self.path} already holds a run; resume it (--resume) or choose another run_dir")
        if resume and self.last_checkpoint() is None:
            raise ConfigError(f"{self.path} has no checkpoint to resume from; start it without --resume")
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)

    def write_config(self, config: Mapping[str, Any]) -> None:
        _write_atomically(self.path / CONFIG, json.dumps(config, indent=1))

    def append(self, name: str, rows: list[Mapping[str, Any]]) -> None:
        """Add JSON lines to ``metrics.jsonl`` or ``rollouts.jsonl``; on disk before this returns.

        Raises CheckpointError: they could not be written.
        """
        try:
            with open(self.path / name, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(f"could not write to {self.path / name} ({error}); {self._remedy()}") from error

    def truncate(self, step: int) -> None:
        """Drop what was logged after ``step``, a half-written last line included."""
        for name in (METRICS, ROLLOUTS):
            path = self.path / name
            if path.exists():
                kept = [line for line in path.read_text(encoding="utf-8").splitlines() if _step_of(line) <= step]
                _write_atomically(path, "".join(line + "\n" for line in kept))

    def last_checkpoint(self) -> tuple[int, Path] | None:
        """Step and folder of the newest complete checkpoint."""
        found = [(int(p.name[5:]), p) for p in (self.path / "checkpoints").glob("step-*")]
        return max(found, default=None)

    def begin_checkpoint(self, step: int) -> Path:
        """An empty folder for the checkpoint of ``step``; ``finish_checkpoint`` makes it one once it is filled."""
        partial = self._partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def finish_checkpoint(self, step: int, keep: int) -> None:
        """Rename the filled folder to ``checkpoints/step-N``, and delete all but the newest ``keep``."""
        partial, target = self._partial(step), self.path / "checkpoints" / f"step-{step}"
        for path in partial.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)
        older = sorted((self.path / "checkpoints").glob("step-*"), key=lambda p: int(p.name[5:]))[:-keep]
        for path in older:
            shutil.rmtree(path, ignore_errors=True)

    @contextlib.contextmanager
    def checkpoint_errors(self, step: int) -> Iterator[None]:
        """Around the writing of a checkpoint.

        Raises CheckpointError: an OSError happened; earlier checkpoints are untouched.
        """
        try:
            yield
        except OSError as error:
            shutil.rmtree(self._partial(step), ignore_errors=True)
            raise CheckpointError(
                f"could not write the checkpoint of step {step} under {self.path} ({error}); {self._remedy()}"
            ) from error

    def _partial(self, step: int) -> Path:
        return self.path / "checkpoints" / f"partial-{step}"

    def _remedy(self) -> str:
        last = self.last_checkpoint()
        return f"the run can be resumed from step {last[0]}" if last else "no earlier checkpoint exists"


def _step_of(line: str) -> float:
    try:
        return json.loads(line)["step"]
    except (json.JSONDecodeError, KeyError, TypeError):
        return float("inf")


def _write_atomically(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(partial, path)
