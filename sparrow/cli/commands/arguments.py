"""Read arguments from a TOML configuration, or from the settings that a run recorded."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from sparrow.errors import ConfigError
from sparrow.settings import flat


def from_toml(path: Path) -> list[str]:
    """Convert a TOML file's options to command-line form.

    Raises ConfigError if the file cannot be read, or is not valid TOML.
    """
    try:
        return list(_options(tomllib.loads(path.read_text(encoding="utf-8"))))
    except (tomllib.TOMLDecodeError, RecursionError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read the configuration file {path}: {reason}") from error


def recorded(run_dir: Path, settings: type) -> list[str]:
    """Convert a run's recorded ``settings`` to command-line form.

    Raises ConfigError if ``run_dir`` is not a run directory, or its record is damaged.
    """
    from sparrow.run import RunConfig

    return list(_options(_known(RunConfig.load(run_dir).train, settings)))


def _options(table: Mapping[str, Any]) -> Iterator[str]:
    """Convert nested settings to command-line form."""
    for name, value in flat(table, ".").items():
        section, dot, key = name.rpartition(".")
        flag = f"--{section}{dot}{'no-' if value is False else ''}{key.replace('_', '-')}"
        if isinstance(value, bool):
            yield flag
        elif isinstance(value, list):
            yield from (flag, *map(str, value))
        else:
            yield f"{flag}={value}"  # a value may begin with dashes


def _known(record: Mapping[str, Any], settings: type) -> dict[str, Any]:
    """Return the recorded settings that have a value and that still exist in this version. An older
    version of Sparrow may have recorded other settings.
    """
    known = {}
    for setting in fields(settings):
        value = record.get(setting.name)
        if isinstance(value, dict):
            value = _known(value, type(setting.default))
        if setting.name not in ("run_dir", "resume") and value not in (None, [], {}):
            known[setting.name] = value
    return known
