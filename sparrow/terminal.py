"""What the command line shows: progress bars and tables."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich import box, progress
from rich.console import Console
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from sparrow.schedule import ALL_PAGES

if TYPE_CHECKING:
    from sparrow.calibrate import Calibration
    from sparrow.mismatch import MismatchReport


class _Bar(progress.Progress):
    """A progress bar on stderr, in a ``with`` block."""

    def __init__(self, total: int | None, *columns: progress.ProgressColumn, shown: bool = True) -> None:
        named = progress.TextColumn("{task.description}")
        noted = progress.TextColumn("{task.fields[note]}")
        super().__init__(named, progress.BarColumn(), *columns, noted, console=Console(stderr=True), disable=not shown)
        self._bar = self.add_task("starting", total=total, note="")


class Progress(_Bar):
    """A progress bar for training, told of events as ``trainer.Listener``."""

    def __init__(self, steps: int, shown: bool = True) -> None:
        columns = progress.MofNCompleteColumn(), progress.TimeElapsedColumn(), progress.TimeRemainingColumn()
        super().__init__(steps, *columns, shown=shown)

    def __call__(self, event: str, metrics: dict[str, Any]) -> None:
        if event == "step":
            bins = metrics["mismatch"]["bins"]
            # Bins that hardly any response reaches jump about.
            tail = min(b["lower_bound"] for b in bins if 2 * b["n_sequences"] >= bins[0]["n_sequences"])
            reward, read = metrics["reward"]["mean"], metrics["kv"]["read_fraction"]
            note = f"reward {reward:.3f}  lowest p5 {tail:.3f}  KV read {read:.0%}"
            self.update(self._bar, completed=metrics["step"], note=note)
        else:
            self.update(self._bar, description=event)


class CalibrationProgress(_Bar):
    """A progress bar for a calibration, told of each pass and of the seconds left as it begins."""

    def __init__(self) -> None:
        super().__init__(None, progress.TimeElapsedColumn())

    def __call__(self, phase: str, left: float) -> None:
        spent = self.tasks[self._bar].elapsed or 0.0
        if isnan(left):
            self.update(self._bar, description=phase)
        else:
            note = f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left"
            self.update(self._bar, description=phase, completed=spent, total=spent + left, note=note)


def say(text: str) -> None:
    """One line, or several, as they are."""
    Console().print(escape(text))


def complain(reason: str) -> None:
    """Why a command stops, on stderr."""
    Console(stderr=True).print(f"[bold red]sparrow:[/] {escape(reason)}")


def status(text: str) -> Status:
    """What is going on, on stderr, in a ``with`` block."""
    return Console(stderr=True).status(text)


def print_rows(title: str, rows: Sequence[tuple[str, str]]) -> None:
    """A table of names and values."""
    table = Table(title=escape(title), show_header=False)
    for name, value in rows:
        table.add_row(escape(name), escape(value))
    Console().print(table)


def _print_columns(title: str, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(title=title, box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False, show_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def print_mismatch(found: MismatchReport, tau: float, read_fraction: float) -> None:
    """What ``sparrow measure`` found."""
    _print_columns(
        f"acceptance rate of the sparse actor, {found.n_sequences} responses, {found.n_tokens} tokens",
        ("length", "tokens", "responses", "mean", "p5", "95 % interval", "at most", f"tau {tau:g}"),
        [
            (
                f"{b.start}-{b.end}", str(b.n_tokens), str(b.n_sequences), f"{b.mean:.3f}", f"{b.lower_bound:.3f}",
                f"{b.interval_low:.3f}-{b.interval_high:.3f}", f"{b.upper_bound:.3f}", b.verdict(tau),
            )
            for b in found.bins
        ],
    )  # fmt: skip
    Console().print(f"mean {found.mean:.4f}, share of the KV cache read {read_fraction:.1%}")
    if tail := found.beta_tail:
        fit = f"Beta({tail.a:.2f}, {tail.b:.2f}), KS {tail.ks:.3f}"
        Console().print(f"tail below {tail.cut}: {tail.fraction_in_tail:.1%} of tokens, {fit}")


def print_calibration(found: Calibration, target: float, out: Path) -> None:
    """What ``sparrow calibrate`` found."""
    _print_columns(
        f"cheapest schedule with p5 >= {target:g}",
        ("length", "top-k pages", "p5", "95 % interval", "tokens", "responses", ""),
        [
            (
                f"{b.start}-{b.end}", "all" if b.top_k >= ALL_PAGES else str(b.top_k), f"{b.p5:.3f}",
                f"{b.lower:.3f}-{b.upper:.3f}", str(b.n_tokens), str(b.n_sequences),
                "borrowed from shorter lengths" if b.borrowed else "",
            )
            for b in found.bins
        ],
    )  # fmt: skip
    beyond = f"dense beyond {found.bins[-1].end} tokens, which were not measured"
    say(f"{beyond}; wrote {out}")
