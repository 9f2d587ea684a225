"""The scheduler's plan for drafts, and how the plan reaches the speculator.

vLLM's scheduler and workers may run in different processes. A worker receives each step as a
pickled ``SchedulerOutput`` of vLLM. This object has a field for the number of drafts, but none for
their budget and for guesses. The plan is therefore stored as an extra attribute of the object,
which only this module uses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_ATTRIBUTE = "sparrow_plan"


class Guessed(NamedTuple):
    """A number of drafts that are made with guesses from history (``cascade``)."""

    drafts: int

    def __repr__(self) -> str:
        return f"{self.drafts} with guesses"


Choice = int | Guessed
"""How a cycle drafts: a number of drafts, 0 for none, or ``Guessed`` if they are made with guesses.
"""


def drafts_of(choice: Choice) -> int:
    """Return the number of drafts of a choice."""
    return choice.drafts if isinstance(choice, Guessed) else choice


class DraftPlan(NamedTuple):
    """A plan for the drafts that follow a step."""

    tokens: int  # number of drafts per sequence, 0 for none
    budget: int  # how much the drafts read, as an index into ``Runtime.budgets``
    guesses: bool = False  # whether the drafts are made with guesses from history

    @property
    def choice(self) -> Choice:
        """The number of drafts, and whether they are made with guesses."""
        return Guessed(self.tokens) if self.tokens and self.guesses else self.tokens


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
    """Return the plan for the drafts that follow a step. If the step has no plan, the budget and
    the use of guesses are those of ``before``.

    A step has no plan during vLLM's warm-up, if the number of drafts does not adapt, or if the
    scheduler repeats its choice. The number of tokens always comes from vLLM's scheduler, which has
    reserved memory for this number.
    """
    planned: _Planned | None = getattr(scheduled, _ATTRIBUTE, None)
    drafts = before if planned is None else planned.drafts
    return drafts._replace(tokens=scheduled.num_spec_tokens_to_schedule)


def verified_by(scheduled: Any, otherwise: DraftPlan) -> DraftPlan:
    """Return the plan for the drafts that a step verifies, or ``otherwise`` if the step has none."""
    planned: _Planned | None = getattr(scheduled, _ATTRIBUTE, None)
    return otherwise if planned is None else planned.verified
