"""docs/performance.md says what the JSON files of the benchmarks say."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "benchmarks" / "tables.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_has_every_table_as_the_files_have_it(tables):
    page = tables.PAGE.read_text()
    assert tables.render(page) == page, "run python benchmarks/tables.py"
    assert all(f"<!-- table: {name} -->" in page for name in tables.TABLES)


def test_a_traces_seconds_are_steps_at_the_mean_of_the_strata_and_the_joins(tables):
    states = [{"none": {"ms": 10.0}}, {"none": {"ms": 20.0}}]
    run = {"traces": {"3": {"steps": 100, "requests": 3, "join_ms": [1.0, 90.0, 4.0], "states": states}}}
    assert tables.trace_seconds(run, "3", "none") == pytest.approx(100 * 0.015 + 3 * 0.004)


def test_a_number_changed_in_the_page_is_noticed(tables):
    page = tables.PAGE.read_text()
    at = page.index("| 1.7B |")
    assert tables.render(page[:at] + "| 1.8B |" + page[at + 8 :]) == page
