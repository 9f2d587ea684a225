"""``sparrow calibrate``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from sparrow import __version__, files
from sparrow.cli.commands.sampled import WithLists
from sparrow.engines.registry import parse_engine
from sparrow.errors import ConfigError
from sparrow.schedule import SparsitySchedule
from sparrow.settings import CountOrZero, Name, Probability, choose, require


@dataclass(frozen=True, kw_only=True)
class Calibrate(WithLists):
    """Find the cheapest schedule whose p5 reaches a target with confidence in every length bin."""

    # The JSON file for the schedule. Measurements are kept next to it, in OUT.work/, so a second
    # call continues from them.
    out: Name
    # The value that the lower end of p5's 95 % interval must reach. Defaults to 0.86 unless
    # relative-target is set.
    target: Probability | None = None
    # Target for the relative p5, which is p5 corrected for the p5 of dense rollouts. Use this
    # option instead of target (docs/calibration.md).
    relative_target: Probability | None = None
    # Values of top-k, in pages, to try first at every length. No bin gets fewer pages than the
    # smallest of these.
    budgets: Annotated[tuple[CountOrZero, ...], Field(min_length=1)] = (
        5,
        13,
        29,
        61,
        125,
        253,
        509,
    )
    # Maximum number of refinement passes after the first budgets have been tried. Each pass tries
    # another budget in every length bin that is not yet settled.
    refine: CountOrZero = 3
    # Number of rounds that sample under the schedule found so far and then search again. Only the
    # last round uses all prompts.
    on_policy: CountOrZero = 2
    # A schedule from which to take the page size, bin width, dense layers and head budgets; if it
    # is sparse, the first responses are also sampled under it.
    layout: str = "dense"
    # First find relative budgets for layers or kv heads (requires engine hf; see
    # docs/calibration.md). If unset, the layout's budgets are used.
    head_budgets: Literal["layers", "heads"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        from sparrow.calibrate import MIN_SEQUENCES

        choose(self, "target", "relative_target", 0.86)
        require(
            self,
            "count",
            self.count >= MIN_SEQUENCES,
            f"at least {MIN_SEQUENCES}, because p5 has no confidence interval with fewer responses",
        )
        if self.head_budgets and not parse_engine(self.engine).kind.shares_model:
            raise ConfigError(
                f"head_budgets needs engine hf, got {self.engine!r}, which cannot change budgets "
                "while it runs; calibrate with engine hf first, and pass the result as --layout"
            )

    def run(self) -> None:
        from datetime import date

        from sparrow.calibrate import head_budgets
        from sparrow.calibrate.run import PILOT, calibrate_engine
        from sparrow.cli.terminal import note, print_calibration
        from sparrow.decoding import Decoding
        from sparrow.engines.measure import SHORTEST_LISTS
        from sparrow.evaluation.benchmark import weights_digest
        from sparrow.mismatch import Tau
        from sparrow.rollout import Sampling

        layout = SparsitySchedule.load(self.layout)
        tau = Tau.chosen(self.target, self.relative_target)
        out = files.check_file(self.out)
        work = files.check_folder(out.with_name(out.name + ".work"))
        with self.load_sampler(Decoding.lossy(layout)) as (engine, scorer, prompts):
            made_by = {
                "model": self.model,
                "weights": weights_digest(scorer.model),
                "engine": self.engine,
                "precision": self.precision,
            }
            source: dict[str, Any] = {
                "model": self.model,
                "prompts": self.source_of_prompts,
                "temperature": self.temperature,
            }
            sampling = Sampling(
                self.max_new_tokens, self.temperature, self.top_n or SHORTEST_LISTS, seed=self.seed
            )
            if self.head_budgets:
                middle = sorted(self.budgets)[len(self.budgets) // 2]
                layout = head_budgets.find(
                    scorer,
                    prompts[:PILOT],
                    sampling,
                    work,
                    layout,
                    self.head_budgets,
                    middle,
                    made_by,
                    note,
                )
                source["head_budgets"] = layout.provenance["head_budgets"]
            calibration = calibrate_engine(
                engine,
                scorer,
                prompts,
                sampling,
                work,
                budgets=self.budgets,
                target=tau.value,
                relative=tau.relative,
                lengthen=self.top_n is None,
                made_by=made_by,
                layout=layout,
                refine=self.refine,
                on_policy=self.on_policy,
                provenance={**source, "date": date.today().isoformat(), "version": __version__},
                listener=note,
            )
        files.write_text(out, calibration.schedule.to_json())
        print_calibration(calibration, tau, out)

    def interrupted(self) -> str:
        return "interrupted; run the same command again to continue"
