"""Test that the training loop learns, resumes with the same numbers, and loses no finished step if
an error occurs.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sparrow.engines.hf import HFEngine
from sparrow.errors import CheckpointError, ConfigError, RewardError, TrainingDiverged
from sparrow.schedule import SparsitySchedule
from sparrow.tasks import Problem, build_tokenizer
from sparrow.train import saving
from sparrow.train.config import CorrectionConfig, OptimizerConfig, RolloutConfig, TrainConfig
from sparrow.train.trainer import Trainer
from tests.conftest import tiny_model

SCHEDULE = SparsitySchedule(top_k=(0, 1), bin_tokens=32, page_size=8, dense_layers=(0,))


@dataclass
class EarlyWords:
    """A task that rewards words from the beginning of the alphabet, and misbehaves on request."""

    fail_from: int = 10**9
    fail_with: float | None = None

    def problem(self, index: int, seed: int = 0) -> Problem:
        def verify(text: str) -> float:
            if index >= self.fail_from:
                if self.fail_with is None:
                    raise KeyError("answer")
                return self.fail_with
            return sum(word < "h" for word in text.split() if word.isalpha()) / 24

        prompt = f" {index % 10}" * (24 + index % 7)
        return Problem(id=f"words-{index}", prompt=prompt, verify=verify, answer="early words")


def make_trainer(
    run_dir,
    steps=4,
    task=None,
    model=None,
    listener=None,
    closed_loop=False,
    benchmarks=None,
    **changes,
) -> Trainer:
    tokenizer = build_tokenizer()
    model = model or tiny_model(vocab_size=len(tokenizer), initializer_range=0.1)
    engine = HFEngine(model, SCHEDULE, eos_ids=[tokenizer.eos_token_id])
    defaults = dict(
        run_dir=str(run_dir),
        steps=steps,
        save_every=2,
        seed=5,
        rollout=RolloutConfig(prompts=4, samples=4, max_new_tokens=24, top_n=8),
        optimizer=OptimizerConfig(learning_rate=3e-3, token_budget=200),
    )
    config = TrainConfig(**{**defaults, **changes})
    kwargs = {"listener": listener} if listener else {}
    task = task or EarlyWords()
    return Trainer(
        config,
        model,
        tokenizer,
        task,
        engine,
        SCHEDULE,
        closed_loop=closed_loop,
        benchmarks=benchmarks,
        **kwargs,
    )


def metrics_of(run_dir) -> list[dict]:
    rows = [json.loads(line) for line in Path(run_dir, "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("seconds")
    return rows


@pytest.mark.parametrize(
    ("schedule", "mode", "up_to"),
    [
        (SCHEDULE, None, 0),
        (SCHEDULE.replace(top_k=(1, 1)), None, 32),
        (SparsitySchedule.dense(), None, None),
        (SCHEDULE, "lossless", None),
    ],
)
def test_acceptance_is_logged_only_for_samples_from_a_sparse_actor(tmp_path, schedule, mode, up_to):
    made = make_trainer(tmp_path, steps=1, logged_rollouts=16)
    made.config = replace(made.config, rollout=replace(made.config.rollout, mode=mode))
    made.set_schedule(schedule)
    made.train()
    (row,) = metrics_of(tmp_path)
    assert row["dense_up_to"] == up_to
    logged = map(json.loads, (tmp_path / "rollouts.jsonl").read_text().splitlines())
    seen = set()
    for response in logged:
        prompt = len(made.tokenizer(response["prompt"])["input_ids"])
        tokens = zip(response["acceptance"], response["acceptance_upper"], strict=True)
        for cached, (lower, upper) in enumerate(tokens, prompt):
            sparse = up_to is not None and SCHEDULE.page_end(cached) >= up_to
            assert (lower is not None) == (upper is not None) == sparse
            assert not sparse or 0 <= lower <= upper <= 1
            seen.add(sparse)
    assert seen == {0: {True}, 32: {True, False}, None: {False}}[up_to]


def test_tied_embeddings_are_saved_once_even_if_the_weights_are_copies(tmp_path, monkeypatch):
    # Copies, for example from shards or from a GPU, no longer share memory with the tensors they
    # are tied to.
    monkeypatch.setattr(
        saving, "whole", lambda weights: ((name, weight.clone()) for name, weight in weights)
    )
    made = make_trainer(tmp_path, steps=1)
    made.train()
    written = load_file(tmp_path / "model" / "model.safetensors")
    assert "model.embed_tokens.weight" in written and "lm_head.weight" not in written
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert torch.equal(again.lm_head.weight, made.model.lm_head.weight)


def test_the_reward_rises_and_every_metric_is_logged(tmp_path):
    make_trainer(
        tmp_path, steps=16, optimizer=OptimizerConfig(learning_rate=1e-2, token_budget=200)
    ).train()
    rows = metrics_of(tmp_path)
    assert [r["step"] for r in rows] == list(range(1, 17))
    assert sum(r["reward"]["mean"] for r in rows[-3:]) / 3 > rows[0]["reward"]["mean"] + 0.3
    first = rows[0]
    assert 0 < first["kv"]["read_fraction"] < 0.95
    assert 0.05 < first["mismatch"]["mean"] < 1 and len(first["mismatch"]["bins"]) >= 1
    assert first["correction"]["ess_token"] < 1 and first["loss"]["ratio_mean"] == pytest.approx(
        1, abs=1e-4
    )
    assert first["response"]["tokens"] == pytest.approx(first["response"]["mean"] * 16)
    saved = [json.loads(line) for line in Path(tmp_path, "rollouts.jsonl").read_text().splitlines()]
    assert len(saved) == 16 * 4 and len({r["problem"] for r in saved[:4]}) == 4
    assert all(
        len(r["tokens"]) == len(r["acceptance"]) and r["answer"] == "early words" for r in saved
    )
    assert Path(tmp_path, "model", "model.safetensors").exists()
    assert sorted(p.name for p in Path(tmp_path, "checkpoints").iterdir()) == ["step-14", "step-16"]


def test_listeners_are_notified_of_each_phase_and_the_steps_done(tmp_path):
    told = []
    make_trainer(
        tmp_path,
        steps=1,
        listener=lambda event, metrics: told.append((event, metrics["step"])),
        optimizer=OptimizerConfig(learning_rate=3e-3, token_budget=200, minibatches=2),
    ).train()
    assert told == [("ceiling", 0), ("rollout", 0), ("score", 0), ("update", 0), ("step", 1)]


@pytest.mark.parametrize(
    "kind", ["none", "sequence_tis", "geometric_tis", "icepop", "sparse_rl", "obrs", "m2po"]
)
def test_training_works_with_every_correction(tmp_path, kind):
    make_trainer(tmp_path, steps=1, correction=CorrectionConfig(kind=kind)).train()
    assert metrics_of(tmp_path)[0]["correction"]["weight_mean"] >= 0


@pytest.mark.parametrize("advantage", ["dr_grpo", "rloo"])
def test_training_works_with_every_advantage_and_with_minibatches(tmp_path, advantage):
    optimizer = OptimizerConfig(learning_rate=1e-3, minibatches=2, warmup_steps=4, token_budget=100)
    make_trainer(tmp_path, steps=1, advantage=advantage, optimizer=optimizer).train()
    assert metrics_of(tmp_path)[0]["learning_rate"] == pytest.approx(1e-3 / 4)


def test_the_token_budget_and_checkpointing_do_not_change_the_update(tmp_path):
    results = []
    for i, changes in enumerate(
        [dict(token_budget=10**6), dict(token_budget=60), dict(gradient_checkpointing=True)]
    ):
        trainer = make_trainer(
            tmp_path / str(i), steps=1, optimizer=OptimizerConfig(learning_rate=1e-3, **changes)
        )
        trainer.train()
        results.append(torch.cat([p.detach().flatten() for p in trainer.model.parameters()]))
    start = torch.cat(
        [
            p.detach().flatten()
            for p in tiny_model(vocab_size=151, initializer_range=0.1).parameters()
        ]
    )
    assert start.shape != results[0].shape or (results[0] - start).abs().max() > 1e-4
    for other in results[1:]:
        assert (results[0] - other).abs().median() < 1e-6


def test_checkpointing_recomputes_layers_in_updates_but_not_while_decoding(tmp_path):
    calls = []
    for checkpointing in (False, True):
        optimizer = OptimizerConfig(token_budget=10**6, gradient_checkpointing=checkpointing)
        trainer = make_trainer(tmp_path / str(checkpointing), steps=1, optimizer=optimizer)
        count = [0]
        mlp = trainer.model.get_decoder().layers[1].mlp
        mlp.register_forward_pre_hook(
            lambda *_, count=count: count.__setitem__(0, count[0] + torch.is_grad_enabled())
        )
        trainer.train()
        calls.append(count[0])
        assert not trainer.model.training and not any(m.training for m in trainer.model.modules())
    assert calls == [1, 2]


def test_a_resumed_run_equals_an_uninterrupted_run(tmp_path):
    make_trainer(tmp_path / "whole", steps=5).train()

    class Killed(BaseException):
        pass

    def kill_in_step_four(event, metrics):
        count[event] = count.get(event, 0) + 1
        if event == "update" and count["update"] == 4:
            raise Killed

    count: dict[str, int] = {}
    with pytest.raises(Killed):
        make_trainer(tmp_path / "killed", steps=5, listener=kill_in_step_four).train()
    torch.manual_seed(99)  # change the random state, which would be different in a new process
    make_trainer(tmp_path / "killed", steps=5, resume=True).train()
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "whole")
    rollouts = [Path(tmp_path, run, "rollouts.jsonl").read_text() for run in ("killed", "whole")]
    assert rollouts[0] == rollouts[1]


def test_resuming_without_the_metrics_of_the_checkpoint_gives_a_warning(tmp_path, caplog):
    make_trainer(tmp_path, steps=1, save_every=1).train()
    make_trainer(tmp_path, steps=2, save_every=1, resume=True).train()
    assert "has no metrics" not in caplog.text
    (tmp_path / "metrics.jsonl").write_text("")
    make_trainer(tmp_path, steps=3, save_every=1, resume=True).train()
    assert f"{tmp_path / 'metrics.jsonl'} has no metrics of step 2, whose" in caplog.text


class Choosing(HFEngine):
    """An engine that chooses a different number of drafts in every process, like an engine that
    chooses by measured speed. It can also replay given choices.
    """

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.repeated, self.number, self.choices = [], os.urandom(4).hex(), None

    def replay(self, choices):
        self.repeated.append(choices)
        self.choices = choices

    def counters(self):
        choices, self.choices = self.choices or [[self.number, 1.0, 0, 3]], None
        return replace(super().counters(), cycles=1, choices=tuple(map(tuple, choices)))


@pytest.mark.parametrize("changed", [False, True])
def test_a_resumed_run_repeats_the_logged_draft_lengths(tmp_path, monkeypatch, changed):
    """Two steps were logged after the checkpoint."""
    monkeypatch.setattr("tests.train.test_trainer.HFEngine", Choosing)
    first = make_trainer(tmp_path, steps=4, save_every=2)
    first.train()
    logged = [row["drafts"]["choices"] for row in metrics_of(tmp_path)]
    shutil.rmtree(tmp_path / "checkpoints" / "step-4")
    with open(tmp_path / "metrics.jsonl", "a") as file:
        file.write('{"step": 5, "dra')  # a process that was killed
    changes = (
        {"rollout": RolloutConfig(prompts=4, samples=4, max_new_tokens=20, top_n=8)}
        if changed
        else {}
    )
    resumed = make_trainer(tmp_path, steps=6, resume=True, **changes)
    resumed.train()
    again = [row["drafts"]["choices"] for row in metrics_of(tmp_path)]
    assert len(logged) == 4 and len(again) == 6
    repeated = [[tuple(choice) for choice in choices] for choices in logged[2:]]
    assert resumed.engine.repeated == ([] if changed else repeated)
    assert again[:2] == logged[:2] and (again[2:4] == logged[2:]) is not changed


def test_resume_repeats_draft_choices_logged_without_guesses(tmp_path, monkeypatch):
    """Runs of earlier versions did not log the number of guesses per pass."""
    monkeypatch.setattr("tests.train.test_trainer.HFEngine", Choosing)
    make_trainer(tmp_path, steps=2, save_every=1).train()
    shutil.rmtree(tmp_path / "checkpoints" / "step-2")
    rows = metrics_of(tmp_path)
    [[drafts, multiple, _, steps]] = rows[1]["drafts"]["choices"]
    rows[1]["drafts"]["choices"] = [[drafts, multiple, steps]]
    written = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(written)
    resumed = make_trainer(tmp_path, steps=2, resume=True)
    resumed.train()
    assert resumed.engine.repeated == [[(drafts, multiple, 0, steps)]]


@pytest.fixture
def ctrl_c_interrupts():
    """Install Python's default SIGINT handler, which is missing if a shell has started Python in
    the background.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_interrupts")
