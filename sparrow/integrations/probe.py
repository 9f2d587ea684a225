"""Measure a sparse actor's acceptance in another trainer's vLLM, using only vLLM's
OpenAI-compatible HTTP API.

This is for trainers that only request the log-probs of sampled tokens, but have a vLLM server that
can be reached over HTTP. The probe first samples responses under the server's schedule, and gets
the actor's top-n lists. It then sends each prompt plus its response back as a new prompt, and asks
for the prompt log-probs. vLLM prefills this new prompt densely and without the prefix cache, so it
returns the policy's top-n lists, computed with the same weights in the same precision. Together,
the two lists bound the acceptance rate (``acceptance_bounds``). Responses are sampled at
temperature 1, because vLLM only returns prompt log-probs at that temperature.

``Probe`` returns these measurements and the servers' counters as scalars for any trainer's logger.

Shapes: T response tokens, n entries of a top-n list.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from math import inf
from typing import Any

import httpx
import numpy as np

from sparrow.engines.base import Counters, total
from sparrow.engines.vllm.client import WHOLE_SOFTMAX, check_end, tally
from sparrow.errors import ConfigError, SparrowError
from sparrow.integrations.metrics import counter_metrics
from sparrow.mismatch import Ceiling, MismatchReport, acceptance_bounds, mismatch_metrics
from sparrow.mismatch.tokens import TokenAcceptance, pool
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule

CONNECTIONS = 64
DRAFTS = (
    "spec_decode_num_draft_tokens",
    "spec_decode_num_accepted_tokens",
    "spec_decode_num_drafts",
)
"""vLLM's own counters: drafted tokens, accepted tokens, and verifications with at least one draft.
"""


class Probe:
    """Collects metrics from vLLM servers that decode with Sparrow, and returns them as scalars with
    stable names for any trainer's logger.

        probe = Probe(["http://10.0.0.1:8000"])
        # at every step: costs a request or two
        logger.log(probe.counted(), step)
        # now and then: takes as long as one or two rollouts
        logger.log(probe.measured(prompts, max_new_tokens=16384), step)

    The names are listed in ``sparrow.integrations.metrics``. Only servers started with
    ``VLLM_SERVER_DEV_MODE=1`` report all of them. Other servers require ``schedule``, and report
    neither Sparrow's counters nor the ceiling. Their draft metrics come from vLLM's own Prometheus
    token counts, which ``--disable-log-stats`` turns off.

    Args:
        urls: addresses of servers with the same weights and settings.
        schedule: the servers' schedule; only used if they don't report it.

    Raises ConfigError if there are no addresses, if a server does not answer, if one in development
    mode runs without Sparrow, or if ``schedule`` is missing and the servers don't report theirs.
    """

    report: MismatchReport | None = None  # the last measurement

    def __init__(self, urls: Sequence[str], schedule: SparsitySchedule | None = None) -> None:
        if isinstance(urls, str) or not urls:
            raise ConfigError(f"urls must be a list of server addresses, got {urls!r}")
        self._urls = [url.rstrip("/") for url in urls]
        self._ceiling = Ceiling()
        self._drafts = self._counted_by_vllm()
        self._described = {}
        self._before = Counters(0, 0)  # taken before a measurement, and not returned yet
        for url in dict.fromkeys(self._urls):
            workers = _rpc(url, "sparrow_describe")
            if workers is not None:
                self._described[url] = workers
        self._is_open = len(self._described) == len(set(self._urls))
        if self._is_open:
            first, *_ = next(iter(self._described.values()))
            self.schedule = SparsitySchedule.from_dict(first["schedule"])
            self.mode = first["mode"]
            self._taken()  # to reset earlier counts
        elif schedule is None:
            raise ConfigError(
                f"the vLLM servers at {', '.join(self._urls)} do not report their schedule; "
                "pass schedule, or start the servers with VLLM_SERVER_DEV_MODE=1"
            )
        else:
            self.schedule = schedule
            self.mode = "unknown"

    def counted(self) -> dict[str, float]:
        """Return metrics for all decode steps since the last call: the share of cached tokens read
        and, in lossless mode, draft metrics.

        Servers in development mode reset their counts whenever any client reads them.
        """
        if not self._is_open:
            before = self._drafts
            self._drafts = self._counted_by_vllm()
            drafted, accepted, cycles = (self._drafts[name] - before[name] for name in DRAFTS)
            return counter_metrics(
                Counters(0, 0, drafted=drafted, accepted=accepted, cycles=cycles)
            )
        counters = self._before + self._taken()
        self._before = Counters(0, 0)
        return counter_metrics(counters)

    def _taken(self) -> Counters:
        """Return the counts of all servers, and reset them."""
        parts = (tally(described, partial(_rpc, url)) for url, described in self._described.items())
        return total(list(parts))

    def measured(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, top_n: int = 20
    ) -> dict[str, float]:
        """Sample one response to each prompt, and measure the p5 of acceptance by length. Also
        measure the p5 ceiling, which is the p5 of dense rollouts.

        The servers must not serve other requests in the meantime. In lossless mode, or if the
        schedule reads everything, samples follow the dense policy, so the measured p5 is also the
        ceiling. Otherwise, the first call also samples densely to measure the ceiling, provided the
        servers allow schedule changes. On servers in development mode, ``counted`` leaves this
        measurement out.

        Raises ConfigError if there are no prompts, PromptError if one is text or empty, or
        SparrowError if a server cannot drop its prefix cache because it serves other requests.
        """
        if not prompts:
            raise ConfigError("there are no prompts to measure; pass at least one")
        Sampling(max_new_tokens).check(prompts)
        samples_are_dense = self.mode == "lossless" or self.schedule.is_dense
        if self._is_open:
            self._before += self._taken()
        if self._is_open and not (samples_are_dense or self._ceiling):
            try:
                self._set(self.schedule.reading_everything())
                self._ceiling.measure(self._pooled(prompts, max_new_tokens, top_n))
            finally:
                self._set(self.schedule)
        report = self._pooled(prompts, max_new_tokens, top_n)
        if samples_are_dense:
            self._ceiling.measure(report)
        self.report = self._ceiling.on(report)
        if self._is_open:
            self._taken()
        dense_up_to = inf if samples_are_dense else self.schedule.dense_up_to
        return mismatch_metrics(self.report, dense_up_to)

    def _pooled(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int, top_n: int
    ) -> MismatchReport:
        responses = probe(self._urls, prompts, self.schedule, max_new_tokens, top_n)
        return pool(responses, self.schedule.bin_tokens)

    def _set(self, schedule: SparsitySchedule) -> None:
        for url in self._described:
            _rpc(url, "sparrow_set_schedule", schedule.to_json())
        for url in self._described:
            answer = _answer(f"{url}/reset_prefix_cache", {})
            if answer.content and not answer.json()["success"]:  # older versions say nothing
                raise SparrowError(
                    f"the vLLM server at {url} cannot drop its prefix cache while requests are "
                    "running; wait for the requests to finish"
                )

    def _counted_by_vllm(self) -> Counter[str]:
        """Return vLLM's own draft counts since the servers were started."""
        counts: Counter[str] = Counter()
        for url in dict.fromkeys(self._urls):
            text = _answer(f"{url}/metrics").text
            for name in DRAFTS:
                values = re.findall(rf"^vllm:{name}_total(?:\{{[^}}]*\}})? (\S+)", text, re.M)
                counts[name] += int(sum(map(float, values)))
        return counts


