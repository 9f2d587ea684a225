"""Test that the repository is consistent. For example, there is only one version number, CI runs
the command in the README, and every large module has tests.
"""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

import sparrow
from tests import conftest
from tests.conftest import ROOT

LARGE = 50
"""Modules with more lines need a test at the matching path or an entry in ``ELSEWHERE``."""
ELSEWHERE = {
    "attention/cuda/launch.py": "attention/cuda/test_compile.py",
    "attention/decode.py": "attention/test_reference.py",
    "attention/division.py": "attention/triton/test_tuning.py",
    "attention/triton/cache.py": "attention/triton/test_kernels.py",
    "attention/triton/forced_kernels.py": "attention/triton/test_forced.py",
    "attention/triton/forced_select.py": "attention/triton/test_forced.py",
    "attention/triton/launch.py": "attention/triton/test_kernels.py",
    "calibrate/run.py": "calibrate/test_search.py",
    "calibrate/trajectories.py": "calibrate/test_search.py",
    "cli/commands/": "cli/test_entry.py",
    "cli/loading/": "cli/commands/test_bad_input.py",
    "decoding_options.py": "cli/commands/test_modes.py",
    "engines/measure.py": "calibrate/test_search.py",
    "engines/responses.py": "engines/test_hf.py",
    "engines/vllm/client.py": "engines/vllm/test_engine.py",
    "errors.py": "cli/commands/test_bad_input.py",
    "files.py": "test_fuzz.py",
    "mismatch/tokens.py": "calibrate/test_search.py",
    "model/actor.py": "model/test_generation.py",
    "model/state.py": "model/test_generation.py",
    "report/": "report/test_report.py",
    "rewards/math_worker/": "rewards/test_math.py",
    "rewards/sandbox/": "rewards/sandbox/test_sandbox.py",
    "rewards/sandbox/inside/assertions.py": "rewards/test_assertions.py",
    "rewards/sandbox/inside/programs.py": "rewards/test_code.py",
    "rewards/sandbox/inside/watch.py": "rewards/sandbox/test_watch.py",
    "rewards/sandbox/inside/wire.py": "rewards/sandbox/test_replies.py",
    "run/": "run/test_run.py",
    "tasks/": "tasks/test_tasks.py",
    "tasks/formats.py": "tasks/test_dataset.py",
    "train/config.py": "test_settings.py",
    "train/experience.py": "train/test_trainer.py",
    "train/lora.py": "train/test_distill.py",
    "train/resume.py": "run/test_run.py",
    "train/reward.py": "train/test_collect.py",
    "train/saving.py": "train/test_trainer.py",
    "vllm/": "vllm/test_plugin.py",
    "vllm/backend.py": "engines/vllm/test_engine.py",
    "vllm/lossless/": "vllm/test_lossless.py",
    "vllm/lossless/draft_budget.py": "vllm/lossless/test_chooser.py",
    "vllm/lossless/draft_length.py": "vllm/lossless/test_chooser.py",
    "vllm/lossless/measured.py": "vllm/lossless/test_chooser.py",
    "vllm/lossless/setup.py": "vllm/test_lossless_parts.py",
}
"""Modules and folders in ``sparrow/`` that have no test at the matching path, and the file in
``tests/`` that tests them instead.
"""


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def untested(package: Path, tests: Path, elsewhere: dict[str, str]) -> list[str]:
    """Return modules that have more than ``LARGE`` lines but no test at the matching path. Modules
    are left out if they or their folder are listed in ``elsewhere``.
    """
    missing = []
    for path in sorted(package.rglob("*.py")):
        module = path.relative_to(package)
        listed = {str(module), *(f"{folder}/" for folder in module.parents)} & set(elsewhere)
        large = (
            path.name != "__init__.py"
            and len(path.read_text(encoding="utf-8").splitlines()) > LARGE
        )
        if large and not listed and not (tests / module.parent / f"test_{path.name}").exists():
            missing.append(str(module))
    return missing


def test_every_large_module_has_a_test_at_the_matching_path_or_a_listed_test():
    package, tests = ROOT / "sparrow", ROOT / "tests"
    assert untested(package, tests, ELSEWHERE) == []
    for module, test in ELSEWHERE.items():
        assert (package / module).exists() and (tests / test).exists(), f"{module}: {test}"
        mirrored = tests / Path(module).parent / f"test_{Path(module).name}"
        assert module.endswith("/") or not mirrored.exists(), (
            f"{module} is tested by {mirrored.name}; remove it from ELSEWHERE"
        )


