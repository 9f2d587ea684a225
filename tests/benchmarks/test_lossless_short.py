"""Test the benchmark for short contexts. Three simulated engines run on a clock that the tests
control.
"""

import importlib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm.version")

ROOT = Path(__file__).parents[2]
ROWS = 4


@pytest.fixture(scope="module")
def short():
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("lossless_short")


class Bench:
    """An engine whose results arrive one step late. After a pause, the first result is available at
    once, and the GPU is idle.
    """

    def __init__(self, clock, step_s, restart_s):
        self.clock, self.step_s, self.restart_s = clock, step_s, restart_s
        self.running = [SimpleNamespace(num_output_tokens=0) for _ in range(ROWS)]
        self.llm, self.kv_tokens = SimpleNamespace(llm_engine=self), 160_000
        self.scheduler = SimpleNamespace(
            _last="before the pause", chooser=SimpleNamespace(choices=[0, 4], chosen={})
        )
        self.served, self.since_pause, self.cleared = ROWS, 0, []

    def step(self):
        self.since_pause += 1
        self.clock.now += (
            [0.0, self.restart_s][self.since_pause - 1] if self.since_pause <= 2 else self.step_s
        )
        self.cleared.append(self.scheduler._last is None)
        self.scheduler._last = "a step"
        for request in self.running:
            request.num_output_tokens += 1


class InThisProcess:
    """A stand-in for an engine's process pool."""

    def __init__(self, engine):
        self.engine = engine

    def submit(self, _, method, *arguments):
        result = getattr(self.engine, method)(*arguments)
        return SimpleNamespace(result=lambda: result)


