"""Test how launches in a CUDA graph are timed, with a simulated clock."""

import contextlib

import pytest
import torch

pytest.importorskip("triton")

from sparrow.attention.triton.timing import timed


@pytest.fixture
def clock(monkeypatch):
    """Make successive replays of a graph take 1, 2, 3, ... ms, and return a list that collects all
    launches.
    """
    launched = []
    now = {"ms": 0.0, "replays": 0}

    class Graph:
        def replay(self):
            now["replays"] += 1
            now["ms"] += now["replays"] - 1  # the first replay is not measured

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = now["ms"]

        def elapsed_time(self, end):
            return end.ms - self.ms

    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: contextlib.nullcontext())
    return launched


def test_launch_times_are_reported_as_median_and_spread(clock):
    launches = [lambda: clock.append("a"), lambda: clock.append("b")]
    times = timed(launches, replays=11, rounds=2)
    # The replays take 1 to 11 ms, and each contains four launches.
    assert times == {"us": 6_000 / 4, "p10": 2_000 / 4, "p90": 10_000 / 4}
    assert clock == ["a", "b"] + ["a", "b"] * 2  # once for compilation, and twice in the graph
