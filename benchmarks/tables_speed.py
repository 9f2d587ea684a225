"""Tables for docs/performance.md: kernels, decode steps, rollouts, a whole step."""

from __future__ import annotations

import re
import statistics
from collections.abc import Iterator
from typing import Any

import numpy as np
from common import SHAPES, Column, Row, declared, load, table
from rollout_trace import PROMPT, responses
from scipy.stats import t, ttest_1samp, ttest_ind

from sparrow.cost import MACHINES, train_seconds
from sparrow.cost import SHAPES as SHAPES_OF

LANDMARKS = ("auto", "fp8_e4m3")
PUBLISHED = {
    "qwen3-1.7b": (2561, 5662, 2.21),
    "qwen3-4b": (1369, 3308, 2.41),
    "qwen3-8b": (1300, 2682, 2.06),
    "qwen3-14b": (1544, 2289, 1.49),
}
"""Tokens per second, dense and sparse, and the speed-up (arXiv 2606.08446: AIME24 x 8, 32K cut-off,
one H200).
"""


def measured() -> dict[str, tuple[Row, Row]]:
    """Return the measurements of stock vLLM and Sparrow, by shape."""
    return {
        shape: (load(f"rollout_{shape}_stock"), load(f"rollout_{shape}_sparse")) for shape in SHAPES
    }


def point(run: Row, batch: int, length: int, schedule: str, logprobs: str) -> Any:
    """Return a decode step's time in ms, or None if it was not measured."""
    wanted = dict(batch=batch, length=length, schedule=schedule, logprobs=logprobs)
    return next((row["ms"] for row in run["points"] if wanted.items() <= row.items()), None)


def points() -> Iterator[tuple[str, int, int, Row, Row]]:
    """Yield every shape's name, batch size, length, and the two runs."""
    for shape, (stock, sparse) in measured().items():
        for batch, length in dict.fromkeys(
            (row["batch"], row["length"]) for row in stock["points"]
        ):
            yield SHAPES[shape], batch, length, stock, sparse


def trace_seconds(run: Row, requests: str, logprobs: str) -> float:
    """Return the seconds of a whole trace. Each step takes the mean time over the strata, and the
    delays from prefilling requests are added.
    """
    trace = run["traces"][requests]
    step = statistics.mean(state[logprobs]["ms"] for state in trace["states"])
    return (trace["steps"] * step + trace["requests"] * statistics.median(run["join_ms"])) / 1e3


def speedup(stock: Row, ours: Row, requests: str, logprobs: str, more: float = 0.0) -> str:
    """Return Sparrow's speed-up over stock vLLM on a whole trace, with a 95 % interval. ``more``
    seconds are added to the times of both.

    The interval is for a ratio of two systematic samples (Wolter, "Introduction to Variance
    Estimation", 2007, chapter 8): its variance is estimated from the differences between
    neighbouring states. The differences contain timing noise, and the error from timing only the
    middle of each stratum. The interval treats joins and ``more`` as known, and ignores variation
    between machines.
    """
    theirs_s, ours_s = (trace_seconds(run, requests, logprobs) + more for run in (stock, ours))
    ratio, steps = theirs_s / ours_s, ours["traces"][requests]["steps"]
    dense, sparse = (
        np.array([s[logprobs]["ms"] for s in run["traces"][requests]["states"]])
        for run in (stock, ours)
    )
    apart, n = np.diff(dense - ratio * sparse), len(dense)
    error = np.sqrt((apart**2).mean() / 2 / n) * steps / 1e3 / ours_s
    half = (
        t.ppf(0.975, 2 * (n - 1) ** 2 / (3 * n - 4)) * error
    )  # degrees of freedom of this variance
    return f"{ratio:.2f}x [{ratio - half:.2f}, {ratio + half:.2f}]"


def decode_steps() -> str:
    rows = []
    for shape, batch, length, stock, sparse in points():
        dense = point(stock, batch, length, "stock", "none")
        unbounded, ours = (point(sparse, batch, length, s, "none") for s in ("dense", "published"))
        cells = [f"{dense:.2f}", f"{unbounded:.2f}", f"{ours:.2f}", f"{dense / ours:.2f}x"]
        rows.append([shape, f"{batch} x {length:,}", *cells])
    return table(
        [
            "shape",
            "sequences x tokens",
            "stock, ms",
            "every page, ms",
            "0.86 table, ms",
            "speed-up",
        ],
        rows,
    )


