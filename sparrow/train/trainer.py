"""The training loop: rollout -> verify -> dense log-probs -> acceptance -> correction -> update.

The trainer only talks to its engine through ``engines.base.Engine``. Source: Sparrow, arXiv
2606.08446, sections 3 and 6.

Shapes: B responses, T response tokens (right-padded), M concatenated response tokens, n top tokens.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import asdict
from math import isinf

import numpy as np
from accelerate import Accelerator
from accelerate.utils import DistributedDataParallelKwargs, set_seed
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparrow.decoding import DraftChoice
from sparrow.engines.base import Counters, DraftReplayer, Engine, PartVerifier, total
from sparrow.errors import ConfigError, EngineError, RewardError, TaskError, TrainingDiverged
from sparrow.mismatch import Ceiling, MismatchReport
from sparrow.mismatch.ceiling import CEILING_RESPONSES
from sparrow.mismatch.tokens import pool
from sparrow.run.directory import METRICS, LoggedResponse, RunConfig, RunDir, TrainerState
from sparrow.schedule import SparsitySchedule
from sparrow.tasks import Task
from sparrow.tasks.dataset import fingerprint, fingerprint_of
from sparrow.tasks.prompts import check_read, prompt_of, token_texts
from sparrow.train import dialing
from sparrow.train.collect import Collector
from sparrow.train.config import TrainConfig
from sparrow.train.dial import Dial
from sparrow.train.evaluation import Benchmarks, Evaluator
from sparrow.train.experience import Assessment, Experience
from sparrow.train.learner import Learner, Metrics, checkpointing
from sparrow.train.ranks import Ranks, mixed_precision, sharding
from sparrow.train.resume import Changes, check_data, describe, resumed
from sparrow.train.reward import reward_metrics
from sparrow.train.saving import Exports, export, load_checkpoint, save_checkpoint, uninterrupted
from sparrow.train.schedules import Movers
from sparrow.train.trackers import check_trackers, flatten, tracked

log = logging.getLogger(__name__)

Listener = Callable[[str, Metrics], None]
"""Called with ``("rollout" | "score" | "update" | "ceiling" | "eval", {"step": steps done})`` when
a phase begins, with ``("step", metrics)`` when a step ends, and with ``("evaluated", scores)``
after an evaluation.
"""


class Trainer:
    """Trains ``model`` on rollouts from ``engine``.

    ``model`` is the dense policy (float32 weights), ``engine`` the sparse actor, and ``schedule``
    the actor's schedule. With ``closed_loop``, the schedule is adjusted to keep measured p5 at the
    config's tau. For an engine in ``mode=auto``, the ``dial`` sets the length up to which responses
    are verified. ``config.eval`` says how to evaluate the ``benchmarks``.

    Raises ConfigError if the run directory is in use, a tracker is not installed, this process has
    already trained in another precision, there are more processes than responses, processes start
    from different weights, or the engine does not support a dial.
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
        dial: Dial | None = None,
        benchmarks: Benchmarks | None = None,
    ) -> None:
        check_trackers(config.trackers)
        self.config = config
        self.tokenizer = tokenizer
        self.engine = engine
        self.listener = listener
        self.step = 0
        self.cursor = 0  # index of the next problem
        self._updating = False  # whether an update has begun, but its step does not count yet
        self.schedule = schedule
        self.movers = Movers(config, closed_loop)
        self.dial = dial
        if dial and not isinstance(engine, PartVerifier):
            raise ConfigError(
                f"{type(engine).__name__} verifies either all of a response or none of it, so mode "
                "auto cannot use it; use mode lossless or lossy"
            )
        self.ceiling = Ceiling()
        # Draft choices that the interrupted run logged after its last checkpoint, keyed by step.
        # The resumed run replays them.
        self._logged_choices: dict[int, list[DraftChoice]] = {}
        self.run_dir = RunDir(config.run_dir, config.resume)
        self.accelerator = Accelerator(
            mixed_precision=mixed_precision(config.optimizer.precision),
            log_with=list(config.trackers) or None,
            project_dir=config.run_dir,
            kwargs_handlers=[
                DistributedDataParallelKwargs(broadcast_buffers=False, gradient_as_bucket_view=True)
            ],
            fsdp_plugin=sharding(model, config.optimizer.precision == "bf16"),
        )
        self.ranks = Ranks(self.accelerator)
        self.ranks.on_main("start", self.run_dir.lock)
        try:
            self._start(model, task, schedule, benchmarks or {})
        except BaseException:
            self.run_dir.release()
            raise

    def _start(
        self, model: PreTrainedModel, task: Task, schedule: SparsitySchedule, benchmarks: Benchmarks
    ) -> None:
        """Set up the model and optimiser, and load the checkpoint when resuming."""
        config = self.config
        responses = config.rollout.prompts * config.rollout.samples
        if responses < self.ranks.count:
            raise ConfigError(
                f"a step has only {responses} responses for {self.ranks.count} processes; start fewer "
                "processes"
            )
        set_seed(config.seed)
        self.model = model
        self.learner = Learner(config, model, schedule, self.accelerator, self.ranks)
        self._collector = Collector(config, self.tokenizer, task, self.engine, self.ranks)
        self._evaluator = Evaluator(config, self.tokenizer, benchmarks, self.engine, self.ranks)
        data = {
            "train": fingerprint(task),
            "eval": {name: fingerprint_of(problems) for name, problems in benchmarks.items()},
        }
        recorded = RunConfig(asdict(config), schedule, data=data)
        if config.resume:
            recorded = self._load(recorded)
        rollout = config.rollout
        first = range(self.cursor, self.cursor + rollout.prompts)
        check_read(self.tokenizer, list(map(prompt_of, self._collector.draw(first))))
        if not config.resume:
            self.ranks.on_main("start", self.run_dir.restart)
        self._exports = Exports(config.export, self.run_dir, self.ranks)
        if self.ranks.is_main:
            recorded.save(self.run_dir.path)
        self.accelerator.init_trackers("sparrow", config=flatten(asdict(config)))

    def train(self) -> None:
        """Train to the last step, then save the model to ``run_dir/model``.

        On KeyboardInterrupt, a single-process run checkpoints the last finished step before
        re-raising.

        Raises SparrowError if a verifier, a loss or a checkpoint failed. The run can be resumed
        from its last checkpoint.
        """
        try:
            self._train()
        finally:
            self.run_dir.release()

    def _train(self) -> None:
        self.ranks.on_main("start", self.run_dir.lock)
        saved_step = self.step
        try:
            lossless = self.dial or self.config.rollout.mode == "lossless"
            if not (
                self.ceiling or lossless or (self.schedule.is_dense and not self.learner.distiller)
            ):
                self._measure_ceiling()
            self.sync()
            # at the start, or wherever a resumed run left off
            self._evaluate()
            while self.step < self.config.steps:
                self._train_step()
                self._evaluate()
                if self.movers.guard.stops or self.step % self.config.save_every == 0:
                    self._save()
                    saved_step = self.step
                if self.movers.guard.stops:
                    guard = self.movers.guard
                    raise TrainingDiverged(
                        f"{guard.reason}; a checkpoint was saved at step {self.step}, and "
                        f"{guard.remedy}"
                    )
        except (KeyboardInterrupt, RewardError, TaskError, EngineError, ConfigError) as error:
            # Sampling and scoring don't change any state, and updates can't be interrupted. Unless
            # an update failed, we therefore still have the state from the end of self.step. With
            # several processes, an interrupt may catch each at a different point, so they can't
            # checkpoint together.
            together = self.ranks.count == 1 or not isinstance(error, KeyboardInterrupt)
            if self.step > saved_step and together and not self._updating:
                self._save()
            raise
        if self.step > saved_step:
            self._save()
        export(
            self.learner, self.tokenizer, self.run_dir.path / "model", self.run_dir.path / "adapter"
        )
        # Don't call end_training: it destroys the process group, which an in-process engine may
        # still need.
        for tracker in self.accelerator.trackers:
            tracker.finish()

    def _train_step(self) -> None:
        clock = {"start": time.perf_counter()}
        self.listener("rollout", {"step": self.step})
        if (choices := self._logged_choices.pop(self.step + 1, None)) is not None:
            assert isinstance(self.engine, DraftReplayer)
            self.engine.replay(choices)
        experience = self._collector.collect(self.cursor)
        counters = total(self.ranks.gather("sleep", self._rest))
        clock["rollout"] = time.perf_counter()
        self.listener("score", {"step": self.step})
        assessment, entropy = self.learner.assess(experience, self.schedule)
        report, metrics = self._describe(experience, assessment, entropy)
        clock["score"] = time.perf_counter()
        self.listener("update", {"step": self.step})
        with uninterrupted():
            metrics["schedule"] = {"top_k": self.schedule.to_dict()["top_k"]}
            self._updating = True
            with self.ranks.connected("update"), checkpointing(self.model):
                metrics |= self.learner.update(experience, assessment, self.step)
            metrics |= self._move_schedule(experience, assessment, report)
            self.step = self.step + 1
            self.cursor = experience.cursor
            self._updating = False
            clock["update"] = time.perf_counter()
            try:
                self.sync()
            finally:  # if the engine fails here, the step still counts
                clock["sync"] = time.perf_counter()
                seconds = np.diff(list(clock.values())).tolist()
                metrics |= {
                    **counters.to_dict(),
                    "seconds": dict(zip(list(clock)[1:], seconds, strict=True)),
                    "imbalance": {
                        phase: self.ranks.imbalance(phase) for phase in ("rollout", "score")
                    },
                }
                metrics = {"step": self.step, **metrics}
                if self.ranks.is_main:
                    self._log(metrics, report, experience, assessment)
        self.listener("step", metrics)

    @property
    def dense_up_to(self) -> float:
        """Greatest length in tokens at which the dense policy draws the samples. It is infinite if
        the dense policy draws all samples.

        Up to this length, there is no mismatch. Acceptance bounds then depend only on the number of
        recorded top tokens.
        """
        if self.config.rollout.mode == "lossless":
            return float("inf")
        # an actor with an adapter differs from the policy even if it reads everything
        if self.learner.distiller:
            return 0
        verified_up_to = self.dial.verified_up_to if self.dial else 0
        return max(verified_up_to, self.schedule.dense_up_to)

    def _rest(self) -> Counters:
        counters = self.engine.counters()
        self.engine.sleep()
        return counters

    def _measure_ceiling(self) -> None:
        """Measure the ceiling (the best p5 that any schedule could reach) by sampling densely with
        the policy's own weights.
        """
        self.listener("ceiling", {"step": self.step})
        self._push(self.schedule.reading_everything(), self.learner.policy_weights)
        responses = self.config.rollout.prompts * self.config.rollout.samples
        rollouts = self._collector.sample(min(CEILING_RESPONSES, responses))
        self.ranks.gather("sleep", self._rest)
        acceptances = self.learner.acceptances(rollouts, self.schedule)
        self.ceiling.measure(pool(acceptances, self.config.bin_tokens or self.schedule.bin_tokens))

    def _evaluate(self) -> None:
        """Evaluate the policy on the benchmarks if an evaluation is due, and export the policy if
        an export is due. Neither is done twice for the same step.
        """
        if not (self.config.eval.every or self.config.export.every):
            return
        rows = self.ranks.on_main("eval", self.run_dir.evaluations)
        if self._evaluator.due(self.step) and self.step not in (row["step"] for row in rows):
            self.listener("eval", {"step": self.step})
            begun = time.perf_counter()
            # a lossless engine samples from the policy anyway
            lossless = self.config.rollout.mode == "lossless"
            schedule = self.schedule if lossless else self.schedule.reading_everything()
            self._push(schedule, self.learner.policy_weights)
            scores = self._evaluator.scores()
            self.ranks.gather("sleep", self._rest)
            self.sync()
            rows = [
                *rows,
                {"step": self.step, "eval": scores, "seconds": time.perf_counter() - begun},
            ]
            if self.ranks.is_main:
                self.run_dir.append_evaluation(rows[-1])
                self.accelerator.log(flatten({"eval": scores}), step=self.step)
            self.listener("evaluated", scores)
        self._exports.update(self.learner, self.tokenizer, self.step, rows)

    def sync(self) -> None:
        """Wake the engine, and send it the actor's weights and schedule."""
        self._push(self.schedule, self.learner.actor_weights)

    def _push(
        self, schedule: SparsitySchedule, get_weights: Callable[[], Iterator[tuple[str, Tensor]]]
    ) -> None:
        def push() -> None:
            weights = get_weights()
            try:
                self.engine.wake()
                self.engine.set_schedule(schedule)
                if self.dial:
                    assert isinstance(self.engine, PartVerifier)
                    self.engine.verify_up_to(self.dial.verified_up_to)
                self.engine.update_weights(weights)
            finally:
                # Even after an error, gather the rest of the weights: the other processes are
                # waiting for us.
                deque(weights, maxlen=0)

        self.ranks.gather("sync", push)

    def _describe(
        self, experience: Experience, assessment: Assessment, entropy: float
    ) -> tuple[MismatchReport, Metrics]:
        """Pool the step's acceptance rates into a report. Also collect all metrics that are
        available before the update.
        """
        bin_tokens = self.config.bin_tokens or self.schedule.bin_tokens
        report = pool(assessment.acceptances, bin_tokens, seed=self.step)
        if self.dial:
            verified = dialing.verified(experience.rollouts, assessment.acceptances)
            exact = [part for part in verified if part.lower.size]
            if exact:
                self.ceiling.measure(pool(exact, bin_tokens, seed=self.step))
        elif self.config.rollout.mode == "lossless":
            self.ceiling.measure(report)
        elif not self.learner.distiller:
            # An actor with an adapter differs from the policy even if it reads everything.
            self.ceiling.measure(report, self.schedule.dense_up_to)
        report = self.ceiling.on(report)
        tokens, ended = np.array(
            [(len(r), r.finish_reason == "stop") for r in experience.rollouts], dtype=float
        ).T
        rewards = [(g.problem.source, parts) for g in experience.drawn for parts in g.parts]
        metrics = {
            "reward": {**reward_metrics(rewards), "prompts": experience.cursor - self.cursor},
            "response": {
                "mean": tokens.mean(),
                "max": tokens.max(),
                "tokens": tokens.sum(),
                "ended_fraction": ended.mean(),
            },
            "entropy": entropy,
            "mismatch": report.to_dict(),
            "dense_up_to": None if isinf(self.dense_up_to) else self.dense_up_to,
        }
        return report, metrics

    def _move_schedule(
        self, experience: Experience, assessment: Assessment, report: MismatchReport
    ) -> Metrics:
        """Set the schedule for the next rollouts, and return the guard and dial metrics."""
        if report.bin_tokens != self.schedule.bin_tokens:
            report = self.ceiling.on(
                pool(assessment.acceptances, self.schedule.bin_tokens, seed=self.step)
            )
        dial_metrics: Metrics = {}
        if self.dial:
            dial_metrics["dial"] = dialing.turn(
                self.dial,
                experience.rollouts,
                assessment.acceptances,
                self.schedule,
                self.ceiling,
                self.step,
            )
        self.set_schedule(self.movers.next(self.schedule, report))
        if (complaint := self.movers.complaint(report)) and self.ranks.is_main:
            log.warning(complaint)
        guard = self.movers.guard
        if guard.warning and self.ranks.is_main:
            log.warning(guard.warning)
        return {"guard": {"steps_below": guard.steps_below, "alarm": guard.alarm}, **dial_metrics}

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Switch schedules. The engine gets the new one along with the next weights."""
        self.schedule = schedule
        self.learner.set_schedule(schedule)

    def _log(
        self,
        metrics: Metrics,
        report: MismatchReport,
        experience: Experience,
        assessment: Assessment,
    ) -> None:
        self.accelerator.log(tracked(metrics, report), step=self.step)
        up_to = metrics["dense_up_to"]
        sparse = [
            a.position >= (np.inf if up_to is None else up_to) for a in assessment.acceptances
        ]
        # Log the first response to each prompt, then the second ones, and so on. The token view
        # then shows different problems.
        per_prompt = self.config.rollout.samples
        order = sorted(range(len(experience.rollouts)), key=lambda i: (i % per_prompt, i))
        responses = [
            LoggedResponse(
                self.step,
                experience.problems[i].id,
                experience.problems[i].prompt,
                tokens=token_texts(self.tokenizer, experience.rollouts[i].response_ids.tolist()),
                acceptance=_logged(assessment.acceptances[i].lower, sparse[i]),
                acceptance_upper=_logged(assessment.acceptances[i].upper, sparse[i]),
                reward=float(experience.rewards[i]),
                finish_reason=experience.rollouts[i].finish_reason,
                answer=experience.problems[i].answer,
                ids=experience.rollouts[i].response_ids.tolist(),
            )
            for i in order[: self.config.logged_rollouts]
        ]
        self.run_dir.append_step(metrics, responses)

    def _save(self) -> None:
        steering = {**self.movers.state(), "ceiling": self.ceiling.state()}
        if self.dial:
            steering["dial"] = self.dial.state()
        state = TrainerState(self.step, self.cursor, self.schedule, steering)
        save_checkpoint(self.run_dir, self.learner, state, self.config.keep_checkpoints)

    def _load(self, given: RunConfig) -> RunConfig:
        """Load the last checkpoint, and resume with the ``given`` settings. Return the config to
        record for the resumed run.

        Raises ConfigError if a fixed setting has changed; see ``resumed``. Raises CheckpointError
        if the files are damaged or the model has a different size.
        """
        checkpoint = self.run_dir.last_checkpoint()
        assert checkpoint is not None, "RunDir must not resume without a checkpoint"
        self.step, folder = checkpoint
        before = RunConfig.load(self.run_dir.path)
        changes = self._changes_since(before, given)
        self._restore(load_checkpoint(folder, self.learner), given.schedule, changes)
        self._logged_choices = self._choices_to_replay(changes)
        if self.step and self.ranks.is_main and not self.run_dir.has_logged(self.step):
            log.warning(
                "%s has no metrics of step %d, whose checkpoint the run continues; reports will "
                "lack the steps that are missing",
                self.run_dir.path / METRICS,
                self.step,
            )
        self.ranks.on_main("resume", lambda: self.run_dir.truncate(self.step))
        return self._resumed_record(before, given, changes)

    def _changes_since(self, before: RunConfig, given: RunConfig) -> Changes:
        """Compare the ``given`` settings with the record of the run so far, and log the changes.

        Raises ConfigError if a fixed setting or the data has changed.
        """
        changes = resumed(before, self.config, given.schedule, self.step)
        check_data(before, given, self.config.run_dir)
        if changes and self.ranks.is_main:
            log.warning(
                "resuming %s after step %d with changed settings: %s",
                self.run_dir.path,
                self.step,
                describe(changes),
            )
        return changes

    def _restore(self, state: TrainerState, given: SparsitySchedule, changes: Changes) -> None:
        """Continue from a checkpoint's ``state``, except for what the ``changes`` of settings
        replace. ``given`` is the schedule in the new settings.
        """
        self.cursor = state.cursor
        moved = "schedule.top_k" in changes
        self.set_schedule(given if moved else state.schedule)
        # The closed loop's floors don't carry over to a different tau.
        other_tau = not changes.keys().isdisjoint(("tau", "relative_tau"))
        memory = {
            name: saved
            for name, saved in state.steering.items()
            if not (other_tau and name == "closed_loop")
        }
        self.movers.load(memory)
        self.ceiling.load(state.steering.get("ceiling", ()))
        if self.dial and "dial" in state.steering:
            self.dial.load(state.steering["dial"])

    def _choices_to_replay(self, changes: Changes) -> dict[int, list[DraftChoice]]:
        """Return the draft choices that were logged after the checkpoint, by step. There are none
        to replay if the engine cannot repeat its samples, or ``changes`` affect the rollouts.
        """
        samples_alike = not any(name.startswith("rollout.") for name in changes)
        if not (samples_alike and isinstance(self.engine, DraftReplayer) and self.ranks.count == 1):
            return {}
        return {
            row["step"]: [_draft_choice(*choice) for choice in row["drafts"]["choices"]]
            for row in self.run_dir.logged_after(self.step)
            if "choices" in row.get("drafts", {})
        }

    def _resumed_record(self, before: RunConfig, given: RunConfig, changes: Changes) -> RunConfig:
        """Return the config to record for the resumed run, which lists the ``changes``."""
        entry = [{"step": self.step, "changed": changes}] if changes else []
        settings = {**before.train, **given.train, "resume": False}
        return RunConfig(settings, given.schedule, [*before.resumed, *entry], given.data)


def _draft_choice(drafts: int, budget: float, *rest: int) -> DraftChoice:
    """Read back a logged draft choice. Earlier versions didn't choose the number of guesses per
    pass, so they didn't log it.
    """
    guesses, steps = rest if len(rest) == 2 else (0, *rest)
    return DraftChoice(drafts, budget, guesses, steps)


def _logged(bound_T: np.ndarray, sparse_T: np.ndarray) -> list[float | None]:
    """List acceptance bounds for the log, with None for tokens sampled by the dense policy."""
    return [
        value if sparse else None
        for value, sparse in zip(np.round(bound_T, 4).tolist(), sparse_T.tolist(), strict=True)
    ]
