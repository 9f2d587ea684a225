"""Test that mistakes and faults, such as settings out of range, bad files and full disks, are
reported in one sentence. If possible, they must be reported before any work starts.
"""

import errno
import json
import logging
import os
import re
import shutil
import tempfile
import uuid
from pathlib import Path

import pytest
from huggingface_hub import logging as hub_logging
from safetensors.torch import load_file, save_file

from sparrow.cli.entry import main, parse
from sparrow.errors import EngineError
from sparrow.run import RunConfig
from sparrow.schedule import SparsitySchedule
from tests.conftest import fails

MODEL = ["--model", "reasoner"]
PROMPTS = ["--task", "trace:lines=4", *MODEL]
MEASURE = ["measure", "--schedule", "fixed:1", *PROMPTS]
CALIBRATE = ["calibrate", "--out", "schedule.json", *PROMPTS]
EVAL = ["eval", "--out", "out", "--benchmark", "trace:lines=4", *MODEL]
COST = ["cost", "--model", "qwen3-4b", "--schedule", "fixed:1"]
TRAIN = ["train", *PROMPTS]


@pytest.mark.parametrize(
    ("command", "option", "message"),
    [
        (
            TRAIN,
            "--rollout.samples 1",
            "rollout.samples is 1, but must be at least 2, because the responses",
        ),
        (TRAIN, "--bin-tokens 0", "bin_tokens is 0, but must be greater than or equal to 1"),
        (TRAIN, "--seed -1", "seed is -1, but must be greater than or equal to 0"),
        (["demo"], "--seed -1", "seed is -1, but must be greater than or equal to 0"),
        (["demo"], "--steps 0", "steps is 0, but must be greater than or equal to 1"),
        (MEASURE, "--tau 7", "tau is 7.0, but must be less than 1"),
        (MEASURE, "--temperature 0", "temperature is 0.0, but must be greater than 0"),
        (MEASURE, "--count 0", "count is 0, but must be greater than or equal to 1"),
        (MEASURE, "--count -2", "count is -2, but must be greater than or equal to 1"),
        (
            MEASURE,
            "--max-new-tokens 0",
            "max_new_tokens is 0, but must be greater than or equal to 1",
        ),
        (MEASURE, "--seed -1", "seed is -1, but must be greater than or equal to 0"),
        (CALIBRATE, "--temperature 0", "temperature is 0.0, but must be greater than 0"),
        (CALIBRATE, "--target 1", "target is 1.0, but must be less than 1"),
        (CALIBRATE, "--budgets", "budgets is (), but must have at least 1 item"),
        (CALIBRATE, "--budgets -1", "budgets is (-1,), but must be greater than or equal to 0"),
        (CALIBRATE, "--refine -1", "refine is -1, but must be greater than or equal to 0"),
        (
            ["eval", "--out", "out", *MODEL],
            "--benchmark",
            "benchmark is (), but must have at least 1 item",
        ),
        (EVAL, "--k 0", "k is 0, but must be greater than or equal to 1"),
        (EVAL, "--limit 0", "limit is 0, but must be greater than or equal to 1"),
        (EVAL, "--limit -3", "limit is -3, but must be greater than or equal to 1"),
        (EVAL, "--temperature -1", "temperature is -1.0, but must be greater than or equal to 0"),
        (COST, "--gpus -3", "gpus is -3, but must be greater than or equal to 1"),
        (COST, "--rollout-share 3", "rollout_share is 3.0, but must be less than or equal to 1"),
        (COST, "--tensor-parallel 2", "tensor_parallel is 2, but must be 1 on one GPU; set gpus"),
        (COST, "--examples 100", "examples is 100, but must be left out on one GPU"),
        (
            COST,
            "--gpus 8 --draft-weights fp8",
            "draft_weights is 'fp8', but must be auto on several GPUs",
        ),
        (
            COST,
            "--gpus 8 --rollout-share 0.5",
            "rollout_share is 0.5, but must be left out on several GPUs",
        ),
        (
            COST,
            "--samples 4",
            "samples is 4, but must be left out unless examples is set, because it only",
        ),
        (COST, "--gpus 8 --samples 4", "samples is 4, but must be left out unless examples is"),
        (COST, "--median -5", "median is -5.0, but must be greater than 0"),
        (
            COST,
            "--median 1e12",
            "median is 1000000000000.0, but must be at most 32,768, the longest",
        ),
        (COST, "--cutoff 8192", "median is 14000, but must be at most 8,192, the longest response"),
        (COST, "--responses 10001", "responses is 10001, but must be at most 10,000, because each"),
        (COST, "--median nan", "median is nan, but must be a finite number"),
        (COST, "--responses 0", "responses is 0, but must be greater than or equal to 1"),
        (COST, "--cutoff 0", "cutoff is 0, but must be greater than or equal to 1"),
    ],
)
def test_out_of_range_option_is_reported(command, option, message, capsys):
    assert fails(capsys, *command, *option.split(), code=2).startswith(f"sparrow: {message}")


