"""Every script starts, whatever machine it measures, and the shapes that are measured are those
that are priced.
"""

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


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_explains_itself(name):
    script = ROOT / name
    text = script.read_text(encoding="utf-8")
    for module in ("vllm", "triton"):
        if module in text and find_spec(module) is None:
            pytest.skip(f"no {module}")
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script, "--help"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0 and text.split('"""')[1].splitlines()[0] in done.stdout, (
        done.stderr[-2000:]
    )


@pytest.mark.parametrize("name", SHAPES)
def test_a_measured_shape_has_the_parameters_that_are_priced(name, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    from common import qwen3

    found, priced = ModelShape.from_config(qwen3(name).to_dict()), SHAPES[name]
    assert (found.weights, found.embedding, found.kv_width) == (
        priced.weights,
        priced.embedding,
        priced.kv_width,
    )
