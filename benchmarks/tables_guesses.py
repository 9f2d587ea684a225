"""Tables of lossless decoding with guesses, from the results of ``benchmarks/cascade.py``."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import predicted
from cascade import LOSSLESS_ARMS, PASS_TOKENS
from common import NAMES, RESULTS, Row, read_result, table
from never_slower import Cell

WEIGHTS = {"lossless": "16", "fp8": "8"}
"""Maps arms of ``cascade.py synthetic`` to the bits of the weights that drafts use."""
QUANTISED = "8, stock's too"
"""The bits in a run whose engines all have quantised weights."""
REAL = "cascade_real_smollm2"
SIMULATION = "cascade_head"
SHAPE = "smollm2-135m"
PROMPT = 2048
NEW = 1024
"""Tokens per prompt and response where prompts are cut from a text. Where they are questions,
lengths were not recorded.
"""
REAL_ARMS = {
    "adaptive": "lossless",
    "guess3": "history guesses in every cycle",
    "head_guess3": "head guesses in every cycle",
    "mixed2_guess3": "both guess in every cycle, history from 2 tokens",
    "mixed4_guess3": "both guess in every cycle, history from 4 tokens",
    "adaptive_guess3": "lossless, may guess from history",
    "adaptive_head_guess3": "lossless, head may guess",
    "adaptive_mixed4_guess3": "lossless, both may guess, history from 4 tokens",
}
"""Maps arms of ``cascade.py real`` to their names in the tables."""
STOCK_ARMS = {"ngram": "stock, n-gram", "eagle3": "stock, head"}
"""The same for vLLM's own drafters."""
SIMULATED = {
    "guess3": "history",
    "head_guess3": "head",
    "mixed2_guess3": "mixed 2",
    "mixed4_guess3": "mixed 4",
}
"""Maps arms to the first stages of ``studies/cascade/head.py``, which simulated their drafts."""
YIELDS = {
    "acceptance": "acceptance",
    "drafts_per_pass": "drafts per pass",
    "tokens_per_cycle": "tokens per cycle",
}
"""Maps what was measured about an arm's drafts to its name in the table."""


def at(row: Row) -> tuple[int, int]:
    """Return the state a row belongs to."""
    return row["batch"], row["length"]


CASES: dict[str, Callable[[Row], Hashable]] = {
    "passes": lambda row: (at(row), row["tokens"]),
    "points": lambda row: (at(row), rates_of(row), row["drafts"]),
}
"""What tells the rows of a part of an engine's results apart."""


class Measured(NamedTuple):
    """An engine's results with synthetic rates.

    Attributes:
        shape: the shape's name.
        bits: the bits of the weights that drafts use.
        stock: the points of stock vLLM in the same run.
        engine: all of the engine's results.
        later: the results of the same arm in later runs with the same weights.
    """

    shape: str
    bits: str
    stock: list[Row]
    engine: Row
    later: list[Row]

    def rows(self, part: str) -> list[Row]:
        """Return the passes or points without the cases that a later run has measured again."""
        case = CASES[part]
        again = {case(row) for other in self.later for row in other.get(part, ())}
        return [row for row in self.engine.get(part, ()) if case(row) not in again]


def measured() -> Iterator[Measured]:
    """Yield the results with synthetic rates, run by run."""
    for shape, name in NAMES.items():
        path = RESULTS / f"cascade_{shape}.json"
        if not path.exists():
            continue
        runs = read_result(path)["runs"]
        for number, run in enumerate(runs):
            quantised = run.get("quantization")
            engines = run["engines"]
            for arm, bits in WEIGHTS.items():
                if arm not in engines:
                    continue
                later = [
                    other["engines"][arm]
                    for other in runs[number + 1 :]
                    if arm in other["engines"] and other.get("quantization") == quantised
                ]
                yield Measured(
                    name,
                    QUANTISED if quantised else bits,
                    engines["stock"]["points"],
                    engines[arm],
                    later,
                )


