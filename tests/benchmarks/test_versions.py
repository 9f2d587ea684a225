"""Test the script that measures a version of vLLM, and the table of its results."""

import importlib
import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer

ROOT = Path(__file__).parents[2]
ERRORS = {"mean": 0.0123, "p99": 0.045}
WAY = {"missed": ERRORS, "yardstick": ERRORS, "within twice the yardstick": True}
RESULT = {
    "vllm": "0.33.0",
    "torch": "2.11.0+cu130",
    "machine": "NVIDIA H100 80GB HBM3",
    "lossless": {
        "eager": WAY,
        "graphs": WAY,
        "compiled": WAY,
        "greedy": "700 of 768",
        "widest gap where greedy tokens part": 0.0123,
    },
    "audit lossless": {"status": "exact", "p": 0.4, "detectable share of tokens": 0.009},
    "speed stock": {"tokens_per_s": 100.0},
    "speed lossless": {"tokens_per_s": 250.0, "batch": 32, "length": 15_000},
}


@pytest.fixture(scope="module")
def scripts():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield (
            importlib.import_module("vllm_versions"),
            importlib.import_module("tables_versions"),
        )


def row(scripts, tmp_path, monkeypatch, **changed):
    """Return the cells of the only row for a result."""
    tables = scripts[1]
    (tmp_path / "0.33.0_h100.json").write_text(json.dumps({**RESULT, **changed}))
    monkeypatch.setattr(tables, "FOLDER", tmp_path)
    *_, line = tables.versions().splitlines()
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_row_shows_errors_verdict_and_speedup_over_stock(scripts, tmp_path, monkeypatch):
    cells = row(scripts, tmp_path, monkeypatch)
    assert cells[:4] == ["0.33.0", "2.11.0", "H100", "lossless"]
    assert cells[4:9] == ["0.012 / 0.04"] * 4 + ["yes"]
    assert cells[9:] == [
        "700 of 768 (0.012 nats)",
        "exact (p 0.4; 0.9% would be seen)",
        "32 x 15,000",
        "2.50x",
    ]


def test_row_names_failed_parts_and_omits_parts_that_were_not_run(scripts, tmp_path, monkeypatch):
    crashed = {"eager": WAY, "graphs": None, "compiled": None, "failed": "RuntimeError: no"}
    cells = row(scripts, tmp_path, monkeypatch, lossless=crashed)
    assert cells[4:9] == ["0.012 / 0.04", "failed", "failed", "", "no"]

    audit = {"status": None, "p": None, "failed": "exit status 2"}
    assert row(scripts, tmp_path, monkeypatch, **{"audit lossless": audit})[10] == "failed"

    slow = {"failed": "did not finish within 540 s"}
    assert row(scripts, tmp_path, monkeypatch, **{"speed lossless": slow})[11:] == ["failed", ""]


@pytest.mark.parametrize(
    "code, allowed, failure",
    [
        ("pass", (0,), None),
        ("raise SystemExit(1)", (0, 1), None),
        ("raise SystemExit(2)", (0, 1), "exit status 2"),
        ("print('begun'); raise ValueError('what')", (0,), "ValueError: what"),
    ],
)
def test_failed_part_reports_its_last_error(scripts, tmp_path, code, allowed, failure):
    assert scripts[0].child(["-c", code], tmp_path / "log", allowed) == failure


def test_failed_part_is_added_to_the_existing_result(scripts, tmp_path):
    out = tmp_path / "0.33.0.json"
    result = {"vllm": "0.33.0"}
    scripts[0].part(result, "lossy", ["-c", "raise ValueError('what')"], dict, out)
    written = importlib.import_module("common").read_result(out)
    assert written["lossy"] == {"failed": "ValueError: what"} and written["vllm"] == "0.33.0"
    assert "ValueError: what" in (tmp_path / "0.33.0_lossy.log").read_text()


def test_self_check_row_shows_either_the_measurements_or_the_refusal(
    scripts, tmp_path, monkeypatch
):
    tables = scripts[1]
    passed = {
        "case": "lossy, eager",
        "ms": 2584,
        "ms when compiled": 83,
        "layers differ by": 0.0026,
        "log-probs differ by": 0.015,
        "outcome": "started",
        "as expected": True,
    }
    refused = {"case": "lossy, wrong scale", "outcome": "is off by 0.25", "as expected": True}
    surprising = {"case": "lossy, fp8 cache", "outcome": "started", "as expected": False}
    result = {"vllm": "0.33.0", "cases": [passed, refused, surprising]}
    (tmp_path / "0.33.0_h200.json").write_text(json.dumps(result))
    monkeypatch.setattr(tables, "CHECKED", tmp_path)
    assert tables.selfchecks().splitlines()[2:] == [
        "| lossy, eager | 83 ms (2584 ms); 0.0026; 0.015 |",
        "| lossy, wrong scale | refused |",
        "| lossy, fp8 cache | **not as expected** |",
    ]


def test_cached_prompts_end_with_the_first_token_of_a_cache_block(scripts, tmp_path):
    script = scripts[0]
    path = tmp_path / "prompts.jsonl"
    arguments = script.cached_audit("reasoner", "schedule.json", path)["audit cached prompts"]
    assert arguments[arguments.index("--prompts") + 1] == str(path)

    tokenizer = AutoTokenizer.from_pretrained(script.REASONER)
    prompts = [json.loads(line)["prompt"] for line in path.read_text().splitlines()]
    lengths = [len(tokenizer(prompt).input_ids) for prompt in prompts]
    assert len(set(prompts)) == script.CACHED_PROMPTS
    assert {length % script.CACHE_BLOCK for length in lengths} == {1}
    assert min(lengths) > script.CACHE_BLOCK
