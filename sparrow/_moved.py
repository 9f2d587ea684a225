"""Keep the last release's import paths working, with a warning. The old paths will be removed in
the next release.

Old modules such as ``sparrow.mode`` no longer have files. Instead, a finder looks up the old name
in ``MODULES`` and returns the renamed module itself. A class is therefore the same object under
both names.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "sparrow.benchmark": "sparrow.evaluation.benchmark",
    "sparrow.cluster": "sparrow.cost.cluster",
    "sparrow.commands": "sparrow.cli.commands",
    "sparrow.cost_lossless": "sparrow.cost.lossless",
    "sparrow.dial": "sparrow.train.dial",
    "sparrow.evaluate": "sparrow.evaluation.scores",
    "sparrow.head_budgets": "sparrow.calibrate.head_budgets",
    "sparrow.loading": "sparrow.cli.loading",
    "sparrow.measure": "sparrow.calibrate.run",
    "sparrow.mode": "sparrow.decoding",
    "sparrow.terminal": "sparrow.cli.terminal",
}
"""Maps the old name of a module or package to its new name. The entry for a package also covers its
submodules.
"""

ATTRIBUTES = {
    "sparrow.calibrate": {
        "sparrow.calibrate.search": {"Curves", "Measure", "PERCENTILE", "STEP", "Tried", "WIDE"},
    },
    "sparrow.calibrate.run": {
        "sparrow.engines.measure": {
            "LENGTHEN",
            "LONGEST_LISTS",
            "SHORTEST_LISTS",
            "measure",
            "measure_ceiling",
        },
    },
    "sparrow.cli": {"sparrow.cli.entry": {"COMMANDS", "parse"}},
    "sparrow.cost": {
        "sparrow.cost.roofline": {
            "CHUNK",
            "PREFILL_MFU",
            "SCORE_MFU",
            "UPDATE_MFU",
        },
        "sparrow.cost.shapes": {"MODEL_TYPES"},
    },
}
"""For each old module, maps its new modules to the names that moved there."""


def new_name(module: str) -> str | None:
    """Return the new name of a renamed module, or None if the module wasn't renamed."""
    for old, new in MODULES.items():
        if module == old or module.startswith(f"{old}."):
            return new + module.removeprefix(old)
    return None


def attributes_of(module: str) -> Callable[[str], Any]:
    """Build ``__getattr__`` for a module in ``ATTRIBUTES``."""
    homes = {name: home for home, names in ATTRIBUTES[module].items() for name in names}

    def getattr_of_module(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        home = homes[name]
        _warn(f"{module}.{name}", f"{home}.{name}", level=3)
        return getattr(importlib.import_module(home), name)

    return getattr_of_module


def install() -> None:
    """Make old names importable."""
    # The finder has to come first. A package imported under its old name has the renamed package's
    # path, and Python's own finder would load the submodules from that path a second time.
    sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(fullname, self) if new_name(fullname) else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = new_name(old)
        assert new is not None
        # Level 3 points at the import statement, because warnings skip the import system's own
        # frames.
        _warn(old, new, level=3)
        sys.modules[old] = importlib.import_module(new)


def _warn(old: str, new: str, level: int) -> None:
    warnings.warn(
        f"{old} has moved to {new}, and the old name will be removed in the next "
        f"release; use {new}",
        DeprecationWarning,
        stacklevel=level,
    )
