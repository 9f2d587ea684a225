"""What the command line shows: a progress bar and tables. Imports rich, and only when something is shown."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Progress:
    """A progress bar for training, told of events as ``trainer.Listener``."""

    def __init__(self, steps: int, shown: bool = True) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[note]}"),
            console=console(stderr=True),
            disable=not shown,
        )
        self._task = self._bar.add_task("starting", total=steps, note="")

    def __enter__(self) -> Progress:
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.__exit__(*exception)

    def __call__(self, event: str, metrics: dict[str, Any]) -> None:
        if event == "step":
            bins = metrics["mismatch"]["bins"]
            # Bins that hardly any response reaches jump about.
            tail = min(b["lower_bound"] for b in bins if 2 * b["n_sequences"] >= bins[0]["n_sequences"])
            reward, read = metrics["reward"]["mean"], metrics["kv"]["read_fraction"]
            note = f"reward {reward:.3f}  lowest p5 {tail:.3f}  KV read {read:.0%}"
            self._bar.update(self._task, completed=metrics["step"], note=note)
        else:
            self._bar.update(self._task, description=event)


class CalibrationProgress:
    """A progress bar for a calibration, told of each pass and of the seconds left as it begins."""

    def __init__(self) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.TimeElapsedColumn(),
            progress.TextColumn("{task.fields[left]}"),
            console=console(stderr=True),
        )
        self._task = self._bar.add_task("starting", total=None, left="")

    def __enter__(self) -> CalibrationProgress:
        self._bar.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._bar.__exit__(*exception)

    def __call__(self, phase: str, left: float) -> None:
        from math import isnan

        spent = self._bar.tasks[self._task].elapsed or 0.0
        if isnan(left):
            self._bar.update(self._task, description=phase)
        else:
            note = f"about {left / 60:.0f} min left" if left >= 90 else f"about {left:.0f} s left"
            self._bar.update(self._task, description=phase, completed=spent, total=spent + left, left=note)


def print_summary(run_dir: Path) -> None:
    from rich.table import Table

    from sparrow.report import summary_rows

    table = Table(title=f"run {run_dir}", show_header=False)
    for row in summary_rows(run_dir):
        table.add_row(*row)
    terminal = console()
    terminal.print(table)
    terminal.print(f"figures: sparrow report {run_dir}")


def print_mismatch(found: Any, tau: float, read_fraction: float) -> None:
    from rich.table import Table

    table = Table(title=f"acceptance rate of the sparse actor, {found.n_sequences} responses, {found.n_tokens} tokens")
    for heading in ("length", "tokens", "responses", "mean", "p5", "95 % interval", "at most", f"holds {tau:g}"):
        table.add_column(heading, justify="right")
    for b in found.bins:
        holds = "yes" if b.interval_low >= tau else "no" if b.interval_high < tau else "unsure"
        table.add_row(
            f"{b.start}-{b.end}", str(b.n_tokens), str(b.n_sequences), f"{b.mean:.3f}", f"{b.lower_bound:.3f}",
            f"{b.interval_low:.3f}-{b.interval_high:.3f}", f"{b.upper_bound:.3f}", holds,
        )  # fmt: skip
    terminal = console()
    terminal.print(table)
    terminal.print(f"mean {found.mean:.4f}, share of the KV cache read {read_fraction:.1%}")
    if found.beta_tail is not None:
        tail = found.beta_tail
        fit = f"Beta({tail.a:.2f}, {tail.b:.2f}), KS {tail.ks:.3f}"
        terminal.print(f"tail below {tail.cut}: {tail.fraction_in_tail:.1%} of tokens, {fit}")


def print_calibration(found: Any, target: float, out: Path) -> None:
    from rich.table import Table

    from sparrow.schedule import ALL_PAGES

    table = Table(title=f"cheapest schedule with p5 >= {target:g}")
    for heading in ("length", "top-k pages", "p5", "95 % interval", "tokens", "responses", ""):
        table.add_column(heading, justify="right")
    for b in found.bins:
        table.add_row(
            f"{b.start}-{b.end}",
            "all" if b.top_k >= ALL_PAGES else str(b.top_k),
            f"{b.p5:.3f}",
            f"{b.lower:.3f}-{b.upper:.3f}",
            str(b.n_tokens),
            str(b.n_sequences),
            "borrowed from shorter lengths" if b.borrowed else "",
        )
    terminal = console()
    terminal.print(table)
    terminal.print(f"dense beyond {found.bins[-1].end} tokens, which were not measured; wrote {escape(str(out))}")


def console(stderr: bool = False) -> Any:
    from rich.console import Console

    return Console(stderr=stderr)


def escape(text: str) -> str:
    """Text as it is, whatever brackets it holds."""
    from rich import markup

    return markup.escape(text)
