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

REASONER = Path(str(resources.files("sparrow") / "reasoner"))
SCHEDULE = REASONER / "demo_schedule.json"
DRAFT_TOKENS = 4  # before each verification, in lossless mode


@dataclass(frozen=True)
class Demo(Command):
    """Train the bundled reasoner on a CPU in some minutes: sparse rollouts, dense policy, rising reward."""

    run_dir: str = "runs/demo"  # Where the run goes; must not exist yet.
    seed: Seed = 0  # Seeds the problems and the samples.
    steps: Count = 7  # Training steps.
    prompts: Count = 24  # Problems a step, with 8 responses each.
    # Of the training. lossy: under the schedule that comes with the reasoner. lossless: drafts read what that says.
    mode: Literal["dense", "lossy", "lossless"] = "lossy"

    def run(self) -> None:
        self.training().run()

    def interrupted(self) -> str:
        return self.training().interrupted()

    def training(self) -> Train:
        """The ``sparrow train`` command that the demo runs."""
        how = {
            "dense": [],
            "lossy": ["--schedule", str(SCHEDULE)],
            "lossless": ["--rollout.draft-schedule", str(SCHEDULE), "--rollout.draft-tokens", str(DRAFT_TOKENS)],
        }
        sizes = {"seed": self.seed, "steps": self.steps, "save-every": self.steps, "rollout.prompts": self.prompts}
        own = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
        arguments = [*from_toml(REASONER / "demo.toml"), "--rollout.mode", self.mode, *how[self.mode], *own]
        return tyro.cli(Train, args=[*arguments, "--model", "reasoner", "--run-dir", self.run_dir])
