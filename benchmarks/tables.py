"""Generate the tables in docs from the JSON files in benchmarks/results.

    python benchmarks/tables.py            # rewrites everything between <!-- table: NAME --> and <!-- end -->

``tests/benchmarks/test_tables.py`` fails if a page is out of date with the files.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import calibration_cost
import tables_cost as cost
import tables_distill as distill
import tables_drafters
import tables_fp8 as fp8
import tables_guesses
import tables_lossless as lossless
import tables_mixed_attention
import tables_mixture
import tables_never_slower
import tables_runs as runs
import tables_serving
import tables_speed as speed
import tables_verl
import tables_versions
from common import ROOT, render

sys.path += [str(ROOT / "studies" / name) for name in ("reasoner", "text", "cascade", "pretrained")]
import calibration
import relative_tau
import sampled_tail
import tables_cascade as cascade
import tables_pretrained as pretrained
import tables_text as text
import tables_text_training as text_training

MODULES = (
    speed,
    runs,
    cost,
    calibration,
    calibration_cost,
    relative_tau,
    sampled_tail,
    distill,
    lossless,
    text,
    text_training,
    fp8,
    cascade,
    pretrained,
    tables_versions,
    tables_verl,
    tables_serving,
    tables_mixture,
    tables_mixed_attention,
    tables_never_slower,
    tables_guesses,
    tables_drafters,
)
TABLES: dict[str, Callable[[], str]] = {
    name: write for module in MODULES for name, write in module.TABLES.items()
}
NAMES = (
    "performance",
    "cost",
    "which-drafter",
    "vllm",
    "scaling",
    "integrations",
    "calibration",
    "method",
    "distill",
    "lossless",
    "lossless-studies",
    "paper",
    "selectors",
    "stability-text",
    "verl",
    "pretrained",
    "audit",
    "tune",
)
PAGES = [ROOT / "docs" / f"{name}.md" for name in NAMES]

if __name__ == "__main__":
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8"), TABLES), encoding="utf-8")
