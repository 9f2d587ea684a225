"""Tables of docs/performance.md: kernels, decode steps, rollouts, a whole step."""

from __future__ import annotations

import re
import statistics

import numpy as np
from page_tables import RESULTS, Row, load, table
from rollout_trace import PROMPT, responses

from sparrow.cost import MACHINES, train_seconds
from sparrow.cost import SHAPES as SHAPES_OF

SHAPES = {"qwen3-1.7b": "1.7B", "qwen3-4b": "4B", "qwen3-8b": "8B", "qwen3-14b": "14B"}


PUBLISHED = {
    "qwen3-1.7b": (2561, 5662, 2.21),
    "qwen3-4b": (1369, 3308, 2.41),
    "qwen3-8b": (1300, 2682, 2.06),
    "qwen3-14b": (1544, 2289, 1.49),
}
"""Tokens per second, dense and sparse, and the speed-up (arXiv 2606.08446: AIME24 x 8, 32K cut-off, one H200)."""


def measured() -> dict[str, tuple[Row, Row]]:
    """Shape to what was measured of stock vLLM and of Sparrow."""
    runs = {shape: [RESULTS / f"rollout_{shape}_{variant}.json" for variant in ("stock", "sparse")] for shape in SHAPES}
    return {shape: (load(a.stem), load(b.stem)) for shape, (a, b) in runs.items() if a.exists() and b.exists()}


def point(run: Row, batch: int, length: int, schedule: str, logprobs: str) -> float | None:
    """ms of a decode step, None if it was not measured."""
    wanted = dict(batch=batch, length=length, schedule=schedule, logprobs=logprobs)
    return next((row["ms"] for row in run["points"] if all(row[k] == v for k, v in wanted.items())), None)


def points(run: Row) -> list[tuple[int, int]]:
    return list(dict.fromkeys((row["batch"], row["length"]) for row in run["points"]))


def trace_seconds(run: Row, requests: str, logprobs: str) -> float:
    """Of a whole trace: steps at the mean of its strata, and what prefilling the requests cost the others."""
    trace = run["traces"][requests]
    step = statistics.mean(state[logprobs]["ms"] for state in trace["states"])
    return (trace["steps"] * step + trace["requests"] * statistics.median(run["join_ms"])) / 1e3


def decode_steps() -> str:
    rows = []
    for shape, (stock, sparse) in measured().items():
        for batch, length in points(stock):
            dense = point(stock, batch, length, "stock", "none")
            unbounded, ours = (point(sparse, batch, length, s, "none") for s in ("dense", "published"))
            cells = [f"{dense:.2f}", f"{unbounded:.2f}", f"{ours:.2f}", f"{dense / ours:.2f}x"]
            rows.append([SHAPES[shape], f"{batch} x {length:,}", *cells])
    return table(["shape", "sequences x tokens", "stock, ms", "unbounded, ms", "0.86 table, ms", "speed-up"], rows)


def rollouts(logprobs: str, requests: str = "240") -> str:
    rows = []
    for shape, (stock, sparse) in measured().items():
        if any(requests not in run["traces"] for run in (stock, sparse)):
            continue
        tokens = stock["traces"][requests]["tokens"]
        dense, ours = (tokens / trace_seconds(run, requests, logprobs) for run in (stock, sparse))
        theirs = PUBLISHED[shape]
        rows.append(
            [
                SHAPES[shape], stock["slots"], f"{dense:,.0f}", f"{ours:,.0f}", f"{ours / dense:.2f}x",
                f"{theirs[0]:,}", f"{theirs[1]:,}", f"{theirs[2]:.2f}x",
            ]
        )  # fmt: skip
    head = ["shape", "at a time", "stock, tokens/s", "Sparrow, tokens/s", "speed-up"]
    return table([*head, "published: dense", "sparse", "speed-up"], rows)


def logprob_cost() -> str:
    rows = []
    for shape, (stock, sparse) in measured().items():
        for batch, length in points(stock):
            cells = []
            for run, schedule in ((stock, "stock"), (sparse, "published")):
                without = point(run, batch, length, schedule, "none")
                for label in ("sampled", "top 20"):
                    ms = point(run, batch, length, schedule, label)
                    cells.append("" if ms is None else f"{(ms / without - 1) * 100:+.1f} %")
            if any(cells):
                rows.append([SHAPES[shape], f"{batch} x {length:,}", *cells])
    head = ["shape", "sequences x tokens", "stock: sampled", "stock: top 20", "Sparrow: sampled", "Sparrow: top 20"]
    return table(head, rows)


def capacity() -> str:
    rows = [
        [
            SHAPES[s],
            *(f"{run['kv_tokens']:,}" for run in runs),
            f"{(runs[1]['kv_tokens'] / runs[0]['kv_tokens'] - 1):+.1%}",
        ]
        for s, runs in measured().items()
    ]
    return table(["shape", "stock, tokens", "Sparrow, tokens", "difference"], rows)