# --- output files, checked before any work starts ---


@pytest.fixture
def no_work(monkeypatch):
    """Fail if a model is loaded, because errors must be found before any loading."""
    import sparrow.cli.loading

    def load_model(*args):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(sparrow.cli.loading, "load_model", load_model)


WRITERS = [
    ([*MEASURE, "--out"], "file"),
    (["calibrate", *PROMPTS, "--out"], "file"),
    (["eval", "--benchmark", "trace:lines=4", *MODEL, "--out"], "folder"),
    ([*TRAIN, "--run-dir"], "folder"),
    (["demo", "--run-dir"], "folder"),
]


@pytest.mark.parametrize(("command", "kind"), WRITERS)
def test_read_only_output_folder_is_reported_before_any_work_starts(command, kind, capsys, no_work):
    assert fails(capsys, *command, "/proc/self/new").startswith(
        "sparrow: cannot write to /proc/self"
    )


@pytest.mark.parametrize(("command", "kind"), WRITERS)
def test_full_disk_is_reported_before_any_work_starts(
    command, kind, capsys, tmp_path, no_work, monkeypatch
):
    def full(**where):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert "No space left on device; choose another path or make room" in fails(
        capsys, *command, f"{tmp_path}/new"
    )


@pytest.mark.parametrize(("command", "kind"), WRITERS)
def test_output_path_of_the_wrong_kind_is_reported(command, kind, capsys, tmp_path, no_work):
    file = tmp_path / "there"
    file.write_text("")
    there = file if kind == "folder" else tmp_path
    expected = (
        "is a file, expected a folder" if kind == "folder" else "is a folder, expected a file"
    )
    assert f"{there} {expected} to write to" in fails(capsys, *command, str(there))
    below = fails(capsys, *command, str(file / "below"))
    assert "Not a directory" in below or f"{file} is a file, expected a folder" in below


def test_train_refuses_a_directory_that_already_contains_a_run(capsys, tmp_path, no_work):
    there = ["--run-dir", str(tmp_path)]
    RunConfig({}, SparsitySchedule.dense()).save(tmp_path)
    assert "has no checkpoint to resume from; start the run" in fails(
        capsys, *TRAIN, *there, "--resume"
    )
    # Without a checkpoint, neither resuming nor starting again would work.
    (tmp_path / "metrics.jsonl").touch()
    stuck = "ended before its first checkpoint and cannot be resumed; remove this folder or choose"
    assert stuck in fails(capsys, *TRAIN, *there)
    assert stuck in fails(capsys, *TRAIN, *there, "--resume")
    (tmp_path / "checkpoints" / "step-1").mkdir(parents=True)
    assert "already contains a run; resume it (--resume) or" in fails(capsys, *TRAIN, *there)


