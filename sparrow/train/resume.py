"""Checks of ``--resume``: settings and data are compared with those that the run recorded, and the
differences are named.
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

Changes = dict[str, tuple[Any, Any]]  # setting, by its name on the command line -> before, now

# Checkpoints hold these, or count in their units: another value would be ignored, or would mix two
# runs.
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
FREE = ("run_dir", "resume")  # not settings of the run: its directory may have moved
REMOVED = {"distill.step_down": [], "distill.positions": 1.0}
"""Settings of 0.1.0 that no longer exist, with the values that had no effect."""
LAYOUT = (*PAGE_LAYOUT, "bin_tokens", "dense_layers", "head_budgets")


def resumed(
    recorded: RunConfig, config: TrainConfig, schedule: SparsitySchedule, step: int
) -> Changes:
    """Compare a run's settings and start schedule with those it recorded, and return the
    differences; it has finished ``step`` steps.

    A setting that an older Sparrow did not have, and so did not record, counts as having had its
    default value.

    Raises ConfigError: a changed setting that is fixed, one that is gone, ``steps`` below ``step``,
    or any change to a run that is finished and stays so.
    """
    recorded_settings = flat(recorded.train, ".")
    gone = [
        name for name, unused in REMOVED.items() if recorded_settings.get(name, unused) != unused
    ]
    if gone:
        raise ConfigError(
            f"the run in {config.run_dir} was started with {gone[0]} "
            f"{json.dumps(recorded_settings[gone[0]])}, which this version no longer has; go on "
            "with the version that began it, or start another run"
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
            f"the run in {config.run_dir} cannot go on with another "
            f"{' or '.join(fixed)}; it was started with other settings: "
            f"{description}; leave them out, or choose another run_dir"
        )
    if config.steps < step:
        raise ConfigError(
            f"the run in {config.run_dir} has done {step} "
            f"steps already, but steps is {config.steps}"
        )
    if changes and step >= before["steps"] >= config.steps:
        raise ConfigError(
            f"the run in {config.run_dir} has finished its {step} steps, so "
            "its settings stay as they are, but these differ: "
            f"{description}; raise steps to go on, or choose another run_dir"
        )
    return changes


def check_data(recorded: RunConfig, given: RunConfig, run_dir: str) -> None:
    """Refuse to go on with problems other than those that the run began with: their order depends
    on all of them.

    Raises ConfigError: the data set or a benchmark has changed. A run of an older version recorded
    neither, and goes on unchecked.
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
            f"the run in {run_dir} cannot go on with other problems: {name} was "
            f"{json.dumps(before.get(name))} and is {json.dumps(now.get(name))}; give the data "
            "that it began with, or choose another run_dir"
        )


def describe(changes: Changes) -> str:
    """All changes on one line."""
    return ", ".join(
        f"{name} {json.dumps(before)} -> {json.dumps(now)}"
        for name, (before, now) in changes.items()
    )
