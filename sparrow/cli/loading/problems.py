"""Load training problems: a task, or a mixture of datasets."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from sparrow.cli.loading.objects import load_object
from sparrow.errors import ConfigError
from sparrow.rewards import Limits, extract_answer, extract_code, verify_code, verify_math
from sparrow.rewards.sandbox import Isolation
from sparrow.settings import Count, Settings, parse_options, parse_spec
from sparrow.tasks import Mixture, Task, load_dataset_task, load_task
from sparrow.tasks.base import TASKS, make_task
from sparrow.tasks.formats import FORMATS
from sparrow.tasks.judges import Judge
from sparrow.tasks.prompts import NO_CHAT, ChatConfig, chat_template, encode

_OWN = re.compile(r"([\w.]+:\w+)(?::(.*))?", re.DOTALL)  # module:Class, optionally with options


@dataclass(frozen=True)
class DatasetOptions(Settings):
    """Options of a dataset."""

    path: str | None = None  # a local file to read instead of the hub
    split: str | None = None  # the split of the dataset on the hub
    template: str | None = None  # the prompt, with {question} in place of the question
    max_length: Count | None = None  # rows whose prompt has more characters than this are dropped
    isolation: Isolation = "auto"  # how programs are isolated while they run against tests
    # maximum number of bytes a program may write
    output_bytes: Count = Limits().output_bytes
    weight: Count = 1  # how often its problems are drawn, relative to other datasets


def load_problems(
    task: str | None,
    datasets: Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None,
    room: int | None = None,
    reward: str | None = None,
    chat: ChatConfig = NO_CHAT,
) -> Task:
    """Load a task or a mixture of datasets. A task is given by name or as ``module:Class``.

    A dataset's questions are rendered with the tokenizer's chat template, if it has one, using the
    settings in ``chat``. Rows whose prompt has no tokens, or more than ``room``, are dropped and
    counted. Without a tokenizer, no template is applied, and no rows are dropped for their token
    count. ``reward`` is an optional function (``module:function``, see ``tasks.judges.Judge``) to
    use instead of the datasets' verifiers.

    Raises ConfigError if task and datasets are both given or both missing, a name or option is
    unknown, or rows cannot be used.
    """
    check_source(task, datasets)
    if task is not None:
        if reward is not None:
            raise ConfigError(
                f"--reward {reward} applies to --dataset only; leave it out, because the task "
                f"{task} has its own verifier"
            )
        if chat.is_set:
            raise ConfigError(
                "the chat settings apply to --dataset only; leave them out, because prompts "
                f"for the task {task} are sent unchanged"
            )
        return load_task_spec(task)
    judge = None if reward is None else Judge.of(load_object(reward, "reward"), reward)
    parts = [_load_dataset(spec, tokenizer, room, judge, chat) for spec in datasets]
    tasks = [task for task, _ in parts]
    weights = [weight for _, weight in parts]
    return tasks[0] if len(tasks) == 1 else Mixture(tasks, weights)


def check_source(task: str | None, datasets: Sequence[str]) -> None:
    """Check that either a task or datasets are given. Raises ConfigError if not."""
    if task is not None and datasets:
        raise ConfigError(
            f"--task {task} and --dataset {' '.join(datasets)} are mutually exclusive; pass one of them"
        )
    if task is None and not datasets:
        raise ConfigError(
            "there is nothing to train on; pass --task NAME, or --dataset NAME or FILE"
        )


def is_task(spec: str) -> bool:
    """Return whether a benchmark is a task rather than a dataset."""
    name = spec.partition(":")[0]
    return name in TASKS or bool(
        name not in FORMATS and _OWN.fullmatch(spec) and not os.path.isfile(spec)
    )


def load_task_spec(spec: str) -> Task:
    """Load a task as written on the command line: ``trace:lines=24``, or ``module:Class`` for the
    user's own class, with or without options.

    Raises ConfigError if there is no such task, or it does not accept the options. Raises TaskError
    if the task itself raised an error.
    """
    own = _OWN.fullmatch(spec)
    if own is None or spec.partition(":")[0] in TASKS:
        name, options = parse_spec(spec)
        return load_task(name, **options)
    return make_task(own[1], load_object(own[1], "task"), parse_options(own[2] or "", spec))


def _load_dataset(
    spec: str,
    tokenizer: PreTrainedTokenizerBase | None,
    room: int | None,
    judge: Judge | None,
    chat: ChatConfig,
) -> tuple[Task, int]:
    """Load a dataset as written on the command line, and return it with its mixture weight."""
    dressing: dict[str, Any] = {}
    if tokenizer is not None:
        render = chat_template(tokenizer, chat)
        dressing = {
            "render": render,
            "tokens": lambda text: len(encode(tokenizer, text, render is not None)),
            "max_tokens": room,
        }
    name, options = ("qa", {"path": spec}) if os.path.isfile(spec) else parse_spec(spec)
    taken = {field.name for field in fields(DatasetOptions)}
    if unknown := sorted(set(options) - taken):
        raise ConfigError(
            f"dataset {spec!r} has the unknown option {unknown[0]!r}, expected one of "
            f"{', '.join(sorted(taken))}"
        )
    try:
        chosen = DatasetOptions(**options)
    except ConfigError as error:
        raise ConfigError(f"dataset {spec!r}: {error}") from error
    verify_programs = partial(
        verify_code, limits=Limits(output_bytes=chosen.output_bytes), isolation=chosen.isolation
    )
    task = load_dataset_task(
        name,
        verifiers={"math": judge or verify_math, "code": judge or verify_programs},
        extractors={"math": extract_answer, "code": extract_code},
        path=chosen.path,
        split=chosen.split,
        template=chosen.template,
        max_length=chosen.max_length,
        **dressing,
    )
    return task, chosen.weight
