"""What the scheduler chose to draft, and the way it reaches the speculator.

vLLM's scheduler and its workers may be different processes. What a worker learns about a step is
vLLM's ``SchedulerOutput``, which is pickled for it and has no room for more than a number of
drafts; so the choice is one more attribute of that object, which this module alone knows.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_ATTRIBUTE = "sparrow_plan"


class DraftPlan(NamedTuple):
    """What is drafted after a step."""

    tokens: int  # of each sequence, 0 for none
    budget: int  # what the drafts read: an index of ``Runtime.budgets``


class _Planned(NamedTuple):
    drafts: DraftPlan
    verified: DraftPlan


def attach(scheduled: Any, drafts: DraftPlan, verified: DraftPlan) -> None:
    """Add to a step what is drafted after it, and what was planned of the drafts it verifies.

    Args:
        scheduled: vLLM's ``SchedulerOutput`` of the step.
    """
    setattr(scheduled, _ATTRIBUTE, _Planned(drafts, verified))


def drafts_after(scheduled: Any, before: DraftPlan) -> DraftPlan:
    """What is drafted after a step; a step without a plan keeps to the budget ``before`` it.

    Such steps are vLLM's warm-up, all steps where the number of drafts does not adapt, and those
    that the scheduler repeats without choosing. The number of tokens is vLLM's own in any case: its
    scheduler has made room for as many.
    """
    planned: _Planned | None = getattr(scheduled, _ATTRIBUTE, None)
    budget = before.budget if planned is None else planned.drafts.budget
    return DraftPlan(scheduled.num_spec_tokens_to_schedule, budget)


def verified_by(scheduled: Any, otherwise: DraftPlan) -> DraftPlan:
    """What was planned of the drafts that a step verifies; ``otherwise`` for a step without a plan."""
    planned: _Planned | None = getattr(scheduled, _ATTRIBUTE, None)
    return otherwise if planned is None else planned.verified
