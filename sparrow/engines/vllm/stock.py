"""vLLM without Sparrow, either in this process or behind HTTP. These engines are for audits, not
training.

Shapes: T response tokens, n top-n list entries.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from sparrow.decoding import Decoding
from sparrow.engines.base import Counters
from sparrow.engines.registry import Asked
from sparrow.engines.vllm.client import WHOLE_SOFTMAX, WITHOUT_SPARROW, rollout
from sparrow.engines.vllm.engine import (
    InProcessClient,
    check_installed,
    check_not_in_options,
    options_of,
)
from sparrow.engines.vllm.server import HTTPClient, finished
from sparrow.errors import ConfigError, EngineError
from sparrow.rollout import Rollout, Sampling, TopLists
from sparrow.schedule import SparsitySchedule
from sparrow.vllm import config, patches


class StockEngine(InProcessClient):
    """An engine that samples with vLLM in this process, without Sparrow. ``options`` are the user's
    options for ``vllm.LLM``. The options may include ``adapter``, as for ``VLLMEngine``.

    Raises ConfigError if vLLM is missing or lacks a name that Sparrow replaces, or if the options
    would make it run Sparrow. Raises EngineError if vLLM does not start.
    """

    def __init__(self, model: str, **options: Any) -> None:
        check_not_in_options(
            options,
            "stock engines run vLLM without Sparrow",
            "use engine vllm with --mode or --schedule",
        )
        check_installed("stock")
        # An audit compares vLLM with the trainer's model, which may be in this process.
        patches.apply(patches.TRANSFORMERS)
        # vLLM loads Sparrow's plugin here too. Unset the variables that would activate the plugin.
        plain = {
            config.MODE_ENVIRONMENT: None,
            config.ENVIRONMENT: None,
        }
        super().__init__(model, options, plain, WITHOUT_SPARROW)

    def counters(self) -> Counters:
        """Return all zeros, since stock vLLM doesn't have Sparrow's counters."""
        return Counters(0, 0)

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Always raises ConfigError, because stock vLLM can't follow a schedule."""
        raise _no_schedule()

    def top_lists(self, rollouts: Sequence[Rollout], n: int) -> list[TopLists]:
        """See ``ListScorer.top_lists``."""
        from vllm import SamplingParams

        wanted = SamplingParams(max_tokens=1, prompt_logprobs=n, detokenize=False)
        requests: list[Any] = [{"prompt_token_ids": _whole(each)} for each in rollouts]
        # vLLM's type hints also allow missing or flat lists, but we get neither with these options.
        outputs: list[Any] = list(
            self.llm.generate(requests, wanted, use_tqdm=False, lora_request=self._adapter)
        )

        def by_token(position: Any) -> dict[int, float]:
            return {token: entry.logprob for token, entry in position.items()}

        found = []
        for each, output in zip(rollouts, outputs, strict=True):
            places = output.prompt_logprobs[len(each.prompt_ids) :]
            found.append(_lists(each, [by_token(place) for place in places], n))
        return found