def test_train_without_data_is_refused_before_any_work_starts(capsys, tmp_path, no_work):
    run = tmp_path / "run"
    refused = fails(capsys, "train", *MODEL, "--run-dir", str(run))
    assert "there is nothing to train on; pass --task NAME" in refused
    assert not run.exists()


@pytest.mark.parametrize("command", [TRAIN, ["demo"]])
def test_train_refuses_to_overwrite_files_that_belong_to_no_run(command, capsys, tmp_path, no_work):
    start = [*command, "--run-dir", str(tmp_path)]
    (tmp_path / "slurm.log").touch()
    with pytest.raises(AssertionError, match="a model was loaded"):
        main(start)
    (tmp_path / "config.json").touch()
    assert fails(capsys, *start) == (
        f"sparrow: {tmp_path} contains config.json, but no run; choose another run_dir, such as a "
        "new folder"
    )
    (tmp_path / "lock").touch()  # left by an attempt that ended before its first step
    with pytest.raises(AssertionError, match="a model was loaded"):
        main(start)


def test_missing_output_folder_is_created(checkpoint, tmp_path, capsys):
    out = tmp_path / "not" / "there" / "report.json"
    main(
        [
            *MEASURE,
            "--model",
            checkpoint,
            "--max-new-tokens",
            "8",
            "--count",
            "2",
            "--out",
            str(out),
        ]
    )
    assert json.loads(out.read_text())["n_sequences"] == 2


