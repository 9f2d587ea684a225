"""Settings of a training run, one frozen dataclass per concern. Imports no torch, so `--help` is instant.

The string under each field is its help text on the command line. A value out of range raises ConfigError.
"""

import math
from dataclasses import dataclass
from typing import Final, Literal

from sparrow.errors import ConfigError

AdvantageKind = Literal["grpo", "dr_grpo", "rloo", "remax"]
CorrectionKind = Literal["none", "token_tis", "sequence_tis", "geometric_tis", "icepop", "sparse_rl", "obrs", "m2po"]
Normalization = Literal["grpo", "dapo", "dr_grpo"]
OverlongKind = Literal["keep", "mask", "penalty"]

ICEPOP_BAND: Final = (0.5, 5.0)
SPARSE_RL_BAND: Final = (0.5, 1.5)


POSITIVE: Final = "a positive finite number"
NOT_NEGATIVE: Final = "a finite number of at least 0"


def _require(config: object, name: str, holds: bool, expected: str) -> None:
    """Refuse a setting by its name on the command line."""
    if not holds:
        section = type(config).__name__.removesuffix("Config").lower()
        setting = name if section == "train" else f"{section}.{name}"
        raise ConfigError(f"{setting} is {getattr(config, name)!r}, but must be {expected}; change {setting}.")


@dataclass(frozen=True)
class CorrectionConfig:
    """How the mismatch between the sparse actor q and the dense policy p is corrected (sparrow.train.corrections)."""

    kind: CorrectionKind = "token_tis"
    """token_tis: weight min(p/q, cap) per token. sequence_tis, geometric_tis: one truncated weight per sequence, from
    the product or the geometric mean of its ratios. icepop: drop tokens outside the band. sparse_rl: drop outlier
    sequences and tokens outside the band. obrs: Jackpot's rejection sampling. m2po: drop the most deviating tokens."""

    cap: float = 2.0
    """Largest weight C (token_tis, sequence_tis, geometric_tis, obrs)."""

    band: tuple[float, float] | None = None
    """Smallest and largest ratio p/q of a kept token; unset: 0.5 5 for icepop, 0.5 1.5 for sparse_rl."""

    reject_below: float = 1e-4
    """A sequence with any ratio p/q below this is dropped (sparse_rl)."""

    obrs_lambda: float = 1.0
    """A token is accepted with probability min(1, p / (lambda q)); larger values reject more (obrs)."""

    m2_bound: float = 0.04
    """Largest mean of (log p/q)^2 over the kept tokens of the batch (m2po)."""

    def __post_init__(self) -> None:
        _require(self, "cap", 0 < self.cap < math.inf, POSITIVE)
        if self.band is not None:
            low, high = self.band
            _require(self, "band", 0 <= low <= 1 <= high < math.inf, "low high with 0 <= low <= 1 <= high")
        _require(self, "reject_below", 0 <= self.reject_below < 1, "at least 0 and below 1")
        _require(self, "obrs_lambda", 0 < self.obrs_lambda < math.inf, POSITIVE)
        _require(self, "m2_bound", 0 < self.m2_bound < math.inf, POSITIVE)


@dataclass(frozen=True)
class LossConfig:
    """The clipped policy objective (sparrow.train.losses)."""

    clip_low: float = 0.2
    """The ratio pi_theta / p_old is clipped from below at 1 - clip_low."""

    clip_high: float = 0.28
    """The ratio pi_theta / p_old is clipped from above at 1 + clip_high."""

    normalization: Normalization = "grpo"
    """grpo: mean over each sequence's tokens, then over sequences. dapo: mean over all tokens of the batch. dr_grpo:
    sum over tokens, divided by the number of sequences and the longest response allowed."""

    max_log_ratio: float = 20.0
    """Training stops if |log pi_theta - log p_old| of any token exceeds this."""

    def __post_init__(self) -> None:
        _require(self, "clip_low", 0 < self.clip_low <= 1, "above 0 and at most 1")
        _require(self, "clip_high", 0 < self.clip_high < math.inf, POSITIVE)
        _require(self, "max_log_ratio", 0 < self.max_log_ratio < math.inf, POSITIVE)


