"""The dense policy during training: it scores the actor's samples, learns from them, and supplies
the engine with weights.

Shapes: B responses, T response tokens (right-padded), M concatenated response tokens, n top tokens.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedModel, get_scheduler
from transformers.modeling_layers import GradientCheckpointingLayer

from sparrow.errors import ConfigError, TrainingDiverged
from sparrow.mismatch.tokens import TokenAcceptance, token_acceptance
from sparrow.model.scoring import Batch, TokenScorer
from sparrow.rollout import Rollout, derived_seed, split
from sparrow.schedule import SparsitySchedule
from sparrow.train.advantages import compute_advantages
from sparrow.train.config import TrainConfig
from sparrow.train.corrections import Correction, compute_correction
from sparrow.train.experience import Assessment, Experience, pad
from sparrow.train.losses import (
    Normalizers,
    check_finite,
    count_normalizers,
    merge_metrics,
    policy_loss,
    reference_loss,
)
from sparrow.train.ranks import Ranks, reshard, whole

if TYPE_CHECKING:
    from sparrow.train.distill import Distiller
    from sparrow.train.lora import PolicyLora

Metrics = dict[str, Any]


@dataclass(frozen=True)
class _Lesson:
    """The data of one training step that the policy learns from."""

    experience: Experience
    assessment: Assessment
    advantages_B: Tensor
    trains_BT: Tensor  # bool, true on the tokens that the policy loss sums over
    weight_BT: Tensor  # each token's weight in the policy loss, from the correction


class Learner:
    """The policy being trained, its optimiser, and the actor's adapter if there is one.

    Args:
        config: the full run config.
        model: the policy, in float32.
        schedule: the actor's schedule.
        accelerator: this process's accelerator.
        ranks: the processes of the run.

    Raises ConfigError if processes start from different weights, ``lora.r`` is set with FSDP, or
    there is nothing to distil.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: PreTrainedModel,
        schedule: SparsitySchedule,
        accelerator: Accelerator,
        ranks: Ranks,
    ) -> None:
        self.config = config
        self.model = model
        self.accelerator = accelerator
        self.ranks = ranks
        self.distiller: Distiller | None = None
        self.lora: PolicyLora | None = None
        self._reference: TokenScorer | None = None
        if config.loss.beta and not config.lora.r:
            reference = TokenScorer(copy.deepcopy(model).requires_grad_(False))
            self._reference = reference.to(accelerator.device)
        if config.lora.r:
            from sparrow.train.lora import PolicyLora  # importing PEFT takes a second

            if ranks.is_sharded:
                raise ConfigError(
                    "lora.r cannot be combined with --use_fsdp; leave out one of them"
                )
            self.lora = PolicyLora(model, config.lora)
        if config.distill.enabled:
            from sparrow.train.distill import Distiller

            self.distiller = Distiller(model, config, schedule)

        if config.optimizer.gradient_checkpointing:
            options = self.distiller.checkpointing if self.distiller else {}
            # Older transformers versions only have the second name, and version 6 will only have
            # the first.
            enable = (
                getattr(model, "activation_checkpointing_enable", None)
                or model.gradient_checkpointing_enable
            )
            enable({"use_reentrant": False, **options})

        ranks.check_equal(model)
        settings = {
            "lr": config.optimizer.learning_rate,
            "weight_decay": config.optimizer.weight_decay,
        }
        groups: list[dict[str, Any]] = [
            {"params": [p for p in model.parameters() if p.requires_grad], **settings}
        ]
        if self.distiller:
            # One optimiser for both groups: a step only updates parameters with gradients, and
            # theta and phi never have gradients at the same time.
            groups.append(self.distiller.parameter_group)
        self.scorer, self.optimizer = accelerator.prepare(
            TokenScorer(model), torch.optim.AdamW(groups)
        )
        # The data-parallel wrapper adds hooks to its forward pass. Passes that train nothing, or
        # only phi, therefore bypass the wrapper.
        self.plain_scorer: TokenScorer = accelerator.unwrap_model(self.scorer)
        if self.distiller:
            self.distiller.prepare(accelerator, ranks, self.plain_scorer, self.optimizer)

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Switch to training for an actor that decodes under ``schedule``."""
        if self.distiller:
            self.distiller.set_schedule(schedule)

    def actor_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the actor's weights by Hugging Face parameter name. Every process must consume all
        of them.
        """
        reshard(self.model)
        if self.distiller:
            return whole(self.distiller.actor_weights())
        return self.policy_weights()

    def policy_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the dense policy's weights, with its LoRA merged if it has one. Every process must
        consume all of them.
        """
        reshard(self.model)
        if self.lora:
            return self.lora.weights()
        if self.distiller:
            return whole(self.distiller.policy_weights().items())
        return whole(self.model.named_parameters())

    def restore_settings(self) -> None:
        """Restore the run's own optimiser settings, which loading a checkpoint overwrites."""
        self.optimizer.param_groups[0]["weight_decay"] = self.config.optimizer.weight_decay
        for group in self.optimizer.param_groups[1:]:
            group["lr"] = self.config.distill.learning_rate

    @torch.no_grad()
    def assess(
        self, experience: Experience, schedule: SparsitySchedule
    ) -> tuple[Assessment, float]:
        """Score every rollout under the dense policy, and compute the actor's acceptance under
        ``schedule``. Return the scores and the policy's mean entropy in nats.
        """
        rollouts = experience.rollouts
        logps, tops, entropies, acceptances = self._score("score", rollouts, schedule)

        # for the normaliser Z in the ``obrs`` correction
        lam = self.config.correction.obrs_lambda
        z = [
            np.minimum(np.exp(r.top_logprobs), np.exp(top) / lam).sum(-1)
            for r, top in zip(rollouts, tops, strict=True)
        ]
        assessment = Assessment(
            logp_BT=pad(logps),
            logq_BT=pad([r.logprobs for r in rollouts]),
            mask_BT=pad([np.ones(len(r), dtype=bool) for r in rollouts]),
            policy_top=list(tops),
            acceptances=list(acceptances),
            obrs_z_BT=pad(z),
            ref_logp_BT=pad(self._reference_logps(experience)) if self.config.loss.beta else None,
        )
        return assessment, sum(entropies) / sum(map(len, rollouts))

    @torch.no_grad()
    def acceptances(
        self, rollouts: Sequence[Rollout], schedule: SparsitySchedule
    ) -> list[TokenAcceptance]:
        """Compute the acceptance of each rollout's tokens under the dense policy. ``schedule`` is
        the current schedule.
        """
        return list(self._score("ceiling", rollouts, schedule)[-1])

    def _score(
        self, phase: str, rollouts: Sequence[Rollout], schedule: SparsitySchedule
    ) -> tuple[Any, ...]:
        """Compute each response's scores: its tokens' log-probs, the top tokens' log-probs, its
        summed entropy and its acceptance.
        """

        def score(rows: list[int]) -> list[tuple[np.ndarray, np.ndarray, float, TokenAcceptance]]:
            batch = [rollouts[i] for i in rows]
            tensors = Batch.of(batch, self.accelerator.device, with_top=True)
            scores = self.plain_scorer(tensors, self.config.rollout.temperature)
            if not bool(scores.logprobs.isfinite().all()):
                raise TrainingDiverged(
                    "the policy's log-probs for a response are not finite; go back to the "
                    "last checkpoint and lower the learning rate, or use optimizer.precision "
                    "fp32"
                )
            lengths = [len(r) for r in batch]
            columns = (split(x.cpu().numpy(), lengths) for x in scores)
            return [
                (
                    logp,
                    top,
                    float(entropy.sum(dtype=np.float64)),
                    token_acceptance(r, top, schedule),
                )
                for r, logp, top, entropy in zip(batch, *columns, strict=True)
            ]

        lengths = [len(r.prompt_ids) + len(r) for r in rollouts]
        scored = self.ranks.batched(phase, lengths, self.config.optimizer.token_budget, score)
        return tuple(zip(*scored, strict=True))

    def _reference_logps(self, experience: Experience) -> list[np.ndarray]:
        """Compute each response's token log-probs under the policy as it was before the run."""
        scorer = self._reference or self.plain_scorer

        def score(rows: list[int]) -> list[np.ndarray]:
            batch = experience.batch(rows, self.accelerator.device)
            with self.lora.taken_off() if self.lora else self.accelerator.autocast():
                scores = scorer(batch, self.config.rollout.temperature)
            lengths = [len(experience.rollouts[i]) for i in rows]
            return split(scores.logprobs.cpu().numpy(), lengths)

        return self.ranks.batched(
            "reference", experience.lengths, self.config.optimizer.token_budget, score
        )

    def _learning_rate(self, step: int) -> float:
        """Return the learning rate for training step ``step``. A warm-up skips its initial rate of
        0.
        """
        optimizer = self.config.optimizer
        first = int(optimizer.warmup_steps > 0)
        name = optimizer.lr_scheduler_type
        scheduler = get_scheduler(
            "constant_with_warmup" if name == "constant" else name,
            torch.optim.SGD([torch.zeros(1)]),
            optimizer.warmup_steps,
            self.config.steps + first,
        )
        return optimizer.learning_rate * scheduler.lr_lambdas[0](step + first)

    def update(self, experience: Experience, assessment: Assessment, step: int) -> Metrics:
        """Compute the correction, take the optimiser steps for training step ``step`` (counted from
        0), then update the adapter if there is one.

        Raises TrainingDiverged if a loss or gradient is not finite, or a log ratio exceeds
        ``loss.max_log_ratio``. In that case, the optimiser step is not taken.
        """
        advantages_B, advantage_metrics = compute_advantages(
            self.config.advantage,
            torch.from_numpy(experience.rewards),
            torch.from_numpy(experience.groups),
        )
        trains_BT = self._trained_tokens(experience, assessment)
        correction = self._correct(assessment, trains_BT, step)
        counted_BT = trains_BT & correction.counted_BT
        lesson = _Lesson(experience, assessment, advantages_B, counted_BT, correction.weight_BT)

        self.optimizer.param_groups[0]["lr"] = self._learning_rate(step)
        steps = [
            self._optimizer_step(lesson, rows)
            for rows in self._minibatches(len(experience.rollouts), step)
        ]

        metrics: Metrics = {
            "advantage": advantage_metrics,
            "correction": correction.metrics,
            "loss": _over_steps(steps),
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }
        if self.distiller:
            metrics["distill"] = self.distiller.update(
                experience, assessment, advantages_B, trains_BT
            )
        return metrics

    def _trained_tokens(self, experience: Experience, assessment: Assessment) -> Tensor:
        """Return the mask of the tokens that the policy loss sums over."""
        trains_BT = assessment.mask_BT.clone()
        if self.config.reward.overlong == "mask":
            trains_BT[torch.from_numpy(experience.truncated)] = False
        return trains_BT

    def _correct(self, assessment: Assessment, trains_BT: Tensor, step: int) -> Correction:
        """Compute the correction for the tokens being trained on. If there are none, compute it for
        all tokens, so that there are always metrics to log.
        """
        generator = torch.Generator().manual_seed(derived_seed(self.config.seed, step))
        uniform_BT = torch.rand(assessment.mask_BT.shape, generator=generator)
        return compute_correction(
            self.config.correction,
            assessment.logp_BT,
            assessment.logq_BT,
            trains_BT if trains_BT.any() else assessment.mask_BT,
            z_BT=assessment.obrs_z_BT,
            uniform_BT=uniform_BT,
        )

    def _minibatches(self, size: int, step: int) -> list[list[int]]:
        """Shuffle the responses and split them among the optimiser steps. Shuffling spreads out the
        responses of each group.
        """
        count = self.config.optimizer.minibatches
        order = list(range(size))
        if count > 1:
            order = np.random.default_rng([self.config.seed, step]).permutation(size).tolist()
        return [order[i::count] for i in range(count)]

    def _optimizer_step(self, lesson: _Lesson, rows: list[int]) -> dict[str, float]:
        """Take one optimiser step on the responses ``rows``, and return its metrics."""
        config = self.config
        groups = self.ranks.micro_batches(
            rows, lesson.experience.lengths, config.optimizer.token_budget
        )
        # Normalise each loss by the number of tokens it sums over. The KL sums over all tokens, and
        # the policy loss only over tokens of the responses being trained on.
        policy_normalizers, all_normalizers = (
            count_normalizers(mask_BT[rows], config.rollout.max_new_tokens)
            for mask_BT in (lesson.trains_BT, lesson.assessment.mask_BT)
        )

        parts = []
        for i, (indices, counts) in enumerate(groups):
            # With FSDP, reduce gradients after every pass: unsharded gradients for all layers
            # wouldn't fit in memory.
            reduces = i == len(groups) - 1 or self.ranks.is_sharded
            with contextlib.nullcontext() if reduces else self.accelerator.no_sync(self.scorer):
                loss, metrics = self._micro_batch_loss(
                    lesson, indices, policy_normalizers, all_normalizers
                )
                # Data parallelism averages gradients over processes, but the normalisers already
                # count all processes' tokens.
                self.accelerator.backward(loss * (self.ranks.count * counts))
            if counts:
                parts.append(metrics)

        norm = self.accelerator.clip_grad_norm_(
            self.scorer.parameters(), config.optimizer.max_grad_norm
        )
        parts_of_all: list[list[dict[str, float]]] = self.ranks.gather(
            "update", partial(list, parts)
        )
        merged = merge_metrics(itertools.chain(*parts_of_all))
        merged |= {"grad_norm": float(norm)}
        check_finite(merged, config.loss.max_log_ratio)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return merged

    def _micro_batch_loss(
        self,
        lesson: _Lesson,
        rows: list[int],
        policy_normalizers: Normalizers,
        all_normalizers: Normalizers,
    ) -> tuple[Tensor, dict[str, float]]:
        """Compute the loss of the responses ``rows`` in one forward pass, and its metrics."""
        config = self.config
        device = self.accelerator.device
        assessment = lesson.assessment
        scores = self.scorer(lesson.experience.batch(rows, device), config.rollout.temperature)
        longest = int(assessment.mask_BT[rows].sum(1).max())
        old_BT, mask_BT, trains_BT, weight_BT = (
            x[rows, :longest].to(device)
            for x in (
                assessment.logp_BT,
                assessment.mask_BT,
                lesson.trains_BT,
                lesson.weight_BT,
            )
        )
        logp_BT = torch.zeros_like(old_BT).masked_scatter(mask_BT, scores.logprobs)
        loss, metrics = policy_loss(
            logp_BT,
            old_BT,
            lesson.advantages_B[rows].to(device),
            trains_BT,
            weight_BT,
            config.loss,
            policy_normalizers,
        )
        if assessment.ref_logp_BT is not None:
            ref_BT = assessment.ref_logp_BT[rows, :longest].to(device)
            kl_loss, kl_metrics = reference_loss(
                logp_BT, ref_BT, mask_BT, config.loss, all_normalizers
            )
            loss = loss + kl_loss
            metrics = merge_metrics([metrics, kl_metrics])
        return loss, metrics


def _over_steps(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Summarise the metrics of several optimiser steps: max for ``*_max``, mean for everything
    else.
    """
    summary = {}
    for name in steps[0]:
        over_steps = np.max if name.endswith("_max") else np.mean
        summary[name] = float(over_steps([metrics[name] for metrics in steps]))
    return summary


@contextlib.contextmanager
def checkpointing(model: PreTrainedModel) -> Iterator[None]:
    """Context in which layers checkpoint their activations.

    A transformers layer checkpoints its activations only in training mode. In that mode, it can't
    decode with a cache. Training mode is therefore set only inside the context. It is set only on
    these layers, because it would turn on dropout in the rest of the model.
    """
    layers = [m for m in model.modules() if isinstance(m, GradientCheckpointingLayer)]
    before = [layer.training for layer in layers]
    for layer in layers:
        layer.training = True
    try:
        yield
    finally:
        for layer, training in zip(layers, before, strict=True):
            layer.training = training