def rollouts(logprobs: str, requests: str = "240") -> str:
    rows = []
    for shape, runs in measured().items():
        if all(requests in run["traces"] for run in runs):
            tokens = runs[0]["traces"][requests]["tokens"]
            dense, ours = (tokens / trace_seconds(run, requests, logprobs) for run in runs)
            cells = (*(f"{x:,.0f}" for x in (dense, ours)), speedup(*runs, requests, logprobs))
            theirs = "{:,} {:,} {:.2f}x".format(*PUBLISHED[shape]).split()
            rows.append([SHAPES[shape], runs[0]["slots"], *cells, *theirs])
    head = ["shape", "sequences at a time", "stock, tokens/s", "Sparrow, tokens/s", "speed-up"]
    return table([*head, "published: dense", "sparse", "speed-up"], rows)


def logprob_cost() -> str:
    rows = []
    for shape, batch, length, stock, sparse in points():
        cells = []
        for run, schedule in ((stock, "stock"), (sparse, "published")):
            without, *ms = (
                point(run, batch, length, schedule, label)
                for label in ("none", "sampled", "top 20")
            )
            cells += ["" if x is None else f"{(x / without - 1) * 100:+.1f} %" for x in ms]
        if any(cells):
            rows.append([shape, f"{batch} x {length:,}", *cells])
    head = [
        "shape",
        "sequences x tokens",
        "stock: sampled",
        "stock: top 20",
        "Sparrow: sampled",
        "Sparrow: top 20",
    ]
    return table(head, rows)


def landmarks() -> str:
    """Tabulate the times of the decode kernels alone, in draft steps, by landmark dtype."""
    stored = {
        x: [row for row in load("landmarks")["landmarks"] if row["landmark_dtype"] == x]
        for x in LANDMARKS
    }
    rows = [{**row, "fp8": fp8} for row, fp8 in zip(*stored.values(), strict=True)]
    cells: dict[str, Column] = {
        "sequences x tokens": "{B} x {L:,}",
        "heads per KV head": "{G}",
        "pages kept": "{k}",
        "16 bits, us": "{us:.0f}",
        "of 16-bit limit": lambda row: f"{row['limit_us'] / row['us']:.0%}",
        "8 bits, us": "{fp8[us]:.0f}",
        "of 8-bit limit": lambda row: f"{row['fp8']['limit_us'] / row['fp8']['us']:.0%}",
        "relative bytes": lambda row: f"{row['fp8']['limit_us'] / row['limit_us']:.2f}",
        "relative time": lambda row: f"{row['fp8']['us'] / row['us']:.2f}",
    }
    return declared(rows, cells)


def capacity() -> str:
    tokens = {
        SHAPES[shape]: [run["kv_tokens"] for run in runs] for shape, runs in measured().items()
    }
    rows = [[shape, f"{a:,}", f"{b:,}", f"{b / a - 1:+.1%}"] for shape, (a, b) in tokens.items()]
    return table(["shape", "stock, tokens", "Sparrow, tokens", "difference"], rows)


def validation() -> str:
    rows = [
        {"shape": SHAPES[shape], "name": name, **run["validation"]}
        for shape, runs in measured().items()
        for name, run in zip(("stock", "Sparrow"), runs, strict=True)
        if "validation" in run
    ]
    cells: dict[str, Column] = {
        "shape": "{shape}",
        "engine": "{name}",
        "steps": "{steps:,}",
        "run, s": "{seconds:.2f}",
        "estimated, s": "{estimate:.2f}",
        "difference": lambda row: f"{row['estimate'] / row['seconds'] - 1:+.1%}",
    }
    return declared(rows, cells)


