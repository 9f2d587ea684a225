"""Test the run directory: what is written can be read back, and only one process can write at a
time.
"""

import json
import logging
import subprocess
import sys
import tracemalloc
from dataclasses import asdict

import pytest

from sparrow.errors import ConfigError
from sparrow.run import LoggedResponse, RunConfig, RunDir, RunLog, TrainerState
from sparrow.run.directory import RECORDED, ROLLOUTS
from sparrow.schedule import SparsitySchedule
from sparrow.tasks import build_tokenizer
from sparrow.train.config import (
    DistillConfig,
    GuardConfig,
    LoraConfig,
    OptimizerConfig,
    TrainConfig,
)
from sparrow.train.resume import resumed
from tests.conftest import tiny_model
from tests.train.test_trainer import make_trainer, metrics_of

SCHEDULE = SparsitySchedule(
    (2, 6), bin_tokens=100, page_size=10, dense_layers=(0,), provenance={"preset": "x"}
)


def test_written_steps_and_responses_can_be_read_back(tmp_path):
    RunConfig({"tau": 0.9, "steps": 3}, SCHEDULE).save(tmp_path)
    made = RunDir(tmp_path, resume=False)
    responses = [
        LoggedResponse(step, "p", "q", [" a", "b"], [0.5, None], 0.25, "stop", "7")
        for step in (1, 2, 3)
    ]
    for response in responses:
        row = {name: {} for name in RECORDED} | {
            "step": response.step,
            "schedule": {"top_k": [response.step, "all"]},
        }
        made.append_step(row, [response, response])
    log = RunLog.load(tmp_path)
    assert log.train == {"tau": 0.9, "steps": 3} and log.steps.tolist() == [1, 2, 3]
    assert log.responses([1, 3]) == [responses[0]] * 2 + [responses[2]] * 2
    assert log.schedules[1] == SCHEDULE.replace(top_k=(2, 2**30))
    state = TrainerState(3, 17, SCHEDULE, {"room_steps": [1]})
    state.save(tmp_path)
    assert TrainerState.load(tmp_path) == state and TrainerState.load(
        tmp_path
    ).schedule.provenance == {"preset": "x"}


def test_draft_acceptance_comes_from_the_last_step_that_measured_it(tmp_path):
    """A step whose drafts were all guesses measures no acceptance."""
    RunConfig({"tau": 0.9, "steps": 2}, SCHEDULE).save(tmp_path)
    made = RunDir(tmp_path, resume=False)
    counts = {"drafted": 8, "accepted": 6, "cycles": 2}
    bins = [{"start": 0, "end": 2000, "drafts": 8, "mean": 0.9, "p5": 0.8}]
    for step, drafts in ((1, counts | {"bins": bins}), (2, counts)):
        row = {name: {} for name in RECORDED} | {"step": step, "drafts": drafts}
        made.append_step(row | {"schedule": {"top_k": [2, 6]}}, [])
    drafting = RunLog.load(tmp_path).drafting()
    assert [asdict(each) for each in drafting.bins] == bins
    assert drafting.tokens_per_cycle == 4


def test_head_budgets_cannot_change_on_resume():
    config, budgets = TrainConfig(run_dir="run", steps=3), ((1, 1), (0.5, 1.5))
    recorded = RunConfig(
        json.loads(json.dumps(asdict(config))), SCHEDULE.replace(head_budgets=budgets)
    )
    assert resumed(recorded, config, recorded.schedule, 1) == {}
    with pytest.raises(
        ConfigError, match=r"cannot continue with a different schedule\.head_budgets"
    ):
        resumed(recorded, config, SCHEDULE, 1)


@pytest.mark.parametrize(("name", "value"), [("step_down", ["cheap.json"]), ("positions", 0.25)])
def test_run_that_used_a_removed_setting_cannot_be_resumed(name, value):
    config = TrainConfig(run_dir="run", steps=3)
    plain = json.loads(json.dumps(asdict(config)))
    unused = plain["distill"] | {"step_down": [], "step_down_every": 10, "positions": 1.0}
    assert resumed(RunConfig(plain | {"distill": unused}, SCHEDULE), config, SCHEDULE, 1) == {}
    with pytest.raises(
        ConfigError,
        match=rf"started with distill\.{name} .*, a setting that no longer exists; continue",
    ):
        resumed(
            RunConfig(plain | {"distill": unused | {name: value}}, SCHEDULE), config, SCHEDULE, 1
        )


