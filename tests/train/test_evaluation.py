"""Test evaluations and exports during a run. Each must happen exactly once, and none may affect
training.
"""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError
from sparrow.evaluation.benchmark import run_benchmark
from sparrow.rollout import Sampling
from sparrow.run.directory import RunDir
from sparrow.schedule import SparsitySchedule
from sparrow.tasks import Problem, build_tokenizer
from sparrow.train import saving
from sparrow.train.config import EvalConfig, ExportConfig, RolloutConfig, TrainConfig
from sparrow.train.evaluation import best_step
from tests.conftest import tiny_model
from tests.train.test_trainer import EarlyWords, make_trainer, metrics_of


def words(tag: str, count: int) -> list[Problem]:
    """Return a benchmark like the task, but with different prompts."""
    return [
        replace(EarlyWords().problem(i), id=f"{tag}-{i}", prompt=f" {i % 10} +" * (12 + i))
        for i in range(count)
    ]


def evaluations_of(run_dir) -> list[dict]:
    rows = [
        json.loads(line) for line in Path(run_dir, "evaluations.jsonl").read_text().splitlines()
    ]
    for row in rows:
        row.pop("seconds")
    return rows


EVALUATED = dict(
    eval=EvalConfig(every=2, benchmark=("words",), k=2, top_p=0.9),
    export=ExportConfig(every=1, keep=2, best=True),
)


@pytest.mark.slow
def test_evaluations_leave_training_bitwise_unchanged(tmp_path):
    plain = make_trainer(tmp_path / "plain", steps=3)
    plain.train()
    made = make_trainer(
        tmp_path / "run",
        steps=3,
        benchmarks={"words": words("a", 3), "more": words("b", 2)},
        **EVALUATED,
    )
    logged = []
    made.accelerator.log = lambda values, step: logged.append((step, values))
    made.train()
    sent = [(step, values) for step, values in logged if "eval/words/mean/value" in values]
    assert [step for step, _ in sent] == [0, 2, 3] and "eval/more/tokens" in sent[0][1]
    for ours, theirs in zip(made.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert metrics_of(tmp_path / "run") == metrics_of(tmp_path / "plain")
    assert not (tmp_path / "plain" / "evaluations.jsonl").exists()
    found = evaluations_of(tmp_path / "run")
    assert [row["step"] for row in found] == [0, 2, 3]  # including the last step
    assert found[0]["eval"].keys() == {"words", "more"} and found[0]["eval"] != found[2]["eval"]
    assert found[0]["eval"]["words"]["problems"] == 3 and found[0]["eval"]["words"]["k"] == 2
    assert set(found[0]["eval"]["words"]["mean"]) == {"value", "low", "high"}


@pytest.mark.slow
def test_evaluations_match_sparrow_eval_on_the_export(tmp_path):
    made = make_trainer(tmp_path, steps=2, benchmarks={"words": words("a", 4)}, **EVALUATED)
    made.train()
    for row in evaluations_of(tmp_path)[1:]:
        folder = tmp_path / "exports" / f"step-{row['step']}"
        model, tokenizer = (
            AutoModelForCausalLM.from_pretrained(folder),
            AutoTokenizer.from_pretrained(folder),
        )
        engine = HFEngine(
            model.eval(),
            SparsitySchedule.dense(page_size=8, dense_layers=(0,)),
            [tokenizer.eos_token_id],
        )
        sampling = Sampling(24, top_n=0, seed=5, top_p=0.9)
        result = run_benchmark(
            engine, tokenizer, words("a", 4), sampling, 2, tmp_path / "eval", "words", "dense", row
        )
        assert row["eval"]["words"]["mean"]["value"] == result.mean.value
        assert row["eval"]["words"]["tokens"] == result.tokens


@pytest.mark.slow
def test_old_exports_are_deleted_and_the_best_export_is_linked(tmp_path):
    made = make_trainer(tmp_path, steps=6, benchmarks={"words": words("a", 4)}, **EVALUATED)
    made.train()
    means = {row["step"]: row["eval"]["words"]["mean"]["value"] for row in evaluations_of(tmp_path)}
    best = max(means, key=lambda step: (means[step], -step))
    found = {path.name for path in (tmp_path / "exports").iterdir()}
    assert {"best", "step-5", "step-6", f"step-{best}"} <= found and len(found) <= 5
    assert (tmp_path / "exports" / "best").resolve().name == f"step-{best}"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "exports" / "step-6")
    assert all(
        torch.equal(p, q) for p, q in zip(again.parameters(), made.model.parameters(), strict=True)
    )
    assert len(AutoTokenizer.from_pretrained(tmp_path / "exports" / "best")) == len(made.tokenizer)


def test_a_resumed_run_with_another_export_period_keeps_the_newest_earlier_exports(tmp_path):
    def exports():
        return sorted(path.name for path in (tmp_path / "exports").iterdir())

    make_trainer(tmp_path, steps=4, export=ExportConfig(every=2, keep=2)).train()
    changed = ExportConfig(every=5, keep=2)
    make_trainer(tmp_path, steps=5, resume=True, export=changed).train()
    assert exports() == ["step-4", "step-5"]


