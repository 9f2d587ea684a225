"""verl's synchronous PPO trainer with sparse rollouts. It logs the acceptance tail on top of verl's
own ``rollout_corr/*``.

    VERL_USE_EXTERNAL_MODULES=sparrow.integrations.verl python -m verl.trainer.main_ppo \
        trainer.v1.trainer_mode=sparrow ...

Written for verl 0.9.1. Importing this module adds the trainer to verl's registry. Every step logs
what vLLM's workers counted during its rollout: the share of cached tokens read and, in lossless
mode, draft metrics (see ``sparrow.integrations.metrics`` for the names). verl only requests the
log-probs of sampled tokens from vLLM, so every step also logs what can be computed from these
log-probs alone (``sparrow.mismatch.sampled``):

sparrow/sampled/acceptance_mean    mean acceptance
sparrow/sampled/p5_floor           a lower bound on the 5th percentile of acceptance: the lowest of
                                   all length bins
sparrow/sampled/p5_floor/START-END the lower bound in one bin. If at least two sequences reach the
                                   bin, /low and /high are its 95 % interval from resampling
                                   sequences

A probe (``probe``) measures p5 itself. It samples extra responses with top-20 lists over HTTP, once
verl's vLLM servers have the step's weights. The probe runs every
``+trainer.v1.sparrow.probe_every`` steps (never if unset) and samples
``+trainer.v1.sparrow.sequences`` responses (32 by default). Its metrics are listed in
``sparrow.integrations.metrics``. Before the first probe, the same number of responses is sampled
densely to measure the p5 ceiling.

Shapes: B responses, T tokens.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial
from math import inf, isnan
from typing import TYPE_CHECKING, Any

import numpy as np
import ray
import transfer_queue as tq
from omegaconf import OmegaConf
from torch import Tensor
from verl.trainer.ppo.v1.trainer_base import register_trainer
from verl.trainer.ppo.v1.trainer_sync import PPOTrainerSync

from sparrow.decoding import Decoding
from sparrow.engines.base import Counters, total
from sparrow.engines.vllm.client import tally
from sparrow.errors import ConfigError
from sparrow.integrations.metrics import counter_metrics
from sparrow.integrations.probe import probe
from sparrow.integrations.sampling import check_whole_softmax
from sparrow.mismatch import (
    Ceiling,
    MismatchReport,
    mismatch_metrics,
    sampled_acceptance,
    tail_floor_by_bin,
)
from sparrow.mismatch.tokens import pool
from sparrow.schedule import SparsitySchedule
from sparrow.vllm import config as vllm_config

if TYPE_CHECKING:
    Trainer = Any
else:
    Trainer = PPOTrainerSync

FIELDS = ["prompts", "response_mask", "rollout_log_probs", "old_log_probs"]
POLL_S = 0.01
"""Seconds to wait between checks for the workers' answers."""


