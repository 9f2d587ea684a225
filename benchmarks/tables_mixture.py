"""Tables for a mixture of experts: its speed, from ``benchmarks/mixture.py``, and its exactness,
from ``benchmarks/vllm_versions.py --mixture``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from statistics import mean

from common import MIXTURES, RESULTS, Row, read_result, table
from tables_versions import SPEED, gpu, log_probs, verdict

from sparrow import SparsitySchedule
from sparrow.cost import MACHINES, SHAPES, VLLM_H200, decode_step
from sparrow.cost.lossless import DraftSetup, lossless_step

CHECK = "mixture_check"
UNMEASURED = "No measurement has been published yet.\n"
MODES = ("lossless", "lossy")
DRAFTS = (4, 8)


def if_measured(written: Callable[[list[Row]], str]) -> Callable[[], str]:
    """Tabulate the runs for all measured shapes, or say that there are none."""

    @wraps(written)
    def tabulated() -> str:
        found = runs()
        return written(found) if found else UNMEASURED

    return tabulated


def runs() -> list[Row]:
    """Return the runs for all shapes, with the shape and GPU names used in the tables."""
    found = []
    for shape, name in MIXTURES.items():
        path = RESULTS / f"mixture_{shape}.json"
        if path.exists():
            for run in read_result(path)["runs"]:
                found.append(run | {"shape": name, "shape id": shape})
    return [run for run in found if "stock" in run["engines"]]


def described(run: Row) -> list[str]:
    """Describe a run's model, its GPU, and its version of vLLM."""
    kept = f"{run['experts']} experts, {run['layers']} layers"
    if run.get("quantization"):
        kept += f", weights in {run['quantization']}"
    return [run["shape"], kept, gpu({"machine": run["gpu"]}), run["vllm"]]


def at(row: Row) -> tuple[int, int]:
    return row["batch"], row["length"]


def over(row: Row | None, stock: Row) -> str:
    """Format a row's tokens per second relative to stock vLLM, if stock vLLM was measured."""
    return "" if row is None else f"{row['tokens_per_s'] / stock['tokens_per_s']:.2f}x"


def of_point(run: Row, mode: str, point: tuple[int, int]) -> dict[int | str, Row]:
    """Return a mode's rows at a point, by draft length."""
    rows = run["engines"].get(mode, {}).get("points", ())
    return {row["drafts"]: row for row in rows if at(row) == point}


@if_measured
def speed(found: list[Row]) -> str:
    """Tabulate each mode's tokens per second relative to stock vLLM in the same run."""
    rows = []
    for run in found:
        for stock in run["engines"]["stock"]["points"]:
            point = at(stock)
            drafted = of_point(run, "lossless", point)
            fixed = [
                f"{k}: {over(row, stock)}" for k, row in drafted.items() if k not in (0, "adapt")
            ]
            chosen = drafted.get("adapt")
            rows.append(
                [
                    *described(run),
                    f"{point[0]} x {point[1]:,}",
                    f"{stock['tokens_per_s']:,.0f}",
                    over(of_point(run, "lossy", point).get(0), stock),
                    over(drafted.get(0), stock),
                    ", ".join(fixed),
                    over(chosen, stock),
                    over(chosen["settled"] if chosen else None, stock),
                ]
            )
    head = [
        "shape",
        "kept",
        "GPU",
        "vLLM",
        "sequences x tokens",
        "stock tokens/s",
        "lossy",
        "lossless, no drafts",
        "fixed number of drafts",
        "chosen, first 4 s",
        "after",
    ]
    return table(head, rows)


@if_measured
def predicted(found: list[Row]) -> str:
    """Tabulate the gains predicted by the cost model next to the measured ones. The cost model
    doesn't cover quantised weights.
    """
    overheads = VLLM_H200.without_lists
    machine = MACHINES["h200"]
    rows = []
    for run in found:
        shape = SHAPES[run["shape id"]]
        assert shape.experts is not None
        is_whole = run["experts"] == shape.experts.count
        on_h200 = gpu({"machine": run["gpu"]}) == "H200"
        if not is_whole or not on_h200 or run.get("quantization"):
            continue
        lossy = SparsitySchedule.preset(run["schedule"])
        drafts = SparsitySchedule.fixed(run["draft pages"], dense_layers=())
        for stock in run["engines"]["stock"]["points"]:
            point = at(stock)
            lengths = [point[1]] * point[0]
            dense = decode_step(shape, machine, lengths, None, overheads).seconds
            sparse = decode_step(shape, machine, lengths, lossy, overheads).seconds
            drafted = of_point(run, "lossless", point)
            measured = of_point(run, "lossy", point)[0]
            cells = [f"{dense / sparse:.2f}x", over(measured, stock)]
            for k in DRAFTS:
                drafting = DraftSetup(k, drafts, run["acceptance"])
                step = lossless_step(shape, machine, lengths, drafting, overheads).seconds
                cells += [f"{dense / step:.2f}x", over(drafted[k], stock)]
            rows.append([run["shape"], f"{point[0]} x {point[1]:,}", *cells])
    head = ["shape", "sequences x tokens", "lossy: predicted", "measured"]
    for k in DRAFTS:
        head += [f"{k} drafts: predicted", "measured"]
    return table(head, rows)


def seconds(run: Row, mode: str) -> float | None:
    """Return a mode's seconds for the trace, if all of its states were timed."""
    engine = run["engines"].get(mode, {})
    if not engine.get("finished") or not engine["trace"]:
        return None
    step = mean(row["ms_per_token"] for row in engine["trace"]) / 1e3
    return float(engine["rollout"]["steps"] * step)


@if_measured
def rollout(found: list[Row]) -> str:
    """Tabulate each mode's seconds for the trace."""
    rows = []
    for run in found:
        stock = seconds(run, "stock")
        if stock is None:
            continue
        cells = [f"{stock:,.0f} s"]
        for mode in MODES:
            ours = seconds(run, mode)
            cells += ["", ""] if ours is None else [f"{ours:,.0f} s", f"**{stock / ours:.2f}x**"]
        drafts = {row["drafts"] for row in run["engines"].get("lossless", {}).get("trace", ())}
        slots = run["engines"]["stock"]["rollout"]["slots"]
        rows.append([*described(run), slots, *cells, ", ".join(map(str, sorted(drafts)))])
    head = ["shape", "kept", "GPU", "vLLM", "sequences at a time", "stock"]
    return table(
        [*head, "lossless", "speed-up", "lossy", "speed-up", "numbers of drafts chosen"], rows
    )


def exact() -> str:
    """Tabulate the checks of a small mixture, in the same way as for each version of vLLM."""
    path = RESULTS / f"{CHECK}.json"
    if not path.exists():
        return UNMEASURED
    result = read_result(path)
    rows = [
        [mode, *log_probs(result.get(mode)), verdict(result.get(f"audit {mode}"))] for mode in SPEED
    ]
    head = ["mode", "eager", "CUDA graphs", "graphs and torch.compile", "reference error"]
    return table([*head, "within twice the reference error", "`sparrow audit`"], rows)


TABLES = {
    "mixture speed": speed,
    "mixture rollout": rollout,
    "mixture predicted": predicted,
    "mixture exact": exact,
}
