"""Test guesses from history in the first stage of a cascade. Passes and cycles are compared with
hand counts, and the speed-up is computed from measured parts.
"""

import json
import random
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sparrow.cli.loading import load_model

FOLDERS = ("benchmarks", "studies/cascade")
MODULES = ("common", "history", "tables_cascade", "samples")
REQUIRED = ("tyro",)


def test_guess_continues_the_last_occurrence_of_the_longest_matching_suffix(study):
    history = study.history.History(longest=3, shortest=1)
    stream = history.add([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3])
    # 1 2 3 occurred once, at the start; 2 3 alone was last followed by 5.
    assert history.guess(stream, 2) == [4, 9]
    shorter = study.history.History(longest=2, shortest=1)
    assert shorter.guess(shorter.add([1, 2, 3, 4, 9, 2, 3, 5, 1, 2, 3]), 2) == [5, 1]


def test_new_suffix_yields_no_guess(study):
    history = study.history.History(longest=8, shortest=1)
    assert history.guess(history.add([1, 2, 3]), 3) == []
    least = study.history.History(longest=8, shortest=2)
    assert least.guess(least.add([7, 1, 8, 1]), 3) == []  # 1 has occurred, 8 1 has not
    one = study.history.History(longest=8, shortest=1)
    assert one.guess(one.add([7, 1, 8, 1]), 3) == [8, 1]  # no later token is known yet


def test_guesses_are_kept_where_a_response_repeats_earlier_tokens(study):
    kept = study.history.kept_guesses([5, 6, 7, 8, 5], [[6, 7, 9, 5, 6, 7]], [], 3, 8, 1)
    # After 5, the guess is 6 7 8, and its first two tokens are right. The next guesses are 7 8 5
    # (one right) and 8 5 6 (none right). The token 9 is new. After the second 5, the most recent
    # occurrence gives 6 7 9, and all remaining tokens are guessed correctly.
    assert kept[0].tolist() == [2, 1, 0, 0, 2, 1]


def test_guesses_from_sibling_responses_use_only_tokens_sampled_up_to_the_previous_step(study):
    ahead, behind = [1, 2, 3, 4, 5, 6], [9, 1, 2, 3, 4, 5]
    alone = study.history.kept_guesses([0], [behind], [], 3, 8, 1)
    assert alone[0].tolist() == [0] * 6
    first, second = study.history.kept_guesses([0], [ahead, behind], [], 3, 8, 1)
    assert first.tolist() == [0] * 6
    # At step 2, the sibling has sampled only 1 2, so the guess after 1 is just 2. The same holds at
    # each later step.
    assert second.tolist() == [0, 0, 1, 1, 1, 1]


def test_guesses_from_an_earlier_epoch_use_the_whole_response(study):
    kept = study.history.kept_guesses([0], [[1, 2, 3, 4]], [[1, 2, 3, 4, 5]], 3, 8, 1)
    assert kept[0].tolist() == [3, 3, 2, 1]
    # The response's own tokens count as more recent than those from the earlier epoch.
    kept = study.history.kept_guesses([0], [[1, 7, 1, 7]], [[3, 1, 2]], 1, 1, 1)
    assert kept[0].tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize(
    ("kept", "guesses", "drafts", "counts"),
    [
        # Without guesses, there is one pass per token, and the last cycle is cut short.
        ([0] * 5, 3, 4, [4, 1]),
        ([3, 9, 9, 9, 1, 9, 0, 9], 3, 4, [1, 3]),
        ([7] * 24, 7, 12, [2, 2]),  # 8 tokens, and then the remaining 4 of the cycle
        ([7] * 24, 3, 12, [3, 3]),
        ([], 3, 12, []),
    ],
)
def test_passes_per_cycle_are_counted(study, kept, guesses, drafts, counts):
    assert study.history.passes(np.array(kept, int), guesses, drafts) == counts


def test_the_expected_maximum_over_rows_matches_a_hand_calculation(study):
    assert study.history.slowest([3, 5], 1) == 4
    assert study.history.slowest([3, 5], 2) == 3 / 4 + 5 * 3 / 4
    assert study.history.slowest([6, 6, 6], 32) == 6


