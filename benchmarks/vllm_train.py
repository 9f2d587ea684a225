"""Train the bundled reasoner with GRPO and vLLM rollouts on a GPU: lossy, unbounded, distilled,
lossless and dense.

    python benchmarks/vllm_train.py --out benchmarks/results/vllm_train.json
    python benchmarks/vllm_train.py --runs dense-0 dense-1 dense-2 lossless-0 lossless-1 lossless-2 \\
        --out benchmarks/results/vllm_train_lossless.json

The ``sparrow train --engine vllm`` runs share one GPU, side by side. The sparse run must learn
without a drop in p5. With an unbounded budget, actor and policy are the same model, so p5 is below
1 only because vLLM and transformers round bfloat16 in different places. If p5 fell during this run,
the transfer of weights to vLLM would be broken. The KL divergence between actor and policy is
recorded too: a change of entropy can mask a fall in p5, but not a rise in KL. With DistillSparse,
the actor's LoRA is merged into the policy's weights before the transfer. In lossless runs, drafts
read a third of a long sequence. Lossless runs are compared with dense runs in stock vLLM with the
same seeds.

The schedule was calibrated on a CPU to a p5 of 0.95 (``sparrow calibrate --task trace:lines=24
--count 24 --max-new-tokens 300 --layout LAYOUT --target 0.95 --budgets 8 12 16 20 24 28 32 --refine
0 --on-policy 0``). LAYOUT has pages of 8 tokens (the smallest that the decode kernels support),
bins of 64 tokens, and a dense first layer.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import parser, write

LAYOUT = {"bin_tokens": 64, "page_size": 8, "sink_pages": 1, "recent_pages": 2, "dense_layers": [0]}
SPARSE = {"top_k": [8, 8, 8, 16, 20, 24, 28], **LAYOUT}
UNBOUNDED = {"top_k": ["all"], **LAYOUT}
ENGINE = (
    'vllm:compilation_config={"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"},'
    "gpu_memory_utilization=0.05,kv_cache_memory_bytes=4294967296,max_model_len=1024,max_num_seqs=256"
)
TRAIN = [
    sys.executable,
    "-m",
    "sparrow.cli",
    "train",
    "--model",
    "reasoner",
    "--task",
    "trace:lines=24",
    "--rollout.prompts",
    "24",
    "--rollout.samples",
    "8",
    "--rollout.max-new-tokens",
    "300",
    "--optimizer.learning-rate",
    "5e-4",
    "--optimizer.precision",
    "bf16",
    "--loss.normalization",
    "dapo",
]
"""Options shared by the runs of this script and of ``same_run.py``."""
DRAFTS = {"top_k": [8], **LAYOUT, "dense_layers": []}
RUNS: dict[str, tuple[dict[str, Any] | None, int, list[str]]] = {
    "sparse": (SPARSE, 30, ["--tau", "0.9"]),
    "unbounded": (UNBOUNDED, 30, ["--tau", "0.9"]),
    "distilled": (
        SPARSE,
        6,
        ["--tau", "0.9", "--distill.enabled", "--distill.learning-rate", "1e-3"],
    ),
    **{
        f"dense-{seed}": (None, 30, ["--rollout.mode", "dense", "--seed", f"{seed}"])
        for seed in range(3)
    },
    **{
        f"lossless-{seed}": (DRAFTS, 30, ["--rollout.mode", "lossless", "--seed", f"{seed}"])
        for seed in range(3)
    },
}
"""Each run's schedule, number of steps, and additional options."""


def start(name: str, folder: Path) -> subprocess.Popen[bytes]:
    schedule, steps, more = RUNS[name]
    if schedule is not None:
        path = folder / f"{name}.schedule.json"
        path.write_text(json.dumps(schedule))
        more = [
            *more,
            "--rollout.draft-schedule" if "lossless" in more else "--schedule",
            str(path),
        ]
    command = [
        *TRAIN,
        "--engine",
        ENGINE,
        "--run-dir",
        str(folder / name),
        "--steps",
        str(steps),
        "--save-every",
        "1000",
        "--optimizer.token-budget",
        "131072",
        *more,
    ]
    with open(folder / f"{name}.log", "wb") as log:
        return subprocess.Popen(command, stdout=log, stderr=log)


def read(run: Path) -> list[dict[str, Any]]:
    """Read every step's main metrics: ``QUANTITIES``, draft counts, and the rollout's seconds."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    rows = []
    for step in map(json.loads, lines):
        bins = step["mismatch"]["bins"]
        weights = np.array([b["n_tokens"] for b in bins])
        rows.append(
            {
                "step": step["step"],
                "reward": step["reward"]["mean"],
                "entropy": step["entropy"],
                "acceptance": step["mismatch"]["mean"],
                "p5_mean": float(np.average([b["lower_bound"] for b in bins], weights=weights)),
                "read_fraction": step["kv"]["read_fraction"],
                "rollout_s": step["seconds"]["rollout"],
                "tokens_per_cycle": step.get("drafts", {}).get("tokens_per_cycle"),
                "kl": step["correction"]["kl_k3"],
            }
        )
    return rows


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Return one list per metric, with the values of all steps. This takes less than half the space
    of a list of rows.
    """
    return {name: [row[name] for row in rows] for name in (rows[0] if rows else ())}


QUANTITIES = ("reward", "entropy", "acceptance", "p5_mean", "kl", "read_fraction")


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the means over the first and the last sixth of the steps. Also fit a line to all
    steps, and return its change over the run with the standard error.
    """
    n = len(rows) // 6 or 1
    metrics: dict[str, float] = {}
    for name in QUANTITIES:
        y = np.array([row[name] for row in rows])
        metrics |= {f"{name} first": float(y[:n].mean()), f"{name} last": float(y[-n:].mean())}
        if len(y) > 3:
            (slope, _), covariance = np.polyfit(np.arange(len(y)), y, 1, cov=True)
            metrics |= {
                f"{name} change": float(slope * len(y)),
                f"{name} change error": float(covariance[0, 0] ** 0.5 * len(y)),
            }
    return metrics


def main() -> None:
    options = parser(__doc__, "vllm_train")
    options.add_argument("--runs", nargs="+", choices=RUNS, default=list(RUNS)[:3])
    arguments = options.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        running = {}
        for run in arguments.runs:
            running[run] = start(run, folder)
            time.sleep(3)  # vLLM measures free memory when it starts
        while True:
            alive = any(process.poll() is None for process in running.values())
            results = {
                run: {
                    "schedule": RUNS[run][0],
                    "exit": running[run].returncode,
                    "steps": columns(rows),
                    "summary": summary(rows),
                }
                for run in arguments.runs
                if (rows := read(folder / run))
            }
            write(arguments.out, results)
            if not alive:
                break
            time.sleep(5)
        for run, process in running.items():
            if process.returncode:
                sys.exit(
                    f"{run} failed:\n{(folder / f'{run}.log').read_text(errors='replace')[-5000:]}"
                )


if __name__ == "__main__":
    main()
