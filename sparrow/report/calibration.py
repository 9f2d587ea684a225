"""Draw a calibrated schedule: each tried budget's p5 at each length, and the chosen budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from sparrow.errors import ConfigError
from sparrow.mismatch import Tau
from sparrow.report import theme
from sparrow.schedule import ALL_PAGES, SparsitySchedule


def draw_calibration(schedule_file: Path, out: Path | None = None) -> Path:
    """Draw a schedule from ``sparrow calibrate`` as a PNG. The file is written to ``out``, or next
    to the schedule if ``out`` is None.

    Raises ConfigError if the schedule has no measurements from a calibration.
    """
    schedule = SparsitySchedule.load(schedule_file)
    evidence = schedule.provenance
    if "curves" not in evidence:
        raise ConfigError(
            f"{schedule_file} contains no measurements; pass a schedule that was written by "
            "sparrow calibrate"
        )
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(theme.MATPLOTLIB):
        figure = Figure(figsize=(7.2, 4.0), layout="constrained")
        axes = figure.subplots()
        curves = {
            tuple(map(int, k.split())): np.array(rows, dtype=float)
            for k, rows in evidence["curves"].items()
        }
        colours = matplotlib.colormaps["Blues"](np.linspace(0.3, 0.95, len(curves)))
        labelled = -1.0
        for (k, rows), colour in zip(sorted(curves.items()), colours, strict=True):
            middle = rows[:, :2].mean(1)
            p5, low, high = _spread(rows[:, 2:].T)
            axes.plot(middle, p5, color=colour, linewidth=1.4)
            axes.fill_between(middle, low, high, color=colour, alpha=0.15, linewidth=0)
            if p5[-1] > labelled + 0.05:  # skip labels that would overlap
                label = "-".join(str(p) for p in sorted({k[0], k[-1]}) if p < ALL_PAGES)
                axes.annotate(
                    f" {label}", (middle[-1], p5[-1]), color=colour, fontsize=8, va="center"
                )
                labelled = p5[-1]
        tau = Tau.chosen(evidence.get("target"), evidence.get("relative_target"))
        # The curves show measured p5, so convert a relative target to measured p5. The result
        # depends on each bin's ceiling.
        if tau.relative:
            ends = np.array([[b["start"], b["end"]] for b in evidence["bins"]])
            held = _spread([tau.level(b["ceiling"]) for b in evidence["bins"]])
            axes.hlines(held, *ends.T, color=theme.MUTED, linewidth=1, linestyle="--")
        else:
            axes.axhline(_spread(tau.value), color=theme.MUTED, linewidth=1, linestyle="--")
        path = [
            ((b["start"] + b["end"]) / 2, _spread(b["p5"]))
            for b in evidence["bins"]
            if b["top_k"] < ALL_PAGES
        ]
        if path:
            axes.plot(
                *zip(*path, strict=True),
                color=theme.SERIES[1],
                linewidth=2.4,
                marker="o",
                label="chosen schedule",
            )
            axes.legend(loc="lower left")
        axes.set_xlabel("tokens in the cache")
        axes.set_ylabel("p5 of the acceptance rate")
        ticks = (0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)
        axes.set_yticks([_spread(tick) for tick in ticks], [f"{tick:g}" for tick in ticks])
        axes.set_title("top-k pages kept, by line", fontsize=9, loc="right", color=theme.MUTED)
        target = out or schedule_file.with_suffix(".png")
        figure.savefig(target, dpi=160, metadata={"Software": None})
    return target


def _spread(p5: Any) -> Any:
    """Map acceptance to minus the log of the rejected share, to spread out values near 1."""
    return -np.log10(1 - np.clip(p5, 0, 0.9995))