@register_trainer("sparrow")
class SparsePPOTrainer(Trainer):
    """A ``PPOTrainerSync`` whose replicas decode losslessly or under a schedule. See the module
    docstring for its metrics.

    The last probe's result is kept as ``report``, for a controller that calls ``set_schedule``.

    The schedule is the one passed to vLLM, either as
    ``actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.sparrow`` or as
    ``SPARROW_SCHEDULE`` in the environment of verl's workers and driver.

    Raises ConfigError if there is no schedule, if vLLM decodes densely or in another mode, or if
    verl isn't configured to compute the log-probs being compared.
    """

    schedule: SparsitySchedule
    report: MismatchReport | None = None
    _is_lossless = False
    _described: Sequence[Any] = ()
    _counts: Counters | None = None  # the counts of the last rollout

    def __init__(self, config: Any) -> None:
        options = config.trainer.v1.get("sparrow", {})
        self._probe_every = options.get("probe_every", 0)
        self._sequences = options.get("sequences", 32)
        self._prompts: list[list[int]] = []
        self._ceiling = Ceiling()
        # The rest of verl recognises a synchronous trainer by this name.
        config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)

    def on_init_end(self) -> None:
        """See ``PPOTrainer``. Also makes sure that every replica decodes under the schedule."""
        decoding = requested(OmegaConf.to_container(self.config, resolve=True))
        self.schedule = decoding.schedule
        self._is_lossless = decoding.is_lossless
        super().on_init_end()
        replicas = self.llm_server_manager.get_replicas()
        self._described = call(replicas, "sparrow_describe")
        check_mode(self._described, decoding.mode)
        self.set_schedule(self.schedule)
        self._counted()  # to drop the counts from vLLM's own warm-up

    def on_sample_end(self) -> None:
        """See ``PPOTrainer``. Also reads the replicas' counts before the replicas go to sleep.

        In lossless mode, raises ConfigError if no replica has verified any tokens.
        """
        self._counts = self._counted()
        if self._is_lossless and not self._counts.cycles:
            raise ConfigError(
                "mode 'lossless': the replicas sampled a batch without verifying any tokens, so "
                "the samples may not follow the dense policy; check "
                "actor_rollout_ref.rollout.engine_kwargs.vllm"
            )
        super().on_sample_end()

    def on_step_end(self) -> None:
        """See ``PPOTrainer``. Also probes the replicas, which are awake and have this step's
        weights.
        """
        super().on_step_end()
        if self._probe_every and self.global_steps % self._probe_every == 0:
            samples_are_dense = self._is_lossless or self.schedule.is_dense
            if not (self._ceiling or samples_are_dense):
                self._measure_ceiling()
            report = self._probed()
            if samples_are_dense:
                self._ceiling.measure(report)
            self.report = self._ceiling.on(report)
            dense_up_to = inf if samples_are_dense else self.schedule.dense_up_to
            metrics = mismatch_metrics(self.report, dense_up_to)
            self.logger.log(data=metrics, step=self.global_steps)
            self._counted()  # reset the counts: a probe isn't part of a rollout

    def _counted(self) -> Counters:
        """Return the counts of all replicas since the last call."""
        replicas = self.llm_server_manager.get_replicas()
        parts = [
            tally(described, partial(call_one, replica))
            for replica, described in zip(replicas, self._described, strict=True)
        ]
        return total(parts)

    def _probed(self) -> MismatchReport:
        urls = [f"http://{address}" for address in self.llm_server_manager.get_addresses()]
        response_tokens = self.config.actor_rollout_ref.rollout.response_length
        return pool(
            probe(urls, self._prompts, self.schedule, response_tokens), self.schedule.bin_tokens
        )

    def _measure_ceiling(self) -> None:
        """Probe the replicas while they decode densely."""
        replicas = self.llm_server_manager.get_replicas()
        try:
            push_schedule(replicas, self.schedule.reading_everything())
            self._ceiling.measure(self._probed())
        finally:
            push_schedule(replicas, self.schedule)

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Change every replica's page counts. Replicas must be awake and idle.

        Raises ConfigError if a replica decodes densely, or was started with a different page layout
        or different dense layers.
        """
        push_schedule(self.llm_server_manager.get_replicas(), schedule)
        self.schedule = schedule

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        # As in verl's own subclasses, compute metrics here, before rejection sampling (rollout_rs)
        # masks any tokens.
        batch = super()._compute_old_log_prob(batch, metrics)
        data = tq.kv_batch_get(
            keys=batch.keys, partition_id=batch.partition_id, select_fields=FIELDS
        )
        rows = [i for i, tag in enumerate(batch.tags) if not tag.get("is_padding", False)]

        def column(field: str) -> list[Tensor]:
            values = list(data[field].unbind())
            return [values[i] for i in rows]

        columns = [column(field) for field in FIELDS]
        count = min(self._sequences, len(rows))
        spread = np.linspace(0, len(rows) - 1, count).round().astype(int)
        self._prompts = [columns[0][i].tolist() for i in spread]
        metrics |= sampled_metrics(self.schedule, *columns)
        if self._counts is not None:
            metrics |= counter_metrics(self._counts)
        return batch


def requested(config: Mapping[str, Any]) -> Decoding:
    """Read vLLM's decoding settings from verl's configuration, or else from the environment.

    Raises ConfigError if neither place has a schedule, if verl won't compute the policy's or the
    actor's log-probs, or if samples are truncated. Also raises ConfigError if a probe is requested
    at a temperature other than 1.
    """
    rollout = config["actor_rollout_ref"]["rollout"]
    if not rollout["calculate_log_probs"]:
        raise ConfigError(
            "Sparrow's metrics need the actor's log-probs; set "
            "actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    check_whole_softmax(rollout, "actor_rollout_ref.rollout.")
    probes = config["trainer"]["v1"].get("sparrow", {}).get("probe_every")
    if probes and rollout["temperature"] != 1:
        raise ConfigError(
            "the probe samples at temperature 1, but "
            f"actor_rollout_ref.rollout.temperature={rollout['temperature']}; leave "
            "trainer.v1.sparrow.probe_every out"
        )
    if (config["algorithm"].get("rollout_correction") or {}).get("bypass_mode"):
        raise ConfigError(
            "bypass_mode uses the actor's log-probs in place of the policy's, so there is "
            "nothing to compare; set algorithm.rollout_correction.bypass_mode=False"
        )

    engine_options = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    additional = engine_options.get("additional_config") or {}
    setting = additional.get(vllm_config.KEY)
    decoding = vllm_config.from_environment() if setting is None else Decoding.load(setting)
    if decoding is None:
        raise ConfigError(
            "Sparrow has no schedule; set "
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config={sparrow: SCHEDULE} "
            "and +actor_rollout_ref.rollout.engine_kwargs.vllm.attention_backend=CUSTOM, or set the "
            f"environment variable {vllm_config.ENVIRONMENT}"
        )
    return decoding


def call_one(replica: Any, method: str) -> Any:
    """Call a method on every vLLM worker of one replica; see ``call``."""
    return call([replica], method)[0]


def call(replicas: Sequence[Any], method: str) -> list[Any]:
    """Call a method on every vLLM worker of verl's replicas, and return the workers' results per
    replica. The servers' own ``collective_rpc`` won't do, because it returns nothing.

    Raises ConfigError if a worker refuses the call.
    """
    # A replica's first server can call all of the replica's vLLM workers, on any machine.
    servers = [replica.servers[0] for replica in replicas]
    try:
        ray.get([server.__ray_call__.remote(_start, method) for server in servers])
        while True:
            answers = ray.get([server.__ray_call__.remote(_answer) for server in servers])
            if None not in answers:
                return answers
            time.sleep(POLL_S)
    except ray.exceptions.RayError as error:
        raise ConfigError(f"a vLLM replica refused {method}: {_reason(error)}") from error


def _start(server: Any, method: str) -> None:
    """Start a call inside a server, and return without waiting for the result. Waiting could block
    the server, because some Ray versions run this function on the server's event loop thread.
    """
    loop = server._server_task.get_loop()
    server.sparrow_call = asyncio.run_coroutine_threadsafe(
        server.engine.collective_rpc(method), loop
    )


def _answer(server: Any) -> Any:
    """Return the result of the call made by ``_start``, or None if there is none yet."""
    return server.sparrow_call.result() if server.sparrow_call.done() else None


def _reason(error: Exception) -> str:
    # the preceding lines are the other process's traceback
    return str(error).strip().splitlines()[-1]


def check_mode(described: Sequence[Any], mode: str) -> None:
    """Check that every vLLM worker decodes in this mode.

    Args:
        described: the ``sparrow_describe`` results, per replica.

    Raises ConfigError if a worker decodes in another mode.
    """
    for workers in described:
        for worker in workers:
            if worker["mode"] != mode:
                raise ConfigError(
                    f"a vLLM replica decodes in mode {worker['mode']!r}, not {mode!r}; set the "
                    "mode in actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config, or "
                    "in the environment of both verl's driver and its workers"
                )


def push_schedule(replicas: Sequence[Any], schedule: SparsitySchedule) -> None:
    """Set the schedule of verl's vLLM replicas. Drop their prefix caches, because they were filled
    under the old schedule.

    Raises ConfigError if a replica decodes densely, or was started with a different page layout or
    different dense layers.
    """
    arguments: dict[str, Any] = {"method": "sparrow_set_schedule", "args": (schedule.to_json(),)}
    try:
        # A replica's first server can call all of the replica's vLLM workers, on any machine.
        ray.get([replica.servers[0].collective_rpc.remote(**arguments) for replica in replicas])
        ray.get([replica.servers[0].clear_kv_cache.remote() for replica in replicas])
    except ray.exceptions.RayError as error:
        raise ConfigError(f"a vLLM replica refused the schedule: {_reason(error)}") from error


def sampled_metrics(
    schedule: SparsitySchedule,
    prompts_B: Sequence[Tensor],
    mask_B: Sequence[Tensor],
    actor_B: Sequence[Tensor],
    policy_B: Sequence[Tensor],
) -> dict[str, float]:
    """Compute metrics for ``B`` responses, given their prompts, the masks of sampled tokens, and
    the log-probs of the actor and the policy.

    A token's position is the length at which the schedule was looked up to sample the token; see
    ``sparrow.mismatch.tokens.token_acceptance``.
    """
    sampled = []
    position = []
    sequence = []
    responses = zip(prompts_B, mask_B, actor_B, policy_B, strict=True)
    for i, (prompt, mask, q, p) in enumerate(responses):
        is_sampled = mask.bool().cpu().numpy()
        policy = p.float().cpu().numpy()[is_sampled]
        actor = q.float().cpu().numpy()[is_sampled]
        sampled.append(sampled_acceptance(policy, actor))
        position.append(schedule.page_end(len(prompt) + np.flatnonzero(is_sampled)))
        sequence.append(np.full(len(policy), i))

    acceptance = np.concatenate(sampled)
    bins = tail_floor_by_bin(
        acceptance, np.concatenate(position), np.concatenate(sequence), schedule.bin_tokens
    )
    metrics = {
        "sparrow/sampled/acceptance_mean": float(acceptance.mean()),
        "sparrow/sampled/p5_floor": min(b.estimate for b in bins),
    }
    for b in bins:
        name = f"sparrow/sampled/p5_floor/{b.start}-{b.end}"
        metrics |= {name: b.estimate, f"{name}/low": b.lower, f"{name}/high": b.upper}
    return {name: value for name, value in metrics.items() if not isnan(value)}