def test_speedup_from_measured_parts_matches_a_hand_calculation(study):
    times = dict(tokens_per_cycle=9, drafts=12, guess_ms=1, sparse_ms=4, verify_ms=15, dense_ms=15)
    assert study.history.speed(1, **times) == 9 * 15 / (12 * 5 + 15)
    assert study.history.speed(2.4, **times) == 9 * 15 / (5 * 5 + 15)


def test_the_interval_contains_the_ratio_of_sums(study):
    estimate, low, high = study.history.ratio([10, 20, 60], [10, 10, 10])
    assert estimate == 3 and 1 <= low < 3 < high <= 6
    assert study.history.ratio([4, 8], [2, 4]) == [2, 2, 2]


@pytest.fixture
def samples(tmp_path):
    """Write samples of two kinds of text, with two prompts of each kind and four responses of 24
    tokens to each prompt. Responses of one kind count to ten over and over, and those of the other
    kind never repeat a token.
    """
    arrays = {}
    for kind, number, place in np.ndindex(2, 2, 4):
        key = f"{('counting', 'new')[kind]}/1.0/{number}"
        counted = (np.arange(24) + number) % 10
        ids = 1000 * (1 + 4 * number + place) + np.arange(24) if kind else counted
        arrays[f"{key}/prompt"] = np.array([90, 91], np.int32)
        arrays[f"{key}/{place}"] = ids.astype(np.int32)
        arrays[f"{key}/{place}/logprobs"] = np.full(24, -0.5 - kind, np.float16)
    np.savez_compressed(tmp_path / "samples.npz", **arrays)
    return tmp_path / "samples.npz"


def test_tables_are_made_from_a_file_of_samples(study, samples, tmp_path, monkeypatch):
    parts = tmp_path / "parts.json"
    sparse_ms = {"0": 4.0, "3": 4.0, "7": 5.0}
    measured = {"state": "32 x 15,000", "tokens_per_cycle": 9.0, "guess_ms": 0.0}
    measured |= {"sparse_ms": sparse_ms, "verify_ms": 15.0, "dense_ms": 15.0}
    parts.write_text(json.dumps([measured]))
    out = tmp_path / "cascade_history.json"
    options = study.history.Options(samples, out, parts=parts)
    rows = study.history.main(options)["rows"]
    found = {(row["kind"], row["history"], row["guesses"]): row for row in rows}
    assert len(rows) == 2 * 3 * 2

    for history in ("own", "siblings", "epoch"):
        new = found["new", history, 7]
        assert (new["tokens_per_pass"], new["slowest"], new["nats"]) == ([1] * 3, 12, [1.5] * 3)
    # The first eleven tokens cannot be guessed, so each takes a pass. In the twelfth pass, the
    # cycle ends after one token. The second cycle has three passes of four tokens.
    own = found["counting", "own", 3]
    assert own["tokens_per_pass"] == [24 / (12 + 3)] * 3
    assert own["nats"] == [0.5] * 3 and own["slowest"] == pytest.approx(12)
    # With the earlier epoch, guesses are right from the first token on, so passes yield 8 and 4
    # tokens. In the second cycle, the suffix last occurred two tokens before the end of an earlier
    # response. There, passes yield 3, 8 and 1 tokens.
    epoch = found["counting", "epoch", 7]
    assert epoch["tokens_per_pass"] == [24 / (2 + 3)] * 3 and epoch["slowest"] == pytest.approx(3)
    assert found["counting", "epoch", 3]["tokens_per_pass"] == [24 / (3 + 4)] * 3

    monkeypatch.setattr(study.tables_cascade, "load", lambda _: study.common.read_result(out))
    history = study.tables_cascade.TABLES["cascade history"]()
    assert "| counting | 1 | 0.50 | 7 | " in history and "| 4.80 [4.80, 4.80] |" in history
    assert "| passes per cycle of 12 | slowest of 32 |" in history and "| 12.0 | 12.0 |" in history
    speed = study.tables_cascade.cascade_speed()
    # Dense decoding takes 15 ms for each of 9 tokens. A cycle takes 15 ms, plus 12 passes of 4 ms
    # without guesses, or 2.5 or 3 passes of 5 ms with guesses.
    assert "| 32 x 15,000 | 2.14x | " in speed and "| 4.91x (4.50x) |" in speed


