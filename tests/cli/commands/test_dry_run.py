"""Test that a dry run prints predictions, names every problem, and loads nothing."""

import re

import pytest

from sparrow import SparsitySchedule
from sparrow.cli import loading, main
from sparrow.cost import MACHINES, SHAPES, cluster, response_lengths
from tests.conftest import fails

POLARIS = "polaris:path=tests/data/hub/polaris.jsonl"
RUN = [
    "train",
    "--model",
    "Qwen/Qwen3-14B",
    "--dataset",
    POLARIS,
    "--schedule",
    "qwen3-14b-0.86",
    "--steps",
    "800",
    "--rollout.prompts",
    "8",
    "--rollout.max-new-tokens",
    "16384",
    "--engine",
    "vllm:gpu_memory_utilization=0.8",
    "--optimizer.precision",
    "bf16",
    "--optimizer.gradient-checkpointing",
    "--dry-run",
    "h200:gpus=8,median=6000",
]


@pytest.fixture(autouse=True)
def nothing_is_loaded(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("a model or an engine was loaded")

    monkeypatch.setattr(loading, "load_model", refuse)
    monkeypatch.setattr(loading, "load_engine", refuse)


def test_dry_run_prints_the_memory_and_time_predicted_by_the_cluster_model(tmp_path, capsys):
    main([*RUN, "--run-dir", str(tmp_path / "run")])
    printed = " ".join(re.sub("[│┌┐└┘─┬┴]", " ", capsys.readouterr().out).split())
    found = cluster.plan(
        SHAPES["qwen3-14b"],
        cluster.Cluster(MACHINES["h200"], 8),
        response_lengths(6000, 16384, 64),
        SparsitySchedule.preset("qwen3-14b"),
        engine_share=0.8,
    )
    assert found.sparse is not None and found.lossless is None
    for step in (found.dense, found.sparse):
        assert f"{step.seconds:.0f} s: rollout {step.rollout:.0f}" in printed
        assert f"{800 * step.seconds / 3600:.0f} h per run" in printed
    assert "14.77B parameters" in printed and "16,384 tokens of response, 24,576 left" in printed
    assert "800 steps, 6,400 prompts" in printed and "lossless" not in printed
    assert not (tmp_path / "run").exists()


def test_dry_run_of_a_lossless_run_predicts_lossless_decoding(tmp_path, capsys):
    lossless = [
        *RUN,
        "--schedule",
        "dense",
        "--rollout.mode",
        "lossless",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    main(lossless)
    printed = capsys.readouterr().out
    assert "lossless step" in printed and "lossy" not in printed


def test_every_problem_is_reported_in_a_separate_sentence(tmp_path, capsys):
    wrong = [
        "--run-dir",
        str(tmp_path / "run"),
        "--trackers",
        "wandb",
        "--dataset",
        "polaris:path=nowhere.jsonl",
        "--rollout.max-new-tokens",
        "40960",
        "--optimizer.no-gradient-checkpointing",
    ]
    said = fails(capsys, *RUN, *wrong)
    assert (
        "the package 'wandb' is not installed" in said
        and "no dataset file at nowhere.jsonl" in said
    )
    assert (
        said.count("max_new_tokens=40960 leaves no room") == 1
        and "recompute activations (optimizer.gradient_checkpointing)" in said
    )


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        (
            ["--engine", "vllm"],
            "gpu_memory_utilization is 0.9 of 140 GiB, but training keeps 21 GiB on the same GPU; lower",
        ),
        (["--engine", "hf"], "engine is 'hf', which a dry run cannot predict"),
        (
            ["--dry-run", "h200:gpus=32"],
            "32 GPUs need several machines, but this trainer runs on one machine with at most 8 GPUs; use verl",
        ),
        (
            ["--dry-run", "h200:gpus=8,length=3"],
            "expected a GPU with options, such as h200:gpus=8,median=9000",
        ),
        (["--dry-run", "h300"], "gpu is 'h300'"),
        (
            ["--rollout.samples", "2", "--rollout.prompts", "2"],
            "4 responses leave some of the 8 engines idle",
        ),
        (["--schedule", "qwen3-14b-0.99"], "no schedule 'qwen3-14b-0.99'"),
        (["--optimizer.precision", "fp32"], "optimizer.precision is 'fp32'"),
    ],
)
def test_dry_run_reports_settings_that_would_stop_the_run(option, reason, tmp_path, capsys):
    assert reason in fails(capsys, *RUN, "--run-dir", str(tmp_path / "run"), *option)
