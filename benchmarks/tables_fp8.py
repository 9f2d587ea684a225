"""Tables of KV caches in 8 bits and fp8 weights: kernels, rollouts, equalities, acceptance."""

from __future__ import annotations

from typing import Any

from common import RESULTS, SHAPES, Column, Row, declared, interval, load, table
from rollout_trace import SLOTS

NAMES = {
    "stock": "stock, bfloat16", "stock fp8": "stock, fp8 cache and weights", "sparse": "Sparrow, bfloat16",
    "sparse fp8 cache": "Sparrow, fp8 cache", "sparse fp8": "Sparrow, fp8 cache and weights",
    "sparse int8 cache": "Sparrow, int8 cache", "sparse int8 cache, fp8 weights": "Sparrow, int8 cache, fp8 weights",
}  # fmt: skip


def rollouts() -> str:
    """Every variant at the rows that the bfloat16 cache holds, and at those that its own holds."""
    rows = []
    for shape in SLOTS:
        if not (RESULTS / f"fp8_{shape}.json").exists():
            continue
        traces = {name: variant["traces"] for name, variant in load(f"fp8_{shape}")["variants"].items()}
        stock, rival = traces["stock"], traces.get("stock fp8")
        for name, own in traces.items():
            for trace in own:

                def over(other: list[dict[str, Any]] | None, speed: float = trace["tokens_per_second"]) -> str:
                    return "not measured" if other is None else f"{speed / other[-1]['tokens_per_second']:.2f}x"

                same = [t for t in stock if t["slots"] == trace["slots"]]
                equal = over(same) if same else "-"
                speed = f"{trace['tokens_per_second']:,.0f}"
                rows.append([SHAPES[shape], NAMES[name], trace["slots"], speed, over(stock), equal, over(rival)])
    head = ["shape", "", "at a time", "tokens/s", "over stock in bfloat16, its most", "the same at a time"]
    return table([*head, "over stock in fp8, its most"], rows)


def attention() -> str:
    """The decode kernels alone, with keys and values in 16 and in 8 bits and landmarks in 16."""
    cases = [row for row in load("fp8_cache")["cases"] if row["landmark_dtype"] == "auto"]
    stored: dict[str, list[Any]] = {"auto": [], "fp8": [], "int8": []}
    for row in cases:
        stored[row["cache"]].append(row)
    wide, narrow, int8 = stored.values()
    cells: dict[str, Column] = {
        "sequences x tokens": "{B} x {L:,}", "heads per kv head": "{G}", "pages kept": "{k}",
        "16 bits, us": "{step[us]:.0f}", "of limit": lambda row: f"{row['limit_us'] / row['step']['us']:.0%}",
    }  # fmt: skip
    for name in ("fp8", "int8"):
        cells |= {
            f"{name}, us": f"{{{name}[step][us]:.0f}}",
            f"{name}, of its limit": lambda row, name=name: f"{row[name]['limit_us'] / row[name]['step']['us']:.0%}",
            f"{name}, every page, us": f"{{{name}[dense][us]:.0f}}",
        }
    rows = [{**row, "fp8": fp8, "int8": its} for row, fp8, its in zip(wide, narrow, int8, strict=True)]
    return declared(rows, cells)


def equalities() -> str:
    """How far log-probs are from the float32 truth, and prefill from decoding."""
    rows: dict[str, tuple[Any, Any, Any]] = {}
    for stored in ("fp8", "int8"):
        if not (RESULTS / f"{stored}_equal.json").exists():
            continue
        result = load(f"{stored}_equal")
        unbounded, sparse = (result[f"{name} {stored} from rounded"] for name in ("unbounded", "sparse"))
        whole, few = f"Sparrow, {stored} cache, every page", f"Sparrow, {stored} cache, 4 to 16 pages"
        to = "" if stored == "fp8" else f" to {stored}"
        rows |= {
            "stock, bfloat16": (result["stock from the truth"], "", result["stock prefill from decode"]),
            f"stock, {stored} cache": (
                result[f"stock {stored} from the truth"], "", result[f"stock {stored} prefill from decode"],
            ),
            whole: (
                result[f"unbounded {stored} from the truth"], unbounded["missed"],
                result[f"unbounded {stored} prefill from decode"],
            ),
            f"transformers, float32, rounded{to}": (result["unbounded rounded from the truth"], 0, ""),
            f"transformers, bfloat16, rounded{to} (yardstick)": ("", unbounded["yardstick"], ""),
            few: (result[f"sparse {stored} from the truth"], sparse["missed"], ""),
            f"transformers, bfloat16, rounded{to}, 4 to 16 pages (yardstick)": ("", sparse["yardstick"], ""),
            f"Sparrow, {stored} cache and fp8 weights, 4 to 16 pages".replace("fp8 cache and fp8", "fp8 cache and"): (
                result[f"sparse {stored} with fp8 weights from the truth"], "", "",
            ),
        }  # fmt: skip
    lines = [
        [name, *("{mean:.4f} / {p99:.3f}".format(**x) if isinstance(x, dict) else x for x in row)]
        for name, row in rows.items()
    ]
    head = ["mean / p99 of the difference", "from float32", "from float32 with rounded keys and values"]
    return table([*head, "prefill from decode"], lines)


ROUNDED = {
    "all to bfloat16": "everything, to bfloat16", "nothing": "nothing", "cache": "keys and values, to fp8",
    "matrices": "matrices and their inputs, to fp8", "both": "both, to fp8",
    "int8 cache": "keys and values, to int8", "int8 cache, matrices": "keys and values to int8, matrices to fp8",
}  # fmt: skip


def _rounded(row: Row) -> list[str]:
    """The first columns of a row of ``studies/text/fewer_bits.py``."""
    budget = "all" if row["budget"] is None else f"{row['budget']:,}"
    return [budget, ROUNDED[row["rounded"]], *(interval(row[name], 3) for name in ("mean", "p5"))]


def acceptance() -> str:
    """What each rounding costs in acceptance, alone and with sparse attention."""
    return table(["tokens read", "rounded", "mean", "p5"], map(_rounded, load("text_bits")["rows"]))


def acceptance_bf16() -> str:
    """The same where actors run in bfloat16, with what rounding changes in p5 under the same budget."""
    rows = (
        [*_rounded(row), "{:+.3f} [{:+.3f}, {:+.3f}]".format(*row["p5_change"]) if "p5_change" in row else ""]
        for row in load("text_bits_bf16")["rows"]
    )
    return table(["tokens read", "rounded, besides bfloat16", "mean", "p5", "change of p5"], rows)


TABLES = {
    "fp8 rollouts": rollouts,
    "fp8 attention": attention,
    "fp8 equalities": equalities,
    "fp8 acceptance": acceptance,
    "fp8 acceptance bf16": acceptance_bf16,
}
