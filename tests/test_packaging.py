"""What is built from the sources suffices: a wheel in a fresh environment runs away from the clone."""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from pathlib import Path

ROOT = Path(__file__).parent.parent
USES = """
import sparrow
from sparrow.cli import main
from sparrow.commands.demo import Demo
from sparrow.schedule import SparsitySchedule

print(sparrow.__file__)
assert SparsitySchedule.preset("qwen3-4b", target=0.86).top_k and Demo().training().task == "trace:lines=24"
main("eval --model reasoner --benchmark trace:lines=2 --limit 1 --k 1 --max-new-tokens 4 --out out".split())
"""


def test_the_wheel_runs_away_from_the_clone(tmp_path):
    sources, built, env = tmp_path / "sources", tmp_path / "built", tmp_path / "env"
    built.mkdir()
    shutil.copytree(ROOT / "sparrow", sources / "sparrow", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, sources)
    code = f"from setuptools import build_meta as b; b.build_sdist({str(built)!r}); b.build_wheel({str(built)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=sources, check=True, capture_output=True)
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {"sparrow/py.typed", "sparrow/presets.json", "sparrow/reasoner/model.safetensors"} <= inside
    venv.create(env, with_pip=False)
    (site,) = (env / "lib").glob("python*/site-packages")
    shutil.unpack_archive(wheel, site, "zip")
    # What the wheel depends on is this environment's; its own .pth files, an editable Sparrow's too, are not read.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [env / "bin" / "python", "-c", USES], cwd=tmp_path, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"{site}/") and "| trace:lines=2 |" in done.stdout
    assert (site / "sparrow" / "py.typed").exists()