def test_incomplete_step_is_not_written(tmp_path):
    with pytest.raises(AssertionError, match="step 1 lacks"):
        RunDir(tmp_path, resume=False).append_step({"step": 1, "reward": {}}, [])
    assert not (tmp_path / "metrics.jsonl").exists()


def test_response_with_a_missing_field_is_reported_with_its_line_number(tmp_path):
    RunConfig({"tau": 0.9}, SCHEDULE).save(tmp_path)
    row = {name: {} for name in RECORDED} | {"step": 1, "schedule": {}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "rollouts.jsonl").write_text('{"step": 1, "problem": "p", "prompt": "q"}\n')
    with pytest.raises(ConfigError, match=r"line 1 of .*rollouts\.jsonl has no 'tokens'; restore"):
        RunLog.load(tmp_path).responses([1])


# --- who may write ---


def test_unrelated_folders_next_to_the_checkpoints_are_ignored(tmp_path):
    for name in ("step-2", "step-10", "step-10-copy", "step-", "partial-12"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    run = RunDir(tmp_path, resume=True)
    assert run.steps("checkpoints") == [2, 10]
    assert run.last_checkpoint() == (10, tmp_path / "checkpoints" / "step-10")


def test_responses_are_truncated_without_reading_them_all_into_memory(tmp_path):
    row = json.dumps({"step": 1, "text": "x" * 10_000}) + "\n"
    path = tmp_path / ROLLOUTS
    path.write_text(row * 1000 + json.dumps({"step": 2}) + '\n{"step": 1, "te')
    tracemalloc.start()
    RunDir(tmp_path, resume=False).truncate(1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert path.read_text() == row * 1000
    assert peak < len(row) * 100


def test_second_run_in_the_same_directory_is_refused(tmp_path):
    made = make_trainer(tmp_path, steps=1)
    message = r"is in use by process \d+ on \S+, since 20\d\d-.*; wait until that run has ended, or choose another"
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path, steps=1)
    made.train()
    with pytest.raises(ConfigError, match="already contains a run"):
        make_trainer(tmp_path, steps=1)


def test_run_in_progress_cannot_be_resumed(tmp_path):
    def again(event, metrics):
        if event == "step" and metrics["step"] == 3:
            before = (
                (tmp_path / "metrics.jsonl").read_bytes(),
                (tmp_path / "config.json").read_bytes(),
            )
            with pytest.raises(ConfigError, match="is in use by process"):
                make_trainer(tmp_path, resume=True)
            assert before == (
                (tmp_path / "metrics.jsonl").read_bytes(),
                (tmp_path / "config.json").read_bytes(),
            )
            seen.append(metrics["step"])

    seen: list[int] = []
    make_trainer(tmp_path, listener=again).train()
    assert seen == [3] and len(metrics_of(tmp_path)) == 4
    assert make_trainer(tmp_path, steps=5, resume=True).step == 4


def test_lock_excludes_other_processes_until_its_owner_ends(tmp_path):
    lock = f"held = RunDir({str(tmp_path)!r}, False); held.lock()"
    code = f"import sys; from sparrow.run import RunDir; {lock}; print(1, flush=True); sys.stdin.read()"
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    process.stdout.readline()
    here = RunDir(tmp_path, resume=False)
    with pytest.raises(ConfigError, match=f"is in use by process {process.pid} on"):
        here.lock()
    process.kill()
    process.communicate()
    here.lock()
    here.lock()  # the lock is already held
    here.release()


def test_run_that_finished_while_another_waited_is_not_overwritten(tmp_path):
    here = RunDir(tmp_path, resume=False)
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="already contains a run"):
        here.lock()


def test_trainer_that_fails_to_start_releases_its_lock(tmp_path):
    with pytest.raises(ConfigError, match="cannot add a LoRA to nowhere"):
        make_trainer(tmp_path, distill=DistillConfig(enabled=True, target_modules=("nowhere",)))
    make_trainer(tmp_path, steps=1).train()


