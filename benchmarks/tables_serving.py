"""Tables for LoRA and data parallelism, from the results of ``lora_check.py`` and
``audit_serving.py``.
"""

from __future__ import annotations

from typing import Any

from common import RESULTS, read_result, table


def result(name: str) -> Any:
    return read_result(RESULTS / f"{name}.json")


def lossless_lora() -> str:
    """Return a table with one row per way of running the engines."""
    rows = []
    for mode, found in result("lossless_lora")["modes"].items():
        errors = found["log-probs"]
        accepted = found["accepted"]
        same = (
            f"{found['tokens before the first difference']:,} of {found['tokens']:,} tokens, "
            f"{found['identical responses']} of {found['responses']} responses"
        )
        rows.append(
            [
                mode,
                same,
                *(f"{errors[kind]['mean']:.4f} / {errors[kind]['p99']:.3f}" for kind in errors),
                *(f"{accepted[drafts]:.3f}" for drafts in accepted),
            ]
        )
    columns = [
        "engine",
        "as stock vLLM",
        "log-probs: stock vLLM",
        "log-probs: lossless",
        "accepted: with adapters",
        "requests without adapters",
        "drafts that leave adapters out",
    ]
    return table(columns, rows)


GUESSES = {
    "history": "guesses from history",
    "head": "guesses from a random head",
    "mixed": "guesses from history and a random head",
}
"""Maps arms of ``audit_drafters.py`` to their names in the table."""


def audit_serving() -> str:
    """Return a table with one row per arm of ``audit_serving.py`` and one per source of guesses."""
    drafters = result("audit_drafters")["drafters"]
    arms = result("audit_serving")["arms"]
    arms |= {name: drafters[arm] for arm, name in GUESSES.items() if arm in drafters}
    rows = []
    for arm, found in arms.items():
        seeds = found["seeds"]
        drafts = found["drafts"]
        detectable = max(seed["detectable share of tokens"] for seed in seeds)
        rows.append(
            [
                arm,
                f"{found['exact']} of {len(seeds)}",
                f"{min(seed['p'] for seed in seeds):.2g}",
                f"{100 * detectable:.1f} %",
                f"{sum(seed['tokens'] for seed in seeds):,}",
                f"{drafts['accepted'] / drafts['drafted']:.2f}",
            ]
        )
    columns = [
        "lossless mode with",
        "seeds found exact",
        "smallest p",
        "bias that would be seen",
        "tokens",
        "drafts accepted",
    ]
    return table(columns, rows)


TABLES = {"lossless lora": lossless_lora, "audit serving": audit_serving}
