"""Test what ``sparrow cost`` prints and refuses."""

import json
import re
from pathlib import Path

import pytest

from sparrow.cli import main
from tests.conftest import fails

COST_PAGE = Path(__file__).parents[3] / "docs" / "cost.md"
A3B = ["cost", "--model", "qwen3-30b-a3b", "--schedule", "qwen3-4b-0.86", "--gpu", "h100"]


def test_rollouts_are_printed_if_training_does_not_fit(capsys):
    main([*A3B, "--gpus", "8", "--tensor-parallel", "2", "--responses", "32"])
    printed = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for row in ("dense rollout", "lossy rollout", "lossless rollout", "rollout speed-up"):
        assert f" {row} " in printed
    assert "are left out, and engines get all memory, because training Qwen3-30B-A3B" in printed
    assert "on 8 H100 needs 84 GiB per GPU, " in printed and "; use more GPUs." in printed
    assert "training, GiB per GPU" not in printed and "step speed-up" not in printed


def test_engine_without_room_for_a_response_says_how_many_gpus_it_needs(capsys):
    refused = fails(capsys, *A3B, "--gpus", "16")
    assert "an engine of 1 H100 has room for 0 tokens alongside Qwen3-30B-A3B" in refused
    assert refused.strip().endswith("; set tensor_parallel to 2")
    main([*A3B, "--gpus", "16", "--tensor-parallel", "2", "--responses", "32"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "training, GiB per GPU" in printed and "step speed-up" in printed


@pytest.fixture
def measurement(tmp_path):
    """Return the path of a file like those that ``sparrow measure`` writes."""
    path = tmp_path / "tail.json"
    path.write_text(json.dumps({"bins": [], "histogram": [], "tau": 0.5}))
    return str(path)


def test_measurement_is_neither_a_model_nor_a_schedule(measurement, capsys):
    refused = fails(capsys, "cost", "--schedule", "fixed:1", "--model", measurement)
    assert f"{measurement} is not a model's config.json, because it has no 'model_type'" in refused
    refused = fails(capsys, "cost", "--model", "qwen3-4b", "--schedule", measurement)
    assert f"{measurement} is a measurement from sparrow measure, not a schedule; pass" in refused
    assert "top_k" not in refused


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("nope", "no schedule 'nope'"),
        ("fixed:-3", "PAGES must be"),
        ("{}", "needs the field top_k"),
    ],
)
def test_wrong_schedule_is_refused_for_its_own_reason(tmp_path, capsys, spec, message):
    if spec == "{}":
        path = tmp_path / "empty.json"
        path.write_text(spec)
        spec = str(path)
    assert message in fails(capsys, "cost", "--model", "qwen3-4b", "--schedule", spec)


def test_documented_prediction_of_a_mixture_is_what_the_command_prints(capsys):
    page = " ".join(COST_PAGE.read_text(encoding="utf-8").split())
    command = re.search(r"sparrow (cost --model qwen3-30b-a3b [^`]*?) ```", page)[1]

    def gains(options):
        main(options.split())
        return re.findall(r"([\d.]+)x on the rollout", capsys.readouterr().out)

    lossy, lossless = gains(command)
    assert f"the following command predicts {lossy}x and {lossless}x." in page
    lossy, lossless = gains(re.sub(r"--max-batch \d+ ", "", command))
    assert f"and the predictions {lossy}x and {lossless}x." in page
