"""Test a mixture of experts in lossless mode; ``test_lossless.py`` runs this file in its own
process.
"""

import pytest

from tests.vllm import lossless_cases as cases  # isort: skip  before vLLM is imported

from sparrow.decoding import Decoding
from sparrow.errors import ConfigError
from tests.vllm import tiny_vllm as tiny
from tests.vllm.test_selfcheck import log_of


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    return folder, tiny.checkpoint(folder, name="qwen3-mixture", num_hidden_layers=2)


def test_greedy_tokens_match_stock_vllm(made):
    cases.assert_as_stock(*made, cases.FEW, 24, [(4, 1), (8, 12)])


def test_log_probs_of_samples_match_the_dense_mixture(made):
    folder, model = made
    asked = tiny.prompts(*cases.FEW, seed=2)
    with cases.engine(folder, cases.lossless(4)) as llm:
        sampled = cases.generate(llm, asked, 24, temperature=1.0, seed=1)
        counts = cases.counters(llm)
    assert 0 < counts["accepted"] < counts["drafted"]
    for prompt, completion in zip(asked, sampled, strict=True):
        ids = list(completion.token_ids)
        own = cases.dense(model, prompt, ids)[range(len(ids)), ids]
        assert abs(own - cases.logprobs_of(completion)).max() < 1e-4


def test_an_engine_passes_its_self_check(made, monkeypatch):
    said = log_of(monkeypatch)
    decoding = cases.lossless(4, adapt=True, pages=4)
    with cases.engine(made[0], decoding, checks_itself=True):
        assert sum("self-check passed" in line for line in said) == 1


def test_fp8_draft_weights_are_not_supported(made):
    with (
        pytest.raises(ConfigError, match=r"experts, .* cannot be copied; leave draft_weights"),
        cases.engine(made[0], Decoding.lossless(draft_weights="fp8")),
    ):
        pass
