"""``VLLMServer``: the sparse actor in a ``vllm serve`` of its own, spoken to over HTTP in token ids.

Shapes: T response tokens, n entries of a top-n list.
"""

from __future__ import annotations

import http.client
import json
import queue
import re
import threading
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from sparrow.engines.base import Counters, Rollout, Sampling
from sparrow.engines.vllm.client import Client
from sparrow.errors import ConfigError, EngineError
from sparrow.schedule import SparsitySchedule

CONNECTIONS = 256
"""Requests under way at a time; vLLM would queue more than that too."""
ANSWER_S = 600.0
"""Longest wait for an answer to anything but a prompt."""
CHECK_S, STALL_S = 15.0, 300.0
"""How often a server that answers no prompt is asked whether it makes progress, and for how long it may make none."""
FAREWELL_S = 5.0
"""Longest wait, after an error, for requests under way to notice that the server is gone."""


class VLLMServer(Client):
    """Rollouts by a running vLLM server on this machine.

    Start it with ``VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --attention-backend CUSTOM --additional-config
    '{"sparrow": SCHEDULE}' --logprobs-mode processed_logprobs --max-logprobs -1``, with ``--enable-scale-out`` from
    0.32 on (the endpoint for token ids is off by default there), and ``--enable-sleep-mode`` to use ``sleep``.

    Args:
        url: such as ``http://localhost:8000``.
        schedule: what the actor may read; where its page counts differ from the server's, they are set at once.
        leads: whether this client controls the server; of several processes that share it, one does.

    Raises EngineError: no server. ConfigError: one that does not run Sparrow or cannot be controlled.
    """

    def __init__(self, url: str, schedule: SparsitySchedule, leads: bool = True) -> None:
        self._url = url.rstrip("/")
        self._leads = leads
        self.connect(json.loads(self._request("GET", "/v1/models"))["data"][0]["max_model_len"])
        if schedule != self.schedule:
            self.set_schedule(schedule)

    def generate(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[Rollout]:
        """See ``Engine.generate``.

        Raises EngineError: the server died, refused a prompt, or generated nothing for ``STALL_S``.
        """
        sampling.check(prompts, self.context)
        seeds = sampling.request_seeds(len(prompts))

        def one(i: int) -> Rollout:
            # The server puts the sampled token in front and then cuts the list to the number asked for.
            parameters = dict(
                max_tokens=sampling.max_new_tokens, temperature=sampling.temperature, logprobs=sampling.top_n + 1,
                seed=seeds[i], detokenize=False,
            )  # fmt: skip
            body = {"token_ids": [int(token) for token in prompts[i]], "sampling_params": parameters}
            answer = json.loads(self._request("POST", "/inference/v1/generate", body, timeout=None))
            return _rollout(prompts[i], answer["choices"][0], sampling.top_n)

        return self._answers(one, len(prompts))

    def _answers(self, one: Callable[[int], Rollout], count: int) -> list[Rollout]:
        """``one(i)`` for all ``i`` below ``count``."""
        waiting = iter(range(count))
        answers: queue.SimpleQueue[tuple[int, Rollout | BaseException]] = queue.SimpleQueue()

        def work() -> None:
            for i in waiting:
                try:
                    answers.put((i, one(i)))
                except BaseException as error:
                    answers.put((i, error))

        # A server that hangs must not keep this process from ending.
        threads = [threading.Thread(target=work, daemon=True) for _ in range(min(CONNECTIONS, count))]
        for thread in threads:
            thread.start()
        found: dict[int, Rollout] = {}
        tokens, since = -1, time.monotonic()
        try:
            while len(found) < count:
                try:
                    i, answer = answers.get(timeout=CHECK_S)
                except queue.Empty:
                    now = self._generated()
                    if now != tokens:
                        tokens, since = now, time.monotonic()
                    elif time.monotonic() - since > STALL_S:
                        raise EngineError(
                            f"the vLLM server at {self._url} has generated nothing for {STALL_S:.0f} s; start it "
                            "again and go on with --resume"
                        ) from None
                    continue
                if isinstance(answer, BaseException):
                    raise answer
                found[i] = answer
                tokens, since = -1, time.monotonic()
            return [found[i] for i in range(count)]
        finally:
            # A thread at work while Python ends can abort the process.
            deque(waiting, maxlen=0)
            deadline = time.monotonic() + FAREWELL_S
            for thread in threads:
                thread.join(max(0.0, deadline - time.monotonic()))

    def _generated(self) -> int:
        """Tokens the server has read and written since it was started; -1 if it does not say."""
        try:
            return self._total("(?:prompt|generation)_tokens", CHECK_S)
        except EngineError:
            return -1

    def _total(self, counter: str, timeout: float = ANSWER_S) -> int:
        """Sum of the server's counters whose name matches, since it was started."""
        metrics = self._request("GET", "/metrics", timeout=timeout).decode()
        return int(sum(map(float, re.findall(rf"^vllm:{counter}_total\{{[^}}]*\}} (\S+)", metrics, re.M))))

    def update_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        if self._leads:
            super().update_weights(weights)
        else:
            deque(weights, maxlen=0)

    def set_schedule(self, schedule: SparsitySchedule) -> None:
        if self._leads:
            super().set_schedule(schedule)
        else:
            self.schedule = schedule

    def counters(self) -> Counters:
        """See ``Engine.counters``; the client that leads counts for all."""
        return super().counters() if self._leads else Counters(0, 0)

    def rpc(self, method: str, *args: Any) -> list[Any]:
        try:
            return json.loads(self._request("POST", "/collective_rpc", {"method": method, "args": args}))["results"]
        except HTTPStatusError as error:
            remedy = "VLLM_SERVER_DEV_MODE=1" if error.status == 404 else "a Sparrow schedule that allows this"
            raise ConfigError(
                f"the vLLM server at {self._url} refused {method} ({error}); start it with {remedy}"
            ) from error

    def reset_prefix_cache(self) -> bool:
        answer = self._request("POST", "/reset_prefix_cache")
        return json.loads(answer)["success"] if answer else True

    def preempted(self) -> int:
        return self._total("num_preemptions")

    def sleep(self) -> None:
        """See ``Engine.sleep``; needs ``--enable-sleep-mode``."""
        if self._leads:
            self._request("POST", "/sleep?level=1")

    def wake(self) -> None:
        if self._leads:
            self._request("POST", "/wake_up")

    def close(self) -> None:
        """Nothing: who started the server stops it."""

    def _request(
        self, verb: str, path: str, body: dict[str, Any] | None = None, timeout: float | None = ANSWER_S
    ) -> bytes:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._url + path, data, {"Content-Type": "application/json"}, method=verb)
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            raise HTTPStatusError(error.code, path, error.read().decode(errors="replace")[:500]) from error
        except (OSError, http.client.HTTPException) as error:
            reason = getattr(error, "reason", error)
            raise EngineError(
                f"no vLLM server answers at {self._url} ({reason}); start one, and go on with --resume if it had died"
            ) from error