@pytest.fixture
def engines(short, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    benches = {
        "stock": Bench(clock, 0.010, 0.002),
        "lossless": Bench(clock, 0.008, 0.050),
        "control": Bench(clock, 0.0125, 0.002),
    }

    def synchronised():
        for bench in benches.values():
            if bench.since_pause:  # one step is in flight when a turn ends
                clock.now += bench.step_s
            bench.since_pause = 0
        return clock.now

    monkeypatch.setattr(short, "clock", synchronised)
    monkeypatch.setattr(short, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(short, "gc", SimpleNamespace(collect=lambda: 0, freeze=lambda: None))
    monkeypatch.setattr(short, "begin", lambda bench, _: bench.step())
    monkeypatch.setattr(short, "accept", lambda bench, rate: setattr(bench, "rate", rate))
    monkeypatch.setattr(
        short, "abandon", lambda bench, _: bench.spent.update(schedule=6e-6, steps=2)
    )
    monkeypatch.setattr(short, "scheduler", lambda bench: bench.scheduler)
    monkeypatch.setattr(
        short, "generated", lambda bench: sum(r.num_output_tokens for r in bench.running)
    )
    # These seconds were spent before the measured state began.
    monkeypatch.setattr(short, "clock_parts", lambda _: Counter({"schedule": 7.0}))
    pools = {
        name: InThisProcess(short.Engine(bench, name == "lossless"))
        for name, bench in benches.items()
    }
    for pool in pools.values():
        pool.engine.bench.spent = pool.engine.spent
    return pools


def test_ratio_excludes_the_cost_of_pauses(short, engines, monkeypatch):
    monkeypatch.setattr(short, "TURN_S", 0.1)
    monkeypatch.setattr(short, "GROWTH", 512)
    result = short.side_by_side(engines, ROWS, 1024, None)
    assert result["host_us"]["stock"] == pytest.approx(
        {**dict.fromkeys(short.PARTS, 0.0), "schedule": 3.0}
    )
    assert result["control"] == pytest.approx([0.8] * 3)
    assert result["tokens_per_s"] == pytest.approx(
        {"stock": ROWS / 0.010, "lossless": 500, "control": 320}
    )
    of_both = [
        sum(turn[i] for name in ("stock", "control") for turn in result["turns"][name])
        for i in range(4)
    ]
    assert result["ratio"] == pytest.approx([500 * of_both[1] / of_both[0]] * 3, rel=0.01)
    assert 320 < of_both[0] / of_both[1] < 400
    ours = [sum(turn[i] for turn in result["turns"]["lossless"]) for i in range(4)]
    assert result["with_pauses"] == pytest.approx(ours[2] / ours[3] * of_both[3] / of_both[2])
    assert (
        result["with_pauses"] < 0.96 * result["ratio"][0]
    )  # one of our turns starts with an extra 48 ms
    assert max(result["grown"].values()) == 512
    assert all(
        one[0] < one[2] and one[1] < one[3] for turns in result["turns"].values() for one in turns
    )


def test_turns_stop_at_the_time_limit_before_sequences_are_fully_grown(short, engines, monkeypatch):
    monkeypatch.setattr(short, "SECONDS", 2.0)
    result = short.side_by_side(engines, ROWS, 1024, None)
    assert max(result["grown"].values()) < short.GROWTH / 2
    took = sum(turn[3] for turns in result["turns"].values() for turn in turns)
    assert 2.0 <= took < 2.0 + 3 * 2 * short.TURN_S  # a round that has started is completed


def test_sequence_growth_is_limited_by_the_smallest_cache_and_the_context(short, engines):
    result = short.side_by_side(engines, ROWS, short.CONTEXT - 280, None)
    assert max(result["grown"].values()) == 280 - short.BLOCK - short.SPARE
    engines["lossless"].engine.bench.kv_tokens = 1400 * ROWS
    result = short.side_by_side(engines, ROWS, 1024, None)
    assert max(result["grown"].values()) == 1400 - 1024 - short.BLOCK - short.SPARE


@pytest.mark.parametrize(("rate", "numbers"), [(None, (0,)), (0.9, (0, 4))])
def test_each_state_begins_with_a_fresh_chooser(short, engines, monkeypatch, rate, numbers):
    monkeypatch.setattr(short, "GROWTH", 64)
    # This state has no drafts. In the next one, numbers of drafts are chosen again.
    short.side_by_side(engines, ROWS, 1024, None)
    bench = engines["lossless"].engine.bench
    before = bench.scheduler.chooser
    bench.step = lambda: (Bench.step(bench), bench.scheduler.chooser.chosen.__setitem__(0, 5))
    result = short.side_by_side(engines, ROWS, 1024, rate)
    assert bench.scheduler.chooser is not before and bench.scheduler.chooser.choices == numbers
    assert result["cycles_by_drafts"] == {0: 5} and getattr(bench, "rate", None) == rate
    assert not hasattr(engines["stock"].engine.bench, "rate")


def test_times_measured_before_a_pause_are_discarded(short, engines):
    ours = engines["lossless"].engine
    ours.turn(10**9)
    # Nothing is recorded until the first results after the pause have arrived.
    assert ours.bench.cleared[: short.UNDER_WAY + 2] == [True] * (short.UNDER_WAY + 1) + [False]


def test_each_part_of_a_step_is_timed(short, monkeypatch):
    now = SimpleNamespace(s=0.0)

    def part(seconds):
        def run(given, doubled=False):
            now.s += seconds
            return given * (2 if doubled else 1)

        return run

    monkeypatch.setattr(short, "time", SimpleNamespace(perf_counter=lambda: now.s))
    parts = {"schedule": part(3.0), "update_from_output": part(2.0)}
    core = SimpleNamespace(
        scheduler=SimpleNamespace(**parts),
        model_executor=SimpleNamespace(execute_model=part(5.0), sample_tokens=part(7.0)),
    )
    engine = SimpleNamespace(engine_core=SimpleNamespace(engine_core=core))
    spent = short.clock_parts(SimpleNamespace(llm=SimpleNamespace(llm_engine=engine)))
    for step in range(2):
        assert core.scheduler.schedule(step, doubled=True) == 2 * step
        core.model_executor.execute_model(step)
        core.model_executor.sample_tokens(step)
        core.scheduler.update_from_output(step)
    assert spent == {
        "schedule": 6.0,
        "execute_model": 10.0,
        "sample_tokens": 14.0,
        "update_from_output": 4.0,
        "steps": 2,
    }
