"""``VLLMEngine`` runs the sparse actor with vLLM inside this process.

Shapes: T response tokens, n top-n list entries.
"""

from __future__ import annotations

import contextlib
import gc
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sparrow.decoding import Decoding, DraftChoice
from sparrow.engines.base import Counters
from sparrow.engines.registry import Asked
from sparrow.engines.vllm.adapter import take_adapter
from sparrow.engines.vllm.client import Client, rollout
from sparrow.engines.vllm.starting import starting, undone_if_refused
from sparrow.errors import ConfigError
from sparrow.rollout import Rollout, Sampling
from sparrow.schedule import SparsitySchedule
from sparrow.vllm import config, patches, plugin


class InProcessClient(Client):
    """An engine that samples with vLLM, with or without Sparrow. vLLM's scheduler runs in this
    process, and so does the model if there is only one device.

    Args:
        model: checkpoint folder or Hugging Face name.
        options: arguments for ``vllm.LLM``. There is also ``adapter``, the folder of a LoRA adapter
            to use for all requests.
        variables: environment variables to set, or to unset if None, while vLLM starts.
        described: see ``Client``.

    Raises EngineError if vLLM does not start, for example because there isn't enough memory.
    """

    def __init__(
        self,
        model: str,
        options: Mapping[str, Any],
        variables: Mapping[str, str | None],
        described: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        from vllm import LLM

        defaults: dict[str, Any] = dict(
            logprobs_mode="processed_logprobs",  # i.e. at the sampling temperature
            max_logprobs=-1,
        )
        arguments = {**defaults, **options}
        self._adapter = take_adapter(arguments)
        self._has_memory = has_memory()
        self._asleep = False
        # vLLM reads this variable when it creates an engine. The scheduler must run in this process
        # so that tensors can be passed without copying.
        in_process = config.variables({**variables, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"})
        with starting(), undone_if_refused(), in_process:
            self.llm = LLM(model=model, **arguments)
        vllm_config = self.llm.llm_engine.vllm_config
        self._in_process = vllm_config.parallel_config.world_size == 1
        self._model_config = vllm_config.model_config
        super().__init__(
            self._model_config.max_model_len, described, self._model_config.get_vocab_size()
        )

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """See ``Engine.generate``.

        Raises ConfigError if ``top_n`` is above the engine's option ``max_logprobs``.
        """
        from vllm import SamplingParams

        self.check(prompts, sampling)
        top_n = min(sampling.top_n, self._model_config.get_vocab_size())
        most = self._model_config.max_logprobs
        if -1 < most < top_n:
            raise ConfigError(
                f"top_n is {top_n}, but this vLLM engine allows lists of at most {most} tokens; "
                "lower top_n, or start the engine with a larger max_logprobs"
            )
        parameters = [
            SamplingParams(
                max_tokens=sampling.max_new_tokens,
                temperature=sampling.temperature,
                logprobs=top_n,
                top_k=sampling.top_k or 0,
                top_p=sampling.top_p,
                seed=seed,
                detokenize=False,
                flat_logprobs=True,
            )
            for seed in sampling.request_seeds(len(prompts))
        ]
        requests: list[Any] = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with self._given_up_if_interrupted():
            shows_bar = sys.stderr.isatty() and os.environ.get("RANK", "0") == "0"
            outputs = self.llm.generate(
                requests, parameters, use_tqdm=shows_bar, lora_request=self._adapter
            )
        pairs = zip(prompts, outputs, strict=True)
        return [rollout_of(prompt, output.outputs[0], top_n) for prompt, output in pairs]

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """See ``Engine.update_weights``. If the model is in this process, weights don't go through
        host memory.

        Raises ConfigError if loading fails, for example because the model has no weight by that
        name. All weights must then be loaded again.
        """
        if not self._in_process:
            return super().update_weights(weights)
        self.rpc("sparrow_load_weights", weights)
        self._forget_cached()

    def rpc(self, method: str, *args: Any) -> list[Any]:
        return self.llm.collective_rpc(method, args=args)

    def reset_prefix_cache(self) -> bool:
        return self.llm.reset_prefix_cache()

    @contextlib.contextmanager
    def _given_up_if_interrupted(self) -> Iterator[None]:
        """Abort the requests if ``generate`` ends early, for example on Ctrl-C. Otherwise, the next
        call would pick them up again.
        """
        try:
            yield
        except BaseException:
            engine = self.llm.llm_engine
            # Make sure to raise the original exception, even if vLLM no longer responds.
            with contextlib.suppress(Exception):
                engine.abort_request(list(engine.output_processor.request_states), internal=True)
            raise

    def sleep(self) -> None:
        """See ``Engine.sleep``. Moves the weights to host memory and drops the KV cache. Does
        nothing on a CPU.
        """
        if self._has_memory and not self._asleep:
            self.llm.sleep(level=1)
            self._asleep = True

    def wake(self) -> None:
        if self._asleep:
            # torch's allocator holds on to memory freed by training, so vLLM can't use it
            torch.cuda.empty_cache()
            self.llm.wake_up()
            self._asleep = False

    def close(self) -> None:
        """See ``Engine.close``. It's fine to close a sleeping engine."""
        self.wake()
        from vllm.platforms import current_platform

        # If the trainer has destroyed torch's process group, vLLM's groups are gone too, and vLLM's
        # shutdown would fail.
        if not self._in_process or torch.distributed.is_initialized():
            self.llm.llm_engine.engine_core.shutdown()
        del self.llm
        gc.collect()
        if self._has_memory:
            torch.cuda.empty_cache()
            # vLLM has one graph memory pool per process. The pool is freed once no graph uses it,
            # but the next engine would still try to capture its graphs there.
            platform: Any = type(current_platform)
            platform._global_graph_pool = None


class VLLMEngine(InProcessClient):
    """An engine that samples with vLLM. vLLM's scheduler runs in this process, and so does the
    model if there is only one device.

    Args:
        model: checkpoint folder or Hugging Face name.
        schedule: a lossy actor's schedule, or a ``Decoding``; ``set_schedule`` can change the page
            counts later, but not the page layout.
        options: more arguments for ``vllm.LLM``, such as ``tensor_parallel_size``,
            ``gpu_memory_utilization``, ``max_model_len``, ``max_num_seqs`` or ``enforce_eager``.
            There is also ``adapter``, the folder of a LoRA adapter to use for all requests.

    Raises ConfigError or UnsupportedModel if vLLM is missing, is too old or cannot decode this
    model under a schedule, or if ``additional_config`` contains settings of Sparrow's that belong
    in ``schedule``. Raises EngineError if vLLM does not start, for example because there isn't
    enough memory.
    """

    def __init__(self, model: str, schedule: SparsitySchedule | Decoding, **options: Any) -> None:
        check_not_in_options(
            options,
            "Sparrow's settings are not among this engine's options",
            "set them with --mode, --schedule and --draft-schedule (in Python, with schedule)",
        )
        check_installed("vLLM")
        plugin.register()
        patches.apply(patches.LISTS)
        model_processes = options.get("tensor_parallel_size", 1) * options.get(
            "pipeline_parallel_size", 1
        )
        training_processes = int(os.environ.get("WORLD_SIZE", 1))
        if model_processes > 1 < training_processes:
            raise ConfigError(
                f"each of the {training_processes} training processes runs an engine on a single "
                f"device, but the options set {model_processes} devices per engine; run this model "
                "with vllm serve, and pass the server's address"
            )
        if model_processes > 1:
            check_discoverable()
        additional = {
            **(options.pop("additional_config", None) or {}),
            config.KEY: Decoding.load(schedule).to_dict(),
        }
        defaults: dict[str, Any] = dict(
            attention_backend="CUSTOM",
            additional_config=additional,
            enable_sleep_mode=has_memory(),
            # With several training processes, vLLM must get its rank from the launcher's
            # environment, and must keep away from the other processes' engines.
            distributed_executor_backend="external_launcher" if training_processes > 1 else None,
            skip_tokenizer_init=Path(model).is_dir() and not any(Path(model).glob("tokenizer*")),
        )
        # vLLM's scheduler; None unless vLLM chooses the draft length and there is only one training
        # process
        self._scheduler: Any = None
        super().__init__(model, {**defaults, **options}, variables={})
        if self._described[0].get("adapt_draft_tokens") and training_processes == 1:
            # there is no public access to vLLM's scheduler
            core: Any = self.llm.llm_engine.engine_core
            self._scheduler = core.engine_core.scheduler
            self._scheduler.keeps_choices = True

    def counters(self) -> Counters:
        counters = super().counters()
        if self._scheduler is None:
            return counters
        return replace(counters, choices=tuple(self._scheduler.take_choices()))

    def replay(self, choices: Sequence[DraftChoice]) -> None:
        """See ``DraftReplayer.replay``."""
        if self._scheduler is None:
            raise ConfigError(
                "this vLLM engine has a fixed number of drafts, so it cannot replay recorded "
                "choices; start it with adapt_draft_tokens=true"
            )
        self._scheduler.replay(choices)


def check_not_in_options(options: Mapping[str, Any], reason: str, remedy: str) -> None:
    """Raise ConfigError with this reason and remedy if ``additional_config`` contains Sparrow's
    settings.
    """
    additional = options.get("additional_config") or {}
    if config.KEY in additional:
        raise ConfigError(
            f"additional_config has {config.KEY!r} set to {additional[config.KEY]!r}, but "
            f"{reason}; {remedy}"
        )


def check_installed(engine: str) -> None:
    """Raise ConfigError if vLLM, which the engine named ``engine`` needs, cannot be imported."""
    try:
        from vllm import LLM, platforms  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"the {engine} engine needs vLLM ({error}); run pip install -e '.[vllm]' in a clone "
            "of the repository"
        ) from error


def has_memory() -> bool:
    """Return whether vLLM's device has memory of its own, i.e. is not a CPU."""
    from vllm.platforms import current_platform

    return not current_platform.is_cpu()


def check_discoverable() -> None:
    """Check that vLLM's other processes will load the plugin. They can find it only by its entry
    point.

    Raises ConfigError if they would not load it.
    """
    allowed = os.environ.get("VLLM_PLUGINS")
    if not entry_points(group=plugin.GROUP, name=plugin.NAME) or plugin.NAME not in (
        allowed or plugin.NAME
    ).split(","):
        raise ConfigError(
            f"vLLM's worker processes would not load Sparrow (VLLM_PLUGINS={allowed}); install "
            f"sparrow-rl with pip, and add {plugin.NAME!r} to VLLM_PLUGINS or unset the variable"
        )


def rollout_of(prompt: Sequence[int], completion: Any, top_n: int) -> Rollout:
    """Build a rollout from vLLM's completion. Each list in the completion has the sampled token
    first, then the most likely tokens, best first.

    Raises EngineError if the response is incomplete; see ``check_end``.
    """
    T = len(completion.token_ids)
    # A response that was aborted before its first token has no lists.
    width = len(completion.logprobs.token_ids) // T if T else top_n + 1
    ids = np.asarray(completion.logprobs.token_ids, dtype=np.int32).reshape(T, width)
    logprobs = np.asarray(completion.logprobs.logprobs, dtype=np.float32).reshape(T, width)
    ids = ids[:, : top_n + 1]
    logprobs = logprobs[:, : top_n + 1]
    return rollout(prompt, completion.token_ids, ids, logprobs, completion.finish_reason)


def start(asked: Asked) -> VLLMEngine:
    """Start vLLM in this process, with the user's options for ``vllm.LLM``."""
    options = options_of(asked)
    if asked.sleeps and "adapter" in options:
        raise ConfigError(
            f"engine {asked.spec.written!r} has an adapter, which only sparrow audit supports; "
            "merge the adapter into the model"
        )
    if not asked.sleeps:
        # vLLM's sleep mode supports only one engine per process, but an audit has two.
        options.setdefault("enable_sleep_mode", False)
    return VLLMEngine(asked.checkpoint, asked.decoding, **options)


def options_of(asked: Asked) -> dict[str, Any]:
    """Return the options for ``vllm.LLM``: the user's options, plus the dtype for the requested
    precision. Raises ConfigError if the user's options include a dtype.
    """
    options = asked.spec.options
    if "dtype" in options:
        raise ConfigError(
            f"engine {asked.spec.written!r} sets a dtype, but vLLM's dtype is set by precision "
            f"({asked.precision}); leave dtype out, and set precision instead"
        )
    return {"dtype": {"fp32": "float32", "bf16": "bfloat16"}[asked.precision], **options}
