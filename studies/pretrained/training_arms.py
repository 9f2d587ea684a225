"""Train SmolLM2-135M-Instruct with GRPO through vLLM, with dense, lossless and lossy rollouts.

    python studies/pretrained/training_arms.py story --out runs/story --schedules-only
    python studies/pretrained/training_arms.py story --out runs/story --runs dense-0 lossless-0

Every run is one ``sparrow train`` command with the run directory ``OUT/ARM-SEED``. Arms are

- ``dense`` and ``lossless``;
- ``p80``, ``p86``, ``p92``: lossy, with a schedule calibrated to this p5 (``OUT/p80.json`` etc.);
- ``auto86``: the closed loop with a tau of 0.86, starting dense;
- ``p80-distill``: ``p80`` with DistillSparse.

Runs share a GPU side by side. When time is up, they save their last finished step, and a second
call continues them; finished runs are skipped. For a comparison of wall-clock time, use one slot.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import tyro
from training_tasks import SETTINGS

from sparrow.schedule import SparsitySchedule

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "studies/common"))
from many_runs import side_by_side, use_gpu  # noqa: E402

TARGETS = {"p80": 0.80, "p86": 0.86, "p92": 0.92}
"""The p5 that each calibrated schedule is meant to reach, by name."""
ARMS = ("dense", "lossless", *TARGETS, "auto86", "p80-distill")
GRACE = 120
"""Seconds that a run may take to save its last step when time is up."""


@dataclass(frozen=True)
class Options:
    """The runs to perform, their GPUs, and a time limit."""

    task: tyro.conf.Positional[str]  # A task of training_tasks.SETTINGS.
    out: Path  # Folder for run directories, logs and schedules.
    model: str = "smollm2"  # The model, or what warm_start.py wrote.
    runs: tuple[str, ...] = ()  # Names of runs, ARM-SEED; by default, all arms with all seeds.
    seeds: tuple[int, ...] = (0, 1, 2)  # Seeds of each arm.
    steps: int = 300  # Steps per run.
    seconds: float = 480  # Seconds after which all runs are stopped.
    slots: tuple[int, ...] = (4,)  # Concurrent runs on each GPU, or on the CPU if there is none.
    schedules_only: bool = False  # Only calibrate the schedules.
    prompts: int = 8  # Prompts per step.
    samples: int = 8  # Responses per prompt.
    top_n: int = 128  # Length of the recorded top lists, which bound the acceptance rate.
    learning_rate: float = 2e-5  # Learning rate of AdamW.
    distill_rate: float = 1e-3  # Learning rate of the adapter that DistillSparse trains.
    token_budget: int = 8192  # Padded tokens per forward and backward pass.
    bin_tokens: int = 512  # Width of length bins, also of the schedules'.
    held_out: int = 32  # Number of held-out problems.
    held_out_every: int = 10  # Steps between evaluations.
    calibration: int = 48  # Responses for calibration.
    budgets: tuple[int, ...] = (4, 8, 16, 32, 64, 128)  # Pages that calibration tries first.
    max_new_tokens: int | None = None  # Instead of the task's, for trials.
    precision: str = "bf16"  # Precision of forward passes and of vLLM.
    # The engine. Each run takes this share of the GPU's memory and this much KV cache.
    engine: str = (
        "vllm:gpu_memory_utilization=0.1,kv_cache_memory_bytes=6442450944,max_model_len=4096,"
        'max_num_seqs=64,compilation_config={"mode":0,"cudagraph_mode":"FULL_DECODE_ONLY"}'
    )


def sampling(options: Options, prefix: str = "") -> list[str]:
    """Return the arguments that the study's ``sparrow`` commands share."""
    setting = SETTINGS[options.task]
    return [
        *("--model", options.model, "--task", setting.task, "--engine", options.engine),
        f"--{prefix}max-new-tokens={options.max_new_tokens or setting.max_new_tokens}",
        f"--{prefix}temperature={setting.temperature}",
    ]


def layout(options: Options) -> Path:
    """Return the path of a dense schedule. All schedules have the same page size and bins as this
    one.
    """
    return options.out / "layout.json"


