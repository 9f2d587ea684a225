"""The rollout traces used by ``rollout.py``: the response lengths and, for each step, the cached
tokens of every running request.

Requests join in order of arrival as soon as there is room, and are never preempted. A trace
therefore depends only on the response lengths, not on step times.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np

from sparrow.cost import response_lengths

MEDIAN, CUTOFF, PROMPT = 12_000, 32_768, 256
SLOTS = {"qwen3-1.7b": 80, "qwen3-4b": 56, "qwen3-8b": 56, "qwen3-14b": 48}
"""Maximum number of concurrent requests: the largest multiple of 8 for which the whole trace fits
in an H200's KV cache.
"""
Span = tuple[int, np.ndarray, int]
"""A series of steps with the same requests: the number of steps, each request's cached tokens in
the first step, and the number of requests that join in the first step.
"""


def responses(requests: int) -> list[int]:
    """Return the length of each response in a trace, in tokens."""
    return response_lengths(MEDIAN, CUTOFF, requests).tolist()


def middle(tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the prompt and response lengths of a trace that is short enough to run. It generates
    only 1/64 of each response, namely the part that ends at the response's middle.
    """
    last = [max(1, n // 64) for n in tokens]
    return [PROMPT + n // 2 - m for n, m in zip(tokens, last, strict=True)], last


def simulate(prompts: Sequence[int], responses: Sequence[int], slots: int) -> list[Span]:
    """Divide a trace into spans, each lasting until a request ends. A request gets its first token
    in the step it joins.
    """
    waiting = list(range(len(responses)))[::-1]
    running: list[tuple[int, int]] = []  # last step, request
    began: dict[int, int] = {}
    spans, now = [], 0
    while waiting or running:
        joined = 0
        while waiting and len(running) < slots:
            i = waiting.pop()
            began[i] = now
            heapq.heappush(running, (now + responses[i], i))
            joined += 1
        end = running[0][0]
        lengths = np.array([prompts[i] + now - began[i] for _, i in running])
        spans.append((end - now, lengths, joined))
        now = end
        while running and running[0][0] == now:
            heapq.heappop(running)
    return spans


def most_cached(spans: Sequence[Span]) -> int:
    """Return the maximum number of cached tokens during the trace."""
    return max(int(lengths.sum()) + steps * len(lengths) for steps, lengths, _ in spans)


def states(spans: Sequence[Span], count: int) -> list[tuple[int, np.ndarray]]:
    """Divide the trace into ``count`` strata. Return the middle step of each, with the cached
    tokens of each request.
    """
    ends = np.cumsum([steps for steps, _, _ in spans])
    chosen = ((np.arange(count) + 0.5) * ends[-1] / count).astype(int)
    result = []
    for step in chosen:
        i = int(np.searchsorted(ends, step, side="right"))
        steps, lengths, _ = spans[i]
        result.append((int(step), lengths + int(step) - int(ends[i]) + steps))
    return result
