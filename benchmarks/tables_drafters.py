"""Tables of drafters, from the results of ``benchmarks/break_even.py``."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from common import RESULTS, SHAPES, Row, load, table

from sparrow.cost import MACHINES
from sparrow.cost import SHAPES as MODEL_SHAPES
from sparrow.cost import drafters as cost

NAMES = {
    "ngram": "n-gram",
    "eagle3": "EAGLE-3",
    "draft_model": "draft model (0.6B)",
    "dspark": "DSpark",
    "dflash": "DFlash",
    "sparse": "sparse actor",
    "guesses": "sparse actor, 3 guesses per pass",
    "history": "history alone, in lossless mode",
    "none_v1": "none, V1 model runner",
}
"""The drafters in table order, with their names in the table."""
PUBLISHED = {
    ("eagle3", 3): (2.4, 3.32),
    ("dspark", 7): (2.33, 6.2),
}
"""Published tokens per cycle of trained drafters, from lowest to highest; ``docs/which-drafter.md``
has the sources.
"""
TRAINED = ("eagle3", "dspark", "dflash")
PREDICTED = {"eagle3": cost.EAGLE3, "dspark": cost.DSPARK}
"""The trained drafters whose break-even points the cost model predicts."""
SHORT = 100_000
"""Steps with at most this many cached tokens in all are short, as in ``rollout.py``: their times
vary with the host.
"""
DRAFT_BUDGET = 1024  # tokens that the sparse actor's drafts read in break_even.py
CALLED = SHAPES | {"qwen3-30b-a3b": "30B-A3B"}


def results() -> list[Row]:
    """Return one result per measured shape, smallest shape first."""
    paths = [RESULTS / f"break_even_{shape}.json" for shape in CALLED]
    return [json.loads(path.read_text()) for path in paths if path.exists()]


def at(row: Row) -> tuple[int, int]:
    """Return the point a row belongs to."""
    return row["batch"], row["length"]


def dense(result: Row) -> dict[tuple[int, int], float]:
    """Return the milliseconds of a dense step at each point, from the last run that timed the
    point.
    """
    return {
        at(row): row["ms"]
        for run in result["runs"]
        for row in run["engines"].get("none", {"points": []})["points"]
    }


def ratios(result: Row) -> list[Row]:
    """Return all drafters' points with the tokens per cycle needed to break even. This number is
    the ratio of two times from one run. If several runs timed a drafter's point, the last run
    counts.
    """
    found: dict[tuple[Any, ...], Row] = {}
    for run in result["runs"]:
        steps = dense({"runs": [run]})
        for drafter, engine in run["engines"].items():
            for row in engine["points"] if drafter != "none" else ():
                if at(row) in steps:
                    name = drafter
                    if "guesses" in row or "alone" in row:
                        name = "history" if "alone" in row else "guesses"
                    key = (name, row["drafts"], *at(row))
                    ratio = row["ms"] / steps[at(row)]
                    ran = {"drafter": name, "runner": engine["runner"], "break_even": ratio}
                    found[key] = {**row, **ran}
    return list(found.values())


def gpu(result: Row) -> str:
    """Return the short names of the GPUs used in any run."""
    known = ("H100", "H200")
    cards = {next(name for name in known if name in run["gpu"]) for run in result["runs"]}
    return ", ".join(sorted(cards))


def called(row: Row) -> str:
    """Return the name of a row's drafter. It says if vLLM fell back to the V1 model runner."""
    name = NAMES[row["drafter"]]
    fell_back = row["runner"] == "V1" and row["drafter"] != "none_v1"
    return f"{name} (V1 model runner)" if fell_back else name


