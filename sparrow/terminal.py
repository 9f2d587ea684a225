"""What the command line shows: tables, and progress as bars on a terminal and as lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from rich import box, progress
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from sparrow.schedule import ALL_PAGES

if TYPE_CHECKING:
    from sparrow.calibrate import Calibration
    from sparrow.mismatch import MismatchReport
    from sparrow.mismatch.tau import Span, Tau

NARROW = 60  # columns below which a bar and its times would leave no room for their description
QUIET_S = 30.0  # when a step takes longer, its phases are logged too


class _Shown:
    """Progress on stderr, in a ``with`` block: a bar on a terminal, else lines, each flushed at once."""

    def __init__(self, total: int | None, shown: bool, *, counts: bool) -> None:
        self._console = Console(stderr=True)
        self._shown, self._began = shown, time.monotonic()
        self._bar: progress.Progress | None = None
        if shown and self._console.is_terminal:
            columns: list[progress.ProgressColumn] = [progress.SpinnerColumn()]
            wide = self._console.width >= NARROW
            if counts:
                columns.append(progress.MofNCompleteColumn())
            columns.append(progress.TextColumn("{task.description}"))
            if wide:
                columns += [progress.BarColumn(bar_width=None), progress.TimeElapsedColumn()]
                columns += [progress.TimeRemainingColumn()] if counts else []
            # A bar without counts only shows what is going on, and is erased at the end.
            self._bar = progress.Progress(*columns, console=self._console, expand=wide, transient=not counts)
            self._task = self._bar.add_task("starting", total=total)

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar:
            self._bar.stop()

    def _line(self, text: str) -> None:
        """Print a line, above the bar if there is one."""
        if not self._shown:
            return
        if self._bar:
            self._bar.console.print(escape(text), highlight=False)  # a long line is broken between words
        else:
            print(text, file=sys.stderr, flush=True)

    def _show(self, description: str, **update: Any) -> None:
        if self._bar:
            self._bar.update(self._task, description=escape(description), **update)


class Status(_Shown):
    """What is going on, of unknown length."""

    def __init__(self, text: str, shown: bool = True) -> None:
        super().__init__(None, shown, counts=False)
        self.update(text)

    def update(self, text: str) -> None:
        self._show(text)
        if not self._bar:
            self._line(text)


class Progress(_Shown):
    """Progress of training, a ``trainer.Listener``: a line for each step, and a bar on a terminal."""

    def __init__(self, steps: int, shown: bool = True) -> None:
        super().__init__(steps, shown, counts=True)
        self._steps, self._done, self._seconds = steps, 0, 0.0

    def __call__(self, event: str, metrics: dict[str, Any]) -> None:
        if event == "step":
            self._done, self._seconds = metrics["step"], sum(metrics["seconds"].values())
            self._line(f"step {self._done}/{self._steps}  {step_line(metrics)}")
            self._show("", completed=self._done)
        elif event == "progress":
            self._show(phase_line(metrics))
        elif event == "evaluated":
            means = ", ".join(f"{name} {scores['mean']['value']:.3f}" for name, scores in metrics.items())
            self._line(f"step {self._done}/{self._steps}  evaluation {means}")
        else:
            self._show(event)
            if not self._bar and (self._seconds > QUIET_S or not self._done):
                self._line(f"step {self._done + 1}/{self._steps}  {event}  {time.monotonic() - self._began:.0f} s")


def phase_line(progress: dict[str, Any]) -> str:
    """How far a phase of a step has got, short enough for a narrow terminal."""
    phase, done, of = progress["phase"], progress["done"], progress["of"]
    if "tokens" in progress:  # while responses are sampled
        return f"{phase} {done}/{of}, {brief(progress['tokens'])} tokens"
    if phase == "verify":  # this phase does not report how many are done
        return f"verify {of} responses"
    return f"{phase} {done + 1}/{of}"


def brief(count: int) -> str:
    """A count in at most four digits: 950, 12.3k, 1.2M."""
    for unit, size in (("G", 10**9), ("M", 10**6), ("k", 10**3)):
        if count >= size:
            return f"{count / size:.3g}{unit}" if count < 999.5 * size else f"{count / size:.0f}{unit}"
    return str(count)


def step_line(metrics: dict[str, Any]) -> str:
    """A step in a few numbers: reward, tail of acceptance, response length, speed, share of the KV cache read."""
    bins, seconds, response = metrics["mismatch"]["bins"], metrics["seconds"], metrics["response"]
    # Bins that few responses reach are left out: their p5 is noisy.
    tail = min(b["lower_bound"] for b in bins if 2 * b["n_sequences"] >= bins[0]["n_sequences"])
    speed = response["tokens"] / max(seconds["rollout"], 1e-9)
    return (
        f"reward {metrics['reward']['mean']:.3f}  lowest p5 {tail:.3f}  length {response['mean']:.0f}  "
        f"{speed:,.0f} tokens/s  KV read {metrics['kv']['read_fraction']:.0%}  {sum(seconds.values()):.1f} s"
    )


class CalibrationProgress(_Shown):
    """Progress of a calibration, called at the start of each pass with its name and the seconds left."""

    def __init__(self) -> None:
        super().__init__(None, True, counts=False)

    def __call__(self, phase: str, left: float) -> None:
        text = phase
        if not isnan(left):
            text += f", about {left / 60:.0f} min left" if left >= 90 else f", about {left:.0f} s left"
        self._show(text)
        if not self._bar:
            self._line(text)


def say(text: str) -> None:
    """Print lines without wrapping them: a path that is broken in two cannot be copied."""
    Console().print(escape(text), soft_wrap=True)


def complain(reason: str) -> None:
    """Why a command stops, on stderr."""
    Console(stderr=True).print(f"[bold red]sparrow:[/] {escape(reason)}", soft_wrap=True)


def status(text: str, shown: bool = True) -> Status:
    """What is going on, on stderr, in a ``with`` block."""
    return Status(text, shown)


def print_rows(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A table of names and values."""
    table = Table(title=escape(title), show_header=False)
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    Console().print(table)


