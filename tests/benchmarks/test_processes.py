"""Test that benchmarks start engines in separate processes, which measure one after another."""

import importlib
import json
import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = """
    import json, sys, time
    from pathlib import Path

    from processes import told_to_start, wait_for_turn

    name, folder = sys.argv[1], Path(sys.argv[2])
    until = told_to_start()
    if name == "broken":
        raise ValueError("out of memory")
    began = time.time()
    (folder / f"{name}.began").touch()
    other = {"first of two": "second of two", "second of two": "first of two"}.get(name, name)
    while not (folder / f"{other}.began").exists():
        time.sleep(0.01)
    time.sleep(0.5)
    ready = time.time()
    wait_for_turn()
    measured = time.time()
    time.sleep(0.2)
    times = {"began": began, "ready": ready, "measured": measured, "ended": time.time()}
    (folder / f"{name}.json").write_text(json.dumps({"points": [times], "until": until}))
    if name == "without log":
        (folder / f"{name}.log").unlink()
"""
KILLED = """
    import os, signal, sys, time
    from pathlib import Path

    from processes import EngineProcess

    stage, folder = sys.argv[1], Path(sys.argv[2])
    until = time.time() + 100
    command = [str(folder / "engine.py"), "orphan", str(folder)]
    engine = EngineProcess(command, folder / "orphan.json", folder / "orphan.log", os.environ)
    if stage == "measuring":
        engine.start(until)
        engine.wait_until_ready(until)
    os.kill(os.getpid(), signal.SIGKILL)
"""
"""A benchmark that is killed before its engine has reached a stage."""


@pytest.fixture
def script(tmp_path, monkeypatch):
    """Return a script that stands in for an engine. It can import the benchmarks' modules, but
    doesn't import vLLM.
    """
    path = [
        str(ROOT / "benchmarks"),
        str(ROOT),
        *os.environ.get("PYTHONPATH", "").split(os.pathsep),
    ]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, path)))
    (tmp_path / "rollout.py").touch()
    engine = tmp_path / "engine.py"
    engine.write_text(textwrap.dedent(ENGINE))
    return engine


@pytest.fixture
def engines(tmp_path, monkeypatch, script):
    """Return a function that runs stand-ins for engines and returns their results by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    processes = importlib.import_module("processes")

    def start(name):
        written = tmp_path / f"{name}.json"
        command = [str(script), name, str(tmp_path)]
        return processes.EngineProcess(command, written, tmp_path / f"{name}.log", os.environ)

    def run(*names, together):
        return dict(processes.in_turn(names, start, time.time() + 100, together))

    return run


def test_engines_that_start_side_by_side_measure_one_after_another(engines):
    """The first two engines wait for each other before they are ready."""
    names = ("first of two", "second of two", "third")
    found = engines(*names, together=2)
    first, second, third = (found[name]["points"][0] for name in names)
    assert first["measured"] >= second["ready"], "measured while another engine was starting"
    assert second["measured"] >= first["ended"]
    assert third["began"] >= second["ended"]


def test_engine_that_fails_to_start_does_not_hold_up_the_others(engines, tmp_path):
    found = engines("broken", "first", together=2)
    assert "out of memory" in found["broken"]["failed"]
    assert len(found["first"]["points"]) == 1
    assert (tmp_path / "broken.log").exists() and not (tmp_path / "first.log").exists()
    assert json.loads((tmp_path / "first.json").read_text()) == found["first"]
    assert not list(tmp_path.glob("*.ready"))


def test_results_are_kept_even_if_the_log_is_already_gone(engines):
    found = engines("without log", "first", together=1)
    assert len(found["without log"]["points"]) == len(found["first"]["points"]) == 1
    assert "failed" not in found["without log"]


def outcome(folder):
    """Wait until the orphaned engine has written its log or its results, and return both."""
    log = folder / "orphan.log"
    written = folder / "orphan.json"
    deadline = time.monotonic() + 60
    while "\n" not in log.read_text() and not written.exists() and time.monotonic() < deadline:
        time.sleep(0.1)
    return log.read_text(), written.exists()


@pytest.mark.parametrize("stage", ["starting", "measuring"])
def test_engine_ends_instead_of_measuring_once_its_benchmark_has_died(script, tmp_path, stage):
    benchmark = tmp_path / "benchmark.py"
    benchmark.write_text(textwrap.dedent(KILLED))
    subprocess.run([sys.executable, str(benchmark), stage, str(tmp_path)])
    log, measured = outcome(tmp_path)
    assert not measured
    assert "benchmark died" in log and log.count("\n") == 1
    assert (tmp_path / "orphan.ready").exists() == (stage == "measuring")


def test_engine_started_by_hand_measures_at_once_without_a_deadline(script, tmp_path):
    environment = {name: value for name, value in os.environ.items() if "SPARROW" not in name}
    command = [sys.executable, str(script), "alone", str(tmp_path)]
    subprocess.run(command, stdin=subprocess.DEVNULL, env=environment, check=True, timeout=60)
    assert json.loads((tmp_path / "alone.json").read_text())["until"] == float("inf")
