"""Metrics for TensorBoard, W&B and trackio: every scalar of a step, and the acceptance tail of
every length bin. The metric names are stable.
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
    """Check that every tracker's package is installed, because accelerate would silently skip a
    missing one.

    Raises ConfigError if a package is not installed.
    """
    installed = {str(tracker) for tracker in get_available_trackers()}
    if missing := [name for name in names if name not in installed]:
        raise ConfigError(
            f"trackers includes {missing[0]}, but the package {missing[0]!r} is not installed; run "
            f"pip install {missing[0]}, or remove it from trackers"
        )


def tracked(metrics: Mapping[str, Any], report: MismatchReport) -> dict[str, Any]:
    """Flatten a step's metrics to scalars with slash-joined names. ``mismatch_metrics`` flattens
    the mismatch.
    """
    up_to = metrics["dense_up_to"]
    others = {name: value for name, value in metrics.items() if name != "mismatch"}
    return flatten(others) | mismatch_metrics(report, inf if up_to is None else up_to)


def flatten(nested: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten a nested mapping to scalars with slash-joined names, for trackers."""
    return {
        name: value
        for name, value in flat(nested, "/").items()
        if isinstance(value, int | float | str)
    }
