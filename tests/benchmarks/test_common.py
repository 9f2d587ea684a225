"""What the scripts of the benchmarks share."""

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
def test_the_states_that_a_script_measures(arguments, shape, states, file, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from common import parse_states, parser

    monkeypatch.setattr("sys.argv", ["script", *arguments])
    given = parse_states(parser("About."), "name", STATES)
    assert given[:2] == (shape, states) and given[2].name == file