def actor(options: Options, arm: str) -> list[str]:
    """Return an arm's own arguments for ``sparrow train``.

    Raises ValueError if there is no such arm.
    """
    if arm not in ARMS:
        raise ValueError(f"no arm {arm!r}; choose one of {', '.join(ARMS)}")
    if arm in ("dense", "lossless"):
        return ["--rollout.mode", arm]
    if arm == "auto86":
        return ["--schedule", f"auto:{layout(options)}", "--tau", "0.86"]
    schedule, _, change = arm.partition("-")
    distill = ["--distill.enabled", f"--distill.learning-rate={options.distill_rate}"]
    return ["--schedule", str(options.out / f"{schedule}.json"), *(distill if change else [])]


def train_arguments(options: Options, name: str) -> list[str]:
    """Return the ``sparrow`` arguments that start the run ARM-SEED or, if it has a checkpoint,
    continue it.
    """
    arm, _, seed = name.rpartition("-")
    folder = options.out / name
    task = SETTINGS[options.task].task
    resume = ["--resume"] if any(folder.glob("checkpoints/step-*")) else []
    return [
        "train",
        *("--run-dir", str(folder), *resume, *sampling(options, "rollout."), *actor(options, arm)),
        *(f"--seed={seed}", f"--steps={options.steps}", f"--bin-tokens={options.bin_tokens}"),
        *("--save-every", "100000", "--keep-checkpoints", "1"),
        *(f"--rollout.prompts={options.prompts}", f"--rollout.samples={options.samples}"),
        f"--rollout.top-n={options.top_n}",
        f"--optimizer.learning-rate={options.learning_rate}",
        f"--optimizer.token-budget={options.token_budget}",
        f"--optimizer.precision={options.precision}",
        *(f"--eval.every={options.held_out_every}", "--eval.benchmark", task),
        *(f"--eval.limit={options.held_out}", "--eval.temperature", "1"),
    ]


def calibrate_arguments(options: Options, name: str) -> list[str]:
    """Return the arguments of ``sparrow`` that calibrate the schedule ``name``."""
    return [
        "calibrate",
        *("--out", str(options.out / f"{name}.json"), *sampling(options)),
        *(f"--target={TARGETS[name]}", "--layout", str(layout(options))),
        *(f"--count={options.calibration}", f"--precision={options.precision}", "--on-policy=1"),
        *("--seed=1000000", "--budgets", *map(str, options.budgets)),
    ]


def run(options: Options, name: str, gpu: int, deadline: float) -> None:
    """Run a command until it ends or time is up. Its output goes to ``OUT/NAME.log``."""
    use_gpu(gpu)
    calibrates = name in TARGETS
    arguments = (calibrate_arguments if calibrates else train_arguments)(options, name)
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(ROOT), os.environ.get("PYTHONPATH", "")]
    )
    with open(options.out / f"{name}.log", "a", encoding="utf-8") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "sparrow.cli", *arguments],
            env={**os.environ, "PYTHONPATH": path},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            process.wait(max(0.0, deadline - time.time()))
        except subprocess.TimeoutExpired:
            process.terminate()  # sparrow train saves the last finished step
            try:
                process.wait(GRACE)
            except subprocess.TimeoutExpired:
                process.kill()


def left(options: Options, names: Sequence[str]) -> list[str]:
    """Return the runs that are not finished. A run that has metrics but no checkpoint can't be
    continued, so it is left as it is.
    """
    found = []
    for name in names:
        folder = options.out / name
        lost = (folder / "metrics.jsonl").exists() and not any(folder.glob("checkpoints/step-*"))
        if not (folder / "model").exists() and not lost:
            found.append(name)
    return found


def main(options: Options) -> None:
    """Calibrate the schedules that are missing, then perform the runs."""
    deadline = time.time() + options.seconds
    names = options.runs or tuple(f"{arm}-{seed}" for seed in options.seeds for arm in ARMS)
    for name in names:
        actor(options, name.rpartition("-")[0])
    options.out.mkdir(parents=True, exist_ok=True)
    bins = SparsitySchedule.dense(bin_tokens=options.bin_tokens, dense_layers=())
    layout(options).write_text(bins.to_json(), encoding="utf-8")
    jobs = left(options, names)
    needed = {name.partition("-")[0] for name in jobs} & set(TARGETS)
    missing = sorted(name for name in needed if not (options.out / f"{name}.json").exists())
    side_by_side(missing, options.slots, deadline, partial(run, options))
    if failed := [name for name in missing if not (options.out / f"{name}.json").exists()]:
        raise RuntimeError(
            f"the calibration of {', '.join(failed)} did not finish; see "
            f"{options.out}/{failed[0]}.log"
        )
    if not options.schedules_only:
        side_by_side(jobs, options.slots, deadline, partial(run, options))


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