def test_results_are_printed_even_if_the_disk_is_full_at_the_end(checkpoint, tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(
            [
                *MEASURE,
                "--model",
                checkpoint,
                "--max-new-tokens",
                "8",
                "--count",
                "2",
                "--out",
                "/dev/full",
            ]
        )
    printed = capsys.readouterr()
    assert "share of the KV cache read" in printed.out
    assert "cannot write to /dev/full: No space left on device" in " ".join(printed.err.split())


# --- models ---


def broken(checkpoint: str, tmp_path: Path, **changes: object) -> Path:
    """Copy a checkpoint with some fields of its config changed."""
    folder = tmp_path / "model"
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


def test_truncated_weights_are_reported(checkpoint, tmp_path, capsys):
    folder = broken(checkpoint, tmp_path)
    with open(folder / "model.safetensors", "r+b") as file:
        file.truncate(1000)
    refused = fails(capsys, *MEASURE, "--model", str(folder))
    assert refused.startswith(f"sparrow: cannot load model '{folder}' (SafetensorError: ")


def test_weights_whose_shapes_contradict_the_config_are_reported(checkpoint, tmp_path, capsys):
    refused = fails(
        capsys, *MEASURE, "--model", str(broken(checkpoint, tmp_path, intermediate_size=80))
    )
    assert (
        "has shape (64, 96) in the checkpoint, but config.json implies (64, 80) (12 weights differ)"
        in refused
    )


def test_missing_weights_are_reported(checkpoint, tmp_path, capsys):
    folder = broken(checkpoint, tmp_path)
    weights = load_file(folder / "model.safetensors")
    kept = {name: weight for name, weight in weights.items() if "layers.3.mlp" not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    refused = fails(capsys, *MEASURE, "--model", str(folder))
    assert "model.layers.3.mlp.down_proj.weight and 2 more weights are missing" in refused


def test_empty_tokenizer_is_reported(checkpoint, tmp_path, capsys):
    folder = broken(checkpoint, tmp_path)
    for file in folder.glob("tokenizer*"):
        file.unlink()
    refused = fails(capsys, *MEASURE, "--model", str(folder))
    assert (
        refused
        == f"sparrow: cannot load model '{folder}': its tokenizer is empty; add the tokenizer files"
    )


@pytest.mark.parametrize(
    "name", ["/nowhere", "./nowhere", "tests/nowhere", "a/b/c", "no where", ""]
)
def test_mistyped_path_is_not_looked_up_on_the_hub(name, capsys, monkeypatch):
    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", None)
    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", None)
    assert f"cannot load model '{name}': there is no such file or folder" in fails(
        capsys, *MEASURE, "--model", name
    )
    refused = fails(capsys, "cost", "--schedule", "fixed:1", "--model", name)
    assert refused.startswith(
        ("sparrow: cannot load the config of", "sparrow: there is no model config at")
    )


def test_folder_without_a_config_is_reported(tmp_path, capsys):
    assert fails(capsys, *MEASURE, "--model", str(tmp_path)).startswith(
        f"sparrow: cannot load model '{tmp_path}': the folder has no config.json; pass the path"
    )


def test_retries_of_the_hub_are_not_logged(capsys, monkeypatch):
    logger = hub_logging.get_logger("huggingface_hub.utils")
    logged = []

    def unreachable(name):
        logged.append(logger.isEnabledFor(logging.WARNING))
        raise OSError("no connection")

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", unreachable)
    refused = fails(capsys, *MEASURE, "--model", "nope")
    assert refused.startswith("sparrow: cannot load model 'nope' (no connection)")
    assert logged == [False] and logger.isEnabledFor(logging.WARNING)


def test_measure_runs_in_bf16_on_a_cpu(checkpoint, tmp_path, capsys):
    out = tmp_path / "report.json"
    small = ["--model", checkpoint, "--max-new-tokens", "16", "--count", "2", "--out", str(out)]
    main(["measure", "--schedule", "dense", *PROMPTS, *small, "--precision", "bf16"])
    assert json.loads(out.read_text())["bins"][0]["upper_bound"] == pytest.approx(1, abs=0.1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("{", "is not a model config (Expecting property name"),
        ("[1]", "is not a model config ("),
        ("\xff", "is not a model config ('utf-8' codec can't decode"),
        ('{"model_type": "qwen3"}', "the model config has no 'hidden_size'"),
        (
            '{"model_type": "qwen3", "hidden_size": "x"}',
            "'hidden_size' is 'x', but must be an integer of at least",
        ),
        (
            '{"model_type": "qwen3", "hidden_size": -64}',
            "'hidden_size' is -64, but must be an integer of at least",
        ),
    ],
)
def test_cost_reports_a_broken_config(config, message, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_bytes(config.encode("latin-1"))
    assert message in fails(capsys, "cost", "--schedule", "fixed:1", "--model", str(path))


# --- prompts and datasets ---


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("broken.parquet", b"PAR1 what is 2 + 2?\n", "cannot read {path}: "),
        (
            "list.jsonl",
            b'{"prompt": " ba"}\n{"prompt": [{"role": "user", "content": "hi"}]}\n',
            'row 2 of {path}: every row needs a "prompt" that is text, got a list; render messages with the',
        ),
        (
            "none.jsonl",
            b'{"question": "?"}\n',
            'row 1 of {path}: every row needs a "prompt" that is text, got none',
        ),
        ("latin.txt", b"caf\xe9\n", "cannot read prompts from {path}: 'utf-8' codec can't decode"),
        ("zeros.bin", b"\0\0\0\0", "{path} contains zero bytes, so it is not a text file"),
        ("empty.txt", b"\n \n", "{path} contains no prompts"),
    ],
)
def test_unreadable_prompts_are_reported(name, content, message, tmp_path, capsys, no_work):
    path = tmp_path / name
    path.write_bytes(content)
    assert message.format(path=path) in fails(
        capsys, "measure", *MODEL, "--schedule", "fixed:1", "--prompts", str(path)
    )


@pytest.mark.parametrize("name", ["missing.jsonl", "missing.txt"])
def test_missing_prompts_are_reported(name, tmp_path, capsys, no_work):
    path = tmp_path / name
    refused = fails(capsys, "measure", *MODEL, "--schedule", "fixed:1", "--prompts", str(path))
    assert f"cannot read prompts from {path}: " in refused and "no such file" in refused.lower()
    assert "expected text with one prompt per line, or a .jsonl" in refused


