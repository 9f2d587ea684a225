"""Tables of drafters, from the results of ``benchmarks/break_even.py``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
from break_even import DRAFT_PAGES, GUESSED_DRAFTS, GUESSES, SPARSE_DRAFTS
from common import NAMES as CALLED
from common import RESULTS, Row, load, read_result, table

from sparrow import SparsitySchedule
from sparrow.cost import MACHINES, Machine, ModelShape
from sparrow.cost import SHAPES as MODEL_SHAPES
from sparrow.cost import drafters as cost
from sparrow.cost.lossless import DraftSetup
from sparrow.cost.roofline import VLLM_H200, decode_step

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
PREDICTED = {
    ("eagle3", cost.EAGLE3.drafts): cost.EAGLE3,
    ("dspark", cost.DSPARK.drafts): cost.DSPARK,
}
"""The trained drafters and draft lengths whose break-even points the cost model predicts."""
SHORT = 100_000
"""Steps with at most this many cached tokens in all are short, as in ``rollout.py``: their times
vary with the host.
"""
DRAFT_BUDGET = 1024  # tokens that the sparse actor's drafts read in break_even.py
DENSE = VLLM_H200.without_lists
"""The overheads of a dense step."""


def results() -> list[Row]:
    """Return one result per measured shape, smallest shape first."""
    paths = [RESULTS / f"break_even_{shape}.json" for shape in CALLED]
    return [read_result(path) for path in paths if path.exists()]


def at(row: Row) -> tuple[int, int]:
    """Return the point a row belongs to."""
    return row["batch"], row["length"]


def dense(result: Row) -> dict[tuple[int, int], list[float]]:
    """Return the milliseconds of a dense step at each point, in every run that timed the point."""
    found: dict[tuple[int, int], list[float]] = {}
    for run in result["runs"]:
        for row in run["engines"].get("none", {"points": []})["points"]:
            found.setdefault(at(row), []).append(row["ms"])
    return found


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
                    ratio = row["ms"] / steps[at(row)][0]
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
    acceptance and, with guesses, from the drafts per pass that ``benchmarks/cascade.py synthetic``
    assumed.
    """
    found = dict(PUBLISHED)
    (acceptance,) = (
        row["mean"][0]
        for row in load("text_acceptance")["rows"]
        if (row["mode"], row["budget"], row["reuse"]) == ("lossless", DRAFT_BUDGET, 1)
        and not row["dense_layers"]
    )
    for drafts in SPARSE_DRAFTS:
        tokens = (1 - acceptance ** (drafts + 1)) / (1 - acceptance)
        found["sparse", drafts] = tokens, tokens
    guessed = [
        row["tokens_per_cycle"]
        for path in sorted(RESULTS.glob("cascade_qwen3-*.json"))
        for run in read_result(path)["runs"]
        for row in run["engines"]["lossless"]["points"]
        if (row.get("guesses"), row["drafts"]) == (GUESSES, GUESSED_DRAFTS)
    ]
    if guessed:
        found["guesses", GUESSED_DRAFTS] = min(guessed), max(guessed)
    return found


def cases(rows: list[Row]) -> dict[tuple[str, int], dict[tuple[int, int], Row]]:
    """Group a result's rows by drafter and draft length, in table order, and then by point."""
    found: dict[tuple[str, int], dict[tuple[int, int], Row]] = {}
    order = list(NAMES)
    for row in sorted(rows, key=lambda row: (order.index(row["drafter"]), row["drafts"])):
        found.setdefault((row["drafter"], row["drafts"]), {})[at(row)] = row
    return found


def columns(points: Iterable[tuple[int, int]]) -> list[str]:
    """Return the heading of each point's column."""
    return [f"{batch} x {length:,}" for batch, length in points]


def about(result: Row) -> str:
    """Return a result's shape and GPU."""
    return f"{CALLED[result['shape']]}, {gpu(result)}"


def titled(result: Row, head: list[str], rows: list[list[str]]) -> str:
    """Return a result's table under its shape and GPU. Its last columns are the result's points."""
    return f"**{about(result)}**\n\n{table([*head, *columns(sorted(dense(result)))], rows)}"


