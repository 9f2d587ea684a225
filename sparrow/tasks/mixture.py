"""Several tasks as one: how often each is drawn from is exact, not left to chance."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from sparrow.errors import ConfigError
from sparrow.tasks.base import Problem, Task


@dataclass(frozen=True)
class Mixture:
    """Problems of several tasks in fixed proportions.

    Of every ``sum(weights)`` problems, ``weights[i]`` are the next ones of ``tasks[i]``, in an order that depends on
    the seed only. So datasets go through their epochs as they would alone.

    Raises ConfigError: weights that are not whole numbers of at least 1, one for each task.
    """

    tasks: Sequence[Task]
    weights: Sequence[int]

    def __post_init__(self) -> None:
        whole = all(isinstance(weight, int) and weight >= 1 for weight in self.weights)
        if not self.tasks or len(self.tasks) != len(self.weights) or not whole:
            raise ConfigError(
                f"a mixture takes a whole number of at least 1 for each of its {len(self.tasks)} tasks, got weights "
                f"{', '.join(map(str, self.weights)) or 'none'}"
            )

    def problem(self, index: int, seed: int = 0) -> Problem:
        """Problem ``index`` of the stream ``seed``."""
        order = [i for i, weight in enumerate(self.weights) for _ in range(weight)]
        turn, position = divmod(index, len(order))
        random.Random(f"mixture/{seed}/{turn}").shuffle(order)
        i = order[position]
        return self.tasks[i].problem(turn * self.weights[i] + order[:position].count(i), seed)