def probe(
    urls: Sequence[str],
    prompts: Sequence[Sequence[int]],
    schedule: SparsitySchedule,
    max_new_tokens: int,
    top_n: int = 20,
) -> list[TokenAcceptance]:
    """Sample one response per prompt, and bound every token's acceptance rate. The prompts are
    spread over the servers. If a response fills the context, its last token is left out, because
    vLLM cannot prefill without sampling one more token.

    Args:
        urls: addresses of vLLM servers with the same weights, such as ``http://10.0.0.1:8000``.
        prompts: token ids.
        schedule: the servers' schedule; its page size determines token positions.
        max_new_tokens: the maximum response length, in tokens.
        top_n: length of both lists; vLLM's default limit is 20.

    Raises ConfigError if a server does not answer, or refuses a request. Raises EngineError if a
    response is incomplete, for example because it was aborted.
    """
    served = {url: _request(f"{url}/v1/models")["data"][0] for url in dict.fromkeys(urls)}

    def measure(i: int) -> TokenAcceptance:
        url = urls[i % len(urls)]
        prompt = [int(token) for token in prompts[i]]
        common = {
            "model": served[url]["id"],
            "temperature": 1.0,
            "return_tokens_as_token_ids": True,
            **WHOLE_SOFTMAX,
        }

        # The actor samples a response and lists its most likely tokens.
        sampled = _choice(
            url, common | {"prompt": prompt, "max_tokens": max_new_tokens, "logprobs": top_n}
        )
        logprobs = sampled["logprobs"]
        check_end(len(logprobs["tokens"]), sampled["finish_reason"])
        room = served[url]["max_model_len"] - len(prompt) - 1
        response = [_token(text) for text in logprobs["tokens"][:room]]
        actor = [_of_sample(position) for position in logprobs["top_logprobs"][:room]]

        # Prefill is dense, so prompt log-probs are the policy's.
        scored = _choice(
            url, common | {"prompt": prompt + response, "max_tokens": 1, "prompt_logprobs": top_n}
        )
        check_end(0, scored["finish_reason"])
        policy = [_of_prompt(position) for position in scored["prompt_logprobs"][len(prompt) :]]

        p_ids, p = _lists(policy, top_n)
        q_ids, q = _lists(actor, top_n)
        bounds = acceptance_bounds(q_ids, q, p, p_ids)
        position = schedule.page_end(len(prompt) + np.arange(len(response)))
        return TokenAcceptance(bounds.lower, bounds.upper, position)

    with ThreadPoolExecutor(CONNECTIONS) as executor:
        return list(executor.map(measure, range(len(prompts))))


