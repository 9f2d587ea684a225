"""Metrics for TensorBoard, W&B and trackio: every scalar of a step, and the tail by length, under
stable names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from accelerate.tracking import get_available_trackers

from sparrow.errors import ConfigError
from sparrow.mismatch import MismatchReport, mismatch_metrics
from sparrow.settings import flat


def check_trackers(names: Sequence[str]) -> None:
    """Check that the packages of all trackers are installed, because accelerate would silently skip
    a missing tracker.

    Raises ConfigError if a package is not installed.
    """
    installed = {str(tracker) for tracker in get_available_trackers()}
    if missing := [name for name in names if name not in installed]:
        raise ConfigError(
            f"trackers is {' '.join(names)}, but the package {missing[0]!r} is not installed; run "
            f"pip install {missing[0]}, or leave it out"
        )


def tracked(metrics: Mapping[str, Any], report: MismatchReport) -> dict[str, Any]:
    """Collect the scalars of a step's metrics, under names joined with slashes. For the mismatch,
    these are the ``mismatch_metrics``.
    """
    up_to = metrics["dense_up_to"]
    others = {name: value for name, value in metrics.items() if name != "mismatch"}
    return flatten(others) | mismatch_metrics(report, inf if up_to is None else up_to)


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Collect the scalars of a nested mapping, under names joined with slashes, for trackers."""
    return {
        name: value
        for name, value in flat(nested, "/").items()
        if isinstance(value, int | float | str)
    }
