"""Test what ``benchmarks/selfcheck.py`` reports if an engine starts, is refused, or dies."""

import importlib
from pathlib import Path

import pytest

from sparrow.errors import ConfigError

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(scope="module")
def selfcheck():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(BENCHMARKS))
        yield importlib.import_module("selfcheck")


def outcome(selfcheck, monkeypatch, error, refusal):
    def start(folder, case, result):
        if error is not None:
            raise error

    monkeypatch.setattr(selfcheck, "start", start)
    case = selfcheck.Case("lossy, eager", selfcheck.LOSSY, selfcheck.EAGER, refusal=refusal)
    return selfcheck.outcome("folder", case)


@pytest.mark.parametrize(
    ("error", "refusal", "expected"),
    [
        (None, None, True),
        (None, "every page", False),
        (ConfigError("differs with every page kept"), "every page", True),
        (ConfigError("differs with every page kept"), "the best pages", False),
        (ConfigError("differs with every page kept"), None, False),
        (RuntimeError("every page"), "every page", False),
    ],
)
def test_only_the_expected_outcome_is_recorded_as_expected(
    error, refusal, expected, selfcheck, monkeypatch
):
    result = outcome(selfcheck, monkeypatch, error, refusal)
    assert result["as expected"] is expected


def test_only_lossy_engines_select_the_sparrow_attention_backend(selfcheck):
    by_name = {case.name: case for case in selfcheck.CASES}
    assert len(by_name) == len(selfcheck.CASES)
    assert by_name["lossy, eager"].settings["attention_backend"] == "CUSTOM"
    assert "attention_backend" not in by_name["lossless, eager"].settings
