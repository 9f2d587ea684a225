"""``sparrow demo``: the whole loop on the bundled reasoner."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import tyro

from sparrow.commands.arguments import from_toml
from sparrow.commands.base import Command
from sparrow.commands.train import Train
from sparrow.settings import Count, Seed


@dataclass(frozen=True)
class Demo(Command):
    """Train the bundled reasoner on a CPU in about five minutes: sparse rollouts, dense policy, rising reward."""

    run_dir: str = "runs/demo"  # Where the run goes; must not exist yet.
    seed: Seed = 0  # Seeds the problems and the samples.
    steps: Count = 8  # Training steps.
    # lossy: under the schedule that comes with the reasoner. lossless: drafts read what that schedule says.
    mode: Literal["dense", "lossy", "lossless"] = "lossy"

    def run(self) -> None:
        self.training().run()

    def interrupted(self) -> str:
        return self.training().interrupted()

    def training(self) -> Train:
        """What the demo is as a ``sparrow train``."""
        folder, steps = Path(str(resources.files("sparrow") / "reasoner")), str(self.steps)
        table = f"{folder}/demo_schedule.json"
        how = {
            "dense": ["--rollout.mode", "dense"],
            "lossy": ["--schedule", table],
            "lossless": [
                "--rollout.mode",
                "lossless",
                "--rollout.draft-schedule",
                table,
                "--rollout.draft-tokens",
                "4",
            ],
        }
        length = ["--seed", str(self.seed), "--steps", steps, "--save-every", steps]
        arguments = [
            *from_toml(folder / "demo.toml"),
            *how[self.mode],
            *length,
            "--model",
            "reasoner",
            "--run-dir",
            self.run_dir,
        ]
        return tyro.cli(Train, args=arguments)
