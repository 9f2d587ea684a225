"""Benchmarks: sample k responses per problem, keep the samples, and tabulate the scores."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedTokenizerBase

from sparrow import files
from sparrow.engines.base import Engine
from sparrow.errors import ConfigError, PromptError
from sparrow.evaluation.scores import Score, majority_at_k, mean_at_k, pass_at_k
from sparrow.rewards import extract_answer
from sparrow.rollout import Rollout, Sampling, derived_seed
from sparrow.tasks import Problem
from sparrow.tasks.prompts import encode
from sparrow.tasks.verify import TIME_LIMIT, verify_all

CHUNK = 32  # number of problems sampled between writes to disk
NEEDED = {"index", "problem", "prompt", "sample", "response", "reward", "answer", "tokens"}
"""Keys of every stored sample, including those by older versions of Sparrow."""


@dataclass(frozen=True)
class BenchmarkResult:
    """Scores on one benchmark under one schedule. ``tokens`` is the mean response length. ``speed``
    is in sampled tokens per second. It is nan if any samples come from an older version of Sparrow,
    which didn't record times.
    """

    benchmark: str
    schedule: str
    problems: int
    k: int
    mean: Score
    passed: Score
    majority: Score
    tokens: float
    speed: float


Asked = Sequence[tuple[int, int]]
"""One pair per response: the index of the problem, and the response's number among all responses to
this problem.
"""


def respond(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    sampling: Sampling,
) -> list[Rollout]:
    """Sample one response to each problem; problems may repeat.

    Raises ConfigError if the engine does not accept a problem's prompt.
    """
    prompts = [encode(tokenizer, problem.prompt, problem.rendered) for problem in problems]
    try:
        return engine.generate(prompts, sampling) if prompts else []
    except PromptError as error:
        raise ConfigError(f"problem {problems[error.index].id!r} {error.reason}") from error


def sample(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    asked: Asked,
    sampling: Sampling,
) -> list[Rollout]:
    """Sample one response per pair in ``asked``. The response's seed is derived from the pair and
    from the seed in ``sampling``. Raises the same errors as ``respond``.
    """
    seeds = [derived_seed(sampling.seed, i, n) for i, n in asked]
    return respond(
        engine, tokenizer, [problems[i] for i, _ in asked], replace(sampling, seeds=seeds)
    )


def judge(
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    rollouts: Sequence[Rollout],
    time_limit: float = TIME_LIMIT,
) -> tuple[list[str], list[float]]:
    """Decode each response and judge it as an answer to its problem. Return the texts and the
    rewards (see ``verify_all``).
    """
    texts = [
        str(tokenizer.decode(rollout.response_ids, skip_special_tokens=True))
        for rollout in rollouts
    ]
    return texts, verify_all(problems, texts, time_limit)


def run_benchmark(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    sampling: Sampling,
    k: int,
    folder: Path,
    benchmark: str,
    schedule: str,
    source: Mapping[str, Any],
) -> BenchmarkResult:
    """Evaluate the engine under its current schedule. Samples are stored in ``folder`` as JSON
    Lines and reused by later calls.

    Next to each samples file, a ``.json`` file records everything the samples depend on:
    ``source``, benchmark, temperature, truncation, maximum response length and seed. Within the
    file, a sample is identified by the problem's index and id, the prompt's token ids, and the
    sample's number. The sample's seed is derived from the index and the number. A call with fewer
    problems or responses therefore reuses part of the file, and a call with more adds to the file.
    An interrupted evaluation picks up where it left off. Every call judges the stored responses
    again, because the answers or the verifier may have changed, and updates the file.

    Args:
        engine: samples the responses.
        tokenizer: encodes the prompts and decodes the responses.
        problems: the problems of the benchmark.
        sampling: how responses are sampled.
        k: number of responses per problem.
        folder: where samples are stored.
        benchmark: the benchmark's name in the table.
        schedule: the schedule's name in the table.
        source: the model, weights (``weights_digest``), engine and schedule that the samples come
            from, as plain JSON types.
    """
    folder.mkdir(parents=True, exist_ok=True)
    key = {
        **source,
        "benchmark": benchmark,
        "temperature": sampling.temperature,
        "max_new_tokens": sampling.max_new_tokens,
        "seed": sampling.seed,
    }
    if sampling.truncated:
        key |= {"top_k": sampling.top_k, "top_p": sampling.top_p}
    slug = "".join(c if c.isalnum() or c in "-._" else "_" for c in f"{schedule}-{benchmark}")[:80]
    path = folder / f"{slug}-{_digest(json.dumps(key, sort_keys=True))}.jsonl"
    path.with_suffix(".json").write_text(json.dumps(key, indent=1), encoding="utf-8")
    samples = _read_samples(path)
    names = [
        (i, p.id, _digest(str(encode(tokenizer, p.prompt, p.rendered))))
        for i, p in enumerate(problems)
    ]

    def is_complete(name: tuple[int, str, str]) -> bool:
        return all((*name, n) in samples for n in range(k))

    missing = [i for i, name in enumerate(names) if not is_complete(name)]
    stored = [(i, n) for i, name in enumerate(names) if is_complete(name) for n in range(k)]
    again = [samples[(*names[i], n)] for i, n in stored]
    if _judge_again([problems[i] for i, _ in stored], again):
        # Another call may have added samples in the meantime.
        samples = {**_read_samples(path), **samples}
        files.write_text(path, _lines(samples.values()))

    for begin in range(0, len(missing), CHUNK):
        asked = [(i, n) for i in missing[begin : begin + CHUNK] for n in range(k)]
        began = time.perf_counter()
        rollouts = sample(engine, tokenizer, problems, asked, sampling)
        seconds = (time.perf_counter() - began) / len(asked)
        texts, rewards = judge(tokenizer, [problems[i] for i, _ in asked], rollouts)

        new = []
        for (i, n), rollout, text, reward in zip(asked, rollouts, texts, rewards, strict=True):
            new.append(
                {
                    "index": i,
                    "problem": problems[i].id,
                    "prompt": names[i][2],
                    "sample": n,
                    "response": text,
                    "reward": reward,
                    "answer": extract_answer(text, last_number=True),
                    "tokens": len(rollout),
                    "finish_reason": rollout.finish_reason,
                    "seconds": seconds,
                }
            )
        with open(path, "a", encoding="utf-8") as file:
            file.write(_lines(new))
            file.flush()
            os.fsync(file.fileno())
        samples |= {_name_of(row): row for row in new}

    rows = [samples[(*name, n)] for name in names for n in range(k)]
    rewards_Nk = _by_problem([row["reward"] for row in rows], k)
    answers_Nk = _by_problem([row["answer"] for row in rows], k)
    tokens = sum(row["tokens"] for row in rows)
    seconds = sum(row.get("seconds", math.nan) for row in rows)
    return BenchmarkResult(
        benchmark,
        schedule,
        len(problems),
        k,
        mean_at_k(rewards_Nk),
        pass_at_k(rewards_Nk, k),
        majority_at_k(rewards_Nk, answers_Nk),
        tokens / len(rows),
        tokens / seconds,
    )


def _judge_again(problems: Sequence[Problem], rows: Sequence[dict[str, Any]]) -> bool:
    """Judge stored responses, each to its problem, and update their rows. Return whether any row
    changed.
    """
    texts = [row["response"] for row in rows]
    changed = False
    for row, text, reward in zip(rows, texts, verify_all(problems, texts), strict=True):
        verdict = {"reward": reward, "answer": extract_answer(text, last_number=True)}
        changed |= not verdict.items() <= row.items()
        row.update(verdict)
    return changed


def _lines(rows: Iterable[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _by_problem(values: list[Any], k: int) -> list[list[Any]]:
    """Split a list with ``k`` values per problem into one list per problem."""
    return [values[begin : begin + k] for begin in range(0, len(values), k)]


@torch.no_grad()
def weights_digest(model: nn.Module) -> str:
    """Return a digest of the parameters, as 16 hex digits. It covers each parameter's name, shape,
    dtype and checksum. The checksum is the sum of the elements, with their raw bits read as
    integers.
    """
    whole_numbers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = []
    for name, p in model.named_parameters():
        bits = p.detach().view(whole_numbers[p.element_size()])
        sums.append((name, list(p.shape), str(p.dtype), int(bits.sum(dtype=torch.int64))))
    return _digest(json.dumps(sums))


COLUMNS = (
    "benchmark",
    "schedule",
    "problems",
    "mean@k",
    "pass@k",
    "majority@k",
    "k",
    "tokens",
    "tokens/s",
)


def markdown_table(results: Sequence[BenchmarkResult]) -> str:
    """Format the results as a Markdown table with one row per benchmark and schedule. Scores come
    with 95 % intervals over problems.
    """
    rows = [
        (
            r.benchmark,
            r.schedule,
            str(r.problems),
            str(r.mean),
            str(r.passed),
            str(r.majority),
            str(r.k),
            f"{r.tokens:.0f}",
            "n/a" if math.isnan(r.speed) else f"{r.speed:,.0f}",
        )
        for r in results
    ]
    lines = [COLUMNS, ["---"] * len(COLUMNS), *rows]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _read_samples(path: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Read the samples, keyed by index, problem, prompt and number. A line that a killed process
    left incomplete is skipped, and its sample is drawn again.

    Raises ConfigError if any other line is not a sample.
    """
    if not path.exists():
        return {}
    text = path.read_bytes()
    if text and not text.endswith(b"\n"):
        with open(path, "a", encoding="utf-8") as file:
            file.write("\n")
    samples = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            row = json.loads(line.decode())
            is_sample = isinstance(row, dict) and row.keys() >= NEEDED
        except json.JSONDecodeError:
            continue
        except UnicodeDecodeError:
            is_sample = False
        if not is_sample:
            raise ConfigError(
                f"line {number} of {path} is not a sample; delete the line or the whole file, and "
                "run the same command again"
            )
        samples[_name_of(row)] = row
    return samples


def _name_of(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["index"], row["problem"], row["prompt"], row["sample"]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
