"""The scheduler's plan for drafts, and how the plan reaches the speculator.

vLLM's scheduler and workers may run in different processes. A worker receives each step as a
pickled ``SchedulerOutput`` of vLLM. This object has a field for the number of drafts, but none for
their budget. The plan is therefore stored as an extra attribute of the object, which only this
module uses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_ATTRIBUTE = "sparrow_plan"


class DraftPlan(NamedTuple):
    """A plan for the drafts that follow a step."""

    tokens: int  # number of drafts per sequence, 0 for none
    budget: int  # how much the drafts read, as an index into ``Runtime.budgets``


class _Planned(NamedTuple):
    drafts: DraftPlan
    verified: DraftPlan


def attach(scheduled: Any, drafts: DraftPlan, verified: DraftPlan) -> None:
    """Attach two plans to a step: the plan for the drafts that follow the step, and the plan for
    the drafts that the step verifies.

    Args:
        scheduled: vLLM's ``SchedulerOutput`` of the step.
    """
    setattr(scheduled, _ATTRIBUTE, _Planned(drafts, verified))


def drafts_after(scheduled: Any, before: DraftPlan) -> DraftPlan:
    """Return the plan for the drafts that follow a step. If the step has no plan, the budget is
    that of ``before``.

    A step has no plan during vLLM's warm-up, if the number of drafts does not adapt, or if the
    scheduler repeats its choice. The number of tokens always comes from vLLM's scheduler, which has
    reserved memory for this number.
    """
    planned: _Planned | None = getattr(scheduled, _ATTRIBUTE, None)
    budget = before.budget if planned is None else planned.drafts.budget
    return DraftPlan(scheduled.num_spec_tokens_to_schedule, budget)


def verified_by(scheduled: Any, otherwise: DraftPlan) -> DraftPlan:
    """Return the plan for the drafts that a step verifies, or ``otherwise`` if the step has none."""
    planned: _Planned | None = getattr(scheduled, _ATTRIBUTE, None)
    return otherwise if planned is None else planned.verified
