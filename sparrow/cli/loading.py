"""Loads what a user's settings name: models, tasks and datasets, prompts, engines.

A ``spec`` is a name with options, ``name:key=value,key=value``.
"""

from __future__ import annotations

import importlib
import logging
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import partial
from importlib import resources
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import PartialState
from accelerate.utils import parse_flag_from_env
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils.logging import disable_progress_bar

from sparrow.decoding import Decoding
from sparrow.engines import hf
from sparrow.engines.base import Engine
from sparrow.errors import ConfigError, place
from sparrow.model import smollm2
from sparrow.rewards import Limits, extract_answer, extract_code, verify_code, verify_math
from sparrow.rewards.sandbox import Isolation
from sparrow.settings import Count, Settings, read_value
from sparrow.tasks import Mixture, Problem, Task, load_dataset_task, load_task
from sparrow.tasks.base import TASKS, check_text, draw, make_task
from sparrow.tasks.dataset import load_rows
from sparrow.tasks.formats import FORMATS
from sparrow.tasks.judges import Judge
from sparrow.tasks.prompts import (
    NO_CHAT,
    ChatConfig,
    Prompt,
    chat_template,
    check_read,
    encode,
    prompt_of,
)

log = logging.getLogger(__name__)
Precision = Literal["fp32", "bf16"]
REASONER = "reasoner"
SMOLLM2 = "smollm2"
OWN_NAMES = (REASONER, SMOLLM2)
"""Models that Sparrow finds by itself: one that it brings, and one that is a package."""
HELD_OUT = 10**9  # the problem stream of evaluation, which no training seed reaches


@dataclass(frozen=True)
class DatasetOptions(Settings):
    """Options of a dataset."""

    path: str | None = None  # a local file in place of the hub
    split: str | None = None  # of the dataset on the hub
    template: str | None = None  # the prompt, with {question} where the question goes
    max_length: Count | None = None  # rows whose prompt has more characters are dropped
    isolation: Isolation = "auto"  # of programs that are run against tests
    output_bytes: Count = Limits().output_bytes  # the most bytes that such a program may write
    weight: Count = 1  # how often it is drawn from, relative to the other datasets


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """The name and its options; a value is read as JSON if possible, and is text otherwise.

    Raises ConfigError: an option that is not ``key=value``.
    """
    name, _, text = spec.partition(":")
    return name, _parse_options(text, spec)


def _parse_options(text: str, spec: str) -> dict[str, Any]:
    options: dict[str, Any] = {}
    for option in filter(None, re.split(r",(?=\w+=)", text)):
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(
                f"the option {option!r} in {spec!r} should read name=value, as in trace:lines=24"
            )
        if key in options:
            raise ConfigError(f"the option {key!r} stands twice in {spec!r}; remove one of them")
        options[key] = read_value(value)
    return options


def load_object(spec: str, what: str) -> Any:
    """The object that ``module:name`` names; modules are also searched for in the working
    directory.

    Raises ConfigError: no such module or name, or a module that raises.
    """
    module, _, name = spec.partition(":")
    if not re.fullmatch(r"[\w.]+:\w+", spec) or module.endswith(".py"):
        raise ConfigError(
            f"{what} {spec!r} should read module:name, such as my_rewards:judge{_by_path(spec)}"
        )
    if "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != module.partition(".")[0]:
            raise ConfigError(
                f"{what} {spec!r}: {module} raised {place(error)}; install what it needs"
            ) from error
        raise ConfigError(
            f"{what} {spec!r}: no module {error.name!r} here or on PYTHONPATH; check the name"
        ) from error
    except AttributeError as error:
        raise ConfigError(f"{what} {spec!r}: {place(error)}; check the name") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(
            f"{what} {spec!r}: importing {module} raised {place(error)}; fix it"
        ) from error


