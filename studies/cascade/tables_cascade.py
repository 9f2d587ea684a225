"""Tables for the first stage of a cascade: how well history and a trained head guess tokens, and
how fast the cascade is.
"""

from __future__ import annotations

from collections.abc import Iterator

from common import Row, interval, load, table
from history import HISTORIES, speed

RESULT = "cascade_history"
HEAD = "cascade_head"
SHARED = "cascade_shared_selection"
LABELS = {
    "own": "prompt and response",
    "siblings": "and siblings",
    "epoch": "and an earlier epoch",
}


def _cells() -> Iterator[dict[str, Row]]:
    """Yield the rows for each kind, temperature and number of guesses, by history."""
    cells: dict[tuple[str, float, int], dict[str, Row]] = {}
    for row in load(RESULT)["rows"]:
        key = (row["kind"], row["temperature"], row["guesses"])
        cells.setdefault(key, {})[row["history"]] = row
    yield from cells.values()


def _where(cell: dict[str, Row]) -> list[str]:
    row = cell["own"]
    return [row["kind"], f"{row['temperature']:g}", f"{row['nats'][0]:.2f}", str(row["guesses"])]


def cascade_history() -> str:
    """Tabulate tokens per sparse pass for each history. For ``siblings``, also show the passes per
    cycle: the mean, and the slowest row of a batch.
    """
    settings = load(RESULT)["settings"]
    rows = []
    for cell in _cells():
        gained = [interval(cell[name]["tokens_per_pass"], 2) for name in HISTORIES]
        mean = settings["drafts"] / cell["siblings"]["tokens_per_pass"][0]
        rows.append([*_where(cell), *gained, f"{mean:.1f}", f"{cell['siblings']['slowest']:.1f}"])
    head = ["text", "temperature", "nats per token", "guesses", *(LABELS[h] for h in HISTORIES)]
    slowest = f"slowest of {settings['rows']}"
    return table([*head, f"passes per cycle of {settings['drafts']}", slowest], rows)


def cascade_speed() -> str:
    """Tabulate the speed relative to dense decoding in each state with measured times. Numbers in
    brackets are for batches that wait for their slowest row.
    """
    result = load(RESULT)
    drafts = result["settings"]["drafts"]
    rows = []
    for cell in _cells():
        guesses = str(cell["own"]["guesses"])
        for part in result["parts"]:
            times = {
                "tokens_per_cycle": part["tokens_per_cycle"],
                "drafts": drafts,
                "verify_ms": part["verify_ms"],
                "dense_ms": part["dense_ms"],
            }
            today = speed(1, guess_ms=0, sparse_ms=part["sparse_ms"]["0"], **times)
            times |= {"guess_ms": part["guess_ms"], "sparse_ms": part["sparse_ms"][guesses]}
            speeds = []
            for name in HISTORIES:
                row = cell[name]
                alone = speed(row["tokens_per_pass"][0], **times)
                waiting = speed(drafts / row["slowest"], **times)
                speeds.append(f"{alone:.2f}x ({waiting:.2f}x)")
            rows.append([*_where(cell), part["state"], f"{today:.2f}x", *speeds])
    head = ["text", "temperature", "nats per token", "guesses", "state", "without guesses"]
    return table([*head, *(LABELS[name] for name in HISTORIES)], rows)


def cascade_head() -> str:
    """Tabulate drafts per sparse pass with guesses from history, from a head, and from both. Also
    show the tokens per cycle of the head alone.
    """
    columns = {
        "history": "first stage: history",
        "head": "head",
        "both": "both, as two branches",
        "drawn": "head alone: drafts drawn",
        "most_likely": "most likely drafts",
    }
    rows = [
        [*_text(cell), row["guesses"], *(interval(row[name], 2) for name in columns)]
        for cell in load(HEAD)["cells"]
        for row in cell["rows"]
    ]
    head = ["text", "temperature", "nats per token", "guesses or drafts"]
    return table([*head, *columns.values()], rows)


def cascade_head_mixed() -> str:
    """Tabulate drafts per sparse pass where history guesses if enough tokens repeat, and a head
    elsewhere.
    """
    cells = load(HEAD)["cells"]
    columns = {"history": "history alone", "head": "head alone"}
    for name in cells[0]["rows"][0]:
        stage, _, least = name.partition(" ")
        if stage == "mixed":
            columns[name] = f"history from {least} token{'s' if least != '1' else ''}"
    rows = [
        [*_text(cell), row["guesses"], *(f"{row[name][0]:.2f}" for name in columns)]
        for cell in cells
        for row in cell["rows"]
    ]
    return table(["text", "temperature", "nats per token", "guesses", *columns.values()], rows)


def cascade_head_positions() -> str:
    """Tabulate the tokens per cycle of a head alone, by position, for the largest number of drafts."""
    result = load(HEAD)
    most = str(max(result["settings"]["guesses"]))
    bins = sorted(
        {(row["from"], row["to"]) for cell in result["cells"] for row in cell["positions"]}
    )
    rows = []
    for cell in result["cells"]:
        found = {(row["from"], row["to"]): row[most] for row in cell["positions"]}
        rows.append([*_text(cell), *(interval(found[at], 2) if at in found else "" for at in bins)])
    head = ["text", "temperature", "nats per token"]
    return table([*head, *(f"{low:,} to {high:,}" for low, high in bins)], rows)


def _text(cell: Row) -> list[str]:
    return [cell["kind"], f"{cell['temperature']:g}", f"{cell['nats'][0]:.2f}"]


def cascade_shared_selection() -> str:
    """Tabulate the mean and p5 of acceptance for each kind of text and temperature, with pages
    selected for each token and once for several.
    """
    result = load(SHARED)
    cells: dict[tuple[str, float], dict[int, Row]] = {}
    for row in result["rows"]:
        cells.setdefault((row["kind"], row["temperature"]), {})[row["tokens"]] = row
    several = result["settings"]["shared"]
    rows = [
        [
            kind,
            f"{temperature:g}",
            *(interval(cell[tokens][of], 3) for of in ("mean", "p5") for tokens in (1, several)),
        ]
        for (kind, temperature), cell in cells.items()
    ]
    head = ["text", "temperature"]
    for of in ("mean", "p5"):
        head += [f"{of}, a selection per token", f"once for {several} tokens"]
    return table(head, rows)


# ``cascade_speed`` needs measured times, which no committed result has yet.
TABLES = {
    "cascade history": cascade_history,
    "cascade head": cascade_head,
    "cascade head mixed": cascade_head_mixed,
    "cascade head positions": cascade_head_positions,
    "cascade shared selection": cascade_shared_selection,
}