# --- resuming with different settings ---


@pytest.fixture
def stopped(tmp_path):
    """Create a run of four steps that was killed in the third step, with a checkpoint from the
    second.
    """

    class Killed(BaseException):
        pass

    def kill(event, metrics):
        if event == "step" and metrics["step"] == 3:
            raise Killed

    with pytest.raises(Killed):
        make_trainer(tmp_path / "run", listener=kill).train()
    return tmp_path / "run"


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"seed": 6}, "seed; these settings differ from the recorded ones: seed 5 -> 6;"),
        (
            {"bin_tokens": 64},
            "bin_tokens; these settings differ from the recorded ones: bin_tokens null -> 64;",
        ),
        (
            {"lora": LoraConfig(alpha=64)},
            "lora.alpha; these settings differ from the recorded ones: lora.alpha 32 -> 64;",
        ),
        (
            {"lora": LoraConfig(r=4)},
            "lora.r; these settings differ from the recorded ones: lora.r null -> 4;",
        ),
        (
            {"distill": DistillConfig(enabled=True)},
            r"distill.enabled; .*: distill.enabled false -> true;",
        ),
    ],
)
def test_settings_that_cannot_change_on_resume_are_refused(stopped, changes, named):
    before = (stopped / "config.json").read_bytes()
    with pytest.raises(
        ConfigError, match=f"cannot continue with a different {named} leave them out"
    ):
        make_trainer(stopped, resume=True, **changes)
    assert (stopped / "config.json").read_bytes() == before and len(metrics_of(stopped)) == 3


def test_settings_that_may_change_on_resume_are_reported_and_recorded(stopped, caplog):
    optimizer = OptimizerConfig(learning_rate=1e-3, token_budget=200, weight_decay=0.1)
    with caplog.at_level(logging.WARNING):
        resumed = make_trainer(stopped, steps=3, resume=True, optimizer=optimizer, tau=0.8)
    said = "steps 4 -> 3, tau 0.86 -> 0.8, optimizer.learning_rate 0.003 -> 0.001, optimizer.weight_decay 0.0 -> 0.1"
    assert f"resuming {stopped} after step 2 with changed settings: {said}" in caplog.text
    assert resumed.learner.optimizer.param_groups[0]["weight_decay"] == 0.1
    resumed.train()
    assert metrics_of(stopped)[2]["learning_rate"] == 1e-3
    recorded = json.loads((stopped / "config.json").read_text())
    assert (
        recorded["train"]["optimizer"]["learning_rate"] == 1e-3 and recorded["train"]["steps"] == 3
    )
    (change,) = recorded["resumed"]
    assert (
        change["step"] == 2
        and change["changed"]["tau"] == [0.86, 0.8]
        and len(change["changed"]) == 4
    )


def test_resuming_accepts_a_new_schedule_but_refuses_a_new_layout(stopped, monkeypatch):
    from tests.train import test_trainer

    monkeypatch.setattr(test_trainer, "SCHEDULE", test_trainer.SCHEDULE.replace(page_size=4))
    with pytest.raises(
        ConfigError, match=r"a different schedule.page_size; .* schedule.page_size 8 -> 4"
    ):
        make_trainer(stopped, resume=True)
    monkeypatch.undo()
    monkeypatch.setattr(test_trainer, "SCHEDULE", test_trainer.SCHEDULE.replace(top_k=(2, 3)))
    make_trainer(stopped, resume=True).train()
    assert [row["schedule"]["top_k"] for row in metrics_of(stopped)] == [
        [0, 1],
        [0, 1],
        [2, 3],
        [2, 3],
    ]
    monkeypatch.undo()
    assert RunLog.load(stopped).schedules[0].top_k == (0, 1)


