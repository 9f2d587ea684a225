"""``VLLMServer`` runs the sparse actor in a ``vllm serve`` process, and sends it token ids over
HTTP.

Shapes: T response tokens, n top-n list entries.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import httpx
import numpy as np
import torch
from torch import Tensor

from sparrow.decoding import Decoding
from sparrow.engines.base import Counters
from sparrow.engines.registry import Asked
from sparrow.engines.vllm.client import Client, check_mode, check_settings, refusal, rollout
from sparrow.errors import ConfigError, EngineError
from sparrow.rollout import Rollout, Sampling
from sparrow.schedule import SparsitySchedule

T = TypeVar("T")
CONNECTIONS = 256  # maximum number of requests in flight; vLLM would only queue more than that
ATTEMPTS = 3
"""How often a prompt is sent if its connection breaks before the response arrives."""
BROKEN = (httpx.ReadError, httpx.WriteError, httpx.RemoteProtocolError)
ANSWER_S = 600.0  # timeout for requests other than prompts
LISTS_REFUSED = "sample logprobs of"
"""Part of vLLM's message if lists are longer than its ``max_logprobs`` or the vocabulary."""
CHECK_S = 15.0
STALL_S = 300.0
"""While waiting for responses, check the server's progress every ``CHECK_S`` seconds. Fail after
``STALL_S`` seconds without progress. A server that responds but doesn't count tokens has no time
limit.
"""