def test_too_few_or_too_short_responses_raise_an_error(study, samples, tmp_path):
    options = study.history.Options(samples, tmp_path / "out.json", drafts=25)
    with pytest.raises(
        ValueError, match="no response of counting is as long as a cycle of 25 tokens"
    ):
        study.history.main(options)
    with np.load(samples) as file:
        fewer = {name: file[name] for name in file.files if "/3" not in name}
    np.savez_compressed(samples, **fewer)
    with pytest.raises(ValueError, match="has 3 responses, but at least 4 are needed"):
        study.history.main(study.history.Options(samples, tmp_path / "out.json"))


def letters(text: str, add_special_tokens: bool) -> SimpleNamespace:
    """Tokenize a text into letters, as a stand-in for a tokenizer."""
    return SimpleNamespace(input_ids=[ord(letter) for letter in text])


def test_passages_are_taken_only_from_texts_that_are_long_enough(study):
    texts = iter(["ab", "c" * 9, "d" * 8])
    passages = study.samples.continued(letters, texts, 4, random.Random(0))
    assert list(passages) == [[ord("c")] * 4]  # only this text is more than twice as long


def test_an_interrupted_run_keeps_the_kinds_already_sampled(study, tmp_path, monkeypatch, capsys):
    class LLM:
        def __init__(self, model, **settings):
            assert settings["logprobs_mode"] == "processed_logprobs"

        def generate(self, inputs, settings, use_tqdm):
            if inputs[0]["prompt_token_ids"] == [2]:
                raise KeyboardInterrupt
            assert [s.seed for s in settings] == [1, 2] and settings[0].temperature == 0.5
            step = {7: SimpleNamespace(logprob=-0.25)}
            response = SimpleNamespace(token_ids=(7, 7, 7), logprobs=[step] * 3)
            return [SimpleNamespace(outputs=[response] * s.n) for s in settings]

    vllm = SimpleNamespace(LLM=LLM, SamplingParams=lambda **given: SimpleNamespace(**given))
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    asked = {"first": [[1, 1], [1]], "second": [[2]]}
    monkeypatch.setattr(study.samples, "prompts", lambda tokenizer, options: asked)
    monkeypatch.setattr(study.samples.AutoTokenizer, "from_pretrained", lambda model: None)

    out = tmp_path / "runs" / "samples.npz"
    options = study.samples.Options("model", tmp_path, out, temperatures=(0.5,), samples=2)
    with pytest.raises(KeyboardInterrupt):
        study.samples.main(options)
    assert capsys.readouterr().out.startswith("first at 0.5: 12 tokens, ")
    assert [path.name for path in out.parent.iterdir()] == ["samples.npz"]
    first, second = study.history.groups(out)
    assert (first.kind, first.temperature, first.prompt) == ("first", 0.5, [1, 1])
    assert first.responses == second.responses == [[7, 7, 7]] * 2 and first.nats == 6 * 0.25


def test_responses_can_be_sampled_with_transformers_without_vllm(
    study, checkpoint, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "vllm", None)
    asked = {"letters": [[5, 6, 7], [9, 8]]}
    monkeypatch.setattr(study.samples, "prompts", lambda tokenizer, options: asked)
    out = tmp_path / "samples.npz"
    options = study.samples.Options(
        checkpoint,
        tmp_path,
        out,
        temperatures=(0.7,),
        samples=4,
        max_new_tokens=6,
        engine="hf",
    )
    study.samples.main(options)

    model, _ = load_model(checkpoint)
    for prompt, group in zip(asked["letters"], study.history.groups(out), strict=True):
        assert (group.kind, group.temperature, group.prompt) == ("letters", 0.7, prompt)
        assert len(group.responses) == 4 and len(set(map(tuple, group.responses))) > 1
        nats = 0.0
        for response in group.responses:
            with torch.no_grad():
                logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
            logprobs = logits.div(0.7).log_softmax(-1)
            nats -= float(logprobs[torch.arange(len(response)), response].sum())
        assert group.nats == pytest.approx(nats, rel=0.05)  # sampled in bfloat16