class StockServer(HTTPClient):
    """An engine that samples from a running vLLM server without Sparrow. Prompts are sent as token
    ids.

    Raises EngineError if no server answers.
    """

    _prompts_path = "/v1/completions"

    def __init__(self, url: str) -> None:
        super().__init__(url, controls=False, described=WITHOUT_SPARROW)

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        """Always raises ConfigError, because stock vLLM can't follow a schedule."""
        raise _no_schedule()

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """See ``Engine.generate``. This uses the completions route, because every server has it.
        The rollouts have no top-n lists.
        """
        self.check(prompts, sampling)
        bodies: list[dict[str, Any]] = [
            {
                "model": self._served["id"],
                "prompt": [int(token) for token in prompt],
                "max_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                **WHOLE_SOFTMAX,
                "top_k": sampling.top_k or 0,
                "top_p": sampling.top_p,
                "seed": seed,
                "logprobs": 1,
                "return_token_ids": True,
            }
            for prompt, seed in zip(prompts, sampling.request_seeds(len(prompts)), strict=True)
        ]
        return [
            _completion(prompt, choice)
            for prompt, choice in zip(prompts, self._answers(bodies), strict=True)
        ]

    def top_lists(self, rollouts: Sequence[Rollout], n: int) -> list[TopLists]:
        """See ``ListScorer.top_lists``.

        Raises EngineError if the server refuses the request, for example because it doesn't allow
        lists this long.
        """
        bodies: list[dict[str, Any]] = [
            {
                "model": self._served["id"],
                "prompt": _whole(each),
                "max_tokens": 1,
                "prompt_logprobs": n,
            }
            for each in rollouts
        ]

        def by_token(position: Mapping[str, Any]) -> dict[int, float]:
            return {int(token): entry["logprob"] for token, entry in position.items()}

        found = []
        for each, choice in zip(rollouts, self._answers(bodies), strict=True):
            places = choice["prompt_logprobs"][len(each.prompt_ids) :]
            found.append(_lists(each, [by_token(place) for place in places], n))
        return found

    def _answers(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        with self._reached():
            return finished(self._choices(bodies))


def _completion(prompt: Sequence[int], choice: Mapping[str, Any]) -> Rollout:
    """Build a ``Rollout`` from one of the server's choices.

    Raises EngineError if the choice has no token ids. vLLM before 0.10.2 doesn't send any.
    """
    tokens = choice.get("token_ids")
    if tokens is None:
        raise EngineError(
            "the server's response contains no token ids; use a server with vLLM 0.10.2 or newer"
        )
    logprobs = np.array(choice["logprobs"]["token_logprobs"], dtype=np.float32)[:, None]
    ids = np.array(tokens, dtype=np.int32)[:, None]
    return rollout(prompt, tokens, ids, logprobs, choice["finish_reason"])


def _no_schedule() -> ConfigError:
    return ConfigError(
        "stock vLLM cannot follow a schedule; use engine vllm, or audit without a schedule"
    )


def _whole(sampled: Rollout) -> list[int]:
    return [*map(int, sampled.prompt_ids), *sampled.response_ids.tolist()]


def _lists(sampled: Rollout, positions: Sequence[Mapping[int, float]], n: int) -> TopLists:
    """Build lists of the ``n`` most likely tokens at each position. The result also has the
    log-probs of the response's own tokens.

    Raises EngineError if a list has fewer than ``n`` tokens.
    """
    best = [sorted(each.items(), key=lambda entry: -entry[1])[:n] for each in positions]
    shortest = min(map(len, best), default=n)
    if shortest < n:
        raise EngineError(
            f"vLLM returned a list of {shortest} tokens, expected {n}; request shorter lists "
            "(--lists), or start the server with a higher limit (--max-logprobs)"
        )
    own = [
        each[token] for each, token in zip(positions, sampled.response_ids.tolist(), strict=True)
    ]
    pairs = np.array(best, dtype=np.float64).reshape(len(best), n, 2)
    return TopLists(
        logprobs=np.array(own, dtype=np.float32),
        top_ids=pairs[..., 0].astype(np.int32),
        top_logprobs=pairs[..., 1].astype(np.float32),
    )


def start(asked: Asked) -> StockEngine:
    """Start vLLM without Sparrow in this process, with the user's options for ``vllm.LLM``.

    Raises ConfigError if a mode or a schedule is asked for.
    """
    _check_dense(asked.decoding)
    return StockEngine(asked.checkpoint, **options_of(asked))


def start_server(asked: Asked) -> StockServer:
    """Connect to the server at the given address.

    Raises ConfigError if a mode or a schedule is asked for.
    """
    _check_dense(asked.decoding)
    return StockServer(asked.spec.rest)


def _check_dense(decoding: Decoding) -> None:
    """Raise ConfigError unless the mode is dense."""
    if decoding.mode != "dense":
        raise ConfigError(
            f"stock engines run vLLM without Sparrow, but the mode is {decoding.mode!r}; use "
            "engine vllm, or leave out the mode and the schedule"
        )