def _print_columns(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=heading == headings[0])  # first cells stay on one line
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_records(headings: Sequence[str], records: Sequence[Sequence[str]]) -> None:
    """Print one table or, on a terminal too narrow for it, a table of names and values for each record.

    Away from a terminal, the table is as wide as it needs to be.
    """
    console = Console()
    width = 3 * len(headings) + sum(max(map(len, column)) for column in zip(headings, *records, strict=True))
    if console.is_terminal and width > console.width:
        for record in records:
            print_rows(record[0], list(zip(headings[1:], record[1:], strict=True)))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    for record in records:
        table.add_row(*map(escape, record))
    Console(width=max(width, console.width)).print(table)


def print_mismatch(report: MismatchReport, tau: Tau, read_fraction: float) -> None:
    """Print the results of ``sparrow measure``."""
    _print_columns(
        f"acceptance rate of the sparse actor, {report.n_sequences} responses, {report.n_tokens} tokens",
        ("length", "tokens", "responses", "mean", "p5", "95 % interval", "at most", str(tau)),
        [
            (
                f"{b.start}-{b.end}", str(b.n_tokens), str(b.n_sequences), f"{b.mean:.3f}", f"{b.lower_bound:.3f}",
                f"{b.interval_low:.3f}-{b.interval_high:.3f}", f"{b.upper_bound:.3f}", tau.verdict(b),
            )
            for b in report.bins
        ],
    )  # fmt: skip
    _print_ceiling(
        (b.start, b.end, (b.lower_bound, b.interval_low, b.interval_high), (b.ceiling, b.ceiling_low, b.ceiling_high))
        for b in report.bins
    )
    Console().print(f"mean {report.mean:.4f}, share of the KV cache read {read_fraction:.1%}")
    if tail := report.beta_tail:
        fit = f"Beta({tail.a:.2f}, {tail.b:.2f}), KS {tail.ks:.3f}"
        Console().print(f"tail below {tail.cut}: {tail.fraction_in_tail:.1%} of tokens, {fit}")