def _by_path(spec: str) -> str:
    """How to write a module that was given as a path, as the end of a sentence; empty for others."""
    path, _, name = spec.partition(":")
    file = Path(path)
    if file.suffix != ".py" and "/" not in path:
        return ""
    written = f"{file.stem}:{name or 'judge'}"
    return f"; for the file {path} write {written} in its folder, or with that folder on PYTHONPATH"


def load_model(
    name: str, precision: Precision = "fp32"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model by name or path, or one of ``OWN_NAMES``, on this process's device; errors as
    ``model_path`` and ``hf.load_model``.
    """
    disable_progress_bar()  # Sparrow shows its own
    logging.getLogger("accelerate.utils.other").setLevel(
        logging.ERROR
    )  # tied weights are saved once, as intended
    place = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    return hf.load_model(model_path(name), precision, place.device)


def model_path(name: str) -> str:
    """A model's name or path; those of ``OWN_NAMES`` by their paths.

    Raises ConfigError: see ``smollm2.checkpoint``.
    """
    if name == REASONER:
        return str(resources.files("sparrow") / REASONER)
    if name == SMOLLM2:
        return str(smollm2.checkpoint())
    return name


def context_of(model: PreTrainedModel) -> int | None:
    """The most tokens in a sequence; None if the model's config does not say."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None)


def prompt_room(context: int | None, engine: str, max_new_tokens: int) -> int:
    """The most tokens in a prompt that leave room for a response in the model's context, or in
    vLLM's if it is smaller.

    Raises ConfigError: none are left.
    """
    context = context or sys.maxsize
    if engine.startswith("vllm:"):
        limit = parse_spec(engine)[1].get("max_model_len")
        context = min(context, limit) if isinstance(limit, int) else context
    if max_new_tokens >= context:
        raise ConfigError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt in the context of {context}"
        )
    return context - max_new_tokens


def load_problems(
    task: str | None,
    datasets: Sequence[str],
    tokenizer: PreTrainedTokenizerBase | None,
    room: int | None = None,
    reward: str | None = None,
    chat: ChatConfig = NO_CHAT,
) -> Task:
    """A task by name or as ``module:Class``, or a mixture of datasets: whichever is given.

    The questions of a dataset are put into the tokenizer's chat template, if it has one, as
    ``chat`` says. Rows whose prompt has no tokens, or more than ``room``, are dropped and counted.
    Without a tokenizer, no row is dropped for its tokens, and no template is tried. If given, the
    function ``reward`` (``module:function``, a ``tasks.judges.Judge``) judges in place of the
    datasets' verifiers.

    Raises ConfigError: both or neither are given, unknown names or options, rows that cannot be
    used.
    """
    if task is not None and datasets:
        raise ConfigError(
            f"--task {task} and --dataset {' '.join(datasets)} exclude each other; give one of them"
        )
    if task is None and not datasets:
        raise ConfigError("say what to train on: either --task NAME or --dataset NAME or FILE")
    if task is not None:
        if reward is not None:
            raise ConfigError(
                f"--reward {reward} goes with --dataset; the task {task} brings its own verifier"
            )
        if chat.is_set:
            raise ConfigError(
                f"the settings of chat go with --dataset; the prompts of the task {task} are sent "
                "as they are"
            )
        return load_task_spec(task)
    judge = None if reward is None else Judge.of(load_object(reward, "reward"), reward)
    parts = [_load_dataset(spec, tokenizer, room, judge, chat) for spec in datasets]
    tasks, weights = [task for task, _ in parts], [weight for _, weight in parts]
    return tasks[0] if len(tasks) == 1 else Mixture(tasks, weights)


