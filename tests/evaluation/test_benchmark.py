"""Test that ``sparrow eval`` gives the same table however often it is interrupted, and that it
never reuses a different model's samples.
"""

import json
from pathlib import Path

import pytest
import torch

from sparrow.cli import loading, main
from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError
from sparrow.evaluation import benchmark
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from sparrow.tasks import Problem, build_tokenizer
from tests.conftest import fails, tiny_model


def test_interrupted_and_resumed_evaluation_gives_the_same_table(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(benchmark, "CHUNK", 2)
    arguments = [
        "eval",
        "--model",
        "reasoner",
        "--benchmark",
        "trace:lines=4",
        "--k",
        "2",
        "--limit",
        "5",
        "--max-new-tokens",
        "80",
    ]
    arguments += ["--schedule", "fixed:1"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    main([*arguments, "--out", str(whole)])
    table = (whole / "results.md").read_text()
    assert "| trace:lines=4 | dense | 5 |" in table and "| trace:lines=4 | fixed:1 | 5 |" in table

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return generate(*args, **kwargs)

    calls: list[int] = []
    generate = HFEngine.generate
    with monkeypatch.context() as patch, pytest.raises(SystemExit):
        patch.setattr(HFEngine, "generate", interrupted)
        main([*arguments, "--out", str(parts)])
    (samples,) = parts.glob("*.jsonl")
    assert len(samples.read_text().splitlines()) == 4
    samples.write_text(samples.read_text() + '{"problem": "half')
    main([*arguments, "--out", str(parts)])
    again = (parts / "results.md").read_text()
    assert [line.rsplit("|", 2)[0] for line in again.splitlines()] == [
        line.rsplit("|", 2)[0] for line in table.splitlines()
    ]
    rows = [
        json.loads(line)
        for line in next(Path(whole).glob("*dense*.jsonl")).read_text().splitlines()
    ]
    assert len(rows) == 10 and len({row["problem"] for row in rows}) == 5
    assert {row["reward"] for row in rows} <= {0.0, 1.0} and all(row["tokens"] > 5 for row in rows)
    speed = sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)
    assert f"| {speed:,.0f} |" in next(line for line in table.splitlines() if "| dense |" in line)
    before = samples.stat().st_mtime_ns
    monkeypatch.setattr(HFEngine, "generate", None)  # nothing is left to sample
    main([*arguments, "--out", str(parts)])
    assert samples.stat().st_mtime_ns >= before and (parts / "results.md").read_text() == again


@pytest.fixture
def engine_calls(monkeypatch) -> list[int]:
    """Record the number of prompts sampled in each call."""
    calls: list[int] = []
    generate = HFEngine.generate

    def counted(self, prompts, sampling):
        calls.append(len(prompts))
        return generate(self, prompts, sampling)

    monkeypatch.setattr(HFEngine, "generate", counted)
    return calls


ARGUMENTS = [
    "eval",
    "--model",
    "reasoner",
    "--benchmark",
    "trace:lines=4",
    "--k",
    "2",
    "--max-new-tokens",
    "20",
    "--limit",
    "3",
]


def test_samples_are_reused_only_if_weights_and_settings_match(tmp_path, engine_calls, capsys):
    checkpoint, out = tmp_path / "checkpoint", tmp_path / "out"
    tokenizer = build_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer))
    model.save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    table = tmp_path / "schedule.json"
    table.write_text('{"top_k": [1], "dense_layers": [0]}')
    arguments = [*ARGUMENTS, "--model", str(checkpoint), "--out", str(out)]
    main(arguments)
    main(arguments)
    assert engine_calls == [6]  # the second call found all samples
    others = [
        ["--temperature", "0.5"],
        ["--max-new-tokens", "10"],
        ["--seed", "1"],
        ["--precision", "bf16"],
    ]
    for other in [*others, ["--top-p", "0.7"], ["--top-k", "5"]]:
        main([*arguments, *other])
    assert engine_calls == [6] * 7
    main([*arguments, "--schedule", str(table)])
    assert engine_calls == [6] * 8  # only the sparse actor, since dense samples already exist
    table.write_text('{"top_k": [2], "dense_layers": [0]}')  # new schedule, same name
    main([*arguments, "--schedule", str(table)])
    assert engine_calls == [6] * 9
    with torch.no_grad():
        model.model.norm.weight[3] += 0.5  # new weights, same name
    model.save_pretrained(checkpoint)
    main(arguments)
    assert engine_calls == [6] * 10
    capsys.readouterr()


