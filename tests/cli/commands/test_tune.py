"""Test ``sparrow tune`` on a simulated GPU: which heads it tunes for, which settings it refuses, and
what it prints and writes.
"""

import json

import pytest
import torch

pytest.importorskip("triton")

from sparrow.attention.decode import DeviceLimits
from sparrow.attention.triton import saved, search, timing
from sparrow.attention.triton.saved import Cell, Choices, Measurement
from sparrow.attention.triton.variants import ATTEND, Variant
from sparrow.cli.commands.tune import Tune
from sparrow.cli.entry import main
from tests.conftest import fails


@pytest.mark.parametrize(
    "options, heads",
    [
        (dict(model="qwen3-30b-a3b"), (4, 8, 128)),
        (dict(model="qwen3-8b", tensor_parallel=8), (1, 4, 128)),
        (dict(model="qwen3-30b-a3b", tensor_parallel=8), (1, 4, 128)),  # a kv head on two GPUs
        (dict(shape="3,3,64"), (3, 3, 64)),
        (dict(shape="8, 2, 128", tensor_parallel=2), (4, 2, 128)),
    ],
)
def test_heads_are_counted_per_gpu(options, heads):
    assert Tune(**options)._heads() == heads


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "heads must come from exactly one of --model NAME and --shape KV_HEADS"),
        (["--model", "qwen3-4b", "--shape", "8,4,128"], "exactly one of --model NAME and"),
        (["--shape", "8,4"], "shape is '8,4', but must be KV_HEADS,GROUP,HEAD_DIM"),
        (["--shape", "8,0,128"], "shape is '8,0,128', but must be KV_HEADS"),
        (["--shape", "8,-1,128"], "shape is '8,-1,128', but must be KV_HEADS"),
        (["--shape", "8,x,128"], "must be KV_HEADS,GROUP,HEAD_DIM, as in 8,4,128"),
        (["--shape", "8,4,128", "--batches", "0"], "greater than or equal to 1"),
        (["--shape", "8,4,128", "--batches"], "at least 1 item"),
    ],
)
def test_unusable_settings_are_reported(arguments, message, capsys):
    assert message in fails(capsys, "tune", *arguments, code=2)


def test_heads_that_cannot_be_divided_among_the_gpus_are_rejected(capsys):
    refused = fails(capsys, "tune", "--shape", "3,3,64", "--tensor-parallel", "2")
    assert "tensor_parallel is 2" in refused and "divides 9 query heads and 3 kv heads" in refused


def test_tune_reports_a_missing_gpu(capsys, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "sparrow tune needs a GPU, but torch finds none" in fails(
        capsys, "tune", "--shape", "8,4,128"
    )


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA L40S")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    monkeypatch.setattr(saved, "device_limits", lambda device: DeviceLimits(142, 99 * 1024))
    monkeypatch.setattr(timing, "read_limit", lambda nbytes: 8e11)
    saved.read.cache_clear()
    yield tmp_path
    saved.read.cache_clear()


def test_tuned_choices_are_printed_and_saved_where_engines_look_for_them(gpu, monkeypatch, capsys):
    def tune(target, grid, device, bytes_per_second, time, note):
        assert grid == search.Grid((8, 64), (64, 256), 16384) and bytes_per_second == 8e11
        measured = (Measurement(64, 200.0, 150.0, 120.0),)
        return Choices(target, (Cell(8, Variant(ATTEND[0]), measured),))

    monkeypatch.setattr(search, "tune", tune)
    main(["tune", "--shape", "4,8,128", "--batches", "64", "8", "8", "--kv-cache-dtype", "fp8"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "NVIDIA L40S: 4 kv heads, group 8, head dim 128, cache in float8_e4m3fn" in printed
    assert "8 64 200.0 150.0 25% 80% 60%" in printed
    (file,) = (gpu / "sparrow" / "tuned").iterdir()
    assert json.loads(file.read_text())["cells"][0]["batch"] == 8
    read = saved.read(torch.device("cuda"), 4, 8, 128, torch.float8_e4m3fn, 16)
    assert read.of(1) == Variant(ATTEND[0])


def test_out_of_memory_is_reported_and_nothing_is_written(gpu, monkeypatch, capsys):
    def tune(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(search, "tune", tune)
    assert "too little free memory" in fails(capsys, "tune", "--shape", "4,8,128")
    assert not (gpu / "sparrow").exists()