def validation() -> str:
    rows = []
    for shape, runs in measured().items():
        for name, run in zip(("stock", "Sparrow"), runs, strict=True):
            if found := run.get("validation"):
                off = found["estimate"] / found["seconds"] - 1
                cells = [f"{found['seconds']:.2f}", f"{found['estimate']:.2f}", f"{off:+.1%}"]
                rows.append([SHAPES[shape], name, f"{found['steps']:,}", *cells])
    return table(["shape", "", "steps", "run, s", "estimated, s", "difference"], rows)


def attention() -> str:
    """The decode kernels alone: a layer of uniform batches."""
    rows = []
    for case in load("kernels")["cases"]:
        us, limit = case["step"]["us"], case["limit_us"]
        cells = [f"{limit:.0f}", f"{us:.0f}", f"{limit / us:.0%}", f"{case['dense']['us']:.0f}"]
        rows.append([f"{case['B']} x {case['L']:,}", case["G"], case["k"], *cells, f"{case['speedup']:.2f}x"])
    head = ["sequences x tokens", "heads per kv head", "pages kept", "read limit, us", "sparse, us", "of limit"]
    return table([*head, "dense, us", "speed-up"], rows)


def uneven_attention() -> str:
    """The decode kernels alone: a layer of the rollout trace's batches."""
    rows = []
    for batch in load("kernels")["ragged"]:
        us, limit = batch["us"], batch["limit_us"]
        cells = [f"{limit:.0f}", f"{us:.0f}", f"{limit / us:.0%}"]
        rows.append([SHAPES[batch["shape"]], batch["B"], f"{batch['tokens']:,}", *cells])
    return table(["shape", "sequences", "tokens in all", "read limit, us", "sparse, us", "of limit"], rows)


def shapes() -> str:
    """The decode kernels alone: other head dims, dtypes and page sizes."""
    rows = []
    for case in load("kernels")["shapes"]:
        us, limit, dense = case["step"]["us"], case["limit_us"], case["dense"]["us"]
        cells = [f"{limit:.0f}", f"{us:.0f}", f"{limit / us:.0%}", f"{case['dense_limit_us'] / dense:.0%}"]
        rows.append([case["D"], case["dtype"].removeprefix("torch."), case["P"], *cells, f"{dense / us:.2f}x"])
    head = ["head dim", "cache", "tokens a page", "read limit, us", "sparse, us", "of limit", "dense, of its limit"]
    return table([*head, "speed-up"], rows)


KERNELS = {
    "attention of sparse layers": r"rank_kernel|attend_kernel|^attend$",
    "attention of dense layers": r"flash::",
    "landmarks": r"landmark_kernel",
    "matrix products": r"nvjet|cublas|gemm|splitK",
    "sampling and log-probs": r"topk|TopK|gumbel|_ranks|softmax|ArgMax|bitonicSort",
    "norms, rotary, activation, cache writes": r"rms_norm|rotary|act_and_mul|reshape_and_cache|store_kernel|^triton_",
}
"""What a kernel's name says it does."""


def profile() -> str:
    rows = []
    for shape, (stock, sparse) in measured().items():
        for name, run in (("stock", stock.get("profile stock")), ("0.86 table", sparse.get("profile published"))):
            if run:
                us = dict.fromkeys([*KERNELS, "other"], 0.0)
                for kernel in run["top"]:
                    kinds = (kind for kind, names in KERNELS.items() if re.search(names, kernel["kernel"]))
                    us[next(kinds, "other")] += kernel["us"]
                us["other"] += run["kernels_us"] - sum(us.values())
                rows.append(
                    [
                        f"{SHAPES[shape]} {run['batch']} x {run['length']:,}, {name}",
                        *(f"{x / 1e3:.2f}" for x in us.values()),
                    ]
                )
    return table(["ms of a step, top-20 log-probs", *KERNELS, "other"], rows)


PHASES = {
    "rollout": "rollout, top-20 log-probs",
    "score": "dense log-probs, acceptance",
    "update": "update",
    "sync": "vLLM awake again, with the new weights",
}


def grpo_step() -> str:
    """The scaled steps as measured, and one at full length: the trace's rollout, training by its FLOPs."""
    found, ours = load("grpo_step_stock"), load("grpo_step_sparse")
    shape, run, full = SHAPES_OF[found["shape"]], found["seconds"], np.array(responses(found["responses"]))
    scaled = train_seconds(shape, MACHINES["h200"], 64 + full // found["scale"])
    flops = train_seconds(shape, MACHINES["h200"], PROMPT + full)[0] / scaled[0]
    train = {"score": run["score"] * flops, "update": run["update"] * flops, "sync": run["sync"]}
    traces = [trace_seconds(trace, str(found["responses"]), "top 20") for trace in measured()[found["shape"]]]
    steps = [run, ours["seconds"], *({"rollout": seconds, **train} for seconds in traces)]
    rows = [[name, *(f"{step[key]:,.1f}" for step in steps)] for key, name in PHASES.items()]
    whole = [sum(step.values()) for step in steps]
    rows.append(["whole step", *(f"{seconds:,.1f}" for seconds in whole)])
    rows.append(["speed-up", "", f"{whole[0] / whole[1]:.2f}x", "", f"{whole[2] / whole[3]:.2f}x"])
    return table(["seconds", "lengths / 8: stock", "Sparrow", "full length: stock", "Sparrow"], rows)
