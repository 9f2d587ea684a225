"""The training loop: rollout -> verify -> dense log-probs -> acceptance -> correction -> update.

The sparse actor q samples; the dense policy p is trained on what it sampled, with each token's p/q
corrected for. The trainer knows its engine only by ``engines.base.Engine``. Source: Sparrow, arXiv
2606.08446, sections 3 and 6.

Shapes: B responses, T response tokens (right-padded), M response tokens laid end to end, n top tokens.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.modeling_layers import GradientCheckpointingLayer

from sparrow.engines.base import Counters, Engine, total
from sparrow.errors import CheckpointError, ConfigError, EngineError, RewardError, TaskError, TrainingDiverged
from sparrow.measure import TokenAcceptance, pool, token_acceptance
from sparrow.mismatch import BinMismatch, MismatchReport
from sparrow.model.scoring import TokenScorer
from sparrow.rollout import derived_seed, split
from sparrow.run.directory import LoggedResponse, RunConfig, RunDir, TrainerState
from sparrow.schedule import SparsitySchedule
from sparrow.tasks import Task
from sparrow.train.advantages import compute_advantages
from sparrow.train.collect import Collector
from sparrow.train.config import TrainConfig
from sparrow.train.corrections import Correction, compute_correction
from sparrow.train.experience import Assessment, Experience, pad
from sparrow.train.losses import check_finite, count_normalizers, merge_metrics, policy_loss
from sparrow.train.ranks import Ranks, reshard, sharding, whole
from sparrow.train.resume import describe, resumed
from sparrow.train.reward import reward_metrics
from sparrow.train.schedules import Evidence, Movers
from sparrow.train.trackers import check_trackers, flatten, tracked

if TYPE_CHECKING:
    from sparrow.train.distill import Distiller

log = logging.getLogger(__name__)

Metrics = dict[str, Any]
Listener = Callable[[str, Metrics], None]
"""Told ``("rollout" | "score" | "update", {})`` as a phase begins and ``("step", metrics)`` when a step ends."""


class Trainer:
    """Trains ``model`` with rollouts from ``engine``.

    ``model`` is the dense policy with float32 weights, ``engine`` the sparse actor, and ``schedule`` what that decodes
    under; with ``closed_loop`` the schedule follows the measured p5, so that it holds ``config.tau``.

    Raises ConfigError: a run directory in use, a tracker that is not installed, more processes than responses, or
    processes that start from different weights.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        task: Task,
        engine: Engine,
        schedule: SparsitySchedule,
        listener: Listener = lambda event, metrics: None,
        closed_loop: bool = False,
    ) -> None:
        check_trackers(config.trackers)
        self.config, self.tokenizer, self.engine = config, tokenizer, engine
        self.listener = listener
        self.step = 0
        self.cursor = 0  # index of the next problem
        self.schedule = schedule
        self.movers = Movers(config, schedule, closed_loop)
        self.run_dir = RunDir(config.run_dir, config.resume)
        self.accelerator = Accelerator(
            mixed_precision="bf16" if config.optimizer.precision == "bf16" else "no",
            log_with=list(config.trackers) or None,
            project_dir=config.run_dir,
            kwargs_handlers=[DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)],
            fsdp_plugin=sharding(model, config.optimizer.precision == "bf16"),
        )
        self.ranks = Ranks(self.accelerator)
        self.ranks.on_main("start", self.run_dir.lock)
        try:
            self._start(model, task, schedule)
        except BaseException:
            self.run_dir.release()
            raise

    def _start(self, model: PreTrainedModel, task: Task, schedule: SparsitySchedule) -> None:
        """Prepare model and optimiser, and read the checkpoint if the run is resumed."""
        config = self.config
        responses = config.rollout.prompts * config.rollout.samples
        if responses < self.ranks.count:
            raise ConfigError(f"{self.ranks.count} processes cannot share {responses} responses; start fewer")
        set_seed(config.seed)
        self.model = model
        self.distiller: Distiller | None = None
        if config.distill.enabled:
            from sparrow.train.distill import Distiller  # PEFT takes a second to import

            self.distiller = Distiller(model, config, schedule)
        if config.optimizer.gradient_checkpointing:
            keeping = self.distiller.checkpointing if self.distiller else {}
            # Older transformers know the second name only, and version 6 will know the first only.
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False, **keeping})
        self.ranks.check_equal(model)
        settings = {"lr": config.optimizer.learning_rate, "weight_decay": config.optimizer.weight_decay}
        groups: list[dict[str, Any]] = [{"params": [p for p in model.parameters() if p.requires_grad], **settings}]
        if self.distiller:  # one optimiser for both: a step moves what has gradients, which theta and phi never share
            groups.append(self.distiller.parameter_group)
        self.scorer, self.optimizer = self.accelerator.prepare(TokenScorer(model), torch.optim.AdamW(groups))
        # Data parallelism hooks itself into the wrapper's passes; those that train nothing, or phi, go past it.
        self.plain_scorer: TokenScorer = self.accelerator.unwrap_model(self.scorer)
        self._collector = Collector(config, self.tokenizer, task, self.engine, self.ranks)
        if self.distiller:
            self.distiller.prepare(self.accelerator, self.ranks, self.plain_scorer, self.optimizer)
        recorded = RunConfig(asdict(config), schedule)
        if config.resume:
            recorded = self._load(recorded)
        if self.ranks.is_main:
            recorded.save(self.run_dir.path)
        self.accelerator.init_trackers("sparrow", config=flatten(asdict(config)))

    def train(self) -> None:
        """Run to the last step, then save the model to ``run_dir/model``.

        A KeyboardInterrupt saves a checkpoint of the last finished step and is raised again.

        Raises SparrowError: a verifier, loss or checkpoint that failed; finished steps can be resumed from.
        """
        try:
            self._train()
        finally:
            self.run_dir.release()

    def _train(self) -> None:
        self.ranks.on_main("start", self.run_dir.lock)
        saved = self.step
        try:
            self._sync()
            while self.step < self.config.steps:
                self._train_step()
                if self.movers.guard.stops or self.step % self.config.save_every == 0:
                    self._save()
                    saved = self.step
                if self.movers.guard.stops:
                    guard = self.movers.guard
                    raise TrainingDiverged(
                        f"{guard.reason}; the checkpoint of step {self.step} is saved, and {guard.remedy}"
                    )
        except (KeyboardInterrupt, RewardError, TaskError, EngineError) as error:
            # Rollouts and scores change nothing, and updates are not interrupted: the state is that of self.step.
            # An interrupt may catch processes at different places, where they cannot save anything together.
            if self.step > saved and (self.ranks.count == 1 or not isinstance(error, KeyboardInterrupt)):
                self._save()
            raise
        if self.step > saved:
            self._save()
        self._export()
        # Not end_training: it would end the process group, which an engine in this process may still use.
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _export(self) -> None:
        """Write the trained policy, the adapter if there is one, and the tokenizer."""
        policy = self.distiller.policy_weights() if self.distiller else self.model.state_dict()
        adapter = self.distiller.adapter_weights() if self.distiller else {}
        tied = self.model.all_tied_weights_keys  # to others, which are written
        weights, phi = (
            {name: weight.cpu() for name, weight in whole(part.items()) if self.ranks.is_main and name not in tied}
            for part in (policy, adapter)
        )
        if self.ranks.is_main:
            self.model.save_pretrained(self.run_dir.path / "model", state_dict=weights)
            self.tokenizer.save_pretrained(self.run_dir.path / "model")
            if self.distiller:
                self.distiller.save(self.run_dir.path / "adapter", phi)

    def _train_step(self) -> None:
        clock = {"start": time.perf_counter()}
        self.listener("rollout", {})
        experience = self._collector.collect(self.cursor)
        counters = total(self.ranks.gather("sleep", self._rest))
        clock["rollout"] = time.perf_counter()
        self.listener("score", {})
        assessment, report, metrics = self._assess(experience)
        clock["score"] = time.perf_counter()
        self.listener("update", {})
        with _uninterrupted():
            metrics["schedule"] = {"top_k": self.schedule.to_dict()["top_k"]}
            with self.ranks.connected("update"), _checkpointing(self.model):
                metrics |= self._update(experience, assessment)
            metrics |= self._move_schedule(experience, assessment, report)
            self.step, self.cursor = self.step + 1, experience.cursor
            clock["update"] = time.perf_counter()
            try:
                self._sync()
            finally:  # an engine that fails here does not undo the step
                clock["sync"] = time.perf_counter()
                seconds = np.diff(list(clock.values())).tolist()
                metrics |= {
                    **counters.to_dict(),
                    "seconds": dict(zip(list(clock)[1:], seconds, strict=True)),
                    "imbalance": {phase: self.ranks.imbalance(phase) for phase in ("rollout", "score")},
                }
                metrics = {"step": self.step, **metrics}
                if self.ranks.is_main:
                    self._log(metrics, report, experience, assessment)
        self.listener("step", metrics)

    def _rest(self) -> Counters:
        counters = self.engine.counters()
        self.engine.sleep()
        return counters

    def _sync(self) -> None:
        """Wake the engine and give it the actor's weights and schedule."""

        def push() -> None:
            weights = self._actor_weights()
            try:
                self.engine.wake()
                self.engine.set_schedule(self.schedule)
                self.engine.update_weights(weights)
            finally:
                deque(weights, maxlen=0)  # the other processes wait for this one's part of what is left

        self.ranks.gather("sync", push)

    @torch.no_grad()
    def _assess(self, experience: Experience) -> tuple[Assessment, MismatchReport, Metrics]:
        """Dense log-probs of every rollout, and how far the actor was from them."""
        rollouts, lam = experience.rollouts, self.config.correction.obrs_lambda

        def score(rows: list[int]) -> list[tuple[np.ndarray, np.ndarray, float, TokenAcceptance]]:
            """By response: log-probs, those of the top tokens, summed entropy, acceptance."""
            batch = experience.batch(rows, self.accelerator.device, with_top=True)
            scores = self.plain_scorer(batch, self.config.rollout.temperature)
            columns = (split(x.cpu().numpy(), [len(rollouts[i]) for i in rows]) for x in scores)
            return [
                (logp, top, float(entropy.sum(dtype=np.float64)), token_acceptance(rollouts[i], top, self.schedule))
                for i, logp, top, entropy in zip(rows, *columns, strict=True)
            ]

        scored = self.ranks.batched("score", experience.lengths, self.config.optimizer.token_budget, score)
        logps, tops, entropies, acceptances = zip(*scored, strict=True)
        z = [
            np.minimum(np.exp(r.top_logprobs), np.exp(top) / lam).sum(-1) for r, top in zip(rollouts, tops, strict=True)
        ]
        assessment = Assessment(
            logp_BT=pad(logps),
            logq_BT=pad([r.logprobs for r in rollouts]),
            mask_BT=pad([np.ones(len(r), dtype=bool) for r in rollouts]),
            policy_top=list(tops),
            acceptances=list(acceptances),
            obrs_z_BT=pad(z),
        )
        bin_tokens = self.config.bin_tokens or self.schedule.bin_tokens
        report = pool(acceptances, bin_tokens, seed=self.step)
        tokens, ended = np.array([(len(r), r.finish_reason == "stop") for r in rollouts], dtype=float).T
        rewards = [(g.problem.source, parts) for g in experience.drawn for parts in g.parts]
        metrics = {
            "reward": {**reward_metrics(rewards), "prompts": experience.cursor - self.cursor},
            "response": {
                "mean": tokens.mean(), "max": tokens.max(), "tokens": tokens.sum(), "ended_fraction": ended.mean(),
            },
            "entropy": sum(entropies) / tokens.sum(),
            "mismatch": report.to_dict(),
        }  # fmt: skip
        return assessment, report, metrics

    def _update(self, experience: Experience, assessment: Assessment) -> Metrics:
        """Correct, then take the optimiser steps; then the adapter's, if there is one."""
        config, device = self.config, self.accelerator.device
        advantages_B, advantage_metrics = compute_advantages(
            config.advantage,
            torch.from_numpy(experience.rewards),
            torch.from_numpy(experience.groups),
            torch.from_numpy(experience.baseline) if experience.baseline is not None else None,
        )
        if config.reward.overlong == "mask":
            advantages_B[torch.from_numpy(experience.truncated)] = 0.0
        correction = self._correct(assessment)
        warm = min(1.0, (self.step + 1) / max(config.optimizer.warmup_steps, 1))
        self.optimizer.param_groups[0]["lr"] = config.optimizer.learning_rate * warm
        steps = []
        for rows in self._minibatches(len(experience.rollouts)):
            normalizers = count_normalizers(assessment.mask_BT[rows], config.rollout.max_new_tokens)
            groups = self.ranks.micro_batches(rows, experience.lengths, config.optimizer.token_budget)
            parts = []
            for i, (some, counts) in enumerate(groups):
                # Shards are reduced at once: whole gradients of all layers would not fit.
                now = i == len(groups) - 1 or self.ranks.is_sharded
                with contextlib.nullcontext() if now else self.accelerator.no_sync(self.scorer):
                    scores = self.scorer(experience.batch(some, device), config.rollout.temperature)
                    longest = int(assessment.mask_BT[some].sum(1).max())
                    old_BT, mask_BT, weight_BT = (
                        x[some, :longest].to(device)
                        for x in (assessment.logp_BT, assessment.mask_BT, correction.weight_BT)
                    )
                    logp_BT = torch.zeros_like(old_BT).masked_scatter(mask_BT, scores.logprobs)
                    loss, metrics = policy_loss(
                        logp_BT, old_BT, advantages_B[some].to(device), mask_BT, weight_BT, config.loss, normalizers
                    )
                    # Data parallelism averages gradients over processes; the normalisers already count all of them.
                    self.accelerator.backward(loss * (self.ranks.count * counts))
                if counts:
                    parts.append(metrics)
            norm = self.accelerator.clip_grad_norm_(self.scorer.parameters(), config.optimizer.max_grad_norm)
            merged = merge_metrics(itertools.chain(*self.ranks.gather("update", partial(list, parts))))
            merged |= {"grad_norm": float(norm)}
            check_finite(merged, config.loss.max_log_ratio)
            self.optimizer.step()
            self.optimizer.zero_grad()
            steps.append(merged)
        loss_metrics = {key: float(np.mean([s[key] for s in steps])) for key in steps[0]}
        found: Metrics = {
            "advantage": advantage_metrics,
            "correction": correction.metrics,
            "loss": loss_metrics,
            "learning_rate": self.optimizer.param_groups[0]["lr"],
        }
        if self.distiller:
            found["distill"] = self.distiller.update(experience, assessment, advantages_B)
        return found

    def _move_schedule(self, experience: Experience, assessment: Assessment, report: MismatchReport) -> Metrics:
        """The schedule of the next rollouts, and what the guard has to say."""

        def tail_under(schedule: SparsitySchedule) -> Sequence[BinMismatch]:
            assert self.distiller is not None, "distill.step_down needs distill.enabled"
            return self.distiller.tail(experience, assessment, schedule)

        if report.bin_tokens != self.schedule.bin_tokens:
            report = pool(assessment.acceptances, self.schedule.bin_tokens, seed=self.step)
        self._set_schedule(self.movers.next(self.schedule, Evidence(self.step + 1, report, tail_under)))
        guard = self.movers.guard
        if guard.warning and self.ranks.is_main:
            log.warning(guard.warning)
        return {"guard": {"steps_below": guard.steps_below, "alarm": guard.alarm}}

    def _set_schedule(self, schedule: SparsitySchedule) -> None:
        """Train for another schedule from now on; the engine gets it with the next weights."""
        self.schedule = schedule
        if self.distiller:
            self.distiller.set_schedule(schedule)

    def _actor_weights(self) -> Iterator[tuple[str, Tensor]]:
        reshard(self.model)
        return whole(self.distiller.actor_weights() if self.distiller else self.model.named_parameters())

    def _correct(self, assessment: Assessment) -> Correction:
        generator = torch.Generator().manual_seed(derived_seed(self.config.seed, self.step))
        uniform_BT = torch.rand(assessment.mask_BT.shape, generator=generator)
        return compute_correction(
            self.config.correction, assessment.logp_BT, assessment.logq_BT, assessment.mask_BT,
            z_BT=assessment.obrs_z_BT, uniform_BT=uniform_BT,
        )  # fmt: skip

    def _minibatches(self, size: int) -> list[list[int]]:
        """Responses of each optimiser step; a shuffle spreads every prompt's group over them."""
        count = self.config.optimizer.minibatches
        order = list(range(size))
        if count > 1:
            order = np.random.default_rng([self.config.seed, self.step]).permutation(size).tolist()
        return [order[i::count] for i in range(count)]

    def _log(self, metrics: Metrics, report: MismatchReport, experience: Experience, assessment: Assessment) -> None:
        self.accelerator.log(tracked(metrics, report), step=self.step)
        # One response per prompt as far as they go, so that the token view shows different problems.
        per_prompt = self.config.rollout.samples
        order = sorted(range(len(experience.rollouts)), key=lambda i: (i % per_prompt, i))
        responses = [
            LoggedResponse(
                self.step,
                experience.problems[i].id,
                experience.problems[i].prompt,
                tokens=[str(self.tokenizer.decode([t])) for t in experience.rollouts[i].response_ids],
                acceptance=np.round(assessment.acceptances[i].lower, 4).tolist(),
                reward=float(experience.rewards[i]),
                finish_reason=experience.rollouts[i].finish_reason,
            )
            for i in order[: self.config.logged_rollouts]
        ]
        self.run_dir.append_step(metrics, responses)

    def _save(self) -> None:
        def write() -> None:
            try:
                self.accelerator.save_state(str(folder))
            except (RuntimeError, CheckpointException) as error:  # how torch reports a full disk
                raise OSError(str(error).splitlines()[0]) from error
            if self.ranks.is_main:
                TrainerState(self.step, self.cursor, self.schedule, self.movers.state()).save(folder)

        keep, name = self.config.keep_checkpoints, "checkpoint"
        with _uninterrupted(), self.run_dir.checkpoint_errors(self.step):
            folder = self.ranks.on_main(name, lambda: self.run_dir.begin_checkpoint(self.step))
            self.ranks.gather(name, write)
            self.ranks.on_main(name, lambda: self.run_dir.finish_checkpoint(self.step, keep))

    def _load(self, given: RunConfig) -> RunConfig:
        """Go on from the last checkpoint; what to record of the settings ``given``.

        Raises ConfigError: a setting differs that cannot, see ``resumed``. CheckpointError: files that are damaged, or
        of a model of another size.
        """
        found = self.run_dir.last_checkpoint()
        assert found is not None, "RunDir refuses to resume without a checkpoint"
        self.step, folder = found
        before = RunConfig.load(self.run_dir.path)
        changes = resumed(before, self.config, given.schedule, self.step)
        if changes and self.ranks.is_main:
            log.warning("resuming %s after step %d with other settings: %s", folder.parent.parent, self.step,
                        describe(changes))  # fmt: skip
        try:
            with self.distiller.everything_trains() if self.distiller else contextlib.nullcontext():
                self.accelerator.load_state(str(folder))
            state = TrainerState.load(folder)
        except Exception as error:  # torch, safetensors, pickle and accelerate raise many unrelated types
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            reason = next((line for line in lines if "size mismatch" in line), lines[0] if lines else "")
            raise CheckpointError(
                f"cannot go on from {folder} ({type(error).__name__}: {reason}); if sizes differ, give the model that "
                "the run began with; if the files are damaged, remove this folder to go on from the checkpoint before"
            ) from error
        self.cursor = state.cursor
        moved = "schedule.top_k" in changes
        self._set_schedule(given.schedule if moved else state.schedule)
        # Another start schedule is the first rung of a ladder again.
        memory = {name: kept for name, kept in state.steering.items() if not (moved and name == "step_down")}
        self.movers.load(memory, self.schedule)
        # The optimiser's state has brought its own settings back.
        self.optimizer.param_groups[0]["weight_decay"] = self.config.optimizer.weight_decay
        for group in self.optimizer.param_groups[1:]:
            group["lr"] = self.config.distill.learning_rate
        self.ranks.on_main("resume", lambda: self.run_dir.truncate(self.step))
        entry = [{"step": self.step, "changed": changes}] if changes else []
        settings = {**before.train, **given.train, "resume": False}
        return RunConfig(settings, given.schedule, [*before.resumed, *entry])


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the block has ended: half an update is worse than a moment's wait."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []
    previous = {
        number: signal.signal(number, lambda number, frame: pending.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
        if signal.getsignal(number) is signal.default_int_handler
    }
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if pending:
        raise KeyboardInterrupt


@contextlib.contextmanager
def _checkpointing(model: PreTrainedModel) -> Iterator[None]:
    """Layers recompute where they were asked to: transformers has them do so in training mode only.

    A layer in that mode cannot decode with a cache, and a whole model would switch its dropout on.
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
