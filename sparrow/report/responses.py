"""Prepare sampled responses, token by token, for the report's page."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import isfinite

import numpy as np

from sparrow.errors import ConfigError
from sparrow.mismatch.tail import between
from sparrow.report import theme
from sparrow.run.directory import LoggedResponse
from sparrow.run.log import RunLog

# maximum number of tokens on a page, so that it opens quickly; long responses are cut in the middle
MOST_TOKENS = 100_000
MOST_STEPS = 40  # maximum number of steps to show, unless steps are given

Span = tuple[str, str, str]  # style class, title and text of one token


@dataclass(frozen=True)
class Shown:
    """One response on the page."""

    run: str  # the run's letter; empty if there's only one run
    problem: str
    expected: str | None  # the expected answer
    facts: Sequence[str]
    prompt: str
    spans: Sequence[Span]
    is_coloured: bool  # whether a token's acceptance is known


def steps_to_show(logs: Sequence[RunLog], wanted: Sequence[int]) -> list[int]:
    """Choose the steps to show responses from. If ``wanted`` isn't empty, choose its steps.
    Otherwise, choose up to ``MOST_STEPS`` steps spread over the whole run.

    Raises ConfigError if a step in ``wanted`` was not finished by any run.
    """
    steps = sorted({step for log in logs for step in log.steps.tolist()})
    if missing := sorted(set(wanted) - set(steps)):
        raise ConfigError(
            f"step {missing[0]} is not in the log, which contains steps {steps[0]} to {steps[-1]}; "
            "choose steps from the log"
        )
    if wanted:
        return sorted(set(wanted))
    positions = np.linspace(0, len(steps) - 1, min(MOST_STEPS, len(steps)))
    return [steps[round(position)] for position in positions.tolist()]


def show(
    logs: Sequence[RunLog], steps: Collection[int], names: Sequence[str]
) -> dict[int, list[Shown]]:
    """Prepare the logged responses for each of ``steps``. If there are two runs, responses to the
    same problem go next to each other.
    """
    entries = []
    for name, log in zip(names, logs, strict=True):
        at = {step: index for index, step in enumerate(log.steps.tolist())}
        for row in log.responses(steps):
            sparse = row.step not in at or isfinite(log.dense_up_to(at[row.step]))
            entries.append((name, row if sparse else _without_acceptance(row)))
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


def _without_acceptance(row: LoggedResponse) -> LoggedResponse:
    """Drop the acceptance rates of a response sampled by the dense policy. Newer versions no longer
    log them.
    """
    return replace(row, acceptance=[None] * len(row.tokens), acceptance_upper=None)


def _shown(run: str, row: LoggedResponse, most: int) -> Shown:
    lower = np.array(row.acceptance, dtype=float)
    upper = lower if row.acceptance_upper is None else np.array(row.acceptance_upper, dtype=float)
    known = np.isfinite(lower)
    spans = list(map(_span, row.tokens, lower.tolist(), upper.tolist()))
    left_out = len(spans) - most
    if left_out > 0:
        spans[most // 2 : most // 2 + left_out] = [
            ("gap", "", f"{left_out:,} tokens are not shown")
        ]
    facts = [
        f"reward {row.reward:.3g}",
        f"{len(lower):,} tokens",
        "ended by itself" if row.finish_reason == "stop" else f"ended by {row.finish_reason}",
    ]
    if known.any():
        facts += [
            f"mean acceptance {between(lower[known].mean(), upper[known].mean())}",
            f"lowest {between(lower[known].min(), upper[known].min())}",
        ]
    return Shown(run, row.problem, row.answer, facts, row.prompt, spans, bool(known.any()))


def _span(text: str, lower: float, upper: float) -> Span:
    if not isfinite(lower):
        return "none", "not measured", text
    level = next((i for i, low in enumerate(theme.LEVELS) if upper >= low), len(theme.LEVELS) - 1)
    kind = f"a{level} n" if "\n" in text else f"a{level}"
    return kind, between(lower, upper, digits=4), text