def test_lossless_samples_are_reused_only_if_every_lossless_setting_matches(
    tmp_path, engine_calls, capsys
):
    arguments = [*ARGUMENTS, "--mode", "lossless", "--out", str(tmp_path)]
    main(arguments)
    main(arguments)
    assert engine_calls == [6]
    others = [
        ["--draft-schedule", "fixed:2"],
        ["--draft-tokens", "3"],
        ["--no-adapt-draft-tokens"],
        ["--guess-tokens", "2"],
        ["--drafter-invariant"],
    ]
    for count, other in enumerate(others, start=2):
        main([*arguments, *other])
        assert engine_calls == [6] * count, other
    capsys.readouterr()


def test_engine_that_cannot_change_its_page_layout_samples_densely_and_sparsely(
    tmp_path, engine_calls, monkeypatch
):
    table = tmp_path / "schedule.json"
    table.write_text('{"top_k": [1], "page_size": 8, "dense_layers": [0]}')

    class LikeVLLM(HFEngine):
        """Refuse schedules that a running vLLM engine refuses."""

        def set_schedule(self, schedule):
            if not schedule.is_dense and schedule.page_layout != started_with[0].page_layout:
                raise ConfigError("a running vLLM engine cannot change its page layout")
            super().set_schedule(schedule)

    started_with: list[SparsitySchedule] = []

    def load(spec, name, model, tokenizer, decoding, precision):
        started_with.append(decoding.schedule)
        return LikeVLLM(model, decoding, [tokenizer.eos_token_id])

    monkeypatch.setattr(loading, "load_engine", load)
    main([*ARGUMENTS, "--schedule", str(table), "--out", str(tmp_path / "out")])
    assert engine_calls == [6, 6] and len(started_with) == 1
    # A running server is asked for its schedule when the command connects to it.
    assert started_with == [SparsitySchedule.load(table)]


def test_lowering_limit_or_k_reuses_samples_and_raising_them_adds_new_ones(
    tmp_path, engine_calls, capsys
):
    arguments = [*ARGUMENTS, "--out", str(tmp_path)]
    main(arguments)
    (samples,) = tmp_path.glob("*.jsonl")
    before = samples.read_text()
    main([*arguments, "--limit", "1"])
    main([*arguments, "--k", "1"])
    assert engine_calls == [6] and samples.read_text() == before
    assert "| trace:lines=4 | dense | 3 |" in (tmp_path / "results.md").read_text()
    main([*arguments, "--limit", "4"])
    assert engine_calls == [6, 2] and samples.read_text().startswith(before)
    capsys.readouterr()


