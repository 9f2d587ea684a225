"""Test that benchmarks start engines in separate processes, which measure one after another."""

import importlib
import json
import os
import textwrap
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENGINE = """
    import json, os, sys, time
    from pathlib import Path

    name, folder = sys.argv[1], Path(sys.argv[2])
    sys.stdin.readline()
    if name == "broken":
        raise ValueError("out of memory")
    began = time.time()
    time.sleep(0.5)
    Path(os.environ["SPARROW_BENCHMARK_READY"]).touch()
    ready = time.time()
    sys.stdin.readline()
    measured = time.time()
    time.sleep(0.2)
    times = {"began": began, "ready": ready, "measured": measured, "ended": time.time()}
    (folder / f"{name}.json").write_text(json.dumps({"points": [times]}))
"""


@pytest.fixture
def engines(tmp_path, monkeypatch):
    """Return a function that runs stand-ins for engines and returns their results by name."""
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    processes = importlib.import_module("processes")
    script = tmp_path / "engine.py"
    script.write_text(textwrap.dedent(ENGINE))

    def start(name):
        written = tmp_path / f"{name}.json"
        command = [str(script), name, str(tmp_path)]
        return processes.EngineProcess(command, written, tmp_path / f"{name}.log", os.environ)

    def run(*names, together):
        return dict(processes.in_turn(names, start, time.time() + 100, together))

    return run


def test_engines_that_start_side_by_side_measure_one_after_another(engines):
    found = engines("first", "second", "third", together=2)
    first, second, third = (found[name]["points"][0] for name in ("first", "second", "third"))
    assert max(first["began"], second["began"]) < min(first["ready"], second["ready"])
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
