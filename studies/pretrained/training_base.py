"""Measure what a model earns on a task before training: the mean reward, and its spread within
groups of responses to the same prompt.

    python studies/pretrained/training_base.py story --work runs/base \\
        --out benchmarks/results/pretrained_base_story.json
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from numpy.typing import ArrayLike
from training_tasks import SETTINGS

from sparrow.cli import main as sparrow
from sparrow.evaluation.scores import mean_at_k

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from common import save


@dataclass(frozen=True)
class Options:
    """The task and model to measure, and the files to write."""

    task: tyro.conf.Positional[str]  # A task of training_tasks.SETTINGS.
    work: Path  # Folder for the samples; another call continues from them.
    out: Path  # The JSON file of results.
    model: str = "smollm2"  # The model, or what warm_start.py wrote.
    problems: int = 32  # Number of held-out problems.
    samples: int = 8  # Responses per problem.
    max_new_tokens: int | None = None  # Instead of the task's, for trials.
    precision: str = "bf16"
    engine: str = "vllm:gpu_memory_utilization=0.5,max_model_len=4096"


def spread(rewards_NK: ArrayLike) -> dict[str, Any]:
    """Return statistics of rewards ``[N, K]``: the mean with its 95 % interval over problems, and
    the standard deviation within a problem, averaged over problems.
    """
    rewards = np.asarray(rewards_NK, float)
    mean = mean_at_k(rewards)
    return {
        "problems": rewards.shape[0],
        "samples": rewards.shape[1],
        "mean": [mean.value, mean.low, mean.high],
        "within_group_std": float(rewards.std(axis=1).mean()),
    }


def main(options: Options) -> None:
    """Sample with ``sparrow eval``, and write the statistics."""
    setting = SETTINGS[options.task]
    most = options.max_new_tokens or setting.max_new_tokens
    folder = options.work / options.task
    sparrow(
        [
            *("eval", "--model", options.model, "--benchmark", setting.task, "--mode", "dense"),
            *("--out", str(folder), "--engine", options.engine, f"--precision={options.precision}"),
            *(f"--max-new-tokens={most}", f"--temperature={setting.temperature}"),
            *(f"--limit={options.problems}", f"--k={options.samples}"),
        ]
    )
    (path,) = folder.glob("*.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    rewards = np.full((options.problems, options.samples), np.nan)
    for row in rows:
        rewards[row["index"], row["sample"]] = row["reward"]
    result = {
        "task": setting.task,
        "model": "SmolLM2-135M-Instruct" if options.model == "smollm2" else "warm start",
        "temperature": setting.temperature,
        "max_new_tokens": most,
        **spread(rewards),
        "tokens": float(np.mean([row["tokens"] for row in rows])),
        "ended_fraction": float(np.mean([row["finish_reason"] == "stop" for row in rows])),
    }
    save(options.out, result)
    print(json.dumps(result))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
