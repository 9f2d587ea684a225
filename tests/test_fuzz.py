"""Feed every command seeded random input: settings, schedules, damaged files, and failing writes.
Each case must end with the command's usual output, or with a one-sentence error and an exit code,
but never with a traceback.
"""

import contextlib
import errno
import io
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import get_args

import pytest

import sparrow.evaluation.benchmark
import sparrow.run.directory
from sparrow import files
from sparrow.cli import entry

pytestmark = pytest.mark.slow

SEED = 2611
COUNTS = {"settings": 80, "schedules": 90, "files": 36, "writes": 8}  # number of cases of each kind
assert sum(COUNTS.values()) >= 200

SMALL = {
    "demo": "--steps 1 --prompts 1 --run-dir run",
    "train": "--task trace:lines=4 --schedule fixed:1 --steps 1 --rollout.prompts 2 --rollout.samples 2 "
    "--rollout.max-new-tokens 4 --run-dir run",
    "measure": "--task trace:lines=4 --schedule fixed:1 --count 2 --max-new-tokens 4 --out report.json",
    "calibrate": "--task trace:lines=4 --count 2 --max-new-tokens 4 --budgets 1 2 --refine 1 --on-policy 0 "
    "--out schedule.json",
    "eval": "--benchmark trace:lines=4 --k 1 --limit 1 --max-new-tokens 4 --out evaluated",
    "cost": "--schedule fixed:9 --responses 8 --median 200 --cutoff 400",
    "report": "run",
}
ODD = [
    "",
    " ",
    "-1",
    "0",
    "1",
    "2",
    "1.5",
    "-0.5",
    "nan",
    "inf",
    "x",
    "true",
    "None",
    "{}",
    "[]",
    "a:b",
    "a:b=c",
    "é",
]
ODD_JSON = [
    None,
    True,
    False,
    -1,
    0,
    2,
    1.5,
    "",
    "x",
    "all",
    [],
    {},
    [[]],
    [1, "all"],
    [2, 1],
    2**60,
    -(2**70),
]


@pytest.fixture
def place(checkpoint, tmp_path_factory) -> Callable[[], Path]:
    """Return a function that creates and enters a new working directory that contains only a model."""

    def new() -> Path:
        folder = tmp_path_factory.mktemp("fuzz")
        shutil.copytree(checkpoint, folder / "model")
        os.chdir(folder)
        return folder

    before = Path.cwd()
    yield new
    os.chdir(before)


@pytest.fixture(scope="module")
def finished(checkpoint, tmp_path_factory) -> Path:
    """Create a finished run of two steps with its checkpoints."""
    run = tmp_path_factory.mktemp("finished") / "run"
    outcome(
        "train",
        *SMALL["train"].replace("--run-dir run", "").split(),
        "--run-dir",
        str(run),
        "--model",
        checkpoint,
    )
    assert (run / "checkpoints" / "step-1").is_dir()
    return run


def outcome(*argv: str) -> tuple[int, str]:
    """Run a command, and return its exit code and stderr. Exceptions other than SystemExit
    propagate.
    """
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            entry.main(argv)
        except SystemExit as stopped:
            code = int(stopped.code or 0)
    if code == 0:
        assert out.getvalue().strip(), "the command succeeded but printed nothing"
    else:
        said = [line for line in err.getvalue().splitlines() if line.startswith("sparrow: ")]
        # tyro's messages span several lines
        boxed = code == 2 and "For full helptext" in err.getvalue()
        assert code in (1, 2) and (len(said) == 1 or boxed), (
            f"exit code {code}, stderr {err.getvalue()!r}"
        )
        assert "Traceback" not in err.getvalue()
    return code, err.getvalue()


def judge(cases: Iterator[tuple[str, list[str]]], expected: int) -> None:
    """Run all cases, and fail with the names of those that raised an exception."""
    wrong, codes = [], []
    for name, argv in cases:
        try:
            codes.append(outcome(*argv)[0])
        except Exception as error:
            wrong.append(f"{name}: {' '.join(argv)}\n    {type(error).__name__}: {error}")
    assert not wrong, "\n".join([f"{len(wrong)} of {expected} cases", *wrong])
    assert len(codes) == expected and 0 in codes and 1 in codes, (
        f"the cases do not include both success and failure: {codes}"
    )


def options(command: type, section: str = "") -> Iterator[str]:
    """Return every option of a command."""
    for field in fields(command):
        if is_dataclass(field.default):
            yield from options(type(field.default), f"{section}{field.name}.")
        elif field.name != "path":
            yield f"--{section}{field.name.replace('_', '-')}"


def base(command: str) -> list[str]:
    model = [] if command in ("demo", "report") else ["--model", "model"]
    return [command, *model, *SMALL[command].split()]


def test_random_settings_never_cause_a_traceback(place):
    def cases() -> Iterator[tuple[str, list[str]]]:
        rng = random.Random(f"{SEED}/settings")
        commands = {kind.__name__.lower(): [*options(kind)] for kind in get_args(entry.COMMANDS)}
        # left out, because runs of any length are valid, and requests to the hub take a minute to
        # fail
        left_out = ("--steps", "--prompts", "--model", "--engine")
        commands = {
            kind: [name for name in names if name not in left_out]
            for kind, names in commands.items()
        }
        for i in range(COUNTS["settings"]):
            place()
            command = rng.choice(["demo", "train", "measure", "calibrate", "eval", *["cost"] * 8])
            option, value = rng.choice(commands[command]), rng.choice(ODD)
            yield f"settings {i}", [*base(command), option, value]

    judge(cases(), COUNTS["settings"])


