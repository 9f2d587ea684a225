"""The table of versions of vLLM, from what ``benchmarks/vllm_versions.py`` measured in each."""

from __future__ import annotations

import json
from typing import Any

from common import RESULTS, Row, table
from packaging.version import Version

FOLDER = RESULTS / "vllm_versions"
WAYS = ("eager", "graphs", "compiled")
SPEED = {"lossy": "speed sparse", "lossless": "speed lossless"}


def results() -> list[Row]:
    """What was measured, the oldest version first."""
    found = [json.loads(path.read_text()) for path in FOLDER.glob("*.json")]
    return sorted(found, key=lambda result: Version(result["vllm"]))


def errors(found: dict[str, Any] | None) -> str:
    """The largest of errors in log-probs, mean / 99th percentile, or that the part failed."""
    return "failed" if found is None else f"{found['mean']:.4f} / {found['p99']:.3f}"


def versions() -> str:
    """One row per version and mode."""
    rows = []
    for result in results():
        stock = result["speed stock"]
        for mode, timed in SPEED.items():
            found = result[mode]
            ways = [found[way] for way in WAYS]
            within = all(way["within twice the yardstick"] for way in ways)
            ours = result[timed]
            rows.append(
                [
                    result["vllm"],
                    result["torch"],
                    mode,
                    *(errors(way["missed"]) for way in ways),
                    errors(found["graphs"]["yardstick"]),
                    "yes" if within else "no",
                    f"{ours['tokens_per_s'] / stock['tokens_per_s']:.2f}x",
                    f"{stock['tokens_per_s']:,.0f}",
                ]
            )
    head = [
        "vLLM",
        "torch",
        "mode",
        "eager",
        "CUDA graphs",
        "graphs and torch.compile",
        "yardstick",
        "within twice the yardstick",
        "tokens/s over stock",
        "stock, tokens/s",
    ]
    return table(head, rows)


TABLES = {"versions": versions}
