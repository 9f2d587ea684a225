"""Tables for the cost model: roofline errors, traces, and clusters."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import astuple

import eflops
import fit_lossless
import fit_roofline
import numpy as np
from common import SHAPES, load, table
from rollout_trace import PROMPT, responses, simulate, states
from tables_speed import PHASES, PUBLISHED, measured, trace_seconds

from sparrow.cost import (
    MACHINES,
    VLLM_H200,
    Overheads,
    Prediction,
    decode_step,
    drafters,
    predict,
    response_lengths,
    sequences_held,
)
from sparrow.cost import SHAPES as SHAPES_OF
from sparrow.cost.cluster import Cluster, engine_machine, plan
from sparrow.cost.lossless import (
    REFERENCE_TOKENS,
    LosslessPrediction,
    choices,
    lossless_step,
    predict_lossless,
)
from sparrow.cost.lossless import rows as cost_rows
from sparrow.schedule import SparsitySchedule

ACCEPTANCE = 0.94  # for drafts that read 1,024 tokens


def limits(requests: str = "240") -> str:
    """Tabulate the speed-up that the cost model predicts for the whole trace, with overheads and
    without. Without overheads, the number of bytes read is the only limit.
    """
    overheads = fit_roofline.errors(fit_roofline.measured())[0].without_lists
    rows = []
    for shape, (stock, sparse) in measured().items():
        spans = simulate([PROMPT] * int(requests), responses(int(requests)), stock["slots"])
        some = [lengths for _, lengths in states(spans, 256)]
        cells = []
        for mine in (overheads, Overheads()):
            dense, ours = (
                sum(
                    decode_step(SHAPES_OF[shape], MACHINES["h200"], n, schedule, mine).seconds
                    for n in some
                )
                for schedule in (None, SparsitySchedule.preset(shape))
            )
            cells.append(f"{dense / ours:.2f}x")
        speedup = trace_seconds(stock, requests, "none") / trace_seconds(sparse, requests, "none")
        rows.append([SHAPES[shape], f"{speedup:.2f}x", *cells])
    head = ["shape", "measured", "predicted", "reading bytes is the only cost"]
    return table(head, rows)


def roofline() -> str:
    """Tabulate the errors over all steps by shape, and the steps with the largest errors."""
    _, points = fit_roofline.errors(fit_roofline.measured())
    rows = []
    for shape, kind in itertools.product(SHAPES, ("dense", "sparse")):
        some = [
            row
            for row in points
            if row[0].shape == shape and row[0].name.endswith("sparse") == (kind == "sparse")
        ]
        _, _, errors, left_out = zip(*some, strict=True)
        worst = (f"{max(off, key=abs):+.1%}" for off in (errors, left_out))
        rows.append([f"{SHAPES[shape]} {kind}", len(some), f"{np.abs(errors).mean():.1%}", *worst])
    largest = [
        [
            p.name.removeprefix("qwen3-"),
            f"{p.seconds * 1e3:.2f}",
            f"{s * 1e3:.2f}",
            f"{error:+.1%}",
            f"{out:+.1%}",
        ]
        for p, s, error, out in sorted(points, key=lambda row: -abs(row[2]))[:5]
    ]
    summary = table(
        [
            "steps of",
            "number",
            "mean absolute error",
            "largest error",
            "largest error if the shape is left out of the fit",
        ],
        rows,
    )
    head = [
        "largest errors: shape, batch x length",
        "measured ms",
        "predicted",
        "error",
        "error, shape left out of the fit",
    ]
    return f"{summary}\n{table(head, largest)}"


def overheads() -> str:
    names = [
        "per layer",
        "extra per sparse layer",
        "per sequence",
        "extra for top-20 lists",
        "share of the read bandwidth",
    ]
    cells = (f"{1e6 * x:.2f}" if x < 0.1 else f"{x:.3f}" for x in astuple(VLLM_H200))
    return table([*names, "per sequence, on the host"], [list(cells)])


def ragged() -> str:
    rows = fit_roofline.measured()
    overheads, _ = fit_roofline.errors(rows)
    errors = fit_roofline.ragged_errors(rows, overheads)
    cells = [
        [kind, len(off), f"{statistics.mean(off):+.1%}", f"{min(off):+.1%} to {max(off):+.1%}"]
        for kind, off in errors.items()
    ]
    return table(["trace", "steps", "mean error", "range"], cells)


def planned() -> str:
    """Tabulate the predictions of ``sparrow.cost.cluster`` for the measured steps."""
    names = {
        "stock": "dense, stock vLLM",
        "sparse": "sparse",
        "one": "sparse, earlier",
        "ddp": "sparse, two GPUs, DDP, earlier",
        "ddp2": "sparse, two GPUs, DDP",
        "fsdp2": "sparse, two GPUs, FSDP2",
        "ddp4": "sparse, four GPUs, DDP",
        "fsdp2_4": "sparse, four GPUs, FSDP2",
    }
    rows = []
    for variant, name in names.items():
        run = load(f"grpo_step_{variant}")
        lengths, schedule = fit_roofline.scaled(run)
        cluster = Cluster(MACHINES["h200"], run.get("gpus", 1))
        prediction = plan(
            SHAPES_OF[run["shape"]], cluster, lengths, schedule, 64, len(lengths), 65536
        )
        step = prediction.sparse if run["schedule"] else prediction.dense
        assert step is not None
        cells = [f"{run['seconds'][key]:.1f} / {getattr(step, key):.1f}" for key in PHASES]
        rows.append([name, *cells, f"{sum(run['seconds'].values()):.1f} / {step.seconds:.1f}"])
    return table(
        ["measured / predicted, s", "rollout", "log-probs", "update", "sync", "step"], rows
    )


def cost_example() -> str:
    """Report the result of the first code block in docs/cost.md."""
    lossy, lossless = priced("qwen3-4b", 14_000, 240)
    setting = SHAPES_OF["qwen3-4b"], MACHINES["h200"], response_lengths(14_000, 32_768, 240)
    needed = drafters.rows(*setting, lossy.dense, lossless)
    return table(["what", "prediction"], [*cost_rows(lossy, lossless), *needed])


def priced(shape: str, median: int, count: int) -> tuple[Prediction, LosslessPrediction]:
    """Predict rollouts on an H200: dense, lossy, and lossless at an acceptance rate of
    ``ACCEPTANCE``.
    """
    known, machine, lengths = (
        SHAPES_OF[shape],
        MACHINES["h200"],
        response_lengths(median, 32_768, count),
    )
    lossy = predict(known, machine, lengths, SparsitySchedule.preset(shape))
    return lossy, predict_lossless(known, machine, lengths, lossy.dense, ACCEPTANCE)


STEPS = {"qwen3-1.7b": 1.97, "qwen3-4b": 2.11, "qwen3-8b": 1.81, "qwen3-14b": 1.35}
"""Published whole-step speed-ups (same source as ``PUBLISHED``)."""


def predicted() -> str:
    """Tabulate the cost model's predictions for the published setting."""
    predictions = {
        shape: predict(
            SHAPES_OF[shape], MACHINES["h200"], response_lengths(14_000, 32_768, 240), schedule
        )
        for shape, schedule in ((shape, SparsitySchedule.preset(shape)) for shape in SHAPES)
    }
    shares = [(1 - 1 / STEPS[shape]) / (1 - 1 / PUBLISHED[shape][2]) for shape in SHAPES]
    mine = [p.dense.seconds / (p.dense.seconds + p.train_s) for p in predictions.values()]
    rows = [
        ["rollout, published", *(f"{PUBLISHED[shape][2]:.2f}" for shape in SHAPES)],
        ["rollout, predicted", *(f"{p.speedup:.2f}" for p in predictions.values())],
        ["step, published", *(f"{x:.2f}" for x in STEPS.values())],
        ["step, predicted", *(f"{p.step_speedup:.2f}" for p in predictions.values())],
        [
            "rollout's share of a dense step, implied by the published speed-ups",
            *(f"{x:.2f}" for x in shares),
        ],
        ["rollout's share of a dense step, predicted", *(f"{x:.2f}" for x in mine)],
    ]
    return table(["speed-up or share", *SHAPES.values()], rows)