class HTTPStatusError(EngineError):
    """What the server refused, and why."""

    def __init__(self, status: int, path: str, text: str) -> None:
        super().__init__(status, path, text)
        self.status = status

    def __str__(self) -> str:
        status, path, text = self.args
        return f"the vLLM server answered {path} with HTTP {status} ({text}); its own log says why"


def _rollout(prompt: Sequence[int], choice: dict[str, Any], top_n: int) -> Rollout:
    content = choice["logprobs"]["content"]
    top_ids = np.zeros((len(content), top_n), dtype=np.int32)
    top_logprobs = np.zeros((len(content), top_n), dtype=np.float32)
    for t, position in enumerate(content):
        best = sorted(position["top_logprobs"], key=lambda entry: -entry["logprob"])[:top_n]
        top_ids[t] = [_token_id(entry) for entry in best]
        top_logprobs[t] = [entry["logprob"] for entry in best]
    return Rollout(
        prompt_ids=prompt,
        response_ids=np.asarray(choice["token_ids"], dtype=np.int64),
        logprobs=np.asarray([position["logprob"] for position in content], dtype=np.float32),
        top_ids=top_ids,
        top_logprobs=top_logprobs,
        finish_reason="stop" if choice["finish_reason"] == "stop" else "length",
    )


def _token_id(entry: dict[str, Any]) -> int:
    # 0.32 sends numbers, older versions "token_id:17".
    return entry["token_id"] if "token_id" in entry else int(entry["token"].removeprefix("token_id:"))
