"""Write the tables of the pages in docs that have such, from the JSON files in benchmarks/results.

    python benchmarks/tables.py            # rewrites what stands between <!-- table: NAME --> and <!-- end -->

``tests/test_performance.py`` fails if a page says something else than the files.
"""

from __future__ import annotations

import itertools
import json
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, replace
from pathlib import Path
from typing import Any

import fit_roofline
import numpy as np
from rollout_trace import PROMPT, responses, simulate, states

from sparrow.cluster import Cluster, plan
from sparrow.cost import MACHINES, VLLM_H200, Overheads, decode_step, predict, response_lengths, train_seconds
from sparrow.cost import SHAPES as SHAPES_OF
from sparrow.cost import rows as cost_rows
from sparrow.schedule import SparsitySchedule

ROOT = Path(__file__).parent.parent
PAGES = [
    ROOT / "docs" / f"{name}.md"
    for name in ("performance", "cost", "vllm", "scaling", "integrations", "calibration", "method", "distill")
]
RESULTS = ROOT / "benchmarks" / "results"
SHAPES = {"qwen3-1.7b": "1.7B", "qwen3-4b": "4B", "qwen3-8b": "8B", "qwen3-14b": "14B"}
PUBLISHED = {
    "qwen3-1.7b": (2561, 5662, 2.21),
    "qwen3-4b": (1369, 3308, 2.41),
    "qwen3-8b": (1300, 2682, 2.06),
    "qwen3-14b": (1544, 2289, 1.49),
}
"""Tokens per second, dense and sparse, and the speed-up (arXiv 2606.08446: AIME24 x 8, 32K cut-off, one H200)."""
Row = dict[str, Any]


def load(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(map(str, line)) + " |\n" for line in lines)


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


def limits(requests: str = "240") -> str:
    """What bytes allow: the cost model over the whole trace, with its overheads taken away."""
    overheads = replace(fit_roofline.errors(fit_roofline.measured())[0], lists_s=0.0, host_s=0.0)
    rows = []
    for shape, (stock, sparse) in measured().items():
        spans = simulate([PROMPT] * int(requests), responses(int(requests)), stock["slots"])
        some = [lengths for _, lengths in states(spans, 256)]
        cells = []
        for mine in (overheads, replace(overheads, sparse_layer_s=0.0), Overheads()):
            dense, ours = (
                sum(decode_step(SHAPES_OF[shape], MACHINES["h200"], n, schedule, mine).seconds for n in some)
                for schedule in (None, SparsitySchedule.preset(shape))
            )
            cells.append(f"{dense / ours:.2f}x")
        found = trace_seconds(stock, requests, "none") / trace_seconds(sparse, requests, "none")
        rows.append([SHAPES[shape], f"{found:.2f}x", *cells])
    head = [
        "shape",
        "measured",
        "rows in balance",
        "sparse layers at the cost of their bytes",
        "nothing costs but bytes",
    ]
    return table(head, rows)


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


