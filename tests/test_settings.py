"""Test that types and ranges of settings are checked for every style of annotation."""

import math
import sys
import types
from dataclasses import dataclass, fields
from pathlib import Path
from typing import get_args

import pytest

import sparrow.train.config
from sparrow.cli import entry
from sparrow.errors import ConfigError
from sparrow.settings import Count, Settings
from sparrow.train.config import (
    CorrectionConfig,
    DistillConfig,
    GuardConfig,
    OptimizerConfig,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)

FUTURE = "from __future__ import annotations\n"


@pytest.mark.parametrize("spelling", ["as strings", "as types"])
def test_ranges_are_checked_for_every_style_of_annotation(spelling, monkeypatch):
    source = Path(sparrow.train.config.__file__).read_text(encoding="utf-8").replace(FUTURE, "")
    module = types.ModuleType("respelled")
    monkeypatch.setitem(sys.modules, "respelled", module)
    exec(
        compile(
            FUTURE * (spelling == "as strings") + source, "respelled", "exec", dont_inherit=True
        ),
        vars(module),
    )
    with pytest.raises(
        ConfigError, match=r"^rollout\.temperature is -1\.0, but must be greater than 0$"
    ):
        module.RolloutConfig(temperature=-1.0)
    with pytest.raises(ConfigError, match=r"^tau is 7\.0, but must be less than 1$"):
        module.TrainConfig(tau=7.0)


@pytest.mark.parametrize(
    ("settings", "name", "value", "message"),
    [
        (
            RolloutConfig,
            "prompts",
            True,
            "rollout.prompts is True, but must be a valid integer",
        ),
        (
            RolloutConfig,
            "prompts",
            2.0,
            "rollout.prompts is 2.0, but must be a valid integer",
        ),
        (
            OptimizerConfig,
            "learning_rate",
            math.inf,
            "optimizer.learning_rate is inf, but must be a finite number",
        ),
        (
            OptimizerConfig,
            "learning_rate",
            math.nan,
            "optimizer.learning_rate is nan, but must be a finite number",
        ),
        (
            OptimizerConfig,
            "max_grad_norm",
            math.nan,
            "optimizer.max_grad_norm is nan, but must be greater than 0",
        ),
        (
            OptimizerConfig,
            "precision",
            "fp8",
            "optimizer.precision is 'fp8', but must be 'fp32' or 'bf16'",
        ),
        (
            CorrectionConfig,
            "band",
            (2.0, 3.0),
            "correction.band is (2.0, 3.0), but must be less than or equal to 1",
        ),
        (
            CorrectionConfig,
            "band",
            (0.5, 0.9),
            "correction.band is (0.5, 0.9), but must be greater than or equal to 1",
        ),
        (
            DistillConfig,
            "target_modules",
            (),
            "distill.target_modules is (), but must have at least 1 item",
        ),
        (DistillConfig, "responses", 0.0, "distill.responses is 0.0, but must be greater than 0"),
        (GuardConfig, "threshold", 1.0, "guard.threshold is 1.0, but must be less than 1"),
        (
            RewardConfig,
            "overlong_window",
            0,
            "reward.overlong_window is 0, but must be greater than or equal to 1",
        ),
        (
            TrainConfig,
            "bin_tokens",
            0,
            "bin_tokens is 0, but must be greater than or equal to 1",
        ),
        (
            TrainConfig,
            "seed",
            -1,
            "seed is -1, but must be greater than or equal to 0",
        ),
        (
            TrainConfig,
            "seed",
            2**32,
            "seed is 4294967296, but must be less than 4294967296",
        ),
        (
            TrainConfig,
            "rollout",
            {"prompts": 2},
            "rollout is {'prompts': 2}, but must be an instance of RolloutConfig",
        ),
    ],
)
def test_setting_of_the_wrong_type_or_out_of_range_raises_an_error(settings, name, value, message):
    with pytest.raises(ConfigError) as error:
        settings(**{name: value})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo"])
def test_advantages_that_compare_samples_require_two_samples_per_prompt(advantage):
    with pytest.raises(ConfigError) as error:
        TrainConfig(advantage=advantage, rollout=RolloutConfig(samples=1))
    assert str(error.value) == (
        "rollout.samples is 1, but must be at least 2, as the responses to a prompt are compared "
        "with each other"
    )


def test_every_command_checks_its_settings():
    commands = [*get_args(entry.COMMANDS)]
    assert len(commands) == 9 and all(issubclass(command, Settings) for command in commands)
    unchecked = {
        f.name for c in commands for f in fields(c) if f.type in ("int", "float", int, float)
    }
    assert not unchecked, f"these settings have no range: {sorted(unchecked)}"


def test_the_range_of_an_inherited_field_is_checked():
    @dataclass(frozen=True)
    class Longer(RolloutConfig):
        extra: Count = 1

    with pytest.raises(ConfigError, match="extra is 0, but must be greater than or equal to 1"):
        Longer(extra=0)
    with pytest.raises(ConfigError, match="prompts is 0, but must be greater than or equal to 1"):
        Longer(prompts=0)