def _of_sample(position: dict[str, float]) -> dict[int, float]:
    """Parse the log-probs at one position of a response, by token id."""
    return {_token(text): logprob for text, logprob in position.items()}


def _of_prompt(position: dict[str, dict[str, Any]]) -> dict[int, float]:
    """Parse the log-probs at one position of a prompt, by token id."""
    return {int(token): entry["logprob"] for token, entry in position.items()}


def _lists(positions: Sequence[dict[int, float]], top_n: int) -> tuple[np.ndarray, np.ndarray]:
    """Return ids and log-probs ``[T, n]`` of the n most likely tokens, most likely first. If a list
    lacks the sampled token, vLLM appends that token. The result leaves out this extra entry.
    """
    best = [sorted(entries.items(), key=lambda item: -item[1])[:top_n] for entries in positions]
    pairs = np.array(best, dtype=np.float64).reshape(len(best), top_n, 2)
    return pairs[..., 0].astype(np.int64), pairs[..., 1]


def _token(text: str) -> int:
    return int(text.removeprefix("token_id:"))


def _choice(url: str, body: dict[str, Any]) -> dict[str, Any]:
    return _request(f"{url}/v1/completions", body)["choices"][0]


def _rpc(url: str, method: str, *args: Any) -> Any:
    """Call a method on every worker of a server. Return the workers' results, or None if the server
    does not allow such calls.
    """
    answer = _answer(f"{url}/collective_rpc", {"method": method, "args": args}, allowed=(404,))
    return None if answer.status_code == 404 else answer.json()["results"]


def _request(url: str, body: dict[str, Any] | None = None) -> Any:
    return _answer(url, body).json()


def _answer(
    url: str, body: dict[str, Any] | None = None, allowed: Sequence[int] = ()
) -> httpx.Response:
    verb = "GET" if body is None else "POST"
    try:
        answer = httpx.request(verb, url, json=body, timeout=None, trust_env=False)
    except httpx.HTTPError as error:
        raise ConfigError(
            f"no vLLM server answers at {url} ({error}); check the address, or start the server"
        ) from error
    if answer.is_error and answer.status_code not in allowed:
        raise ConfigError(
            f"the vLLM server returned HTTP {answer.status_code} for {url} "
            f"({answer.text[:300]}); see the server's log for the cause"
        )
    return answer
