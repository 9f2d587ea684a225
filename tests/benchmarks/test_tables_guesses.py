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


def engines(arms):
    return {"engines": {arm: {"points": points} for arm, points in arms.items()}}


def write(tables, folder, *earlier, **arms):
    runs = [engines(each) for each in (*earlier, arms)]
    (folder / f"{tables.REAL}.json").write_text(json.dumps({"runs": runs}))


def cells(table):
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]


def test_speeds_are_relative_to_stock_over_all_repeats(tables, tmp_path):
    stock = [point(1000, 2.0), point(1000, 2.0)]
    guessed = [point(1000, 0.5), point(1000, 1.5)]
    write(tables, tmp_path, stock=stock, guess3=guessed, ngram=[])
    assert cells(tables.real_speed()) == [
        ["arm", "sources, 0.7"],
        ["---", "---"],
        ["stock, tokens/s", "500 (0%)"],
        ["stock, predicted", ""],
        [tables.REAL_ARMS["guess3"], "2.00x (200%)"],
    ]


def test_drafters_of_vllm_are_compared_with_stock_in_the_first_run(tables, tmp_path):
    stock = [point(1000, 2.0)]
    earlier = {"stock": [point(1000, 4.0)], "eagle3": [point(1000, 2.0)], "guess3": stock}
    write(tables, tmp_path, earlier, stock=stock, guess3=stock)
    _, _, *rows = cells(tables.real_stock_drafters())
    assert rows == [
        ["stock, tokens/s", "250 (0%)"],
        [tables.STOCK_ARMS["eagle3"], "2.00x (0%)"],
    ]
    _, _, *rows = cells(tables.real_speed())
    assert rows[0] == ["stock, tokens/s", "500 (0%)"] and len(rows) == 3


def test_speed_is_predicted_where_all_responses_have_the_same_length(tables, tmp_path):
    tokens = 8 * tables.NEW
    measured = {"acceptance": 0.9, "tokens_per_cycle": 4.0}
    stock = [point(tokens, 2.0), point(tokens - 9, 2.0) | {"text": "questions.jsonl"}]
    lossless = [row | measured for row in stock]
    write(tables, tmp_path, stock=stock, adaptive=lossless)
    head, _, *rows = cells(tables.real_speed())
    assert head == ["arm", "sources, 0.7", "questions, 0.7"]
    cell = tables.Cell(8, tables.PROMPT, tables.NEW)
    dense = tables.predicted.tokens_per_s(tables.SHAPE, cell)
    # 4.10 tokens are expected per cycle of four drafts, and 3.44 of three
    drafting = tables.predicted.like(0.9, 4.0)
    assert drafting.tokens == 4
    ours = tables.predicted.lossless_tokens_per_s(tables.SHAPE, cell, [drafting])
    assert rows == [
        ["stock, tokens/s", "4,096 (0%)", "4,092 (0%)"],
        ["stock, predicted", f"{dense:,.0f}", ""],
        ["lossless", "1.00x (0%)", "1.00x (0%)"],
        ["lossless, predicted", f"{ours / dense:.2f}x", ""],
    ]

    del lossless[0]["acceptance"]  # vLLM never drafted
    write(tables, tmp_path, stock=stock, adaptive=lossless)
    _, _, *rows = cells(tables.real_speed())
    assert rows[1][1:] == rows[3][1:] == ["", ""]


def test_yields_are_averaged_over_repeats_beside_simulated_ones(tables, tmp_path):
    guessed = [
        point(1000, 1.0, acceptance=0.9, drafts_per_pass=2.0),
        point(1000, 1.0, acceptance=0.92, drafts_per_pass=3.0),
    ]
    other = point(1000, 2.0) | {"text": "stories.jsonl"}
    write(tables, tmp_path, stock=[point(1000, 2.0), other], guess3=guessed)
    three = {"guesses": 3, "history": [2.25, 2.0, 2.5], "head": [1.5, 1.0, 2.0]}
    simulated = [{"guesses": 7, "history": [3.0]}, three]
    cell = {"kind": "sources", "temperature": 0.7, "rows": simulated}
    result = {"cells": [cell, cell | {"kind": "stories", "temperature": 1.0}]}
    (tmp_path / f"{tables.SIMULATION}.json").write_text(json.dumps(result))
    _, _, *rows = cells(tables.real_yields())
    name = tables.REAL_ARMS["guess3"]
    assert rows == [
        [f"{name}: acceptance", "0.910", ""],
        [f"{name}: drafts per pass", "2.50", ""],
        [f"{name}: drafts per pass, simulated", "2.25", ""],
    ]

    # In three quarters of the time per token, a cycle yields half as many tokens.
    guessed = [point(1000, 2.0, tokens_per_cycle=8.0)]
    by_head = [point(1000, 1.5, tokens_per_cycle=4.0)]
    write(tables, tmp_path, stock=[point(1000, 2.0), other], guess3=guessed, head_guess3=by_head)
    _, _, *rows = cells(tables.real_yields())
    name = tables.REAL_ARMS["head_guess3"]
    assert rows[1:] == [
        [f"{name}: tokens per cycle", "4.00", ""],
        [f"{name}: time per cycle relative to history", "0.38x", ""],
    ]


