"""Terminal output: tables of results, and one line per step to show progress."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparrow.mismatch.tail import between
from sparrow.schedule import ALL_PAGES

if TYPE_CHECKING:
    import numpy as np

    from sparrow.attention.triton.saved import Choices
    from sparrow.audit.statistics import Finding, Verdict
    from sparrow.calibrate import Calibration
    from sparrow.mismatch import BinMismatch, MismatchReport
    from sparrow.mismatch.tau import Span, Tau

QUIET_S = 30.0  # if steps take longer than this, show their phases too


class Progress:
    """A ``trainer.Listener`` that prints a progress line per step, plus one per phase if steps are
    long.
    """

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._done = 0
        self._seconds = 0.0
        self._began = time.monotonic()

    def __call__(self, event: str, metrics: dict[str, Any]) -> None:
        if event == "step":
            self._done = metrics["step"]
            self._seconds = sum(metrics["seconds"].values())
            note(f"step {self._done}/{self._steps}  {step_line(metrics)}")
        elif event == "evaluated":
            means = ", ".join(
                f"{name} {scores['mean']['value']:.3f}" for name, scores in metrics.items()
            )
            note(f"step {self._done}/{self._steps}  evaluation {means}")
        else:
            self._done = metrics["step"]
            takes_long = self._seconds > QUIET_S or not self._seconds  # unknown in the first step
            if takes_long:
                note(
                    f"step {self._done + 1}/{self._steps}  {event}  "
                    f"{time.monotonic() - self._began:.0f} s"
                )


def step_line(metrics: dict[str, Any]) -> str:
    """Summarise a step in one line: reward, response length, speed, the share of the KV cache read
    and, for sparse rollouts, the acceptance tail.
    """
    seconds = metrics["seconds"]
    response = metrics["response"]
    speed = response["tokens"] / max(seconds["rollout"], 1e-9)
    return (
        f"reward {metrics['reward']['mean']:.3f}  {_acceptance(metrics)}length "
        f"{response['mean']:.0f}  {speed:,.0f} tokens/s  KV read "
        f"{metrics['kv']['read_fraction']:.0%}  {sum(seconds.values()):.1f} s"
    )


def _acceptance(metrics: dict[str, Any]) -> str:
    """Format a step's acceptance: the exact value for drafts, bounds on the lowest p5 for a sparse
    actor, or an empty string for dense rollouts.
    """
    if "drafts" in metrics and metrics["dense_up_to"] is None:
        exact = metrics["drafts"].get("acceptance")
        return "" if exact is None else f"drafts accepted {exact:.3f}  "
    up_to = metrics["dense_up_to"]
    bins = [b for b in metrics["mismatch"]["bins"] if up_to is not None and b["end"] > up_to]
    # Skip bins that few responses reach, since their p5 is noisy.
    tails = [b for b in bins if 2 * b["n_sequences"] >= bins[0]["n_sequences"]]
    if not tails:
        return ""
    bounds = (min(b[name] for b in tails) for name in ("lower_bound", "upper_bound"))
    return f"lowest p5 {between(*bounds)}  "


def note(text: str) -> None:
    """Print progress to stderr, so that stdout can be piped."""
    print(text, file=sys.stderr, flush=True)


def print_rows(title: str, rows: Sequence[tuple[str, str]]) -> None:
    table = Table(title=escape(title), show_header=False)
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    Console().print(table)


def _print_columns(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(
        title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False
    )
    for heading in headings:
        # Don't wrap the first column.
        table.add_column(heading, justify="right", no_wrap=heading == headings[0])
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_audit(verdict: Verdict, tokens: int) -> None:
    """Print the results of ``sparrow audit``."""
    show = {
        "share": "{:+.3%}",
        "nats": "{:+.5f}",
        "correlation": "{:+.4f}",
        "chi-square": "{:+.4f}",
    }

    def row(f: Finding) -> list[str]:
        number = show[f.unit].format
        dense = "-" if f.dense is None else number(f.dense.value)
        corrected = "1" if f.corrected >= 1 else f"{f.corrected:.2g}"
        values = (number(f.tested.value), dense, number(f.difference), number(f.detectable)[1:])
        return [f.name if f.place == "all" else f"{f.name}, {f.place}", *values, corrected]

    by_place = sorted((f for f in verdict.findings if f.place != "all"), key=lambda f: f.corrected)
    worst = [f for f in by_place if f.corrected < verdict.level]
    shown = [f for f in verdict.findings if f.place == "all"] + (worst or by_place[:1])
    _print_columns(
        f"samples against the dense model's distributions, {tokens:,} tokens",
        ["quantity", "tested", "dense arm", "difference", "detectable", "p"],
        [row(f) for f in shown],
    )
    if hidden := len(verdict.findings) - len(shown):
        print(
            "tests of single positions in the draft cycle that found no difference (not shown): "
            f"{hidden}"
        )
    for note_ in verdict.notes:
        print(f"not tested: {note_}")
    print(f"{verdict.status}, at a significance level of {verdict.level:g}")
    for reason in verdict.reasons:
        print(f"  {reason}")
    if verdict.status == "exact":
        print(
            f"  a bias that affects {verdict.detectable:.2%} of the tokens would have been detected"
        )


def print_mismatch(report: MismatchReport, tau: Tau, top_n: int, dense_up_to: float) -> None:
    """Print the results of ``sparrow measure`` for a sparse actor that reads everything up to
    length ``dense_up_to``.
    """
    from sparrow.mismatch import few_sequences

    def row(b: BinMismatch) -> tuple[str, ...]:
        counts = (f"{b.start}-{b.end}", str(b.n_tokens), str(b.n_sequences))
        if b.end <= dense_up_to:
            return (*counts, "", "", "", "reads all")
        return (
            *counts,
            f"{b.mean:.3f}",
            f"{b.lower_bound:.3f} and {b.upper_bound:.3f}",
            f"{b.interval_low:.3f}-{b.interval_end:.3f}",
            tau.verdict(b),
        )

    _print_columns(
        f"acceptance rate of the sparse actor, {report.n_sequences} responses, {report.n_tokens} "
        f"tokens, bounded by lists of {top_n} tokens",
        (
            "length",
            "tokens",
            "responses",
            "mean",
            "p5 between",
            "95 % interval of p5",
            str(tau),
        ),
        list(map(row, report.bins)),
    )
    print("the mean refers to the lower bound")
    if few := few_sequences(b.n_sequences for b in report.bins if b.end > dense_up_to):
        print(few)


def print_own_samples(report: MismatchReport, off_policy_T: np.ndarray) -> None:
    """Print the results of ``sparrow measure`` for samples of the dense policy. ``off_policy_T``
    holds the difference between actor and policy log-probs for each sampled token.
    """
    _print_columns(
        f"samples of the dense policy, {report.n_sequences} responses, {report.n_tokens} tokens",
        ("length", "tokens", "responses", "acceptance at the 5th percentile, at most"),
        [
            (f"{b.start}-{b.end}", str(b.n_tokens), str(b.n_sequences), f"{b.upper_bound:.3f}")
            for b in report.bins
        ],
    )
    print(
        f"log-probs of the sampled tokens differ from the policy's by {off_policy_T.mean():.1g} on "
        f"average and by {off_policy_T.max():.1g} at most"
    )


def print_ceiling(bins: Iterable[BinMismatch]) -> None:
    """Print p5, its ceiling and the relative p5 for ``sparrow measure``."""
    _print_ceiling(
        (
            b.start,
            b.end,
            (b.lower_bound, b.interval_low, b.interval_high),
            (b.ceiling, b.ceiling_low, b.ceiling_high),
        )
        for b in bins
    )


def _print_ceiling(bins: Iterable[tuple[int, int, Span, Span]]) -> None:
    """Print p5, its ceiling and the relative p5 for each bin. A bin is a tuple (start, end, p5,
    ceiling).
    """
    from sparrow.mismatch import relative_span

    def columns(span: Span) -> tuple[str, str]:
        return f"{span[0]:.3f}", f"{span[1]:.3f}-{span[2]:.3f}"

    headings = (
        "length",
        "p5",
        "ceiling",
        "95 % interval of ceiling",
        "relative p5",
        "95 % interval of relative p5",
    )
    rows = [
        (f"{start}-{end}", f"{p5[0]:.3f}", *columns(ceiling), *columns(relative_span(p5, ceiling)))
        for start, end, p5, ceiling in bins
    ]
    _print_columns(
        "p5 (lower bound), its ceiling (p5 of dense rollouts), and p5 relative to the ceiling",
        headings,
        rows,
    )


def print_drafts(counts: Mapping[str, Any]) -> None:
    """Print the acceptance of lossless drafts; ``counts`` is the ``drafts`` entry of
    ``Counters.to_dict``.
    """
    for title, measured in (
        ("exact acceptance of {} drafts", counts),
        ("exact acceptance under meter_schedule", counts.get("metered")),
    ):
        if measured is not None:
            bins = measured.get("bins", ())
            rows = [
                (f"{b['start']}-{b['end']}", str(b["drafts"]), f"{b['mean']:.3f}", f"{b['p5']:.3f}")
                for b in bins
            ]
            judged = sum(b["drafts"] for b in bins)
            _print_columns(title.format(judged), ("length", "drafts", "mean", "p5"), rows)
    Console().print(
        f"{counts['tokens_per_cycle']:.2f} tokens per cycle, {counts['drafts_per_token']:.2f} "
        "drafts per token; drafts continue text that was decoded densely, whereas a lossy "
        "actor continues text of its own"
    )


def print_modes(title: str, rows: Sequence[tuple[str, float, Mapping[str, Any]]]) -> None:
    """Print a table that compares the modes.

    Args:
        rows: for each mode, its name, the mean difference between its token log-probs and the dense
            policy's, and the counts from ``Counters.to_dict``.
    """

    def cells(counts: Mapping[str, Any]) -> tuple[str, str, str]:
        read = f"{counts['kv']['read_fraction']:.0%}"
        drafts = counts.get("drafts")
        if not drafts:
            return read, "", ""
        return (
            read,
            f"{drafts['tokens_per_cycle']:.2f}",
            f"{drafts['accepted'] / max(drafts['drafted'], 1):.0%}",
        )

    headings = ("mode", "log p error", "KV read", "tokens per cycle", "kept")
    _print_columns(
        title, headings, [(mode, f"{off:.1g}", *cells(counts)) for mode, off, counts in rows]
    )
    Console().print(
        "log p error: the mean difference between the log-probs of sampled tokens and those "
        "of the dense policy. If rounding is its only cause, samples follow the policy "
        "exactly. kept: the share of drafts that verification kept.",
        highlight=False,
    )


def print_calibration(calibration: Calibration, target: Tau, out: Path) -> None:
    """Print the results of ``sparrow calibrate``."""
    _print_columns(
        f"cheapest schedule with {target.statistic} >= {target.value:g}",
        ("length", "top-k pages", "p5", "95 % interval of p5", "tokens", "responses", ""),
        [
            (
                f"{b.start}-{b.end}",
                "all" if b.top_k >= ALL_PAGES else str(b.top_k),
                f"{b.p5:.3f}",
                f"{b.lower:.3f}-{b.upper:.3f}",
                str(b.n_tokens),
                str(b.n_sequences),
                "borrowed from shorter lengths" if b.borrowed else "",
            )
            for b in calibration.bins
        ],
    )
    _print_ceiling(
        (b.start, b.end, (b.p5, b.lower, b.upper), (b.ceiling, b.ceiling_lower, b.ceiling_upper))
        for b in calibration.bins
    )
    end = calibration.bins[-1].end
    print(f"lengths beyond {end} tokens were not measured and stay dense; wrote {out}")


def print_tuned(choices: Choices, out: Path) -> None:
    """Print the results of ``sparrow tune``."""
    target = choices.target
    _print_columns(
        f"Triton kernels on {target.gpu}: {target.kv_heads} kv heads, group {target.group}, head "
        f"dim {target.head_dim}, cache in {target.cache_dtype}",
        (
            "sequences",
            "pages",
            "as shipped, us",
            "tuned, us",
            "time saved",
            "of read limit",
            "was",
        ),
        [
            (
                str(cell.batch),
                str(m.pages),
                f"{m.shipped_us:.1f}",
                f"{m.tuned_us:.1f}",
                f"{1 - m.tuned_us / m.shipped_us:.0%}",
                f"{m.limit_us / m.tuned_us:.0%}",
                f"{m.limit_us / m.shipped_us:.0%}",
            )
            for cell in choices.cells
            for m in cell.measured
        ],
    )
    print(f"wrote {out}")
