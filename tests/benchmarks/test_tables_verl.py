"""Test the table of verl's runs, made from the recipe's results."""

import importlib
import json
from pathlib import Path

import pytest


@pytest.fixture
def tables_verl(tmp_path):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        module = importlib.import_module("tables_verl")
        patch.setattr(module, "RESULTS", tmp_path)
        yield module


def step(reward, seconds, **drafts):
    logged = {"critic/score/mean": reward, "timing_s/step": seconds, "timing_s/gen": seconds / 2}
    return logged | {f"sparrow/drafts/{name}": value for name, value in drafts.items()}


def test_runs_are_listed_in_a_fixed_order_and_drafts_are_summed_over_steps(tables_verl):
    lossless = [
        step(0.5, 4.0, drafted=40, accepted=0.5, tokens_per_cycle=3.0),  # 20 in 10 cycles
        step(0.7, 6.0, drafted=120, accepted=0.75, tokens_per_cycle=4.0),  # 90 in 30 cycles
    ]
    runs = {"lossless": lossless, "dense": [step(0.4, 5.0)]}
    for mode, log in runs.items():
        path = tables_verl.RESULTS / f"verl_two_gpus_{mode}.json"
        path.write_text(json.dumps({"mode": mode, "log": log}))
    *_, dense, sparrows = tables_verl.verl().splitlines()
    assert dense == "| dense | 1 | 0.40 → 0.40 | 0.400 | 5.0 | 2.50 |  |  |"
    assert sparrows == "| lossless | 2 | 0.60 → 0.60 | 0.600 | 5.0 | 2.50 | 68.8% | 3.75 |"


def test_result_list_is_empty_without_results(tables_verl):
    assert tables_verl.results() == []