def attention() -> str:
    """Tabulate the times of the decode kernels alone, for one layer and uniform batches."""
    cells: dict[str, Column] = {
        "sequences x tokens": "{B} x {L:,}",
        "heads per KV head": "{G}",
        "pages kept": "{k}",
        "read limit, us": "{limit_us:.0f}",
        "sparse, us": "{step[us]:.0f}",
        "of limit": lambda case: f"{case['limit_us'] / case['step']['us']:.0%}",
        "dense, us": "{dense[us]:.0f}",
        "speed-up": "{speedup:.2f}x",
    }
    return declared(load("kernels")["cases"], cells)


def uneven_attention() -> str:
    """Tabulate the times of the decode kernels alone, for one layer and batches from the rollout
    trace.
    """
    cells: dict[str, Column] = {
        "shape": lambda batch: SHAPES[batch["shape"]],
        "sequences": "{B}",
        "total tokens": "{tokens:,}",
        "read limit, us": "{limit_us:.0f}",
        "sparse, us": "{us:.0f}",
        "of limit": lambda batch: f"{batch['limit_us'] / batch['us']:.0%}",
    }
    return declared(load("kernels")["ragged"], cells)


def head_budgets() -> str:
    """Tabulate the times of the decode kernels alone, with per-head and with equal budgets."""
    cells: dict[str, Column] = {
        "sequences x tokens": "{B} x {L:,}",
        "heads per KV head": "{G}",
        "pages kept": "{k}",
        "kernel": "{kernel}",
        "equal budgets, us": "{even[us]:.0f}",
        "budgets by head, us": "{uneven[us]:.0f}",
        "relative time": lambda case: f"{case['uneven']['us'] / case['even']['us']:.2f}",
    }
    cases = load("head_budgets")["cases"]
    return declared(
        {(c["B"], c["L"], c["G"], c["k"]): c for c in cases}.values(), cells
    )  # one case is timed twice


KERNELS = {
    "attention of sparse layers": r"rank_kernel|attend_kernel|^attend$",
    "attention of dense layers": r"flash::",
    "landmarks": r"landmark_kernel",
    "matrix products": r"nvjet|cublas|gemm|splitK",
    "sampling and log-probs": r"topk|TopK|gumbel|_ranks|softmax|ArgMax|bitonicSort",
    "norms, rotary, activation, cache writes": r"rms_norm|rotary|act_and_mul|reshape_and_cache|store_kernel|^triton_",
}
"""What a kernel does, going by its name."""


def profile() -> str:
    rows = []
    for shape, (stock, sparse) in measured().items():
        for name, run in (
            ("stock", stock.get("profile stock")),
            ("0.86 table", sparse.get("profile published")),
        ):
            if run:
                us = dict.fromkeys([*KERNELS, "other"], 0.0)
                for kernel in run["top"]:
                    kinds = (
                        kind
                        for kind, names in KERNELS.items()
                        if re.search(names, kernel["kernel"])
                    )
                    us[next(kinds, "other")] += kernel["us"]
                us["other"] += run["kernels_us"] - sum(us.values())
                what = f"{SHAPES[shape]} {run['batch']} x {run['length']:,}, {name}"
                rows.append([what, *(f"{x / 1e3:.2f}" for x in us.values())])
    return table(["ms per step, top-20 log-probs", *KERNELS, "other"], rows)


PHASES = {
    "rollout": "rollout, top-20 log-probs",
    "score": "dense log-probs, acceptance",
    "update": "update",
    "sync": "waking vLLM with the new weights",
}


