"""Base class and types for settings. Settings are frozen dataclasses, and pydantic strictly checks
their types and ranges.

This module doesn't import torch, so that ``--help`` is instant.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import fields
from functools import cache
from typing import Annotated, Any, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from sparrow.errors import ConfigError

Finite = Annotated[float, Field(allow_inf_nan=False)]
Positive = Annotated[Finite, Field(gt=0)]
NotNegative = Annotated[Finite, Field(ge=0)]
Share = Annotated[Finite, Field(gt=0, le=1)]  # a fraction of a whole, above 0
Probability = Annotated[Finite, Field(gt=0, lt=1)]  # a probability strictly between 0 and 1
Count = Annotated[int, Field(ge=1)]
Many = Annotated[int, Field(ge=1, le=10**6)]  # a count of things that all have to fit in memory
Name = Annotated[str, Field(min_length=1)]  # a file or folder name
CountOrZero = Annotated[int, Field(ge=0)]
Seed = Annotated[int, Field(ge=0, lt=2**32)]  # what numpy's global generator accepts


def read_value(text: str) -> Any:
    """Parse the value of a NAME=VALUE option as JSON, or fall back to plain text."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Split ``name:key=value,key=value`` into name and options (see ``read_value``).

    Raises ConfigError if an option is not ``key=value``, or occurs twice.
    """
    name, _, text = spec.partition(":")
    return name, parse_options(text, spec)


def parse_options(text: str, spec: str) -> dict[str, Any]:
    """Parse the options in ``text``, which is part of ``spec``. Raises ConfigError in the same
    cases as ``parse_spec``.
    """
    options: dict[str, Any] = {}
    for option in filter(None, re.split(r",(?=\w+=)", text)):
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(
                f"the option {option!r} in {spec!r} should read name=value, as in trace:lines=24"
            )
        if key in options:
            raise ConfigError(f"the option {key!r} occurs twice in {spec!r}; remove one of them")
        options[key] = read_value(value)
    return options


def without_option(options: str, name: str) -> str:
    """Remove the option ``name`` from options written as ``key=value,key=value``."""
    parts = re.split(r",(?=\w+=)", options)
    return ",".join(part for part in parts if part.partition("=")[0] != name)


class Settings:
    """Base class for settings dataclasses. Checks every field against its annotated type and range.

    Annotations may be strings. Raises ConfigError if a field fails the check. The error names the
    first such field.
    """

    def __post_init__(self) -> None:
        settings: type = type(self)
        adapters = _adapters(settings)
        for setting in fields(self):  # type: ignore[arg-type]
            try:
                adapters[setting.name].validate_python(getattr(self, setting.name), strict=True)
            except ValidationError as error:
                reason = re.sub(r"^[A-Z]\w* should ", "must ", error.errors()[0]["msg"])
                raise _refused(self, setting.name, reason) from None


@cache
def _adapters(settings: type) -> dict[str, TypeAdapter[Any]]:
    return {
        name: TypeAdapter(hint)
        for name, hint in get_type_hints(settings, include_extras=True).items()
    }


def flat(nested: Mapping[str, Any], separator: str, prefix: str = "") -> dict[str, Any]:
    """Flatten nested mappings. Each value's name is prefixed with the names of the mappings that
    contain the value.
    """
    values: dict[str, Any] = {}
    for name, value in nested.items():
        if isinstance(value, Mapping):
            values |= flat(value, separator, f"{prefix}{name}{separator}")
        else:
            values[prefix + name] = value
    return values


def require(settings: Settings, name: str, holds: bool, expected: str) -> None:
    """Check one field against the others. Raises ConfigError if ``holds`` is false."""
    if not holds:
        raise _refused(settings, name, f"must be {expected}")


def choose(settings: Settings, name: str, other: str, default: Any) -> None:
    """Set ``name`` to its default if neither of two mutually exclusive settings is set.

    Raises ConfigError if both are set.
    """
    if getattr(settings, other) is None and getattr(settings, name) is None:
        object.__setattr__(settings, name, default)
    at_most_one = None in (getattr(settings, name), getattr(settings, other))
    require(settings, other, at_most_one, f"left out if {name} is set")


def _refused(settings: Settings, name: str, reason: str) -> ConfigError:
    """Build an error that calls the setting by its command-line name."""
    section, is_section, _ = type(settings).__name__.rpartition("Config")
    setting = f"{section.lower()}.{name}" if is_section and section != "Train" else name
    return ConfigError(f"{setting} is {getattr(settings, name)!r}, but {reason}")
