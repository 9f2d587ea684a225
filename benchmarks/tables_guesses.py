"""Tables of lossless decoding with guesses, from the results of ``benchmarks/cascade.py``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

from common import RESULTS, SHAPES, Row, table

PASS_TOKENS = (1, 2, 4, 8)


def at(row: Row) -> tuple[int, int]:
    """Return the state a row belongs to."""
    return row["batch"], row["length"]


def runs() -> Iterator[tuple[str, dict[str, Row]]]:
    """Yield the shape's name and the engines of each run with synthetic rates."""
    for shape, name in SHAPES.items():
        path = RESULTS / f"cascade_{shape}.json"
        if path.exists():
            for run in json.loads(path.read_text())["runs"]:
                yield name, run["engines"]


def state_name(state: tuple[int, int]) -> str:
    """Format a state as sequences x tokens."""
    return f"{state[0]} x {state[1]:,}"


def pass_ms(engine: Row) -> dict[tuple[int, int], dict[int, float]]:
    """Return the time of a sparse pass in ms, by state and tokens per sequence."""
    found: dict[tuple[int, int], dict[int, float]] = {}
    for row in engine.get("passes", ()):
        found.setdefault(at(row), {})[row["tokens"]] = row["ms"]
    return found


def passes() -> str:
    """One row per state: the time of a sparse pass over one token per sequence in ms, and the
    relative time of passes over several tokens.
    """
    rows = []
    for name, engines in runs():
        for state, by_tokens in pass_ms(engines.get("cascade", {})).items():
            one, *several = (by_tokens[tokens] for tokens in PASS_TOKENS)
            cells = [f"{ms / one:.2f}x" for ms in several]
            rows.append([name, state_name(state), f"{one:.2f}", *cells])
    head = ["shape", "sequences x tokens", "1 token, ms"]
    return table([*head, *(f"{tokens} tokens" for tokens in PASS_TOKENS[1:])], rows)


def fastest(rows: Iterable[Row]) -> Row:
    """Return the row with the most tokens per second."""
    return max(rows, key=lambda row: row["tokens_per_s"])


def speed_row(name: str, stock: Row, best: Row, one_pass: float) -> list[str]:
    """Return the cells for the fastest number of drafts or passes in a state. The last cell is the
    time of the cycle's sparse passes plus one dense step, relative to the measured cycle.
    """
    count = best["passes"] if "passes" in best else best["drafts"]
    parts = count * one_pass + stock["ms"]
    return [
        name,
        state_name(at(stock)),
        f"{stock['tokens_per_s']:,.0f}",
        str(best.get("guesses", 0)),
        f"{best.get('drafts_per_pass', 1):.2f}",
        str(count),
        f"{best['tokens_per_cycle']:.1f}",
        f"{best['ms']:.1f}",
        f"{best['tokens_per_s'] / stock['tokens_per_s']:.2f}x",
        f"{parts / best['ms']:.0%}",
    ]


def speed() -> str:
    """One row per run, state and number of drafts per pass. Each row has the fastest number of
    drafts or passes per cycle.
    """
    rows = []
    for name, engines in runs():
        for stock in engines["stock"]["points"]:
            state = at(stock)
            for arm in ("lossless", "cascade"):
                engine = engines.get(arm, {"points": ()})
                points = [row for row in engine["points"] if at(row) == state]
                for asked in sorted({row.get("asked_per_pass", 1) for row in points}):
                    best = fastest(row for row in points if row.get("asked_per_pass", 1) == asked)
                    one_pass = pass_ms(engine)[state][best.get("guesses", 0) + 1]
                    rows.append(speed_row(name, stock, best, one_pass))
    head = [
        "shape",
        "sequences x tokens",
        "stock: tokens/s",
        "guesses",
        "drafts per pass",
        "passes per cycle",
        "tokens per cycle",
        "ms per cycle",
        "speed",
        "sum of the parts",
    ]
    return table(head, rows)


TABLES = {"guesses passes": passes, "guesses speed": speed}
