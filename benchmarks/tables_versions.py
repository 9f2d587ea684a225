"""Tables of vLLM versions, from ``benchmarks/vllm_versions.py``, and of the self-check, from
``benchmarks/selfcheck.py``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from common import RESULTS, Row, read_result, table
from packaging.version import Version

FOLDER = RESULTS / "vllm_versions"
CHECKED = RESULTS / "selfcheck"
WAYS = ("eager", "graphs", "compiled")
SPEED = {"lossy": "speed sparse", "lossless": "speed lossless"}


def age(path: Path) -> tuple[Version, str]:
    """Sort key for files such as ``0.33.0_h200.json``: by version, then by machine."""
    version, _, machine = path.stem.partition("_")
    return Version(version), machine


def results(folder: Path) -> list[Row]:
    """Read one result per version and machine, oldest version first."""
    return [read_result(path) for path in sorted(folder.glob("*.json"), key=age)]


def gpu(result: Row) -> str:
    return next(name for name in ("H100", "H200") if name in result["machine"])


def error(way: dict[str, Any] | None, of: str) -> str:
    """Format the mean / 99th percentile of log-prob errors, or say that the engine failed."""
    return "failed" if way is None else f"{way[of]['mean']:.3f} / {way[of]['p99']:.2f}"


def log_probs(found: dict[str, Any] | None) -> list[str]:
    """Format the errors for each way of running an engine, the reference errors, and whether all
    errors are at most twice as large.
    """
    if found is None:
        return ["", "", "", "", ""]
    ways = [found[way] for way in WAYS]
    within = all(way is not None and way["within twice the yardstick"] for way in ways)
    return [
        *(error(way, "missed") for way in ways),
        error(found["graphs"], "yardstick") if found["graphs"] else "",
        "yes" if within else "no",
    ]


def greedy(found: dict[str, Any] | None) -> str:
    """Format the number of greedy tokens before the first difference from stock vLLM, and the
    widest gap in log-prob between two tokens that differ.
    """
    if found is None or "greedy" not in found:
        return ""
    return f"{found['greedy']} ({found['widest gap where greedy tokens part']:.3f} nats)"


def verdict(audit: dict[str, Any] | None) -> str:
    """Format an audit's verdict, its smallest p-value, and the detectable bias."""
    if audit is None:
        return ""
    if "failed" in audit:
        return "failed"
    seen = f"{audit['detectable share of tokens']:.1%}"
    return f"{audit['status']} (p {audit['p']:.1g}; {seen} would be seen)"


def speed(result: Row, mode: str) -> list[str]:
    """Format the number of timed sequences, and the tokens per second relative to stock."""
    ours = result.get(SPEED[mode])
    if ours is None:
        return ["", ""]
    if "failed" in ours:
        return ["failed", ""]
    ratio = ours["tokens_per_s"] / result["speed stock"]["tokens_per_s"]
    return [f"{ours['batch']} x {ours['length']:,}", f"{ratio:.2f}x"]


def versions() -> str:
    """Return a table with one row per version, machine and mode."""
    rows = [
        [
            result["vllm"],
            result["torch"].partition("+")[0],
            gpu(result),
            mode,
            *log_probs(result.get(mode)),
            greedy(result.get(mode)),
            verdict(result.get(f"audit {mode}")),
            *speed(result, mode),
        ]
        for mode in SPEED
        for result in results(FOLDER)
        if result.keys() & {mode, f"audit {mode}", SPEED[mode]}
    ]
    head = [
        "vLLM",
        "torch",
        "GPU",
        "mode",
        "eager",
        "CUDA graphs",
        "graphs and torch.compile",
        "reference error",
        "within twice the reference error",
        "greedy tokens as stock's",
        "`sparrow audit`",
        "sequences x tokens",
        "tokens/s over stock",
    ]
    return table(head, rows)


def checked(result: dict[str, Any] | None) -> str:
    """Format the result of an engine's self-check."""
    if result is None:
        return ""
    if not result["as expected"]:
        return "**not as expected**"
    if result["outcome"] != "started":
        return "refused"
    times = f"{result['ms when compiled']} ms ({result['ms']} ms)"
    return f"{times}; {result['layers differ by']:.2g}; {result['log-probs differ by']:.2g}"


def selfchecks() -> str:
    """Return a table with one row per engine and one column per version."""
    found = results(CHECKED)
    cases = [{result["case"]: result for result in one["cases"]} for one in found]
    names = dict.fromkeys(name for one in cases for name in one)
    rows = [[name, *(checked(one.get(name)) for one in cases)] for name in names]
    return table(["engine", *(f"vLLM {one['vllm']}" for one in found)], rows)


TABLES = {"versions": versions, "selfcheck": selfchecks}
