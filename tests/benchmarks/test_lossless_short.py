"""What the benchmark of short contexts makes of the steps of three engines, on a clock that the test moves."""

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


class Engine:
    """Results come one step late: after a pause the first is there at once, and the GPU has nothing to do at first."""

    def __init__(self, clock, step_s, restart_s):
        self.clock, self.step_s, self.restart_s = clock, step_s, restart_s
        self.running = [SimpleNamespace(num_output_tokens=0) for _ in range(ROWS)]
        self.llm = SimpleNamespace(llm_engine=self)
        self.scheduler = SimpleNamespace(_last="before the pause")
        self.served, self.since_pause, self.cleared = ROWS, 0, []

    def step(self):
        self.since_pause += 1
        self.clock.now += [0.0, self.restart_s][self.since_pause - 1] if self.since_pause <= 2 else self.step_s
        self.cleared.append(self.scheduler._last is None)
        self.scheduler._last = "a step"
        for request in self.running:
            request.num_output_tokens += 1


@pytest.fixture
def engines(short, monkeypatch):
    clock = SimpleNamespace(now=0.0)
    benches = {
        "stock": Engine(clock, 0.010, 0.002),
        "lossless": Engine(clock, 0.008, 0.050),
        "control": Engine(clock, 0.0125, 0.002),
    }

    def synchronised():
        for engine in benches.values():
            if engine.since_pause:  # one step is under way when a turn ends
                clock.now += engine.step_s
            engine.since_pause = 0
        return clock.now

    monkeypatch.setattr(short, "clock", synchronised)
    monkeypatch.setattr(short, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(short, "gc", SimpleNamespace(collect=lambda: 0, freeze=lambda: None))
    monkeypatch.setattr(short, "begin", lambda *_: None)
    monkeypatch.setattr(short, "abandon", lambda *_: None)
    monkeypatch.setattr(short, "scheduler", lambda bench: bench.scheduler)
    monkeypatch.setattr(short, "generated", lambda bench: sum(r.num_output_tokens for r in bench.running))
    return benches


def test_the_ratio_leaves_out_what_pauses_cost(short, engines, monkeypatch):
    monkeypatch.setattr(short, "GROWTH", 512)
    spent = {name: Counter({"schedule": 7.0}) for name in engines}  # before the state
    monkeypatch.setattr(short, "abandon", lambda *_: [of.update(schedule=6e-6, steps=2) for of in spent.values()])
    result = short.side_by_side(engines, spent, ROWS, 1024)
    assert result["host_us"]["stock"] == pytest.approx({**dict.fromkeys(short.PARTS, 0.0), "schedule": 3.0})
    assert result["control"] == pytest.approx([0.8] * 3)
    assert result["tokens_per_s"] == pytest.approx({"stock": ROWS / 0.010, "lossless": 500, "control": 320})
    of_both = [sum(turn[i] for name in ("stock", "control") for turn in result["turns"][name]) for i in (0, 1)]
    assert result["ratio"] == pytest.approx([500 * of_both[1] / of_both[0]] * 3, rel=0.01)
    assert 320 < of_both[0] / of_both[1] < 400
    assert result["with_pauses"] < 0.96 * result["ratio"][0]  # a turn of ours begins with 48 ms more
    assert max(result["grown"].values()) == 512
    assert all(one[0] < one[2] and one[1] < one[3] for turns in result["turns"].values() for one in turns)


def test_turns_end_after_some_seconds_if_growing_takes_longer(short, engines, monkeypatch):
    monkeypatch.setattr(short, "SECONDS", 2.0)
    spent = {name: Counter[str]() for name in engines}
    monkeypatch.setattr(short, "abandon", lambda *_: [of.update(steps=1) for of in spent.values()])
    result = short.side_by_side(engines, spent, ROWS, 1024)
    assert max(result["grown"].values()) < short.GROWTH / 2
    took = sum(turn[3] for turns in result["turns"].values() for turn in turns)
    assert 2.0 <= took < 2.0 + 3 * 2 * short.TURN_S  # a round that has begun goes on to its end


def test_times_from_before_a_pause_are_forgotten(short, engines):
    ours = engines["lossless"]
    short.turn(ours, 10**9)
    # Before a step: what was noted is gone until the first results after the pause are out.
    assert ours.cleared[: short.UNDER_WAY + 2] == [True] * (short.UNDER_WAY + 1) + [False]


def test_parts_of_a_step_are_timed(short, monkeypatch):
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
