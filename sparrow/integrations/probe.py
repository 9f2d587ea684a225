"""Acceptance of a sparse actor that is served by somebody else's vLLM, over its OpenAI-compatible HTTP alone.

For trainers that ask vLLM for the sampled tokens' log-probs only, but leave its server reachable. Responses are sampled
under the server's schedule with the actor's top-n lists; then prompt and response go back as one prompt, which vLLM
prefills densely, without its prefix cache because it is asked for the prompt's log-probs: the policy's top-n lists, of
the same weights in the same precision. From two lists follow bounds on the acceptance rate (``acceptance_bounds``).
vLLM knows a prompt's log-probs at temperature 1 only, so that is the temperature.

Shapes: T response tokens, n entries of a top-n list.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import numpy as np

from sparrow.errors import ConfigError
from sparrow.measure import TokenAcceptance
from sparrow.mismatch import acceptance_bounds
from sparrow.schedule import SparsitySchedule

CONNECTIONS = 64


def probe(
    urls: Sequence[str],
    prompts: Sequence[Sequence[int]],
    schedule: SparsitySchedule,
    max_new_tokens: int,
    top_n: int = 20,
) -> list[TokenAcceptance]:
    """Sample one response per prompt (token ids), spread over the servers, and bound every token's acceptance.

    Args:
        urls: of vLLM servers of the same weights, such as ``http://10.0.0.1:8000``.
        prompts: token ids.
        schedule: what the servers decode under; it places the tokens in its bins.
        max_new_tokens: responses are cut here.
        top_n: length of both lists; vLLM allows 20 unless told otherwise.

    Raises ConfigError: a server that does not answer, or not with what was asked for.
    """
    served = {url: _request(f"{url}/v1/models")["data"][0]["id"] for url in dict.fromkeys(urls)}

    def one(i: int) -> TokenAcceptance:
        url, prompt = urls[i % len(urls)], [int(token) for token in prompts[i]]
        common = {"model": served[url], "temperature": 1.0, "return_tokens_as_token_ids": True}
        sampled = _choice(url, common | {"prompt": prompt, "max_tokens": max_new_tokens, "logprobs": top_n})
        logprobs = sampled["logprobs"]
        response = [_token(text) for text in logprobs["tokens"]]
        actor = [{_token(text): value for text, value in entry.items()} for entry in logprobs["top_logprobs"]]
        scored = _choice(url, common | {"prompt": prompt + response, "max_tokens": 1, "prompt_logprobs": top_n})
        policy = [
            {int(token): entry["logprob"] for token, entry in position.items()}
            for position in scored["prompt_logprobs"][len(prompt) :]
        ]
        p_ids, p = _lists(policy, top_n)
        q_ids, q = _lists(actor, top_n)
        bounds = acceptance_bounds(q_ids, q, p, p_ids)
        return TokenAcceptance(bounds.lower, bounds.upper, schedule.page_end(len(prompt) + np.arange(len(response))))

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        return list(pool.map(one, range(len(prompts))))


def _lists(positions: Sequence[dict[int, float]], top_n: int) -> tuple[np.ndarray, np.ndarray]:
    """Ids and log-probs ``[T, n]``, best first; the token itself is left out where it is not among the n best."""
    best = [sorted(entries.items(), key=lambda item: -item[1])[:top_n] for entries in positions]
    pairs = np.array(best, dtype=np.float64)
    return pairs[..., 0].astype(np.int64), pairs[..., 1]


def _token(text: str) -> int:
    return int(text.removeprefix("token_id:"))


def _choice(url: str, body: dict[str, Any]) -> dict[str, Any]:
    return _request(f"{url}/v1/completions", body)["choices"][0]


def _request(url: str, body: dict[str, Any] | None = None) -> Any:
    try:
        answer = httpx.request("POST" if body else "GET", url, json=body, timeout=None, trust_env=False)
    except httpx.HTTPError as error:
        raise ConfigError(f"no vLLM server answers at {url}: {error}") from error
    if answer.is_error:
        raise ConfigError(f"the vLLM server refused {url}: {answer.status_code} {answer.text[:300]}")
    return answer.json()
