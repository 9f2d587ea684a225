"""The scheduler's choice of drafts, and how it reaches the speculator.

vLLM's scheduler and workers may be different processes. A worker learns about a step from vLLM's
pickled ``SchedulerOutput``, which has a field for the number of drafts only. The choice therefore
travels as an extra attribute of that object, which only this module knows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_ATTRIBUTE = "sparrow_plan"


class DraftPlan(NamedTuple):
    """The drafts that follow a step."""

    tokens: int  # of each sequence, 0 for none
    budget: int  # what the drafts read: an index of ``Runtime.budgets``


class _Planned(NamedTuple):
    drafts: DraftPlan
    verified: DraftPlan


def attach(scheduled: Any, drafts: DraftPlan, verified: DraftPlan) -> None:
    """Attach to a step the plan of the drafts that follow it, and of those that it verifies.

    Args:
        scheduled: vLLM's ``SchedulerOutput`` of the step.
    """
    setattr(scheduled, _ATTRIBUTE, _Planned(drafts, verified))


def drafts_after(scheduled: Any, before: DraftPlan) -> DraftPlan:
    """Return the plan of the drafts that follow a step; without one, the budget ``before`` it
    stays.

    Steps have no plan in vLLM's warm-up, where the number of drafts does not adapt, and where the
    scheduler repeats its choice. The number of tokens is always vLLM's: its scheduler has made room
    for that many.
    """
    planned: _Planned | None = getattr(scheduled, _ATTRIBUTE, None)
    budget = before.budget if planned is None else planned.drafts.budget
    return DraftPlan(scheduled.num_spec_tokens_to_schedule, budget)


def verified_by(scheduled: Any, otherwise: DraftPlan) -> DraftPlan:
    """Return the plan of the drafts that a step verifies; ``otherwise`` if it has no plan."""
    planned: _Planned | None = getattr(scheduled, _ATTRIBUTE, None)
    return otherwise if planned is None else planned.verified
