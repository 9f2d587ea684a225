"""Run the demo with several seeds, recording the reward by step and the held-out accuracy before
and after.

    python studies/reasoner/demo_seeds.py --folder runs/seeds --out benchmarks/results/demo.json

Runs already in the folder are not repeated. Each seed takes about six minutes on two idle cores.
"""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import astuple, dataclass
from pathlib import Path

import numpy as np
import tyro

from sparrow.cli import main as sparrow
from sparrow.cli.loading import model_path
from sparrow.evaluation.scores import mean_at_k

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from common import save

PROBLEMS, SAMPLES = 48, 8


@dataclass(frozen=True)
class Options:
    """What to run."""

    folder: Path = Path("runs/seeds")  # Folder for the runs.
    out: Path = Path("benchmarks/results/demo.json")  # The JSON file of results.
    seeds: tuple[int, ...] = (0, 1, 2)  # Seeds of the demo.


def held_out(model: str, schedule: Path, folder: Path) -> dict[str, list[float]]:
    """Return the mean accuracy on the same problems, dense and sparse, with intervals."""
    arguments = ["--model", model, "--schedule", str(schedule), "--out", str(folder)]
    sparrow(
        [
            "eval",
            "--benchmark",
            "trace:lines=24",
            "--k",
            str(SAMPLES),
            "--limit",
            str(PROBLEMS),
            "--max-new-tokens",
            "300",
            *arguments,
        ]
    )
    scores = {}
    for name in ("dense", "sparse"):
        (path,) = (p for p in folder.glob("*.jsonl") if ("-dense-" in p.name) == (name == "dense"))
        rewards = [
            json.loads(line)["reward"] for line in path.read_text(encoding="utf-8").splitlines()
        ]
        scores[name] = list(astuple(mean_at_k(np.reshape(rewards, (PROBLEMS, SAMPLES)))))
    return scores


def main(options: Options) -> None:
    """Do the missing runs, and write the table."""
    schedule = options.folder / "schedule.json"
    options.folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(model_path("reasoner"), "demo_schedule.json"), schedule)
    start = held_out("reasoner", schedule, options.folder / "eval-start")
    runs = []
    for seed in options.seeds:
        run = options.folder / f"seed-{seed}"
        if not (run / "model").exists():
            sparrow(["demo", "--steps", "12", "--seed", str(seed), "--run-dir", str(run)])
        rows = [
            json.loads(line)
            for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        ]
        read, held = (sum(row["kv"][key] for row in rows) for key in ("tokens_read", "tokens_held"))
        runs.append(
            {
                "seed": seed,
                "reward": [row["reward"]["mean"] for row in rows],
                "p5_first": [b["lower_bound"] for b in rows[0]["mismatch"]["bins"]],
                "p5_last": [b["lower_bound"] for b in rows[-1]["mismatch"]["bins"]],
                "kv_read_fraction": read / held,
                "seconds": sum(sum(row["seconds"].values()) for row in rows),
                "held_out": held_out(str(run / "model"), schedule, options.folder / f"eval-{seed}"),
            }
        )
    save(
        options.out,
        {"problems": PROBLEMS, "samples": SAMPLES, "held_out_start": start, "runs": runs},
    )


if __name__ == "__main__":
    main(tyro.cli(Options))
