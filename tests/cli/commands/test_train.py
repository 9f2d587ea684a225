"""Test ``sparrow train`` in a process that has already set up torch.distributed."""

import torch

from sparrow.cli import main


def test_training_keeps_an_existing_process_group(tmp_path):
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    try:
        main(
            [
                "train",
                "--model",
                "reasoner",
                "--run-dir",
                str(tmp_path),
                "--task",
                "trace:lines=12",
                "--schedule",
                "fixed:2",
                "--steps",
                "1",
                "--rollout.prompts",
                "2",
                "--rollout.samples",
                "2",
                "--rollout.max-new-tokens",
                "8",
            ]
        )
        assert torch.distributed.is_initialized()
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