def state_name(state: tuple[int, int]) -> str:
    """Format a state as sequences x tokens."""
    return f"{state[0]} x {state[1]:,}"


def pass_ms(passes: Iterable[Row]) -> dict[tuple[int, int], dict[int, float]]:
    """Return the time of a sparse pass in ms, by state and tokens per sequence."""
    found: dict[tuple[int, int], dict[int, float]] = {}
    for row in passes:
        found.setdefault(at(row), {})[row["tokens"]] = row["ms"]
    return found


def passes() -> str:
    """One row per state: the time in ms of a sparse pass over one token per sequence, and how many
    times as long passes over several tokens take.
    """
    rows = []
    for found in measured():
        for state, by_tokens in pass_ms(found.rows("passes")).items():
            one, *several = (by_tokens[tokens] for tokens in PASS_TOKENS)
            cells = [f"{ms / one:.2f}x" for ms in several]
            rows.append([found.shape, state_name(state), found.bits, f"{one:.2f}", *cells])
    head = ["shape", "sequences x tokens", "bits of the weights", "1 token, ms"]
    return table([*head, *(f"{tokens} tokens" for tokens in PASS_TOKENS[1:])], rows)


class Cycle(NamedTuple):
    """A number of drafts or passes per cycle, measured in a state."""

    shape: str
    bits: str
    stock: Row
    row: Row
    one_pass: float  # ms

    @property
    def speed(self) -> float:
        """The speed relative to stock vLLM in the same run."""
        return self.row["tokens_per_s"] / self.stock["tokens_per_s"]

    def cells(self) -> list[str]:
        """Return the cells of the table. The last one is the time of the cycle's sparse passes plus
        one dense step, relative to the measured cycle.
        """
        row = self.row
        count = row["passes"] if "passes" in row else row["drafts"]
        parts = count * self.one_pass + self.stock["ms"]
        return [
            self.shape,
            state_name(at(row)),
            f"{self.stock['tokens_per_s']:,.0f}",
            self.bits,
            str(row.get("guesses", 0)),
            f"{row['acceptance']:.3f}",
            f"{row.get('drafts_per_pass', 1):.2f}",
            str(row["drafts"]),
            str(count),
            f"{row['tokens_per_cycle']:.1f}",
            f"{row['ms']:.1f}",
            f"{self.speed:.2f}x",
            f"{parts / row['ms']:.0%}",
        ]


def rates_of(row: Row) -> tuple[int, float, float]:
    """Return the number of guesses, the acceptance of drafts, and the drafts per pass that were
    asked for.
    """
    return row.get("guesses", 0), row["acceptance"], row.get("asked_per_pass", 1.0)


def cycles() -> dict[tuple[str, tuple[int, int], str], list[Cycle]]:
    """Return all measured cycles, by shape, state, and bits of the weights."""
    found: dict[tuple[str, tuple[int, int], str], list[Cycle]] = {}
    for result in measured():
        all_passes = pass_ms(result.engine["passes"])
        stock = {at(row): row for row in result.stock}
        for row in result.rows("points"):
            state = at(row)
            one_pass = all_passes[state][row.get("guesses", 0) + 1]
            made = Cycle(result.shape, result.bits, stock[state], row, one_pass)
            found.setdefault((result.shape, state, result.bits), []).append(made)
    return found


def speed() -> str:
    """One row per state, bits of the weights, acceptance and number of drafts per pass. Each row
    has the fastest number of drafts per cycle, relative to stock vLLM in its run.
    """
    rows = []
    for measured_there in cycles().values():
        for rates in sorted({rates_of(cycle.row) for cycle in measured_there}):
            some = [cycle for cycle in measured_there if rates_of(cycle.row) == rates]
            rows.append(max(some, key=lambda cycle: cycle.speed).cells())
    head = [
        "shape",
        "sequences x tokens",
        "stock: tokens/s",
        "bits of the weights",
        "guesses",
        "acceptance",
        "drafts per pass",
        "drafts per cycle",
        "passes",
        "tokens per cycle",
        "ms per cycle",
        "speed",
        "sum of the parts",
    ]
    return table(head, rows)