def test_prompts_without_room_for_a_response_are_skipped_and_reported(
    checkpoint, tmp_path, capsys, caplog
):
    path, out = tmp_path / "prompts.txt", tmp_path / "report.json"
    path.write_text("ba = 7\n" + "ba " * 2000 + "\nku = 5\n")
    arguments = [
        "measure",
        "--schedule",
        "fixed:1",
        "--model",
        checkpoint,
        "--max-new-tokens",
        "8",
        "--count",
        "4",
    ]
    main([*arguments, "--prompts", str(path), "--out", str(out)])
    (message,) = [text for text in caplog.messages if text.startswith("left out")]
    assert message.startswith("left out: 1 of 3 prompts are empty, or longer than the 1016 ")
    assert f"the first is line 2 of {path} with 2001" in message
    assert json.loads(out.read_text())["n_sequences"] == 4
    path.write_text("ba " * 2000)
    assert "the first is line 1 of" in fails(capsys, *arguments, "--prompts", str(path))
    path.with_suffix(".jsonl").write_text('{"prompt": ""}')
    empty = fails(capsys, *arguments, "--prompts", str(path.with_suffix(".jsonl")))
    assert "with 0 tokens; replace or shorten them" in empty


def train(checkpoint: str, tmp_path: Path, *argv: str) -> list[str]:
    small = [
        "--steps",
        "1",
        "--rollout.prompts",
        "2",
        "--rollout.samples",
        "2",
        "--rollout.max-new-tokens",
        "8",
    ]
    return ["train", "--model", checkpoint, "--run-dir", str(tmp_path / "run"), *small, *argv]


def test_rows_too_long_for_the_model_are_skipped_and_counted(checkpoint, tmp_path, capsys, caplog):
    path = tmp_path / "rows.jsonl"
    rows = [{"question": f"trace ba {i}", "answer": "1"} for i in range(3)]
    rows.insert(1, {"question": "ba " * 2000, "answer": "1"})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    main(train(checkpoint, tmp_path, "--dataset", f"qa:path={path},template={{question}}"))
    assert f"{path}: dropped 1 of 4 rows: 1 longer than 1016 tokens" in caplog.messages


def test_error_names_a_problem_that_is_too_long(checkpoint, tmp_path, capsys):
    refused = fails(capsys, *train(checkpoint, tmp_path, "--task", "trace:lines=200"))
    assert re.search(
        r"problem 'trace-200-0-0' has \d+ tokens, .* do not fit in the model's context of 1024",
        refused,
    )


def test_max_new_tokens_beyond_the_context_raises_an_error(checkpoint, capsys):
    refused = fails(capsys, *MEASURE, "--model", checkpoint, "--max-new-tokens", "1024")
    assert "max_new_tokens=1024 leaves no room for a prompt in the 1024-token context" in refused


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("weight=x", "weight is 'x', but must be a valid integer"),
        ("weight=true", "weight is True, but must be a valid integer"),
        ("weight=0", "weight is 0, but must be greater than or equal to 1"),
        ("max_length=-1", "max_length is -1, but must be greater than or equal to 1"),
        ("isolation=vm", "isolation is 'vm', but must be 'auto', 'bwrap', 'session' or 'none'"),
        (
            "wieght=2",
            "has the unknown option 'wieght', expected one of isolation, max_length, output_bytes, path, ",
        ),
        ("path=twice.jsonl", "the option 'path' occurs twice"),
        ("template=hello", "the prompt template 'hello' has no {question}"),
    ],
)
def test_invalid_dataset_options_are_reported(option, message, checkpoint, tmp_path, capsys):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "ba", "answer": "1"}\n')
    assert message in fails(
        capsys, *train(checkpoint, tmp_path, "--dataset", f"qa:path={path},{option}")
    )


# --- the user's own tasks and rewards ---

