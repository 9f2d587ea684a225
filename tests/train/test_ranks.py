"""Test that several processes train like a single one, report the same error if something fails,
and detect a dead process.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from sparrow.train.ranks import Ranks, divide
from tests.ports import free_port
from tests.train.ranks_worker import DISTILLED, PLAIN, trainer
from tests.train.test_trainer import metrics_of

pytestmark = pytest.mark.slow

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=30)


@given(LENGTHS, st.integers(1, 9))
def test_work_is_divided_evenly_between_processes(lengths, count):
    parts = divide(lengths, count)
    assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
    tokens = [sum(lengths[i] for i in part) for part in parts]
    assert max(tokens) - min(tokens) <= max(lengths)


@given(LENGTHS, st.integers(1, 5), st.integers(1, 500))
def test_all_processes_run_the_same_number_of_passes_and_each_row_counts_once(
    lengths, count, budget
):
    rows = [3 * i for i in range(len(lengths))]
    sparse = [0] * (3 * len(lengths))
    for row, length in zip(rows, lengths, strict=True):
        sparse[row] = length
    passes = []
    for rank in range(count):
        process = Ranks.__new__(Ranks)
        process.rank, process.count = rank, count
        passes.append(process.micro_batches(rows, sparse, budget))
    assert len({len(groups) for groups in passes}) == 1
    assert (
        sorted(row for groups in passes for group, counts in groups if counts for row in group)
        == rows
    )
    for group, counts in (g for groups in passes for g in groups):
        assert group and (len(group) == 1 or max(sparse[i] for i in group) * len(group) <= budget)
        assert counts or sparse[group[0]] == min(lengths)


def environments(count: int) -> list[dict[str, str]]:
    """Return the environment variables that a launcher would set for each of ``count``
    processes.
    """
    world = dict(
        WORLD_SIZE=str(count),
        LOCAL_WORLD_SIZE=str(count),
        MASTER_ADDR="localhost",
        MASTER_PORT=str(free_port()),
    )
    own = [dict(RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)]
    return [
        {**os.environ, **world, **rank, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
        for rank in own
    ]


def launch(scenario: str, folder: Path, count: int = 2) -> list[tuple[int, str]]:
    """Return the exit code and standard error of each of ``count`` processes."""
    command = [sys.executable, "-m", "tests.train.ranks_worker", scenario, str(folder)]
    processes = [
        subprocess.Popen(
            command, stderr=subprocess.PIPE, text=True, env=world, cwd=Path(__file__).parents[2]
        )
        for world in environments(count)
    ]
    try:
        errors = [process.communicate(timeout=900)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    return [(process.returncode, error) for process, error in zip(processes, errors, strict=True)]


def numbers(row: dict, prefix: str = "") -> dict[str, float]:
    found = {}
    for key, value in row.items() if isinstance(row, dict) else enumerate(row):
        if isinstance(value, dict | list):
            found |= numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            found[f"{prefix}{key}"] = value
    return found


def assert_same_run(one: Path, other: Path) -> None:
    """Check that samples are the same, and that numbers are the same up to the order of float32
    sums.
    """
    samples = [
        [json.loads(line) for line in Path(run, "rollouts.jsonl").read_text().splitlines()]
        for run in (one, other)
    ]
    for a, b in zip(*samples, strict=True):
        assert a.pop("acceptance") == pytest.approx(
            b.pop("acceptance"), abs=2e-4
        )  # rounded to 1e-4
        assert a == b
    rows = [[numbers(row) for row in metrics_of(run)] for run in (one, other)]
    assert len(rows[0]) == len(rows[1])
    for a, b in zip(*rows, strict=True):
        a, b = (
            {k: v for k, v in row.items() if "imbalance" not in k and "histogram" not in k}
            for row in (a, b)
        )
        assert a == pytest.approx(b, rel=1e-3, abs=1e-5)
    weights = [load_file(run / "model" / "model.safetensors") for run in (one, other)]
    # Adam takes a full step even if a gradient is only a rounding error.
    gaps = torch.cat([(weights[0][name] - weights[1][name]).abs().flatten() for name in weights[0]])
    assert gaps.quantile(0.99) < 2e-5 and weights[0].keys() == weights[1].keys()


def test_two_processes_train_like_one(tmp_path):
    ended = launch("agree", tmp_path)
    assert [code for code, _ in ended] == [0, 0], ended[0][1][-3000:] + ended[1][1][-3000:]
    trainer(PLAIN, tmp_path / "alone").train()
    assert_same_run(tmp_path / "alone", tmp_path / "ddp")
    imbalance = metrics_of(tmp_path / "ddp")[0]["imbalance"]
    assert 1 <= imbalance["rollout"] <= 2 and 1 <= imbalance["score"] <= 2


def test_a_sharded_run_resumes_exactly_after_losing_a_process(tmp_path):
    """Compare a run that uses FSDP2, distillation and gradient checkpointing with a run in one
    process.
    """
    (code, error), (killed, _) = launch("lose", tmp_path)
    assert (code, killed) == (0, -9), error[-3000:]
    (told,) = json.loads((tmp_path / "told-0.json").read_text())
    assert told.startswith("ProcessLost: a process of this run died") and "with --resume" in told
    ended = launch("resume", tmp_path)
    assert [code for code, _ in ended] == [0, 0], ended[0][1][-3000:] + ended[1][1][-3000:]
    trainer(DISTILLED, tmp_path / "whole").train()
    assert_same_run(tmp_path / "whole", tmp_path / "fsdp")
    phi = [
        load_file(tmp_path / run / "adapter" / "adapter_model.safetensors")
        for run in ("whole", "fsdp")
    ]
    assert phi[0].keys() == phi[1].keys()
    assert np.mean([(phi[0][k] - phi[1][k]).abs().mean().item() for k in phi[0]]) < 1e-5


def test_failures_are_reported_in_one_sentence_and_keep_the_last_checkpoint(tmp_path):
    (code, error), (killed, _) = launch("fail", tmp_path)
    assert (code, killed) == (0, -9), error[-3000:]
    told = [json.loads((tmp_path / f"told-{rank}.json").read_text()) for rank in (0, 1)]
    unequal, reward, task, disk, lost = told[0]
    assert told[1] == [unequal, reward, task, disk], "all processes must report the same errors"
    assert unequal.startswith("ConfigError: the processes of this run start from different weights")
    assert reward.startswith("RewardError: the verifier of problem 'words-6' raised KeyError")
    assert task.startswith("TaskError: problem 7") and "ConnectionError: no answer" in task
    assert disk.startswith("CheckpointError: could not write the checkpoint for step 2")
    assert "No space left" in disk and "resume the run from step 1" in disk
    assert lost.startswith("ProcessLost: a process of this run died") and "with --resume" in lost
    for run, step in (("reward", 2), ("task", 2), ("disk", 1), ("killed", 2)):
        assert (
            max(p.name for p in (tmp_path / run / "checkpoints").glob("step-*")) == f"step-{step}"
        )
    # One process resumes a run of two processes, and must get the same result as a run of one
    # process.
    from dataclasses import replace

    trainer(replace(PLAIN, resume=True), tmp_path / "killed").train()
    trainer(PLAIN, tmp_path / "alone").train()
    assert_same_run(tmp_path / "alone", tmp_path / "killed")
