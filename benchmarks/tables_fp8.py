"""Tables for 8-bit KV caches and fp8 weights: kernels, rollouts, equalities, acceptance."""

from __future__ import annotations

from typing import Any

from common import SHAPES, Column, Row, declared, interval, load, table
from rollout_trace import SLOTS

NAMES = {
    "stock": "stock, bfloat16",
    "stock fp8": "stock, fp8 cache and weights",
    "sparse": "Sparrow, bfloat16",
    "sparse fp8 cache": "Sparrow, fp8 cache",
    "sparse fp8": "Sparrow, fp8 cache and weights",
    "sparse int8 cache": "Sparrow, int8 cache",
    "sparse int8 cache, fp8 weights": "Sparrow, int8 cache, fp8 weights",
}


def rollouts() -> str:
    """Tabulate every variant's speed at two batch sizes: as many sequences as fit in the bfloat16
    cache, and as many as fit in the variant's own cache.
    """
    rows = []
    for shape in SLOTS:
        traces = {
            name: variant["traces"] for name, variant in load(f"fp8_{shape}")["variants"].items()
        }
        stock = traces["stock"]
        for name, own in traces.items():
            for trace in own:
                speed, same = (
                    trace["tokens_per_second"],
                    [t for t in stock if t["slots"] == trace["slots"]],
                )
                others = (stock, same, traces["stock fp8"])
                over = (
                    f"{speed / other[-1]['tokens_per_second']:.2f}x" if other else "-"
                    for other in others
                )
                rows.append([SHAPES[shape], NAMES[name], trace["slots"], f"{speed:,.0f}", *over])
    head = [
        "shape",
        "engine",
        "sequences at a time",
        "tokens/s",
        "over stock bfloat16, full cache",
        "over stock bfloat16, same requests",
    ]
    return table([*head, "over stock fp8, full cache"], rows)


def attention() -> str:
    """Tabulate the times of the decode kernels alone, with 16-bit landmarks and with 16-bit or
    8-bit keys and values.
    """
    cases = [row for row in load("fp8_cache")["cases"] if row["landmark_dtype"] == "auto"]
    wide, narrow, int8 = (
        [row for row in cases if row["cache"] == name] for name in ("auto", "fp8", "int8")
    )
    cells: dict[str, Column] = {
        "sequences x tokens": "{B} x {L:,}",
        "heads per KV head": "{G}",
        "pages kept": "{k}",
        "16 bits, us": "{step[us]:.0f}",
        "of limit": lambda row: f"{row['limit_us'] / row['step']['us']:.0%}",
    }
    for name in ("fp8", "int8"):
        cells |= {
            f"{name}, us": f"{{{name}[step][us]:.0f}}",
            f"{name}, of limit": lambda row, name=name: (  # type: ignore[misc]
                f"{row[name]['limit_us'] / row[name]['step']['us']:.0%}"
            ),
            f"{name}, every page, us": f"{{{name}[dense][us]:.0f}}",
        }
    rows = [
        {**row, "fp8": fp8, "int8": its} for row, fp8, its in zip(wide, narrow, int8, strict=True)
    ]
    return declared(rows, cells)


def equalities() -> str:
    """Tabulate how far log-probs are from the float32 truth, and how much they differ between
    prefill and decoding.
    """
    rows: dict[str, tuple[Any, Any, Any]] = {}
    for stored in ("fp8", "int8"):
        result = load(f"{stored}_equal")
        unbounded, sparse = (
            result[f"{name} {stored} from rounded"] for name in ("unbounded", "sparse")
        )
        truth, prefill = (
            {name.removesuffix(end): found for name, found in result.items() if name.endswith(end)}
            for end in (" from the truth", " prefill from decode")
        )
        to, weights = ("", "weights") if stored == "fp8" else (f" to {stored}", "fp8 weights")
        rows |= {
            "stock, bfloat16": (truth["stock"], "", prefill["stock"]),
            f"stock, {stored} cache": (truth[f"stock {stored}"], "", prefill[f"stock {stored}"]),
            f"Sparrow, {stored} cache, every page": (
                truth[f"unbounded {stored}"],
                unbounded["missed"],
                prefill[f"unbounded {stored}"],
            ),
            f"transformers, float32, rounded{to}": (truth["unbounded rounded"], 0, ""),
            f"transformers, bfloat16, rounded{to} (reference error)": (
                "",
                unbounded["yardstick"],
                "",
            ),
            f"Sparrow, {stored} cache, 4 to 16 pages": (
                truth[f"sparse {stored}"],
                sparse["missed"],
                "",
            ),
            f"transformers, bfloat16, rounded{to}, 4 to 16 pages (reference error)": (
                "",
                sparse["yardstick"],
                "",
            ),
            f"Sparrow, {stored} cache and {weights}, 4 to 16 pages": (
                truth[f"sparse {stored} with fp8 weights"],
                "",
                "",
            ),
        }
    lines = [
        [name, *("{mean:.4f} / {p99:.3f}".format(**x) if isinstance(x, dict) else x for x in row)]
        for name, row in rows.items()
    ]
    head = [
        "mean / p99 of the difference",
        "from float32",
        "from float32 with rounded keys and values",
    ]
    return table([*head, "prefill from decode"], lines)


ROUNDED = {
    "all to bfloat16": "everything, to bfloat16",
    "nothing": "nothing",
    "cache": "KV cache, to fp8",
    "matrices": "weights and activations, to fp8",
    "both": "KV cache, weights and activations, to fp8",
    "int8 cache": "KV cache, to int8",
    "int8 cache, matrices": "KV cache to int8, weights and activations to fp8",
}


def _rounded(row: Row) -> list[str]:
    """Return the first columns for a row of ``studies/text/fewer_bits.py``."""
    budget = "all" if row["budget"] is None else f"{row['budget']:,}"
    return [budget, ROUNDED[row["rounded"]], *(interval(row[name], 3) for name in ("mean", "p5"))]


def acceptance() -> str:
    """Tabulate what each kind of rounding costs in acceptance, alone and with sparse attention."""
    return table(
        ["tokens read", "rounding", "mean", "p5"], map(_rounded, load("text_bits")["rows"])
    )


def acceptance_bf16() -> str:
    """Tabulate what each kind of rounding costs actors in bfloat16, including the change in p5 at
    the same budget.
    """
    rows = (
        [
            *_rounded(row),
            "{:+.3f} [{:+.3f}, {:+.3f}]".format(*row["p5_change"]) if "p5_change" in row else "",
        ]
        for row in load("text_bits_bf16")["rows"]
    )
    return table(
        ["tokens read", "rounding in addition to bfloat16", "mean", "p5", "change in p5"], rows
    )


TABLES = {
    "fp8 rollouts": rollouts,
    "fp8 attention": attention,
    "fp8 equalities": equalities,
    "fp8 acceptance": acceptance,
    "fp8 acceptance bf16": acceptance_bf16,
}
