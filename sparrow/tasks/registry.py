"""Tasks by name, as the command line and run files give them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sparrow.errors import ConfigError
from sparrow.tasks.base import Task
from sparrow.tasks.chase import Chase
from sparrow.tasks.trace import Trace

TASKS: dict[str, Callable[..., Task]] = {"trace": Trace, "chase": Chase}


def register_task(name: str, factory: Callable[..., Task]) -> None:
    """Make ``load_task(name, **options)`` call ``factory(**options)``. Raises ConfigError: the name is taken."""
    if name in TASKS:
        raise ConfigError(f"the task name {name!r} is taken; choose a name other than {', '.join(sorted(TASKS))}")
    TASKS[name] = factory


def load_task(name: str, **options: Any) -> Task:
    """The task ``name`` with its options, e.g. ``load_task("trace", lines=24)``.

    Raises ConfigError: no such task, or options it does not take.
    """
    if name not in TASKS:
        raise ConfigError(f"no task {name!r}; known ones: {', '.join(sorted(TASKS))}")
    try:
        return TASKS[name](**options)
    except TypeError as error:
        raise ConfigError(f"task {name!r} does not take the options {options}: {error}") from error
