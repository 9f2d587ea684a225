"""Tasks, mixtures of tasks, and a registry of tasks by name. A task returns problems by index, each
with a prompt and a verifier.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Protocol

from sparrow.errors import ConfigError, SparrowError, TaskError, place


@dataclass(frozen=True)
class Problem:
    """A prompt and a function that judges responses to it."""

    id: str  # stable: the same problem has the same id in every run
    prompt: str  # text given to the model, after the tokenizer's special tokens (BOS)
    # response text -> reward in [0, 1]; pure, and picklable so that it can run in another process
    verify: Callable[[str], float]
    # optional: response text -> its stated answer, right or wrong, or None
    extract: Callable[[str], str | None] | None = None
    # task or dataset the problem comes from; rewards are also reported per source
    source: str = ""
    solution: str | None = None  # a reference response, if one is known
    # the expected answer, only for display; ``verify`` is what judges responses
    answer: str | None = None
    # whether the prompt already contains its special tokens, for example from a chat template
    rendered: bool = False


class Task(Protocol):
    """A source of problems by index. ``problem`` is a pure function of its arguments, so a sampler
    can resume from ``(seed, cursor)`` alone.
    """

    def problem(self, index: int, seed: int = 0) -> Problem:
        """Return problem ``index`` of the stream ``seed``. Different seeds serve as splits."""


def check_text(text: str) -> None:
    """Check that a text can be encoded. Raises ValueError if the text contains a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        half = ascii(text[error.start])[1:-1]
        raise ValueError(
            f"its text contains {half}, a lone surrogate (half of a character); save the file as UTF-8"
        ) from error


def draw(task: Task, index: int, seed: int) -> Problem:
    """Draw problem ``index`` of the stream ``seed``.

    Raises TaskError if the task raised an error, or returned something other than a problem.
    """
    name = f"problem {index} of the task {type(task).__name__}"
    try:
        problem = task.problem(index, seed)
    except SparrowError:
        raise
    except (Exception, SystemExit) as error:
        raise TaskError(
            f"{name} could not be created: the task raised {place(error)}; "
            "fix the task or its options"
        ) from error

    if not isinstance(problem, Problem):
        raise TaskError(
            f"{name} is a {type(problem).__name__}, expected a sparrow.tasks.Problem; fix the task"
        )
    if not isinstance(problem.prompt, str):
        raise TaskError(
            f"{name} has a prompt of type {type(problem.prompt).__name__}, expected text; "
            "render messages with the model's chat template"
        )
    try:
        check_text(problem.prompt)
    except ValueError as error:
        raise TaskError(f"{name} cannot be used: {error}") from error
    if not callable(problem.verify):
        raise TaskError(
            f"{name} has a verifier of type {type(problem.verify).__name__}, "
            "expected a function of the response; fix the task"
        )
    return problem


@dataclass(frozen=True)
class Mixture:
    """Mixes the problems of several tasks in fixed proportions.

    Each block of ``sum(weights)`` problems has the next ``weights[i]`` problems of every
    ``tasks[i]``. The seed determines the order of the tasks within a block. Each task's problems
    come in the same order as if the task were used alone.

    Raises ConfigError if there isn't one weight per task, or a weight isn't a positive integer.
    """

    tasks: Sequence[Task]
    weights: Sequence[int]

    def __post_init__(self) -> None:
        valid = all(type(weight) is int and weight >= 1 for weight in self.weights)
        if not self.tasks or len(self.tasks) != len(self.weights) or not valid:
            raise ConfigError(
                "a mixture needs at least one task, and an integer weight of at least 1 for each "
                f"task, got {len(self.tasks)} tasks and "
                f"weights {', '.join(map(str, self.weights)) or 'none'}"
            )

    def problem(self, index: int, seed: int = 0) -> Problem:
        """Return problem ``index`` of the stream ``seed``."""
        order = [i for i, weight in enumerate(self.weights) for _ in range(weight)]
        cycle, position = divmod(index, len(order))
        random.Random(f"mixture/{seed}/{cycle}").shuffle(order)
        i = order[position]
        drawn_before = cycle * self.weights[i] + order[:position].count(i)
        return self.tasks[i].problem(drawn_before, seed)


TASKS: dict[str, Callable[..., Task]] = {}


def register_task(name: str, factory: Callable[..., Task]) -> None:
    """Register a task, so that ``load_task(name, **options)`` calls ``factory(**options)``. Raises
    ConfigError if the name is taken.
    """
    if name in TASKS:
        raise ConfigError(
            f"the task name {name!r} is taken; choose a name other than {', '.join(sorted(TASKS))}"
        )
    TASKS[name] = factory


def load_task(name: str, **options: Any) -> Task:
    """Load the task ``name`` with ``options``, as in ``load_task("trace", lines=24)``.

    Raises ConfigError if there is no such task, or the task does not accept the options.
    """
    if name not in TASKS:
        known = ", ".join(sorted(TASKS))
        raise ConfigError(
            f"no task {name!r}; choose one of {known}, or pass your own as module:Class"
        )
    return make_task(name, TASKS[name], options)


def _about_options(factory: Callable[..., Task]) -> str:
    """Return the end of an error message: the options that a task accepts, if they are known."""
    try:
        names = signature(factory).parameters
    except (TypeError, ValueError):
        return ""
    return f"; its options are {', '.join(names)}" if names else "; it has no options"


def make_task(name: str, factory: Callable[..., Task], options: Mapping[str, Any]) -> Task:
    """Create a task with ``factory(**options)``.

    Raises ConfigError if the factory does not accept the options. Raises TaskError if the factory
    raised an error, or did not return a task.
    """
    try:
        task = factory(**options)
    except SparrowError:
        raise
    except TypeError as error:
        raise ConfigError(
            f"task {name!r} does not accept the options {dict(options)}: {error}"
            f"{_about_options(factory)}"
        ) from error
    except (Exception, SystemExit) as error:
        raise TaskError(
            f"task {name!r} could not be created: it raised {place(error)}; "
            "fix the task or its options"
        ) from error
    if not callable(getattr(task, "problem", None)):
        raise TaskError(
            f"task {name!r} is a {type(task).__name__} without a method "
            "problem(index, seed); add one"
        )
    return task