def short_responses() -> str:
    rows = []
    for count, median in ((240, 14_000), (240, 4_000), (240, 1_000), (8, 14_000), (1, 30_000)):
        pairs = [priced(shape, median, count) for shape in SHAPES]
        cells = (f"{lossy.speedup:.2f} ({lossless.speedup:.2f})" for lossy, lossless in pairs)
        rows.append([f"{count} x {median:,}", *cells])
    return table(["responses, median", *SHAPES.values()], rows)


STATES = (
    ("qwen3-1.7b", 64, 4096),
    ("qwen3-1.7b", 64, 15000),
    ("qwen3-1.7b", 32, 30000),
    ("qwen3-1.7b", 8, 30000),
    ("qwen3-8b", 48, 4096),
    ("qwen3-8b", 48, 15000),
    ("qwen3-8b", 24, 30000),
)


def draft_budgets() -> str:
    """Tabulate the fastest draft budget, and its gain over a budget of ``REFERENCE_TOKENS``. Every
    budget gets its best draft length.
    """
    plain = VLLM_H200.without_lists
    acceptances, rows = (0.9, 0.945, 0.97, 0.99), []
    for shape, batch, length in STATES:
        cells = []
        for acceptance in acceptances:
            fastest = dict[int, float]()
            for drafting in choices(acceptance):
                [budget] = drafting.schedule.tokens_read([length])
                step = lossless_step(
                    SHAPES_OF[shape], MACHINES["h200"], [length] * batch, drafting, plain
                )
                fastest[budget] = min(step.seconds, fastest.get(budget, math.inf))
            best = min(fastest, key=fastest.__getitem__)
            cells.append(f"{best:,} ({fastest[REFERENCE_TOKENS] / fastest[best]:.2f}x)")
        rows.append([SHAPES[shape], f"{batch} x {length:,}", *cells])
    return table(["shape", "sequences x tokens", *(f"acceptance {a}" for a in acceptances)], rows)