def tokens_per_cycle() -> dict[tuple[str, int], tuple[float, float]]:
    """Return the lowest and highest tokens per cycle, by drafter and draft length. Numbers for
    trained drafters are published. For the sparse actor, they follow from the text model's
    acceptance.
    """
    found = dict(PUBLISHED)
    (acceptance,) = (
        row["mean"][0]
        for row in load("text_acceptance")["rows"]
        if (row["mode"], row["budget"], row["reuse"]) == ("lossless", DRAFT_BUDGET, 1)
        and not row["dense_layers"]
    )
    for drafts in (6, 12):
        tokens = (1 - acceptance ** (drafts + 1)) / (1 - acceptance)
        found["sparse", drafts] = tokens, tokens
    return found


def with_guesses(shape: str) -> dict[tuple[int, int], tuple[float, float]]:
    """Return the lowest and highest tokens per cycle of the sparse actor with guesses, at the
    points that ``benchmarks/cascade.py synthetic`` measured with a shape. They depend on the drafts
    per pass that it assumed.
    """
    path = RESULTS / f"cascade_{shape}.json"
    if not path.exists():
        return {}
    tokens: dict[tuple[int, int], list[float]] = {}
    for run in json.loads(path.read_text())["runs"]:
        for row in run["engines"]["lossless"]["points"]:
            if (row.get("guesses"), row["drafts"]) == (3, 12):
                tokens.setdefault(at(row), []).append(row["tokens_per_cycle"])
    return {point: (min(some), max(some)) for point, some in tokens.items()}


def cases(rows: list[Row]) -> dict[tuple[str, int], dict[tuple[int, int], Row]]:
    """Group a result's rows by drafter and draft length, in table order, and then by point."""
    found: dict[tuple[str, int], dict[tuple[int, int], Row]] = {}
    order = list(NAMES)
    for row in sorted(rows, key=lambda row: (order.index(row["drafter"]), row["drafts"])):
        found.setdefault((row["drafter"], row["drafts"]), {})[at(row)] = row
    return found


def points_of(measured: list[Row]) -> list[tuple[int, int]]:
    """Return every point at which a dense step was timed, in order."""
    return sorted({point for result in measured for point in dense(result)})


def columns(points: list[tuple[int, int]]) -> list[str]:
    """Return the heading of each point's column."""
    return [f"{batch} x {length:,}" for batch, length in points]


def break_even() -> str:
    """Return a table with one row per shape, drafter and draft length, and one column per point."""
    measured = results()
    if not measured:
        return ""
    points = points_of(measured)
    rows = []
    for result in measured:
        about = f"{CALLED[result['shape']]}, {gpu(result)}"
        steps = dense(result)
        cells = [f"{steps[point]:.2f}" if point in steps else "" for point in points]
        rows.append([about, "none: ms of a step", "0", *cells])
        for case, by_point in cases(ratios(result)).items():
            found = [by_point.get(point) for point in points]
            cells = [f"{row['break_even']:.2f}" if row else "" for row in found]
            rows.append([*start_of_row(result, case, by_point), *cells])
    return table(["shape, GPU", "drafter", "drafts", *columns(points)], rows)


