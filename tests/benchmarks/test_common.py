"""Test the code that the benchmark scripts share."""

import json
import re
from argparse import ArgumentTypeError
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
STATES = {"qwen3-1.7b": [(64, 320), (8, 1024), (1, 1024), (1, 30000)], "qwen3-8b": [(2, 30000)]}


@pytest.mark.parametrize(
    ("arguments", "shape", "states", "file"),
    [
        ([], "qwen3-1.7b", STATES["qwen3-1.7b"], "name_qwen3-1.7b.json"),
        (["--sequences", "1", "8"], "qwen3-1.7b", STATES["qwen3-1.7b"][1:], "name_qwen3-1.7b.json"),
        (
            ["--shape", "qwen3-8b", "--out", "other.json"],
            "qwen3-8b",
            STATES["qwen3-8b"],
            "other.json",
        ),
    ],
)
def test_scripts_parse_the_states_to_measure(arguments, shape, states, file, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from common import parse_states, parser

    monkeypatch.setattr("sys.argv", ["script", *arguments])
    given = parse_states(parser("About."), "name", STATES)
    assert given[:2] == (shape, states) and given[2].name == file


@pytest.fixture
def common(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    import common

    return common


@pytest.mark.parametrize("text", ["64", "64x", "64x4096x2", "64x4096+300", "-1x2", "ax2"])
def test_point_in_another_form_is_refused_with_the_expected_form(common, text):
    assert common.parse_point("64x4096") == (64, 4096)
    with pytest.raises(
        ArgumentTypeError, match=f"SEQUENCESxTOKENS, .* got {re.escape(repr(text))}"
    ):
        common.parse_point(text)


def test_results_are_written_with_one_row_per_line_and_can_be_read_back(common, tmp_path):
    rows = [{"batch": i, "ms": [i / 3, 1.0], "chosen": {8: "x" * 120}} for i in range(3)]
    path = tmp_path / "new" / "result.json"
    common.write(path, {"machine": "one", "rows": tuple(rows), "series": list(range(999))})
    read = common.read_result(path)
    assert read["rows"][1] == {"batch": 1, "ms": [0.3333333, 1.0], "chosen": {"8": "x" * 120}}
    assert read["series"] == list(range(999))
    assert [line[:11] for line in path.read_text().splitlines()] == [
        "{",
        '"machine":"',
        '"rows":{',
        '"columns":[',
        '"data":[',
        "[0,[0.0,1.0",
        "[1,[0.33333",
        "[2,[0.66666",
        "]",
        "},",
        '"series":[0',
        "}",
    ]


@pytest.mark.parametrize(
    "rows",
    [
        [{"a": "x" * 400}],
        [{"a": "x" * 400}, {"a": "y"}],
        [{"a": "x" * 200}, {"a": "y" * 200, "b": 1}],
        [{"a": "x" * 200}, 1],
        [{"a": 1}, {"a": 2}],
        [],
    ],
)
def test_single_long_differing_and_few_rows_are_not_written_as_tables(common, rows):
    assert common.tabulated({"rows": rows}) == {"rows": rows}


def test_long_row_is_broken_between_fields(common):
    row = {"name": "a", "bins": [{"start": i, "text": "x" * 100} for i in range(4)]}
    lines = common.compact([row]).splitlines()
    assert [line[:10] for line in lines[:4]] == ["[", "{", '"name":"a"', '"bins":[']
    assert json.loads("\n".join(lines)) == [row]


def test_floats_are_rounded_to_seven_digits_and_integers_are_kept(common):
    assert common.rounded([1 / 3, 123456789.0, 1234567890123, True, None, "1.123456789"]) == [
        0.3333333,
        123456789.0,
        1234567890123,
        True,
        None,
        "1.123456789",
    ]


def test_only_trainer_metrics_shown_in_a_table_are_kept(common):
    import trainer_log

    trl = {"mode": "colocate", "log": [{"reward": 0.5, "loss": 1.0}, {"train_runtime": 9.0}]}
    verl = {"log": [{"step": 1, "data": {"critic/score/mean": 0.25, "actor/lr": 1.0}}]}
    assert trainer_log.cut(trl) == {"mode": "colocate", "log": [{"reward": 0.5}, {}]}
    assert trainer_log.cut(verl) == {"log": [{"critic/score/mean": 0.25}]}


def test_committed_result_files_are_small(common):
    """Series that neither a table nor a figure uses belong in a run's folder, not in the
    repository.
    """
    files = [path for path in common.RESULTS.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) < 1.5e6


def test_committed_results_have_the_form_that_scripts_write(common):
    """Other programs wrote the stability study, ``tune.json`` and the results of two recipes."""
    others = {"tune.json", "code_rl.json", "paper_runs.json"}
    for path in common.RESULTS.rglob("*.json"):
        if path.parent.name != "stability" and path.name not in others:
            result = common.tabulated(common.read_result(path))
            assert path.read_text(encoding="utf-8") == common.compact(result) + "\n", path.name


def test_run_is_added_only_to_runs_of_the_same_shape(common, tmp_path):
    path = tmp_path / "new" / "result.json"
    assert common.earlier_runs(path, "name", "qwen3-8b") == (
        path,
        {"shape": "qwen3-8b", "runs": []},
    )
    common.write(path, {"shape": "qwen3-8b", "runs": [{"gpu": "one"}]})
    assert common.earlier_runs(path, "name", "qwen3-8b")[1]["runs"] == [{"gpu": "one"}]
    with pytest.raises(
        ValueError, match="has runs on qwen3-8b, not qwen3-4b; pass a different --out"
    ):
        common.earlier_runs(path, "name", "qwen3-4b")


def test_default_result_path_contains_the_shape(common):
    path, _ = common.earlier_runs(None, "no_such", "qwen3-4b")
    assert path == common.RESULTS / "no_such_qwen3-4b.json"


@pytest.mark.parametrize("is_mixture", [False, True])
def test_small_models_have_no_stop_token(common, is_mixture):
    config = common.small_qwen3(is_mixture)
    assert config.vocab_size == common.SMALL_VOCAB and config.eos_token_id is None
    assert getattr(config, "num_experts", None) == (16 if is_mixture else None)
