"""Load user-supplied objects, given as ``module:name``."""

from __future__ import annotations

import importlib
import os
import re
import sys
from pathlib import Path
from typing import Any

from sparrow.errors import ConfigError, place


def load_object(spec: str, what: str) -> Any:
    """Load the object ``module:name``. The working directory is searched too.

    Raises ConfigError if there is no such module or name, or importing the module raises an error.
    """
    module, _, name = spec.partition(":")
    if not re.fullmatch(r"[\w.]+:\w+", spec) or module.endswith(".py"):
        raise ConfigError(
            f"{what} {spec!r} must have the form module:name, such as "
            f"my_rewards:judge{_by_path(spec)}"
        )
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise ConfigError(
                f"{what} {spec!r}: {module} raised {place(error)}; install the missing package"
            ) from error
        raise ConfigError(
            f"{what} {spec!r}: no module {error.name!r} in this directory or on PYTHONPATH; "
            "check the name"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"{what} {spec!r}: {place(error)}; check the name") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{what} {spec!r}: importing {module} raised {place(error)}; fix {module}"
        ) from error


def _by_path(spec: str) -> str:
    """If ``spec`` is a path, return a hint for the error message on how to write it as
    ``module:name``. Otherwise, return an empty string.
    """
    path, _, name = spec.partition(":")
    file = Path(path)
    if file.suffix != ".py" and "/" not in path:
        return ""
    written = f"{file.stem}:{name or 'judge'}"
    return (
        f"; to use the file {path}, pass {written} and run the command in the file's folder, or add "
        "that folder to PYTHONPATH"
    )
