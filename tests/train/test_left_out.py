"""Test that responses excluded from the loss are also excluded from its denominators. Gradients are
compared with a calculation that follows the definitions, one response at a time.
"""

import math

import pytest
import torch

from sparrow.train import learner
from sparrow.train.config import (
    CorrectionConfig,
    LossConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
)
from tests.conftest import tiny_model
from tests.train.test_trainer import make_trainer

ROLLOUT = RolloutConfig(prompts=4, samples=4, max_new_tokens=24, top_n=8)
OPTIMIZER = OptimizerConfig(1e-3, token_budget=200, max_grad_norm=math.inf)


class Stopped(Exception):
    """Raised when the gradient is ready."""


def step_of(tmp_path, monkeypatch, **changes):
    """Run the first step until its gradient is ready. Return the trainer, the experience, and the
    gradient by parameter name.
    """
    seen = {}
    made = make_trainer(tmp_path, rollout=ROLLOUT, optimizer=OPTIMIZER, **changes)
    # The reference must differ from the policy. Otherwise, the KL would have no gradient.
    if made.learner._reference is not None:
        other = tiny_model(vocab_size=made.model.config.vocab_size, initializer_range=0.1, seed=3)
        made.learner._reference.model.load_state_dict(other.state_dict())
    update = made.learner.update

    def watched(experience, assessment, step):
        seen["experience"] = experience
        return update(experience, assessment, step)

    def stop(metrics, bound):
        seen["grad"] = {n: p.grad.clone() for n, p in made.model.named_parameters()}
        raise Stopped

    monkeypatch.setattr(made.learner, "update", watched)
    monkeypatch.setattr(learner, "check_finite", stop)
    with pytest.raises(Stopped):
        made.train()
    made.model.zero_grad()
    return made, seen["experience"], seen["grad"]


def logprobs(model, rollout) -> torch.Tensor:
    prompt, response = list(rollout.prompt_ids), list(rollout.response_ids)
    ids = torch.tensor([[*prompt, *response]])
    logits = model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float()
    return logits.log_softmax(-1)[range(len(response)), torch.tensor(response)]


def advantages(experience) -> list[float]:
    rewards, groups = torch.from_numpy(experience.rewards), experience.groups
    found = []
    for reward, group in zip(rewards, groups, strict=True):
        own = rewards[torch.from_numpy(groups == group)]
        found.append(float((reward - own.mean()) / (own.std() + 1e-6)) if own.std() else 0.0)
    return found


def weight(kind: str, ratio: torch.Tensor) -> torch.Tensor:
    """Return the weights of tokens with these ratios p/q. A token that is left out has the weight
    0.
    """
    match kind:
        case "token_tis":
            return ratio.clamp(max=2.0)
        case "icepop":
            return torch.where((ratio >= 0.9) & (ratio <= 1.1), ratio, 0.0)
        case "sparse_rl":
            inside = (ratio >= 0.9) & (ratio <= 1.1)
            return torch.where(inside & (ratio >= 0.5).all(), ratio, 0.0)
    raise AssertionError(kind)


def summed(tokens: list[torch.Tensor], normalization: str) -> torch.Tensor:
    """Combine the token losses of each response as ``normalization`` specifies."""
    match normalization:
        case "grpo":
            return sum(t.mean() for t in tokens) / len(tokens)
        case "dapo":
            return torch.cat(tokens).mean()
        case "dr_grpo":
            return sum(t.sum() for t in tokens) / (len(tokens) * ROLLOUT.max_new_tokens)
    raise AssertionError(normalization)