def grpo_step() -> str:
    """Tabulate the scaled steps as measured, and an estimate of the steps at full length. The
    rollout is estimated from the trace, and training from its FLOPs.
    """
    stock, ours = load("grpo_step_stock"), load("grpo_step_sparse")
    shape, run, full = (
        SHAPES_OF[stock["shape"]],
        stock["seconds"],
        np.array(responses(stock["responses"])),
    )
    scaled = train_seconds(shape, MACHINES["h200"], 64 + full // stock["scale"])
    flops = train_seconds(shape, MACHINES["h200"], PROMPT + full)[0] / scaled[0]
    train = {"score": run["score"] * flops, "update": run["update"] * flops, "sync": run["sync"]}
    traces, what = measured()[stock["shape"]], (str(stock["responses"]), "top 20")
    steps = [
        run,
        ours["seconds"],
        *({"rollout": trace_seconds(trace, *what), **train} for trace in traces),
    ]
    rows = [[name, *(f"{step[key]:,.1f}" for step in steps)] for key, name in PHASES.items()]
    whole = [sum(step.values()) for step in steps]
    rows.append(["whole step", *(f"{seconds:,.1f}" for seconds in whole)])
    parts = (step["rollout"] / seconds for step, seconds in zip(steps, whole, strict=True))
    rows.append(["rollout's share", *(f"{part:.0%}" for part in parts)])
    rows.append(
        [
            "speed-up",
            "",
            f"{whole[0] / whole[1]:.2f}x",
            "",
            speedup(*traces, *what, sum(train.values())),
        ]
    )
    return table(
        ["seconds", "lengths / 8: stock", "Sparrow", "full length: stock", "Sparrow"], rows
    )


def grpo_steps() -> str:
    """Tabulate whole steps at a quarter of the lengths. Several steps of each kind were measured,
    and the 95 % t-intervals are over these steps.
    """
    runs = {name: load(f"grpo_steps_{name}") for name in ("stock", "sparse", "lossless")}
    steps = {name: [sum(step.values()) for step in run["steps"]] for name, run in runs.items()}
    rows = []
    for key, phase in PHASES.items():
        rows.append(
            [
                phase,
                *(
                    f"{statistics.mean(step[key] for step in run['steps']):.1f}"
                    for run in runs.values()
                ),
            ]
        )
    rows.append(["whole step", *(f"{statistics.mean(seconds):.1f}" for seconds in steps.values())])
    rows.append(["steps measured", *(f"{len(seconds)}" for seconds in steps.values())])
    parts = [
        [step["rollout"] / total for step, total in zip(run["steps"], steps[name], strict=True)]
        for name, run in runs.items()
    ]
    rows.append(
        ["rollout's share", *(with_limits(part, ttest_1samp(part, 0), ".1%") for part in parts)]
    )
    gains = []
    for name in ("sparse", "lossless"):
        logs = [np.log(steps[which]) for which in ("stock", name)]
        found = ttest_ind(*logs, equal_var=False).confidence_interval()
        low, high = np.exp([found.low, found.high])
        gains.append(f"{np.exp(np.mean(logs[0]) - np.mean(logs[1])):.2f}x [{low:.2f}, {high:.2f}]")
    rows.append(["speed-up", "", *gains])
    return table(["seconds", "stock", "lossy", "lossless"], rows)


def with_limits(values: list[float], found: Any, form: str) -> str:
    """Return the mean with the confidence interval from scipy's test."""
    low, high = found.confidence_interval()
    return f"{statistics.mean(values):{form}} [{low:{form}}, {high:{form}}]"


def host_time() -> str:
    """Tabulate a rollout of many short responses with top-20 lists: tokens per second, and the
    host's microseconds per sequence and step for each part of its work.
    """
    parts = ("scheduler", "output processor", "reading lists")
    rows, variants = [], load("short_responses")["variants"]
    for variant, name in {
        "stock": "stock vLLM",
        "before": "Sparrow at `a553f48`",
        "now": "Sparrow",
    }.items():
        speed, us = (
            variants[variant]["tokens/s"],
            [variants[variant][f"{part}, us"] for part in parts],
        )
        gain = f"{speed / variants['stock']['tokens/s']:.2f}x"
        rows.append([name, f"{speed:,.0f}", gain, *(f"{x:.1f}" for x in us), f"{sum(us):.1f}"])
    return table(
        [
            "engine",
            "tokens/s",
            "speed-up over stock",
            *(f"{part}, us" for part in parts),
            "total, us",
        ],
        rows,
    )


def teacher_forced() -> str:
    """Return the table in docs/method.md that compares the teacher-forced kernels with dense
    attention.
    """
    rows = []
    for case in load("teacher_forced")["cases"]:
        for way in ("forward", "backward"):
            dense = [metrics[f"{way}_ms"] for metrics in case["dense"].values()]
            cells = []
            for metrics in case["sparse"].values():
                ms = metrics[f"{way}_ms"]
                cells.append(f"{ms:.1f} ({', '.join(f'{other / ms:.2f}x' for other in dense)})")
            what = f"{case['T']:,}, {case['G']}, {case['top_k']}"
            rows.append([what, way, *(f"{ms:.1f}" for ms in dense), *cells])
        read = (f"{metrics['read']:.1f}" for metrics in case["sparse"].values())
        rows.append([what, "pages read per page kept", "", "", *read])
    return table(["tokens, group, top-k", "pass", *case["dense"], *case["sparse"]], rows)


def families() -> str:
    """Tabulate the times of the decode kernels alone, by attention shape."""
    by_shape: dict[tuple[int, int, int], dict[int, Row]] = {}
    for row in load("decode_families")["families"]:
        by_shape.setdefault((row["K"], row["G"], row["D"]), {})[row["k"]] = row
    cells = []
    for (K, G, D), rows in by_shape.items():
        few, many = rows.values()
        shares = [
            f"{row['limit_us'] / row[kernel]['us']:.0%}"
            for row in (few, many)
            for kernel in ("cuda", "triton")
        ]
        read = [f"{row['bytes'] / 1e6:,.0f}" for row in (few, many)]
        cells.append([few["model"], f"{K}, {G}, {D}", *read, *shares])
    head = ["model", "KV heads, group, head dim", "MB read, 61 pages", "221 pages"]
    head += ["61 pages: CUDA", "Triton", "221 pages: CUDA", "Triton"]
    return table(head, cells)


def several_tokens() -> str:
    """Tabulate the times of decode steps over several new tokens, relative to the default kernel's
    step over one token.
    """
    by_case: dict[tuple[str, str], dict[int, Row]] = {}
    for row in load("wide")["rows"]:
        case = row["model"], f"{row['B']} x {row['L']:,}"
        by_case.setdefault(case, {})[row["T"]] = row
    cells = [
        [
            *case,
            f"{rows[1]['cuda']['us']:.0f}",
            *(
                f"{row[kernel]['ratio']:.2f}x"
                for kernel in ("cuda", "triton")
                for row in rows.values()
            ),
        ]
        for case, rows in by_case.items()
    ]
    tokens = [f"{T}" for T in next(iter(by_case.values()))]
    head = ["shape", "sequences x tokens", "one token with CUDA, us"]
    for kernel in ("CUDA", "Triton"):
        head += [f"{kernel}: {tokens[0]} token", *(f"{T} tokens" for T in tokens[1:])]
    return table(head, cells)


def tuned() -> str:
    """Tabulate the time of a layer's decode step in Triton, as shipped and as tuned by ``sparrow
    tune``.
    """
    cells = [
        [
            f"{cell['batch']}",
            f"{row['pages']}",
            f"{row['shipped_us']:.1f}",
            f"{row['tuned_us']:.1f}",
            f"{1 - row['tuned_us'] / row['shipped_us']:.0%}",
            f"{row['limit_us'] / row['tuned_us']:.0%}",
        ]
        for cell in load("tune")["cells"]
        for row in cell["measured"]
    ]
    head = ["sequences", "pages", "as shipped, us", "tuned, us", "time saved", "of read limit"]
    return table(head, cells)


TABLES = {
    "host time": host_time,
    "decode steps": decode_steps,
    "rollouts with top 20": lambda: rollouts("top 20"),
    "rollouts without log-probs": lambda: rollouts("none"),
    "rollouts of 1,024 with top 20": lambda: rollouts("top 20", "1024"),
    "rollouts of 1,024 without log-probs": lambda: rollouts("none", "1024"),
    "log-prob cost": logprob_cost,
    "attention": attention,
    "attention families": families,
    "several tokens": several_tokens,
    "uneven attention": uneven_attention,
    "head budgets": head_budgets,
    "landmarks": landmarks,
    "capacity": capacity,
    "validation": validation,
    "profile": profile,
    "grpo step": grpo_step,
    "grpo steps": grpo_steps,
    "teacher-forced": teacher_forced,
    "tuned": tuned,
}