# --- real guesses ---


def real_runs() -> list[dict[str, list[Row]]]:
    """Return the points of each arm, for each run with real guesses."""
    path = RESULTS / f"{REAL}.json"
    return [
        {arm: engine["points"] for arm, engine in run["engines"].items() if engine["points"]}
        for run in read_result(path)["runs"]
    ]


def texts(points: Iterable[Row]) -> list[tuple[str, float]]:
    """Return each text's file and temperature, in the order in which they were sampled."""
    return list(dict.fromkeys((row["text"], row["temperature"]) for row in points))


def sampled_from(points: Iterable[Row], text: tuple[str, float]) -> list[Row]:
    """Return the repeats of a text at a temperature."""
    return [row for row in points if (row["text"], row["temperature"]) == text]


def tokens_per_s(rows: Sequence[Row]) -> float:
    """Return the speed over all repeats."""
    return sum(row["tokens"] for row in rows) / sum(row["seconds"] for row in rows)


def is_measured(rows: Sequence[Row], name: str) -> bool:
    """Return whether there are repeats, and all of them have the value."""
    return bool(rows) and all(name in row for row in rows)


def mean(rows: Sequence[Row], name: str) -> float:
    """Return the mean of a value over all repeats."""
    return float(sum(row[name] for row in rows)) / len(rows)


def average(rows: Sequence[Row], name: str) -> str:
    """Format the mean of a value over all repeats, or return an empty cell if it wasn't
    measured.
    """
    digits = 3 if name == "acceptance" else 2
    return f"{mean(rows, name):.{digits}f}" if is_measured(rows, name) else ""


def spread(rows: Sequence[Row]) -> str:
    """Format how much faster the fastest repeat is than the slowest, in brackets."""
    speeds = [tokens_per_s([row]) for row in rows]
    return f"({max(speeds) / min(speeds) - 1:.0%})"


def relative_speed(rows: Sequence[Row], stock: Sequence[Row]) -> str:
    """Format the speed relative to stock vLLM, or return an empty cell without repeats."""
    return f"{tokens_per_s(rows) / tokens_per_s(stock):.2f}x {spread(rows)}" if rows else ""