def test_a_large_module_without_a_test_is_reported(tmp_path):
    for name, lines in {
        "a/new.py": LARGE + 1,
        "a/small.py": LARGE,
        "a/b/listed.py": 99,
        "mirrored.py": 99,
    }.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("pass\n" * lines)
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_mirrored.py").touch()
    assert untested(tmp_path / "package", tmp_path / "tests", {"a/b/": "test_mirrored.py"}) == [
        "a/new.py"
    ]


def test_changelog_and_citation_contain_the_current_version():
    released = re.findall(
        r"^## \[(\d[^]]*)\] - (\d{4}-\d\d-\d\d)$", read("CHANGELOG.md"), flags=re.MULTILINE
    )
    citation = yaml.safe_load(read("CITATION.cff"))
    assert released[0] == (sparrow.__version__, str(citation["date-released"]))
    assert citation["version"] == sparrow.__version__


@pytest.mark.parametrize("script", [".github/workflows/test.yml", ".ci/run"])
def test_ci_runs_the_test_command_from_the_readme(script):
    if not (ROOT / script).exists():
        pytest.skip("not in the source distribution")
    (line,) = re.findall(
        r"^\s*\w+=\$\(grep -m1 '(.*)' README.md\)$", read(script), flags=re.MULTILINE
    )
    (command,) = re.findall(f"{line}.*", read("README.md"), flags=re.MULTILINE)
    assert command.endswith(".venv/bin/pytest -n 2 --dist loadfile")


@pytest.mark.parametrize("script", [".github/workflows/test.yml", ".ci/run"])
def test_ci_runs_slow_tests_after_the_test_command_from_the_readme(script):
    if not (ROOT / script).exists():
        pytest.skip("not in the source distribution")
    command, rest = (
        read(script).index(text)
        for text in ('bash -c "$', ".venv/bin/pytest --all -m slow -n 2 --dist loadfile\n")
    )
    assert command < rest


@pytest.mark.parametrize(
    ("everything", "arguments", "run"),
    [
        (False, ["tests"], ["quick"]),
        (True, ["tests"], ["quick", "slow"]),
        (False, ["tests/test_a.py::test_slow"], ["quick", "slow"]),
    ],
    ids=["by default", "with --all", "named by its id"],
)
def test_slow_tests_run_only_if_named_or_with_the_all_option(everything, arguments, run):
    items = [
        SimpleNamespace(name="quick", get_closest_marker=lambda mark: None),
        SimpleNamespace(name="slow", get_closest_marker=lambda mark: mark == "slow"),
    ]
    left_out = []
    config = SimpleNamespace(
        getoption={"all": everything}.get,
        args=arguments,
        hook=SimpleNamespace(pytest_deselected=lambda items: left_out.extend(items)),
    )
    conftest.pytest_collection_modifyitems(config, items)
    assert [item.name for item in items] == run
    assert [item.name for item in left_out] == ([] if "slow" in run else ["slow"])


@pytest.mark.parametrize(
    ("used", "mark", "fails"), [(29, None, False), (31, None, True), (99, "slow", False)]
)
def test_slow_test_fails_unless_marked_slow(used, mark, fails):
    times = iter([(0, 0, 0, 0, 0), (1, 1, used - 3, 1, 0)])
    call = conftest.pytest_runtest_call(SimpleNamespace(get_closest_marker=lambda name: mark))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(conftest.os, "times", lambda: next(times))
        patch.setattr(conftest, "ONE_THREAD", True)
        next(call)
        with pytest.raises(pytest.fail.Exception if fails else StopIteration):
            call.send(None)


def test_workflows_refer_to_existing_files():
    workflows = {
        path.stem: yaml.safe_load(path.read_text())
        for path in (ROOT / ".github/workflows").glob("*.yml")
    }
    assert set(workflows) == {"test", "nightly", "gpu", "pages", "release"}
    steps = [
        step for w in workflows.values() for job in w["jobs"].values() for step in job["steps"]
    ]
    ran = "\n".join(step.get("run", "") for step in steps)
    for target in re.findall(r"make ([a-z ]+)", ran):
        assert all(
            re.search(rf"^{name}:", read("Makefile"), flags=re.MULTILINE) for name in target.split()
        )
    scripts = re.findall(r"\bbenchmarks/\w+\.py", ran)
    assert scripts and all((ROOT / script).exists() for script in scripts)


NAMED = re.compile(
    r"(?<![\w/.-])(?:sparrow|tests|benchmarks|studies|recipes)/[\w/.-]+\.(?:py|cuh?|toml)\b"
)


@pytest.mark.parametrize(
    "page",
    [str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"))],
)
def test_source_files_mentioned_in_the_docs_exist(page):
    assert [name for name in NAMED.findall(read(page)) if not (ROOT / name).exists()] == []
