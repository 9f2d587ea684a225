"""Test how lossy rollouts affect training with long responses in natural text, as a control for the
reasoner study.

The language model from ``train.py`` is trained with GRPO on the task in ``task.py``. Arms differ in
how many pages the actor reads: all of them, or as many as a schedule calibrated to a p5 allows.
Runs with the same seed see the same problems. Every run writes one line per step to
``OUT/ARM-SEED.jsonl``. Existing runs are skipped, so a study can be spread over several calls. By
default, there are twelve runs, two per arm, with 6 million response tokens in total. Other arms can
be run by name: ``p80-none`` and so on (with a correction other than token TIS), ``p80-distill``
(with DistillSparse), and ``auto86`` (the closed loop with a tau of 0.86, starting dense).

    python studies/text/control.py runs/text --out runs/control --seconds 0      # only calibrates
    python studies/text/control.py runs/text --out runs/control --slots 6
    python studies/text/control_summary.py runs/control --out benchmarks/results/text_control.json

There is no lossless arm, because lossless samples follow the dense policy's distribution exactly,
just like the dense arm's.

Actor and policy are both in float32. So up to rounding, a dense actor equals the policy, and any
effect of an arm comes from its schedule alone.
"""

from __future__ import annotations

import copy
import json
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

sys.path.append(str(Path(__file__).parents[1] / "common"))
from many_runs import (
    HELD_OUT,
    calibrated,
    mean_reward,
    plain_options,
    run_study,
    schedules,
    train_logged,
)

ARM = re.compile(r"(?P<schedule>dense|p\d+|auto(?P<tau>\d+))(-(?P<change>\w+))?")
TARGETS = (0.75, 0.80, 0.86, 0.90, 0.93)
ARMS = ("dense", *(f"p{100 * target:.0f}" for target in TARGETS))
LAYOUT = {"bin_tokens": 256}
"""The default layout, but with 256-token bins, a quarter of the context each."""
BUDGETS = (2, 4, 8, 12, 18, 26, 38, 56)


@dataclass(frozen=True)
class Options:
    """What to run, where, and for how long."""

    checkpoint: tyro.conf.Positional[Path]  # Folder written by train.py.
    out: Path = Path("runs/control")  # Folder for results; existing runs are skipped.
    runs: tuple[
        str, ...
    ] = ()  # Names of runs, ARM-SEED, in this order; by default, all arms with all seeds.
    seeds: tuple[int, ...] = (0, 1)  # Seeds of each arm.
    steps: int = 20  # Steps per run.
    # Seconds after which no step begins. A run starts only if it should get far enough by then.
    seconds: float = 3600
    slots: tuple[int, ...] = (6,)  # Concurrent runs on each GPU, or on the CPU if there is none.
    learning_rate: float = 1e-4  # Learning rate of AdamW.
    correction: str = "token_tis"  # As in sparrow train, for arms whose name has none.
    distill_rate: float = 1e-3  # Learning rate of the LoRA that DistillSparse trains.
    prompts: int = 6  # Prompts per step.
    samples: int = 8  # Responses per prompt.
    max_new_tokens: int = 512  # Maximum length of a response.
    temperature: float = 0.8  # Sampling temperature of actor and policy.
    top_n: int = 256  # Length of the recorded top lists, which bound the acceptance rate.
    token_budget: int = 8192  # Padded tokens per forward and backward pass.
    held_out: int = 48  # Number of held-out problems.
    held_out_every: int = 5  # Steps between evaluations, besides those at the start and at the end.
    calibration: int = 48  # Responses for calibration.
    dense_layers: tuple[int, ...] = (0, 1)  # Dense layers of the schedules.
    budgets: tuple[int, ...] = BUDGETS  # Pages that calibration tries first.
    targets: tuple[float, ...] = (
        TARGETS  # Targets of p5 for the schedules, after which arms are named.
    )


def main(options: Options) -> None:
    """Calibrate the schedules, then keep all slots on all GPUs busy until all arms are done or time
    is up.
    """
    run_study(options, ARMS, train, calibrate, lambda arm: arm.startswith("p"))


def longest(task: Any, tokenizer: Any, max_new_tokens: int) -> int:
    """Return the maximum length of one of the task's prompts plus its response, in tokens."""
    prompts = [problem["prompt"] for problem in task.problems]
    return max(map(len, tokenizer(prompts, add_special_tokens=False)["input_ids"])) + max_new_tokens


def held_out_problems(options: Any) -> list[Any]:
    """Return the first ``options.held_out`` held-out problems of the checkpoint."""
    from task import Continue

    task = Continue(options.checkpoint, "held_out")
    return [task.problem(i) for i in range(min(options.held_out, len(task.problems)))]


