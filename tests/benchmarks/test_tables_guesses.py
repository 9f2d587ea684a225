"""Test the tables of lossless decoding with real guesses."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def point(tokens, seconds, **more):
    return {"text": "sources.txt", "temperature": 0.7, "tokens": tokens, "seconds": seconds, **more}


@pytest.fixture
def tables(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    script = importlib.import_module("tables_guesses")
    monkeypatch.setattr(script, "RESULTS", tmp_path)
    return script


def write(tables, folder, **arms):
    engines = {arm: {"points": points} for arm, points in arms.items()}
    (folder / f"{tables.REAL}.json").write_text(json.dumps({"runs": [{"engines": engines}]}))


def cells(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_speeds_are_relative_to_stock_over_all_repeats(tables, tmp_path):
    stock = [point(1000, 2.0), point(1000, 2.0)]
    guessed = [point(1000, 0.5), point(1000, 1.5)]
    write(tables, tmp_path, stock=stock, guess3=guessed, ngram=[])
    head, _, row = cells(tables.real_speed())
    assert head[3:] == ["measured", tables.REAL_ARMS["guess3"]]
    assert row == ["sources", "0.7", "", "500", "2.00x"]


def test_speed_is_predicted_where_all_responses_have_the_same_length(tables, tmp_path):
    tokens = 8 * tables.NEW
    measured = {"acceptance": 0.9, "tokens_per_cycle": 4.0}
    stock = [point(tokens, 2.0), point(tokens - 9, 2.0) | {"text": "questions.jsonl"}]
    lossless = [row | measured for row in stock]
    write(tables, tmp_path, stock=stock, adaptive=lossless)
    head, _, known, unknown = cells(tables.real_speed())
    assert head[2:] == ["stock, tokens/s: predicted", "measured", "lossless: predicted", "measured"]
    cell = tables.Cell(8, tables.PROMPT, tables.NEW)
    dense = tables.predicted.tokens_per_s(tables.SHAPE, cell)
    # 4.10 tokens are expected per cycle of four drafts, and 3.44 of three
    drafting = tables.predicted.like(0.9, 4.0)
    assert drafting.tokens == 4
    ours = tables.predicted.lossless_tokens_per_s(tables.SHAPE, cell, [drafting])
    assert known[2:] == [f"{dense:,.0f}", "4,096", f"{ours / dense:.2f}x", "1.00x"]
    assert unknown[2::2] == ["", ""] and unknown[5] == "1.00x"

    del lossless[0]["acceptance"]  # vLLM never drafted
    write(tables, tmp_path, stock=stock, adaptive=lossless)
    _, _, known, _ = cells(tables.real_speed())
    assert known[2::2] == ["", ""]


def test_yields_are_averaged_over_repeats_and_empty_if_not_measured(tables, tmp_path):
    guessed = [
        point(1000, 1.0, acceptance=0.9, drafts_per_pass=2.0),
        point(1000, 1.0, acceptance=0.92, drafts_per_pass=3.0),
    ]
    write(tables, tmp_path, stock=[point(1000, 2.0)], guess3=guessed)
    _, _, row = cells(tables.real_yields())
    assert row == ["sources", "0.7", "0.910", "2.50", ""]


def test_arms_with_drafts_in_8_bits_have_their_own_rows(tables, tmp_path):
    state = {"batch": 8, "length": 100}

    def engine(scale):
        passes = [{**state, "tokens": t, "ms": scale * t} for t in tables.PASS_TOKENS]
        cycle = {"drafts": 4, "ms": 6.0 * scale, "tokens_per_cycle": 3.0}
        return {"passes": passes, "points": [{**state, **cycle, "tokens_per_s": 400 / scale}]}

    stock = {"points": [{**state, "tokens_per_s": 100.0, "ms": 2.0}]}
    engines = {"stock": stock, "lossless": engine(1.0), "fp8": engine(0.5)}
    path = tmp_path / "cascade_qwen3-8b.json"
    path.write_text(json.dumps({"runs": [{"engines": engines}]}))
    _, _, *passes = cells(tables.passes())
    assert [row[1:5] for row in passes] == [
        ["8 x 100", "16", "1.00", "2.00x"],
        ["8 x 100", "8", "0.50", "2.00x"],
    ]
    _, _, *speeds = cells(tables.speed())
    # sum of the parts: four passes and a dense step
    assert [(row[3], row[9], row[10]) for row in speeds] == [
        ("16", "4.00x", "100%"),
        ("8", "8.00x", "133%"),
    ]
