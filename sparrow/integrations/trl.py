"""Sparse rollouts in TRL's ``GRPOTrainer``, with the acceptance tail in the logs.

    trainer = SparseGRPOTrainer(
        model,
        reward_funcs,
        args=GRPOConfig(use_vllm=True, ...),
        train_dataset=dataset,
        schedule="qwen3-4b-0.86",  # or "lossless"
    )

Written for TRL 1.16. A wrapper that forwards every call replaces the trainer's ``vllm_generation``.
Nothing else in TRL is replaced. ``compute_loss`` and ``log`` are overridden, as transformers
allows.

Shapes: T response tokens, n entries of the actor's top-n list, V vocabulary.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from math import inf
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from accelerate.utils import gather_object
from trl import GRPOConfig, GRPOTrainer

from sparrow.decoding import Decoding
from sparrow.engines.base import total
from sparrow.engines.vllm.client import check_mode, check_settings, refusal, tally
from sparrow.errors import ConfigError, EngineError, SparrowError
from sparrow.integrations.metrics import counter_metrics
from sparrow.integrations.sampling import NEUTRAL, check_whole_softmax
from sparrow.mismatch import Ceiling, MismatchReport, mismatch_metrics
from sparrow.mismatch.tokens import TokenAcceptance, pool, token_acceptance
from sparrow.rollout import Rollout
from sparrow.schedule import SparsitySchedule
from sparrow.vllm import config as vllm_config

if TYPE_CHECKING:
    Trainer = Any  # TRL declares narrower types than it uses
else:
    Trainer = GRPOTrainer

CHUNK_TOKENS = 1024  # response tokens per chunk, to limit log-softmax memory


class SparseGRPOTrainer(Trainer):
    """A ``GRPOTrainer`` that decodes sparsely in vLLM and logs the mismatch between actor and
    policy.

    In colocate mode, environment variables pass the schedule to vLLM. These variables are set only
    while the engine starts. In server mode, the server must have been started with a schedule. In
    lossless mode, samples follow the dense policy. The measured p5 then shows only how close vLLM's
    log-probs are to the trainer's. No schedule can have a higher p5.

    The mismatch is measured every ``measure_every`` optimizer steps: vLLM returns top-n lists, and
    some of the responses (at least one per process) are scored in an extra dense forward pass.
    With tools, a response is measured up to its first tool call (see ``Recording.generate``).
    Together, the lists and the scores bound every token's acceptance rate. The results are pooled
    over all processes and logged under ``sparrow/`` (see ``sparrow.integrations.metrics`` for the
    names). Every log also has the share of cached tokens read and, in lossless mode, draft metrics.
    The last measurement is kept as ``report``, for a controller that calls ``set_schedule``. To
    measure the p5 ceiling, the trainer first samples dense responses to the first batch's prompts.

    Args:
        args, kwargs: see ``trl.GRPOTrainer``; ``use_vllm`` must be set.
        schedule: the actor's schedule, ``"lossless"``, or a mapping of settings, in any form that
            ``Decoding.load`` accepts. Defaults to the schedule that vLLM was started with.
        measure_every: least number of optimizer steps between measurements. The first rollout is
            measured, and then the first one after this many steps.
        sequences: number of responses to measure per process, spread evenly over the batch.
        top_n: length of the actor's lists.

    Raises ConfigError if ``measure_every`` is less than 1, if TRL generates without vLLM, if vLLM
    decodes densely, in another mode or with other lossless settings, or if vLLM does not sample
    from the whole softmax (see ``integrations.sampling``).
    """

    report: MismatchReport | None = None

    def __init__(
        self,
        *args: Any,
        schedule: Any = None,
        measure_every: int = 10,
        sequences: int = 32,
        top_n: int = 20,
        **kwargs: Any,
    ) -> None:
        if measure_every < 1:
            raise ConfigError(
                f"measure_every is {measure_every}, expected at least 1; to measure less often, "
                "pass a larger number of optimizer steps"
            )
        for given in (*args, *kwargs.values()):
            if isinstance(given, GRPOConfig):
                _check_sampling(given)
        decoding = None if schedule is None else Decoding.load(schedule)
        with _asked_for(decoding):
            super().__init__(*args, **kwargs)
        if not self.use_vllm:
            raise ConfigError("sparse rollouts need vLLM; set use_vllm=True in GRPOConfig")

        self.measure_every = measure_every
        self._measured_at = -inf  # optimizer step of the last measurement
        stock: Any = self.vllm_generation
        self.vllm_generation: Any = Recording(
            stock, top_n, sequences, self._is_measured, self._densely
        )
        self._measured: list[TokenAcceptance] = []
        self._of_dense: list[TokenAcceptance] = []
        self._ceiling = Ceiling()

        self._described = self._rpc("sparrow_describe")
        self.schedule = SparsitySchedule.from_dict(self._described[0]["schedule"])
        self._is_lossless = self._described[0]["mode"] == "lossless"
        if decoding is not None:
            server = "TRL's vLLM server"
            check_mode(decoding, self._described[0], server, "leave schedule out")
            if self._is_lossless and self.vllm_mode == "server":
                check_settings(decoding, self._described[0], server)
            if not decoding.has_default_schedule and decoding.schedule != self.schedule:
                self.set_schedule(decoding.schedule)
        self._counted()  # to drop the counts from vLLM's own warm-up

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Change the page counts from the next rollout on. Call this on every process.

        Raises ConfigError if the page layout or the dense layers differ from what vLLM was started
        with.
        """
        self._rpc("sparrow_set_schedule", schedule.to_json())
        if self.vllm_mode == "colocate":
            self.vllm_generation.llm.reset_prefix_cache()
        else:
            self._on_main(lambda: _forget_cached(self.vllm_generation.vllm_client))
        self.schedule = schedule

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """See ``transformers.Trainer``. The first call after a rollout also measures the recorded
        responses, while ``model`` still has the actor's weights.
        """
        generation = self.vllm_generation
        for recorded, measured in (
            (generation.recorded, self._measured),
            (generation.dense, self._of_dense),
        ):
            for rollout in recorded:
                top = policy_top_logprobs(model, rollout, self.temperature, self.accelerator.device)
                measured.append(token_acceptance(rollout, top, self.schedule))
        generation.recorded = []
        generation.dense = []
        return super().compute_loss(model, inputs, *args, **kwargs)

    def log(self, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        """See ``transformers.Trainer``. Also logs what was measured since the last training log."""
        if self.model.training:
            logs |= self._counted()
            if self._measured:
                report = pool(gather_object(self._measured), self.schedule.bin_tokens)
                if self._of_dense:
                    self._ceiling.measure(
                        pool(gather_object(self._of_dense), self.schedule.bin_tokens)
                    )
                elif self._reads_all:
                    self._ceiling.measure(report)
                self.report = self._ceiling.on(report)
                self._measured = []
                self._of_dense = []
                dense_up_to = inf if self._reads_all else self.schedule.dense_up_to
                logs |= mismatch_metrics(self.report, dense_up_to)
        super().log(logs, *args, **kwargs)

    def _counted(self) -> dict[str, float]:
        """Return the metrics of vLLM's workers since the last call. In colocate mode, they are
        summed over all engines. In server mode, they are summed over the server's workers.
        """
        counts = [tally(self._described, self._rpc)]
        if self.vllm_mode == "colocate":
            # Processes that share an engine all count the same tokens. The server's counts are
            # the same on every process already.
            counts = gather_object(counts)[:: self.vllm_generation.tensor_parallel_size]
        return counter_metrics(total(counts))

    @property
    def _reads_all(self) -> bool:
        return self._is_lossless or self.schedule.is_dense

    @contextmanager
    def _densely(self) -> Iterator[bool]:
        """Make vLLM decode densely inside the context, and yield True. If its samples follow the
        dense policy anyway, or dense responses have already been sampled, change nothing and yield
        False.
        """
        schedule = self.schedule
        if self._reads_all or self._ceiling or self._of_dense:
            yield False
            return
        try:
            self.set_schedule(schedule.reading_everything())
            yield True
        finally:
            self.set_schedule(schedule)
            # reset the counts: samples for the ceiling aren't part of a rollout
            self._counted()

    def _is_measured(self) -> bool:
        """Return whether to measure the next responses. If a step has several rollouts, all or none
        of them are measured.

        TRL does not generate in every step, and after a resume it generates in different steps, so
        the steps since the last measurement are counted.
        """
        if not self.model.training:
            return False
        step = self.state.global_step
        # the step count is lower than before if ``train`` was called again
        if not 0 < step - self._measured_at < self.measure_every:
            self._measured_at = step
        return step == self._measured_at

    def _rpc(self, method: str, *args: Any) -> list[Any]:
        """Call a method on the vLLM workers. In colocate mode, this calls the workers of this
        process. In server mode, this calls the server's workers, and returns their results on every
        process.

        In server mode, raises EngineError or ConfigError on every process; see ``_ask``.
        """
        if self.vllm_mode == "colocate":
            return self.vllm_generation.llm.collective_rpc(method, args=args)
        return self._on_main(lambda: _ask(self.vllm_generation.vllm_client, method, args))

    def _on_main(self, ask: Callable[[], Any]) -> Any:
        """Call ``ask`` on the main process, and return its result on every process.

        A SparrowError is raised on every process, because the others wait for the result.
        """
        answers: list[Any] = []
        if self.accelerator.is_main_process:
            try:
                answers = [ask()]
            except SparrowError as error:
                answers = [error]
        [answer] = gather_object(answers)
        if isinstance(answer, SparrowError):
            raise answer
        return answer


def _ask(client: Any, method: str, args: Sequence[Any]) -> list[Any]:
    """Call a method on the workers of a server, through TRL's client.

    Raises EngineError if no vLLM server answers, or an error by ``refusal`` if it refuses the call.
    """
    url = client.base_url
    try:
        answer = client.session.post(f"{url}/collective_rpc", json={"method": method, "args": args})
    except OSError as error:  # the base class of the errors that requests raises
        raise EngineError(
            f"no vLLM server answers at {url} ({error}); start one, and resume training"
        ) from error
    if answer.status_code != 200:
        raise refusal(url, method, answer.status_code, answer.text[:500])
    try:
        return answer.json()["results"]
    except (ValueError, KeyError) as error:
        raise EngineError(
            f"the answer of {url} to {method} is not a vLLM server's ({answer.text[:300]}); check "
            "the address"
        ) from error


def _forget_cached(client: Any) -> None:
    """Empty a server's prefix cache, through TRL's client.

    Raises EngineError if this fails.
    """
    try:
        client.reset_prefix_cache()
    except Exception as error:  # TRL raises no narrower one
        raise EngineError(
            f"the vLLM server at {client.base_url} did not empty its prefix cache ({error}); "
            "restart it, and resume training"
        ) from error


def _check_sampling(config: GRPOConfig) -> None:
    """Check that TRL's settings make vLLM sample from the whole softmax. Raises ConfigError if a
    setting changes the distribution.
    """
    further: Any = config.generation_kwargs or {}  # these override the config's fields
    fields = {name: getattr(config, name, None) for name in NEUTRAL}
    fields["structured_outputs"] = config.vllm_structured_outputs_regex
    check_whole_softmax({**fields, **further}, "GRPOConfig: ")
    if further.get("temperature", config.temperature) != config.temperature:
        raise ConfigError(
            f"GRPOConfig.temperature is {config.temperature}, but generation_kwargs overrides the "
            f"temperature with {further['temperature']}; set only GRPOConfig.temperature"
        )


def _asked_for(decoding: Decoding | None) -> AbstractContextManager[None]:
    """Inside the context, set vLLM's environment variables for ``decoding``. This is needed because
    TRL has no field for the schedule.

    Engines keep the settings they were started with, so other engines in this process aren't
    affected.
    """
    if decoding is None:
        return nullcontext()
    asked = json.dumps(decoding.to_dict())
    return vllm_config.variables(
        {vllm_config.MODE_ENVIRONMENT: asked, vllm_config.ENVIRONMENT: None}
    )


class Recording:
    """Wraps TRL's ``VLLMGeneration``. When a measurement is due, it requests the actor's top-n
    lists and records some of the responses.

    TRL itself only gets what it asked for: the log-probs of the sampled tokens.
    """

    def __init__(
        self,
        generation: Any,
        top_n: int,
        sequences: int,
        wanted: Callable[[], bool],
        densely: Callable[[], AbstractContextManager[bool]],
    ) -> None:
        self.recorded: list[Rollout] = []
        self.dense: list[Rollout] = []  # responses to the same prompts, sampled densely
        self._densely = densely
        self._generation = generation
        self._top_n = top_n
        self._sequences = sequences
        self._wanted = wanted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._generation, name)

    def generate(
        self, prompts: Any, images: Any, num_generations: int, profiler: Any = None
    ) -> tuple[Any, ...]:
        """See ``VLLMGeneration.generate``. Records only the first call of a rollout. Later calls
        continue some of the responses after tool calls. Their number differs between processes,
        which must all run the same number of forward passes if the weights are sharded.

        Raises ConfigError if there are images, since a measurement's forward pass wouldn't see
        them.
        """
        generation = self._generation
        # ``compute_loss`` drops the records before the next rollout.
        if self.recorded or not self._wanted():
            return generation.generate(prompts, images, num_generations, profiler)
        if images is not None:
            raise ConfigError(
                "acceptance cannot be measured for prompts with images; use GRPOTrainer, and set "
                "SPARROW_SCHEDULE yourself"
            )
        with self._densely() as dense:
            if dense:
                self.dense += self._some(self._listed(prompts, num_generations, profiler))
        outputs = self._listed(prompts, num_generations, profiler)
        self.recorded += self._some(outputs)
        prompts, responses, logprobs, ids = outputs
        sampled = [
            [[logprob] for logprob in _of_sampled(*lists)]
            for lists in zip(logprobs, ids, responses, strict=True)
        ]
        sampled_ids = [[[token] for token in response] for response in responses]
        return prompts, responses, sampled, sampled_ids

    def _listed(self, prompts: Any, num_generations: int, profiler: Any) -> tuple[Any, ...]:
        """Generate with TRL, but with top-n lists in the result."""
        previous = self._generation.logprobs
        self._generation.logprobs = self._top_n
        try:
            return self._generation.generate(prompts, None, num_generations, profiler)
        finally:
            self._generation.logprobs = previous

    def _some(self, outputs: tuple[Any, ...]) -> list[Rollout]:
        """Select the responses to measure, spread evenly over the batch."""
        prompts, responses, logprobs, ids = outputs
        count = min(self._sequences, len(responses))
        spread = np.linspace(0, len(responses) - 1, count).round().astype(int)
        longest = self._generation.max_completion_length
        return [
            rollout(prompts[i], responses[i], logprobs[i], ids[i], self._top_n, longest)
            for i in spread.tolist()
        ]


