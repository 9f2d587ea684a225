"""Benchmarks: sample a model k times on every problem, keep the samples, and tabulate what it can do."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from sparrow.engines.base import Engine, Sampling
from sparrow.evaluate import Score, majority_at_k, mean_at_k, pass_at_k
from sparrow.rewards import extract_answer
from sparrow.tasks import Problem

CHUNK = 32  # problems sampled between writes


@dataclass(frozen=True)
class BenchmarkResult:
    """Scores of one benchmark under one schedule; ``tokens`` is the mean response length."""

    benchmark: str
    schedule: str
    problems: int
    k: int
    mean: Score
    passed: Score
    majority: Score
    tokens: float


def run_benchmark(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    problems: Sequence[Problem],
    sampling: Sampling,
    k: int,
    folder: Path,
    benchmark: str,
    schedule: str,
) -> BenchmarkResult:
    """Evaluate the engine under the schedule it has; samples are in ``folder`` as JSON lines, and are not made twice.

    A problem's samples are seeded by its place in the benchmark, so an interrupted evaluation ends with the
    same table as one that was not.
    """
    folder.mkdir(parents=True, exist_ok=True)
    slug = "".join(c if c.isalnum() or c in "-._" else "_" for c in f"{benchmark}-{schedule}-k{k}-s{sampling.seed}")
    path = folder / f"{slug}.jsonl"
    rows = _complete_rows(path, k, len(problems))
    for begin in range(len(rows) // k, len(problems), CHUNK):
        some = problems[begin : begin + CHUNK]
        prompts = [tokenizer(p.prompt, add_special_tokens=False).input_ids for p in some for _ in range(k)]
        rollouts = engine.generate(prompts, replace(sampling, seed=sampling.seed * 1_000_003 + begin))
        texts = [str(tokenizer.decode(r.response_ids, skip_special_tokens=True)) for r in rollouts]
        new = [
            {
                "problem": some[i // k].id,
                "response": text,
                "reward": some[i // k].verify(text),
                "answer": extract_answer(text, last_number=True),
                "tokens": len(rollout),
                "finish_reason": rollout.finish_reason,
            }
            for i, (rollout, text) in enumerate(zip(rollouts, texts, strict=True))
        ]
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in new))
            file.flush()
            os.fsync(file.fileno())
        rows += new
    groups = [rows[i : i + k] for i in range(0, len(problems) * k, k)]
    rewards = [[row["reward"] for row in group] for group in groups]
    majority = majority_at_k(rewards, [[row["answer"] for row in group] for group in groups])
    scores = mean_at_k(rewards), pass_at_k(rewards, k), majority
    return BenchmarkResult(benchmark, schedule, len(groups), k, *scores, sum(row["tokens"] for row in rows) / len(rows))


def markdown_table(results: Sequence[BenchmarkResult]) -> str:
    """One row per benchmark and schedule, with 95 % intervals over problems."""
    lines = [
        "| benchmark | schedule | problems | mean@k | pass@k | majority@k | k | tokens |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for r in results:
        cells = [r.benchmark, r.schedule, r.problems, r.mean, r.passed, r.majority, r.k, f"{r.tokens:.0f}"]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def _complete_rows(path: Path, k: int, problems: int) -> list[dict]:
    """Rows of the whole chunks that were written; a half-written one is cut off and will be made again."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            break
    whole = len(rows) if len(rows) == problems * k else len(rows) // (CHUNK * k) * (CHUNK * k)
    rows = rows[:whole]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return rows