@dataclass(frozen=True)
class RolloutConfig:
    """What is sampled each step."""

    prompts: int = 16
    """Prompts per step, over all processes."""

    samples: int = 8
    """Responses per prompt."""

    max_new_tokens: int = 1024
    """Responses are cut at this many tokens."""

    temperature: float = 1.0
    """Softmax temperature of actor and policy alike."""

    top_n: int = 20
    """Length of the recorded lists that bound the acceptance rate."""

    resample: int = 0
    """Rounds in which prompts whose responses all got the same reward are replaced by new ones; those that are left
    after the last round stay."""

    def __post_init__(self) -> None:
        _require(self, "resample", self.resample >= 0, "at least 0")
        for name in ("prompts", "samples", "max_new_tokens", "top_n"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        _require(self, "temperature", 0 < self.temperature < math.inf, POSITIVE)


@dataclass(frozen=True)
class RewardConfig:
    """What a response's reward is made of, beside the verifier's verdict (sparrow.train.reward)."""

    format: float = 0.0
    """Added for a response that states an answer in the form asked for, right or wrong."""

    overlong: OverlongKind = "keep"
    """Responses cut at max_new_tokens. keep: as they are. mask: they count in their group, but have no loss. penalty:
    a response loses up to 1, linearly over the last overlong_window tokens (DAPO)."""

    overlong_window: int | None = None
    """Tokens before max_new_tokens over which the penalty grows from 0 to 1; unset: a fifth of max_new_tokens."""

    def __post_init__(self) -> None:
        _require(self, "format", 0 <= self.format < math.inf, NOT_NEGATIVE)
        window = self.overlong_window
        _require(self, "overlong_window", window is None or window >= 1, "at least 1")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW on the policy."""

    learning_rate: float = 1e-6
    """Peak learning rate, constant after the warm-up."""

    warmup_steps: int = 0
    """Steps over which the learning rate rises linearly."""

    weight_decay: float = 0.0
    """Decoupled weight decay."""

    max_grad_norm: float = 1.0
    """Gradients are scaled down to this norm."""

    minibatches: int = 1
    """Optimiser steps per rollout batch."""

    token_budget: int = 32768
    """Padded tokens of one forward and backward pass; gradients are accumulated over as many as needed."""

    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass to save memory."""

    precision: Literal["fp32", "bf16"] = "fp32"
    """bf16 runs forward passes under autocast; weights and optimiser stay float32."""

    def __post_init__(self) -> None:
        _require(self, "learning_rate", 0 < self.learning_rate < math.inf, POSITIVE)
        _require(self, "warmup_steps", self.warmup_steps >= 0, "at least 0")
        _require(self, "weight_decay", 0 <= self.weight_decay < math.inf, NOT_NEGATIVE)
        _require(self, "max_grad_norm", self.max_grad_norm > 0, "above 0")
        for name in ("minibatches", "token_budget"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")


@dataclass(frozen=True)
class DistillConfig:
    """DistillSparse: a LoRA that only the sparse actor wears, trained towards the dense policy every step."""

    enabled: bool = False
    """Train and wear the adapter."""

    rank: int = 16
    """Rank of the LoRA; its scale alpha is twice the rank."""

    target_modules: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that get an adapter, by the last part of their name."""

    learning_rate: float = 1e-4
    """Learning rate of the adapter, constant."""

    kl_coef: float = 1.0
    """Weight lambda of KL(dense || sparse)."""

    policy_loss: bool = True
    """Add the policy loss on the sparse log-probs; without it the adapter is distilled by KL alone."""

    positions: float = 1.0
    """Share of response tokens trained on, those with the lowest acceptance first; it hardly changes the cost."""

    responses: float = 1.0
    """Share of responses trained on, those with the lowest p5 of acceptance first; the cost falls with it."""

    step_down: tuple[str, ...] = ()
    """Cheaper schedules to move to, in this order, once their p5 on the latest rollouts holds tau in every bin."""

    step_down_every: int = 10
    """Steps between looks at the next cheaper schedule."""

    adapter: str | None = None
    """A PEFT adapter folder to start from."""

    def __post_init__(self) -> None:
        for name in ("rank", "step_down_every"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        _require(self, "target_modules", bool(self.target_modules), "at least one layer name")
        _require(self, "learning_rate", 0 < self.learning_rate < math.inf, POSITIVE)
        _require(self, "kl_coef", 0 <= self.kl_coef < math.inf, NOT_NEGATIVE)
        trains = self.policy_loss or self.kl_coef > 0
        _require(self, "kl_coef", trains, "above 0 without the policy loss")
        _require(self, "positions", 0 < self.positions <= 1, "above 0 and at most 1")
        _require(self, "responses", 0 < self.responses <= 1, "above 0 and at most 1")


@dataclass(frozen=True)
class GuardConfig:
    """An early warning: p5 of acceptance too low in a length bin, or p1 of all tokens fallen to half of its best."""

    action: Literal["warn", "raise", "stop"] = "warn"
    """warn: say so. raise: read half as many pages again where it is so. stop: save a checkpoint and stop."""

    threshold: float | None = None
    """p5 is too low below this, in a length bin that enough responses reach; unset: 0.02 below tau."""

    patience: int = 3
    """Steps in a row before it acts."""

    def __post_init__(self) -> None:
        inside = self.threshold is None or 0 <= self.threshold < 1
        _require(self, "threshold", inside, "at least 0 and below 1")
        _require(self, "patience", self.patience >= 1, "at least 1")


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    run_dir: str = "runs/latest"
    """Where metrics, checkpoints and the trained model go."""

    steps: int = 100
    """Training steps, counted from the start of the run."""

    seed: int = 0
    """Seeds the order of the problems and every sample."""

    resume: bool = False
    """Go on from the last checkpoint in run_dir."""

    save_every: int = 10
    """Steps between checkpoints; the last step is always saved."""

    keep_checkpoints: int = 2
    """Checkpoints kept; older ones are deleted once a newer one is complete."""

    tau: float = 0.86
    """The 5th percentile of acceptance that every length bin should hold."""

    bin_tokens: int | None = None
    """Width of the length bins that the tail is reported in; unset: the schedule's."""

    logged_rollouts: int = 4
    """Responses per step kept for the token view of the report."""

    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Also log to these through accelerate."""

    advantage: AdvantageKind = "grpo"
    """grpo: group mean and std. dr_grpo: group mean. rloo: mean of the others. remax: reward of the greedy response."""

    rollout: RolloutConfig = RolloutConfig()
    reward: RewardConfig = RewardConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    correction: CorrectionConfig = CorrectionConfig()
    loss: LossConfig = LossConfig()
    distill: DistillConfig = DistillConfig()
    guard: GuardConfig = GuardConfig()

    def __post_init__(self) -> None:
        for name in ("steps", "save_every", "keep_checkpoints"):
            _require(self, name, getattr(self, name) >= 1, "at least 1")
        _require(self, "tau", 0 < self.tau < 1, "above 0 and below 1")
        _require(self, "logged_rollouts", self.logged_rollouts >= 0, "at least 0")
        guarded = self.guard.action != "raise" or not self.distill.step_down
        _require(self.guard, "action", guarded, "warn or stop where distill.step_down moves the schedule")
        rollout, window = self.rollout, self.reward.overlong_window
        fits = window is None or window <= rollout.max_new_tokens
        _require(self.reward, "overlong_window", fits, f"at most rollout.max_new_tokens, {rollout.max_new_tokens}")
        learns = not (rollout.resample and self.advantage == "remax")
        _require(rollout, "resample", learns, "0 with remax, which learns from equal rewards too")
        batch = rollout.prompts * rollout.samples
        enough = self.optimizer.minibatches <= batch
        _require(self.optimizer, "minibatches", enough, f"at most the {batch} responses of a step")
