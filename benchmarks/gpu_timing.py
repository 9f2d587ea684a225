"""Time GPU work launched by the host. For CUDA graphs, use ``sparrow.attention.triton.timing``."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch


def milliseconds(work: Callable[[], Any], repeats: int = 5) -> float:
    """Return the median GPU time of ``work``. The host launches it anew each time."""
    work()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