def load_benchmarks(
    specs: Sequence[str],
    limit: int | None,
    tokenizer: PreTrainedTokenizerBase | None,
    room: int,
    reward: str | None = None,
    option: str = "--eval.limit",
    chat: ChatConfig = NO_CHAT,
) -> dict[str, list[Problem]]:
    """``load_benchmark`` for each spec, by name without options or by file stem; by the whole spec
    if names repeat.
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
    """The first ``limit`` problems (None: all) of a task's held-out stream, or of a dataset in the
    order of its rows; ``option`` is the user's name for the limit.

    Raises ConfigError: a task without a limit, and as ``load_problems``.
    """
    if is_task(spec):
        task = load_task_spec(spec)
        if limit is None:
            raise ConfigError(
                f"the task {spec} has no end; say how many problems to take, as in {option} 64"
            )
        problems = [draw(task, i, HELD_OUT) for i in range(limit)]
    else:
        dataset: Any = load_problems(None, (spec,), tokenizer, room, reward, chat)
        problems = list(islice(dataset, limit))
    if tokenizer is not None:
        check_read(tokenizer, list(map(prompt_of, problems)))
    return problems


_OWN = re.compile(r"([\w.]+:\w+)(?::(.*))?", re.DOTALL)  # module:Class, optionally with options


def is_task(spec: str) -> bool:
    """Whether a benchmark is a task and no dataset."""
    name = spec.partition(":")[0]
    return name in TASKS or bool(
        name not in FORMATS and _OWN.fullmatch(spec) and not os.path.isfile(spec)
    )


def load_task_spec(spec: str) -> Task:
    """A task as a user writes it: ``trace:lines=24``, or the user's own as ``module:Class``, with
    or without options.

    Raises ConfigError: no such task, or options that it does not take. TaskError: the task itself
    raised.
    """
    own = _OWN.fullmatch(spec)
    if own is None or spec.partition(":")[0] in TASKS:
        name, options = parse_spec(spec)
        return load_task(name, **options)
    return make_task(own[1], load_object(own[1], "task"), _parse_options(own[2] or "", spec))


def _load_dataset(
    spec: str,
    tokenizer: PreTrainedTokenizerBase | None,
    room: int | None,
    judge: Judge | None,
    chat: ChatConfig,
) -> tuple[Task, int]:
    """A dataset as a user writes it, and its weight in a mixture."""
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
            f"dataset {spec!r} has the option {unknown[0]!r}; it takes {', '.join(sorted(taken))}"
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


def draw_prompts(task: Task, count: int, seed: int) -> list[Prompt]:
    """The first ``count`` prompts that training with this seed draws from the task.

    Raises TaskError: the task raised.
    """
    return [prompt_of(draw(task, i, seed)) for i in range(count)]


def encode_prompts(
    prompts: Sequence[Prompt], count: int, tokenizer: PreTrainedTokenizerBase, room: int
) -> list[list[int]]:
    """Token ids of ``count`` prompts, repeated as needed.

    Prompts without tokens, or with more than ``room``, are left out and counted.

    Raises ConfigError: no prompt is left, or the tokenizer cannot read them.
    """
    encoded = [(prompt.name, encode(tokenizer, prompt.text, prompt.rendered)) for prompt in prompts]
    kept = [ids for _, ids in encoded if 0 < len(ids) <= room]
    if len(kept) < len(encoded):
        name, ids = next((name, ids) for name, ids in encoded if not 0 < len(ids) <= room)
        left_out = (
            f"{len(encoded) - len(kept)} of {len(encoded)} prompts have no tokens, or more than the {room} that the "
            f"model's context has beside a response; the first is {name} with {len(ids)}"
        )
        if not kept:
            raise ConfigError(f"{left_out}; shorten them, or lower max_new_tokens")
        log.warning("left out: %s", left_out)
    check_read(tokenizer, prompts)
    return [kept[i % len(kept)] for i in range(count)]


def read_prompts(path: Path) -> list[Prompt]:
    """The prompts in a file, unchanged.

    Raises ConfigError: a file that cannot be read, or that holds no prompts.
    """
    if path.suffix in (".jsonl", ".json", ".parquet"):
        named = []
        for number, row in enumerate(load_rows(path), 1):
            text = row.get("prompt")
            if not isinstance(text, str):
                kind = f"a {type(text).__name__}" if "prompt" in row else "none"
                raise ConfigError(
                    f'row {number} of {path}: every row needs a "prompt" that is text, got {kind}; render messages '
                    "with the model's chat template first"
                )
            try:
                check_text(text)
            except ValueError as error:
                raise ConfigError(f"row {number} of {path} cannot be used: {error}") from error
            named.append(Prompt(f"row {number} of {path}", text))
    else:
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            expected = "expected text with one prompt a line, or a .jsonl, .json or .parquet file"
            raise ConfigError(f"cannot read the prompts {path}: {reason}; {expected}") from error
        if any("\0" in line for line in lines):
            raise ConfigError(
                f"{path} is not text: it holds zero bytes; give prompts one a line, or a .jsonl file"
            )
        named = [
            Prompt(f"line {i} of {path}", line) for i, line in enumerate(lines, 1) if line.strip()
        ]
    if not named:
        raise ConfigError(f"{path} holds no prompts")
    return named


def load_engine(
    spec: str,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    decoding: Decoding,
    precision: Precision,
) -> Engine:
    """The engine that ``spec`` names: ``hf``, which runs ``model``; ``vllm`` with options of
    ``vllm.LLM``, which loads the model by ``name``; or the addresses of vLLM servers.

    Raises ConfigError: none of these, more servers than processes, or a dtype beside the precision.
    """
    if spec.startswith(("http://", "https://")):
        from sparrow.engines.vllm import VLLMServer

        rank, urls = PartialState().process_index, spec.split(",")
        if len(urls) > PartialState().num_processes:
            raise ConfigError(
                f"{len(urls)} vLLM servers for {PartialState().num_processes} processes; give one each"
            )
        return VLLMServer(urls[rank % len(urls)], decoding, controls=rank < len(urls))
    kind, options = parse_spec(spec)
    if kind == "vllm":
        from sparrow.engines.vllm import VLLMEngine

        dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
        if "dtype" in options:
            raise ConfigError(
                f"engine {spec!r}: vLLM's dtype follows the trainer's, {precision}; leave dtype out, set precision"
            )
        return VLLMEngine(model_path(name), decoding, dtype=dtype, **options)
    if kind != "hf" or options:
        raise ConfigError(
            f"no engine {spec!r}; expected hf, vllm, vllm:option=value,... or http://host:port"
        )
    return load_scorer(model, tokenizer, decoding, precision)


def load_stock_engine(spec: str, name: str, precision: Precision) -> Engine:
    """vLLM without Sparrow: the options of ``vllm.LLM`` that ``spec`` gives, or a server's address.

    Raises ConfigError: vLLM is missing, or a dtype beside the precision.
    """
    from sparrow.engines.vllm.stock import StockEngine, StockServer

    if spec.startswith(("http://", "https://")):
        return StockServer(spec)
    options = _parse_options(spec, f"stock:{spec}")
    if "dtype" in options:
        raise ConfigError(
            f"engine 'stock:{spec}': vLLM's dtype follows {precision}; leave dtype out, set precision"
        )
    dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
    return StockEngine(model_path(name), dtype=dtype, **options)


def without_option(options: str, name: str) -> str:
    """Options as a user writes them, ``key=value,key=value``, less one."""
    parts = re.split(r",(?=\w+=)", options)
    return ",".join(part for part in parts if part.partition("=")[0] != name)


def load_scorer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    decoding: Decoding,
    precision: Precision,
) -> hf.HFEngine:
    """The transformers engine on ``model``: it scores under any schedule and samples as
    ``decoding`` says.
    """
    autocast = torch.bfloat16 if precision == "bf16" else None
    return hf.HFEngine(model, decoding, hf.eos_ids(model, tokenizer), autocast=autocast)
