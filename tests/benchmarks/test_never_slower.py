"""Test the turns of ``benchmarks/never_slower.py``, and the table of its results."""

import importlib
import json
import sys
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

FOLDER = str(Path(__file__).parents[2] / "benchmarks")


@pytest.fixture
def scripts(monkeypatch):
    monkeypatch.syspath_prepend(FOLDER)
    names = ("never_slower", "tables_never_slower")
    yield tuple(importlib.import_module(name) for name in names)
    for name in (*names, "predicted", "common"):
        sys.modules.pop(name, None)


def test_cells_survive_a_round_trip_through_text(scripts):
    script, _ = scripts
    cell = script.Cell.parse("512x128+300")
    assert cell == (512, 128, 300) and str(cell) == "512x128+300"
    with pytest.raises(ArgumentTypeError, match=r"REQUESTSxPROMPT\+NEW, .* got '512x128'"):
        script.Cell.parse("512x128")


def test_each_engine_runs_each_cell_once_per_round_in_rotating_order(scripts):
    script, _ = scripts
    cells, engines = script.CELLS["smollm2-135m"], script.ENGINES[:3]
    turns = list(script.turns(5, 2, cells, (True, False), engines))
    assert len(turns) == len(set(turns)) == 2 * 3 * 2 * 3
    assert {turn.round for turn in turns} == {5, 6}
    blocks = [turns[i : i + 3] for i in range(0, len(turns), 3)]
    assert all({turn.engine for turn in block} == set(engines) for block in blocks)
    assert all(len({turn[:3] for turn in block}) == 1 for block in blocks)
    assert {block[0].engine for block in blocks} == set(engines)


def test_cache_has_room_for_the_largest_cell(scripts):
    script, _ = scripts
    model = script.shape_config("smollm2-135m")
    # Each of the 30 layers has 3 kv heads, whose keys and values are 64 numbers of two bytes each.
    needed = 256 * (5000 + 2048) * 30 * 3 * 64 * 2 * 2
    assert needed * 33 / 32 < script.cache_bytes(model, script.CELLS["smollm2-135m"]) < 1.1 * needed


def row(round_, cell, engine, speed, text=True):
    return dict(round=round_, cell=cell, detokenize=text, engine=engine, tokens_per_s=speed)


def test_ratios_compare_engines_of_the_same_round(scripts, tmp_path, monkeypatch):
    _, tables = scripts
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.never_slower() == "" == tables.never_slower_mean()
    session = dict(shape="smollm2-135m", vllm="0.33.0", gpu="NVIDIA H200", rows=[])
    session["rows"] = [
        row(0, "512x128+512", "stock", 10_000),
        row(0, "512x128+512", "lossy", 11_000),
        row(0, "512x128+512", "lossless", 15_000),
        row(1, "512x128+512", "stock", 20_000),
        row(1, "512x128+512", "lossy", 21_000),
        row(1, "512x128+512", "lossless", 24_000),
        row(1, "512x128+512", "stock", 8_000, text=False),
        row(2, "512x128+512", "lossy", 99_000),  # stock vLLM had no more turns
    ]
    path = tmp_path / "never_slower_smollm2-135m.json"
    path.write_text(json.dumps({"sessions": [session]}))
    assert tables.never_slower_mean() == (
        "The geometric mean over all rounds of all rows, with its standard error, is "
        "1.342 ± 0.150 (lossless mode) and 1.075 ± 0.025 (lossy mode). In lossy mode, ratios of "
        "the same row differ by up to 5 %.\n"
    )
    lines = [line.strip("| ").split(" | ") for line in tables.never_slower().splitlines()[2:]]
    about = ["SmolLM2-135M", "0.33.0", "H200", "512 x 128 + 512"]
    assert lines[0][:5] == [*about, "yes"]
    assert lines[0][6::2] == ["15,000", "1.50x, 1.20x", "1.10x, 1.05x"]
    assert [*lines[1][:5], lines[1][6]] == [*about, "no", "8,000"]


def test_predictions_are_shown_only_for_the_gpu_that_the_cost_model_was_fitted_on(
    scripts, tmp_path, monkeypatch
):
    script, tables = scripts
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    cell = script.Cell(32, 5000, 2048)
    rows = [row(0, str(cell), engine, 1000) for engine in script.ENGINES[:3]]
    sessions = [
        dict(shape="smollm2-135m", vllm="0.33.0", gpu=f"NVIDIA {gpu}", rows=rows)
        for gpu in ("H100", "H200")
    ]
    path = tmp_path / "never_slower_smollm2-135m.json"
    path.write_text(json.dumps({"sessions": sessions}))
    table = [line[2:-2].split(" | ") for line in tables.never_slower().splitlines()[2:]]
    h100, h200 = ([cells[i].strip() for i in (5, 7, 9)] for cells in table)
    assert h100 == ["", "", ""]
    assert h200 == list(tables.predictions("smollm2-135m", cell))


def test_predicted_step_is_a_hand_calculation(scripts):
    script, tables = scripts
    shape = tables.predicted.cost_shape("smollm2-135m")
    assert shape.weights == 134_515_008 and shape.kv_width == 30 * 2 * 3 * 64
    # With one token per request there is a single step, at a length of 5,001 tokens.
    step = 30 * 49.65e-6 + 4 * 1.191e-6
    step += 2 * (shape.weights + 4 * 5001 * shape.kv_width) / (0.9362 * 4.65e12)
    prefill = 2 * shape.weights * 4 * 5000 / (0.5 * 989.5e12)
    speed = tables.predicted.tokens_per_s("smollm2-135m", script.Cell(4, 5000, 1))
    assert speed == pytest.approx(4 / (step + prefill))


def test_lossless_prediction_drafts_only_where_that_is_faster(scripts):
    script, tables = scripts
    predicted = tables.predicted
    # verifying drafts of many short requests takes longer than decoding them
    short = script.Cell(512, 128, 16)
    dense = predicted.tokens_per_s("qwen3-1.7b", short)
    choices = predicted.all_accepted()
    assert [each.tokens for each in choices] == [0, 4, 8, 12]
    assert [each.tokens_per_cycle for each in choices] == [1, 5, 9, 13]  # all are accepted
    assert predicted.lossless_tokens_per_s("qwen3-1.7b", short, choices) == pytest.approx(dense)
    assert predicted.lossless_tokens_per_s("qwen3-1.7b", short, choices[1:]) < dense
