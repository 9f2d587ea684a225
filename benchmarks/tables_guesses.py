"""Tables of lossless decoding with guesses, from the results of ``benchmarks/cascade.py``."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import predicted
from common import RESULTS, SHAPES, Row, table
from never_slower import Cell

PASS_TOKENS = (1, 2, 4, 8)
WEIGHTS = {"lossless": "16", "fp8": "8"}
"""Maps arms of ``cascade.py synthetic`` to the bits of the weights that drafts use."""
REAL = "cascade_real_smollm2"
SHAPE = "smollm2-135m"
PROMPT = 2048
NEW = 1024
"""Tokens per prompt and response where prompts are cut from a text. Where they are questions,
lengths were not recorded.
"""
REAL_ARMS = {
    "ngram": "stock, n-gram",
    "eagle3": "stock, head",
    "adaptive": "lossless",
    "guess3": "history guesses in every cycle",
    "head_guess3": "head guesses in every cycle",
    "mixed2_guess3": "history guesses from 2 tokens, head elsewhere",
    "mixed4_guess3": "history guesses from 4 tokens, head elsewhere",
    "adaptive_guess3": "lossless, may guess from history",
    "adaptive_head_guess3": "lossless, head may guess",
}
"""Maps arms of ``cascade.py real`` to their names in the tables."""
YIELDS = {
    "adaptive": ("acceptance", "tokens_per_cycle"),
    "guess3": ("acceptance", "drafts_per_pass", "tokens_per_cycle"),
    "head_guess3": ("acceptance", "drafts_per_pass", "tokens_per_cycle"),
    "mixed2_guess3": ("acceptance", "drafts_per_pass", "tokens_per_cycle"),
    "mixed4_guess3": ("acceptance", "drafts_per_pass", "tokens_per_cycle"),
}
"""What the tables say about each arm's drafts."""


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
    """One row per state: the time in ms of a sparse pass over one token per sequence, and how many
    times as long passes over several tokens take.
    """
    rows = []
    for name, engines in runs():
        for arm, bits in WEIGHTS.items():
            for state, by_tokens in pass_ms(engines.get(arm, {})).items():
                one, *several = (by_tokens[tokens] for tokens in PASS_TOKENS)
                cells = [f"{ms / one:.2f}x" for ms in several]
                rows.append([name, state_name(state), bits, f"{one:.2f}", *cells])
    head = ["shape", "sequences x tokens", "bits of the weights", "1 token, ms"]
    return table([*head, *(f"{tokens} tokens" for tokens in PASS_TOKENS[1:])], rows)


def fastest(rows: Iterable[Row]) -> Row:
    """Return the row with the most tokens per second."""
    return max(rows, key=lambda row: row["tokens_per_s"])


def speed_row(name: str, bits: str, stock: Row, best: Row, one_pass: float) -> list[str]:
    """Return the cells for the fastest number of drafts or passes in a state. The last cell is the
    time of the cycle's sparse passes plus one dense step, relative to the measured cycle.
    """
    count = best["passes"] if "passes" in best else best["drafts"]
    parts = count * one_pass + stock["ms"]
    return [
        name,
        state_name(at(stock)),
        f"{stock['tokens_per_s']:,.0f}",
        bits,
        str(best.get("guesses", 0)),
        f"{best.get('drafts_per_pass', 1):.2f}",
        str(count),
        f"{best['tokens_per_cycle']:.1f}",
        f"{best['ms']:.1f}",
        f"{best['tokens_per_s'] / stock['tokens_per_s']:.2f}x",
        f"{parts / best['ms']:.0%}",
    ]


def speed() -> str:
    """One row per run, state, arm and number of drafts per pass. Each row has the fastest number of
    drafts or passes per cycle.
    """
    rows = []
    for name, engines in runs():
        for stock in engines["stock"]["points"]:
            state = at(stock)
            for arm in [arm for arm in WEIGHTS if arm in engines]:
                points = [row for row in engines[arm]["points"] if at(row) == state]
                for asked in sorted({row.get("asked_per_pass", 1) for row in points}):
                    best = fastest(row for row in points if row.get("asked_per_pass", 1) == asked)
                    one_pass = pass_ms(engines[arm])[state][best.get("guesses", 0) + 1]
                    rows.append(speed_row(name, WEIGHTS[arm], stock, best, one_pass))
    head = [
        "shape",
        "sequences x tokens",
        "stock: tokens/s",
        "bits of the weights",
        "guesses",
        "drafts per pass",
        "passes per cycle",
        "tokens per cycle",
        "ms per cycle",
        "speed",
        "sum of the parts",
    ]
    return table(head, rows)