def _of_sampled(
    logprobs: Sequence[Sequence[float]], ids: Sequence[Sequence[int]], response: Sequence[int]
) -> list[float]:
    """Look up each response token's log-prob in the list at its position."""
    return [row[i.index(t)] for row, i, t in zip(logprobs, ids, response, strict=True)]


def rollout(
    prompt: Sequence[int],
    response: Sequence[int],
    logprobs: Sequence[Sequence[float]],
    ids: Sequence[Sequence[int]],
    top_n: int,
    max_tokens: int,
) -> Rollout:
    """Build a ``Rollout`` from one of TRL's responses. TRL's lists are sorted, most likely token
    first, and have n + 1 entries if the sampled token is not among the n most likely.
    """
    return Rollout(
        prompt_ids=prompt,
        response_ids=np.asarray(response, np.int64),
        logprobs=np.asarray(_of_sampled(logprobs, ids, response), np.float32),
        top_ids=np.asarray([row[:top_n] for row in ids], np.int32),
        top_logprobs=np.asarray([row[:top_n] for row in logprobs], np.float32),
        finish_reason="length" if len(response) >= max_tokens else "stop",
    )


@torch.no_grad()
def policy_top_logprobs(
    model: Any, rollout: Rollout, temperature: float, device: torch.device
) -> np.ndarray:
    """Compute the policy's log-probs for the tokens in the actor's lists, float32 ``[T, n]``."""
    input_ids = torch.tensor([[*rollout.prompt_ids, *rollout.response_ids.tolist()]], device=device)
    top_Tn = torch.from_numpy(rollout.top_ids).long().to(device)
    logits_TV = model(input_ids=input_ids, logits_to_keep=len(rollout) + 1, use_cache=False).logits[
        0, :-1
    ]
    chunks = zip(logits_TV.split(CHUNK_TOKENS), top_Tn.split(CHUNK_TOKENS), strict=True)
    return (
        torch.cat([(x.float() / temperature).log_softmax(-1).gather(-1, top) for x, top in chunks])
        .cpu()
        .numpy()
    )
