"""The scheduler for lossless mode with ``adapt_draft_tokens``. It extends vLLM's scheduler to
choose how many tokens to draft next, how to use guesses, and how much the drafts read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any, NamedTuple

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from sparrow.decoding import DraftChoice
from sparrow.errors import ConfigError
from sparrow.vllm import config
from sparrow.vllm.lossless import plan
from sparrow.vllm.lossless.chooser import DraftChooser
from sparrow.vllm.lossless.plan import Choice, DraftPlan, Guessed, drafts_of
from sparrow.vllm.lossless.setup import drafts_alone

LOG_EVERY = 200  # minimum number of cycles between log lines


class _Verified(NamedTuple):
    """A step in which all sequences verified the same number of drafts."""

    end: float  # when its result arrived, in seconds (``time.perf_counter``)
    rows: int
    choice: Choice  # how the drafts were made
    budget: int  # what the drafts read, as an index into ``DraftChooser.budgets``


class LosslessScheduler(AsyncScheduler):
    """A scheduler that chooses the number of drafts before each step. vLLM reads the number from a
    table (``dynamic_sd_lookup``), which the scheduler replaces.

    A ``plan`` attached to the step holds the budget and says how to use guesses. Samples for a
    given seed depend on these choices. The choices can therefore be recorded and replayed by
    another engine.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.dynamic_sd_lookup is not None
        # Don't read the choices from vLLM's table: it has only ``max_num_seqs`` entries, and starts
        # with 0.
        speculative: Any = self.vllm_config.speculative_config
        decoding = config.requested_lossless(self.vllm_config)
        assert decoding is not None
        numbers = [k for _, _, k in speculative.num_speculative_tokens_per_batch_size]
        self._guess_tokens = decoding.guess_tokens
        choices: list[Choice] = [*numbers]
        if self._guess_tokens:
            choices += [Guessed(k) for k in numbers if k]
            choices.append(Guessed(drafts_alone(numbers), alone=True))
        self.chooser = DraftChooser(choices, decoding.draft_budgets)
        # The latest choice. It also applies to steps that start when no sequence is running.
        self._plan = DraftPlan(min(numbers), self.chooser.budgets.index(1.0))
        self._rows = 0  # batch size when the latest choice was made
        self._repeated = 0  # steps since the latest choice
        self.keeps_choices = False  # set this to True before using ``take_choices``
        # the choice in each step since the last ``take_choices``
        self._choices: list[DraftChoice] = []
        self._replayed: Iterator[DraftPlan] | None = None
        rows = len(self.dynamic_sd_lookup)
        self._tables = {drafts: [drafts] * rows for drafts in numbers}
        self._last: _Verified | None = None  # the previous step, if its time says anything
        self._logged: tuple[dict[str, Choice], dict[str, float]] | None = None
        self._log_from = 0  # earliest cycle for the next log line
        self._logger = init_logger("vllm.sparrow")

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        may_repeat = not self._plan.tokens and self._replayed is None
        repeats = self.chooser.repeats if may_repeat else 0
        if self._repeated < repeats and len(self.running) == self._rows:
            # Steps without drafts are host-bound, so do as little as possible here.
            self._repeated += 1
            if self.keeps_choices:
                self._choices.append(self._recorded())
            return super().schedule(*args, **kwargs)
        verified = self._plan
        if self.running:
            self._choose(len(self.running))
        if self._replayed is not None:
            self._replay_next()
        self.dynamic_sd_lookup = self._tables[self._plan.tokens]
        if self.keeps_choices:
            self._choices.append(self._recorded())
        scheduled = super().schedule(*args, **kwargs)
        plan.attach(scheduled, self._plan, verified)
        return scheduled

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self.chooser.is_watching:
            self._learn(scheduler_output, model_runner_output.sampled_token_ids)
        else:
            self._last = None
        return super().update_from_output(scheduler_output, model_runner_output)

    def take_choices(self) -> list[DraftChoice]:
        """Return the choices since the last call, in step order, and end any replay."""
        if self._replayed is not None and next(self._replayed, None) is not None:
            self._logger.warning(
                "Some recorded draft choices were not replayed, because this run differs from the "
                "recorded one"
            )
        taken = self._choices
        self._choices = []
        self._replayed = None
        return [choice._replace(steps=len(list(steps))) for choice, steps in groupby(taken)]

    def replay(self, choices: Iterable[DraftChoice]) -> None:
        """Replay these choices from the next step on, until they run out or ``take_choices`` is
        called.

        Raises ConfigError if this engine cannot make one of these choices.
        """
        plans = [(self._plan_of(choice), choice.steps) for choice in choices]
        self._replayed = (planned for planned, steps in plans for _ in range(steps))

    def _recorded(self) -> DraftChoice:
        """Return the current choice in the form that is recorded for each step."""
        planned = self._plan
        return DraftChoice(
            drafts=planned.tokens,
            budget=0.0 if planned.alone else self.chooser.budgets[planned.budget],
            guesses=self._guess_tokens if planned.guesses else 0,
        )

    def _plan_of(self, recorded: DraftChoice) -> DraftPlan:
        """Convert a recorded choice to a plan. Raises ConfigError if this engine cannot make it."""
        budgets = self.chooser.budgets
        is_alone = recorded.guesses > 0 and recorded.budget == 0
        choice: Choice = recorded.drafts
        if recorded.guesses:
            choice = Guessed(recorded.drafts, is_alone)
        has_budget = is_alone or recorded.budget in budgets
        has_guesses = recorded.guesses in (0, self._guess_tokens)
        if choice not in self.chooser.choices or not has_budget or not has_guesses:
            raise ConfigError(
                f"cannot replay a step with {recorded.drafts} drafts, budget {recorded.budget} and "
                f"{recorded.guesses} guesses per pass: this engine's numbers of drafts are "
                f"{self.chooser.choices}, its budgets {budgets}, and its guesses per pass "
                f"{self._guess_tokens}; start it with the recorded engine's settings"
            )
        return DraftPlan.of(choice, budgets.index(1.0 if is_alone else recorded.budget))

    def _choose(self, rows: int) -> None:
        """Choose the drafts for the next step. A choice of no drafts may hold for a few more
        steps.
        """
        length = sum([request.num_computed_tokens for request in self.running]) / rows
        self._plan = self.chooser.plan(rows, length, self._repeated)
        self._rows = rows
        self._repeated = 0

    def _replay_next(self) -> None:
        """Use the next recorded choice, if any are left."""
        assert self._replayed is not None
        choice = next(self._replayed, None)
        if choice is None:
            self._replayed = None
            self._logger.warning(
                "There are no recorded draft choices left to replay, because this run differs from "
                "the recorded one"
            )
        else:
            self._plan = choice

    def _learn(self, scheduled: Any, sampled: Any) -> None:
        """Record a step's time, provided all sequences had the same number of drafts and the batch
        size didn't change from the previous step.
        """
        last = self._last
        step = self._last = self._verified(scheduled, sampled)
        if step is None or last is None or last.rows != step.rows:
            return
        # When steps are host-bound, a dense step right after drafts looks too short, because the
        # drafts let the host run ahead. A dense step right before drafts looks too long, because
        # the host launches the next step, drafts included, before it sees the dense step end.
        if not step.choice and (last.choice or self._plan.tokens):
            return
        emitted = list(map(len, sampled))
        if min(emitted) == 0:
            return
        # With async scheduling, a response may have ended since this step began. Its request is
        # then gone.
        left = filter(None, map(self.requests.get, scheduled.num_scheduled_tokens))
        lengths = [request.num_computed_tokens for request in left]
        if not lengths:
            return

        tokens = sum(emitted)
        # Each token settles one draft. The exception is the last token of a sequence whose drafts
        # were all accepted.
        judged = tokens - emitted.count(drafts_of(step.choice) + 1)
        # A dense step reads no drafts, so a change of budget before it doesn't matter.
        same_budget = not step.choice or last.budget == step.budget
        self.chooser.observe(
            step.rows,
            sum(lengths) / len(lengths),
            step.choice,
            step.end - last.end,
            tokens - step.rows,
            judged,
            first=last.choice != step.choice or not same_budget,
            budget=step.budget,
        )
        self._log_choices()

    def _verified(self, scheduled: Any, sampled: Any) -> _Verified | None:
        """Describe a step that has just ended. Return None if its time says nothing about a choice,
        because sequences had different numbers of drafts or the choice is not one of the chooser's.
        """
        end = time.perf_counter()
        rows = len(scheduled.num_scheduled_tokens)
        counts = set(scheduled.num_scheduled_tokens.values())
        if not rows or len(counts) != 1 or not sampled:
            return None
        drafts = counts.pop() - 1
        drafted = scheduled.scheduled_spec_decode_tokens
        if drafts not in self._tables or set(map(len, drafted.values())) - {drafts}:
            return None
        if drafts and len(drafted) != rows:
            return None
        verified = plan.verified_by(scheduled, self._plan)
        choice = verified._replace(tokens=drafts).choice
        if choice not in self.chooser.choices:
            return None
        return _Verified(end, rows, choice, verified.budget)

    def _log_choices(self) -> None:
        """Log the choices in use, if they have changed and the last log line is old enough."""
        cycles = self.chooser.chosen.total()
        in_use = self.chooser.in_use() if cycles >= self._log_from else None
        if not in_use:
            return
        self._log_from = cycles + LOG_EVERY
        budgets = self.chooser.budgets_in_use()
        if self._logged == (in_use, budgets):
            return
        self._logged = in_use, budgets
        read = f"; budgets as multiples of the draft schedule: {budgets}" if budgets else ""
        self._logger.info("numbers of drafts in use, by sequences x tokens: %s%s", in_use, read)