# --- real guesses ---


def real_run() -> dict[str, list[Row]]:
    """Return the points of each arm, in the last run with real guesses."""
    path = RESULTS / f"{REAL}.json"
    engines = json.loads(path.read_text())["runs"][-1]["engines"]
    return {arm: engine["points"] for arm, engine in engines.items() if engine["points"]}


def texts(points: Iterable[Row]) -> list[tuple[str, float]]:
    """Return each text's file and temperature, in the order in which they were sampled."""
    return list(dict.fromkeys((row["text"], row["temperature"]) for row in points))


def sampled_from(points: Iterable[Row], text: tuple[str, float]) -> list[Row]:
    """Return the repeats of a text at a temperature."""
    return [row for row in points if (row["text"], row["temperature"]) == text]


def tokens_per_s(rows: Sequence[Row]) -> float:
    """Return the speed over all repeats."""
    return sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)


def average(rows: Sequence[Row], name: str) -> str:
    """Format the mean of a value over all repeats, or return an empty cell if it wasn't
    measured.
    """
    if not all(name in row for row in rows):
        return ""
    digits = 3 if name == "acceptance" else 2
    return f"{mean(rows, name):.{digits}f}"


def mean(rows: Sequence[Row], name: str) -> float:
    """Return the mean of a value over all repeats."""
    return float(sum(row[name] for row in rows)) / len(rows)


def predictions(stock: Row, lossless: Sequence[Row]) -> list[str]:
    """Return what the cost model predicts for a text: stock vLLM's tokens per second and, at the
    measured acceptance and tokens per cycle, the relative speed of lossless mode. The cells are
    empty if these or the lengths of responses are not known.
    """
    names = YIELDS["adaptive"]
    is_measured = bool(lossless) and all(name in row for row in lossless for name in names)
    if Path(stock["text"]).suffix == ".jsonl" or not is_measured:
        return ["", ""]
    cell = Cell(stock["tokens"] // NEW, PROMPT, NEW)
    drafting = predicted.like(*(mean(lossless, name) for name in names))
    dense = predicted.tokens_per_s(SHAPE, cell)
    ratio = predicted.lossless_tokens_per_s(SHAPE, cell, [drafting]) / dense
    return [f"{dense:,.0f}", f"{ratio:.2f}x"]


def real_speed() -> str:
    """One row per text and temperature: each arm's speed relative to stock vLLM, and what the cost
    model predicts for stock vLLM and lossless mode.
    """
    run = real_run()
    arms = [arm for arm in REAL_ARMS if arm in run]
    rows = []
    for text in texts(run.get("stock", ())):
        repeats = sampled_from(run["stock"], text)
        stock = tokens_per_s(repeats)
        lossless = sampled_from(run.get("adaptive", ()), text)
        dense, ratio = predictions(repeats[0], lossless)
        cells = []
        for arm in arms:
            found = sampled_from(run[arm], text)
            if arm == "adaptive":
                cells.append(ratio)
            cells.append(f"{tokens_per_s(found) / stock:.2f}x" if found else "")
        rows.append([Path(text[0]).stem, f"{text[1]:g}", dense, f"{stock:,.0f}", *cells])
    head = ["text", "temperature", "stock, tokens/s: predicted", "measured"]
    for arm in arms:
        if arm == "adaptive":
            head += ["lossless: predicted", "measured"]
        else:
            head.append(REAL_ARMS[arm])
    return table(head, rows)


def real_yields() -> str:
    """One row per text and temperature: acceptance, drafts per pass and tokens per cycle."""
    run = real_run()
    columns = [(arm, name) for arm in REAL_ARMS for name in YIELDS.get(arm, ()) if run.get(arm)]
    rows = []
    for text in texts(run.get("stock", ())):
        cells = [average(sampled_from(run[arm], text), name) for arm, name in columns]
        rows.append([Path(text[0]).stem, f"{text[1]:g}", *cells])
    named = [f"{REAL_ARMS[arm]}: {name.replace('_', ' ')}" for arm, name in columns]
    return table(["text", "temperature", *named], rows)


TABLES = {
    "guesses passes": passes,
    "guesses speed": speed,
    "guesses real speed": real_speed,
    "guesses real yields": real_yields,
}
