"""The scheduler's draft plan, and how it reaches the speculator.

vLLM's scheduler and workers may run in different processes, and a worker receives each step as a
pickled ``SchedulerOutput``. ``SchedulerOutput`` has a field for the number of drafts, but none for
their budget or for guesses. The plan therefore travels in an extra attribute, which only this
module uses.
"""

from __future__ import annotations

from typing import Any, NamedTuple

_ATTRIBUTE = "sparrow_plan"


class Guessed(NamedTuple):
    """A number of drafts that are made with guesses (``cascade``)."""

    drafts: int
    alone: bool = False  # whether the guesses themselves are the drafts, without a sparse pass

    def __repr__(self) -> str:
        return f"{self.drafts} guesses" if self.alone else f"{self.drafts} with guesses"


Choice = int | Guessed
"""How a cycle drafts: a number of drafts (0 for none), or ``Guessed`` to use guesses."""


def drafts_of(choice: Choice) -> int:
    """Return how many drafts a choice makes."""
    return choice.drafts if isinstance(choice, Guessed) else choice


class DraftPlan(NamedTuple):
    """A plan for the drafts made after a step."""

    tokens: int  # number of drafts per sequence, 0 for none
    budget: int  # how much the drafts read, as an index into ``Runtime.budgets``
    guesses: bool = False  # whether to use guesses
    alone: bool = False  # whether the guesses themselves are the drafts, without a sparse pass

    @classmethod
    def of(cls, choice: Choice, budget: int) -> DraftPlan:
        """Plan drafts according to a choice."""
        if isinstance(choice, Guessed):
            return cls(choice.drafts, budget, guesses=True, alone=choice.alone)
        return cls(choice, budget)

    @property
    def choice(self) -> Choice:
        """The number of drafts, and whether and how they use guesses."""
        return Guessed(self.tokens, self.alone) if self.tokens and self.guesses else self.tokens


class _Planned(NamedTuple):
    drafts: DraftPlan
    verified: DraftPlan


def attach(scheduled: Any, drafts: DraftPlan, verified: DraftPlan) -> None:
    """Attach two plans to a step: one for the drafts made after it, and one for the drafts it
    verifies.

    Args:
        scheduled: vLLM's ``SchedulerOutput`` of the step.
    """
    setattr(scheduled, _ATTRIBUTE, _Planned(drafts, verified))


def drafts_after(scheduled: Any, before: DraftPlan) -> DraftPlan:
    """Return the plan for the drafts after a step. If the step has no plan, ``before`` provides the
    budget and says how to use guesses.

    A step has no plan during vLLM's warm-up, if drafting isn't adaptive, or if the scheduler
    repeats its last choice. The number of tokens always comes from vLLM's scheduler, which has
    reserved memory for exactly that many.
    """
    planned: _Planned | None = getattr(scheduled, _ATTRIBUTE, None)
    drafts = before if planned is None else planned.drafts
    return drafts._replace(tokens=scheduled.num_spec_tokens_to_schedule)


def verified_by(scheduled: Any, otherwise: DraftPlan) -> DraftPlan:
    """Return the plan for the drafts that a step verifies, or ``otherwise`` if the step has no
    plan.
    """
    planned: _Planned | None = getattr(scheduled, _ATTRIBUTE, None)
    return otherwise if planned is None else planned.verified