def test_finished_run_cannot_be_reconfigured(tmp_path):
    make_trainer(tmp_path, steps=2).train()
    before = (tmp_path / "config.json").read_bytes()
    with pytest.raises(
        ConfigError,
        match=r"has finished its 2 steps, .* these differ: tau 0.86 -> 0.5; raise steps",
    ):
        make_trainer(tmp_path, steps=2, resume=True, tau=0.5)
    with pytest.raises(ConfigError, match=r"steps is 1, but .* has already finished 2 steps"):
        make_trainer(tmp_path, steps=1, resume=True)
    assert (tmp_path / "config.json").read_bytes() == before
    make_trainer(tmp_path, steps=2, resume=True).train()  # no steps remain
    assert (tmp_path / "config.json").read_bytes() == before
    make_trainer(tmp_path, steps=3, resume=True, tau=0.5).train()
    assert len(metrics_of(tmp_path)) == 3


def test_setting_missing_from_an_older_run_takes_its_default_value(stopped):
    recorded = json.loads((stopped / "config.json").read_text())
    del recorded["train"]["guard"]["patience"], recorded["resumed"]
    recorded["train"]["gone"] = 1
    (stopped / "config.json").write_text(json.dumps(recorded))
    make_trainer(stopped, resume=True, guard=GuardConfig(patience=4))
    recorded = json.loads((stopped / "config.json").read_text())
    assert recorded["resumed"] == [{"step": 2, "changed": {"guard.patience": [3, 4]}}]


@pytest.mark.parametrize("name", ["relative_tau", "tau"])
def test_relative_and_absolute_tau_replace_each_other_on_resume(name, tmp_path):
    from sparrow.cli.entry import parse

    recorded = {"model": "reasoner", "tau": 0.86, "relative_tau": None}
    if name == "tau":
        recorded = {"model": "reasoner", "tau": None, "relative_tau": 0.8}
    RunConfig(recorded, SparsitySchedule.dense()).save(tmp_path)
    for option in (["--" + name.replace("_", "-"), "0.9"], [f"--{name}=0.9"]):
        train = parse(["train", "--resume", "--run-dir", str(tmp_path), *option])
        assert {"tau": train.tau, "relative_tau": train.relative_tau} == {
            "tau": None,
            "relative_tau": None,
            name: 0.9,
        }


def test_resume_requires_only_the_run_directory(tmp_path, capsys):
    from sparrow.cli import main

    checkpoint, run = tmp_path / "checkpoint", tmp_path / "run"
    tokenizer = build_tokenizer()
    tiny_model(vocab_size=len(tokenizer)).save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    settings = [
        "--model",
        str(checkpoint),
        "--task",
        "trace:lines=4",
        "--schedule",
        "fixed:1",
        "--steps",
        "1",
        "--rollout.prompts",
        "2",
        "--rollout.samples",
        "2",
        "--rollout.max-new-tokens",
        "8",
        "--seed",
        "7",
        "--correction.band",
        "0.5",
        "2",
        "--distill.no-policy-loss",
    ]
    main(["train", *settings, "--run-dir", str(run)])
    main(["train", "--resume", "--run-dir", str(run), "--steps", "2"])
    main(
        [
            "train",
            f"--run_dir={run}",
            "--steps",
            "3",
            "--optimizer.learning-rate",
            "1e-5",
            "--resume",
        ]
    )
    recorded = json.loads((run / "config.json").read_text())
    assert recorded["train"]["seed"] == 7 and recorded["train"]["correction"]["band"] == [0.5, 2]
    assert recorded["train"]["distill"]["policy_loss"] is False and len(metrics_of(run)) == 3
    assert [entry["changed"] for entry in recorded["resumed"]] == [
        {"steps": [1, 2]},
        {"steps": [2, 3], "optimizer.learning_rate": [1e-6, 1e-5]},
    ]
    with pytest.raises(SystemExit):
        main(
            ["train", "--resume", "--run-dir", str(run), "--steps", "4", "--task", "trace:lines=5"]
        )
    refused = " ".join(capsys.readouterr().err.split())
    assert (
        "cannot continue with a different task; these settings differ from the recorded ones: "
        'steps 3 -> 4, task "trace:lines=4"' in refused
    )
    with pytest.raises(SystemExit):
        main(["train", "--resume", "--run-dir", str(tmp_path / "none")])
    assert "none is not a run directory, because it has no config.json" in " ".join(
        capsys.readouterr().err.split()
    )