@pytest.mark.parametrize("phase", ["rollout", "update"])
def test_ctrl_c_saves_the_last_finished_step(tmp_path, phase):
    count: dict[str, int] = {}

    def interrupt(event, metrics):
        count[event] = count.get(event, 0) + 1
        if event == phase and count[event] == 2:
            os.kill(os.getpid(), signal.SIGINT)

    assert threading.current_thread() is threading.main_thread()
    with pytest.raises(KeyboardInterrupt):
        make_trainer(tmp_path, steps=5, save_every=100, listener=interrupt).train()
    make_trainer(tmp_path, steps=3, save_every=100, resume=True).train()
    make_trainer(tmp_path / "whole", steps=3, save_every=100).train()
    assert metrics_of(tmp_path) == metrics_of(tmp_path / "whole")


@pytest.mark.parametrize(
    ("returned", "message"), [(None, "raised KeyError: 'answer'"), (float("nan"), "returned nan")]
)
def test_invalid_reward_error_names_the_problem_and_keeps_finished_steps(
    tmp_path, returned, message
):
    with pytest.raises(RewardError, match=rf"problem 'words-12' {message}.*resume"):
        make_trainer(
            tmp_path, steps=9, save_every=100, task=EarlyWords(fail_from=12, fail_with=returned)
        ).train()
    make_trainer(tmp_path, steps=4, resume=True).train()
    assert len(metrics_of(tmp_path)) == 4


