"""Test that docs/performance.md matches the benchmarks' JSON files, and that the rollout traces
match their description on that page.
"""

import importlib
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tables():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("tables")


@pytest.fixture(scope="module")
def trace():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("rollout_trace")


@pytest.mark.slow
def test_tables_in_the_docs_match_the_result_files(tables):
    pages = [page.read_text(encoding="utf-8") for page in tables.PAGES]
    assert [tables.render(page, tables.TABLES) == page for page in pages] == [True] * len(pages), (
        "run python benchmarks/tables.py"
    )
    assert all("".join(pages).count(f"<!-- table: {name} -->") == 1 for name in tables.TABLES)


def test_trace_time_is_the_sum_of_its_steps_and_joins(tables):
    states = [{"none": {"ms": 10.0}}, {"none": {"ms": 20.0}}]
    run = {
        "join_ms": [1.0, 90.0, 4.0],
        "traces": {"3": {"steps": 100, "requests": 3, "states": states}},
    }
    assert tables.speed.trace_seconds(run, "3", "none") == pytest.approx(100 * 0.015 + 3 * 0.004)


def test_speedup_interval_matches_a_hand_calculation(tables):
    def run(ms):
        trace = {"steps": 1000, "requests": 0, "states": [{"none": {"ms": x}} for x in ms]}
        return {"join_ms": [5.0], "traces": {"9": trace}}

    # In the three states, stock - 2 * ours is 10, 0 and -10. Successive values differ by 10, so
    # their mean has a variance of 50 / 3. Divided by our 10 s, its standard error is 0.408. With
    # 2 * 4 / 5 degrees of freedom, the half-width of the interval is 5.52 standard errors.
    assert (
        tables.speed.speedup(run([30, 20, 10]), run([10, 10, 10]), "9", "none")
        == "2.00x [-0.25, 4.25]"
    )
    # If all states have the same speed-up, the choice of states does not matter.
    assert (
        tables.speed.speedup(run([30, 20, 10]), run([15, 10, 5]), "9", "none")
        == "2.00x [2.00, 2.00]"
    )
    # The traces take 20 s and 10 s, and 10 s is added to each.
    assert (
        tables.speed.speedup(run([20, 20]), run([10, 10]), "9", "none", 10) == "1.50x [1.50, 1.50]"
    )


def test_hand_edited_table_cell_is_restored(tables):
    page = tables.PAGES[0].read_text(encoding="utf-8")
    at = page.index("| 1.7B |")
    assert tables.render(page[:at] + "| 1.8B |" + page[at + 8 :], tables.TABLES) == page


def test_request_joins_when_another_ends(trace):
    spans = trace.simulate([10, 20, 30, 40], [2, 5, 3, 1], slots=2)
    assert [(steps, sorted(lengths.tolist()), joined) for steps, lengths, joined in spans] == [
        (2, [10, 20], 2),
        (3, [22, 30], 1),
        (1, [40], 1),
    ]
    # the second, fourth and last of six steps
    found = [(step, sorted(lengths.tolist())) for step, lengths in trace.states(spans, 3)]
    assert found == [(1, [11, 21]), (3, [23, 31]), (5, [40])]


@pytest.mark.parametrize("requests", [240, 1024])
def test_every_token_of_a_trace_is_generated_once(trace, requests):
    tokens = trace.responses(requests)
    spans = trace.simulate([trace.PROMPT] * requests, tokens, 64)
    assert sum(steps * len(lengths) for steps, lengths, _ in spans) == sum(tokens)
    assert sum(joined for _, _, joined in spans) == requests
    assert max(lengths.max() + steps for steps, lengths, _ in spans) == trace.PROMPT + trace.CUTOFF
    assert max(len(lengths) for _, lengths, _ in spans) == 64
    means = [lengths.sum() for _, lengths in trace.states(spans, 2000)]
    held = sum(
        steps * (lengths.sum() + len(lengths) * (steps - 1) / 2) for steps, lengths, _ in spans
    )
    assert np.mean(means) == pytest.approx(held / sum(steps for steps, _, _ in spans), rel=2e-3)
