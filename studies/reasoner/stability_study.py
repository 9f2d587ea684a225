"""Run many short training runs, one per arm and seed, to test whether the tail of acceptance
decides if training is stable.

The bundled reasoner is trained on the `trace` task. Arms differ in the pages that the actor reads
(schedules calibrated to a p5, a fixed budget, the closed loop, or a KV cache that drops tokens for
good), in the correction, in the loss, or in some other kind of mismatch (low-bit weights, a stale
actor, noise). Runs with the same seed see the same problems. Every run writes one line per step to
``OUT/ARM-SEED.jsonl``.

    python studies/reasoner/stability_study.py --out runs/stability --slots 12 12 12 12
    python studies/reasoner/stability_summary.py --runs runs/stability

Several processes share a GPU, because such a small model leaves it idle between kernel launches.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tyro
from stability_arms import TARGETS, Arm, arms

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

LAYOUT = {"bin_tokens": 64, "page_size": 4, "dense_layers": (0,)}


@dataclass(frozen=True)
class Options:
    """What to run, where, and for how long."""

    out: Path = Path("runs/stability")  # Folder for results; existing runs are skipped.
    runs: tuple[
        str, ...
    ] = ()  # Names of runs, ARM-SEED, in this order; by default, all arms with all seeds.
    seeds: tuple[int, ...] = (0, 1, 2)  # Seeds of each arm.
    steps: int = 40  # Steps per run.
    # Seconds after which no step begins. A run starts only if it should get far enough by then.
    seconds: float = 3600
    slots: tuple[int, ...] = (12,)  # Concurrent runs on each GPU, or on the CPU if there is none.
    model: Path | None = None  # Checkpoint to start from; by default, the bundled reasoner.
    adapter: Path | None = (
        None  # Adapter that the actor starts with, and that is distilled further.
    )
    learning_rate: float = 5e-4  # Learning rate of AdamW.
    prompts: int = 24  # Prompts per step.
    lines: int = 24  # Lines per training problem.
    held_out_lines: int = 32  # Lines per held-out problem.
    held_out: int = 256  # Number of held-out problems.
    held_out_every: int = (
        10  # Steps between evaluations, besides those at the start and at the end.
    )
    calibration: int = 128  # Responses for calibration.
    # Top-k by length bin for drafts and unverified tokens, in arms with the dial.
    dial: tuple[int, ...] = (13, 21, 23, 38, 48, 58, 58)


def main(options: Options) -> None:
    """Calibrate the schedules, then keep all slots on all GPUs busy until all arms are done or time
    is up.
    """
    run_study(
        options,
        arms(),
        train,
        calibrate,
        lambda arm: arms()[arm].schedule.rpartition(":")[2].startswith("p"),
    )


def load(device: Any, checkpoint: Path | None = None) -> tuple[Any, Any]:
    """Load a checkpoint (by default, the bundled reasoner) in float32, with its tokenizer."""
    import sparrow
    from sparrow.engines.hf import load_model

    return load_model(str(checkpoint or Path(sparrow.__file__).parent / "reasoner"), "fp32", device)


def response(lines: int) -> int:
    """Return the maximum response length, a little more than ``lines`` lines need."""
    return 11 * lines + 16


def longest(lines: int) -> int:
    """Return the maximum length of a prompt plus its response, in tokens."""
    return 6 * lines + 16 + response(lines)


def calibrate(options: Options, device: Any) -> dict[str, list[int]]:
    """Calibrate a schedule for each of ``TARGETS`` on the same trajectories."""
    from graph_engine import GraphEngine

    from sparrow.engines.hf import eos_ids
    from sparrow.rollout import Sampling
    from sparrow.schedule import SparsitySchedule
    from sparrow.tasks import Trace

    model, tokenizer = load(device, options.model)
    layout = SparsitySchedule.dense(**LAYOUT)
    lines = options.lines + 4
    engine = GraphEngine(
        model, layout, eos_ids(model, tokenizer), options.calibration, longest(lines)
    )
    task = Trace(lines)  # longer than in training, so that all bins get measured
    prompts = [
        tokenizer(task.problem(i, HELD_OUT).prompt).input_ids for i in range(options.calibration)
    ]
    budgets = (2, 4, 6, 8, 12, 16, 24, 32)
    return calibrated(engine, prompts, Sampling(response(lines)), layout, TARGETS, budgets)


def train(
    options: Options, arm_name: str, seed: int, device: Any, deadline: float, path: Path
) -> None:
    """Do the run."""
    from graph_engine import GraphEngine

    from sparrow.engines.hf import eos_ids
    from sparrow.mismatch import Tau
    from sparrow.rollout import Sampling
    from sparrow.schedule import SparsitySchedule
    from sparrow.tasks import Trace
    from sparrow.train.config import (
        CorrectionConfig,
        DistillConfig,
        LossConfig,
        OptimizerConfig,
        RolloutConfig,
        TrainConfig,
    )
    from sparrow.train.dial import Dial

    arm = arms()[arm_name]
    model, tokenizer = load(device, options.model)
    kind, _, tau = arm.schedule.partition(":")
    schedule = (
        SparsitySchedule(options.dial, **LAYOUT)
        if kind == "dial"
        else find_schedule(arm, schedules(options))
    )
    eos, batch_size = eos_ids(model, tokenizer), options.prompts * arm.samples
    engine = make_engine(arm, model, schedule, eos, batch_size, longest(options.lines))
    dense = SparsitySchedule.dense(**LAYOUT)
    policy = GraphEngine(model, dense, eos, options.held_out, longest(options.held_out_lines))
    task, longer = (Trace(lines) for lines in (options.lines, options.held_out_lines))
    problems = [longer.problem(i, HELD_OUT + 1) for i in range(options.held_out)]
    sampling = Sampling(response(options.held_out_lines), 1.0, 0)

    def after(trainer: Any) -> None:
        if arm.actor in (f"halved:{trainer.step}", f"unworn:{trainer.step}"):
            fail(trainer, arm.actor.partition(":")[0])

    distill = DistillConfig(
        enabled=arm.actor.partition(":")[0].endswith("worn"),
        learning_rate=1e-3,
        adapter=options.adapter and str(options.adapter),
    )
    config = TrainConfig(
        run_dir=str(path.with_suffix("")),
        steps=options.steps,
        save_every=10**6,
        seed=seed,
        logged_rollouts=0,
        advantage=arm.advantage,
        tau=float(f"0.{tau.split(':')[0]}") if tau and kind in ("auto", "dial") else 0.86,
        rollout=RolloutConfig(options.prompts, arm.samples, response(options.lines)),
        optimizer=OptimizerConfig(options.learning_rate, token_budget=16_384),
        correction=CorrectionConfig(arm.correction),
        loss=LossConfig(normalization=arm.normalization),
        distill=distill,
    )
    dial = Dial(Tau(config.tau), as_if_large(schedule, batch_size)) if kind == "dial" else None
    start = {
        "arm": arm_name,
        "seed": seed,
        **asdict(arm),
        "learning_rate": options.learning_rate,
        "top_k": schedule.to_dict()["top_k"],
        "options": plain_options(options),
    }
    train_logged(
        path,
        start,
        lambda: mean_reward(policy, tokenizer, problems, sampling),
        options.held_out_every,
        deadline,
        config,
        model,
        tokenizer,
        task,
        engine,
        schedule,
        closed_loop=kind == "auto",
        dial=dial,
        after=after,
    )


def fail(trainer: Any, fault: str) -> None:
    """Halve the schedule, or remove the actor's adapter, for the rest of the run."""
    if fault == "halved":
        trainer.set_schedule(
            trainer.schedule.replace(top_k=tuple(k // 2 for k in trainer.schedule.top_k))
        )
    else:
        trainer.learner.distiller.actor_weights = lambda: iter(
            trainer.learner.distiller.policy_weights().items()
        )
    trainer.sync()


def find_schedule(arm: Arm, calibrated: Path) -> Any:
    """Return the arm's initial schedule, in the study's layout."""
    from sparrow.schedule import SparsitySchedule

    kind, *rest = arm.schedule.split(":", 2)
    name = ":".join(rest[1:]) or "dense" if kind == "auto" else arm.schedule
    if name == "dense":
        return SparsitySchedule.dense(**LAYOUT)
    if name.startswith("fixed:"):
        return SparsitySchedule.fixed(int(name[6:]), **LAYOUT)
    table = json.loads(calibrated.read_text(encoding="utf-8"))[name]
    return SparsitySchedule(tuple(table), **LAYOUT)


def as_if_large(schedule: Any, batch: int) -> Any:
    """Return a function of length and acceptance that predicts the cost per token for Qwen3-1.7B on
    an H200, with lengths scaled up to bins of 2,000 tokens.

    Qwen3-1.7B reads the same fraction of the cache as the reasoner, but in pages of 16 tokens and
    with two dense layers.
    """
    from sparrow.cost import MACHINES, SHAPES
    from sparrow.decoding import DRAFT_TOKENS
    from sparrow.schedule import SparsitySchedule
    from sparrow.train.dial import price

    large = SparsitySchedule((0,))
    scale = large.bin_tokens / schedule.bin_tokens
    kept = [
        (k + schedule.sink_pages + schedule.recent_pages) * schedule.page_size * scale
        for k in schedule.top_k
    ]
    pages = [
        round(tokens / large.page_size) - large.sink_pages - large.recent_pages for tokens in kept
    ]
    of = price(
        SHAPES["qwen3-1.7b"],
        MACHINES["h200"],
        large.replace(top_k=tuple(pages)),
        DRAFT_TOKENS,
        batch,
    )
    return lambda length, acceptance: of(round(length * scale), acceptance)


def make_engine(
    arm: Arm, model: Any, schedule: Any, eos: list[int], batch_size: int, longest: int
) -> Any:
    """Create the arm's actor."""
    from graph_engine import GraphEngine

    kind, _, number = arm.actor.partition(":")

    class OtherWeights(GraphEngine):
        """An actor with its own weights, either low-bit or refreshed only every few steps."""

        updates = 0

        def update_weights(self, weights: Any) -> None:
            if kind == "bits":
                super().update_weights((name, quantized(w, int(number))) for name, w in weights)
            elif self.updates % int(number) == 0:
                super().update_weights(weights)
            self.updates += 1

    if kind.endswith("worn"):  # the policy must not get the actor's adapter
        model = copy.deepcopy(model)
    if kind in ("bits", "stale"):
        return OtherWeights(copy.deepcopy(model), schedule, eos, batch_size, longest)
    share, weight = (float(x) / 100 for x in number.split(":")) if kind == "noise" else (0.0, 0.0)
    return GraphEngine(model, schedule, eos, batch_size, longest, kind == "evict", (share, weight))


def quantized(weight: Any, bits: int) -> Any:
    """Round a matrix to ``bits`` bits with one scale per row, in its own dtype. Vectors are left as
    is.
    """
    if weight.ndim < 2:
        return weight
    weight = weight.detach()
    scale = weight.abs().amax(1, keepdim=True).clamp(min=1e-8) / (2 ** (bits - 1) - 1)
    return (weight / scale).round() * scale


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
