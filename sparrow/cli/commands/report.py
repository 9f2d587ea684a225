"""``sparrow report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sparrow.cli.commands.base import Command
from sparrow.errors import ConfigError
from sparrow.settings import Count


@dataclass(frozen=True)
class Report(Command):
    """Draw one run, or two runs side by side, as a self-contained HTML page. A calibrated schedule
    or a measurement is drawn as a figure.
    """

    # A run directory, a schedule from sparrow calibrate, or a file from sparrow measure --out.
    path: Annotated[Path, tyro.conf.Positional]
    # A second run to show next to the first.
    other: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="OTHER")] = None
    # Steps whose responses are shown. By default, up to 40 steps spread over the run.
    steps: tuple[Count, ...] = ()

    def run(self) -> None:
        from sparrow.report import (
            draw_calibration,
            draw_measurement,
            read_measurement,
            write_report,
        )

        runs = [path for path in (self.path, self.other) if path is not None]
        if self.path.is_file():
            if len(runs) > 1 or self.steps:
                raise ConfigError(
                    f"{self.path} is a file, not a run, so it cannot be compared and has no steps; "
                    "pass it alone, without a second run or --steps"
                )
            measured = read_measurement(self.path)
            if measured is None:
                drawn = draw_calibration(self.path)
            else:
                drawn = draw_measurement(measured, self.path.with_suffix(".png"))
        elif missing := [path for path in runs if not path.exists()]:
            raise ConfigError(
                f"{missing[0]} does not exist; pass a run directory, "
                "or a file from sparrow calibrate or sparrow measure"
            )
        else:
            drawn = write_report(*runs, steps=self.steps)
        print(f"wrote {drawn}")
