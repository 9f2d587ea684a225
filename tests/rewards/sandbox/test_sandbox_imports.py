"""Test that the sandbox is self-contained: it imports only the standard library and this package's
errors.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from sparrow.rewards import sandbox

FOLDER = Path(sandbox.__file__).parent
OWN = "sparrow.rewards.sandbox"


def imported(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            names.add("." * node.level + (node.module or ""))
    return names


@pytest.mark.parametrize(
    "path", sorted(FOLDER.rglob("*.py")), ids=lambda path: str(path.relative_to(FOLDER))
)
def test_sandbox_modules_import_only_the_standard_library_and_each_other(path):
    inside = path.parent.name == "inside"
    own = (".",) if inside else ("sparrow.errors", OWN)
    foreign = {
        name
        for name in imported(path)
        if name.partition(".")[0] not in sys.stdlib_module_names and not name.startswith(own)
    }
    assert foreign == set()


def test_importing_the_sandbox_does_not_load_torch():
    code = f"import sys; sys.modules['torch'] = None; import {OWN} as s; print(s.Limits().cpu_s)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout == "6.0\n", done.stderr


def test_code_inside_the_sandbox_needs_no_installed_package():
    code = f"import sys; sys.path.insert(0, {str(FOLDER)!r}); from inside import main; print('sparrow' in sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True)
    assert done.stdout == "False\n", done.stderr