KERNELS = {
    "attention of sparse layers": r"decode_kernel|rank_kernel|attend_kernel",
    "attention of dense layers": r"flash::",
    "landmarks": r"landmark_kernel",
    "matrix products": r"nvjet|cublas|gemm|splitK",
    "sampling and log-probs": r"topk|TopK|gumbel|_ranks|softmax|ArgMax|bitonicSort",
    "norms, rotary, activation, cache writes": r"rms_norm|rotary|act_and_mul|reshape_and_cache|store_kernel",
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


def equalities() -> str:
    """How far vLLM's log-probs are from the float32 truth, and how far transformers is in the same 16 bits."""
    files = {
        "bfloat16": "vllm_equal_bf16",
        "bfloat16, tensor parallel 2": "vllm_equal_bf16_tp2",
        "float16": "vllm_equal_fp16",
    }
    names = {
        "unbounded": "unbounded",
        "sparse": "4 to 16 pages",
        "chunked prefill": "4 to 16 pages, prefill in chunks of 256",
        "compiled": "4 to 16 pages, vLLM's torch.compile",
    }
    rows = []
    for kind, file in files.items():
        found = load(file)
        for name in (n for n in names if n in found):
            pairs = (found[name][side] for side in ("missed", "yardstick"))
            rows.append([f"{kind}, {names[name]}", *(f"{pair['mean']:.4f} / {pair['p99']:.3f}" for pair in pairs)])
    return table(["mean / p99 of the difference", "Sparrow in vLLM", "yardstick"], rows)


def scaling() -> str:
    """The scaled sparse step on one GPU and on two."""
    names = {"one": "one GPU", "ddp": "two, DDP"}
    runs = {name: load(f"grpo_step_{run}")["seconds"] for run, name in names.items()}
    one = runs["one GPU"]
    rows = []
    for name, run in runs.items():
        pairs = [*((one[phase], run[phase]) for phase in PHASES), (sum(one.values()), sum(run.values()))]
        rows.append([name, *(f"{b:.1f}" + f" ({a / 2 / b:.0%})" * (run is not one) for a, b in pairs)])
    return table(["seconds (efficiency)", "rollout", "log-probs", "update", "sync", "whole step"], rows)


def training() -> str:
    rows = []
    names = {"sparse": "sparse, 8 to 28 pages of 8", "unbounded": "unbounded", "distilled": "sparse, DistillSparse"}
    for run, found in load("vllm_train").items():
        cells, of = [], found["summary"]
        for key, form in (("reward", ".2f"), ("p5_mean", ".4f"), ("acceptance", ".5f"), ("kl", ".1e")):
            change = f"{of[f'{key} change']:+{form}} ± {of[f'{key} change error']:{form}}"
            cells.append(f"{of[f'{key} first']:{form}} → {of[f'{key} last']:{form}} ({change})")
        rows.append([names[run], len(found["steps"]), *cells, f"{of['read_fraction last']:.0%}"])
    return table(["actor", "steps", "reward", "p5, mean of bins", "mean acceptance", "KL", "KV read"], rows)


def roofline() -> str:
    """Errors of all steps by shape, then the steps with the largest."""
    _, points = fit_roofline.errors(fit_roofline.measured())
    rows = []
    for shape, kind in itertools.product(SHAPES, ("dense", "sparse")):
        some = [row for row in points if row[0].shape == shape and row[0].name.endswith("sparse") == (kind == "sparse")]
        _, _, errors, left_out = zip(*some, strict=True)
        worst = (f"{max(off, key=abs):+.1%}" for off in (errors, left_out))
        rows.append([f"{SHAPES[shape]} {kind}", len(some), f"{np.abs(errors).mean():.1%}", *worst])
    largest = [
        [p.name.removeprefix("qwen3-"), f"{p.seconds * 1e3:.2f}", f"{s * 1e3:.2f}", f"{error:+.1%}", f"{out:+.1%}"]
        for p, s, error, out in sorted(points, key=lambda row: -abs(row[2]))[:5]
    ]
    summary = table(["", "steps", "mean size of the error", "largest", "largest, shape left out of the fit"], rows)
    head = ["largest: shape, batch x length", "measured ms", "predicted", "error", "error, shape left out of the fit"]
    return f"{summary}\n{table(head, largest)}"


def overheads() -> str:
    names = ["a layer", "a sparse layer, further", "a sequence", "its top-20 lists, further", "share of the read limit"]
    cells = (f"{1e6 * x:.2f}" if x < 0.1 else f"{x:.3f}" for x in astuple(VLLM_H200))
    return table([*names, "a sequence, on the host"], [list(cells)])


def ragged() -> str:
    rows = fit_roofline.measured()
    overheads, _ = fit_roofline.errors(rows)
    found = fit_roofline.ragged_errors(rows, overheads)
    cells = [
        [kind, len(off), f"{statistics.mean(off):+.1%}", f"{min(off):+.1%} to {max(off):+.1%}"]
        for kind, off in found.items()
    ]
    return table(["trace", "steps", "mean error", "range"], cells)


def same_run() -> str:
    names = {
        "one": "one GPU", "again": "one GPU, other batches", "seed": "one GPU, other seed",
        "ddp": "two GPUs, DDP", "fsdp2": "two GPUs, FSDP2",
    }  # fmt: skip
    formats = {"reward": ".3f", "entropy": ".4f", "p5_mean": ".4f", "acceptance": ".5f", "kl": ".1e"}
    runs = {run: found["steps"] for run, found in load("same_run").items() if run in names}
    rows = []
    for run, name in names.items():
        cells = []
        for key, form in formats.items():
            values, one = (np.array([step[key] for step in runs[r]]) for r in (run, "one"))
            off = "" if run == "one" else f" ({np.sqrt(((values - one) ** 2).mean()):.1e})"
            cells.append(f"{values.mean():{form}}{off}")
        rows.append([name, len(runs[run]), *cells])
    return table(["run", "steps", "reward", "entropy", "p5, mean of bins", "mean acceptance", "KL"], rows)


def planned() -> str:
    """What ``sparrow.cluster`` says of the measured steps."""
    names = {"stock": "dense, stock vLLM", "one": "sparse", "ddp": "sparse, two GPUs"}
    rows = []
    for variant, name in names.items():
        run = load(f"grpo_step_{variant}")
        lengths, schedule = fit_roofline.scaled(run)
        cluster = Cluster(MACHINES["h200"], run.get("gpus", 1))
        found = plan(SHAPES_OF[run["shape"]], cluster, lengths, schedule, 64, len(lengths), 65536)
        step = found.sparse if run["schedule"] else found.dense
        cells = [f"{run['seconds'][key]:.1f} / {getattr(step, key):.1f}" for key in PHASES]
        rows.append([name, *cells, f"{sum(run['seconds'].values()):.1f} / {step.seconds:.1f}"])
    return table(["measured / predicted, s", "rollout", "log-probs", "update", "sync", "step"], rows)


def cost_example() -> str:
    """What the first block of docs/cost.md finds."""
    lengths = response_lengths(14_000, 32_768, 240)
    found = predict(SHAPES_OF["qwen3-4b"], MACHINES["h200"], lengths, SparsitySchedule.preset("qwen3-4b"))
    return table(["", ""], cost_rows(found))


STEPS = {"qwen3-1.7b": 1.97, "qwen3-4b": 2.11, "qwen3-8b": 1.81, "qwen3-14b": 1.35}
"""Published speed-ups of a whole step (as ``PUBLISHED``)."""


def predicted() -> str:
    """The published setting by the cost model."""
    found = {
        shape: predict(SHAPES_OF[shape], MACHINES["h200"], response_lengths(14_000, 32_768, 240), schedule)
        for shape, schedule in ((shape, SparsitySchedule.preset(shape)) for shape in SHAPES)
    }
    shares = [(1 - 1 / STEPS[shape]) / (1 - 1 / PUBLISHED[shape][2]) for shape in SHAPES]
    mine = [p.dense.seconds / (p.dense.seconds + p.train_s) for p in found.values()]
    rows = [
        ["rollout, published", *(f"{PUBLISHED[shape][2]:.2f}" for shape in SHAPES)],
        ["rollout, predicted", *(f"{p.speedup:.2f}" for p in found.values())],
        ["step, published", *(f"{x:.2f}" for x in STEPS.values())],
        ["step, predicted", *(f"{p.step_speedup:.2f}" for p in found.values())],
        ["rollout's share of a dense step: the published pairs imply", *(f"{x:.2f}" for x in shares)],
        ["the same, predicted", *(f"{x:.2f}" for x in mine)],
    ]
    return table(["", *SHAPES.values()], rows)


def short_responses() -> str:
    rows = []
    for count, median in ((240, 14_000), (240, 4_000), (240, 1_000), (8, 14_000), (1, 30_000)):
        lengths = response_lengths(median, 32_768, count)
        found = [
            predict(SHAPES_OF[shape], MACHINES["h200"], lengths, SparsitySchedule.preset(shape)) for shape in SHAPES
        ]
        rows.append([f"{count} x {median:,}", *(f"{p.speedup:.2f} ({p.speculative:.2f})" for p in found)])
    return table(["responses, median", *SHAPES.values()], rows)


def published_run() -> str:
    """Hours of 53,000 examples, 14B, 32 H200s."""
    schedule, rows = SparsitySchedule.preset("qwen3-14b"), []
    for median in (8_000, 14_000):
        cells = []
        for prompts in (16, 32, 64, 128):
            lengths = response_lengths(median, 32_768, 8 * prompts)
            found = plan(SHAPES_OF["qwen3-14b"], Cluster(MACHINES["h200"], 32), lengths, schedule)
            cells.append(" / ".join(f"{x.seconds * 53_000 / prompts / 3600:.0f}" for x in (found.dense, found.sparse)))
        rows.append([f"median {median:,} tokens", *cells])
    return table(["predicted hours, dense / sparse", "16 prompts a step", "32", "64", "128"], rows)


def trainers() -> str:
    """What TRL and verl logged."""
    logs = {
        "TRL, vLLM colocated": load("trl_grpo")["log"],
        "TRL, vLLM server": load("trl_grpo_server")["log"],
        "verl": [line["data"] for line in load("verl_grpo")["log"]],
    }
    rows = []
    for name, logged in logs.items():

        def values(*keys: str, logged: list[Row] = logged) -> list[float]:
            return [row[key] for row in logged for key in keys if key in row]

        reward, p5 = values("reward", "critic/score/mean"), values("sparrow/p5")
        acceptance, floor = values("sparrow/acceptance_mean"), values("sparrow/sampled/p5_floor")
        rows.append(
            [
                name, len(reward), f"{np.mean(reward[:5]):.2f} → {np.mean(reward[-5:]):.2f}",
                f"{p5[0]:.3f} → {p5[-1]:.3f} ({len(p5)})", f"{np.mean(acceptance):.4f}",
                f"{np.mean(floor):.2f}" if floor else "", f"{np.median(values('step_time', 'timing_s/step')):.1f}",
            ]
        )  # fmt: skip
    head = ["trainer", "steps", "reward, first and last five", "p5, first and last (times measured)", "mean acceptance"]
    return table([*head, "p5's floor, mean", "s a step, median"], rows)


def failures() -> str:
    """Runs that lost a process or their server."""
    found = load("same_run")
    stopped, resumed, server = found["killed"]["stopped"], found["killed"]["resumed"], found["server"]
    rows = [
        [name, len(run["steps"]), f"{run['seconds']:.1f}", run["exit"], after]
        for name, run, after in (
            ("a process under DDP", stopped, len(resumed["steps"])),
            ("the vLLM server", server, ""),
        )
    ]
    head = ["killed", "after so many steps", "the run ended within, s", "exit code", "steps after `--resume`"]
    return table(head, rows)


def sampled_tail() -> str:
    rows = []
    for row in load("sampled_tail")["rows"]:
        floor, low, high = row["p5_floor"]
        cells = [f"{row['mean']:.4f}", f"{row['mean_sampled']:.4f}", f"{row['p5'][0]:.3f}"]
        rows.append([row["pages"], *cells, f"{floor:.3f} ({low:.3f} to {high:.3f})", f"{row['p5_of_sampled']:.3f}"])
    head = [
        "pages of 8",
        "mean acceptance",
        "from sampled tokens",
        "p5",
        "its floor (95 % interval)",
        "p5 of min(1, p/q)",
    ]
    return table(head, rows)


def calibrations() -> list[tuple[str, list[Row]]]:
    """What is told apart, and its runs."""
    found: dict[str, list[Row]] = {}
    for run in load("calibration_table")["runs"]:
        rounds = {0: "none", 2: "two (default)"}[run["on_policy"]]
        found.setdefault(f"{run['target']:.2f}, {rounds}", []).append(run)
    return sorted(found.items())


def calibration() -> str:
    runs = load("calibration_table")["runs"]
    ends = sorted({b["end"] for run in runs for b in run["bins"]})
    rows = []
    for what, same in calibrations():
        cells = [[b["over_target"] for run in same for b in run["bins"] if b["end"] == end] for end in ends]
        rows.append([what, *(" ".join(f"{x:+.3f}" for x in cell) for cell in cells)])
    return table(["target, rounds on policy", *(f"up to {end}" for end in ends)], rows)


def calibration_summary() -> str:
    names = {0: "no round on policy", 2: "two rounds"}
    rows = []
    for found in load("calibration_table")["summary"]:
        counts = (found[name] for name in ("above_0.02", "above_0.02_held_up_by_a_shorter_bin", "below_0.02"))
        within = f"{found['within_0.02']} of {found['bins']}, {found['share_within']:.0%}"
        rows.append([names[found["on_policy"]], within, *counts, f"{found['lowest']:+.3f}", f"{found['highest']:+.3f}"])
    head = ["", "within 0.02 of the target", "above by more", "of these held up by a shorter bin", "below by more"]
    return table([*head, "lowest", "highest"], rows)


def shortcut() -> str:
    rows = []
    for found in load("calibration_shortcut")["budgets"]:
        bins = [b for b in found["bins"] if b["start"] >= 192]
        drifts, seconds = [b["drift"] for b in bins], found["seconds"]
        spans = [[b[way]["p5"] for b in bins] for way in ("teacher_forced", "sampled")]
        rows.append(
            [found["top_k"], *(f"{min(p5):.3f} to {max(p5):.3f}" for p5 in spans),
             f"{statistics.mean(drifts):+.3f}, {min(drifts):+.3f}", f"{sum(b['overlap'] for b in bins)} of {len(bins)}",
             f"{seconds['teacher_forced']:.1f}, {seconds['sampled']:.1f}"]
        )  # fmt: skip
    head = ["top-k pages", "p5 by bin, dense responses", "p5 by bin, its own", "own less dense: mean, worst bin",
            "intervals overlap", "seconds: teacher-forced, sampled"]  # fmt: skip
    return table(head, rows)


def beta_tail() -> str:
    rows = []
    for f in load("calibration_tail")["budgets"]:
        low, high = f["ks_interval"]
        rows.append(
            [f["top_k"], f"{f['fraction_in_tail']:.0%}", f"Beta({f['a']:.2f}, {f['b']:.2f})",
             f"{f['ks']:.3f} [{low:.3f}, {high:.3f}]", f"{f['ks_if_beta_95']:.3f}",
             f"{f['variance_measured']:.3f}, {f['variance_fitted']:.3f}",
             f"{f['p5_measured']:.3f}, {f['p5_fitted']:.3f}"]
        )  # fmt: skip
    head = ["top-k pages", "tokens below 0.999", "fit", "KS, 95 % interval", "95th percentile of KS, were it true",
            "variance, measured and fitted", "p5, measured and fitted"]  # fmt: skip
    return table(head, rows)


def calibration_cost() -> str:
    found = load("calibration_cost")
    whole, dense = found["sampling_18_budgets_s"], found["scoring_18_budgets_s"]
    published = "sampling at each of 18 budgets from 512 to 16,384 tokens, as published"
    rows = [[published, f"{whole:,.0f}", f"({dense:,.0f}, not counted)", f"{whole:,.0f}", ""]]
    for way in found["ways"]:
        scored = f"{way['scoring_s']:,.0f} ({way['sequences_scored']:,} sequences)"
        total = f"{way['sampling_s'] + way['scoring_s']:,.0f}"
        rows.append([way["label"], f"{way['sampling_s']:,.0f}", scored, total, f"{way['times_less']:.1f}x"])
    return table(["", "sampling, s", "scoring, s", "in all, s", "less by"], rows)


def scoring_passes() -> str:
    rows = []
    for number, found in enumerate(load("calibration_search")["rounds"]):
        passes = [f"{_span(p['top_k'])}: {statistics.mean(p['sequence_s']):.2f}" for p in found["passes"]]
        rows.append([number, _span(found["sampled_under"]), "; ".join(passes)])
    return table(["round", "sampled with", "pages of each pass, and its seconds a sequence"], rows)


def _span(top_k: list[Any]) -> str:
    """The pages of a schedule, without those of lengths that were not measured."""
    pages = [k for k in top_k if k != "all"] or top_k
    return f"{pages[0]}" if len(pages) == 1 else f"{pages[0]} to {pages[-1]}"


def teacher_forced() -> str:
    rows = []
    for case in load("teacher_forced")["cases"]:
        for way in ("forward", "backward"):
            dense = [found[f"{way}_ms"] for found in case["dense"].values()]
            cells = []
            for found in case["sparse"].values():
                ms = found[f"{way}_ms"]
                cells.append(f"{ms:.1f} ({', '.join(f'{other / ms:.2f}x' for other in dense)})")
            what = f"{case['T']:,}, {case['G']}, {case['top_k']}"
            rows.append([what, way, *(f"{ms:.1f}" for ms in dense), *cells])
        read = (f"{found['read']:.1f}" for found in case["sparse"].values())
        rows.append([what, "pages read per page kept", "", "", *read])
    return table(["tokens, group, top-k", "", *case["dense"], *case["sparse"]], rows)


ARMS = {
    "none": "no adapter",
    "full": "PPO and KL",
    "kl": "KL alone",
    "worst": "a quarter of the positions",
    "half": "half of the responses",
    "switch": "from the dearer schedule",
}


def distilled() -> tuple[dict[str, list[Row]], list[int]]:
    """Runs of the study by what they trained with, and the first positions of the bins that most responses reach."""
    runs = load("distill")["runs"].items()
    arms = {label: [run for name, run in runs if name.startswith(arm)] for arm, label in ARMS.items()}
    start = [{"without": run["start"], "dense": run["dense at the start"]} for run in arms[ARMS["none"]]]
    bins = start[0]["without"]["bins"]
    return {"before training": start, **arms}, [b[0] for b in bins if 2 * b[5] >= max(b[5] for b in bins)]


def worn(run: Row) -> Row:
    """What was measured of the actor with its adapter, if it has one."""
    return run.get("with", run["without"])


def by_bin(measured: Row, reached: list[int]) -> Any:
    """p5 and the ends of its interval, ``[bins, 3]``."""
    return np.array([b[2:5] for b in measured["bins"] if b[0] in reached])


def distill_tail() -> str:
    """p5 of the actor by length on held-out problems, before and after."""
    arms, reached = distilled()
    rows = []
    for name, runs in arms.items():
        cells = np.mean([by_bin(worn(run), reached) for run in runs], axis=0)
        mean = f"{statistics.mean(worn(run)['mean'] for run in runs):.3f}"
        rows.append([name, *("{:.3f} [{:.3f}, {:.3f}]".format(*cell) for cell in cells), mean])
    return table(["trained with", *(f"tokens {b}-{b + 63}" for b in reached), "mean acceptance"], rows)


def distill_runs() -> str:
    """The lowest p5 of every run, what the adapter did for it, and the step of the switch."""
    arms, reached = distilled()
    rows = []
    for name, runs in arms.items():
        lowest = [by_bin(worn(run), reached)[:, 0].min() for run in runs]
        lifts = [
            (by_bin(run["with"], reached) - by_bin(run["without"], reached))[:, 0].mean()
            for run in runs
            if "with" in run
        ]
        trained = [run for run in runs if "steps" in run]
        last = [np.mean(run["lowest_p5"][-10:]) for run in trained]
        steps = [run.get("moved_at", first_holding(run["lowest_p5_low"])) for run in trained]
        rows.append([name, each(lowest), each(lifts, "+"), each(last), ", ".join(str(s or "never") for s in steps)])
    head = ["lowest p5, held out", "by the adapter, mean of bins", "lowest p5, last 10 steps", "may switch at step"]
    return table(["trained with", *head], rows)


def distill_rewards() -> str:
    """Mean rewards of every run."""
    rows = []
    for name, runs in distilled()[0].items():
        last = [np.mean(run["reward"][-10:]) for run in runs if "steps" in run]
        held_out = [worn(run)["reward"] for run in runs], [run["dense"]["reward"] for run in runs]
        rows.append([name, *map(each, (last, *held_out))])
    return table(["trained with", "last 10 steps", "actor, held out", "policy, held out"], rows)


def each(values: Sequence[float], sign: str = "") -> str:
    """The mean, and the value of each run; nothing of no runs."""
    return f"{np.mean(values):{sign}.3f} ({', '.join(f'{x:{sign}.3f}' for x in values)})" if values else ""


def first_holding(low: Sequence[float]) -> int | None:
    """The first of three steps in a row in which the lowest bin's interval is above 0.86."""
    return next((i + 1 for i in range(len(low) - 2) if min(low[i : i + 3]) >= 0.86), None)


def distill_overhead() -> str:
    found = load("distill_overhead")
    names = {
        "dense_update": "the policy's own update",
        "everything": "PPO and KL on everything",
        "kl_alone": "KL alone",
        "a_quarter_of_the_positions": "PPO and KL on a quarter of the positions",
        "half_of_the_responses": "PPO and KL on half of the responses",
        "a_quarter_of_the_responses": "PPO and KL on a quarter of the responses",
    }
    rows = []
    for key, name in names.items():
        row = [name]
        for text in ("runs", "random"):
            run = found[text][key]
            row.append(f"{statistics.median(run['seconds']):.2f}")
            low, high = run["added_range"]
            row.append("" if key == "dense_update" else f"{run['added']:.0%} ({low:.0%}-{high:.0%})")
        rows.append([*row, f"{found['runs'][key]['peak_gib']:.0f}"])
    reads = [f"tiles read {found[text]['read']:.1f}" for text in ("runs", "random")]
    head = ["update", f"seconds, {reads[0]}", "added", f"seconds, {reads[1]}", "added", "GiB at most"]
    return table(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "decode steps": decode_steps,
    "rollouts with top 20": lambda: rollouts("top 20"),
    "rollouts without log-probs": lambda: rollouts("none"),
    "rollouts of 1,024": lambda: rollouts("top 20", "1024"),
    "limits": limits,
    "log-prob cost": logprob_cost,
    "attention": attention,
    "uneven attention": uneven_attention,
    "capacity": capacity,
    "validation": validation,
    "profile": profile,
    "grpo step": grpo_step,
    "equalities": equalities,
    "training": training,
    "roofline": roofline,
    "ragged": ragged,
    "same run": same_run,
    "scaling": scaling,
    "failures": failures,
    "planned": planned,
    "overheads": overheads,
    "cost example": cost_example,
    "predicted": predicted,
    "short responses": short_responses,
    "published run": published_run,
    "trainers": trainers,
    "sampled tail": sampled_tail,
    "calibration": calibration,
    "calibration summary": calibration_summary,
    "shortcut": shortcut,
    "beta tail": beta_tail,
    "calibration cost": calibration_cost,
    "scoring passes": scoring_passes,
    "teacher-forced": teacher_forced,
    "distill overhead": distill_overhead,
    "distill tail": distill_tail,
    "distill runs": distill_runs,
    "distill rewards": distill_rewards,
}


def render(page: str, tables: Mapping[str, Callable[[], str]] = TABLES) -> str:
    """The page with every table made anew."""

    def fill(found: re.Match[str]) -> str:
        return f"<!-- table: {found[1]} -->\n{tables[found[1]]()}<!-- end -->"

    return re.sub(r"<!-- table: ([^>]+) -->\n.*?<!-- end -->", fill, page, flags=re.DOTALL)


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(render(page.read_text(encoding="utf-8")), encoding="utf-8")