def _print_ceiling(bins: Iterable[tuple[int, int, Span, Span]]) -> None:
    """Print p5, its ceiling and the relative p5 by bin; ``bins`` has start, end, p5 and ceiling of each."""
    from sparrow.mismatch import relative_span

    def columns(span: Span) -> tuple[str, str]:
        return f"{span[0]:.3f}", f"{span[1]:.3f}-{span[2]:.3f}"

    _print_columns(
        "p5 beside its ceiling, that of dense rollouts, and relative to it",
        ("length", "p5", "ceiling", "95 % interval", "relative p5", "95 % interval"),
        [
            (f"{start}-{end}", f"{p5[0]:.3f}", *columns(ceiling), *columns(relative_span(p5, ceiling)))
            for start, end, p5, ceiling in bins
        ],
    )


def print_drafts(counts: Mapping[str, Any]) -> None:
    """Print the acceptance of lossless drafts; ``counts`` is the ``drafts`` part of ``Counters.to_dict``."""
    for title, measured in (
        (f"drafts by exact acceptance, {counts['drafted']} drafted", counts),
        ("meter_schedule by exact acceptance", counts.get("metered")),
    ):
        if measured is not None:
            _print_columns(
                title,
                ("length", "drafts", "mean", "p5"),
                [
                    (f"{b['start']}-{b['end']}", str(b["drafts"]), f"{b['mean']:.3f}", f"{b['p5']:.3f}")
                    for b in measured.get("bins", ())
                ],
            )
    Console().print(
        f"{counts['tokens_per_cycle']:.2f} tokens a cycle, {counts['drafts_per_token']:.2f} drafts a token; all "
        "have a dense history, which a lossy actor does not"
    )


def print_modes(title: str, rows: Sequence[tuple[str, float, Mapping[str, Any]]]) -> None:
    """Print the modes side by side. Each row is the mode, the mean distance of a token's log-prob from the dense
    policy's, and counts in the form of ``Counters.to_dict``."""

    def cells(counts: Mapping[str, Any]) -> tuple[str, str, str]:
        read, drafts = f"{counts['kv']['read_fraction']:.0%}", counts.get("drafts")
        if not drafts:
            return read, "", ""
        return read, f"{drafts['tokens_per_cycle']:.2f}", f"{drafts['accepted'] / max(drafts['drafted'], 1):.0%}"

    _print_columns(
        title,
        ("mode", "log p off by", "KV read", "tokens a cycle", "kept"),
        [(mode, f"{off:.1g}", *cells(counts)) for mode, off, counts in rows],
    )
    Console().print(
        "log p off by: how far tokens' log-probs are from the dense policy's, on average; where that is rounding only, "
        "samples are exactly the policy's; kept: drafts that verification kept",
        highlight=False,
    )


def print_calibration(calibration: Calibration, target: Tau, out: Path) -> None:
    """Print the results of ``sparrow calibrate``."""
    _print_columns(
        f"cheapest schedule with {target.statistic} >= {target.value:g}",
        ("length", "top-k pages", "p5", "95 % interval", "tokens", "responses", ""),
        [
            (
                f"{b.start}-{b.end}", "all" if b.top_k >= ALL_PAGES else str(b.top_k), f"{b.p5:.3f}",
                f"{b.lower:.3f}-{b.upper:.3f}", str(b.n_tokens), str(b.n_sequences),
                "borrowed from shorter lengths" if b.borrowed else "",
            )
            for b in calibration.bins
        ],
    )  # fmt: skip
    _print_ceiling(
        (b.start, b.end, (b.p5, b.lower, b.upper), (b.ceiling, b.ceiling_lower, b.ceiling_upper))
        for b in calibration.bins
    )
    beyond = f"dense beyond {calibration.bins[-1].end} tokens, which were not measured"
    say(f"{beyond}; wrote {out}")
