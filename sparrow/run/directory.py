"""The files of a run directory, written so that nothing is lost if the process is killed.

config.json             ``RunConfig``
lock                    locked by the training process; holds its name
metrics.jsonl           one object per step, with at least the ``RECORDED`` keys;
                        docs/run-directory.md lists all keys
evaluations.jsonl       one object per evaluation: the step, and scores by benchmark
rollouts.jsonl          one ``LoggedResponse`` per line
checkpoints/step-N/     everything needed to continue after step N; ``state.json`` is a
                        ``TrainerState``
exports/step-N/         the model after step N and its tokenizer; exports/best links to the best
model/, adapter/        the trained model and its tokenizer, and the actor's LoRA, once the run
                        has ended
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import socket
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from pathlib import Path
from typing import IO, Any, Literal

from sparrow.errors import CheckpointError, ConfigError
from sparrow.files import write_parts, write_text
from sparrow.schedule import SparsitySchedule

CONFIG = "config.json"
METRICS = "metrics.jsonl"
ROLLOUTS = "rollouts.jsonl"
STATE = "state.json"
LOCK = "lock"
EVALUATIONS = "evaluations.jsonl"
# keys in every step's record
RECORDED = {
    "step",
    "reward",
    "response",
    "mismatch",
    "correction",
    "kv",
    "seconds",
    "schedule",
}

Row = Mapping[str, Any]
# the subfolders for checkpoints and exports
Kind = Literal["checkpoints", "exports"]


@dataclass(frozen=True)
class RunConfig:
    """The contents of ``config.json``."""

    train: Row  # the resolved settings
    schedule: SparsitySchedule  # the schedule the run was last started with
    # one entry for each resume with different settings: "step" is the last step before the resume,
    # and "changed" maps each changed setting's name to [before, after]
    resumed: Sequence[Row] = ()
    # problem count and digest for the training data (``train``) and for each benchmark; None in
    # runs from older versions
    data: Row | None = None

    def save(self, run_dir: Path) -> None:
        record = {
            "train": self.train,
            "schedule": self.schedule.to_dict(),
            "resumed": list(self.resumed),
            "data": self.data,
        }
        write_text(run_dir / CONFIG, json.dumps(record, indent=1))

    @classmethod
    def load(cls, run_dir: Path) -> RunConfig:
        """Read ``config.json``. Raises ConfigError if ``run_dir`` is not a run directory, or the
        file is damaged.
        """
        path = run_dir / CONFIG
        if not path.is_file():
            raise ConfigError(
                f"{run_dir} is not a run directory, because it has no {CONFIG}; pass the "
                "directory of a run"
            )
        record = parse(path.read_bytes(), str(path), "restore it from a copy")
        if missing := {"train", "schedule"} - set(record):
            raise ConfigError(f"{path} has no {min(missing)!r}, so sparrow train did not write it")
        return cls(
            record["train"],
            SparsitySchedule.from_dict(record["schedule"]),
            record.get("resumed", ()),
            record.get("data"),
        )


@dataclass(frozen=True)
class LoggedResponse:
    """A response logged token by token. Each step logs only a few responses."""

    step: int
    problem: str  # the problem's id
    prompt: str
    # what each token adds to the text; a character that spans several tokens belongs to the first
    tokens: Sequence[str]
    # lower bound on each token's acceptance rate; None for tokens sampled by the dense policy
    acceptance: Sequence[float | None]
    reward: float
    finish_reason: str
    answer: str | None = None  # the expected answer, if it is text
    ids: Sequence[int] | None = None  # token ids; None in runs from older versions
    # upper bound on each token's acceptance rate; None in runs from older versions
    acceptance_upper: Sequence[float | None] | None = None

    @classmethod
    def from_row(cls, row: Row, where: str) -> LoggedResponse:
        """Build a response from a line of ``rollouts.jsonl``. Raises ConfigError if a field is
        missing.
        """
        names = [field.name for field in fields(cls)]
        # Older runs lack some fields.
        if missing := [
            name
            for name in names
            if name not in row and name not in ("answer", "ids", "acceptance_upper")
        ]:
            raise ConfigError(
                f"{where} has no {missing[0]!r}; restore the line from a copy or remove it"
            )
        return cls(**{name: row[name] for name in names if name in row})


@dataclass(frozen=True)
class TrainerState:
    """Everything in a checkpoint except the weights, optimiser state and RNG states."""

    step: int  # finished steps
    cursor: int  # index of the next problem
    schedule: SparsitySchedule  # schedule for the next rollouts
    steering: Row  # state of everything that can change the schedule

    def save(self, folder: Path) -> None:
        record = {"step": self.step, "cursor": self.cursor, "schedule": self.schedule.to_dict()}
        (folder / STATE).write_text(
            json.dumps({**record, "steering": self.steering}), encoding="utf-8"
        )

    @classmethod
    def load(cls, folder: Path) -> TrainerState:
        record = parse((folder / STATE).read_bytes(), str(folder / STATE))
        return cls(
            record["step"],
            record["cursor"],
            SparsitySchedule.from_dict(record["schedule"]),
            record["steering"],
        )


class RunDir:
    """The files of one run.

    Raises ConfigError if the directory already contains a run (without ``resume``) or has no
    checkpoint (with ``resume``).
    """

    def __init__(self, path: str | Path, resume: bool) -> None:
        self.path = Path(path)
        self._resume = resume
        self._lock: IO[str] | None = None
        self._entered = False
        self._check()

    def _check(self) -> None:
        can_resume = self.last_checkpoint() is not None
        exists = can_resume or (self.path / METRICS).exists()
        if exists and not can_resume:
            raise ConfigError(
                f"{self.path} already contains a run, which ended before its first checkpoint and "
                "cannot be resumed; remove this folder or choose another run_dir, and start without "
                "--resume"
            )
        if exists and not self._resume:
            raise ConfigError(
                f"{self.path} already contains a run; resume it (--resume) or choose another run_dir"
            )
        if self._resume and not can_resume:
            raise ConfigError(
                f"{self.path} has no checkpoint to resume from; start the run without --resume"
            )

    def check_files(self) -> None:
        """Check that the run would not overwrite or continue files of something else, such as a
        model's ``config.json``.

        Raises ConfigError if the directory contains such files, and no run or attempt at one.
        """
        if self._resume or any((self.path / name).exists() for name in (METRICS, LOCK)):
            return
        for name in (CONFIG, ROLLOUTS, EVALUATIONS, "model"):
            if (self.path / name).exists():
                raise ConfigError(
                    f"{self.path} contains {name}, but no run; choose another run_dir, such as a new "
                    "folder"
                )

    def lock(self) -> None:
        """Keep other runs out of the directory until ``release`` is called or this process ends,
        even if it is killed.

        Raises ConfigError if another run is using the directory, or has used it since this object
        was created.
        """
        if self._lock is not None:
            return
        (self.path / "checkpoints").mkdir(parents=True, exist_ok=True)
        # The file stays open as long as it is locked.
        file = open(self.path / LOCK, "a+", encoding="utf-8")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            file.close()
            raise ConfigError(
                f"{self.path} is in use by {holder}; "
                "wait until that run has ended, or choose another run_dir"
            ) from error
        try:
            if not self._entered:
                self._check()
        except ConfigError:
            file.close()
            raise
        self._entered = True
        file.truncate(0)
        file.write(
            f"process {os.getpid()} on {socket.gethostname()}, since "
            f"{datetime.now():%Y-%m-%d %H:%M:%S}\n"
        )
        file.flush()
        self._lock = file

    def release(self) -> None:
        """Release the lock, so that other runs can use the directory."""
        if self._lock is not None:
            self._lock.close()
            self._lock = None

    def append_step(self, metrics: Row, responses: Sequence[LoggedResponse]) -> None:
        """Log a step: add a line to ``metrics.jsonl``, and the step's responses to
        ``rollouts.jsonl``. The lines are on disk when this method returns.

        Raises CheckpointError if the lines could not be written.
        """
        assert set(metrics) >= RECORDED, (
            f"step {metrics.get('step')} lacks {RECORDED - set(metrics)}"
        )
        self._append(METRICS, [metrics])
        self._append(ROLLOUTS, [asdict(response) for response in responses])

    def append_evaluation(self, row: Row) -> None:
        """Log an evaluation. Its line is on disk when this method returns. Raises CheckpointError
        if the line could not be written.
        """
        self._append(EVALUATIONS, [row])

    def evaluations(self) -> list[Row]:
        """Read all logged evaluations. Raises ConfigError if the file is damaged."""
        return [row for row, _ in read_rows(self.path / EVALUATIONS)]

    def _append(self, name: str, rows: Sequence[Row]) -> None:
        try:
            with open(self.path / name, "a", encoding="utf-8") as file:
                file.writelines(json.dumps(row) + "\n" for row in rows)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"could not write to {self.path / name} ({error}); {self._remedy()}"
            ) from error

    def logged_after(self, step: int) -> list[dict[str, Any]]:
        """Read the metrics of steps logged after ``step``, ignoring an incomplete line."""
        path = self.path / METRICS
        lines = path.read_bytes().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if step < _step_of(line) < float("inf")]

    def has_logged(self, step: int) -> bool:
        """Return whether the metrics of a step are in the log."""
        path = self.path / METRICS
        lines = path.read_bytes().splitlines() if path.exists() else []
        return any(_step_of(line) == step for line in lines)

    def truncate(self, step: int) -> None:
        """Remove everything logged after ``step``, including an incomplete last line and later
        exports.
        """
        self.remove("exports", [later for later in self.steps("exports") if later > step])
        for name in (METRICS, EVALUATIONS, ROLLOUTS):
            path = self.path / name
            if path.exists():
                write_parts(path, _lines_up_to(path, step))

    def restart(self) -> None:
        """Remove what an attempt that ended before its first step left behind: the evaluation and
        export of step 0. Other files are left alone.
        """
        if not (self.path / CONFIG).exists():  # there was no attempt
            return
        self.remove("exports", [0])
        best = self.path / "exports" / "best"
        if best.is_symlink() and not best.exists():
            best.unlink()
        path = self.path / EVALUATIONS
        if path.exists():
            lines = path.read_bytes().splitlines(keepends=True)
            write_parts(path, [x for x in lines if x.endswith(b"\n") and _step_of(x) != 0])

    def last_checkpoint(self) -> tuple[int, Path] | None:
        """Return the step and folder of the newest complete checkpoint, or None."""
        steps = self.steps("checkpoints")
        return (steps[-1], self._folder("checkpoints", steps[-1])) if steps else None

    def steps(self, kind: Kind) -> list[int]:
        """List the steps of all complete checkpoints or exports in ascending order. Folders with
        other names, such as copies, are ignored.
        """
        names = (path.name[5:] for path in (self.path / kind).glob("step-*"))
        return sorted(int(name) for name in names if name.isdecimal())

    def remove(self, kind: Kind, steps: Iterable[int]) -> None:
        for step in steps:
            shutil.rmtree(self._folder(kind, step), ignore_errors=True)

    def begin(self, kind: Kind, step: int) -> Path:
        """Create an empty folder for the files of ``step``. ``finish`` gives it its final name."""
        partial = self._partial(kind, step)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def finish(self, kind: Kind, step: int) -> None:
        """Rename the folder of ``step`` to ``step-N``. Call this once the files are written."""
        partial = self._partial(kind, step)
        target = self._folder(kind, step)
        for path in partial.rglob("*"):
            if path.is_file():
                with open(path, "rb") as file:
                    os.fsync(file.fileno())
        shutil.rmtree(target, ignore_errors=True)
        os.replace(partial, target)

    def mark_best(self, step: int | None) -> None:
        """Link ``exports/best`` to the export of ``step``, or remove the link if there is no such
        export.
        """
        link = self.path / "exports" / "best"
        fresh = self.path / "exports" / "partial-best"
        if step is None or not self._folder("exports", step).is_dir():
            link.unlink(missing_ok=True)
            return
        fresh.unlink(missing_ok=True)
        fresh.symlink_to(f"step-{step}")
        os.replace(fresh, link)

    @contextlib.contextmanager
    def write_errors(self, kind: Kind, step: int) -> Iterator[None]:
        """Context that cleans up if writing a checkpoint or an export fails.

        Raises CheckpointError if an OSError is raised inside. Earlier checkpoints are left alone.
        """
        try:
            yield
        except OSError as error:
            shutil.rmtree(self._partial(kind, step), ignore_errors=True)
            raise CheckpointError(
                f"could not write the {kind[:-1]} for step {step} under {self.path} "
                f"({error}); {self._remedy()}"
            ) from error

    def _folder(self, kind: Kind, step: int) -> Path:
        return self.path / kind / f"step-{step}"

    def _partial(self, kind: Kind, step: int) -> Path:
        return self.path / kind / f"partial-{step}"

    def _remedy(self) -> str:
        last = self.last_checkpoint()
        return (
            f"fix the cause, and resume the run from step {last[0]}"
            if last
            else f"fix the cause, remove {self.path}, and start the run again"
        )


def read_rows(path: Path) -> Iterator[tuple[Row, str]]:
    """Yield the objects in a JSON Lines file. Each object comes with its location, such as ``line 3
    of PATH``, for use in messages.

    Every object must have a step. An incomplete last line is skipped: either the line is still
    being written, or its writer was killed.

    Raises ConfigError if a line is damaged or has no step.
    """
    if not path.is_file():
        return
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            where = f"line {number} of {path}"
            try:
                row = parse(line, where)
            except ConfigError:
                if line.endswith(b"\n"):
                    raise
                return
            if not isinstance(row.get("step"), int):
                raise ConfigError(f"{where} has no step, which every line needs; remove the line")
            yield row, where


def parse(text: bytes, where: str, remedy: str = "restore it from a copy, or remove it") -> Row:
    """Read the JSON object in ``text``. Raises ConfigError if ``text`` is not a JSON object."""
    try:
        content = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{where} is not valid JSON ({error}); {remedy}") from error
    if not isinstance(content, dict):
        raise ConfigError(
            f"{where} contains a value of type {type(content).__name__}, expected a JSON object; "
            f"{remedy}"
        )
    return content


def _lines_up_to(path: Path, step: int) -> Iterator[bytes]:
    """Yield the lines of a JSON Lines file that were logged up to ``step``. The file is read line
    by line, because the responses of a whole run may take many gigabytes.

    Damaged lines, which may not even be text, count as logged after ``step``.
    """
    with open(path, "rb") as file:
        for line in file:
            if _step_of(line) <= step:
                yield line.rstrip(b"\r\n") + b"\n"


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return float("inf")
