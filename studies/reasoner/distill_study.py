"""Measure how DistillSparse affects the tail under a cheap schedule, on the small reasoner with
GRPO.

Before training, the cheap schedule has a p5 of about 0.80 on the actor's samples, and a more
expensive one has 0.87. For several seeds, the same GRPO run is done with and without distillation
under the cheap schedule:

- ``none``: no adapter;
- ``full``: policy loss and KL at every position;
- ``kl``: KL only;
- ``half``, ``quarter``: policy loss and KL on this fraction of the responses, the ones with the
  worst tails;
- ``expensive``: like ``full``, but under the more expensive schedule.

At the end, the policy and the actor answer held-out problems, the actor both with and without its
adapter. Training makes the policy more confident, which raises p5 by itself. So only the difference
between the actor's two results is due to the adapter. benchmarks/tables.py makes the tables in
docs/distill.md from the results.

    python studies/reasoner/distill_study.py --folder runs/distill --slots 9 9    # 2 GPUs, about five minutes
    python studies/reasoner/distill_study.py --folder runs/distill --seconds 0    # only collect finished runs
"""

from __future__ import annotations

import contextlib
import copy
import json
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from stability_study import HELD_OUT, load, longest, response

from sparrow.schedule import ALL_PAGES, SparsitySchedule
from sparrow.train.config import (
    DistillConfig,
    LossConfig,
    OptimizerConfig,
    RolloutConfig,
    TrainConfig,
)

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks"), str(ROOT / "studies/common")]
from common import save  # noqa: E402
from many_runs import plain_options, side_by_side, use_gpu  # noqa: E402

ARMS = {
    "none": DistillConfig(),
    "full": DistillConfig(enabled=True, responses=1.0),
    "kl": DistillConfig(enabled=True, responses=1.0, policy_loss=False),
    "half": DistillConfig(enabled=True, responses=0.5),
    "quarter": DistillConfig(enabled=True, responses=0.25),
    "expensive": DistillConfig(enabled=True, responses=1.0),
}
TAU = 0.86
DENSE = SparsitySchedule(top_k=(ALL_PAGES,), bin_tokens=64, page_size=8, dense_layers=(0,))
CHEAP, EXPENSIVE = DENSE.replace(top_k=(4, 4, 4, 5)), DENSE.replace(top_k=(5, 5, 5, 7, 8, 9))
LAST = 10
"""The number of steps at the end whose reward and p5 the result keeps. Tables average over them."""


@dataclass(frozen=True)
class Options:
    """What to run."""

    folder: Path = Path("runs/distill")  # Folder for the runs; finished runs are not repeated.
    out: Path = Path("benchmarks/results/distill.json")  # The JSON file of results.
    # The arms to run, any of none, full, kl, half, quarter and expensive.
    arms: tuple[str, ...] = ("none", "full", "kl", "half", "expensive")
    seeds: tuple[int, ...] = (0, 1, 2)  # Seeds of each arm.
    steps: int = 45  # Maximum number of GRPO steps.
    # After this many seconds, no more training steps begin, and the last measurements are taken.
    seconds: float = 3600
    prompts: int = 32  # Prompts per step, with 8 samples each.
    learning_rate: float = 1e-3  # Learning rate of the adapter.
    policy_learning_rate: float = 1e-4  # Learning rate of the policy.
    held_out: int = 256  # Number of held-out problems.
    lines: int = 24  # Lines per program.
    slots: tuple[int, ...] = (8,)  # Concurrent runs on each GPU, or on the CPU if there is no GPU.


