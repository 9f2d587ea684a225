"""Tables in Markdown made from the JSON files in benchmarks/results, and pages filled with them."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
Row = dict[str, Any]


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def render(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page with what stands between ``<!-- table: NAME -->`` and ``<!-- end -->`` made anew."""

    def fill(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n{tables[found[1]]()}<!-- end -->"

    return re.sub(r"<!-- table: ([^>]+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)