def test_arms_with_drafts_in_8_bits_have_their_own_rows(tables, tmp_path):
    state = {"batch": 8, "length": 100}

    def engine(scale):
        passes = [{**state, "tokens": t, "ms": scale * t} for t in tables.PASS_TOKENS]
        cycle = {"drafts": 4, "acceptance": 0.9, "ms": 6.0 * scale, "tokens_per_cycle": 3.0}
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
    assert [(row[3], row[11], row[12]) for row in speeds] == [
        ("16", "4.00x", "100%"),
        ("8", "8.00x", "133%"),
    ]


def test_speeds_at_each_acceptance_have_their_own_rows(tables, tmp_path):
    state = {"batch": 8, "length": 100}
    passes = [{**state, "tokens": t, "ms": 1.0 * t} for t in tables.PASS_TOKENS]
    cycle = {**state, "drafts": 4, "acceptance": 0.945, "ms": 6.0, "tokens_per_cycle": 3.0}
    guessed = {
        **cycle,
        "acceptance": 0.921,
        "guesses": 3,
        "passes": 2,
        "drafts_per_pass": 2.0,
        "asked_per_pass": 2.1,
    }
    points = [
        {**cycle, "tokens_per_s": 200.0},
        {**cycle, "tokens_per_s": 400.0, "acceptance": 0.97},
        {**guessed, "tokens_per_s": 300.0},
        {**guessed, "tokens_per_s": 310.0, "drafts": 8, "passes": 3},
        {**guessed, "tokens_per_s": 500.0, "acceptance": 0.96},
    ]
    stock = {"points": [{**state, "tokens_per_s": 100.0, "ms": 2.0}]}
    engines = {"stock": stock, "lossless": {"passes": passes, "points": points}}
    path = tmp_path / "cascade_qwen3-8b.json"
    path.write_text(json.dumps({"runs": [{"engines": engines}]}))
    _, _, *speeds = cells(tables.speed())
    assert [(row[4], row[5], row[11]) for row in speeds] == [
        ("0", "0.945", "2.00x"),
        ("0", "0.970", "4.00x"),
        ("3", "0.921", "3.10x"),
        ("3", "0.960", "5.00x"),
    ]


def test_arms_that_the_last_run_lacks_come_from_the_run_before(tables, tmp_path):
    earlier = {
        "stock": [point(1000, 4.0)],
        "guess3": [point(1000, 4.0, tokens_per_cycle=4.0)],
        "head_guess3": [point(1000, 2.0, tokens_per_cycle=4.0)],
    }
    last = {"stock": [point(1000, 2.0)], "guess3": [point(1000, 1.0, tokens_per_cycle=8.0)]}
    write(tables, tmp_path, earlier, **last)
    (tmp_path / f"{tables.SIMULATION}.json").write_text(json.dumps({"cells": []}))
    head = tables.REAL_ARMS["head_guess3"]
    history = tables.REAL_ARMS["guess3"]
    _, _, *rows = cells(tables.real_yields())
    assert rows == [
        [f"{history}: tokens per cycle", "8.00"],
        [f"{head}: tokens per cycle", "4.00"],
        [f"{head}: time per cycle relative to history", "0.50x"],
    ]


def run(tables, speed, cases, **more):
    """Return a run in which cases, a length and a number of drafts each, have this speed."""
    states = [{"batch": 8, "length": length} for length in dict.fromkeys(n for n, _ in cases)]
    cycle = {"acceptance": 0.9, "ms": 6.0, "tokens_per_cycle": 3.0, "tokens_per_s": speed}
    engine = {
        "passes": [{**s, "tokens": t, "ms": 1.0 * t} for s in states for t in tables.PASS_TOKENS],
        "points": [{"batch": 8, "length": n, "drafts": k, **cycle} for n, k in cases],
    }
    stock = {"points": [{**s, "tokens_per_s": 100.0, "ms": 2.0} for s in states]}
    return {"engines": {"stock": stock, "lossless": engine}, **more}


def test_the_fastest_of_all_runs_is_shown_and_cases_measured_again_count_once(tables, tmp_path):
    first = run(tables, 200.0, [(100, 4), (100, 8), (300, 4)])
    first["engines"]["fp8"] = first["engines"]["lossless"]
    runs = [first, run(tables, 190.0, [(100, 4)]), run(tables, 150.0, [(100, 8)])]
    (tmp_path / "cascade_qwen3-8b.json").write_text(json.dumps({"runs": runs}))
    _, _, *speeds = cells(tables.speed())
    assert [(row[1], row[3], row[7], row[11]) for row in speeds] == [
        ("8 x 300", "16", "4", "2.00x"),
        ("8 x 100", "8", "4", "2.00x"),
        ("8 x 300", "8", "4", "2.00x"),
        ("8 x 100", "16", "4", "1.90x"),
    ]
    _, _, *passes = cells(tables.passes())
    assert [(row[1], row[2]) for row in passes] == [
        ("8 x 300", "16"),
        ("8 x 100", "8"),
        ("8 x 300", "8"),
        ("8 x 100", "16"),
    ]


def test_runs_with_quantised_weights_have_their_own_rows(tables, tmp_path):
    runs = [
        run(tables, 200.0, [(100, 4)]),
        run(tables, 150.0, [(100, 4)], quantization="fp8_per_block"),
    ]
    (tmp_path / "cascade_qwen3-30b-a3b.json").write_text(json.dumps({"runs": runs}))
    _, _, *speeds = cells(tables.speed())
    assert [(row[0], row[3], row[11]) for row in speeds] == [
        ("30B-A3B", "16", "2.00x"),
        ("30B-A3B", "8, stock's too", "1.50x"),
    ]
