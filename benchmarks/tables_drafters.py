"""Tables of drafters, from the results of ``benchmarks/break_even.py``."""

from __future__ import annotations

import json
from typing import Any

from common import RESULTS, SHAPES, Row, table

NAMES = {
    "ngram": "n-gram",
    "eagle3": "EAGLE-3",
    "draft_model": "draft model (0.6B)",
    "dspark": "DSpark",
    "dflash": "DFlash",
    "sparse": "sparse actor",
    "guesses": "sparse actor, 3 guesses per pass",
    "history": "history alone, in lossless mode",
    "none_v1": "none, V1 model runner",
}
"""The drafters in table order, with their names in the table."""
PUBLISHED = {
    ("eagle3", 3): (2.05, 2.47),
    ("dspark", 7): (4.9, 6.2),
    ("sparse", 6): (5.9, 5.9),
    ("sparse", 12): (9.4, 9.4),
}
"""Tokens per cycle, from lowest to highest; ``docs/which-drafter.md`` has the sources."""
CALLED = SHAPES | {"qwen3-30b-a3b": "30B-A3B"}


def results() -> list[Row]:
    """Return one result per measured shape, smallest shape first."""
    paths = [RESULTS / f"break_even_{shape}.json" for shape in CALLED]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def at(row: Row) -> tuple[int, int]:
    """Return the point a row belongs to."""
    return row["batch"], row["length"]


def dense(result: Row) -> dict[tuple[int, int], float]:
    """Return the milliseconds of a dense step at each point, from the last run that timed the
    point.
    """
    return {
        at(row): row["ms"]
        for run in result["runs"]
        for row in run["engines"].get("none", {"points": []})["points"]
    }


def ratios(result: Row) -> list[Row]:
    """Return all drafters' points with the tokens per cycle needed to break even. This number is
    the ratio of two times from one run. If several runs timed a drafter's point, the last run
    counts.
    """
    found: dict[tuple[Any, ...], Row] = {}
    for run in result["runs"]:
        steps = dense({"runs": [run]})
        for drafter, engine in run["engines"].items():
            for row in engine["points"] if drafter != "none" else ():
                if at(row) in steps:
                    name = drafter
                    if "guesses" in row or "alone" in row:
                        name = "history" if "alone" in row else "guesses"
                    key = (name, row["drafts"], *at(row))
                    ratio = row["ms"] / steps[at(row)]
                    found[key] = {**row, "drafter": name, "break_even": ratio}
    return list(found.values())


def gpu(result: Row) -> str:
    """Return the short names of the GPUs used in any run."""
    known = ("H100", "H200")
    cards = {next(name for name in known if name in run["gpu"]) for run in result["runs"]}
    return ", ".join(sorted(cards))


def break_even() -> str:
    """Return a table with one row per shape, drafter and draft length, and one column per point."""
    measured = results()
    if not measured:
        return ""
    points = sorted({point for result in measured for point in dense(result)})
    rows = []
    for result in measured:
        about = f"{CALLED[result['shape']]}, {gpu(result)}"
        steps = dense(result)
        cells = [f"{steps[point]:.2f}" if point in steps else "" for point in points]
        rows.append([about, "none: ms of a step", "0", *cells])
        by_point = {(row["drafter"], row["drafts"], *at(row)): row for row in ratios(result)}
        for drafter, name in NAMES.items():
            for drafts in sorted({key[1] for key in by_point if key[0] == drafter}):
                found = [by_point.get((drafter, drafts, *point)) for point in points]
                cells = [f"{row['break_even']:.2f}" if row else "" for row in found]
                rows.append([about, name, str(drafts), *cells])
    columns = [f"{batch} x {length:,}" for batch, length in points]
    return table(["shape, GPU", "drafter", "drafts", *columns], rows)


TABLES = {"break-even": break_even}
