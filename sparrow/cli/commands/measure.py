"""``sparrow measure``."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import date
from math import isinf
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sparrow import __version__, files
from sparrow.cli.commands.sampled import WithLists
from sparrow.decoding_options import DecodingOptions
from sparrow.errors import ConfigError
from sparrow.settings import Name, Probability, choose

if TYPE_CHECKING:
    from sparrow.decoding import Decoding
    from sparrow.rollout import Sampling


@dataclass(frozen=True, kw_only=True)
class Measure(DecodingOptions, WithLists):
    """Measure, with error bars, how far a model's sparse actor is from its dense policy, or measure
    the acceptance of lossless drafts.
    """

    # dense, fixed:PAGES, a published table such as qwen3-4b-0.86, or a JSON file; leave it out with
    # --mode lossless.
    schedule: str | None = None
    # Target for the 5th percentile of acceptance (p5). Defaults to 0.86 unless relative-tau is set.
    tau: Probability | None = None
    # Target for the relative p5, which is p5 corrected for the p5 of dense rollouts. Use this
    # option instead of tau (docs/calibration.md).
    relative_tau: Probability | None = None
    # Write the full report to this JSON file, once after sampling and again when the ceiling is
    # known.
    out: Name | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        choose(self, "tau", "relative_tau", 0.86)

    def run(self) -> None:
        from sparrow.cli.terminal import (
            note,
            print_ceiling,
            print_drafts,
            print_mismatch,
            print_own_samples,
        )
        from sparrow.engines.measure import SHORTEST_LISTS, compare, lengthened, measure_ceiling
        from sparrow.mismatch import Ceiling, Tau
        from sparrow.mismatch.tokens import left_open, pool
        from sparrow.rollout import Sampling

        if self.schedule is None and self.mode in (None, "lossy"):
            raise ConfigError(
                "nothing to measure; pass --schedule, --mode lossless (for the acceptance of drafts) "
                "or --mode dense"
            )
        decoding = self.decoding(self.schedule)
        if decoding.is_lossless and decoding.adapt_draft_budget is None:
            # Acceptance is measured under one fixed schedule.
            decoding = replace(decoding, adapt_draft_budget=False)
        if decoding.is_lossless and decoding.guess_tokens:
            # Guesses that become drafts without a sparse pass say nothing about acceptance.
            decoding = replace(decoding, adapt_draft_tokens=False)
        schedule = decoding.schedule
        tau = Tau.chosen(self.tau, self.relative_tau)
        if self.out:
            files.check_file(self.out)
        sampling = Sampling(
            self.max_new_tokens, self.temperature, self.top_n or SHORTEST_LISTS, seed=self.seed
        )
        longer: Sampling | None = sampling
        dense_up_to = float("inf") if decoding.mode == "lossless" else schedule.dense_up_to
        ceiling = Ceiling()
        with self.load_sampler(decoding) as (engine, scorer, prompts):
            if decoding.has_default_schedule:
                schedule = engine.schedule  # a server's own
                decoding = decoding.with_schedule(schedule)
            note(f"sampling and scoring {len(prompts)} responses")
            while longer:
                sampling = longer
                found = compare(engine, scorer, prompts, sampling, schedule)
                counters = engine.counters()
                drafts = counters.to_dict().get("drafts")
                mismatch = pool(found.acceptances, schedule.bin_tokens, self.seed)
                if isinf(dense_up_to):
                    ceiling.measure(mismatch)
                    mismatch = ceiling.on(mismatch)
                extra = {
                    "dense_up_to": None if isinf(dense_up_to) else dense_up_to,
                    "top_n": sampling.top_n,
                    "off_policy": {
                        "mean": float(found.off_policy.mean()),
                        "max": float(found.off_policy.max()),
                    },
                    **({"drafts": drafts} if drafts else {}),
                    "provenance": self._provenance(decoding, sampling),
                }
                sparse = [b for b in mismatch.bins if b.end > dense_up_to]
                if sparse:
                    print_mismatch(mismatch, tau, sampling.top_n, dense_up_to)
                else:
                    print_own_samples(mismatch, found.off_policy)
                print(f"share of the KV cache read: {counters.read_fraction:.1%}")
                if counters.rows:
                    print(f"tokens decoded with every page: {counters.dense_fraction:.1%}")
                if drafts:
                    print_drafts(drafts)
                self._write(
                    mismatch.to_dict() | extra, "; the ceiling is still to come" if sparse else ""
                )
                longer = None if self.top_n else lengthened(sampling, sparse, tau.value)
            if sparse:
                note("sampling densely to measure the ceiling of p5")
                mismatch = measure_ceiling(engine, scorer, prompts, sampling, schedule).on(mismatch)
                sparse = [b for b in mismatch.bins if b.end > dense_up_to]
                print_ceiling(sparse)
                self._write(mismatch.to_dict() | extra)
        if open_question := left_open(sparse, tau, sampling.top_n, "--top-n") or tau.out_of_reach(
            sparse
        ):
            print(open_question)

    def _provenance(self, decoding: Decoding, sampling: Sampling) -> dict[str, Any]:
        settings = decoding.to_dict() if decoding.is_lossless else {"mode": decoding.mode}
        settings.pop("draft_schedule", None)  # it is ``schedule``
        return {
            "model": self.model,
            "engine": self.engine,
            "precision": self.precision,
            "prompts": self.source_of_prompts,
            **settings,
            "schedule": {**decoding.schedule.to_dict(), "provenance": None},
            "temperature": sampling.temperature,
            "max_new_tokens": sampling.max_new_tokens,
            "seed": sampling.seed,
            "tau": self.tau,
            "relative_tau": self.relative_tau,
            "date": date.today().isoformat(),
            "version": __version__,
        }

    def _write(self, report: dict[str, Any], to_come: str = "") -> None:
        from sparrow.cli.terminal import note

        if self.out:
            files.write_text(Path(self.out), json.dumps(report, indent=1))
            note(f"wrote {self.out}{to_come}")
