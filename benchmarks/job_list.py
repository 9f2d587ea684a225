"""Read the list of jobs for ``run_jobs.py`` from a TOML file."""

from __future__ import annotations

import re
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

from sparrow.errors import ConfigError


@dataclass(frozen=True)
class Job:
    """A command to run once."""

    name: str
    command: str  # with {python} and {seconds}, see ``arguments``
    minutes: float  # the limit
    gpus: int = 1  # 0: CPU only
    least: float | None = None  # start even if only this many minutes are left
    after: tuple[str, ...] = ()  # jobs that must have succeeded
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def needed_s(self) -> float:
        """Seconds that must be left for the job to start."""
        return 60 * (self.minutes if self.least is None else self.least)

    def arguments(self, seconds: str) -> list[str]:
        """Split the command like a shell, with ``{python}`` as this interpreter and ``{seconds}``
        as given. All other braces stay as they are.
        """
        return [
            word.replace("{python}", sys.executable).replace("{seconds}", seconds)
            for word in shlex.split(self.command)
        ]


def _is_command(x: Any) -> bool:
    try:
        return isinstance(x, str) and bool(shlex.split(x))
    except ValueError:
        return False


def _is_number(x: Any) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool) and 0 < x < float("inf")


def _are_texts(values: Iterable[Any]) -> bool:
    return all(isinstance(value, str) for value in values)


KEYS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (
        lambda x: (
            isinstance(x, str) and re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", x) is not None
        ),
        "letters, digits, '_', '-' and '.', because it names the log",
    ),
    "command": (_is_command, "a command with closed quotes"),
    "minutes": (_is_number, "a number above zero"),
    "gpus": (
        lambda x: isinstance(x, int) and not isinstance(x, bool) and x >= 0,
        "a number of GPUs, or 0 for a job that runs on the CPU",
    ),
    "least": (_is_number, "a number above zero"),
    "after": (lambda x: isinstance(x, list) and _are_texts(x), "a list of names of jobs"),
    "environment": (
        lambda x: isinstance(x, dict) and _are_texts(x.values()),
        "a table of strings",
    ),
}
"""A job's keys, a test of each value, and what the test expects."""
REQUIRED = ("name", "command", "minutes")


def read(path: Path) -> list[Job]:
    """Read the jobs in the order of the file.

    Raises ConfigError if the file can't be read, or a job can't be run as it is described.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}; correct it") from error
    except (OSError, ValueError) as error:  # ValueError: not UTF-8
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot read {path}: {reason}; give a TOML file of jobs") from error

    tables = content.pop("job", [])
    if content:
        raise ConfigError(
            f"{path} has the unknown key {min(content)!r}; write every job as a table [[job]]"
        )
    if not isinstance(tables, list) or not tables or not all(isinstance(x, dict) for x in tables):
        raise ConfigError(f"{path} has no list of jobs; write every job as a table [[job]]")
    jobs = [_job(table, number) for number, table in enumerate(tables, 1)]
    _check_names(jobs)
    return jobs


def _job(table: Mapping[str, Any], number: int) -> Job:
    """Turn a table of the file into a job. ``number`` is its position, from one."""
    which = f"job {table.get('name', number)!r}"
    if unknown := sorted(set(table) - set(KEYS)):
        raise ConfigError(f"{which} has the unknown key {unknown[0]!r}; use {', '.join(KEYS)}")
    if missing := [key for key in REQUIRED if key not in table]:
        raise ConfigError(f"{which} has no {missing[0]}; add it")
    for key, value in table.items():
        is_valid, expected = KEYS[key]
        if not is_valid(value):
            raise ConfigError(f"{which}: {key} must be {expected}; got {value!r}")
    job = Job(**{**table, "after": tuple(table.get("after", ()))})
    if job.needed_s > 60 * job.minutes:
        raise ConfigError(
            f"{which}: least must not exceed the limit of {job.minutes:g} minutes; got "
            f"{job.least:g}"
        )
    return job


def _check_names(jobs: Sequence[Job]) -> None:
    names = [job.name for job in jobs]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{names.count(name)} jobs have the name {name!r}; rename one")
    for job in jobs:
        for name in job.after:
            if name not in names:
                raise ConfigError(
                    f"job {job.name!r} comes after {name!r}, which is not a job; use one of "
                    f"{', '.join(names)}"
                )
    try:
        TopologicalSorter({job.name: job.after for job in jobs}).prepare()
    except CycleError as error:
        circle = " -> ".join(error.args[1])
        raise ConfigError(f"jobs wait for each other: {circle}; remove one 'after'") from error


def select(jobs: Sequence[Job], names: Sequence[str]) -> list[Job]:
    """Return the jobs with these names, which no longer wait for any others.

    Raises ConfigError if there is no such job.
    """
    known = [job.name for job in jobs]
    for name in names:
        if name not in known:
            raise ConfigError(f"there is no job {name!r}; use one of {', '.join(known)}")
    return [
        replace(job, after=tuple(name for name in job.after if name in names))
        for job in jobs
        if job.name in names
    ]
