"""``sparrow demo``: train the bundled reasoner, then compare the modes."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Literal

import numpy as np
import tyro

from sparrow.cli.commands.arguments import from_toml
from sparrow.cli.commands.base import Command
from sparrow.cli.commands.train import Train
from sparrow.decoding import Decoding
from sparrow.errors import ConfigError
from sparrow.schedule import SparsitySchedule
from sparrow.settings import Count, Many, Name, Seed

REASONER = Path(str(resources.files("sparrow") / "reasoner"))
SCHEDULE = REASONER / "demo_schedule.json"
DRAFT_TOKENS = 4  # tokens drafted before each verification in lossless mode
COMPARED = 8  # problems sampled in each mode after training


@dataclass(frozen=True)
class Demo(Command):
    """Train the bundled reasoner on a CPU in a few minutes, with sparse rollouts and a dense
    policy. Then compare dense, lossy and lossless samples on held-out problems.
    """

    run_dir: Name = "runs/demo"  # The run directory; it must not contain a run yet.
    seed: Seed = 0  # Seed for the problems and the samples.
    steps: Count = 7  # Training steps.
    prompts: Many = 24  # Problems per step, with 8 responses each.
    # How rollouts are sampled. lossy: under the schedule that comes with the reasoner. lossless:
    # with drafts under that schedule.
    mode: Literal["dense", "lossy", "lossless"] = "lossy"

    def run(self) -> None:
        from sparrow.run.directory import METRICS

        if Path(self.run_dir, METRICS).exists():
            raise ConfigError(
                f"{self.run_dir} already contains a run, but a demo needs a new directory; "
                "remove it, or choose another --run-dir"
            )
        self.training().run()
        self.compare()

    def interrupted(self) -> str:
        return self.training().interrupted()

    def training(self) -> Train:
        how = {
            "dense": [],
            "lossy": ["--schedule", str(SCHEDULE)],
            "lossless": [
                "--rollout.draft-schedule",
                str(SCHEDULE),
                "--rollout.draft-tokens",
                str(DRAFT_TOKENS),
            ],
        }
        sizes = {
            "seed": self.seed,
            "steps": self.steps,
            "save-every": self.steps,
            "rollout.prompts": self.prompts,
        }
        own = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
        arguments = [
            *from_toml(REASONER / "demo.toml"),
            "--rollout.mode",
            self.mode,
            *how[self.mode],
            *own,
        ]
        return tyro.cli(Train, args=[*arguments, "--model", "reasoner", "--run-dir", self.run_dir])

    def compare(self) -> None:
        from sparrow.cli.loading import HELD_OUT, load_model, load_task_spec
        from sparrow.cli.terminal import note, print_modes
        from sparrow.engines.hf import HFEngine, eos_ids
        from sparrow.rollout import Sampling
        from sparrow.tasks.prompts import encode

        training = self.training()
        assert training.task is not None, "demo.toml must name a task"
        model, tokenizer = load_model(str(Path(self.run_dir, "model")))
        task = load_task_spec(training.task)
        problems = [task.problem(i, seed=HELD_OUT) for i in range(COMPARED)]
        prompts = [encode(tokenizer, p.prompt, p.rendered) for p in problems]
        sampling = Sampling(training.rollout.max_new_tokens, top_n=0, seed=self.seed)
        lossless = Decoding.lossless(str(SCHEDULE), draft_tokens=DRAFT_TOKENS)
        rows = []
        for decoding in (Decoding.load("dense"), Decoding.load(str(SCHEDULE)), lossless):
            note(f"sampling {COMPARED} held-out problems, {decoding.mode}")
            engine = HFEngine(model, decoding, eos_ids(model, tokenizer))
            rollouts = engine.generate(prompts, sampling)
            counts = engine.counters().to_dict()
            scores = engine.score(rollouts, SparsitySchedule.dense(), sampling.temperature)
            off = [np.abs(r.logprobs - s.logprobs) for r, s in zip(rollouts, scores, strict=True)]
            rows.append((str(decoding.mode), float(np.concatenate(off).mean()), counts))
        print_modes(f"held-out problems, {len(problems)} in each mode", rows)
