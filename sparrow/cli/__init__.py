"""The ``sparrow`` command line: ``entry`` parses the arguments into one of ``commands`` and runs
it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sparrow import _moved

if not TYPE_CHECKING:
    __getattr__ = _moved.attributes_of(__name__)


# The submodule is called ``entry`` because one called ``main`` would shadow this function.
def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of ``sparrow``; see ``sparrow.cli.entry.main``."""
    try:
        from sparrow.cli import entry
    except KeyboardInterrupt:  # the imports take up to a second
        print("sparrow: interrupted", file=sys.stderr)
        sys.exit(130)
    entry.main(argv)
