"""Draw a report from ``sparrow measure``: acceptance in each length bin, and a histogram."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from sparrow.errors import ConfigError
from sparrow.mismatch import Tau, few_sequences
from sparrow.report import theme
from sparrow.report.summary import bin_name, describe_schedule
from sparrow.schedule import SparsitySchedule

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def read_measurement(path: Path) -> dict[str, Any] | None:
    """Read a report from ``sparrow measure --out``. Return None if the file is a schedule.

    Raises ConfigError if the file is neither.
    """
    report = _load(path)
    if _is_report(report):
        return report
    if "top_k" in report:
        return None
    raise ConfigError(
        f"{path} is neither a schedule nor a measurement; pass a run directory, or a file from "
        "sparrow calibrate or sparrow measure"
    )


def is_measurement(path: Path) -> bool:
    """Return whether there is such a file, and it is a report from ``sparrow measure --out``."""
    return path.is_file() and _is_report(_load(path))


def _load(path: Path) -> dict[str, Any]:
    """Load a JSON object. If the file contains anything else, return an empty one."""
    try:
        report = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return {}
    return report if isinstance(report, dict) else {}


def _is_report(report: Mapping[str, Any]) -> bool:
    return {"bins", "histogram"} <= report.keys()


def draw_measurement(report: Mapping[str, Any], out: Path) -> Path:
    """Draw a report from ``sparrow measure`` and save it as a PNG at ``out``."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(theme.MATPLOTLIB):
        figure = Figure(figsize=(8.6, 3.4), layout="constrained")
        tail, distribution = figure.subplots(1, 2)
        if made_by := report.get("provenance"):  # older files lack it
            figure.suptitle(_title(made_by), fontsize=9)
        _draw_tail(tail, report)
        _draw_distribution(distribution, report)
        figure.legend(
            loc="outside lower left",
            ncols=4,
            title=few_sequences(b["n_sequences"] for b in report["bins"]),
            title_fontsize=8,
            alignment="left",
        )
        figure.savefig(out, dpi=160, metadata={"Software": None})
    return out


def _title(made_by: Mapping[str, Any]) -> str:
    """Describe what was measured: the model, how it decoded, and the temperature."""
    how = describe_schedule(SparsitySchedule.from_dict(made_by["schedule"]))
    if made_by["mode"] == "lossless":
        how = f"lossless with drafts by {how}"
    return f"{made_by['model']}, {how}, temperature {made_by['temperature']:g}"


def _draw_tail(axes: Axes, report: Mapping[str, Any]) -> None:
    """Draw each length bin's mean, p5 with its interval, ceiling and tau. Unknown values (None) are
    skipped, and so is tau if all samples follow the dense policy.
    """
    bins = report["bins"]
    rows = np.array(
        [
            [
                b["mean"],
                b["lower_bound"],
                b["interval_low"],
                b.get("upper_bound_high", b["interval_high"]),  # older files lack it
                b["ceiling"],
            ]
            for b in bins
        ],
        dtype=float,
    )
    mean, p5, low, high, ceiling = rows.T
    place = np.arange(len(bins))
    axes.hlines(ceiling, place - 0.2, place + 0.2, color=theme.MUTED, label="ceiling")
    if report.get("dense_up_to", 0) is not None:
        tau = _tau(report)
        levels = [tau.level(c) for c in ceiling]
        axes.hlines(
            levels,
            place - 0.5,
            place + 0.5,
            color=theme.INK,
            linewidth=1,
            linestyle=(0, (4, 3)),
            label=str(tau),
        )
    axes.plot(place, mean, marker="s", color=theme.SERIES[2], label="mean")
    axes.vlines(place, low, high, color=theme.SERIES[0], linewidth=4, alpha=0.4)
    axes.plot(place, p5, marker="o", color=theme.SERIES[0], label="p5, 95 % interval")
    axes.set_xticks(place, [bin_name(b["start"], b["end"]) for b in bins])
    axes.set_xlim(-0.6, len(bins) - 0.4)
    axes.set_xlabel("tokens in the sequence")
    axes.set_ylabel("acceptance rate")
    axes.set_title("by length", fontsize=9)


def _tau(report: Mapping[str, Any]) -> Tau:
    """Return the target of the measurement; older files, which lack it, get the published one."""
    made_by = report.get("provenance", {"tau": 0.86, "relative_tau": None})
    return Tau.chosen(made_by["tau"], made_by["relative_tau"])


def _draw_distribution(axes: Axes, report: Mapping[str, Any]) -> None:
    counts = np.array(report["histogram"]["counts"], dtype=float)
    axes.stairs(counts / counts.sum(), report["histogram"]["edges"], color=theme.SERIES[0])
    axes.set_yscale("log")
    axes.set_xlabel("acceptance rate")
    axes.set_ylabel("share of tokens")
    axes.set_title(
        f"all lengths, {report['n_tokens']:,} tokens, {report['n_sequences']} responses",
        fontsize=9,
    )
