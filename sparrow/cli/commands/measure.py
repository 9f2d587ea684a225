"""``sparrow measure``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

from sparrow import files
from sparrow.cli.commands.sampled import WithLists
from sparrow.errors import ConfigError
from sparrow.settings import Name, Probability, choose
from sparrow.train.config import DecodingOptions


@dataclass(frozen=True, kw_only=True)
class Measure(DecodingOptions, WithLists):
    """Measure how far a model's sparse actor is from its dense policy, with error bars; or how
    lossless drafts fare.
    """

    # dense, fixed:PAGES, a published table such as qwen3-4b-0.86, or a JSON file; none with --mode
    # lossless.
    schedule: str | None = None
    # The 5th percentile (p5) to compare with; unset: 0.86, if relative-tau is unset too.
    tau: Probability | None = None
    # Instead of tau: what to compare p5 with relative to its ceiling, that of dense rollouts
    # (docs/calibration.md).
    relative_tau: Probability | None = None
    out: Name | None = None  # Write the whole report to this JSON file.

    def __post_init__(self) -> None:
        super().__post_init__()
        choose(self, "tau", "relative_tau", 0.86)

    def run(self) -> None:
        from sparrow.cli.terminal import note, print_drafts, print_mismatch
        from sparrow.engines.measure import SHORTEST_LISTS, lengthened, measure, measure_ceiling
        from sparrow.mismatch import Ceiling, Tau
        from sparrow.mismatch.tokens import left_open, pool
        from sparrow.rollout import Sampling

        if self.schedule is None and self.mode in (None, "lossy"):
            raise ConfigError(
                "say what to measure: give --schedule, or --mode lossless (how drafts fare), or --mode dense"
            )
        decoding = self.decoding(self.schedule)
        if decoding.is_lossless and decoding.adapt_draft_budget is None:
            decoding = replace(
                decoding, adapt_draft_budget=False
            )  # acceptance is measured for one schedule
        schedule, tau = decoding.schedule, Tau.chosen(self.tau, self.relative_tau)
        if self.out:
            files.check_file(self.out)
        engine, scorer, prompts = self.load_sampler(decoding)
        sampling = Sampling(
            self.max_new_tokens, self.temperature, self.top_n or SHORTEST_LISTS, seed=self.seed
        )
        longer: Sampling | None = sampling
        note(f"sampling and scoring {len(prompts)} responses")
        while longer:
            sampling = longer
            mismatch = pool(
                measure(engine, scorer, prompts, sampling, schedule), schedule.bin_tokens, self.seed
            )
            longer = None if self.top_n else lengthened(sampling, mismatch.bins, tau.value)
        counters = engine.counters()
        ceiling = Ceiling()
        if decoding.is_lossless or schedule.is_dense:
            ceiling.measure(mismatch)
        else:
            note("sampling densely for the ceiling of p5")
            ceiling = measure_ceiling(engine, scorer, prompts, sampling, schedule)
        mismatch = ceiling.on(mismatch)
        engine.close()
        drafts = counters.to_dict().get("drafts")
        print_mismatch(mismatch, tau, counters.read_fraction)
        if drafts:
            print_drafts(drafts)
        if open_question := left_open(
            mismatch.bins, tau, sampling.top_n, "--top-n"
        ) or tau.out_of_reach(mismatch.bins):
            print(open_question)
        if self.out:
            report = mismatch.to_dict() | ({"drafts": drafts} if drafts else {})
            files.write_text(Path(self.out), json.dumps(report, indent=1))
