"""Test how the script that drives other trainers evaluates their responses and counters. No trainer
is started.
"""

import importlib
import json
from pathlib import Path

import pytest

from sparrow.decoding import Decoding
from sparrow.vllm import config

ROOT = Path(__file__).parents[2]
EQUAL = {"equal": 6, "differ at a tie": 0, "wrong": 0, "tokens compared": 240}
DRAFTED = {"drafted": 90, "accepted": 70}
READ = {"tokens_read": 10, "tokens_held": 30}


@pytest.fixture(scope="module")
def script():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("trainer_rollouts")


def test_equal_responses_have_no_first_difference(script):
    assert script.first_difference([1, 2, 3], [1, 2, 3]) is None


def test_first_of_two_differences_is_found(script):
    assert script.first_difference([1, 2, 3, 4], [1, 5, 3, 6]) == 1


def test_response_that_stops_early_differs_at_its_end(script):
    assert script.first_difference([1, 2, 3], [1, 2]) == 2


def test_token_ties_with_the_greedy_token_if_rounding_could_swap_them(script):
    logits = [0.0, 5.0, 4.99, 1.0]
    assert script.tied(logits, 1, 2)
    assert not script.tied(logits, 1, 3)
    assert not script.tied(logits, 3, 1)


def test_two_tokens_far_below_the_greedy_token_are_not_tied(script):
    assert not script.tied([0.0, 5.0, 1.0, 1.0], 2, 3)


def test_lossless_rollouts_pass_if_drafts_are_accepted_and_tokens_match_stock_vllm(script):
    assert script.failures("lossless", DRAFTED, EQUAL) == []


@pytest.mark.parametrize(
    ("counts", "wrong", "words"),
    [
        ({}, 0, "no drafts were proposed"),
        ({"drafted": 90, "accepted": 0}, 0, "no drafts were accepted"),
        (DRAFTED, 1, "responses are not those of stock vLLM"),
    ],
)
def test_each_fault_in_lossless_rollouts_is_reported(script, counts, wrong, words):
    assert words in script.failures("lossless", counts, EQUAL | {"wrong": wrong})


def test_lossy_rollouts_may_differ_from_stock_vllm_but_must_read_fewer_tokens(script):
    others = EQUAL | {"wrong": 6}
    assert script.failures("lossy", READ, others) == []
    assert script.failures("lossy", READ | {"tokens_read": 30}, others)
    assert "nothing was decoded by Sparrow" in script.failures("lossy", {}, others)


def test_mode_that_stops_before_the_weight_update_is_reported_as_faulty(
    script, monkeypatch, tmp_path
):
    monkeypatch.setattr(script, "compare", lambda *_: EQUAL)
    rounds = [{"responses": [], "counts": DRAFTED}]
    stock = {"rounds": rounds * 2}
    stopped = script.judged("lossless", 2, {"rounds": rounds}, stock, tmp_path)
    assert stopped["faults"] == ["it stopped in round 2"]
    assert stopped["before"]["counts"] == DRAFTED
    assert script.judged("lossless", 2, stock, stock, tmp_path)["faults"] == []


@pytest.mark.parametrize(("cuda", "tried"), [(True, 2), (False, 1)])
def test_openrlhf_weights_are_updated_only_on_a_gpu(script, monkeypatch, cuda, tried):
    monkeypatch.setattr(script, "CUDA", cuda)
    assert len(script.checkpoints("openrlhf")) == tried
    assert len(script.checkpoints("skyrl")) == 2


@pytest.mark.parametrize("mode", ["stock", "lossless", "lossy"])
def test_engine_options_and_environment_variables_request_the_same_decoding(
    script, mode, monkeypatch
):
    for name in ("SPARROW_MODE", "SPARROW_SCHEDULE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in script.environment(mode).items():
        monkeypatch.setenv(name, value)
    option = script.engine_options(mode)["additional_config"].get("sparrow")
    asked = config.from_environment()
    assert (asked is None) == (option is None) == (mode == "stock")
    if asked is not None:
        assert asked.mode == mode
        assert Decoding.load(json.loads(json.dumps(option))) == asked
