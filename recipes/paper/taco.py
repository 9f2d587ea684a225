"""Drop the TACO rows that code-r1 drops, and keep TACO's columns, for use with code.toml.

    python recipes/paper/taco.py --out data/taco.parquet
    ... --config recipes/paper/code.toml --dataset taco:path=data/taco.parquet

The authors' file is named after code-r1 (github.com/ganler/code-r1). The published preparation
script of code-r1 drops rows from two badly formatted sources, rows with short questions or images,
and rows whose reference solutions fail their tests. This script drops the same rows. The authors
have 21,000 rows, some of them from CodeContests; they haven't published how they got there.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import datasets

from sparrow.rewards import verify_code
from sparrow.tasks.dataset import load_hub_rows, load_rows
from sparrow.tasks.formats import FORMATS, taco

SOURCES = ("geeksforgeeks", "leetcode")
SHORTEST = 100  # minimum number of letters and digits in a question
SOLUTIONS = 8  # how many of a row's solutions to try, at most


def unfit(row: dict[str, Any], verify: Callable[..., float]) -> str | None:
    """Return why a row gets dropped, or None if it's kept."""
    question = taco(row)
    if question is None:
        return "without tests"
    if row.get("source") in SOURCES:
        return "from a badly formatted source"
    text = row["question"]
    if sum(map(str.isalnum, text)) < SHORTEST:
        return "with a question that is too short"
    if "image" in text.lower() or "\n![" in text:
        return "with an image"
    solutions = row.get("solutions") or "[]"
    programs = islice(json.loads(solutions) if isinstance(solutions, str) else solutions, SOLUTIONS)
    if not any(
        verify(f"```python\n{program}\n```", answer=question.answer) == 1 for program in programs
    ):
        return f"where none of the first {SOLUTIONS} solutions passes"
    return None


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--path", help="a local copy of TACO; by default, it is downloaded")
    parser.add_argument(
        "--workers",
        type=int,
        default=64,
        help="rows to check concurrently; the sandbox has its own limit",
    )
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args(argv)
    rows = load_rows(arguments.path) if arguments.path else load_hub_rows(FORMATS["taco"], "train")
    with ThreadPoolExecutor(arguments.workers) as pool:
        reasons = list(pool.map(partial(unfit, verify=verify_code), rows))
    kept = [row for row, reason in zip(rows, reasons, strict=True) if reason is None]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    datasets.Dataset.from_list(kept).to_parquet(arguments.out)
    for reason, count in Counter(filter(None, reasons)).most_common():
        print(f"left out {count} rows {reason}")
    print(f"{len(kept)} of {len(rows)} problems written to {arguments.out}")


if __name__ == "__main__":
    main()
