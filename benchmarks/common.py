"""What benchmarks and studies share: where results are, how they are written, and tables made from them."""

from __future__ import annotations

import json
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results"
REASONER = ROOT / "sparrow" / "reasoner"
QWEN3_1_7B: dict[str, Any] = dict(
    vocab_size=151_936, hidden_size=2048, intermediate_size=6144, num_hidden_layers=28, num_attention_heads=16,
    num_key_value_heads=8, head_dim=128, max_position_embeddings=40_960, tie_word_embeddings=True,
)  # fmt: skip
SHAPES = {"qwen3-1.7b": "1.7B", "qwen3-4b": "4B", "qwen3-8b": "8B", "qwen3-14b": "14B"}
"""The shapes that are measured, and what tables call them."""
Row = dict[str, Any]
Column = str | Callable[[Row], Any]


def machine() -> str:
    """The GPU that this runs on, or else the processor."""
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {platform.machine()}"


def load(name: str) -> Any:
    """Read a result by the name of its file."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def save(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result, with the machine, the versions and the day unless it already has them."""
    import torch

    record = {"machine": machine(), "torch": torch.__version__, "python": platform.python_version()}
    path.parent.mkdir(parents=True, exist_ok=True)
    record |= {"date": time.strftime("%Y-%m-%d"), **result}
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


def declared(rows: Iterable[Row], cells: Mapping[str, Column]) -> str:
    """A table with a line for each row; a column is a format of the row's fields, or a function of the row."""
    lines = ([cell.format(**row) if isinstance(cell, str) else cell(row) for cell in cells.values()] for row in rows)
    return table(list(cells), list(lines))


def render(page: str, tables: Mapping[str, Callable[[], str]]) -> str:
    """The page with the text between each ``<!-- table: NAME -->`` and ``<!-- end -->`` made anew."""

    def fill(match: re.Match[str]) -> str:
        return f"<!-- table: {match[1]} -->\n{tables[match[1]]()}<!-- end -->"

    return re.sub(r"<!-- table: ([^>]+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)
