"""Predict the memory and hours needed for the runs in docs/paper.md, using the ``sparrow cost``
model. Nothing is run.

    python recipes/paper/predicted.py --out benchmarks/results/paper_runs.json

Response lengths are assumed to be log-normal, with a median of 14,000 tokens for math and 6,000 for
code, cut at the recipe's limit.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any, cast

from sparrow.cli.commands.dry_run import PROMPT
from sparrow.cli.commands.train import Train
from sparrow.cli.entry import parse
from sparrow.cli.loading import parse_spec
from sparrow.cost import MACHINES, SHAPES, response_lengths
from sparrow.cost.cluster import Cluster, plan
from sparrow.schedule import SparsitySchedule

FOLDER = Path(__file__).parent
RUNS = [
    *(("math", model, 8) for model in ("qwen3-1.7b", "qwen3-4b", "qwen3-8b", "qwen3-14b")),
    ("math", "qwen3-14b", 32),
    ("code", "qwen3-1.7b", 8),
]
MEDIAN = {"math": 14_000, "code": 6_000}
ACCEPTANCE = 0.94  # for drafts that read 1,024 tokens, measured with the text model


def predicted(kind: str, model: str, gpus: int) -> dict[str, Any]:
    """Predict the GiB per GPU that a run needs and, for each mode, the seconds per step and total
    hours.
    """
    files = [FOLDER / "math.toml", *([FOLDER / "code.toml"] if kind == "code" else [])]
    run = cast(
        Train,
        parse(["train", "--model", model, *(part for f in files for part in ("--config", str(f)))]),
    )
    engine = parse_spec(run.engine)[1]
    lengths = response_lengths(
        MEDIAN[kind], run.rollout.max_new_tokens, run.rollout.prompts * run.rollout.samples
    )
    estimate = plan(
        SHAPES[model],
        Cluster(MACHINES["h200"], gpus),
        lengths,
        SparsitySchedule.preset(model),
        PROMPT,
        engine["max_num_seqs"],
        run.optimizer.token_budget,
        engine_share=engine["gpu_memory_utilization"],
        acceptance=ACCEPTANCE,
    )
    gib = 2**30
    memory = estimate.memory
    steps = {"dense": estimate.dense, "lossy": estimate.sparse, "lossless": estimate.lossless}
    return {
        "run": kind,
        "model": model,
        "gpus": gpus,
        "steps": run.steps,
        "mean_length": float(lengths.mean()),
        "training_gib": (memory.state + memory.gradients + memory.activations) / gib,
        "engine_gib": (memory.engine_weights + memory.kv) / gib,
        "full_responses": memory.full_responses,
        "step_s": {mode: step.seconds for mode, step in steps.items() if step},
        "rollout_s": {mode: step.rollout for mode, step in steps.items() if step},
        "hours": {mode: run.steps * step.seconds / 3600 for mode, step in steps.items() if step},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    arguments.out.write_text(json.dumps([predicted(*run) for run in RUNS], indent=1))


if __name__ == "__main__":
    main()