def make_engine(options: Options, model: Any, tokenizer: Any, schedule: Any) -> Any:
    """Create the actor, which also decodes held-out problems densely."""
    from graph_engine import GraphEngine
    from task import Continue

    from sparrow.engines.hf import eos_ids

    tasks = (Continue(options.checkpoint, kind) for kind in ("train", "held_out"))
    most = max(longest(task, tokenizer, options.max_new_tokens) for task in tasks)
    batch_size = options.prompts * options.samples
    return GraphEngine(
        model,
        schedule,
        eos_ids(model, tokenizer),
        batch_size,
        most,
        top_n=options.top_n,
        token_budget=16_384,
    )


def calibrate(options: Options, device: Any) -> dict[str, list[int]]:
    """Calibrate a schedule for each of ``options.targets`` on the same trajectories, with problems
    from a separate stream.
    """
    from task import Continue

    from sparrow.engines.hf import load_model
    from sparrow.rollout import Sampling
    from sparrow.schedule import SparsitySchedule

    model, tokenizer = load_model(str(options.checkpoint), "fp32", device)
    layout = SparsitySchedule.dense(**LAYOUT, dense_layers=options.dense_layers)
    engine = make_engine(options, model, tokenizer, layout)
    task = Continue(options.checkpoint)
    texts = [task.problem(i, HELD_OUT).prompt for i in range(options.calibration)]
    prompts = tokenizer(texts, add_special_tokens=False)["input_ids"]
    sampling = Sampling(options.max_new_tokens, options.temperature, options.top_n)
    return calibrated(engine, prompts, sampling, layout, options.targets, options.budgets)


def described(arm: str, correction: str) -> tuple[str, float | None, bool, str]:
    """Parse an arm's name, and return its schedule, the closed loop's tau, whether the actor is
    distilled, and the correction.

    Raises ValueError if there is no such arm.
    """
    match = ARM.fullmatch(arm)
    if not match:
        raise ValueError(
            f"no arm {arm!r}; expected dense, p86, auto86, p86-distill, or p86- followed by a "
            "correction"
        )
    tau = float(f"0.{match['tau']}") if match["tau"] else None
    distilled = match["change"] == "distill"
    return (
        match["schedule"],
        tau,
        distilled,
        correction if distilled else match["change"] or correction,
    )


def train(options: Options, arm: str, seed: int, device: Any, deadline: float, path: Path) -> None:
    """Do the run. The trained model is not saved."""
    from task import Continue

    from sparrow.engines.hf import load_model
    from sparrow.rollout import Sampling
    from sparrow.schedule import SparsitySchedule
    from sparrow.train.config import (
        CorrectionConfig,
        DistillConfig,
        OptimizerConfig,
        RolloutConfig,
        TrainConfig,
    )

    schedule_name, tau, distilled, correction = described(arm, options.correction)
    model, tokenizer = load_model(str(options.checkpoint), "fp32", device)
    dense = SparsitySchedule.dense(**LAYOUT, dense_layers=options.dense_layers)
    schedule = dense
    if schedule_name.startswith("p"):
        schedule = dense.replace(
            top_k=tuple(json.loads(schedules(options).read_text())[schedule_name])
        )
    # Only a distilled actor has its own weights; all others share the policy's.
    engine = make_engine(options, copy.deepcopy(model) if distilled else model, tokenizer, schedule)
    policy = make_engine(options, model, tokenizer, dense) if distilled else engine
    problems = held_out_problems(options)
    sampling = Sampling(options.max_new_tokens, options.temperature, 1)

    def held_out() -> float:
        """Return the dense policy's mean reward."""
        before = policy.schedule
        policy.set_schedule(dense)
        reward = mean_reward(policy, tokenizer, problems, sampling)
        policy.set_schedule(before)
        return reward

    with tempfile.TemporaryDirectory() as folder:
        config = TrainConfig(
            run_dir=str(Path(folder, "run")),
            steps=options.steps,
            save_every=10**6,
            seed=seed,
            logged_rollouts=0,
            rollout=RolloutConfig(
                options.prompts,
                options.samples,
                options.max_new_tokens,
                options.temperature,
                options.top_n,
            ),
            optimizer=OptimizerConfig(options.learning_rate, token_budget=options.token_budget),
            correction=CorrectionConfig(correction),
            **({"tau": tau} if tau else {}),
            distill=DistillConfig(enabled=distilled, learning_rate=options.distill_rate),
        )
        start = {
            "arm": arm,
            "seed": seed,
            "schedule": schedule_name,
            "actor": "distilled" if distilled else "",
            "correction": correction,
            "learning_rate": options.learning_rate,
            "top_k": schedule.to_dict()["top_k"],
            "options": plain_options(options),
        }
        train_logged(
            path,
            start,
            held_out,
            options.held_out_every,
            deadline,
            config,
            model,
            tokenizer,
            Continue(options.checkpoint),
            engine,
            schedule,
            closed_loop=tau is not None,
        )


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
