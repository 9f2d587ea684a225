"""``sparrow measure``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from sparrow import files
from sparrow.commands.sampled import FromPrompts
from sparrow.errors import ConfigError
from sparrow.settings import Probability
from sparrow.train.config import DecodingOptions


@dataclass(frozen=True, kw_only=True)
class Measure(DecodingOptions, FromPrompts):
    """Measure how far a model's sparse actor is from its dense policy, with error bars; or how lossless drafts fare."""

    # dense, fixed:PAGES, a published table such as qwen3-4b-0.86, or a JSON file; none with --mode lossless.
    schedule: str | None = None
    tau: Probability = 0.86  # The 5th percentile to compare with.
    out: str | None = None  # Write the whole report to this JSON file.

    def run(self) -> None:
        from sparrow.measure import left_open, measure, pool
        from sparrow.rollout import Sampling
        from sparrow.terminal import print_drafts, print_mismatch, say, status

        if self.schedule is None and self.mode in (None, "lossy"):
            raise ConfigError(
                "say what to measure: give --schedule, or --mode lossless (how drafts fare), or --mode dense"
            )
        decoding = self.decoding(self.schedule)
        schedule = decoding.schedule
        if self.out:
            files.check_file(self.out)
        engine, scorer, prompts = self.load_sampler(decoding)
        sampling = Sampling(self.max_new_tokens, self.temperature, self.top_n, seed=self.seed)
        with status(f"sampling and scoring {len(prompts)} responses"):
            found = pool(measure(engine, scorer, prompts, sampling, schedule), schedule.bin_tokens, self.seed)
        counters = engine.counters()
        engine.close()
        drafts = counters.to_dict().get("drafts")
        print_mismatch(found, self.tau, counters.read_fraction)
        if drafts:
            print_drafts(drafts)
        if note := left_open(found.bins, self.tau, self.top_n, "--top-n"):
            say(note)
        if self.out:
            report = found.to_dict() | ({"drafts": drafts} if drafts else {})
            files.write_text(Path(self.out), json.dumps(report, indent=1))
