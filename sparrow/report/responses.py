"""Sampled responses token by token, as the page shows them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from math import isfinite, nan

import numpy as np

from sparrow.errors import ConfigError
from sparrow.report import theme
from sparrow.report.summary import number
from sparrow.run.directory import LoggedResponse
from sparrow.run.log import RunLog, nan_mean

# a page with more tokens is slow to open, so longer responses lose their middle
MOST_TOKENS = 100_000
MOST_STEPS = 40  # how many steps of a longer run are shown, unless others are asked for

Span = tuple[str, str, str]  # style class, title and text of one token


@dataclass(frozen=True)
class Shown:
    """One response."""

    run: str  # which of two runs it comes from; empty if there is one run
    problem: str
    expected: str | None  # the answer that was expected
    facts: Sequence[str]
    prompt: str
    spans: Sequence[Span]


def steps_to_show(logs: Sequence[RunLog], wanted: Sequence[int]) -> list[int]:
    """The steps whose responses the page shows: those wanted, else up to ``MOST_STEPS`` from the
    first to the last.

    Raises ConfigError: a wanted step that no run has finished.
    """
    steps = sorted({step for log in logs for step in log.steps.tolist()})
    if missing := sorted(set(wanted) - set(steps)):
        raise ConfigError(
            f"step {missing[0]} is not in the log, which has {steps[0]} to {steps[-1]}; ask for others"
        )
    if wanted:
        return sorted(set(wanted))
    positions = np.linspace(0, len(steps) - 1, min(MOST_STEPS, len(steps)))
    return [steps[round(position)] for position in positions.tolist()]


def show(
    logs: Sequence[RunLog], steps: Collection[int], names: Sequence[str]
) -> dict[int, list[Shown]]:
    """The logged responses of these steps, by step; the responses of two runs to one problem are
    next to each other.
    """
    entries = [
        (name, row) for name, log in zip(names, logs, strict=True) for row in log.responses(steps)
    ]
    most = max(MOST_TOKENS // max(len(entries), 1), 2)
    order: dict[tuple[int, str], int] = {}
    for _, row in entries:
        order.setdefault((row.step, row.problem), len(order))
    entries.sort(
        key=lambda entry: (entry[1].step, order[entry[1].step, entry[1].problem], entry[0])
    )
    by_step: dict[int, list[Shown]] = {}
    for name, row in entries:
        by_step.setdefault(row.step, []).append(_shown(name, row, most))
    return by_step


def _shown(run: str, row: LoggedResponse, most: int) -> Shown:
    accepted = np.array(row.acceptance, dtype=float)
    lowest = min(accepted[np.isfinite(accepted)], default=nan)
    spans = [_span(text, rate) for text, rate in zip(row.tokens, accepted, strict=True)]
    left_out = len(spans) - most
    if left_out > 0:
        spans[most // 2 : most // 2 + left_out] = [
            ("gap", "", f"{left_out:,} tokens are not shown")
        ]
    facts = [
        f"reward {row.reward:.3g}",
        f"{len(accepted):,} tokens",
        "ended by itself" if row.finish_reason == "stop" else f"ended by {row.finish_reason}",
        f"mean acceptance {number(nan_mean(accepted))}",
        f"lowest {number(lowest)}",
    ]
    return Shown(run, row.problem, row.answer, facts, row.prompt, spans)


def _span(text: str, rate: float) -> Span:
    if not isfinite(rate):
        return "none", "not measured", text
    level = next((i for i, low in enumerate(theme.LEVELS) if rate >= low), len(theme.LEVELS) - 1)
    return f"a{level} n" if "\n" in text else f"a{level}", f"{rate:.4f}", text