def test_a_prompt_that_does_not_fit_stops_the_run_but_keeps_finished_steps(tmp_path):
    class Lengthening(EarlyWords):
        def problem(self, index: int, seed: int = 0) -> Problem:
            problem = super().problem(index, seed)
            return replace(problem, prompt=problem.prompt * 50) if index >= 12 else problem

    with pytest.raises(ConfigError, match="'words-12'"):
        make_trainer(tmp_path, steps=9, save_every=100, task=Lengthening()).train()
    make_trainer(tmp_path, steps=4, resume=True).train()
    make_trainer(tmp_path / "whole", steps=4).train()
    assert metrics_of(tmp_path) == metrics_of(tmp_path / "whole")


def test_an_error_within_an_update_saves_no_checkpoint(tmp_path):
    made = make_trainer(tmp_path, save_every=100)
    update = made.learner.update

    def failing(experience, assessment, step):
        metrics = update(experience, assessment, step)
        if step == 1:
            raise ConfigError("after the weights have changed")
        return metrics

    made.learner.update = failing
    with pytest.raises(ConfigError, match="after the weights"):
        made.train()
    assert made.run_dir.last_checkpoint() is None


def test_a_nan_loss_stops_the_run_before_the_weights_change(tmp_path):
    model = tiny_model(vocab_size=len(build_tokenizer()), initializer_range=0.1)
    before = []

    def poison(event, metrics):
        if event == "update":
            before.append([p.detach().clone() for p in model.parameters()])
            model.model.norm.weight.register_hook(lambda grad: grad * float("nan"))

    with pytest.raises(TrainingDiverged, match=r"grad_norm is nan.*last checkpoint"):
        make_trainer(tmp_path, model=model, listener=poison).train()
    assert all(torch.equal(a, b) for a, b in zip(before[0], model.parameters(), strict=True))


