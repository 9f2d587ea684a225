"""From what a user writes to what it names: models, tasks and datasets, prompts, engines.

A ``spec`` is a name with options, ``name:key=value,key=value``.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence
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

from sparrow.engines import hf
from sparrow.engines.base import Engine
from sparrow.errors import ConfigError
from sparrow.rewards import extract_answer, extract_code, verify_code, verify_math
from sparrow.schedule import SparsitySchedule
from sparrow.tasks import Mixture, Problem, Task, load_dataset_task, load_task
from sparrow.tasks.base import TASKS
from sparrow.tasks.dataset import load_rows

REASONER = "reasoner"
HELD_OUT = 10**9  # the problem stream of evaluation, which no training seed reaches


def parse_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """The name and its options; values are JSON where they can be.

    Raises ConfigError: an option that is no ``key=value``.
    """
    name, _, text = spec.partition(":")
    options: dict[str, Any] = {}
    for option in filter(None, re.split(r",(?=\w+=)", text)):
        key, equals, value = option.partition("=")
        if not equals:
            raise ConfigError(f"the option {option!r} in {spec!r} should read name=value, as in trace:lines=24")
        try:
            options[key] = json.loads(value)
        except json.JSONDecodeError:
            options[key] = value
    return name, options


def load_model(
    name: str, precision: Literal["fp32", "bf16"] = "fp32"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A model by name or path, or the bundled ``reasoner``, on this process's device; errors as ``hf.load_model``."""
    disable_progress_bar()  # Sparrow shows its own
    logging.getLogger("accelerate.utils.other").setLevel(logging.ERROR)  # tied weights are saved once, as they should
    place = PartialState(cpu=parse_flag_from_env("ACCELERATE_USE_CPU"))
    return hf.load_model(_model_path(name), precision, place.device)


def _model_path(name: str) -> str:
    return str(resources.files("sparrow") / REASONER) if name == REASONER else name


def load_problems(task: str | None, datasets: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> Task:
    """A synthetic task, or a mixture of datasets: whichever is given.

    Raises ConfigError: both or neither, unknown names or options, rows that cannot be used.
    """
    if (task is None) == (not datasets):
        raise ConfigError("say what to train on: either --task NAME or --dataset NAME or FILE")
    if task is not None:
        return _load_task(task)
    specs: list[tuple[str, dict[str, Any]]] = [
        ("qa", {"path": d}) if Path(d).is_file() else parse_spec(d) for d in datasets
    ]
    weights: list[Any] = [options.pop("weight", 1) for _, options in specs]
    tasks = [_load_dataset(name, options, tokenizer) for name, options in specs]
    return tasks[0] if len(tasks) == 1 else Mixture(tasks, weights)


def load_benchmark(spec: str, limit: int, tokenizer: PreTrainedTokenizerBase) -> list[Problem]:
    """The first ``limit`` problems: of a task's held-out stream, or of a dataset in the order of its rows."""
    if spec.partition(":")[0] in TASKS:
        task = _load_task(spec)
        return [task.problem(i, HELD_OUT) for i in range(limit)]
    dataset: Any = load_problems(None, (spec,), tokenizer)
    return list(islice(dataset, limit))


def _load_task(spec: str) -> Task:
    name, options = parse_spec(spec)
    return load_task(name, **options)


def _load_dataset(name: str, options: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Task:
    def chat(prompt: str) -> str:
        messages = [{"role": "user", "content": prompt}]
        return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))

    isolation = options.pop("isolation", "auto")
    return load_dataset_task(
        name,
        verifiers={"math": verify_math, "code": partial(verify_code, isolation=isolation)},
        extractors={"math": extract_answer, "code": extract_code},
        render=chat if tokenizer.chat_template else str,
        **options,
    )


def load_prompts(
    path: str | None, task: str | None, count: int, seed: int, tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Token ids of ``count`` prompts: of a file's, repeated as needed, or of a synthetic task's problems.

    Raises ConfigError: both or neither are given, or a file that cannot be read.
    """
    if (path is None) == (task is None):
        raise ConfigError("say where prompts come from: either --prompts FILE or --task NAME")
    if path is not None:
        texts: Iterable[str] = _read_prompts(Path(path), count)
    else:
        problems = _load_task(str(task))
        texts = (problems.problem(i, seed).prompt for i in range(count))
    return [tokenizer(text, add_special_tokens=False).input_ids for text in texts]


def _read_prompts(path: Path, count: int) -> list[str]:
    try:
        if path.suffix == ".jsonl":
            prompts = [row["prompt"] for row in load_rows(path)]
        else:
            prompts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except OSError as error:
        raise ConfigError(f"cannot read the prompts {path}: {error.strerror}") from error
    except KeyError as error:
        raise ConfigError(f'{path}: every line must be a JSON object with a "prompt" field') from error
    if not prompts:
        raise ConfigError(f"{path} holds no prompts")
    return [prompts[i % len(prompts)] for i in range(count)]


def load_engine(
    spec: str,
    name: str,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    schedule: SparsitySchedule,
    precision: Literal["fp32", "bf16"],
) -> Engine:
    """``hf`` on ``model``; ``vllm`` with options of ``vllm.LLM``, on the model's ``name``; or vLLM servers' addresses.

    Raises ConfigError: none of these, or more servers than processes.
    """
    if spec.startswith(("http://", "https://")):
        from sparrow.engines.vllm import VLLMServer

        rank, urls = PartialState().process_index, spec.split(",")
        if len(urls) > PartialState().num_processes:
            raise ConfigError(f"{len(urls)} vLLM servers for {PartialState().num_processes} processes; give one each")
        return VLLMServer(urls[rank % len(urls)], schedule, leads=rank < len(urls))
    kind, options = parse_spec(spec)
    if kind == "vllm":
        from sparrow.engines.vllm import VLLMEngine

        dtype = {"fp32": "float32", "bf16": "bfloat16"}[precision]
        return VLLMEngine(_model_path(name), schedule, dtype=dtype, **options)
    if kind != "hf" or options:
        raise ConfigError(f"no engine {spec!r}; expected hf, vllm, vllm:option=value,... or http://host:port")
    return load_scorer(model, tokenizer, schedule, precision)


def load_scorer(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    schedule: SparsitySchedule,
    precision: Literal["fp32", "bf16"],
) -> hf.HFEngine:
    """transformers on ``model``, which scores under any schedule, and samples under ``schedule``."""
    autocast = torch.bfloat16 if precision == "bf16" else None
    return hf.HFEngine(model, schedule, hf.eos_ids(model, tokenizer), autocast=autocast)