@pytest.mark.parametrize("config", [ExportConfig(best=True), ExportConfig(every=3, best=True)])
def test_a_resumed_run_keeps_the_same_exports_as_an_uninterrupted_one(
    tmp_path, monkeypatch, config
):
    """The evaluations improve with every step, so every step was the best for a while."""
    alone = SimpleNamespace(on_main=lambda phase, work: work())
    monkeypatch.setattr(saving, "export", lambda learner, tokenizer, folder, adapter: None)

    def exports(name, resumed_at):
        run_dir = RunDir(tmp_path / name, resume=False)
        kept = saving.Exports(replace(config, keep=2), run_dir, alone)
        rows = []
        for step in range(8):
            if step == resumed_at:
                kept = saving.Exports(replace(config, keep=2), run_dir, alone)
            rows.append({"step": step, "eval": {"words": {"mean": {"value": step / 10}}}})
            kept.update(None, None, step, rows)
        return run_dir.steps("exports")

    assert exports("resumed", 4) == exports("whole", None)


@pytest.mark.slow
@pytest.mark.parametrize("stop", ["in an evaluation", "in an export", "after one"])
def test_an_interrupted_run_has_each_evaluation_and_export_exactly_once(
    tmp_path, monkeypatch, stop
):
    whole = dict(steps=5, benchmarks={"words": words("a", 3)}, **EVALUATED)
    make_trainer(tmp_path / "whole", **whole).train()
    begun = []

    def listener(event, metrics):
        begun.append(event)
        if stop == "in an evaluation" and begun.count("eval") == 2 and event == "eval":
            raise KeyboardInterrupt
        if stop == "after one" and begun.count("step") == 3:
            raise KeyError("killed")  # between checkpoints

    def export(learner, tokenizer, model, adapter):
        begun.append("export")
        if begun.count("export") == 3:
            Path(model, "half").touch()
            raise KeyError("killed")
        right(learner, tokenizer, model, adapter)

    right = saving.export
    with monkeypatch.context() as patched:
        if stop == "in an export":
            patched.setattr(saving, "export", export)
        stopped = make_trainer(tmp_path / "run", listener=listener, **{**whole, "save_every": 1})
        with pytest.raises((KeyboardInterrupt, KeyError)):
            stopped.train()
    make_trainer(tmp_path / "run", resume=True, **{**whole, "save_every": 1}).train()
    assert evaluations_of(tmp_path / "run") == evaluations_of(tmp_path / "whole")
    assert {p.name for p in (tmp_path / "run" / "exports").iterdir()} == {
        p.name for p in (tmp_path / "whole" / "exports").iterdir()
    }
    again, straight = (
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("run", "whole")
    )
    assert all(torch.equal(again[name], straight[name]) for name in straight)


def test_a_restart_before_the_first_step_evaluates_and_exports_the_new_model(tmp_path):
    def interrupt(event, metrics):
        if event == "rollout":
            raise KeyboardInterrupt

    def start(seed, run_dir=tmp_path / "run"):
        model = tiny_model(vocab_size=len(build_tokenizer()), initializer_range=0.1, seed=seed)
        benchmarks = {"words": words("a", 3)}
        made = make_trainer(
            run_dir, model=model, listener=interrupt, benchmarks=benchmarks, **EVALUATED
        )
        with pytest.raises(KeyboardInterrupt):
            made.train()
        return made.model

    start(seed=1)
    evaluations = tmp_path / "run" / "evaluations.jsonl"
    evaluations.write_text(evaluations.read_text() + '{"step": 0, "ev')  # cut short
    (tmp_path / "run" / "exports" / "step-0-copy").mkdir()
    model = start(seed=2)
    start(seed=2, run_dir=tmp_path / "fresh")
    assert evaluations_of(tmp_path / "run") == evaluations_of(tmp_path / "fresh")
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "exports" / "best")
    pairs = zip(exported.parameters(), model.parameters(), strict=True)
    assert all(torch.equal(p, q) for p, q in pairs)
    assert (tmp_path / "run" / "exports" / "step-0-copy").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(eval=lambda: EvalConfig(every=2)), "benchmark is .*set if and only if"),
        (
            dict(eval=lambda: EvalConfig(benchmark=("aime24",))),
            "benchmark is .*set if and only if",
        ),
        (
            dict(export=lambda: ExportConfig(best=True)),
            "export.best is True, but must be off without eval.every",
        ),
        (
            dict(
                rollout=lambda: RolloutConfig(mode="lossless"),
                eval=lambda: EvalConfig(every=2, benchmark=("aime24",), top_p=0.7),
            ),
            r"eval.top_p is 0.7, but must be 1, and top_k left out, with lossless rollouts",
        ),
    ],
)
def test_invalid_evaluation_settings_raise_errors(settings, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig(**{name: make() for name, make in settings.items()})


def test_the_best_step_is_the_earliest_with_the_highest_mean_over_benchmarks():
    def row(step, *means):
        return {
            "step": step,
            "eval": {str(i): {"mean": {"value": mean}} for i, mean in enumerate(means)},
        }

    assert best_step([]) is None
    assert best_step([row(0, 0.2, 0.4), row(2, 0.5, 0.3), row(4, 0.4, 0.4), row(6, 0.3, 0.3)]) == 2