def test_a_full_disk_leaves_the_previous_checkpoint_intact(tmp_path, monkeypatch):
    trainer = make_trainer(tmp_path, steps=4)
    whole = trainer.accelerator.save_state

    def full_disk(folder):
        if trainer.step == 4:
            Path(folder, "model.safetensors").write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return whole(folder)

    monkeypatch.setattr(trainer.accelerator, "save_state", full_disk)
    with pytest.raises(CheckpointError, match=r"step 4.*No space left.*resume the run from step 2"):
        trainer.train()
    make_trainer(tmp_path, steps=4, resume=True).train()
    make_trainer(tmp_path / "whole", steps=4).train()
    assert metrics_of(tmp_path) == metrics_of(tmp_path / "whole")


def test_a_run_directory_is_not_overwritten(tmp_path):
    make_trainer(tmp_path, steps=1).train()
    with pytest.raises(ConfigError, match="already contains a run"):
        make_trainer(tmp_path, steps=1)
    with pytest.raises(ConfigError, match="no checkpoint to resume from"):
        make_trainer(tmp_path / "new", resume=True)


def test_second_precision_in_one_process_raises_an_error_before_anything_is_written(tmp_path):
    make_trainer(
        tmp_path / "first"
    ).run_dir.release()  # sets float32, as earlier tests in this process may have done
    message = "precision is 'bf16', but this process has already trained in 'fp32', .*; start this run in a new"
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path / "second", optimizer=OptimizerConfig(precision="bf16"))
    assert not (tmp_path / "second").exists()
    make_trainer(tmp_path / "third").run_dir.release()


def start_process(run_dir, steps: int, resume: bool = False) -> subprocess.Popen:
    """Start the run in a separate process with one thread, because float32 sums depend on the
    number of threads.
    """
    code = (
        f"import sys; sys.path.insert(0, {str(Path(__file__).parents[2])!r})\n"
        "from tests.train import test_trainer as t\n"
        f"t.make_trainer({str(run_dir)!r}, steps={steps}, resume={resume}).train()"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"}
    )