def predictions(stock: Row, lossless: Sequence[Row]) -> list[str]:
    """Return what the cost model predicts for a text: stock vLLM's tokens per second and, at the
    measured acceptance and tokens per cycle, the relative speed of lossless mode. The cells are
    empty if these or the lengths of responses are not known.
    """
    names = ("acceptance", "tokens_per_cycle")
    is_known = all(is_measured(lossless, name) for name in names)
    if Path(stock["text"]).suffix == ".jsonl" or not is_known:
        return ["", ""]
    cell = Cell(stock["tokens"] // NEW, PROMPT, NEW)
    drafting = predicted.like(*(mean(lossless, name) for name in names))
    dense = predicted.tokens_per_s(SHAPE, cell)
    ratio = predicted.lossless_tokens_per_s(SHAPE, cell, [drafting]) / dense
    return [f"{dense:,.0f}", f"{ratio:.2f}x"]


def by_text(run: dict[str, list[Row]], arm: str) -> list[list[Row]]:
    """Return an arm's repeats of each text that stock vLLM sampled, in stock vLLM's order."""
    return [sampled_from(run.get(arm, ()), text) for text in texts(run["stock"])]


def text_names(run: dict[str, list[Row]]) -> list[str]:
    """Name the texts of a run and their temperatures."""
    return [f"{Path(text).stem}, {temperature:g}" for text, temperature in texts(run["stock"])]


def speed_rows(run: dict[str, list[Row]], arms: Mapping[str, str]) -> list[list[str]]:
    """Return a row with stock vLLM's speed on each text, and one for each measured arm."""
    stock = by_text(run, "stock")
    speeds = [f"{tokens_per_s(rows):,.0f} {spread(rows)}" for rows in stock]
    return [
        ["stock, tokens/s", *speeds],
        *(
            [name, *map(relative_speed, by_text(run, arm), stock)]
            for arm, name in arms.items()
            if arm in run
        ),
    ]


def real_speed() -> str:
    """Tabulate, for each text, every arm's speed relative to stock vLLM in the same run, and what the
    cost model predicts for stock vLLM and lossless mode.
    """
    *_, run = real_runs()
    pairs = zip(by_text(run, "stock"), by_text(run, "adaptive"), strict=True)
    predicted_by_text = [predictions(stock[0], lossless) for stock, lossless in pairs]
    dense, ratios = map(list, zip(*predicted_by_text, strict=True))
    stock, *arms = speed_rows(run, REAL_ARMS)
    rows = [stock, ["stock, predicted", *dense]]
    for row in arms:
        rows.append(row)
        if row[0] == REAL_ARMS["adaptive"]:
            rows.append(["lossless, predicted", *ratios])
    return table(["arm", *text_names(run)], rows)


def real_stock_drafters() -> str:
    """Tabulate, for each text, the speeds of vLLM's own drafters, from the first run."""
    run, *_ = real_runs()
    return table(["arm", *text_names(run)], speed_rows(run, STOCK_ARMS))


def simulated_drafts(text: tuple[str, float], arm: str) -> str:
    """Format the drafts per pass that an arm's first stage yielded in the simulation."""
    cells = read_result(RESULTS / f"{SIMULATION}.json")["cells"]
    found = [
        row[SIMULATED[arm]][0]
        for cell in cells
        if (cell["kind"], cell["temperature"]) == (Path(text[0]).stem, text[1])
        for row in cell["rows"]
        if row["guesses"] == LOSSLESS_ARMS[arm]["guess_tokens"]
    ]
    return f"{found[0]:.2f}" if found else ""


def relative_time(rows: Sequence[Row], history: Sequence[Row]) -> str:
    """Format the time of a row's cycle relative to that with guesses from history, or return an
    empty cell if it wasn't measured.
    """
    if not all(is_measured(each, "tokens_per_cycle") for each in (rows, history)):
        return ""
    ours, theirs = (mean(each, "tokens_per_cycle") / tokens_per_s(each) for each in (rows, history))
    return f"{ours / theirs:.2f}x"


def real_yields() -> str:
    """Tabulate, for each text of the last run, acceptance, drafts per pass and tokens per cycle of
    each arm, from the last run that has it. For arms that guess in every cycle, also the simulated
    drafts per pass, and the time per cycle relative to the arm with history in the same run.
    """
    *_, last = all_runs = real_runs()
    shown_texts = texts(last["stock"])
    rows = []
    for arm, arm_name in REAL_ARMS.items():
        run = next((run for run in reversed(all_runs) if arm in run), last)
        history = [sampled_from(run.get("guess3", ()), text) for text in shown_texts]
        repeats = [sampled_from(run.get(arm, ()), text) for text in shown_texts]
        for name, shown in YIELDS.items():
            cells = [average(each, name) for each in repeats]
            if any(cells):
                rows.append([f"{arm_name}: {shown}", *cells])
            if any(cells) and name == "drafts_per_pass" and arm in SIMULATED:
                expected = [simulated_drafts(text, arm) for text in shown_texts]
                rows.append([f"{arm_name}: {shown}, simulated", *expected])
        if arm in SIMULATED and arm in run and arm != "guess3":
            times = map(relative_time, repeats, history)
            rows.append([f"{arm_name}: time per cycle relative to history", *times])
    return table(["arm", *text_names(last)], rows)


TABLES = {
    "guesses passes": passes,
    "guesses speed": speed,
    "guesses real speed": real_speed,
    "guesses real stock drafters": real_stock_drafters,
    "guesses real yields": real_yields,
}
