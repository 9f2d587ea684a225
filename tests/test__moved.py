"""Test that import paths of the last release still work, with a warning."""

import importlib
import pickle
import subprocess
import sys

import pytest

from sparrow import _moved
from sparrow.decoding import Decoding

SUBMODULES = ("sparrow.commands.train", "sparrow.commands.dry_run", "sparrow.commands.arguments")


def forget(name: str) -> None:
    """Make Python forget that this module and its submodules have been imported."""
    for module in [m for m in sys.modules if m == name or m.startswith(f"{name}.")]:
        del sys.modules[module]


@pytest.mark.parametrize("old", [*_moved.MODULES, *SUBMODULES])
def test_importing_an_old_path_warns_and_returns_the_current_module(old):
    new = _moved.new_name(old)
    today = importlib.import_module(new)
    forget(old)
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}"):
        assert importlib.import_module(old) is today
    assert sys.modules[new] is today and today.__name__ == today.__spec__.name == new


@pytest.mark.parametrize(
    "module, home, name",
    [
        (module, home, name)
        for module, homes in _moved.ATTRIBUTES.items()
        for home, names in homes.items()
        for name in sorted(names)
    ],
)
def test_importing_a_moved_name_from_its_old_module_warns_and_works(module, home, name):
    today = getattr(importlib.import_module(home), name)
    with pytest.warns(DeprecationWarning, match=f"{module}.{name} is now {home}.{name}"):
        assert getattr(importlib.import_module(module), name) is today


@pytest.mark.parametrize(
    ("package", "home_name"),
    [
        ("sparrow.calibrate", "sparrow.calibrate.search"),
        ("sparrow.cost", "sparrow.cost.roofline"),
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_package_exports_all_public_names_of_its_old_module(package, home_name):
    home = importlib.import_module(home_name)
    imported = {"annotations", "Any", "ArrayLike", "NDArray", "NamedTuple"}
    for name, value in vars(home).items():
        elsewhere = getattr(value, "__module__", home.__name__) != home.__name__
        if name.startswith("_") or name in imported or elsewhere or isinstance(value, type(sys)):
            continue
        if name == "ALL_PAGES":  # defined in sparrow.schedule
            continue
        assert getattr(importlib.import_module(package), name) is value


def test_unknown_package_attribute_raises_an_error():
    with pytest.raises(AttributeError, match=r"'sparrow\.cost' has no attribute 'nothing'"):
        importlib.import_module("sparrow.cost").nothing  # noqa: B018


def test_objects_pickled_under_old_names_can_be_unpickled():
    now = pickle.dumps(Decoding, protocol=0)
    forget("sparrow.mode")
    with pytest.warns(DeprecationWarning):
        assert pickle.loads(now.replace(b"sparrow.decoding", b"sparrow.mode")) is Decoding


def test_names_that_only_share_a_prefix_are_not_redirected():
    assert _moved.new_name("sparrow.model") is None
    assert _moved.new_name("sparrow.cost.lossless") is None
    assert _moved.new_name("sparrow.commands.train") == "sparrow.cli.commands.train"


def test_warning_points_to_the_importing_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text("import json\nfrom sparrow.mode import Decoding\n")
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert f"{script}:2: DeprecationWarning: sparrow.mode is now sparrow.decoding" in done.stderr


@pytest.mark.parametrize("module", ["sparrow", "sparrow.cli"])
def test_the_old_module_still_starts_the_command_line(module):
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("sparrow ") and "Warning" not in done.stderr
