"""Test DistillSparse: phi learns, theta is unaffected, and the actor uses the sum of both."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from sparrow.engines.hf import HFEngine
from sparrow.errors import ConfigError
from sparrow.model.actor import keep_attention, set_schedule, teacher_forced
from sparrow.schedule import SparsitySchedule
from sparrow.tasks import build_tokenizer
from sparrow.train import distill
from sparrow.train.config import (
    DistillConfig,
    GuardConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)
from sparrow.train.distill import Adapter, Distiller, bucket_kl, worst_responses
from sparrow.train.lora import base_weights, merged_weights
from sparrow.train.trainer import Trainer
from tests.conftest import tiny_model
from tests.train.test_trainer import EarlyWords, metrics_of

SCHEDULE = SparsitySchedule(top_k=(0,), bin_tokens=64, page_size=4, dense_layers=(0,))
ON = DistillConfig(enabled=True, rank=8, learning_rate=3e-3, responses=1.0)


def model_():
    return tiny_model(vocab_size=len(build_tokenizer()), initializer_range=0.3)


def run(
    run_dir, distill, steps=1, schedule=SCHEDULE, learning_rate=1e-3, closed_loop=False, **changes
) -> Trainer:
    tokenizer = build_tokenizer()
    engine = HFEngine(model_(), schedule, eos_ids=[])
    config = TrainConfig(
        run_dir=str(run_dir),
        steps=steps,
        save_every=2,
        rollout=RolloutConfig(prompts=4, samples=4, max_new_tokens=40, top_n=151),
        optimizer=OptimizerConfig(learning_rate=learning_rate, token_budget=300),
        distill=distill,
        **changes,
    )
    trainer = Trainer(
        config, model_(), tokenizer, EarlyWords(), engine, schedule, closed_loop=closed_loop
    )
    trainer.train()
    return trainer


def theta(trainer: Trainer) -> dict[str, torch.Tensor]:
    return (
        trainer.learner.distiller.policy_weights()
        if trainer.learner.distiller
        else dict(trainer.model.named_parameters())
    )


def test_distillation_leaves_the_policy_bitwise_unchanged(tmp_path):
    without, with_phi = run(tmp_path / "a", DistillConfig()), run(tmp_path / "b", ON)
    assert all(torch.equal(p, theta(with_phi)[name]) for name, p in theta(without).items())
    assert metrics_of(tmp_path / "b")[0]["distill"]["kl"] > 0.01
    saved = tmp_path / "b" / "model"
    from transformers import AutoModelForCausalLM

    loaded = AutoModelForCausalLM.from_pretrained(saved)  # contains no trace of the adapter
    assert all(torch.equal(p, theta(with_phi)[name]) for name, p in loaded.named_parameters())


def test_the_dense_loss_trains_only_the_policy_and_the_sparse_loss_only_the_adapter(tmp_path):
    model = model_()
    adapter = Adapter(model, ON, SCHEDULE)
    ids = torch.randint(0, 151, (2, 60))
    model(input_ids=ids).logits.square().mean().backward()
    assert all(p.grad is None for p in adapter.parameters)
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_" not in n)
    model.zero_grad()
    with adapter.active(), teacher_forced(model, [10, 10]):
        model(input_ids=ids).logits.square().mean().backward()
    assert all(
        p.grad is None or not p.grad.any() for n, p in model.named_parameters() if "lora_" not in n
    )
    assert any(p.grad.any() for p in adapter.parameters)


def test_checkpointed_layers_do_not_recompute_sparse_attention(tmp_path, monkeypatch):
    contexts = []
    monkeypatch.setattr(
        distill, "keep_attention", lambda: contexts.append(keep_attention()) or contexts[-1]
    )
    config = TrainConfig(
        run_dir=str(tmp_path), optimizer=OptimizerConfig(gradient_checkpointing=True), distill=ON
    )
    model = model_()
    Trainer(
        config,
        model,
        build_tokenizer(),
        EarlyWords(),
        HFEngine(model_(), SCHEDULE, eos_ids=[]),
        SCHEDULE,
    )
    with teacher_forced(model.train(), [10]):
        model(input_ids=torch.randint(0, 151, (1, 60))).logits.sum().backward()
    assert len(contexts) == model.config.num_hidden_layers


@pytest.mark.slow
def test_distillation_raises_the_acceptance_tail_for_a_frozen_policy(tmp_path):
    run(tmp_path, replace(ON, policy_loss=False, learning_rate=1e-3), steps=24, learning_rate=1e-9)
    rows = metrics_of(tmp_path)
    kl = [row["distill"]["kl"] for row in rows]
    assert np.mean(kl[-4:]) < 0.75 * np.mean(kl[:4])
    tails = [row["mismatch"]["bins"][0]["lower_bound"] for row in rows]
    assert np.mean(tails[-4:]) > np.mean(tails[:4]) + 0.03


def test_actor_weights_are_merged_out_of_place():
    model = model_().to(torch.bfloat16)
    adapter = Adapter(model, ON, SCHEDULE)
    with torch.no_grad():
        for p in adapter.parameters:
            p.normal_(std=0.1)
    before = {n: p.clone() for n, p in base_weights(model).items()}
    for _ in range(100):
        merged = dict(merged_weights(model))
    assert all(torch.equal(before[n], p) for n, p in base_weights(model).items())
    assert set(merged) == set(before) and not torch.equal(
        merged["model.layers.1.mlp.up_proj.weight"], before["model.layers.1.mlp.up_proj.weight"]
    )
    actor = model_().to(torch.bfloat16)
    actor.load_state_dict(merged, strict=False)
    ids = torch.randint(0, 151, (1, 50))
    with adapter.active():
        adapted = model(input_ids=ids).logits.float()
    # Merging rounds the weights to bf16 once more than a separate adapter does, so the relative
    # error is 2^-8 per layer.
    assert (actor(input_ids=ids).logits.float() - adapted).norm() < 0.05 * adapted.norm()
    assert (model(input_ids=ids).logits.float() - adapted).norm() > 0.2 * adapted.norm()


def test_adapter_layers_have_the_same_gradients_as_a_lora():
    model = model_()
    adapter = Adapter(model, ON, SCHEDULE)
    for p in adapter.parameters:
        p.data.normal_(std=0.1)
    model.double()
    layer = model.model.layers[1].mlp.up_proj
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    x, d_out = (
        torch.randn(2, 9, A.shape[1]).double().requires_grad_(),
        torch.randn(2, 9, B.shape[0]).double(),
    )
    with adapter.active():
        found = torch.autograd.grad(layer(x), (x, A, B), d_out)
        with torch.autocast("cpu", torch.bfloat16):
            rounded = torch.autograd.grad(layer(x), (x, A, B), d_out.bfloat16())
        weight = layer.base_layer.weight + layer.scaling["default"] * B @ A
        expected = torch.autograd.grad(x @ weight.T, (x, A, B), d_out)
    for ours, coarse, direct in zip(found, rounded, expected, strict=True):
        torch.testing.assert_close(
            ours, direct, atol=1e-5, rtol=1e-5
        )  # weights are merged in float32
        assert (coarse - direct).norm() < 0.02 * direct.norm()


def test_the_engine_samples_from_the_merged_actor(tmp_path):
    trainer = run(tmp_path, ON, steps=3)
    merged = model_()
    merged.load_state_dict(dict(trainer.learner.distiller.actor_weights()), strict=False)
    ids = torch.randint(0, 151, (1, 50))
    assert torch.equal(trainer.engine.model(input_ids=ids).logits, merged(input_ids=ids).logits)
    assert not torch.equal(trainer.model(input_ids=ids).logits, merged(input_ids=ids).logits)
    with trainer.learner.distiller._adapter.active():
        assert torch.equal(trainer.model(input_ids=ids).logits, merged(input_ids=ids).logits)


def test_adapter_changes_smaller_than_the_weights_precision_are_preserved():
    model = model_().to(torch.bfloat16)
    adapter = Adapter(model, ON, SCHEDULE)
    layer = model.model.layers[1].mlp.up_proj
    x = torch.zeros(1, layer.in_features, dtype=torch.bfloat16)
    x[0, :2] = 1
    with torch.no_grad():
        layer.base_layer.weight[:, 0], layer.base_layer.weight[:, 1] = 1, -1
        layer.lora_A["default"].weight.fill_(1)
        layer.lora_B["default"].weight.fill_(1e-4)
    with adapter.active():
        found = layer(x).float()
    torch.testing.assert_close(found, torch.full_like(found, 2 * 2 * 8 * 1e-4), atol=0, rtol=0.01)


def test_resuming_restores_policy_and_adapter_and_peft_can_load_the_adapter(tmp_path):
    run(tmp_path / "whole", ON, steps=4)
    run(tmp_path / "parts", ON, steps=2)
    resumed = run(tmp_path / "parts", ON, steps=4, resume=True)
    assert metrics_of(tmp_path / "parts") == metrics_of(tmp_path / "whole")
    from peft import PeftModel

    adapted = PeftModel.from_pretrained(model_(), tmp_path / "parts" / "adapter")
    adapted.base_model.model.load_state_dict(
        {
            n.replace(".weight", ".base_layer.weight") if "_proj" in n else n: p
            for n, p in theta(resumed).items()
        },
        strict=False,
    )
    ids = torch.randint(0, 151, (1, 50))
    actual = adapted(input_ids=ids).logits
    torch.testing.assert_close(
        actual, resumed.engine.model(input_ids=ids).logits, atol=1e-4, rtol=1e-4
    )
    again = Adapter(model_(), replace(ON, adapter=str(tmp_path / "parts" / "adapter")), SCHEDULE)
    phi = [p for n, p in resumed.model.named_parameters() if "lora_" in n]
    assert all(torch.equal(a, b) for a, b in zip(again.parameters, phi, strict=True))


def test_the_closed_loop_reduces_the_pages_of_a_distilled_actor_that_meets_tau(tmp_path):
    roomy = SCHEDULE.replace(top_k=(8, 8))
    easy = run(tmp_path / "easy", ON, steps=2, schedule=roomy, closed_loop=True, tau=0.01)
    assert (
        easy.schedule.top_k[0] == 5 and easy.engine.schedule == easy.schedule
    )  # 8 of 11 pages, including 3 that are always kept
    state = json.loads((tmp_path / "easy" / "checkpoints" / "step-2" / "state.json").read_text())
    assert state["schedule"]["top_k"] == list(easy.schedule.top_k)
    hard = run(tmp_path / "hard", ON, steps=2, schedule=roomy, closed_loop=True, tau=0.9999)
    assert hard.schedule.top_k[0] > 8


@pytest.mark.slow
def test_distillation_uses_a_schedule_raised_by_the_guard(tmp_path):
    run(tmp_path, ON, steps=3, guard=GuardConfig("raise", threshold=0.999, patience=1))
    rows = metrics_of(tmp_path)
    tables = [row["schedule"]["top_k"][0] for row in rows]
    assert tables == [0, 2, 5] and all(
        "distill" in row for row in rows
    )  # 3, 5 and 8 pages, including the 3 that are always kept


def test_bucket_kl_matches_a_hand_calculation_and_is_a_lower_bound():
    p = torch.tensor([[0.5, 0.25]]).log()
    q = torch.tensor([[0.25, 0.25]]).log()
    # 0.5 ln 2 + 0 + 0.25 ln(0.25 / 0.5) = 0.25 ln 2
    assert bucket_kl(p, q).item() == pytest.approx(0.25 * np.log(2), abs=1e-6)
    generator = torch.Generator().manual_seed(0)
    full_p, full_q = (
        torch.randn(64, 30, generator=generator).mul(2).log_softmax(-1) for _ in range(2)
    )
    exact = (full_p.exp() * (full_p - full_q)).sum(-1)
    torch.testing.assert_close(bucket_kl(full_p, full_q), exact, atol=1e-4, rtol=1e-4)
    assert (bucket_kl(full_p[:, :7], full_q[:, :7]) <= exact + 1e-5).all()


def test_the_worst_responses_have_the_lowest_acceptance_tail():
    acceptance = [
        np.full(9, 0.9),
        np.array([0.2] + [1.0] * 8),
        np.full(3, 0.95),
        np.array([0.1] + [1.0] * 99),
    ]
    assert worst_responses(acceptance, 0.5) == [0, 1]
    assert worst_responses(acceptance, 0.75) == [0, 1, 2]
    assert worst_responses(acceptance, 0.01) == [1]


@pytest.mark.slow
def test_excluded_responses_are_not_scored(tmp_path, monkeypatch):
    scored = []
    stock = Distiller.actor_logprobs
    monkeypatch.setattr(
        Distiller,
        "actor_logprobs",
        lambda self, e, rows: scored.extend(rows) or stock(self, e, rows),
    )
    trainer = run(tmp_path, replace(ON, responses=0.25))
    assert len(scored) == len(set(scored)) == 4
    row = metrics_of(tmp_path)[0]
    assert 0 < row["distill"]["tokens"] <= 4 * 40 < row["response"]["tokens"]
    _, phi = trainer.learner.optimizer.param_groups
    assert phi["params"] and all(p in trainer.learner.optimizer.state for p in phi["params"]), (
        "phi was trained"
    )


def test_invalid_distillation_settings_raise_errors(tmp_path):
    with pytest.raises(ConfigError, match="schedule is already dense"):
        Adapter(model_(), ON, SparsitySchedule.dense())
    for targets in (("warp_proj",), ("q_proj", "warp_proj")):
        with pytest.raises(
            ConfigError,
            match="cannot add a LoRA to warp_proj; choose from the linear layers of this model: down_",
        ):
            Adapter(model_(), replace(ON, target_modules=targets), SCHEDULE)
    with pytest.raises(ConfigError, match=r"kl_coef is -1"):
        DistillConfig(kl_coef=-1)
    other = Adapter(tiny_model(hidden_size=32), ON, SCHEDULE)
    other.save(tmp_path / "other", other.adapter_weights())
    with pytest.raises(ConfigError, match="do not match"):
        Adapter(model_(), replace(ON, adapter=str(tmp_path / "other")), SCHEDULE)
    with pytest.raises(ConfigError, match="cannot read a PEFT adapter"):
        Adapter(model_(), replace(ON, adapter=str(tmp_path / "nothing")), SCHEDULE)
    weights = tmp_path / "other" / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ConfigError, match="cannot read a PEFT adapter"):
        Adapter(model_(), replace(ON, adapter=str(tmp_path / "other")), SCHEDULE)


@pytest.mark.parametrize(
    "setting", [{"lora_alpha": 8}, {"use_rslora": True}, {"alpha_pattern": {"q_proj": 8}}]
)
def test_an_adapter_that_was_trained_with_another_scale_is_refused(tmp_path, setting):
    adapter = Adapter(model_(), ON, SCHEDULE)
    adapter.save(tmp_path, adapter.adapter_weights())
    settings = tmp_path / "adapter_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | setting))
    ((name, value),) = setting.items()
    with pytest.raises(ConfigError, match=rf"{name} is {value}, .* lora_alpha is twice its rank"):
        Adapter(model_(), replace(ON, adapter=str(tmp_path)), SCHEDULE)


def test_adapter_loads_after_more_training_of_its_base_model_but_not_for_another_model(
    tmp_path,
):
    model = model_()
    adapter = Adapter(model, ON, SCHEDULE)
    adapter.save(tmp_path, adapter.adapter_weights())
    config = replace(ON, adapter=str(tmp_path))
    trained = model_()
    for p in trained.parameters():
        p.data += 0.1 * p.std() * torch.randn_like(p) if p.ndim > 1 else 0.0
    Adapter(trained, config, SCHEDULE)
    with pytest.raises(ConfigError, match="whose correlation with this model's is only"):
        Adapter(
            tiny_model(vocab_size=len(build_tokenizer()), initializer_range=0.3, seed=1),
            config,
            SCHEDULE,
        )
    save_file(
        load_file(tmp_path / "adapter_model.safetensors"), tmp_path / "adapter_model.safetensors"
    )
    Adapter(
        tiny_model(vocab_size=len(build_tokenizer()), seed=1), config, SCHEDULE
    )  # the adapter has no record of its base model


def test_the_teacher_forced_pass_uses_the_current_schedule():
    model = model_()
    adapter = Adapter(model, ON, SCHEDULE)
    ids = torch.randint(0, 151, (1, 80))
    logits = []
    for top_k in ((0,), (4,)):
        set_schedule(model, SCHEDULE.replace(top_k=top_k))
        with torch.no_grad(), adapter.active(), teacher_forced(model, [10]):
            logits.append(model(input_ids=ids).logits)
    assert (logits[0] - logits[1]).abs().max() > 0.01