CORRECTIONS = {
    "token_tis": CorrectionConfig(),
    "icepop": CorrectionConfig(kind="icepop", band=(0.9, 1.1)),
    "sparse_rl": CorrectionConfig(kind="sparse_rl", band=(0.9, 1.1), reject_below=0.5),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("normalization", "kind", "overlong", "beta"),
    [
        ("dapo", "token_tis", "keep", 0.0),
        ("dapo", "icepop", "mask", 0.1),
        ("grpo", "sparse_rl", "mask", 0.1),
        ("dr_grpo", "token_tis", "mask", 0.0),
    ],
)
def test_the_gradient_comes_only_from_included_responses(
    normalization, kind, overlong, beta, tmp_path, monkeypatch
):
    made, experience, grad = step_of(
        tmp_path,
        monkeypatch,
        correction=CORRECTIONS[kind],
        loss=LossConfig(normalization=normalization, beta=beta),
        reward=RewardConfig(overlong=overlong),
    )
    cut = [r.finish_reason == "length" for r in experience.rollouts]
    assert 0 < sum(cut) < len(cut)
    policy, kl = [], []
    for rollout, advantage, was_cut in zip(
        experience.rollouts, advantages(experience), cut, strict=True
    ):
        logp = logprobs(made.model, rollout)
        if not (was_cut and overlong == "mask"):
            ratio = (logp.detach() - torch.from_numpy(rollout.logprobs)).exp()
            # In the first update, the policy is still the one that sampled. The ratio is therefore
            # 1, and its gradient is that of logp.
            policy.append(-weight(kind, ratio) * advantage * (logp - logp.detach()).exp())
        if beta:
            away = logprobs(made.learner._reference.model, rollout).detach() - logp
            kl.append(beta * (away.exp() - away - 1))
    loss = summed(policy, normalization)
    if beta:
        loss = loss + summed(kl, normalization)
    loss.backward()
    largest = max(g.abs().max() for g in grad.values())
    assert largest > 0
    for name, p in made.model.named_parameters():
        torch.testing.assert_close(grad[name], p.grad, rtol=2e-3, atol=2e-5 * float(largest))


def test_the_gradient_is_zero_if_all_responses_are_excluded(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "sparrow.train.experience.Experience.truncated",
        property(lambda self: self.rewards == self.rewards),
    )
    _, _, grad = step_of(tmp_path, monkeypatch, reward=RewardConfig(overlong="mask"))
    assert all(not g.any() for g in grad.values())


def test_the_loss_divides_by_the_tokens_that_obrs_accepted(tmp_path, monkeypatch):
    counts = []
    whole = learner.policy_loss

    def watched(logp, old, advantages, mask_BT, weight_BT, config, normalizers):
        assert torch.equal(mask_BT, weight_BT > 0)
        counts.append((int(mask_BT.sum()), normalizers.tokens, mask_BT.shape))
        return whole(logp, old, advantages, mask_BT, weight_BT, config, normalizers)

    monkeypatch.setattr(learner, "policy_loss", watched)
    step_of(tmp_path, monkeypatch, correction=CorrectionConfig(kind="obrs", obrs_lambda=2.0))
    accepted = sum(count for count, _, _ in counts)
    assert {tokens for _, tokens, _ in counts} == {accepted}
    assert 0 < accepted < 0.8 * sum(shape.numel() for _, _, shape in counts)


def test_the_correction_ignores_excluded_responses(tmp_path, monkeypatch):
    masks = []
    whole = learner.compute_correction

    def watched(config, logp_BT, logq_BT, mask_BT, **rest):
        masks.append(mask_BT)
        return whole(config, logp_BT, logq_BT, mask_BT, **rest)

    monkeypatch.setattr(learner, "compute_correction", watched)
    config = CorrectionConfig(kind="m2po")  # the bound applies to the mean over the batch
    _, experience, _ = step_of(
        tmp_path, monkeypatch, correction=config, reward=RewardConfig(overlong="mask")
    )
    expected = [0 if r.finish_reason == "length" else len(r) for r in experience.rollouts]
    assert masks[0].sum(1).tolist() == expected


def test_the_adapters_policy_loss_is_normalized_by_included_tokens(monkeypatch, tmp_path):
    from sparrow.train import distill
    from sparrow.train.config import DistillConfig
    from tests.train.test_learner import trainer_of

    seen = []
    whole = distill.policy_loss

    def watched(logp, old, advantages_B, mask_BT, weight_BT, config, normalizers):
        seen.append((mask_BT.clone(), normalizers))
        return whole(logp, old, advantages_B, mask_BT, weight_BT, config, normalizers)

    monkeypatch.setattr(distill, "policy_loss", watched)
    made = trainer_of(
        tmp_path,
        steps=1,
        rollout=ROLLOUT,
        distill=DistillConfig(enabled=True, responses=1.0),
        reward=RewardConfig(overlong="mask"),
    )
    made.train()
    tokens = sum(int(mask_BT.sum()) for mask_BT, _ in seen)
    sequences = sum(int(mask_BT.any(1).sum()) for mask_BT, _ in seen)
    assert all(n.tokens == tokens and n.sequences == sequences for _, n in seen)
    assert 0 < sequences < 16
