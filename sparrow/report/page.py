"""The report on one run, or on two runs side by side: a single HTML page without scripts or
external resources.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isfinite
from pathlib import Path

import jinja2

from sparrow.errors import ConfigError
from sparrow.mismatch import BinMismatch, Tau, relative_p5
from sparrow.report import theme
from sparrow.report.curves import RUNS
from sparrow.report.figures import Figure, figures
from sparrow.report.responses import Shown, show, steps_to_show
from sparrow.report.summary import bin_name, number, result_rows, setup_rows
from sparrow.run.log import RunLog


def write_report(
    *run_dirs: str | Path, out: str | Path | None = None, steps: Sequence[int] = ()
) -> Path:
    """Write the report on one or two runs, which may still be running.

    Args:
        run_dirs: directories of the runs.
        out: folder for the page; by default ``report`` in the first run's directory.
        steps: the steps to show responses from; by default, up to 40 spread over the whole run.

    Returns:
        The path of the page: ``index.html``, or ``against-NAME.html``, where NAME is the second
        run.

    Raises ConfigError if there are more than two runs, a folder is not a run directory, a run has
    no finished step, a file is damaged, the two runs have different length bins, or a step is not
    in the log.
    """
    if not 1 <= len(run_dirs) <= len(RUNS):
        raise ConfigError(f"a report shows one or two runs, got {len(run_dirs)}; pass one or two")
    logs = [RunLog.load(run_dir) for run_dir in run_dirs]
    widths = {log.bin_tokens: log for log in logs}
    if len(widths) > 1:
        details = " and ".join(f"{width} tokens in {log.run_dir}" for width, log in widths.items())
        raise ConfigError(
            f"length bins differ ({details}), so p5 cannot be compared; make one report per run"
        )
    responses = show(
        logs, steps_to_show(logs, steps), list(RUNS[: len(logs)]) if len(logs) > 1 else [""]
    )
    folder = Path(out) if out is not None else logs[0].run_dir / "report"
    folder.mkdir(parents=True, exist_ok=True)
    page = folder / (f"against-{_name(logs[1])}.html" if len(logs) > 1 else "index.html")
    # A token may be part of a character, which can't be encoded as UTF-8.
    page.write_text(html_page(logs, figures(logs), responses), encoding="utf-8", errors="replace")
    return page


def html_page(
    logs: Sequence[RunLog],
    drawn: Mapping[str, Sequence[Figure]],
    responses: Mapping[int, Sequence[Shown]],
) -> str:
    """Render the page. ``drawn`` maps headings to figures, and ``responses`` maps steps to
    responses.
    """
    rows = [dict([*setup_rows(log), *result_rows(log)]) for log in logs]
    names = dict.fromkeys(name for row in rows for name in row)
    pages = jinja2.Environment(
        loader=jinja2.PackageLoader("sparrow.report", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return pages.get_template("page.html").render(
        theme=theme,
        runs=list(zip(RUNS, map(_name, logs), strict=False)),
        table=[(name, [row.get(name, "n/a") for row in rows]) for name in names],
        tails=[
            (letter, log.steps[-1], [_tail_row(b, log.tau) for b in bins])
            for letter, log in zip(RUNS, logs, strict=False)
            if log.is_sparse and (bins := log.sparse_bins())
        ],
        coloured=any(one.is_coloured for some in responses.values() for one in some),
        figures=drawn,
        responses=responses,
        last=max(responses, default=0),
    )


def _name(log: RunLog) -> str:
    return log.run_dir.resolve().name


def _tail_row(b: BinMismatch, tau: Tau) -> dict[str, str]:
    """Build one row of the tail table, as column -> text."""
    known = isfinite(b.interval_low)
    return {
        "length": bin_name(b.start, b.end),
        "p5": b.p5,
        f"against {tau}": tau.verdict(b),
        "95 % interval": f"[{number(b.interval_low)}, {number(b.interval_end)}]"
        if known
        else "one response",
        "ceiling": number(b.ceiling),
        "relative p5": number(relative_p5(b.lower_bound, b.ceiling)),
        "tokens": f"{b.n_tokens:,}",
        "responses": f"{b.n_sequences:,}",
    }
