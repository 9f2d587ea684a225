"""Reduce other trainers' logs to the metrics shown in docs/integrations.md and docs/verl.md.

python recipes/trl_grpo.py --out run.json
python benchmarks/trainer_log.py run.json --out benchmarks/results/trl_grpo.json
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from common import parser, write

METRICS = (
    "reward",
    "critic/score/mean",
    "sparrow/p5",
    "sparrow/acceptance_mean",
    "sparrow/sampled/p5_floor",
    "sparrow/drafts/drafted",
    "sparrow/drafts/accepted",
    "sparrow/drafts/tokens_per_cycle",
    "step_time",
    "timing_s/step",
    "timing_s/gen",
)
"""Metric names. Where TRL's and verl's names differ, both are listed."""


def cut(run: dict[str, Any]) -> dict[str, Any]:
    """Keep only ``METRICS`` in a recipe's log."""
    logged = [row.get("data", row) for row in run["log"]]  # verl nests metrics one level deeper
    kept = [{name: row[name] for name in METRICS if name in row} for row in logged]
    return run | {"log": kept}


def main() -> None:
    options = parser(__doc__ or "", "trl_grpo")
    options.add_argument("run", type=Path, help="file written by the recipe")
    arguments = options.parse_args()
    write(arguments.out, cut(json.loads(arguments.run.read_text(encoding="utf-8"))))


if __name__ == "__main__":
    main()
