"""``sparrow report``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from sparrow.commands.base import Command


@dataclass(frozen=True)
class Report(Command):
    """Draw a run as figures and one self-contained HTML page, or a calibrated schedule as a figure."""

    path: Annotated[Path, tyro.conf.Positional]  # A run directory, or a schedule from sparrow calibrate.

    def run(self) -> None:
        from sparrow.report import draw_calibration, write_report
        from sparrow.terminal import say

        drawn = draw_calibration(self.path) if self.path.is_file() else write_report(self.path)
        say(f"wrote {drawn}")
