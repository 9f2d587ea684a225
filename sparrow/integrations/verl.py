"""verl's synchronous PPO trainer with sparse rollouts, and the tail of the acceptance rate beside
``rollout_corr/*``.

    VERL_USE_EXTERNAL_MODULES=sparrow.integrations.verl python -m verl.trainer.main_ppo \
        trainer.v1.trainer_mode=sparrow ...

Written for verl 0.9.1, whose registry of trainers this extends. verl asks vLLM for the sampled
tokens' log-probs only, so every step logs what these alone can show (``sparrow.mismatch.sampled``):

sparrow/sampled/acceptance_mean    mean acceptance
sparrow/sampled/p5_floor           the lowest of the length bins' floors under the 5th percentile of
                                   acceptance
sparrow/sampled/p5_floor/START-END the floor of one bin; /low and /high are its 95 % interval,
                                   resampled by sequence, where at least two sequences reach the bin

p5 itself is measured by a probe: further responses, sampled with top-20 lists over HTTP from verl's
vLLM servers (``probe``) once they have the step's weights. There is a probe of
``+trainer.v1.sparrow.sequences`` responses (32 by default) every
``+trainer.v1.sparrow.probe_every`` steps (none if that is unset); the metrics are named as in
``sparrow.integrations.metrics``. Before the first probe, as many responses are sampled densely, for
the ceiling of p5.

Shapes: B responses, T tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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
from sparrow.errors import ConfigError
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
from sparrow.schedule import ALL_PAGES, SparsitySchedule
from sparrow.vllm import config as vllm_config

if TYPE_CHECKING:
    Trainer = Any
else:
    Trainer = PPOTrainerSync

FIELDS = ["prompts", "response_mask", "rollout_log_probs", "old_log_probs"]


@register_trainer("sparrow")
class SparsePPOTrainer(Trainer):
    """A ``PPOTrainerSync`` whose replicas decode under a schedule; the module's docstring lists its
    metrics.

    The last probe is kept as ``report``, for a controller that calls ``set_schedule``.

    The schedule is the one given to vLLM:
    ``actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config.sparrow``, or
    ``SPARROW_SCHEDULE`` in the environment of verl's workers and of its driver.

    Raises ConfigError: there is no schedule, vLLM decodes densely, or verl is configured not to
    compute the log-probs that are compared.
    """

    schedule: SparsitySchedule
    report: MismatchReport | None = None
    _is_lossless = False

    def __init__(self, config: Any) -> None:
        options = config.trainer.v1.get("sparrow", {})
        self._probe_every = options.get("probe_every", 0)
        self._sequences = options.get("sequences", 32)
        self._prompts: list[list[int]] = []
        self._ceiling = Ceiling()
        # This is a sync trainer, and the rest of verl recognises one by this name.
        config.trainer.v1.trainer_mode = "sync"
        super().__init__(config)

    def on_init_end(self) -> None:
        """See ``PPOTrainer``; makes sure that every replica decodes under the schedule."""
        decoding = requested(OmegaConf.to_container(self.config, resolve=True))
        self.schedule = decoding.schedule
        self._is_lossless = decoding.is_lossless
        super().on_init_end()
        self.set_schedule(self.schedule)

    def on_step_end(self) -> None:
        """See ``PPOTrainer``; the replicas are awake now, with the weights of this step."""
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

    def _probed(self) -> MismatchReport:
        urls = [f"http://{address}" for address in self.llm_server_manager.get_addresses()]
        response_tokens = self.config.actor_rollout_ref.rollout.response_length
        return pool(
            probe(urls, self._prompts, self.schedule, response_tokens), self.schedule.bin_tokens
        )

    def _measure_ceiling(self) -> None:
        """Probe the replicas while they decode densely."""
        replicas = self.llm_server_manager.get_replicas()
        push_schedule(replicas, self.schedule.replace(top_k=(ALL_PAGES,)))
        try:
            self._ceiling.measure(self._probed())
        finally:
            push_schedule(replicas, self.schedule)

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Make every replica decode under other page counts from now on; call it while they are
        awake and idle.

        Raises ConfigError: a replica decodes densely, or was started with another page layout or
        other dense layers.
        """
        push_schedule(self.llm_server_manager.get_replicas(), schedule)
        self.schedule = schedule

    def _compute_old_log_prob(self, batch: Any, metrics: dict[str, Any]) -> Any:
        # Measured here, as in verl's own subclasses, before a rejection of tokens (rollout_rs)
        # hides them.
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
        return batch


