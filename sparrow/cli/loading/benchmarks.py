"""Load benchmarks: the problems of tasks and datasets, in order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from sparrow.cli.loading.problems import is_task, load_problems, load_task_spec
from sparrow.errors import ConfigError
from sparrow.tasks import Problem
from sparrow.tasks.base import draw
from sparrow.tasks.prompts import NO_CHAT, ChatConfig, check_read, prompt_of

HELD_OUT = 10**9  # seed of the problem stream for evaluation; training seeds are usually smaller


def load_benchmarks(
    specs: Sequence[str],
    limit: int | None,
    tokenizer: PreTrainedTokenizerBase | None,
    room: int,
    reward: str | None = None,
    option: str = "--eval.limit",
    chat: ChatConfig = NO_CHAT,
) -> dict[str, list[Problem]]:
    """Load the benchmark for each spec, and return the benchmarks by name. A benchmark's name is
    its spec without the options or, for a file, the stem of the file's name. If names clash, the
    full specs are used.
    """
    short = [Path(spec).stem if os.path.isfile(spec) else spec.partition(":")[0] for spec in specs]
    return {
        spec if short.count(name) > 1 else name: load_benchmark(
            spec, limit, tokenizer, room, reward, option, chat
        )
        for name, spec in zip(short, specs, strict=True)
    }


def load_benchmark(
    spec: str,
    limit: int | None,
    tokenizer: PreTrainedTokenizerBase | None,
    room: int | None = None,
    reward: str | None = None,
    option: str = "--limit",
    chat: ChatConfig = NO_CHAT,
) -> list[Problem]:
    """Load the first ``limit`` problems of a task's held-out stream, or the first ``limit`` rows of
    a dataset (all if ``limit`` is None). ``option`` is the limit's command-line option, for error
    messages.

    Raises ConfigError if a task has no limit; see also ``load_problems``.
    """
    if is_task(spec):
        task = load_task_spec(spec)
        if limit is None:
            raise ConfigError(
                f"the task {spec} is endless; specify the number of problems to use, as in {option} 64"
            )
        problems = [draw(task, i, HELD_OUT) for i in range(limit)]
    else:
        dataset: Any = load_problems(None, (spec,), tokenizer, room, reward, chat)
        problems = list(islice(dataset, limit))
    if tokenizer is not None:
        check_read(tokenizer, list(map(prompt_of, problems)))
    return problems