def test_random_schedules_never_cause_a_traceback(place):
    def cases() -> Iterator[tuple[str, list[str]]]:
        rng = random.Random(f"{SEED}/schedules")
        whole = {
            "top_k": [1, 2, "all"],
            "bin_tokens": 64,
            "page_size": 16,
            "sink_pages": 1,
            "recent_pages": 2,
            "dense_layers": [0],
            "provenance": {"by": "hand"},
        }
        for i in range(COUNTS["schedules"]):
            folder = place()
            odd = {rng.choice([*whole, "other"]): rng.choice(ODD_JSON)} if i else {}
            text = json.dumps({**whole, **odd})
            damaged = damage(rng, text.encode()) if i and rng.random() < 0.4 else text.encode()
            (folder / "odd.json").write_bytes(damaged)
            command = rng.choice([*["cost"] * 16, "measure", "eval", "train", "calibrate"])
            name = "--layout" if command == "calibrate" else "--schedule"
            yield f"schedule {i} {damaged!r}", [*base(command), name, "odd.json"]

    judge(cases(), COUNTS["schedules"])


def damage(rng: random.Random, data: bytes) -> bytes:
    """Truncate a text, remove or repeat a part of it, or change some bytes."""
    at, end = sorted((rng.randrange(len(data)), rng.randrange(len(data) + 1)))
    kind = rng.choice(["cut", "hole", "bytes", "twice", "empty"])
    noise = bytes(rng.randrange(256) for _ in range(4))
    return {
        "cut": data[:at],
        "hole": data[:at] + data[end:],
        "bytes": data[:at] + noise + data[at + 4 :],
        "twice": data + data,
        "empty": b"",
    }[kind]


def test_damaged_files_never_cause_a_traceback(place, finished):
    def cases() -> Iterator[tuple[str, list[str]]]:
        rng = random.Random(f"{SEED}/files")
        rows = [{"prompt": f" ba = {i}\n", "question": f"ku {i}", "answer": "1"} for i in range(6)]
        for i in range(COUNTS["files"]):
            folder = place()
            shutil.copytree(finished, folder / "run")
            (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            (folder / "options.toml").write_text("steps = 1\n[rollout]\nprompts = 2\nsamples = 2\n")
            resume = ["train", "--resume", "--run-dir", "run", "--steps", "2"]
            new = [*base("train"), "--run-dir", "another"]
            reader, name = rng.choice(
                [
                    (base("measure"), "model/config.json"),
                    (base("cost"), "model/config.json"),
                    (base("eval"), "model/tokenizer.json"),
                    (base("measure"), "model/tokenizer_config.json"),
                    (base("report"), "run/config.json"),
                    (base("report"), "run/metrics.jsonl"),
                    (base("report"), "run/rollouts.jsonl"),
                    (resume, "run/config.json"),
                    (resume, "run/metrics.jsonl"),
                    (resume, "run/checkpoints/step-1/state.json"),
                    (["report", "run/config.json"], "run/config.json"),
                    (
                        [
                            part
                            for part in base("measure")
                            if part not in ("--task", "trace:lines=4")
                        ]
                        + ["--prompts", "rows.jsonl"],
                        "rows.jsonl",
                    ),
                    (
                        [part for part in new if part not in ("--task", "trace:lines=4")]
                        + ["--dataset", "rows.jsonl"],
                        "rows.jsonl",
                    ),
                    ([*new, "--config", "options.toml"], "options.toml"),
                ]
            )
            path = folder / name
            path.write_bytes(damage(rng, path.read_bytes()))
            yield f"file {i} {name}", reader
        for name in ("model.safetensors", "optimizer.bin", "random_states_0.pkl"):
            folder = place()
            shutil.copytree(finished, folder / "run")
            (damaged,) = (folder / "run" / "checkpoints" / "step-1").rglob(name)
            damaged.write_bytes(damaged.read_bytes()[:100])
            yield f"checkpoint {name}", ["train", "--resume", "--run-dir", "run", "--steps", "2"]

    judge(cases(), COUNTS["files"] + 3)


def test_failing_writes_never_cause_a_traceback(place, monkeypatch):
    """Simulate a disk that fills up when the n-th file is flushed or renamed into place."""

    def cases() -> Iterator[tuple[str, list[str]]]:
        rng = random.Random(f"{SEED}/writes")
        for i in range(COUNTS["writes"]):
            place()
            name, left = rng.choice(["fsync", "replace"]), rng.randrange(6)
            command = rng.choice(["demo", "train", "train", "measure", "calibrate", "eval"])
            real = getattr(os, name)

            def full(*args, real=real, **options):
                nonlocal left
                left -= 1
                if left < 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                return real(*args, **options)

            with monkeypatch.context() as patch:
                for module in (files, sparrow.run.directory, sparrow.evaluation.benchmark):
                    patch.setattr(module.os, name, full)
                yield f"write {i}, {name}", base(command)

    judge(cases(), COUNTS["writes"])
