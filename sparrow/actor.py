"""The old place of ``sparrow.model.actor``; goes with the next release."""

import warnings

from sparrow.model.actor import (
    NAME,
    ScheduleTable,
    keep_attention,
    set_schedule,
    sparrow_attention,
    sparse_calls,
    teacher_forced,
)

__all__ = [
    "NAME",
    "ScheduleTable",
    "keep_attention",
    "set_schedule",
    "sparrow_attention",
    "sparse_calls",
    "teacher_forced",
]

warnings.warn("sparrow.actor has moved; import from sparrow.model.actor", DeprecationWarning, stacklevel=2)