def test_without_a_limit_datasets_are_sampled_in_full_and_tasks_are_refused(
    tmp_path, engine_calls, capsys
):
    data = tmp_path / "rows.jsonl"
    data.write_text(
        "".join(
            json.dumps({"question": f"trace {' '.join(str(i))}", "answer": "7"}) + "\n"
            for i in range(70)
        )
    )
    arguments = [
        "eval",
        "--model",
        "reasoner",
        "--k",
        "1",
        "--max-new-tokens",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    main([*arguments, "--benchmark", f"qa:path={data},template={{question}}"])
    assert sum(engine_calls) == 70 and "| 70 |" in (tmp_path / "out" / "results.md").read_text()
    capsys.readouterr()
    assert fails(capsys, *arguments, "--benchmark", "trace:lines=4") == (
        "sparrow: the task trace:lines=4 is endless; specify the number of problems to use, as in --limit 64"
    )


def test_changed_benchmark_rows_are_sampled_again(tmp_path, engine_calls, capsys):
    data = tmp_path / "rows.jsonl"
    rows = [{"question": f"trace {i} + {i}", "answer": str(2 * i)} for i in range(3)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = [
        "eval",
        "--model",
        "reasoner",
        "--benchmark",
        f"qa:path={data},template={{question}}",
        "--k",
        "2",
        "--max-new-tokens",
        "5",
        "--limit",
        "3",
    ]
    main([*arguments, "--out", str(tmp_path / "out")])
    data.write_text("".join(json.dumps(row) + "\n" for row in (rows[0], rows[2], rows[1])))
    main([*arguments, "--out", str(tmp_path / "out")])
    assert engine_calls == [6, 4]
    capsys.readouterr()


def test_stored_responses_are_judged_again_without_sampling(tmp_path, engine_calls):
    """A corrected answer or verifier counts for stored responses, and reaches the file."""
    tokenizer = build_tokenizer()
    engine = HFEngine(
        tiny_model(vocab_size=len(tokenizer)), SparsitySchedule.dense(), [tokenizer.eos_token_id]
    )

    def evaluate(reward, count=4):
        problems = [
            Problem(id=f"p{i}", prompt=f" {i} 2 3", verify=lambda text: reward)
            for i in range(count)
        ]
        return benchmark.run_benchmark(
            engine, tokenizer, problems, Sampling(8, top_n=0), 2, tmp_path, "qa", "dense", {}
        ).mean.value

    assert evaluate(0.0) == 0.0
    (path,) = tmp_path.glob("*.jsonl")
    before = [json.loads(line) for line in path.read_text().splitlines()]
    with path.open("a") as file:
        file.write('{"problem": "half')
    assert evaluate(1.0, count=3) == 1.0 and engine_calls == [8]
    after = [json.loads(line) for line in path.read_text().splitlines()]
    assert after == [{**row, "reward": float(row["index"] < 3)} for row in before]
    assert evaluate(0.5, count=5) == 0.5 and engine_calls == [8, 2]
    assert [json.loads(line)["reward"] for line in path.read_text().splitlines()] == [0.5] * 10


def test_samples_that_another_call_adds_during_judging_are_kept(tmp_path):
    tokenizer = build_tokenizer()
    engine = HFEngine(
        tiny_model(vocab_size=len(tokenizer)), SparsitySchedule.dense(), [tokenizer.eos_token_id]
    )

    def evaluate(verify):
        problem = Problem(id="p", prompt=" 1 2 3", verify=verify)
        benchmark.run_benchmark(
            engine, tokenizer, [problem], Sampling(8, top_n=0), 1, tmp_path, "qa", "dense", {}
        )

    def slow(text):
        with path.open("a") as file:
            file.write(json.dumps({**mine, "sample": 1}) + "\n")
        return 1.0

    evaluate(lambda text: 0.0)
    (path,) = tmp_path.glob("*.jsonl")
    mine = json.loads(path.read_text())
    evaluate(slow)
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert {row["sample"]: row["reward"] for row in rows} == {0: 1.0, 1: 0.0}


SAMPLE = {"index": 0, "problem": "p", "prompt": "x", "sample": 0, "response": "7"}
SAMPLE |= {"reward": 1.0, "answer": "7", "tokens": 3}


@pytest.mark.parametrize(
    "damage",
    [
        b'{"problem": "p"}',
        b"[1]",
        b'{"response": "\xff"}',
        json.dumps(SAMPLE)[:-14].encode() + b"}",
    ],
    ids=["other keys", "no object", "not UTF-8", "no tokens"],
)
def test_line_that_is_not_a_sample_is_reported_with_its_remedy(tmp_path, damage):
    path = tmp_path / "samples.jsonl"
    whole = json.dumps(SAMPLE).encode()
    path.write_bytes(b"\n".join([whole, whole[:9], damage, whole]))
    with pytest.raises(ConfigError, match=f"line 3 of {path} is not a sample; delete the line or"):
        benchmark._read_samples(path)
    path.write_bytes(b"\n".join([whole, whole[:9], whole]))
    assert benchmark._read_samples(path) == {(0, "p", "x", 0): SAMPLE}


def test_weight_digest_detects_a_single_changed_bit():
    model = tiny_model()
    before = benchmark.weights_digest(model)
    assert (
        before
        == benchmark.weights_digest(tiny_model())
        != benchmark.weights_digest(tiny_model(seed=1))
    )
    with torch.no_grad():
        weight = model.model.layers[2].mlp.up_proj.weight
        weight[5, 7] = torch.nextafter(weight[5, 7], torch.tensor(9.0))
    assert before != benchmark.weights_digest(model)
