"""Test that every script starts on any machine, and that measured shapes match the cost model's."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from sparrow.cost import SHAPES, ModelShape

ROOT = Path(__file__).parents[2]
FOLDERS = ("benchmarks", "studies/reasoner", "studies/text")
SCRIPTS = sorted(
    str(path.relative_to(ROOT))
    for folder in FOLDERS
    for path in (ROOT / folder).glob("*.py")
    if "parser(__doc__" in path.read_text(encoding="utf-8")
)


HELP = """
import contextlib, io, json, os, runpy, sys, traceback

root, found, path = sys.argv[1], {}, list(sys.path)
for name in sys.argv[2:]:
    script, output, code = os.path.join(root, name), io.StringIO(), None
    sys.argv, sys.path[:] = [script, "--help"], [os.path.dirname(script), *path]
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as ended:
            code = ended.code
        except BaseException:
            traceback.print_exc()
    found[name] = [code, output.getvalue()]
    for module, of in list(sys.modules.items()):
        file = getattr(of, "__file__", None) or ""
        if file.startswith((os.path.join(root, "benchmarks"), os.path.join(root, "studies"))):
            del sys.modules[module]
print(json.dumps(found))
"""
"""Prints each script's exit status and output. All scripts run in one process, so that vLLM is
imported only once. The scripts' own modules are imported again for each script.
"""


def missing(name: str) -> str | None:
    """Return the first optional package that a script mentions and that is not installed."""
    text = (ROOT / name).read_text(encoding="utf-8")
    absent = (module for module in ("vllm", "triton") if find_spec(module) is None)
    return next((module for module in absent if module in text), None)


@pytest.fixture(scope="module")
def helps():
    """Return the exit status and output of ``--help`` for every script that can start here."""
    scripts = [name for name in SCRIPTS if missing(name) is None]
    done = subprocess.run(
        [sys.executable, "-c", HELP, str(ROOT), *scripts],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_prints_its_help(helps, name):
    if absent := missing(name):
        pytest.skip(f"no {absent}")
    code, output = helps[name]
    first = (ROOT / name).read_text(encoding="utf-8").split('"""')[1].splitlines()[0]
    assert code == 0 and first in output, output[-2000:]


WITH_FULL_ATTENTION = [name for name in SHAPES if not SHAPES[name].is_hybrid]


@pytest.mark.parametrize("name", WITH_FULL_ATTENTION)
def test_measured_shapes_match_the_cost_model(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from common import qwen3

    found, priced = ModelShape.from_config(qwen3(name).to_dict()), SHAPES[name]
    assert (found.weights, found.embedding, found.kv_width) == (
        priced.weights,
        priced.embedding,
        priced.kv_width,
    )
