"""Time kernels in CUDA graphs, and measure memory bandwidth."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl


def timed(
    launches: Sequence[Callable[[], Any]], replays: int = 15, rounds: int = 2
) -> dict[str, float]:
    """Time replays of a CUDA graph that contains all ``launches``. Return the median, the 10th
    percentile and the 90th percentile of the time per launch, in microseconds.
    """
    for launch in launches:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            for launch in launches:
                launch()
    graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times = sorted(
        begin.elapsed_time(end) * 1e3 / (rounds * len(launches)) for begin, end in events
    )
    return dict(
        us=statistics.median(times), p10=times[replays // 10], p90=times[-1 - replays // 10]
    )


def read_limit(nbytes: int = 2**33) -> float:
    """Measure read bandwidth, in bytes per second, with a kernel that reads ``nbytes`` bytes once
    and writes almost nothing.
    """
    x = torch.randint(0, 9, (nbytes // 4,), dtype=torch.int32, device="cuda")
    out = torch.empty(triton.cdiv(x.numel(), 4096), dtype=torch.int32, device="cuda")
    best = 0.0
    for block, warps in ((4096, 4), (8192, 4), (8192, 8), (16384, 8)):
        grid = (triton.cdiv(x.numel(), block),)
        launch = lambda: read_kernel[grid](x, out, x.numel(), block, num_warps=warps)  # noqa: B023, E731
        best = max(best, x.nbytes / timed([launch], replays=8, rounds=1)["us"] * 1e6)
    return best


@triton.jit
def read_kernel(x, out, count, BLOCK: tl.constexpr):
    offset = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offset, mask=offset < count, other=0)
    tl.store(out + tl.program_id(0), tl.sum(value, 0))
