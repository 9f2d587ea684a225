"""Test bad inputs that commands used to ignore, or that made them hang or show the error message of
another program. Each bad input must be reported in one sentence.
"""

import json

import pytest
import torch

from sparrow.cli import loading
from sparrow.cli.loading import (
    load_benchmark,
    load_benchmarks,
    load_object,
    load_problems,
    read_prompts,
)
from sparrow.errors import ConfigError, TaskError
from sparrow.model.actor import set_schedule, teacher_forced
from sparrow.model.scoring import TokenScorer
from sparrow.schedule import SparsitySchedule
from sparrow.tasks import Problem
from sparrow.tasks.base import draw
from sparrow.train.saving import _cut_short
from tests.conftest import fails, tiny_model

MODEL = ["--model", "reasoner"]
TASK = ["--task", "trace:lines=4"]


@pytest.mark.parametrize(
    "command, message",
    [
        (["train", *MODEL, *TASK, "--run-dir", ""], "run_dir is '', but must have at least 1"),
        (["demo", "--run-dir", ""], "run_dir is '', but must have at least 1"),
        (["eval", *MODEL, "--benchmark", "gsm8k", "--out", ""], "out is '', but must have"),
        (["calibrate", *MODEL, *TASK, "--out", ""], "out is '', but must have at least 1"),
        (["measure", *MODEL, *TASK, "--schedule", "fixed:1", "--out", ""], "out is '', but must"),
        (
            ["train", *MODEL, *TASK, "--rollout.prompts", "1000000000000"],
            "rollout.prompts is 1000000000000, but must be less than or equal to 1000000",
        ),
        (
            ["train", *MODEL, *TASK, "--rollout.samples", "1000000000000"],
            "rollout.samples is 1000000000000, but must be less",
        ),
        (
            ["cost", *MODEL, "--schedule", "fixed:1", "--responses", "10000000000"],
            "responses is 10000000000, but must be at most 10,000, because each of them is simulated",
        ),
        (
            ["calibrate", *MODEL, *TASK, "--out", "s.json", "--count", "19"],
            "count is 19, but must be at least 20, because p5 has no confidence interval with "
            "fewer responses",
        ),
        (["audit", *MODEL, *TASK, "--out", ""], "out is '', but must have at least 1"),
        (
            ["audit", *MODEL, *TASK, "--count", "1000000000000"],
            "count is 1000000000000, but must be less",
        ),
        (
            ["eval", *MODEL, "--benchmark", "trace", "--out", "e", "--limit", "1000000000000"],
            "limit is 1000000000000, but must be less",
        ),
        (
            ["train", *MODEL, *TASK, "--eval.limit", "1000000000000"],
            "eval.limit is 1000000000000, but must be less",
        ),
        (
            ["train", *MODEL, *TASK, "--eval.k", "1000000000000"],
            "eval.k is 1000000000000, but must be less",
        ),
        (["report", "missing.json"], "missing.json does not exist; pass a run directory"),
        (["report", ".", "missing"], "missing does not exist; pass a run directory"),
    ],
)
def test_unusable_setting_is_refused_before_anything_is_loaded(
    command, message, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code = 1 if command[0] == "report" else 2  # an argument error, before the run
    assert message in fails(capsys, *command, code=code)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b'{"bins": ', b"{}", b"[1]", b"\xff"])
def test_report_on_another_file_names_the_files_that_it_reads(content, capsys, tmp_path):
    file = tmp_path / "file.json"
    file.write_bytes(content)
    assert fails(capsys, "report", str(file)) == (
        f"sparrow: {file} is neither a schedule nor a measurement; pass a run directory, or a file "
        "from sparrow calibrate or sparrow measure"
    )


def test_second_demo_in_the_same_directory_is_refused(capsys, tmp_path):
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    refused = fails(capsys, "demo", "--run-dir", str(tmp_path))
    assert (
        "already contains a run, but a demo needs a new directory" in refused
        and "--resume" not in refused
    )


def test_task_together_with_a_dataset_is_refused():
    with pytest.raises(
        ConfigError, match="--task trace and --dataset gsm8k taco are mutually exclusive"
    ):
        load_problems("trace", ("gsm8k", "taco"), None)


def test_error_names_the_limit_option_of_the_command():
    with pytest.raises(ConfigError, match="as in --limit 64"):
        load_benchmark("trace:lines=4", None, None)
    with pytest.raises(ConfigError, match=r"as in --eval\.limit 64"):
        load_benchmarks(["trace:lines=4"], None, None, 100)


@pytest.mark.parametrize("path", ["my/judges.py:right", "judges.py:right"])
def test_error_about_a_reward_path_suggests_the_module_name(path):
    with pytest.raises(
        ConfigError, match="pass judges:right and run the command in the file's folder"
    ):
        load_object(path, "reward")


