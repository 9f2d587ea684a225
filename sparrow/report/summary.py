"""Build the results table printed at the end of a run."""

from __future__ import annotations

from math import isfinite
from pathlib import Path

import numpy as np

from sparrow.mismatch import BinMismatch, Tau
from sparrow.run.log import FloatArray, RunLog
from sparrow.schedule import ALL_PAGES, SparsitySchedule

NamedValue = tuple[str, str]
SPARSE_BY = "--schedule or --rollout.mode lossless makes rollouts sparse"
DENSE: NamedValue = ("mode", f"dense; {SPARSE_BY}")
OWN_SAMPLES = "samples are the dense policy's own"


def summary_rows(run_dir: str | Path) -> list[NamedValue]:
    """Build a run's results table, as (name, value) pairs. The table has steps, reward, tokens and
    KV read. For sparse rollouts, it also has the acceptance tail of each length bin. For dense
    rollouts, it has a hint on how to make them sparse.

    Raises ConfigError if the folder is not a run directory, the run has no finished step, or a file
    is damaged.
    """
    log = RunLog.load(run_dir)
    if not log.is_sparse:
        mode = [] if log.drafting() else [DENSE]
        return [*result_rows(log), *mode]
    up_to = log.dense_up_to()
    tail = [
        (
            f"p5 at {bin_name(b.start, b.end)} tokens",
            describe_tail(b, log.tau) if b.end > up_to else OWN_SAMPLES,
        )
        for b in log.bins()
    ]
    return [*result_rows(log), *tail]


def setup_rows(log: RunLog) -> list[NamedValue]:
    """Describe a run's setup: the model, task, datasets and engine from the command line, the mode,
    and the schedule. A lossy mode and a dense schedule are left out.

    In lossless mode, the schedule is the draft schedule.
    """
    start = log.schedules[0]
    now = log.schedules[-1]
    schedule = describe_schedule(now)
    if now != start:
        schedule += f"; at the start {describe_schedule(start)}"
    named = {name: log.train.get(name) for name in ("model", "task", "dataset", "engine")}
    texts = {
        name: value if isinstance(value, str) else ", ".join(value)
        for name, value in named.items()
        if value
    }
    mode = (log.train.get("rollout") or {}).get("mode")
    if mode in ("lossless", "auto"):
        read = "drafts read" if mode == "lossless" else "schedule"
        return [*texts.items(), ("mode", mode), (read, schedule)]
    if not log.is_sparse:
        return [*texts.items(), DENSE]
    if log.follows_p5 and now.is_dense:
        schedule = f"auto: {schedule} until p5 allows fewer pages"
    return [*texts.items(), ("schedule", schedule)]


def result_rows(log: RunLog) -> list[NamedValue]:
    """Describe a run's results: steps, first and last reward, evaluations, response tokens, the
    share of tokens in the loss, KV read, drafts, dial and guard.
    """
    alarms = log.steps[log.series("guard", "alarm") == 1]
    kept = log.tokens_kept()
    rows = [
        ("steps", f"{log.steps[-1]} of {log.train['steps']}"),
        ("reward", _rise(log, log.series("reward", "mean"))),
        *(
            (f"reward, {name}", _rise(log, log.series("reward", "sources", name)))
            for name in log.sources()
        ),
        *((f"evaluation, {name}", _best(log, name)) for name in log.benchmarks()),
        ("response tokens", f"{log.series('response', 'tokens').sum():,.0f}"),
        (
            "tokens in the loss",
            "all" if kept == 1 else f"{percent(kept)}, others masked by the correction",
        ),
        ("KV read", percent(log.kv_read())),
    ]
    if drafting := log.drafting():
        rows += [
            ("drafts per token", f"{drafting.drafts_per_token:.2f}"),
            ("tokens per cycle", f"{drafting.tokens_per_cycle:.2f}"),
            *(
                (
                    f"{what} at {bin_name(b.start, b.end)} tokens",
                    f"{number(b.mean)}, p5 {number(b.p5)}",
                )
                for what, bins in (
                    ("drafts accepted", drafting.bins),
                    ("metered", drafting.metered),
                )
                for b in bins
            ),
        ]
    if dial := log.metrics[-1].get("dial"):
        share = log.series("dial", "unverified_fraction")
        tokens = log.series("response", "tokens")
        whole = percent(float(np.average(share, weights=tokens)))
        rows += [
            ("unverified", f"{whole}, at the last step {percent(share[-1])}"),
            ("predicted gain", f"{dial['speedup']:.2f}x over lossless"),
            *(
                (f"dial at {bin_name(b['start'], b['end'])} tokens", f"{b['mode']}; {b['why']}")
                for b in dial["bins"]
            ),
        ]
    if alarms.size:
        first = f"first at step {alarms[0]}"
        rows.append(
            ("guard", f"acceptance too low, at {alarms.size} of {log.steps.size} steps, {first}")
        )
    return rows


def _best(log: RunLog, benchmark: str) -> str:
    """Format mean@k and its interval for the last evaluation and for the best one."""
    mean = log.scores(benchmark, "mean", "value")
    low, high = (log.scores(benchmark, "mean", end)[-1] for end in ("low", "high"))
    best = int(np.nanargmax(mean)) if np.isfinite(mean).any() else 0
    last = f"{number(mean[-1])} [{number(low)}, {number(high)}] after step {log.evaluated[-1]}"
    return f"{last}, best {number(mean[best])} after step {log.evaluated[best]}"


def _rise(log: RunLog, values: FloatArray) -> str:
    first, last, count = log.first_and_last(values)
    if len(log.metrics) == 1:
        return f"{number(last)} (one step)"
    steps = "step" if count == 1 else f"{count} steps"
    return f"{number(first)} → {number(last)} (mean of the first and last {steps})"


def describe_tail(b: BinMismatch, tau: Tau) -> str:
    """Format the bounds on p5, its interval, and the verdict against ``tau``."""
    interval = (
        f" [{number(b.interval_low)}, {number(b.interval_end)}]" if isfinite(b.interval_low) else ""
    )
    verdict = tau.verdict(b)
    against = "undecided against" if verdict == "undecided" else verdict
    low = number(b.lower_bound)
    high = number(b.upper_bound)
    p5 = low if low == high else f"between {low} and {high}"
    return f"{p5}{interval}, {against} {tau}"


def describe_schedule(schedule: SparsitySchedule) -> str:
    if schedule.is_dense:
        return "dense"
    low = schedule.top_k[0]
    high = schedule.top_k[-1]
    top = "all" if high >= ALL_PAGES else f"{high}"
    pages = f"top {low}" if low == high else f"top {low} to {top} by length"
    always = schedule.sink_pages + schedule.recent_pages
    text = f"{pages} + {always} pages of {schedule.page_size} tokens"
    if layers := schedule.dense_layers:
        text += (
            f", dense in {'layer' if len(layers) == 1 else 'layers'} {', '.join(map(str, layers))}"
        )
    if schedule.head_budgets:
        text += ", divided unevenly among layers and kv heads"
    preset = schedule.provenance.get("preset")
    return f"{preset}: {text}" if preset else text


def bin_name(start: float, end: float) -> str:
    """Format a length range, such as 0-2K or 32-64."""
    if start % 1000 == 0 and end % 1000 == 0:
        return f"{start / 1000:g}-{end / 1000:g}K"
    return f"{start:g}-{end:g}"


def number(value: float) -> str:
    return f"{value:.3f}" if isfinite(value) else "n/a"


def percent(share: float) -> str:
    return f"{100 * share:.4g} %" if isfinite(share) else "n/a"