class HeldOut:
    """Measures an engine on held-out problems: its reward and, for each length bin, p5 and the
    fraction of tokens with an acceptance below 0.5.
    """

    def __init__(self, options: Options, policy: Any, tokenizer: Any, task: Any, seed: int) -> None:
        from sparrow.rollout import Sampling

        self._problems = [task.problem(i, HELD_OUT) for i in range(options.held_out)]
        self._prompts = [tokenizer(p.prompt).input_ids for p in self._problems]
        self._policy, self._tokenizer = policy, tokenizer
        self._sampling = Sampling(response(options.lines), seed=seed)

    def __call__(self, engine: Any, schedule: SparsitySchedule) -> dict[str, Any]:
        from sparrow.mismatch.tokens import flatten, pool, token_acceptance

        engine.set_schedule(schedule)
        rollouts = engine.generate(self._prompts, self._sampling)
        engine.counters()  # reset, since these tokens don't belong to training
        scores = self._policy.score(rollouts, SparsitySchedule.dense(), 1.0)
        accepted = [
            token_acceptance(r, s.top_logprobs, schedule)
            for r, s in zip(rollouts, scores, strict=True)
        ]
        mismatch = pool(accepted, 64)
        lower, _, position, _ = flatten(accepted)
        rare = [np.mean(lower[position // 64 == b.bin] < 0.5) for b in mismatch.bins]
        texts = self._tokenizer.batch_decode(
            [r.response_ids for r in rollouts], skip_special_tokens=True
        )
        reward = np.mean([p.verify(text) for p, text in zip(self._problems, texts, strict=True)])
        bins = bins_of(mismatch.to_dict())
        return {
            "bins": bins,
            "below_half": np.round(rare, 4).tolist(),
            "mean": mismatch.mean,
            "reward": float(reward),
        }


def bins_of(report: dict[str, Any]) -> list[list[float]]:
    """Return a row for each length bin: start, end, p5, the two ends of p5's interval, and the
    number of responses.
    """
    keys = ("start", "end", "lower_bound", "interval_low", "interval_high", "n_sequences")
    return [[b[key] for key in keys] for b in report["bins"]]


def run_one(options: Options, name: str, gpu: int, deadline: float) -> None:
    """Do one training run, with measurements before and after it."""
    device = use_gpu(gpu)
    from graph_engine import GraphEngine

    from sparrow.engines.hf import HFEngine, eos_ids
    from sparrow.tasks import load_task
    from sparrow.train.trainer import Trainer

    arm, seed = name.split("-")[0], int(name.split("-")[1])
    distill = replace(ARMS[arm], learning_rate=options.learning_rate)
    schedule = EXPENSIVE if arm == "expensive" else CHEAP
    (model, tokenizer), task = load(device), load_task("trace", lines=options.lines)
    eos, batch_size = eos_ids(model, tokenizer), max(8 * options.prompts, options.held_out)
    config = TrainConfig(
        run_dir=str(options.folder / name),
        steps=options.steps,
        seed=seed,
        save_every=options.steps,
        tau=TAU,
        logged_rollouts=0,
        rollout=RolloutConfig(
            prompts=options.prompts, samples=8, max_new_tokens=response(options.lines)
        ),
        optimizer=OptimizerConfig(options.policy_learning_rate, warmup_steps=5, token_budget=24576),
        loss=LossConfig(normalization="dapo"),
        distill=distill,
    )
    engine = GraphEngine(copy.deepcopy(model), schedule, eos, batch_size, longest(options.lines))
    measure = HeldOut(options, HFEngine(model, DENSE, eos), tokenizer, task, seed)
    result: dict[str, Any] = {}
    if arm == "none":
        result = {"dense at the start": measure(engine, DENSE), "start": measure(engine, CHEAP)}

    def listener(event: str, metrics: dict[str, Any]) -> None:
        if event == "step" and time.time() > deadline:
            raise TimeoutError

    trainer = Trainer(config, model, tokenizer, task, engine, schedule, listener)
    with contextlib.suppress(TimeoutError):  # stop after a complete step
        trainer.train()
    if trainer.learner.distiller:
        result["with"] = measure(engine, CHEAP)
        engine.update_weights(iter(trainer.learner.distiller.policy_weights().items()))
    result |= {"without": measure(engine, CHEAP), "dense": measure(engine, DENSE)}
    (options.folder / f"{name}.json").write_text(json.dumps(result), encoding="utf-8")


def gather(options: Options) -> dict[str, Any]:
    """Collect what the runs have recorded so far."""
    runs: dict[str, Any] = {}
    for name in names(options):
        path, final = options.folder / name / "metrics.jsonl", options.folder / f"{name}.json"
        if not path.exists():
            continue
        rows = [
            json.loads(line)
            for line in path.read_text(encoding="utf-8").splitlines()
            if line.endswith("}")
        ]
        tails = [reached(row["mismatch"]["bins"]) for row in rows]
        runs[name] = {
            "steps": len(rows),
            "reward": [round(row["reward"]["mean"], 4) for row in rows[-LAST:]],
            "lowest_p5": [round(min(b["lower_bound"] for b in tail), 4) for tail in tails[-LAST:]],
            "lowest_p5_low": [round(min(b["interval_low"] for b in tail), 4) for tail in tails],
            "seconds": {
                k: round(float(np.median([r["seconds"][k] for r in rows])), 2)
                for k in rows[0]["seconds"]
            },
            **(json.loads(final.read_text(encoding="utf-8")) if final.exists() else {}),
        }
    return runs


def names(options: Options) -> list[str]:
    """Return the run names, grouped by seed."""
    return [f"{arm}-{seed}" for seed in options.seeds for arm in options.arms]


def main(options: Options) -> None:
    """Do the missing runs, and write the results."""
    deadline = time.time() + options.seconds
    options.folder.mkdir(parents=True, exist_ok=True)
    missing = [name for name in names(options) if not (options.folder / f"{name}.json").exists()]
    side_by_side(missing, options.slots, deadline, partial(run_one, options))
    schedules = {"cheap": CHEAP.to_dict(), "expensive": EXPENSIVE.to_dict()}
    save(
        options.out,
        {"options": plain_options(options), "schedules": schedules, "runs": gather(options)},
    )


def reached(bins: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the bins reached by at least half as many responses as the fullest bin."""
    return [b for b in bins if 2 * b["n_sequences"] >= max(b["n_sequences"] for b in bins)]


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
