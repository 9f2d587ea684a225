"""Test how ``benchmarks/cascade.py`` decides which guesses and drafts are kept, and how it makes
prompts.
"""

import importlib
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch


@pytest.fixture(scope="module")
def cascade():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
        yield importlib.import_module("cascade")


def test_keep_rate_yields_the_given_number_of_drafts_per_pass(cascade):
    assert cascade.keep_rate(1.5, 1) == pytest.approx(0.5)  # 1 + 0.5
    assert cascade.keep_rate(1.75, 2) == pytest.approx(0.5)  # 1 + 0.5 + 0.25
    assert cascade.keep_rate(1.0, 3) == pytest.approx(0.0)


def test_drafts_not_made_by_any_pass_are_rejected(cascade):
    # Each of two passes yields one or two drafts, so the third draft exists in three of four cases,
    # and the fourth in one of four.
    rates = cascade.acceptance_by_place(0.8, 0.5, guesses=1, passes=2, drafts=5)
    assert rates[:2] == [0.8, 0.8]
    assert np.cumprod(rates) == pytest.approx(
        [0.8, 0.8**2, 0.8**3 * 0.75, 0.8**4 * 0.25, 0.0], abs=0.01
    )


def test_a_process_measures_the_choices_of_its_most_drafts(cascade):
    pytest.importorskip("vllm")
    assert tuple(cascade.adaptive_choices(max(cascade.DRAFTS))) == cascade.DRAFTS
    assert cascade.adaptive_choices(10) == [3, 7, 10]


@pytest.mark.parametrize("quantization", [None, "fp8_per_block"])
def test_a_process_receives_the_options_of_its_parent(cascade, quantization):
    arguments = SimpleNamespace(
        part="synthetic",
        shape="qwen3-1.7b",
        points=[(64, 4096)],
        draft_tokens=10,
        cache_gib=None,
        quantization=quantization,
    )
    command = " ".join(cascade.again(arguments))
    assert "--points 64x4096 --draft-tokens 10" in command
    assert command.endswith("--quantization fp8_per_block") == (quantization is not None)


def test_each_arm_with_a_head_names_the_sources_of_its_guesses(cascade, tmp_path):
    least = {
        arm: decoding.lookup_min
        for arm in cascade.WITH_HEAD
        if (decoding := cascade.real_decoding(arm, tmp_path)) is not None
    }
    assert least == {
        "head_guess3": 0,
        "adaptive_head_guess3": 0,
        "mixed2_guess3": 2,
        "mixed4_guess3": 4,
        "adaptive_mixed4_guess3": 4,
    }


def test_text_is_divided_into_prompts_of_equal_length(cascade, tmp_path):
    class Letters:
        def __call__(self, text, add_special_tokens):
            return type("Encoded", (), {"input_ids": [ord(letter) for letter in text]})

    path = tmp_path / "text.txt"
    path.write_text("abcdefghij")
    found = cascade.real_prompts(Letters(), path, 3, 4)
    assert ["".join(map(chr, ids)) for ids in found] == ["abcd", "defg", "ghij"]
    with pytest.raises(AssertionError, match="has 10 tokens, fewer than a prompt of 11"):
        cascade.real_prompts(Letters(), path, 1, 11)


def test_guesses_are_kept_with_the_given_probability(cascade, monkeypatch):
    drafter = pytest.importorskip("sparrow.vllm.lossless.cascade").CascadeDrafter
    drawn = torch.full((6,), 9)
    monkeypatch.setattr(drafter, "_sample", lambda self, logits, *rest: drawn)
    rate = torch.zeros(())
    cascade.keep_some_guesses(rate)
    # Two sequences with a token and two guesses each.
    inputs = SimpleNamespace(input_ids=torch.tensor([1, 2, 3, 4, 5, 6, 0, 0]))
    state = SimpleNamespace(_vllm=SimpleNamespace(input_buffers=inputs), tokens=3)
    assert drafter._sample(state, None).tolist() == [9] * 6
    rate.fill_(1.0)
    assert drafter._sample(state, None).tolist() == [2, 3, 9, 5, 6, 9]


@pytest.mark.parametrize("arm", ["adaptive_guess3", "guess3"])
def test_samples_of_adaptive_arms_record_the_choices_made(cascade, arm):
    counts = {"emitted": 60, "accepted": 50, "drafted": 80, "guessed": 8, "passes": 36}
    cycles = {"cycles": [0] * 9, "cycles_with_guesses": [0] * 8 + [10], "bins": []}
    answers = {"sparrow_counters": [counts], "sparrow_acceptance": [cycles]}
    output = SimpleNamespace(outputs=[SimpleNamespace(token_ids=[1, 2, 3])])
    llm = SimpleNamespace(
        collective_rpc=answers.__getitem__, generate=lambda *given, **more: [output, output]
    )
    found = cascade.time_sampling(llm, [[1], [2]], [], cascade.real_decoding(arm))
    assert found["tokens"] == 6
    assert found["tokens_per_cycle"] == 6.0
    assert found["drafts_per_pass"] == 2.0
    expected = {name: cycles[name] for name in ("cycles", "cycles_with_guesses")}
    assert found.get("choices") == (expected if arm == "adaptive_guess3" else None)
