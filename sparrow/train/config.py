"""Settings of a training run, one frozen dataclass per concern.

This module doesn't import torch, so `--help` is instant. The comment next to or above a field is
also its command-line help. Out-of-range values raise ConfigError.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

import tyro
from pydantic import Field

from sparrow.decoding_options import DecodingOptions
from sparrow.settings import (
    Count,
    CountOrZero,
    Finite,
    Many,
    Name,
    NotNegative,
    Positive,
    Probability,
    Seed,
    Settings,
    Share,
    choose,
    require,
)
from sparrow.tasks.prompts import NO_CHAT, ChatConfig

AdvantageKind = Literal["grpo", "dr_grpo", "rloo"]
CorrectionKind = Literal[
    "none", "token_tis", "sequence_tis", "geometric_tis", "icepop", "sparse_rl", "obrs", "m2po"
]
Normalization = Literal["grpo", "dapo", "dr_grpo"]
OverlongKind = Literal["keep", "mask", "penalty"]

ICEPOP_BAND: Final = (0.5, 5.0)
SPARSE_RL_BAND: Final = (0.5, 1.5)
AtMostOne = Annotated[Finite, Field(ge=0, le=1)]
AtLeastOne = Annotated[Finite, Field(ge=1)]
BelowOne = Annotated[Finite, Field(ge=0, lt=1)]
PROJECTIONS: Final = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class CorrectionConfig(Settings):
    """Correction for the mismatch between the sparse actor q and the dense policy p
    (sparrow.train.corrections).
    """

    # token_tis: weight min(p/q, cap) per token. sequence_tis, geometric_tis: one truncated weight
    # per sequence, from the product or the geometric mean of its ratios. icepop: drop tokens
    # outside the band. sparse_rl: drop outlier sequences, and tokens outside the band. obrs:
    # Jackpot's rejection sampling. m2po: drop the tokens that deviate most.
    kind: CorrectionKind = "token_tis"
    cap: Positive = 2.0  # Largest weight C (token_tis, sequence_tis, geometric_tis, obrs).
    # Smallest and largest ratio p/q of a kept token. Defaults to 0.5 5 for icepop and 0.5 1.5 for
    # sparse_rl.
    band: tuple[AtMostOne, AtLeastOne] | None = None
    # Drop a sequence if any of its ratios p/q is below this (sparse_rl).
    reject_below: BelowOne = 1e-4
    # A token is accepted with probability min(1, p / (lambda q)). Larger values of lambda reject
    # more tokens (obrs).
    obrs_lambda: Positive = 1.0
    # Largest mean of (log p/q)^2 over the kept tokens of the batch (m2po).
    m2_bound: Positive = 0.04


@dataclass(frozen=True)
class LossConfig(Settings):
    """The clipped policy objective (sparrow.train.losses)."""

    clip_low: Share = 0.2  # The ratio pi_theta / p_old is clipped from below at 1 - clip_low.
    clip_high: Positive = 0.28  # The ratio pi_theta / p_old is clipped from above at 1 + clip_high.
    # grpo: mean over each sequence's tokens, then over sequences. dapo: mean over all tokens of the
    # batch. dr_grpo: sum over tokens, divided by the number of sequences times the maximum response
    # length.
    normalization: Normalization = "dapo"
    # Dual clip: upper bound on the ratio of tokens with a negative advantage, usually 3. If unset,
    # these ratios are not bounded.
    clip_ratio_c: Annotated[Finite, Field(gt=1)] | None = None
    # Weight of KL(pi_theta || reference), where the reference is the model at the start of the run.
    beta: NotNegative = 0.0
    # Training stops if |log pi_theta - log p_old| exceeds this for any token.
    max_log_ratio: Positive = 20.0


@dataclass(frozen=True)
class RolloutConfig(DecodingOptions):
    """How the rollouts of each step are sampled."""

    supports_auto = True

    prompts: Many = 16  # Prompts per step, over all processes.
    samples: Many = 8  # Responses per prompt.
    max_new_tokens: Count = 1024  # Responses are cut at this many tokens.
    temperature: Positive = 1.0  # Softmax temperature of both actor and policy.
    # Number of likeliest tokens to record at each position, for bounds on the acceptance rate.
    top_n: Count = 20
    # Maximum number of rounds that replace prompts whose responses all have the same reward.
    # Prompts that remain after the last round are kept.
    resample: CountOrZero = 0


@dataclass(frozen=True)
class RewardConfig(Settings):
    """The verifier, and the bonuses and penalties added to its verdict (sparrow.train.reward)."""

    # Your own reward function, as module:function, in place of the dataset's verifier. It is called
    # as function(response, answer=...) and returns a number, usually in 0..1. Functions written for
    # TRL or verl also work (docs/rewards.md).
    function: Annotated[str | None, tyro.conf.arg(aliases=["--reward"])] = None
    # Seconds without a verdict after which a verifier is assumed to have hung.
    time_limit: Positive = 300.0
    # Bonus for a response with an answer in the requested form, whether or not the answer is right.
    format: NotNegative = 0.0
    # How to treat responses that are cut at max_new_tokens. keep: like other responses. mask: count
    # them in their group's baseline but not in the policy loss (the KL of loss.beta still includes
    # them). penalty: subtract a penalty that grows linearly from 0 to 1 over the last
    # overlong_window tokens (DAPO).
    overlong: OverlongKind = "keep"
    # Tokens before max_new_tokens over which the penalty grows from 0 to 1. Defaults to a fifth of
    # max_new_tokens.
    overlong_window: Count | None = None


@dataclass(frozen=True)
class OptimizerConfig(Settings):
    """AdamW for the policy."""

    learning_rate: Positive = 1e-6  # Peak learning rate.
    # constant: no decay. linear, cosine: decay to 0 at the last step, as in transformers.
    lr_scheduler_type: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: CountOrZero = 0  # Steps at the start over which the learning rate rises linearly.
    weight_decay: NotNegative = 0.0  # Decoupled weight decay.
    # Larger gradients are scaled down to this norm.
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    minibatches: Count = 1  # Optimiser steps per rollout batch.
    # Padded tokens per forward and backward pass; gradients are accumulated over as many passes as
    # needed.
    token_budget: Count = 32768
    # Recompute activations in the backward pass to save memory.
    gradient_checkpointing: bool = False
    # bf16 runs forward passes under autocast; weights and optimiser state stay float32.
    precision: Literal["fp32", "bf16"] = "fp32"


@dataclass(frozen=True)
class LoraConfig(Settings):
    """A LoRA on the policy. Only the LoRA is trained, and it is merged into the saved model."""

    # Rank of the LoRA. If unset, there is no LoRA and all weights are trained.
    r: Count | None = None
    alpha: Count = 32  # The LoRA's scale alpha, which is divided by the rank.
    # Linear layers to add the LoRA to, given by the last part of their names.
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = PROJECTIONS


@dataclass(frozen=True)
class DistillConfig(Settings):
    """DistillSparse: a LoRA that only the sparse actor uses. Every step trains it towards the dense
    policy.
    """

    enabled: bool = False  # Train the adapter and sample with it.
    rank: Count = 16  # Rank of the LoRA; its scale alpha is twice the rank.
    # Linear layers to add the adapter to, given by the last part of their names.
    target_modules: Annotated[tuple[str, ...], Field(min_length=1)] = PROJECTIONS
    learning_rate: Positive = 1e-4  # Constant learning rate of the adapter.
    kl_coef: NotNegative = 1.0  # Weight lambda of KL(dense || sparse).
    # Add the policy loss on the sparse log-probs; without it, the adapter is trained with the KL
    # alone.
    policy_loss: bool = True
    # Share of the responses to train on: the ones with the lowest p5 of acceptance. A smaller share
    # costs less.
    responses: Share = 0.5
    adapter: str | None = None  # Folder of a PEFT adapter to start from.

    def __post_init__(self) -> None:
        super().__post_init__()
        require(
            self, "kl_coef", self.policy_loss or self.kl_coef > 0, "above 0 if policy_loss is off"
        )


@dataclass(frozen=True)
class EvalConfig(Settings):
    """Evaluation of the dense policy on held-out problems during training (see sparrow eval)."""

    # Steps between evaluations, which also take place before step 1 and after the last step. If
    # unset, the policy is never evaluated.
    every: Count | None = None
    # Tasks (trace:lines=24) or datasets (aime24, gsm8k:path=test.jsonl).
    benchmark: tuple[str, ...] = ()
    # Number of problems to evaluate from the start of each benchmark. If unset, all problems of a
    # dataset are evaluated. Tasks are endless, so they need a limit.
    limit: Many | None = None
    k: Many = 1  # Responses per problem.
    temperature: NotNegative = 1.0  # Sampling temperature; 0 is greedy.
    # Sample from the smallest set of tokens whose total probability is at least this.
    top_p: Share = 1.0
    # Sample only from this many of the likeliest tokens. If unset, sample from all.
    top_k: Count | None = None
    # Responses are cut at this many tokens. Defaults to rollout.max_new_tokens.
    max_new_tokens: Count | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        consistent = (self.every is None) == (not self.benchmark)
        require(self, "benchmark", consistent, "set if and only if eval.every is set")


@dataclass(frozen=True)
class ExportConfig(Settings):
    """Export of the policy and tokenizer during training, in Hugging Face format. Exports are
    written to exports/ in the run directory.
    """

    every: Count | None = None  # Steps between exports. If unset, none are made.
    keep: Count = 2  # Number of exports to keep; older ones are deleted.
    # Also keep the policy with the highest mean@k, averaged over benchmarks.
    best: bool = False


@dataclass(frozen=True)
class GuardConfig(Settings):
    """Early warning if the p5 of acceptance is too low in a length bin, or if the p1 over all
    tokens falls below half of its best value.
    """

    # warn: log a warning. raise: read 1.5 times as many pages in the affected length bins. stop:
    # save a checkpoint and stop.
    action: Literal["warn", "raise", "stop"] = "warn"
    # Lowest acceptable p5 in length bins that enough responses reach; relative to its ceiling if
    # relative-tau is set. Defaults to 0.02 below tau.
    threshold: BelowOne | None = None
    patience: Count = 3  # Consecutive steps with a warning sign before the guard acts.


@dataclass(frozen=True)
class TrainConfig(Settings):
    """One training run."""

    run_dir: Name = "runs/latest"  # Directory for metrics, checkpoints and the trained model.
    steps: Count = 100  # Training steps, counted from the start of the run.
    seed: Seed = 0  # Seed for the order of the problems and for every sample.
    resume: bool = False  # Continue from the last checkpoint in run_dir.
    save_every: Count = 10  # Steps between checkpoints; the last step is always saved.
    # Number of checkpoints to keep. Older ones are deleted once a newer one is complete.
    keep_checkpoints: Count = 2
    # Target for the measured 5th percentile of acceptance (p5) in every length bin. Defaults to
    # 0.86 unless relative-tau is set; rollout.mode auto requires one of the two.
    tau: Probability | None = None
    # Target for p5 relative to its ceiling, in place of tau. The ceiling is the p5 of dense
    # rollouts with the same engine and top_n (docs/calibration.md).
    relative_tau: Probability | None = None
    # Acceptance is reported by sequence length, in bins of this many tokens. Defaults to the
    # schedule's bin width.
    bin_tokens: Count | None = None
    logged_rollouts: CountOrZero = 4  # Responses per step to keep for the token view of the report.
    # With rollout.mode auto: the GPU for which to predict vLLM's speed. Lossy mode is used only at
    # lengths where it is predicted to be faster.
    machine: Literal["a100", "h100", "h200", "b200"] = "h200"
    # Trackers to which accelerate also sends the metrics.
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    # How advantages are computed. grpo: subtract the group's mean reward and divide by its std.
    # dr_grpo: only subtract the mean. rloo: subtract the mean of the other responses.
    advantage: AdvantageKind = "grpo"

    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    chat: ChatConfig = NO_CHAT
    optimizer: OptimizerConfig = OptimizerConfig()
    correction: CorrectionConfig = CorrectionConfig()
    loss: LossConfig = LossConfig()
    lora: LoraConfig = LoraConfig()
    distill: DistillConfig = DistillConfig()
    guard: GuardConfig = GuardConfig()
    eval: EvalConfig = EvalConfig()
    export: ExportConfig = ExportConfig()

    def __post_init__(self) -> None:
        super().__post_init__()
        target = (
            self.rollout.mode != "auto" or self.tau is not None or self.relative_tau is not None
        )
        require(
            self,
            "tau",
            target,
            "set in rollout.mode auto, unless relative_tau is, as the target for unverified tokens",
        )
        choose(self, "tau", "relative_tau", 0.86)
        lossless = self.rollout.mode in ("lossless", "auto")
        compatible = not (lossless and self.distill.enabled)
        require(
            self.distill,
            "enabled",
            compatible,
            "off with lossless rollouts, because verification would also use the adapter",
        )
        plain = not (self.lora.r and self.distill.enabled)
        require(
            self.distill,
            "enabled",
            plain,
            "off if lora.r is set, because the adapter needs a policy without a LoRA",
        )
        useful = not (lossless and self.guard.action == "raise")
        require(
            self.guard,
            "action",
            useful,
            "warn or stop with lossless rollouts, because their samples do not depend on the pages",
        )
        require(
            self.export,
            "best",
            not self.export.best or self.eval.every is not None,
            "off without eval.every",
        )
        truncated = self.eval.top_p < 1 or self.eval.top_k is not None
        valid = not (lossless and truncated)
        require(
            self.eval,
            "top_p",
            valid,
            "1, and top_k left out, with lossless rollouts, because their drafts cannot be "
            "truncated",
        )
        rollout = self.rollout
        window = self.reward.overlong_window
        fits = window is None or window <= rollout.max_new_tokens
        require(
            self.reward,
            "overlong_window",
            fits,
            f"at most {rollout.max_new_tokens}, the value of rollout.max_new_tokens",
        )
        batch = rollout.prompts * rollout.samples
        require(
            rollout,
            "samples",
            rollout.samples > 1,
            "at least 2, because the responses to a prompt are compared with each other",
        )
        enough = self.optimizer.minibatches <= batch
        require(self.optimizer, "minibatches", enough, f"at most the {batch} responses of a step")