def break_even() -> str:
    """Return a table per shape, with one row per drafter and draft length, and one column per
    point.
    """
    tables = []
    for result in results():
        steps = sorted(dense(result).items())
        rows = [["none: ms of a step", "0", *(span(min(ms), max(ms), 2) for _, ms in steps)]]
        for case, by_point in cases(ratios(result)).items():
            rows_of = [by_point.get(point) for point, _ in steps]
            cells = [f"{row['break_even']:.2f}" if row else "" for row in rows_of]
            rows.append([name_of(by_point), str(case[1]), *cells])
        tables.append(titled(result, ["drafter", "drafts"], rows))
    return "\n".join(tables)


def span(low: float, high: float, digits: int, unit: str = "") -> str:
    """Format a range, or a single number if both ends look the same."""
    ends = [f"{end:.{digits}f}{unit}" for end in (low, high)]
    return ends[0] if ends[0] == ends[1] else " to ".join(ends)


def speed() -> str:
    """Return tables like ``break_even``'s, with the speed over dense decoding that the tokens per
    cycle would yield: tokens per cycle divided by the break-even point.
    """
    known = tokens_per_cycle()
    tables = []
    for result in results():
        rows = []
        for case, by_point in cases(ratios(result)).items():
            if case in known:
                cells = [
                    span(  # type: ignore[call-arg]
                        *(tokens / by_point[point]["break_even"] for tokens in known[case]), 1, "x"
                    )
                    if point in by_point
                    else ""
                    for point in sorted(dense(result))
                ]
                rows.append([name_of(by_point), str(case[1]), span(*known[case], 2), *cells])
        tables.append(titled(result, ["drafter", "drafts", "tokens per cycle"], rows))
    return "\n".join(tables)


def name_of(by_point: dict[tuple[int, int], Row]) -> str:
    """Return the name of the drafter whose rows these are."""
    return called(next(iter(by_point.values())))


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
            rows.append([about(result), name_of(by_point), str(case[1]), *cells])
    return table(["shape, GPU", "drafter", "drafts", *columns(points)], rows) if rows else ""


def accuracy() -> str:
    """Return a table of the cost model's predictions divided by the measurements, for long steps
    and for short ones: dense steps in every run, and the break-even points of drafters.
    """
    rows = []
    for result in results():
        setting = MODEL_SHAPES[result["shape"]], MACHINES[gpu(result).lower()]
        quotients: dict[str, dict[bool, list[float]]] = {}
        for point, times in dense(result).items():
            step_s = decode_step(*setting, lengths(point), None, DENSE).seconds
            found = quotients.setdefault("dense step", {}).setdefault(is_short(point), [])
            found.extend(step_s * 1e3 / ms for ms in times)
        for case, by_point in cases(ratios(result)).items():
            for point, row in by_point.items():
                predicted = prediction(case, *setting, lengths(point))
                if predicted is not None:
                    name = f"{name_of(by_point)}, {case[1]} drafts"
                    found = quotients.setdefault(name, {}).setdefault(is_short(point), [])
                    found.append(predicted / row["break_even"])
        for name, by_length in quotients.items():
            cells = [
                span(min(by_length[short]), max(by_length[short]), 2) if short in by_length else ""
                for short in (False, True)
            ]
            rows.append([about(result), name, *cells])
    head = ["shape, GPU", "step or cycle", f"more than {SHORT:,} cached tokens in all", "fewer"]
    return table(head, rows) if rows else ""


def is_short(point: tuple[int, int]) -> bool:
    batch, length = point
    return batch * length <= SHORT


def lengths(point: tuple[int, int]) -> np.ndarray:
    """Return the cached tokens of each of a point's sequences."""
    batch, length = point
    return np.full(batch, length)


def prediction(
    case: tuple[str, int], shape: ModelShape, machine: Machine, cached: np.ndarray
) -> float | None:
    """Return the break-even point that the cost model predicts for a case, or None if it does not
    cover the case.
    """
    if case in PREDICTED:
        return cost.break_even(shape, machine, cached, PREDICTED[case])
    drafter, drafts = case
    if drafter == "sparse":
        schedule = SparsitySchedule.fixed(DRAFT_PAGES, dense_layers=())
        # A break-even point doesn't depend on the acceptance.
        return cost.sparse_break_even(shape, machine, cached, DraftSetup(drafts, schedule, 0.0))
    return None


TABLES = {
    "break-even": break_even,
    "break-even accuracy": accuracy,
    "break-even crossover": crossover,
    "break-even speed": speed,
}