MIXTURES = {
    "qwen3-30b-a3b": 1,
    "qwen3-next-80b-a3b": 2,
    "olmo-3-7b": 1,
    "olmo-3-32b": 1,
    "gemma-3-27b": 1,
}
"""Mixtures of experts and hybrids, and how many GPUs an engine needs for each."""
MIXTURE_STATES = ((8, 15_000), (32, 15_000), (64, 15_000), (8, 60_000), (32, 60_000))
MIXTURE_PAGES = 253


def mixtures() -> str:
    """Predict the gain of sparse decoding for a mixture of experts and for hybrid models, for the
    batches that fit in memory.
    """
    plain = VLLM_H200.without_lists
    lossy = SparsitySchedule.fixed(MIXTURE_PAGES, dense_layers=())
    rows = []
    for name, gpus in MIXTURES.items():
        shape = SHAPES_OF[name]
        machine = engine_machine(Cluster(MACHINES["h200"], gpus, gpus))
        for batch, length in MIXTURE_STATES:
            if batch > sequences_held(shape, machine, length):
                continue
            lengths = [length] * batch
            dense = decode_step(shape, machine, lengths, None, plain)
            sparse = decode_step(shape, machine, lengths, lossy, plain)
            drafted = [
                lossless_step(shape, machine, lengths, drafting, plain)
                for drafting in choices(0.945)
            ]
            lossless = min(step.seconds for step in drafted)
            ratio = f"{dense.seconds / lossless:.2f}x"
            rows.append(
                [
                    f"{shape.name}, {gpus} x H200",
                    f"{batch} x {length:,}",
                    f"{1e3 * dense.seconds:.1f}",
                    f"{dense.weight_s / dense.seconds:.0%}",
                    f"{dense.attention_s / dense.seconds:.0%}",
                    f"{dense.seconds / sparse.seconds:.2f}x",
                    f"({ratio})" if shape.is_hybrid else ratio,  # in brackets: not supported
                ]
            )
    head = ["shape", "sequences x tokens", "dense step, ms", "weights", "attention"]
    return table([*head, "lossy", "lossless"], rows)


def published_run() -> str:
    """Tabulate the predicted hours for 53,000 examples with a 14B model on 32 H200s."""
    schedule, rows = SparsitySchedule.preset("qwen3-14b"), []
    for median in (8_000, 14_000):
        cells = []
        for prompts in (16, 32, 64, 128):
            lengths = response_lengths(median, 32_768, 8 * prompts)
            steps = plan(SHAPES_OF["qwen3-14b"], Cluster(MACHINES["h200"], 32), lengths, schedule)
            assert steps.sparse is not None
            cells.append(
                " / ".join(
                    f"{x.seconds * 53_000 / prompts / 3600:.0f}"
                    for x in (steps.dense, steps.sparse)
                )
            )
        rows.append([f"median {median:,} tokens", *cells])
    return table(
        ["predicted hours, dense / sparse", "16 prompts per step", "32", "64", "128"], rows
    )


def paper_runs() -> str:
    """Tabulate the memory and hours of the paper's runs, as predicted by
    ``recipes/paper/predicted.py``.
    """
    rows = []
    for run in load("paper_runs"):
        seconds, hours = run["step_s"], run["hours"]
        modes = [
            f"{hours[mode]:.0f} h ({seconds['dense'] / seconds[mode]:.2f}x)"
            for mode in ("lossy", "lossless")
        ]
        memory = [f"{run['training_gib']:.0f}", run["full_responses"]]
        rows.append(
            [
                f"{run['run']}, {SHAPES[run['model']]}",
                run["gpus"],
                *memory,
                f"{hours['dense']:.0f} h",
                *modes,
            ]
        )
    head = [
        "run",
        "H200s",
        "training, GiB per GPU",
        "full responses per engine",
        "dense",
        "lossy",
        "lossless",
    ]
    return table(head, rows)


TABLES = {
    "limits": limits,
    "roofline": roofline,
    "ragged": ragged,
    "planned": planned,
    "overheads": overheads,
    "cost example": cost_example,
    "predicted": predicted,
    "mixtures": mixtures,
    "short responses": short_responses,
    "published run": published_run,
    "paper runs": paper_runs,
    "ideal speed-ups": eflops.ideal,
    "lossless fit": fit_lossless.fitted,
    "draft budgets": draft_budgets,
}