def requested(config: Mapping[str, Any]) -> Decoding:
    """The decoding that verl's configuration asks of vLLM, or else the environment.

    Raises ConfigError: neither has a schedule, the policy's or the actor's log-probs will not be
    there to compare, samples are truncated, or a probe is asked for at a temperature other than 1.
    """
    rollout = config["actor_rollout_ref"]["rollout"]
    if not rollout["calculate_log_probs"]:
        raise ConfigError(
            "the actor's log-probs are wanted; set "
            "actor_rollout_ref.rollout.calculate_log_probs=True"
        )
    check_whole_softmax(rollout, "actor_rollout_ref.rollout.")
    probes = config["trainer"]["v1"].get("sparrow", {}).get("probe_every")
    if probes and rollout["temperature"] != 1:
        raise ConfigError(
            "the probe measures at temperature 1, but "
            f"actor_rollout_ref.rollout.temperature={rollout['temperature']}; leave out "
            "trainer.v1.sparrow.probe_every"
        )
    if (config["algorithm"].get("rollout_correction") or {}).get("bypass_mode"):
        raise ConfigError(
            "bypass_mode takes the actor's log-probs for the policy's, so nothing is left to "
            "compare; set algorithm.rollout_correction.bypass_mode=False"
        )

    engine_options = (rollout.get("engine_kwargs") or {}).get("vllm") or {}
    additional = engine_options.get("additional_config") or {}
    setting = additional.get(vllm_config.KEY)
    decoding = vllm_config.from_environment() if setting is None else Decoding.load(setting)
    if decoding is None:
        raise ConfigError(
            "no schedule; set "
            "+actor_rollout_ref.rollout.engine_kwargs.vllm.additional_config={sparrow: SCHEDULE} "
            "and +actor_rollout_ref.rollout.engine_kwargs.vllm.attention_backend=CUSTOM, or "
            f"{vllm_config.ENVIRONMENT}"
        )
    return decoding


def push_schedule(replicas: Sequence[Any], schedule: SparsitySchedule) -> None:
    """Set the schedule of verl's vLLM replicas and drop their prefix caches, computed under other
    budgets.

    Raises ConfigError: a replica decodes densely, or was started with another page layout or other
    dense layers.
    """
    arguments: dict[str, Any] = {"method": "sparrow_set_schedule", "args": (schedule.to_json(),)}
    try:
        # vLLM's workers, on whatever machine, are called through the first server of their replica.
        ray.get([replica.servers[0].collective_rpc.remote(**arguments) for replica in replicas])
        ray.get([replica.servers[0].clear_kv_cache.remote() for replica in replicas])
    except ray.exceptions.RayError as error:
        reason = str(error).strip().splitlines()[-1]  # after a traceback from the other process
        raise ConfigError(f"a vLLM replica did not take the schedule: {reason}") from error


def sampled_metrics(
    schedule: SparsitySchedule,
    prompts_B: Sequence[Tensor],
    mask_B: Sequence[Tensor],
    actor_B: Sequence[Tensor],
    policy_B: Sequence[Tensor],
) -> dict[str, float]:
    """Metrics of responses ``[T]``, given their prompts, which tokens were sampled, and both sides'
    log-probs.

    A token's position is the length that the schedule was looked up at when the token was sampled;
    see ``sparrow.mismatch.tokens.token_acceptance``.
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
