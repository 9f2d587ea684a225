"""Test the learner with learning rate schedules, a reference policy, and a LoRA on the policy. Runs
with any of them must resume exactly.
"""

import copy

import pytest
import torch
from accelerate import Accelerator
from transformers import AutoModelForCausalLM, get_scheduler

from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError
from sparrow.tasks import build_tokenizer
from sparrow.train import learner
from sparrow.train.config import (
    DistillConfig,
    LoraConfig,
    LossConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)
from sparrow.train.ranks import Ranks
from sparrow.train.trainer import Trainer
from tests.conftest import tiny_model
from tests.train.test_trainer import SCHEDULE, EarlyWords, make_trainer, metrics_of

RATE = 3e-3
FEW = dict(rollout=RolloutConfig(prompts=2, samples=4, max_new_tokens=16, top_n=8))
CHANGES = {
    "beta": dict(loss=LossConfig(beta=0.5)),
    "cosine": dict(optimizer=OptimizerConfig(RATE, lr_scheduler_type="cosine", token_budget=200)),
    "lora": dict(lora=LoraConfig(r=4), loss=LossConfig(beta=0.5)),
    "weight decay and dual clip": dict(
        optimizer=OptimizerConfig(RATE, weight_decay=0.1, token_budget=200),
        loss=LossConfig(clip_ratio_c=3.0),
    ),
}


def trainer_of(run_dir, **changes) -> Trainer:
    """Make a trainer whose engine has its own weights, as a LoRA requires."""
    tokenizer = build_tokenizer()
    model = tiny_model(vocab_size=len(tokenizer), initializer_range=0.1, num_hidden_layers=2)
    engine = HFEngine(copy.deepcopy(model), SCHEDULE, eos_ids=[tokenizer.eos_token_id])
    settings = dict(
        run_dir=str(run_dir),
        steps=3,
        save_every=2,
        optimizer=OptimizerConfig(RATE, token_budget=200),
    )
    return Trainer(
        TrainConfig(**{**settings, **FEW, **changes}),
        model,
        tokenizer,
        EarlyWords(),
        engine,
        SCHEDULE,
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", CHANGES)
def test_every_variant_resumes_exactly(name, tmp_path):
    changes = CHANGES[name]
    trainer_of(tmp_path / "whole", **changes).train()

    def dies(event, metrics):
        if event == "score" and killed.step == 2:
            raise ZeroDivisionError

    killed = trainer_of(tmp_path / "killed", **changes)
    killed.listener = dies
    with pytest.raises(ZeroDivisionError):
        killed.train()
    trainer_of(tmp_path / "killed", **changes, resume=True).train()
    whole, resumed = metrics_of(tmp_path / "whole"), metrics_of(tmp_path / "killed")
    assert len(whole) == 3 and resumed == whole
    trained, again = (
        AutoModelForCausalLM.from_pretrained(tmp_path / n / "model").state_dict()
        for n in ("whole", "killed")
    )
    assert all(torch.equal(trained[key], again[key]) for key in trained)


@pytest.mark.slow
def test_the_largest_log_ratio_is_taken_over_all_minibatches(tmp_path, monkeypatch):
    largest = []
    monkeypatch.setattr(
        learner, "check_finite", lambda metrics, bound: largest.append(metrics["log_ratio_abs_max"])
    )
    made = make_trainer(
        tmp_path, steps=1, optimizer=OptimizerConfig(RATE, token_budget=200, minibatches=2), **FEW
    )
    made.train()
    assert largest[0] < largest[1] == metrics_of(tmp_path)[0]["loss"]["log_ratio_abs_max"]


@pytest.mark.slow
def test_the_reference_policy_is_the_initial_model(tmp_path):
    """The KL to the reference is 0 in the first step and then grows, and a large beta keeps the
    policy close.
    """
    rows = {}
    for beta in (1e-6, 100.0):
        made = make_trainer(tmp_path / str(beta), steps=4, loss=LossConfig(beta=beta), **FEW)
        made.train()
        rows[beta] = [row["loss"]["kl"] for row in metrics_of(tmp_path / str(beta))]
    for found in rows.values():
        assert found[0] == pytest.approx(0, abs=1e-9) and found[1] > 1e-6
    assert rows[100.0][-1] < 0.8 * rows[1e-6][-1]


def test_the_reference_policy_moves_to_the_device_of_the_run(monkeypatch):
    accelerator = Accelerator()
    monkeypatch.setattr(Accelerator, "device", torch.device("meta"))
    config = TrainConfig(loss=LossConfig(beta=0.5))
    made = learner.Learner(config, tiny_model(), SCHEDULE, accelerator, Ranks(accelerator))
    for scorer in (made.plain_scorer, made._reference):
        assert {p.device.type for p in scorer.parameters()} == {"meta"}


def test_only_the_lora_is_trained_and_the_engine_receives_merged_weights(tmp_path):
    made = trainer_of(
        tmp_path, lora=LoraConfig(r=4, target_modules=("q_proj", "v_proj")), **CHANGES["beta"]
    )
    before = {
        name: p.detach().clone() for name, p in made.model.named_parameters() if "lora_" not in name
    }
    made.train()
    after = dict(made.model.named_parameters())
    assert all(torch.equal(after[name], p) for name, p in before.items())
    assert metrics_of(tmp_path)[0]["loss"]["kl"] == pytest.approx(0, abs=1e-9)
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    ids = torch.randint(0, 151, (1, 40))
    logits = made.model(input_ids=ids).logits
    for model in (exported.eval(), made.engine.model):
        torch.testing.assert_close(model(input_ids=ids).logits, logits, rtol=1e-4, atol=1e-4)
    start = tiny_model(
        vocab_size=len(build_tokenizer()), initializer_range=0.1, num_hidden_layers=2
    )
    changed = {
        n
        for n, p in exported.named_parameters()
        if not torch.equal(p, dict(start.named_parameters())[n])
    }
    assert changed == {f"model.layers.{i}.self_attn.{n}_proj.weight" for i in (0, 1) for n in "qv"}


def test_a_lora_requires_existing_layers_and_cannot_be_combined_with_distillation(tmp_path):
    with pytest.raises(
        ConfigError,
        match=r"cannot add a LoRA to lm_head; choose from the linear layers of this model:",
    ):
        trainer_of(tmp_path, lora=LoraConfig(r=4, target_modules=("lm_head",)))
    with pytest.raises(
        ConfigError, match=r"distill.enabled is True, but must be off if lora.r is set"
    ):
        TrainConfig(lora=LoraConfig(r=4), distill=DistillConfig(enabled=True))


@pytest.mark.parametrize("kind", ["constant", "linear", "cosine"])
@pytest.mark.parametrize("warmup", [0, 2])
def test_learning_rate_schedules_match_transformers(kind, warmup, tmp_path):
    made = make_trainer(
        tmp_path,
        steps=6,
        optimizer=OptimizerConfig(RATE, lr_scheduler_type=kind, warmup_steps=warmup),
    )
    ours = [made.learner._learning_rate(step) for step in range(6)]
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=RATE)
    name = "constant_with_warmup" if kind == "constant" else kind
    scheduler = get_scheduler(
        name, optimizer, num_warmup_steps=warmup, num_training_steps=6 + (warmup > 0)
    )
    theirs = []
    for _ in range(6 + (warmup > 0)):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert ours == pytest.approx(theirs[1:] if warmup else theirs)
    assert all(rate > 0 for rate in ours) and (kind == "constant") == (ours[-1] == RATE)
