"""Write the tables of the pages in docs that have such, from the JSON files in benchmarks/results.

    python benchmarks/tables.py            # rewrites what stands between <!-- table: NAME --> and <!-- end -->

``tests/benchmarks/test_tables.py`` fails if a page says something else than the files.
"""

from __future__ import annotations

from collections.abc import Callable

import tables_calibration as calibration
import tables_cost as cost
import tables_distill as distill
import tables_lossless as lossless
import tables_runs as runs
import tables_speed as speed
import tables_text as text
from page_tables import ROOT, render

PAGES = [
    ROOT / "docs" / f"{name}.md"
    for name in (
        "performance",
        "cost",
        "vllm",
        "scaling",
        "integrations",
        "calibration",
        "method",
        "distill",
        "lossless",
    )
]
TABLES: dict[str, Callable[[], str]] = {
    "decode steps": speed.decode_steps,
    "rollouts with top 20": lambda: speed.rollouts("top 20"),
    "rollouts without log-probs": lambda: speed.rollouts("none"),
    "rollouts of 1,024 with top 20": lambda: speed.rollouts("top 20", "1024"),
    "rollouts of 1,024 without log-probs": lambda: speed.rollouts("none", "1024"),
    "limits": cost.limits,
    "log-prob cost": speed.logprob_cost,
    "attention": speed.attention,
    "uneven attention": speed.uneven_attention,
    "other shapes": speed.shapes,
    "capacity": speed.capacity,
    "validation": speed.validation,
    "profile": speed.profile,
    "grpo step": speed.grpo_step,
    "equalities": runs.equalities,
    "training": runs.training,
    "roofline": cost.roofline,
    "ragged": cost.ragged,
    "same run": runs.same_run,
    "scaling": runs.scaling,
    "failures": runs.failures,
    "planned": cost.planned,
    "overheads": cost.overheads,
    "cost example": cost.cost_example,
    "predicted": cost.predicted,
    "short responses": cost.short_responses,
    "published run": cost.published_run,
    "trainers": runs.trainers,
    "sampled tail": runs.sampled_tail,
    "calibration": calibration.calibration,
    "calibration summary": calibration.calibration_summary,
    "shortcut": calibration.shortcut,
    "beta tail": calibration.beta_tail,
    "calibration cost": calibration.calibration_cost,
    "scoring passes": calibration.scoring_passes,
    "teacher-forced": calibration.teacher_forced,
    "distill overhead": distill.distill_overhead,
    "distill tail": distill.distill_tail,
    "distill runs": distill.distill_runs,
    "distill rewards": distill.distill_rewards,
    **lossless.TABLES,
    **text.TABLES,
}

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8"), TABLES), encoding="utf-8")