OWN = """
from sparrow.tasks import Problem

class Reverse:
    def __init__(self, digits=4):
        self.digits = digits
    def problem(self, index, seed=0):
        verify = lambda text: float(len(text) > 9)
        return Problem(id=f"reverse-{self.digits}-{index}", prompt=" ba = 7\\n", verify=verify)

class Raises:
    def problem(self, index, seed=0):
        return {}["missing"]

class Nothing:
    def problem(self, index, seed=0):
        return None

class NoTask:
    pass

class Hangs(Reverse):
    def problem(self, index, seed=0):
        import time
        return Problem(id=f"hangs-{index}", prompt=" ba = 7\\n", verify=lambda text: time.sleep(60))

def judge(response, answer):
    return 0.5 if answer == "1" else 0.0

def wrong(response, answer):
    return None

def raises(response, answer):
    return [][0]
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """Create a module in the working directory, and a dataset."""
    name = f"own_{uuid.uuid4().hex}"  # modules are imported once
    (tmp_path / f"{name}.py").write_text(OWN)
    (tmp_path / "rows.jsonl").write_text(
        '{"question": "trace", "answer": "1"}\n{"question": "map", "answer": "2"}\n'
    )
    monkeypatch.chdir(tmp_path)
    return name


def test_custom_task_can_be_specified_by_module_and_class(own, checkpoint, tmp_path, capsys):
    main(train(checkpoint, tmp_path, "--task", f"{own}:Reverse:digits=6"))
    logged = [
        json.loads(line) for line in (tmp_path / "run" / "rollouts.jsonl").read_text().splitlines()
    ]
    assert {row["problem"] for row in logged} == {"reverse-6-0", "reverse-6-1"}
    options = ["--k", "1", "--limit", "2", "--out", "evaluated", "--max-new-tokens", "8"]
    main(["eval", "--model", checkpoint, "--benchmark", f"{own}:Reverse", *options])
    (written,) = tmp_path.glob("evaluated/**/results.md")
    assert f"| {own}:Reverse | dense | 2 |" in written.read_text()
    assert f"{own}:Reverse" in capsys.readouterr().out


def test_custom_reward_can_be_specified_by_module_and_function(own, checkpoint, tmp_path, capsys):
    rows = "qa:path=rows.jsonl,template={question}"
    main(train(checkpoint, tmp_path, "--dataset", rows, "--reward", f"{own}:judge"))
    (step,) = [
        json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert step["reward"]["mean"] == 0.25  # half of the problems have the answer 1
    refused = fails(capsys, *EVAL, "--limit", "1", "--reward", f"{own}:judge")
    assert (
        f"--reward {own}:judge applies to datasets only; leave it out, because the task "
        "trace:lines=4 has its own" in refused
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--task OWN:Reverse:size=3", "task 'OWN:Reverse' does not accept the options {'size': 3}"),
        ("--task OWN:Missing", "has no attribute 'Missing'"),
        ("--task OWN:NoTask", "is a NoTask without a method problem(index, seed)"),
        (
            "--task OWN:Raises",
            "problem 0 of the task Raises could not be created: the task raised KeyError: 'missing' ( ... "
            "OWN.py, line 13, in problem)",
        ),
        (
            "--task OWN:Nothing",
            "problem 0 of the task Nothing is a NoneType, expected a sparrow.tasks.Problem",
        ),
        (
            "--task no_such_module:Task",
            "no module 'no_such_module' in this directory or on PYTHONPATH",
        ),
        ("--dataset rows.jsonl --reward OWN", "reward 'OWN' must have the form module:name"),
        ("--dataset rows.jsonl --reward OWN:OWN", "has no attribute"),
        ("--dataset ROWS --reward OWN:wrong", "returned None, expected a finite number"),
        (
            "--dataset ROWS --reward OWN:raises",
            "raised IndexError: list index out of range ( ... OWN.py, line 34, in raises); fix it and continue",
        ),
        (
            "--task trace:lines=4 --reward OWN:judge",
            "applies to --dataset only; leave it out, because the task trace:lines=4 has its own",
        ),
        ("--task trace:lines", "the option 'lines' in 'trace:lines' should read name=value"),
    ],
)
def test_error_in_a_custom_task_or_reward_names_its_location(
    options, message, own, checkpoint, tmp_path, capsys
):
    options = options.replace("OWN", own).replace("ROWS", "qa:path=rows.jsonl,template={question}")
    refused = fails(capsys, *train(checkpoint, tmp_path, *options.split()))
    for part in message.replace("OWN", own).split(" ... "):
        assert part in refused


def test_hanging_verifier_is_stopped_at_the_time_limit(own, checkpoint, tmp_path, capsys):
    arguments = train(checkpoint, tmp_path, "--task", f"{own}:Hangs", "--reward.time-limit", "0.5")
    refused = fails(capsys, *arguments)
    assert (
        "the verifier of problem 'hangs-0' has not returned within 0.5 s; fix it, or raise the limit"
        in refused
    )


def test_interrupted_command_prints_how_to_resume(checkpoint, tmp_path, capsys, monkeypatch):
    from sparrow.engines.hf import HFEngine

    def interrupted(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(HFEngine, "generate", interrupted)
        run = str(tmp_path / "demo")
        refused = fails(capsys, "demo", "--run-dir", run, code=130)
        assert refused.endswith(
            "sparrow: interrupted before the first step; run the same command again to start over"
        )
        assert (
            fails(capsys, *MEASURE, "--max-new-tokens", "8", "--model", checkpoint, code=130)
            == "sparrow: interrupted"
        )
    demo = parse(["demo", "--run-dir", run])
    (tmp_path / "demo" / "metrics.jsonl").touch()
    assert (
        demo.interrupted() == f"interrupted before the first checkpoint; remove {run} to start over"
    )
    (tmp_path / "demo" / "checkpoints" / "step-3").mkdir()
    assert f"sparrow train --resume --run-dir {run}' continues" in demo.interrupted()


@pytest.mark.parametrize(
    "command", [MEASURE, [*CALIBRATE, "--out", "OUT"], [*EVAL, "--out", "OUT", "--limit", "2"]]
)
def test_engine_is_closed_if_sampling_fails(command, tmp_path, capsys, monkeypatch):
    from sparrow.engines.hf import HFEngine

    closed = []

    def failed(*args):
        raise EngineError("the engine died")

    monkeypatch.setattr(HFEngine, "generate", failed)
    monkeypatch.setattr(HFEngine, "close", lambda engine: closed.append(engine))
    arguments = [each.replace("OUT", str(tmp_path / "out")) for each in command]
    assert "the engine died" in fails(capsys, *arguments, "--max-new-tokens", "8")
    assert len(closed) == 1


# --- resuming a run ---


def test_resume_reports_a_checkpoint_tensor_of_the_wrong_size(checkpoint, tmp_path, capsys):
    main(train(checkpoint, tmp_path, "--task", "trace:lines=4"))
    (weights,) = (tmp_path / "run" / "checkpoints" / "step-1").glob("model*.safetensors")
    tensors = load_file(weights)
    name = min(name for name in tensors if name.endswith("norm.weight"))
    save_file({**tensors, name: tensors[name][:8].clone()}, weights, {"format": "pt"})
    refused = fails(capsys, "train", "--resume", "--run-dir", str(tmp_path / "run"), "--steps", "2")
    assert (
        f"cannot continue from {weights.parent} (RuntimeError: size mismatch for {name}" in refused
    )
    assert "use the model that the run started with" in refused


def test_resumed_run_ignores_an_invalid_last_line_in_its_log(checkpoint, tmp_path, capsys):
    main(train(checkpoint, tmp_path, "--task", "trace:lines=4"))
    metrics = tmp_path / "run" / "metrics.jsonl"
    metrics.write_bytes(metrics.read_bytes() + b'{"step": 2, "\xff')
    main(["train", "--resume", "--run-dir", str(tmp_path / "run"), "--steps", "2"])
    assert [json.loads(line)["step"] for line in metrics.read_text().splitlines()] == [1, 2]
