"""DistillSparse: a LoRA phi that only the sparse actor uses. Source: Sparrow, arXiv 2606.08446,
section 7.

The dense policy theta never uses phi. docs/method.md ("DistillSparse") describes how phi is
trained.

Shapes: B responses, T response tokens (right-padded), M concatenated response tokens, n top tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from accelerate import Accelerator
from peft import PeftConfig, get_peft_model_state_dict, load_peft_weights
from peft.utils import set_peft_model_state_dict
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from sparrow.errors import ConfigError
from sparrow.model.actor import keep_attention, set_schedule, teacher_forced
from sparrow.model.scoring import TokenScorer
from sparrow.schedule import SparsitySchedule
from sparrow.train.config import DistillConfig, TrainConfig
from sparrow.train.experience import Assessment, Experience
from sparrow.train.lora import base_weights, inject, layers, merged_weights, switched
from sparrow.train.losses import check_finite, count_normalizers, merge_metrics, policy_loss
from sparrow.train.ranks import Ranks

# metadata key for the sample of base weights in a saved adapter
BASE = "sparrow_base"
# PEFT's settings that determine by how much a layer's LoRA is multiplied
SCALE = ("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern")


class Adapter:
    """The LoRA phi, injected into a model and switched off except inside ``active()``.

    Args:
        model: the policy. Outside ``active()``, its forward pass stays bitwise the same.
        config: the adapter's settings.
        schedule: the actor's schedule.

    Raises ConfigError if the schedule is dense and leaves nothing to distil, or if the model lacks
    the target layers. Also raises ConfigError if the adapter to start from can't be read, belongs
    to a different model, or was trained with another scale.
    """

    def __init__(
        self, model: PreTrainedModel, config: DistillConfig, schedule: SparsitySchedule
    ) -> None:
        if schedule.is_dense:
            raise ConfigError(
                "the schedule is already dense, so there is nothing to distil; set a sparse "
                "schedule"
            )
        self.model = model
        self._trained = {name for name, p in model.named_parameters() if p.requires_grad}
        set_schedule(model, schedule)
        self._lora = inject(
            model, config.rank, 2 * config.rank, config.target_modules, "distill.rank"
        )
        self._base = self._sample()
        for module in layers(model):
            module.enable_adapters(False)
        self._train_policy(True)
        if config.adapter:
            self._load(Path(config.adapter))

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        """Context in which the model is the actor: phi is on, and only phi trains."""
        with switched(self.model, True):
            self._train_policy(False)
            try:
                yield
            finally:
                self._train_policy(True)

    @property
    def parameters(self) -> list[torch.nn.Parameter]:
        """The parameters of phi."""
        return [p for name, p in self.model.named_parameters() if "lora_" in name]

    def adapter_weights(self) -> dict[str, Tensor]:
        """Return the weights of phi under PEFT's names."""
        return {
            f"base_model.model.{name}": p
            for name, p in get_peft_model_state_dict(self.model).items()
        }

    def save(self, folder: Path, weights: Mapping[str, Tensor]) -> None:
        """Write ``adapter_weights`` as a standard PEFT adapter, with a sample of the base weights
        from the start of the run.
        """
        folder.mkdir(parents=True, exist_ok=True)
        contiguous = {name: weight.contiguous() for name, weight in weights.items()}
        metadata = {"format": "pt", BASE: json.dumps(self._base.tolist())}
        save_file(contiguous, str(folder / "adapter_model.safetensors"), metadata)
        self._lora.save_pretrained(str(folder))

    def _load(self, folder: Path) -> None:
        try:
            saved = PeftConfig.from_pretrained(str(folder))
            weights = load_peft_weights(str(folder), device="cpu")
        except (OSError, ValueError, SafetensorError) as error:
            raise ConfigError(
                f"cannot read a PEFT adapter from {folder}: {str(error).splitlines()[0]}; "
                "check distill.adapter"
            ) from error

        weights = {k.removeprefix("base_model.model."): v for k, v in weights.items()}
        shapes = {k: v.shape for k, v in get_peft_model_state_dict(self.model).items()}
        if {k: v.shape for k, v in weights.items()} != shapes:
            raise ConfigError(
                f"the adapter in {folder} was made for {saved.base_model_name_or_path!r}, and "
                f"its {len(weights)} tensors do not match the {len(shapes)} of this model's "
                "adapter; choose an adapter for this model with the same rank and layers"
            )
        for name in SCALE:
            theirs = getattr(saved, name, None)
            ours = getattr(self._lora, name)
            if theirs != ours:
                raise ConfigError(
                    f"the adapter in {folder} was trained with another scale: its {name} is "
                    f"{theirs}, expected {ours}; choose an adapter whose lora_alpha is twice its "
                    "rank in every layer"
                )
        if (base := _saved_base(folder)) is not None:
            cosine = 0.0
            if len(base) == len(self._base):
                cosine = torch.cosine_similarity(base, self._base, dim=0).item()
            if cosine < 0.5:
                raise ConfigError(
                    f"the adapter in {folder} was trained on weights "
                    f"({saved.base_model_name_or_path!r}) whose correlation with this model's is "
                    f"only {cosine:.2f}; use the model it was trained on, or leave distill.adapter out"
                )
        set_peft_model_state_dict(self.model, weights)

    def _sample(self) -> Tensor:
        """Sample a few base weights (float32) from each adapted layer. The sample is saved with the
        adapter, so that the adapter can later be matched to its base model.

        Training rotates the sample, taken as a vector, by only a few degrees. The sample from an
        unrelated model is nearly orthogonal to it.
        """

        def sixteen(weight: Tensor) -> Tensor:
            flat = weight.detach().flatten()
            step = max(1, len(flat) // 16)
            return flat[::step][:16].float().cpu()

        weights = [cast(Tensor, m.get_base_layer().weight) for m in layers(self.model)]
        return torch.cat([sixteen(weight) for weight in weights])

    def _train_policy(self, trains: bool) -> None:
        for name, parameter in self.model.named_parameters():
            if name.replace(".base_layer", "") in self._trained:
                parameter.requires_grad_(trains)


def _saved_base(folder: Path) -> Tensor | None:
    """Read the sample of base weights written by ``Adapter.save``. Return None if there isn't one,
    e.g. in an adapter saved by another program.
    """
    path = folder / "adapter_model.safetensors"
    if not path.exists():
        return None
    with safe_open(str(path), "pt") as file:
        sample = (file.metadata() or {}).get(BASE)
    return torch.tensor(json.loads(sample)) if sample else None


def bucket_kl(policy_top: Tensor, actor_top: Tensor) -> Tensor:
    """Compute KL(policy || actor) per token, ``[M]``, over n listed tokens plus one bucket for the
    rest.

    The arguments are log-probs ``[M, n]`` of the same tokens under policy and actor. The result is
    a lower bound on the KL over the full vocabulary (exact if the list covers it), and is
    differentiable in ``actor_top``.
    """
    p = policy_top.float().exp()
    q = actor_top.float().exp()
    rest_p = (1 - p.sum(-1)).clamp(min=0)
    # Rounding may leave the actor no mass outside the list; clamping keeps the log finite.
    rest_q = (1 - q.sum(-1)).clamp(min=1e-7)
    listed_kl = torch.where(p > 0, p * (policy_top.float() - actor_top.float()), 0.0).sum(-1)
    rest_log_ratio = rest_p.clamp(min=1e-7).log() - rest_q.log()
    rest_kl = torch.where(rest_p > 0, rest_p * rest_log_ratio, 0.0)
    return listed_kl + rest_kl


def worst_responses(acceptance: Sequence[np.ndarray], share: float) -> list[int]:
    """Pick the ``share`` of responses with the lowest acceptance p5, but at least one. Return their
    indices in ascending order.
    """
    count = max(1, round(share * len(acceptance)))
    tails = [np.percentile(a, 5) for a in acceptance]
    worst_first = np.argsort(tails, kind="stable")
    return sorted(worst_first[:count].tolist())


class Distiller:
    """Trains an ``Adapter``, taking one step after every policy update.

    Args:
        model: the policy.
        config: the full run config.
        schedule: the actor's schedule.

    Raises ConfigError: see ``Adapter``.
    """

    def __init__(
        self, model: PreTrainedModel, config: TrainConfig, schedule: SparsitySchedule
    ) -> None:
        self.config = config
        self._adapter = Adapter(model, config.distill, schedule)
        # The backward pass does not recompute sparse attention.
        self.checkpointing = {"context_fn": keep_attention}
        self._schedule = schedule
        self.parameter_group = {
            "params": self._adapter.parameters,
            "lr": config.distill.learning_rate,
            "weight_decay": 0.0,
        }
        # Context in which theta and phi are both trainable. Loading a sharded optimiser state needs
        # this.
        self.everything_trains = partial(switched, model, True)
        self.actor_weights = partial(merged_weights, model)
        self.policy_weights = partial(base_weights, model)
        self.adapter_weights = self._adapter.adapter_weights
        self.save = self._adapter.save

    def prepare(
        self, accelerator: Accelerator, ranks: Ranks, scorer: TokenScorer, optimizer: Any
    ) -> None:
        """Set the scorer and the optimiser, both already prepared by the accelerator. The optimiser
        must contain ``parameter_group``.
        """
        self._accelerator = accelerator
        self._ranks = ranks
        self._scorer = scorer
        self._optimizer = optimizer

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Switch to training for another schedule."""
        set_schedule(self._adapter.model, schedule)
        self._schedule = schedule

    def update(
        self,
        experience: Experience,
        assessment: Assessment,
        advantages_B: Tensor,
        trains_BT: Tensor,
    ) -> dict[str, float]:
        """Take one optimiser step on phi with the current rollouts, with theta frozen.

        The loss is the clipped policy loss on the sparse log-probs, plus ``kl_coef`` times the mean
        KL(dense || sparse). The old policy is the actor at sampling time. The KL covers all tokens
        of the worst responses. The policy loss covers only those tokens that are also in
        ``trains_BT``.
        """
        distill = self.config.distill
        accelerator = self._accelerator
        rows = worst_responses([a.lower for a in assessment.acceptances], distill.responses)
        normalizers = count_normalizers(trains_BT[rows], self.config.rollout.max_new_tokens)
        tokens = int(assessment.mask_BT[rows].sum())

        parts = []
        with self._adapter.active():
            groups = self._ranks.micro_batches(
                rows, experience.lengths, self.config.optimizer.token_budget
            )
            for indices, counts in groups:
                logp, top = self.actor_logprobs(experience, indices)
                policy_top = torch.cat(
                    [torch.from_numpy(assessment.policy_top[i]) for i in indices]
                )
                kl = bucket_kl(policy_top.to(top.device), top).sum()
                loss = distill.kl_coef * kl / tokens

                metrics: dict[str, float] = {}
                if distill.policy_loss:
                    longest = int(assessment.mask_BT[indices].sum(1).max())
                    old_BT, mask_BT, trained_BT = (
                        x[indices, :longest].to(top.device)
                        for x in (assessment.logq_BT, assessment.mask_BT, trains_BT)
                    )
                    logp_BT = torch.zeros_like(old_BT).masked_scatter(mask_BT, logp)
                    policy, metrics = policy_loss(
                        logp_BT,
                        old_BT,
                        advantages_B[indices].to(top.device),
                        trained_BT,
                        torch.ones_like(old_BT),
                        self.config.loss,
                        normalizers,
                    )
                    loss = loss + policy

                accelerator.backward(loss * (self._ranks.count * counts))
                if counts:
                    parts.append(metrics | {"kl": kl.item() / tokens})

            phi = self._adapter.parameters
            if self._ranks.count > 1 and not self._ranks.is_sharded:
                # The backward pass has already averaged sharded gradients, but not unsharded ones.
                for p in phi:
                    p.grad = accelerator.reduce(p.grad, "mean")
            norm = accelerator.clip_grad_norm_(phi, self.config.optimizer.max_grad_norm)
            all_parts = itertools.chain.from_iterable(self._ranks.gather("distil", lambda: parts))
            merged = {"grad_norm": float(norm), "tokens": float(tokens)} | merge_metrics(all_parts)
            check_finite(merged, math.inf)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return merged

    def actor_logprobs(self, experience: Experience, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Compute the actor's log-probs of the sampled and the top-n tokens, teacher-forced under
        its schedule.
        """
        batch = experience.batch(rows, self._accelerator.device, with_top=True)
        with teacher_forced(self._adapter.model, batch.prompt_lengths):
            scores = self._scorer(batch, self.config.rollout.temperature)
        assert scores.top_logprobs is not None
        return scores.logprobs, scores.top_logprobs