def test_error_names_a_module_that_exits_on_import(tmp_path, monkeypatch):
    (tmp_path / "ends_at_once.py").write_text("import sys\nsys.exit(2)\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match="importing ends_at_once raised SystemExit: 2"):
        load_object("ends_at_once:judge", "reward")


def test_lone_surrogate_is_reported_with_its_row_number(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text(
        json.dumps({"question": "a", "answer": "1"})
        + "\n"
        + '{"question": "\\ud800", "answer": "1"}'
    )
    with pytest.raises(
        ConfigError, match=r"row 2 of .*its text contains \\ud800, a lone surrogate"
    ):
        load_problems(None, (str(file),), None)
    file.write_text('{"prompt": "\\udc00"}')
    with pytest.raises(ConfigError, match=r"row 1 of .*its text contains \\udc00"):
        read_prompts(file)


@pytest.mark.parametrize(
    "problem, message",
    [
        (Problem("p", ["a message"], float), "has a prompt of type list, expected text"),
        (Problem("p", None, float), "has a prompt of type NoneType, expected text"),
        (Problem("p", "\ud800", float), "half of a character"),
        (Problem("p", "text", 1.0), "has a verifier of type float"),
    ],
)
def test_problem_with_fields_of_the_wrong_type_raises_an_error(problem, message):
    class Task:
        def problem(self, index, seed=0):
            return problem

    with pytest.raises(TaskError, match=message):
        draw(Task(), 0, 0)


def test_invalid_schedules_from_python_are_reported_in_one_sentence():
    with pytest.raises(ConfigError, match="got unknown"):
        SparsitySchedule.load({1: 2, "a": 3})
    for model, target in ((None, 0.86), ("qwen3-4b", None), ("qwen3-4b", "0.86"), (4, 0.86)):
        with pytest.raises(ConfigError, match="a preset consists of a model's name and a target"):
            SparsitySchedule.preset(model, target)


def test_missing_models_and_lengths_are_reported_in_one_sentence():
    schedule = SparsitySchedule.fixed(2, dense_layers=(0,))
    with pytest.raises(ConfigError, match="the model is None, not a transformers model"):
        set_schedule(None, schedule)
    model = tiny_model()
    set_schedule(model, schedule)
    with pytest.raises(ConfigError, match="the model is None"), teacher_forced(None, [1]):
        pass
    for lengths in (None, "ab", [1, None], {}):
        with (
            pytest.raises(ConfigError, match="an integer of at least 0 for each row"),
            teacher_forced(model, lengths),
        ):
            pass


def test_vocabulary_of_fewer_than_eight_tokens_can_be_scored():
    TokenScorer(tiny_model(vocab_size=5))


def test_teacher_forcing_with_triton_reports_the_missing_package(monkeypatch):
    import sys

    from sparrow import attention

    monkeypatch.setitem(sys.modules, "sparrow.attention.triton", None)
    monkeypatch.delattr(attention, "triton", raising=False)
    model, schedule = tiny_model(), SparsitySchedule.fixed(2, dense_layers=(0,))
    set_schedule(model, schedule)
    with (
        pytest.raises(ConfigError, match="implementation 'triton' needs Triton"),
        teacher_forced(model, [2], implementation="triton"),
    ):
        model(torch.arange(40)[None], use_cache=False)


def test_truncated_file_is_reported_with_the_free_disk_space(tmp_path):
    error = RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0\nmore")
    reason = _cut_short(error, tmp_path)
    assert reason.startswith("a file was cut short, with ") and "MB left on the disk" in reason
    assert _cut_short(RuntimeError("another reason\nmore"), tmp_path) == "another reason"


@pytest.mark.parametrize(
    ("options", "setting"),
    [
        (["--lora.r", "100000"], "lora.r"),
        (["--lora.r", "129"], "lora.r"),
        (
            ["--distill.enabled", "--distill.rank", "100000", "--schedule", "fixed:1"],
            "distill.rank",
        ),
        (["--lora.r", "100000", "--dry-run", "h200"], "lora.r"),
    ],
)
def test_lora_larger_than_the_model_is_refused_before_the_model_is_loaded(
    options, setting, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(loading, "load_model", lambda *names: pytest.fail("loaded the model"))
    said = " ".join(fails(capsys, "train", *MODEL, *TASK, *options).split())
    given = "129" if "129" in options else "100000"
    assert f"{setting} is {given}, but no matrix of q_proj" in said
    assert f"has a rank above 128; lower {setting} to 128 or less" in said
    assert not (tmp_path / "runs").exists()


def test_lora_rank_may_equal_the_model_width():
    from sparrow.engines.hf import load_shape
    from sparrow.train.config import LoraConfig
    from sparrow.train.lora import check_lora

    model = load_shape(loading.model_path("reasoner"))
    assert all(parameter.is_meta for parameter in model.parameters())
    check_lora(model, 128, LoraConfig().target_modules, "lora.r")
    check_lora(model, 64, ("k_proj",), "lora.r")  # a model with 2 kv heads of 64
    with pytest.raises(ConfigError, match=r"lora\.r is 129"):
        check_lora(model, 129, ("k_proj",), "lora.r")