def span(low: float, high: float, digits: int, unit: str = "") -> str:
    """Format a range, or a single number if both ends look the same."""
    ends = [f"{end:.{digits}f}{unit}" for end in (low, high)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def speed() -> str:
    """Return a table like ``break_even``'s, with the speed over dense decoding that the tokens per
    cycle would yield: tokens per cycle divided by the break-even point.
    """
    measured = results()
    points = points_of(measured)
    known = tokens_per_cycle()
    rows = []
    for result in measured:
        guessed = with_guesses(result["shape"])
        for case, by_point in cases(ratios(result)).items():
            tokens = guessed if case[0] == "guesses" else dict.fromkeys(points, known.get(case))
            cells = []
            for point in points:
                spanned = tokens.get(point)
                if spanned is None or point not in by_point:
                    cells.append("")
                    continue
                low, high = (each / by_point[point]["break_even"] for each in spanned)
                cells.append(span(low, high, 1, "x"))
            if any(cells):
                yields = span(*known[case], 2) if case in known else ""
                rows.append([*start_of_row(result, case, by_point), yields, *cells])
    head = ["shape, GPU", "drafter", "drafts", "tokens per cycle", *columns(points)]
    return table(head, rows) if rows else ""


def start_of_row(
    result: Row, case: tuple[str, int], by_point: dict[tuple[int, int], Row]
) -> list[str]:
    """Return a row's first cells: the shape and GPU, the drafter, and its drafts per cycle."""
    name = called(next(iter(by_point.values())))
    return [f"{CALLED[result['shape']]}, {gpu(result)}", name, str(case[1])]


def sparse_speed(
    drawn: dict[tuple[str, int], dict[tuple[int, int], Row]],
) -> dict[tuple[int, int], float]:
    """Return the speed of the sparse actor without guesses at each point, relative to dense
    decoding, with the fastest number of drafts. It is at least 1, because lossless mode need not
    draft.
    """
    known = tokens_per_cycle()
    fastest: dict[tuple[int, int], float] = {}
    for case, by_point in drawn.items():
        if case[0] == "sparse":
            for point, row in by_point.items():
                gain = known[case][0] / row["break_even"]
                fastest[point] = max(gain, fastest.get(point, 1.0))
    return fastest


def crossover() -> str:
    """Return a table with the tokens per cycle that each trained drafter needs to be faster than
    the sparse actor without guesses, or "never" if its drafts are too few. It has the points at
    which the sparse actor was timed.
    """
    measured = results()
    speeds = [sparse_speed(cases(ratios(result))) for result in measured]
    points = sorted({point for fastest in speeds for point in fastest})
    rows = []
    for result, fastest in zip(measured, speeds, strict=True):
        for case, by_point in cases(ratios(result)).items():
            if case[0] not in TRAINED:
                continue
            cells = []
            for point in points:
                if point not in by_point or point not in fastest:
                    cells.append("")
                    continue
                needed = fastest[point] * by_point[point]["break_even"]
                cells.append(f"{needed:.1f}" if needed <= case[1] + 1 else "never")
            rows.append([*start_of_row(result, case, by_point), *cells])
    return table(["shape, GPU", "drafter", "drafts", *columns(points)], rows) if rows else ""


def accuracy() -> str:
    """Return sentences about how far dense steps of different runs are apart, and how close the
    cost model's predictions for trained drafters are, for long steps and for short ones.
    """
    apart: dict[bool, list[float]] = {True: [], False: []}
    quotients: dict[bool, dict[str, list[float]]] = {True: {}, False: {}}
    for result in results():
        times: dict[tuple[int, int], list[float]] = {}
        for run in result["runs"]:
            for point, ms in dense({"runs": [run]}).items():
                times.setdefault(point, []).append(ms)
        for (batch, length), some in times.items():
            apart[batch * length <= SHORT].append(max(some) / min(some) - 1)

        setting = MODEL_SHAPES[result["shape"]], MACHINES[gpu(result).lower()]
        drawn = cases(ratios(result))
        for name, drafter in PREDICTED.items():
            for (batch, length), row in drawn.get((name, drafter.drafts), {}).items():
                predicted = cost.break_even(*setting, np.full(batch, length), drafter)
                found = quotients[batch * length <= SHORT].setdefault(name, [])
                found.append(predicted / row["break_even"])
    if not all(quotients.values()):
        return ""
    long, short = (
        " and ".join(
            f"{span(min(some), max(some), 2)} ({NAMES[name]})" for name, some in of.items()
        )
        for of in (quotients[False], quotients[True])
    )
    return (
        f"With more than {SHORT:,} cached tokens in all sequences together, dense steps of "
        f"different runs differ by up to {100 * max(apart[False]):.0f} %, and the break-even "
        f"points that the [cost model](cost.md#other-drafters) predicts are {long} times the "
        f"measured ones. Shorter steps depend on the host: their times differ by up to "
        f"{100 * max(apart[True]):.0f} %, and predictions are {short} times the measurements.\n"
    )


TABLES = {
    "break-even": break_even,
    "break-even accuracy": accuracy,
    "break-even crossover": crossover,
    "break-even speed": speed,
}
