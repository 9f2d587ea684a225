"""What a user gets wrong ends in one sentence, before any work is done: settings out of range, files, faults."""

import pytest
from conftest import fails

PROMPTS = ["--task", "trace:lines=4"]
MEASURE = ["measure", "--schedule", "fixed:1", *PROMPTS]
CALIBRATE = ["calibrate", "--out", "schedule.json", *PROMPTS]
EVAL = ["eval", "--out", "out", "--benchmark", "trace:lines=4"]
COST = ["cost", "--model", "qwen3-4b", "--schedule", "fixed:1"]
TRAIN = ["train", *PROMPTS]


@pytest.mark.parametrize(
    ("command", "option", "message"),
    [
        (TRAIN, "--rollout.samples 1", "rollout.samples is 1, but must be at least 2 with grpo"),
        (TRAIN, "--bin-tokens 0", "bin_tokens is 0, but must be greater than or equal to 1"),
        (TRAIN, "--seed -1", "seed is -1, but must be greater than or equal to 0"),
        (["demo"], "--seed -1", "seed is -1, but must be greater than or equal to 0"),
        (["demo"], "--steps 0", "steps is 0, but must be greater than or equal to 1"),
        (MEASURE, "--tau 7", "tau is 7.0, but must be less than 1"),
        (MEASURE, "--temperature 0", "temperature is 0.0, but must be greater than 0"),
        (MEASURE, "--count 0", "count is 0, but must be greater than or equal to 1"),
        (MEASURE, "--count -2", "count is -2, but must be greater than or equal to 1"),
        (MEASURE, "--max-new-tokens 0", "max_new_tokens is 0, but must be greater than or equal to 1"),
        (MEASURE, "--seed -1", "seed is -1, but must be greater than or equal to 0"),
        (CALIBRATE, "--temperature 0", "temperature is 0.0, but must be greater than 0"),
        (CALIBRATE, "--target 1", "target is 1.0, but must be less than 1"),
        (CALIBRATE, "--budgets", "budgets is (), but must have at least 1 item"),
        (CALIBRATE, "--budgets -1", "budgets is (-1,), but must be greater than or equal to 0"),
        (CALIBRATE, "--refine -1", "refine is -1, but must be greater than or equal to 0"),
        (["eval", "--out", "out"], "--benchmark", "benchmark is (), but must have at least 1 item"),
        (EVAL, "--k 0", "k is 0, but must be greater than or equal to 1"),
        (EVAL, "--limit 0", "limit is 0, but must be greater than or equal to 1"),
        (EVAL, "--limit -3", "limit is -3, but must be greater than or equal to 1"),
        (EVAL, "--temperature -1", "temperature is -1.0, but must be greater than or equal to 0"),
        (COST, "--gpus -3", "gpus is -3, but must be greater than or equal to 1"),
        (COST, "--rollout-share 3", "rollout_share is 3.0, but must be less than or equal to 1"),
        (COST, "--median -5", "median is -5.0, but must be greater than 0"),
        (COST, "--median nan", "median is nan, but must be a finite number"),
        (COST, "--responses 0", "responses is 0, but must be greater than or equal to 1"),
        (COST, "--cutoff 0", "cutoff is 0, but must be greater than or equal to 1"),
    ],
)
def test_an_option_out_of_range(command, option, message, capsys):
    assert fails(capsys, *command, *option.split(), code=2).startswith(f"sparrow: {message}")