class HTTPClient(Client):
    """An engine that samples from a running vLLM server, with or without Sparrow.

    Args:
        url: the server's address, such as ``http://localhost:8000``.
        controls: whether this client sets the server's schedule and weights.
        described: see ``Client``.

    Raises EngineError if no server answers. Raises ConfigError if the address ends in ``/v1``, or
    if workers have to be asked for their description, but the server does not run Sparrow.
    """

    _prompts_path: ClassVar[str]

    def __init__(
        self, url: str, controls: bool, described: Sequence[Mapping[str, Any]] | None = None
    ) -> None:
        self._url = url.rstrip("/")
        if self._url.endswith("/v1"):
            raise ConfigError(
                f"the server's address is {url!r}, but Sparrow also needs paths outside /v1; give "
                f"{self._url.removesuffix('/v1')!r}"
            )
        self._controls = controls
        self._served = json.loads(self._request("GET", "/v1/models"))["data"][0]
        super().__init__(self._served["max_model_len"], described)

    async def _choices(self, bodies: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        # Every prompt has its own connection. A busy server can close a connection that seems idle
        # just as the next prompt is sent on it, and httpx takes seconds to share out connections
        # among hundreds of waiting prompts.
        limits = httpx.Limits(max_keepalive_connections=0)
        in_flight = asyncio.Semaphore(CONNECTIONS)
        async with httpx.AsyncClient(
            base_url=self._url, limits=limits, timeout=None, trust_env=False
        ) as client:

            async def send(body: dict[str, Any]) -> dict[str, Any]:
                for attempt in range(1, ATTEMPTS + 1):
                    try:
                        async with in_flight:
                            answer = await client.post(self._prompts_path, json=body)
                        break
                    except BROKEN:
                        # A prompt can be sent again, because its lost response counts nowhere.
                        if attempt == ATTEMPTS:
                            raise
                return json.loads(_content(answer))["choices"][0]

            requests = [asyncio.create_task(send(body)) for body in bodies]
            waiting = set(requests)
            since = time.monotonic()
            generated: int | None = -1
            try:
                while waiting:
                    done, waiting = await asyncio.wait(
                        waiting, timeout=CHECK_S, return_when=asyncio.FIRST_EXCEPTION
                    )
                    for request in done:
                        request.result()
                    before = generated
                    generated = self._generated()
                    if done or generated is None or generated != before:
                        since = time.monotonic()
                    elif time.monotonic() - since > STALL_S:
                        raise EngineError(
                            f"the vLLM server at {self._url} has generated nothing for "
                            f"{STALL_S:.0f} s; restart it and continue with --resume"
                        )
                return [request.result() for request in requests]
            finally:
                for request in requests:
                    request.cancel()
                await asyncio.gather(*requests, return_exceptions=True)

    def _generated(self) -> int | None:
        """Return the number of tokens that the server has read and written since it started.

        The result is -1 if the server doesn't respond. It is None if the server doesn't count
        tokens, for example because it runs with ``--disable-log-stats``, or doesn't publish its
        counts.
        """
        try:
            metrics = self._request("GET", "/metrics", timeout=CHECK_S).decode()
        except HTTPStatusError as error:
            return None if error.status == 404 else -1
        except EngineError:
            return -1
        counts = re.findall(
            r"^vllm:(?:prompt|generation)_tokens_total\{[^}]*\} (\S+)", metrics, re.M
        )
        return int(sum(map(float, counts))) if counts else None

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self._controls:
            super().update_weights(weights)
        else:
            deque(weights, maxlen=0)

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        if self._controls:
            super().set_schedule(schedule)
        else:
            self.schedule = schedule

    def counters(self) -> Counters:
        """See ``Engine.counters``. The controlling client reports the counts for all clients; the
        others report zeros.
        """
        return super().counters() if self._controls else Counters(0, 0)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        body = {"method": method, "args": args}
        try:
            return json.loads(self._request("POST", "/collective_rpc", body))["results"]
        except HTTPStatusError as error:
            raise refusal(self._url, method, error.status, error.text) from error

    def reset_prefix_cache(self) -> bool:
        answer = self._request("POST", "/reset_prefix_cache")
        return json.loads(answer)["success"] if answer else True

    def sleep(self) -> None:
        """See ``Engine.sleep``. The server must run with ``--enable-sleep-mode``."""
        if self._controls:
            self._request("POST", "/sleep?level=1")

    def wake(self) -> None:
        # torch's allocator holds on to memory freed by training, so the server can't use it
        torch.cuda.empty_cache()
        if self._controls:
            self._request("POST", "/wake_up")

    def close(self) -> None:
        """Do nothing. Whoever started the server is responsible for stopping it."""

    def _request(
        self, verb: str, path: str, body: dict[str, Any] | None = None, timeout: float = ANSWER_S
    ) -> bytes:
        with self._reached():
            return _content(
                httpx.request(verb, self._url + path, json=body, timeout=timeout, trust_env=False)
            )

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except httpx.HTTPError as error:
            raise EngineError(
                f"no vLLM server answers at {self._url} ({str(error) or type(error).__name__}); "
                "start one (a training run that was cut off continues with --resume)"
            ) from error


class VLLMServer(HTTPClient):
    """An engine that samples from a running vLLM server on this machine.

    See docs/vllm.md ("Sparrow's own trainer") for how to start the server.

    Args:
        url: the server's address, such as ``http://localhost:8000``.
        schedule: a lossy actor's schedule, or a ``Decoding``. A server with other page counts
            switches to this schedule right away, except that it keeps its own draft schedule if
            none is given. The mode must match the server's. Every other
            lossless setting that differs from its default must also match, because a running server
            can't change these settings.
        controls: whether this client sets the server's schedule and weights. If processes share a
            server, exactly one of them should set this.

    Raises EngineError if no server answers. Raises ConfigError if the server does not run Sparrow,
    runs in another mode or with other lossless settings, or cannot be controlled.
    """

    _prompts_path = "/inference/v1/generate"

    def __init__(
        self, url: str, schedule: SparsitySchedule | Decoding, controls: bool = True
    ) -> None:
        super().__init__(url, controls)
        decoding = Decoding.load(schedule)
        server = f"the server at {self._url}"
        mode = self._described[0]["mode"]
        check_mode(decoding, self._described[0], server, f"use mode {mode!r}")
        if self._is_lossless:
            check_settings(decoding, self._described[0], server)
        if not decoding.has_default_schedule and decoding.schedule != self.schedule:
            self.set_schedule(decoding.schedule)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """See ``Engine.generate``.

        Raises ConfigError if the server does not allow lists of ``top_n`` tokens, or EngineError if
        the server died, refused a prompt, or generated nothing for ``STALL_S`` seconds.
        """
        self.check(prompts, sampling)
        # The server puts the sampled token first, then cuts the list to the requested length.
        common: dict[str, Any] = dict(
            max_tokens=sampling.max_new_tokens,
            temperature=sampling.temperature,
            logprobs=sampling.top_n + 1,
            detokenize=False,
            top_k=sampling.top_k or 0,
            top_p=sampling.top_p,
        )
        bodies: list[dict[str, Any]] = [
            {
                "token_ids": [int(token) for token in prompt],
                "sampling_params": {**common, "seed": seed},
            }
            for prompt, seed in zip(prompts, sampling.request_seeds(len(prompts)), strict=True)
        ]
        try:
            with self._reached():
                choices = finished(self._choices(bodies))
        except HTTPStatusError as error:
            if error.status == 400 and LISTS_REFUSED in error.text:
                raise ConfigError(
                    f"top_n is {sampling.top_n}, but the vLLM server at {self._url} does not allow "
                    f"lists this long ({error.text}); lower top_n below the size of the "
                    "vocabulary, and start the server with --max-logprobs -1"
                ) from error
            raise
        return [
            _rollout(prompt, choice, sampling.top_n)
            for prompt, choice in zip(prompts, choices, strict=True)
        ]


def _content(answer: httpx.Response) -> bytes:
    if answer.is_error:
        raise HTTPStatusError(answer.status_code, answer.url.path, answer.text[:500])
    return answer.content


def finished(work: Coroutine[Any, Any, T]) -> T:
    """Run ``work`` and return its result. If this thread already has an event loop running, as in a
    notebook, use a separate thread.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return asyncio.run(work)
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(asyncio.run, work).result()


class HTTPStatusError(EngineError):
    """Raised when the server responds with an error status. The message includes the request's path
    and the response.
    """

    def __init__(self, status: int, path: str, text: str) -> None:
        super().__init__(status, path, text)
        self.status = status
        self.text = text

    def __str__(self) -> str:
        status, path, text = self.args
        return (
            f"the vLLM server returned HTTP {status} for {path} ({text}); "
            "see the server's log for the cause"
        )


def _rollout(prompt: Sequence[int], choice: dict[str, Any], top_n: int) -> Rollout:
    """Build a ``Rollout`` from one choice in the server's response. At each position, the choice
    lists the sampled token and the most likely tokens.
    """

    def entries(position: dict[str, Any]) -> list[dict[str, Any]]:
        likeliest_first = sorted(position["top_logprobs"], key=lambda entry: -entry["logprob"])
        return [position, *likeliest_first[:top_n]]

    positions = choice["logprobs"]["content"]
    flat = [entry for position in positions for entry in entries(position)]
    shape = (len(positions), top_n + 1)
    ids = np.array([_token_id(entry) for entry in flat], np.int32).reshape(shape)
    logprobs = np.array([entry["logprob"] for entry in flat], np.float32).reshape(shape)
    return rollout(prompt, choice["token_ids"], ids, logprobs, choice["finish_reason"])


def _token_id(entry: dict[str, Any]) -> int:
    # vLLM 0.32 sends token ids as numbers; older versions send strings like "token_id:17".
    return (
        entry["token_id"] if "token_id" in entry else int(entry["token"].removeprefix("token_id:"))
    )


def start(asked: Asked) -> VLLMServer:
    """Connect to this process's server. If there are fewer servers than processes, several
    processes share a server.

    Raises ConfigError if there are more servers than processes.
    """
    from accelerate import PartialState

    urls = asked.spec.rest.split(",")
    rank = PartialState().process_index
    processes = PartialState().num_processes
    if len(urls) > processes:
        raise ConfigError(
            f"there are {len(urls)} vLLM servers for {processes} processes; pass at most one server "
            "per process"
        )
    return VLLMServer(urls[rank % len(urls)], asked.decoding, controls=rank < len(urls))