@pytest.mark.slow
def test_a_killed_process_can_be_resumed(tmp_path):
    """Resume a process that was killed by a real SIGKILL at an arbitrary moment."""
    process = start_process(tmp_path / "killed", steps=50)
    metrics = tmp_path / "killed" / "metrics.jsonl"
    for _ in range(1200):
        if metrics.exists() and len(metrics.read_text().splitlines()) >= 3:
            break
        assert process.poll() is None, "the run ended before it was killed"
        threading.Event().wait(0.1)
    process.kill()
    process.wait()
    steps = len(metrics.read_text().splitlines()) + 1
    assert start_process(tmp_path / "killed", steps, resume=True).wait() == 0
    assert start_process(tmp_path / "whole", steps).wait() == 0
    assert metrics_of(tmp_path / "killed") == metrics_of(tmp_path / "whole")


def test_the_acceptance_tail_by_length_is_logged_to_tensorboard_under_fixed_names(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    make_trainer(tmp_path, steps=2, trackers=("tensorboard",)).train()
    events = EventAccumulator(str(tmp_path / "sparrow"))
    events.Reload()
    rows = metrics_of(tmp_path)
    found = {
        name: [event.value for event in events.Scalars(name)] for name in events.Tags()["scalars"]
    }
    bins = [row["mismatch"]["bins"] for row in rows]
    assert [(b["start"], b["end"]) for b in bins[0]] == [(0, 32), (32, 64)]
    columns = {
        "": "lower_bound",
        "/low": "interval_low",
        "/high": "interval_high",
        "/upper": "upper_bound",
    }
    for name, key in columns.items():
        assert found[f"sparrow/p5/32-64{name}"] == pytest.approx(
            [b[1][key] for b in bins], abs=1e-6
        )
    assert found["sparrow/p5"] == pytest.approx(
        [min(b["lower_bound"] for b in both) for both in bins], abs=1e-6
    )
    assert found["reward/mean"] == pytest.approx([row["reward"]["mean"] for row in rows], abs=1e-6)


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_missing_tracker_raises_an_error_before_anything_is_written(tmp_path, name, monkeypatch):
    monkeypatch.setattr("sparrow.train.trackers.get_available_trackers", lambda: ["tensorboard"])
    message = f"trackers includes {name}, but the package '{name}' is not installed; run pip install {name}"
    with pytest.raises(ConfigError, match=message):
        make_trainer(tmp_path / "run", trackers=("tensorboard", name))
    assert not (tmp_path / "run").exists()


@dataclass
class Noisy:
    """An engine whose numerics differ from the trainer's: its listed log-probs are always slightly
    off.
    """

    engine: HFEngine

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def generate(self, prompts, sampling):
        rollouts = self.engine.generate(prompts, sampling)
        noise = torch.Generator().manual_seed(len(rollouts))
        for r in rollouts:
            top = torch.from_numpy(r.top_logprobs)
            mass = top.exp().sum(-1, keepdim=True)
            top += 0.5 * torch.randn(top.shape, generator=noise)
            top += (mass / top.exp().sum(-1, keepdim=True)).log()
        return rollouts


WHOLE_LISTS = RolloutConfig(prompts=4, samples=4, max_new_tokens=24, top_n=10**4)


def test_p5_is_logged_together_with_the_ceiling_from_dense_rollouts(tmp_path):
    made = make_trainer(tmp_path, steps=1, rollout=WHOLE_LISTS)
    made.engine = Noisy(made.engine)
    made._collector = replace(made._collector, engine=made.engine)
    made.train()
    (row,) = metrics_of(tmp_path)
    bins = row["mismatch"]["bins"]
    assert len(bins) > 1 and all(
        0.5 < b["ceiling_low"] <= b["ceiling"] <= b["ceiling_high"] < 0.95 for b in bins
    )


def test_the_ceiling_is_measured_only_once_and_kept_on_resume(tmp_path, monkeypatch):
    measured = []
    real = Trainer._measure_ceiling
    monkeypatch.setattr(
        Trainer, "_measure_ceiling", lambda self: (measured.append(self.step), real(self))
    )
    make_trainer(tmp_path, steps=1, rollout=WHOLE_LISTS).train()
    make_trainer(tmp_path, steps=2, rollout=WHOLE_LISTS, resume=True).train()
    first, second = (
        [b["ceiling"] for b in row["mismatch"]["bins"]] for row in metrics_of(tmp_path)
    )
    assert measured == [0] and first == second
    assert all(0.999 < c <= 1 for c in first)  # the engine uses the trainer's own model
