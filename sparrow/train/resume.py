"""Check whether ``--resume`` may continue a run: compare settings and data with the run's record,
and list the differences.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, fields, replace
from typing import Any

from sparrow.errors import ConfigError
from sparrow.run.directory import RunConfig
from sparrow.schedule import PAGE_LAYOUT, SparsitySchedule
from sparrow.settings import flat
from sparrow.train.config import TrainConfig

# a setting's command-line name -> (old value, new value)
Changes = dict[str, tuple[Any, Any]]

# Settings that can't change on resume. Checkpoints contain or depend on them, so a new value would
# either be ignored or mix two different runs.
FIXED = (
    "model",
    "task",
    "dataset",
    "seed",
    "bin_tokens",
    "chat.system",
    "chat.template",
    "chat.arguments",
    "lora.r",
    "lora.alpha",
    "lora.target_modules",
    "distill.enabled",
    "distill.rank",
    "distill.target_modules",
    "distill.adapter",
    "eval.benchmark",
    "eval.limit",
    "eval.k",
    "eval.temperature",
    "eval.top_p",
    "eval.top_k",
    "eval.max_new_tokens",
)
# not checked: the directory may have moved, and ``resume`` doesn't affect training
FREE = ("run_dir", "resume")
REMOVED = {"distill.step_down": [], "distill.positions": 1.0}
"""Settings removed since version 0.1.0, each with the value that had no effect."""
LAYOUT = (*PAGE_LAYOUT, "bin_tokens", "dense_layers", "head_budgets")


def resumed(
    recorded: RunConfig, config: TrainConfig, schedule: SparsitySchedule, step: int
) -> Changes:
    """Compare the settings and the start schedule with a run's record, and return the differences.

    The run has finished ``step`` steps. If an older Sparrow started the run, some settings may be
    missing from the record. They are assumed to have had their default values.

    Raises ConfigError if a fixed setting has changed, a recorded setting no longer exists, or
    ``steps`` is below ``step``. Also raises ConfigError if settings have changed on a finished run,
    unless the run is being extended.
    """
    recorded_settings = flat(recorded.train, ".")
    gone = [
        name for name, unused in REMOVED.items() if recorded_settings.get(name, unused) != unused
    ]
    if gone:
        raise ConfigError(
            f"the run in {config.run_dir} was started with {gone[0]} "
            f"{json.dumps(recorded_settings[gone[0]])}, a setting that no longer exists; "
            "continue with the version of Sparrow that started the run, or start a new run"
        )

    now = flat(json.loads(json.dumps(asdict(config))), ".")
    defaults = {f.name: f.default for f in fields(config) if f.default is not MISSING}
    before = flat(json.loads(json.dumps(asdict(replace(config, **defaults)))), ".")
    before |= {name: value for name, value in recorded_settings.items() if name in now}
    changes: Changes = {
        name: (before[name], value)
        for name, value in now.items()
        if before[name] != value and name not in FREE
    }
    old = recorded.schedule.to_dict()
    new = schedule.to_dict()
    changes |= {
        f"schedule.{k}": (old.get(k), new.get(k))
        for k in ("top_k", *LAYOUT)
        if old.get(k) != new.get(k)
    }

    description = describe(changes)
    unchangeable = (*FIXED, *(f"schedule.{k}" for k in LAYOUT))
    fixed = [name for name in changes if name in unchangeable]
    if fixed:
        raise ConfigError(
            f"the run in {config.run_dir} cannot continue with a different "
            f"{' or '.join(fixed)}; these settings differ from the recorded ones: "
            f"{description}; leave them out, or choose another run_dir"
        )
    if config.steps < step:
        raise ConfigError(
            f"steps is {config.steps}, but the run in {config.run_dir} has already finished {step} "
            "steps; raise steps"
        )
    if changes and step >= before["steps"] >= config.steps:
        raise ConfigError(
            f"the run in {config.run_dir} has finished its {step} steps, so its settings cannot "
            f"change, but these differ: {description}; "
            "raise steps to continue, or choose another run_dir"
        )
    return changes


def check_data(recorded: RunConfig, given: RunConfig, run_dir: str) -> None:
    """Check that the problems haven't changed since the run started. The order of the draws depends
    on the whole set of problems.

    Older versions didn't record the problems, so runs from these versions aren't checked.

    Raises ConfigError if the training data or a benchmark has changed.
    """
    if recorded.data is None or given.data is None:
        return
    before, now = (
        flat({"the data set": data["train"], **data["eval"]}, ": ")
        for data in (recorded.data, given.data)
    )
    if changed := [name for name in {**before, **now} if before.get(name) != now.get(name)]:
        name = changed[0]
        raise ConfigError(
            f"the run in {run_dir} cannot continue with different problems: {name} was "
            f"{json.dumps(before.get(name))} and is now {json.dumps(now.get(name))}; use the data "
            "that the run started with, or choose another run_dir"
        )


def describe(changes: Changes) -> str:
    """Describe all changes in one line."""
    return ", ".join(
        f"{name} {json.dumps(before)} -> {json.dumps(now)}"
        for name, (before, now) in changes.items()
    )
