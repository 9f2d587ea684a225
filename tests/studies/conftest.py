"""Import a study's modules. Its scripts import each other from their own folders."""

import importlib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def study(request):
    """Return the modules named in a test file's ``MODULES``, from the folders in its
    ``FOLDERS``.
    """
    for name in getattr(request.module, "REQUIRED", ()):
        pytest.importorskip(name)
    with pytest.MonkeyPatch.context() as patch:
        for folder in getattr(request.module, "FOLDERS", ("benchmarks", "studies/text")):
            patch.syspath_prepend(str(ROOT / folder))
        yield SimpleNamespace(
            **{name: importlib.import_module(name) for name in request.module.MODULES}
        )
