"""The report of a run, or of two side by side: one HTML page that needs no other file, no script and no network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from math import isfinite
from pathlib import Path

import jinja2
from markupsafe import Markup

from sparrow.errors import ConfigError
from sparrow.mismatch import BinMismatch, Tau, relative_p5
from sparrow.report import theme
from sparrow.report.figures import RUNS, Figure, bin_count, figures
from sparrow.report.responses import Shown, show, steps_to_show
from sparrow.report.summary import MEANINGS, bin_name, headlines, meaning, number, result_rows, setup_rows, tau_name
from sparrow.run.log import RunLog

OF_CEILING = ("ceiling", "relative p5")
COLUMNS = ("p5", "verdict", "95 % interval", "upper bound", *OF_CEILING, "tokens", "responses")  # of the tails' table


def write_report(*run_dirs: str | Path, out: str | Path | None = None, steps: Sequence[int] = ()) -> Path:
    """Write the page of one run, or of two, finished or not.

    Args:
        run_dirs: directories of the runs.
        out: folder of the page; ``report`` in the first run's directory if left out.
        steps: the steps whose responses are shown; if left out, up to 40 from the first to the last.

    Returns:
        The page: ``index.html``, or ``against-NAME.html`` with the name of the second run.

    Raises ConfigError: not a run directory, a run without a finished step, a damaged file, two runs whose length bins
    differ, or a step that is not there.
    """
    logs = [RunLog.load(run_dir) for run_dir in run_dirs]
    widths = {log.bin_tokens: log for log in logs}
    if len(widths) > 1:
        details = " and ".join(f"{log.run_dir} has {width} tokens" for width, log in widths.items())
        raise ConfigError(f"length bins differ ({details}), so p5 cannot be compared; draw each run alone")
    responses = show(logs, steps_to_show(logs, steps), list(RUNS[: len(logs)]) if len(logs) > 1 else [""])
    folder = Path(out) if out is not None else logs[0].run_dir / "report"
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / (f"against-{_name(logs[1])}.html" if len(logs) > 1 else "index.html")
    # A tokenizer may decode half a character to something that UTF-8 cannot encode.
    page.write_text(html_page(logs, figures(logs), responses), encoding="utf-8", errors="replace")
    return page


def html_page(
    logs: Sequence[RunLog], drawn: Mapping[str, Sequence[Figure]], responses: Mapping[int, Sequence[Shown]]
) -> str:
    """The whole page, with these figures by heading and these responses by step."""
    palette = theme.palette(bin_count(logs))
    colors = {light: f"var(--{name})" for name, (light, _) in reversed(palette.items())}
    rows = [dict([*setup_rows(log), *result_rows(log)]) for log in logs]
    names = dict.fromkeys(name for row in rows for name in row)
    has_ceiling = any(isfinite(ceiling) for log in logs for _, ceiling in _bins(log))
    return _template().render(
        theme=theme,
        palette=palette,
        colors=colors,
        runs=list(zip(RUNS, map(_name, logs), strict=False)),
        headlines=[(name, meaning(name), values) for name, values in headlines(logs)],
        table=[(name, meaning(name), [row.get(name, "n/a") for row in rows]) for name in names],
        tails=[
            (log.steps[-1], tau_name(log.tau), [_tail_row(b, best, log.tau) for b, best in _bins(log)]) for log in logs
        ],
        columns=[name for name in COLUMNS if name not in OF_CEILING or has_ceiling],
        meanings=MEANINGS,
        figures={heading: [(figure, Markup(figure.svg(colors))) for figure in some] for heading, some in drawn.items()},
        responses=responses,
        last=max(responses, default=0),
    )


@cache
def _template() -> jinja2.Template:
    loader = jinja2.PackageLoader("sparrow.report", ".")
    pages = jinja2.Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    return pages.get_template("page.html")


def _name(log: RunLog) -> str:
    return log.run_dir.resolve().name


def _bins(log: RunLog) -> list[tuple[BinMismatch, float]]:
    """The bins of the last step, and the ceiling of each."""
    ceiling = log.ceiling()
    return [(b, float(ceiling[b.bin, 0])) for b in log.bins()]


def _tail_row(b: BinMismatch, ceiling: float, tau: Tau) -> dict[str, str]:
    """One row of the tails' table, by column; ``bin`` names the bin's colour."""
    known = isfinite(b.interval_low)
    return {
        "bin": f"bin-{b.bin}",
        "length": bin_name(b.start, b.end),
        "p5": number(b.lower_bound),
        "verdict": tau.verdict(b),
        "95 % interval": f"[{number(b.interval_low)}, {number(b.interval_high)}]" if known else "one response",
        "upper bound": number(b.upper_bound),
        "ceiling": number(ceiling),
        "relative p5": number(relative_p5(b.lower_bound, ceiling)),
        "tokens": f"{b.n_tokens:,}",
        "responses": f"{b.n_sequences:,}",
    }
