"""The table of cells measured by ``benchmarks/never_slower.py``."""

from __future__ import annotations

from collections import defaultdict
from math import exp, log
from statistics import fmean, stdev

import predicted
from common import RESULTS, Row, read_result, table
from never_slower import LOSSY, Cell

from sparrow import SparsitySchedule

SHAPES = {"smollm2-135m": "SmolLM2-135M", "qwen3-1.7b": "1.7B"}
MODES = ("lossless", "lossy")


def sessions() -> list[Row]:
    """Return the results of every call of the script, smallest shape first."""
    paths = [RESULTS / f"never_slower_{shape}.json" for shape in SHAPES]
    files = [read_result(path) for path in paths if path.exists()]
    return [session for file in files for session in file["sessions"]]


def compared() -> dict[tuple[str, ...], dict[str, list[float]]]:
    """Group stock vLLM's speeds, and the modes' speeds relative to stock vLLM in the same round.

    Returns: The speeds. The keys are the shape, the vLLM version, the GPU, the cell, and whether
    responses were detokenised.
    """
    found: dict[tuple[str, ...], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for session in sessions():
        speeds: dict[tuple[int, str, bool], dict[str, float]] = defaultdict(dict)
        for row in session["rows"]:
            turn = row["round"], row["cell"], row["detokenize"]
            speeds[turn][row["engine"]] = row["tokens_per_s"]
        for (_, cell, detokenize), by_engine in speeds.items():
            if "stock" not in by_engine:
                continue
            card = next(name for name in ("H100", "H200", session["gpu"]) if name in session["gpu"])
            about = (session["shape"], session["vllm"], card)
            case = found[*about, cell, "yes" if detokenize else "no"]
            case["stock"].append(by_engine["stock"])
            for mode in MODES:
                if mode in by_engine:
                    case[mode].append(by_engine[mode] / by_engine["stock"])
    return found


def never_slower() -> str:
    """Return a table with one row per cell: stock vLLM's tokens per second, and the ratios of every
    round, each after what the cost model predicts.
    """
    rows = []
    for (shape, version, card, cell, text), case in compared().items():
        requests = Cell.parse(cell)
        what = f"{requests.requests} x {requests.prompt:,} + {requests.new:,}"
        row = [SHAPES[shape], version, card, what, text]
        is_covered = card == predicted.MACHINE.name
        stock, *modes = predictions(shape, requests) if is_covered else ("", "", "")
        row += [stock, f"{fmean(case['stock']):,.0f}"]
        for mode, prediction in zip(MODES, modes, strict=True):
            row += [prediction, ", ".join(f"{ratio:.2f}x" for ratio in case[mode])]
        rows.append(row)
    head = ["shape", "vLLM", "GPU", "requests x prompt + new tokens", "text"]
    head += ["stock, tokens/s: predicted", "measured"]
    for mode in MODES:
        head += [f"{mode}: predicted", "measured"]
    return table(head, rows) if rows else ""


def predictions(shape: str, cell: Cell) -> tuple[str, str, str]:
    """Return what the cost model predicts: stock vLLM's tokens per second, and the ratios of
    lossless mode, with all drafts accepted, and of lossy mode.
    """
    stock = predicted.tokens_per_s(shape, cell)
    lossless = predicted.lossless_tokens_per_s(shape, cell, predicted.all_accepted()) / stock
    schedule = SparsitySchedule.load(LOSSY[shape])
    lossy = predicted.tokens_per_s(shape, cell, schedule) / stock
    return f"{stock:,.0f}", f"{lossless:.2f}x", f"{lossy:.2f}x"


def never_slower_mean() -> str:
    """Return a text with each mode's geometric mean ratio over all rounds of all cells, its
    standard error, and how far lossy mode's ratios of the same cell are apart.
    """
    cases = compared().values()
    if not cases:
        return ""
    means = []
    for mode in MODES:
        logs = [log(ratio) for case in cases for ratio in case[mode]]
        mean = exp(fmean(logs))
        error = mean * stdev(logs) / len(logs) ** 0.5
        means.append(f"{mean:.3f} ± {error:.3f} ({mode} mode)")
    apart = max(max(case["lossy"]) / min(case["lossy"]) for case in cases if case["lossy"]) - 1
    return (
        f"The geometric mean over all rounds of all rows, with its standard error, is "
        f"{' and '.join(means)}. In lossy mode, ratios of the same row differ by up to "
        f"{100 * apart:.0f} %.\n"
    )


TABLES = {"never slower": never_slower, "never slower mean": never_slower_mean}
