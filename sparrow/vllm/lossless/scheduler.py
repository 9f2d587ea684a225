"""vLLM's scheduler for lossless mode with ``adapt_draft_tokens``: it also chooses how many tokens
to draft next, and how much the drafts read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler

from sparrow.errors import ConfigError
from sparrow.vllm import config
from sparrow.vllm.lossless import plan
from sparrow.vllm.lossless.chooser import DraftChooser
from sparrow.vllm.lossless.plan import DraftPlan

LOG_EVERY = 200  # least number of cycles between two lines of the log
Choice = tuple[int, float, int]
"""A number of drafts, their budget in multiples of their schedule, and the number of steps."""


class LosslessScheduler(AsyncScheduler):
    """Before each step, sets the table in which vLLM looks up the number of drafts
    (``dynamic_sd_lookup``).

    The budget of the drafts travels with the step (``plan``). Choices can be kept, so that another
    engine can repeat them: with a seed, samples depend on them.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        assert self.dynamic_sd_lookup is not None
        # Not from the table, which has only ``max_num_seqs`` entries, the first of which is 0.
        speculative: Any = self.vllm_config.speculative_config
        decoding = config.requested_lossless(self.vllm_config)
        assert decoding is not None
        choices = (k for _, _, k in speculative.num_speculative_tokens_per_batch_size)
        self.chooser = DraftChooser(choices, decoding.draft_budgets)
        # The latest choice; it stays in force for a step that starts with nothing running.
        self._plan = DraftPlan(self.chooser.choices[0], self.chooser.budgets.index(1.0))
        self._rows = 0  # number of sequences when the chooser was asked last
        self._repeated = 0  # steps since then
        self.keeps_choices = False  # set by a caller that will call ``take_choices``
        self._choices: list[tuple[int, float]] = []  # of each step since the last ``take_choices``
        self._replayed: Iterator[DraftPlan] | None = None
        rows = len(self.dynamic_sd_lookup)
        self._tables = {drafts: [drafts] * rows for drafts in self.chooser.choices}
        # Of the previous step: the time it ended, its sequences, the drafts of each, their budget.
        self._last: tuple[float, int, int, int] | None = None
        self._logged: tuple[dict[str, int], dict[str, float]] | None = None
        self._log_from = 0  # the cycle from which the next line may be logged
        self._logger = init_logger("vllm.sparrow")

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        may_repeat = not self._plan.tokens and self._replayed is None
        repeats = self.chooser.repeats if may_repeat else 0
        if self._repeated < repeats and len(self.running) == self._rows:
            self._repeated += 1  # such steps wait for the host, so do nothing else
            if self.keeps_choices:
                self._choices.append((0, self.chooser.budgets[self._plan.budget]))
            return super().schedule(*args, **kwargs)
        verified = self._plan
        if self.running:
            self._choose(len(self.running))
        if self._replayed is not None:
            self._repeat()
        tokens, budget = self._plan
        self.dynamic_sd_lookup = self._tables[tokens]
        if self.keeps_choices:
            self._choices.append((tokens, self.chooser.budgets[budget]))
        scheduled = super().schedule(*args, **kwargs)
        plan.attach(scheduled, self._plan, verified)
        return scheduled

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        if self.chooser.is_watching:
            self._learn(scheduler_output, model_runner_output.sampled_token_ids)
        else:
            self._last = None
        return super().update_from_output(scheduler_output, model_runner_output)

    def take_choices(self) -> list[Choice]:
        """Return the choices since the last call, in the order of steps; ends a replay."""
        if self._replayed is not None and next(self._replayed, None) is not None:
            self._logger.warning(
                "Of the drafts to repeat some were left: "
                "this run differs from the one that chose them"
            )
        taken = self._choices
        self._choices = []
        self._replayed = None
        return [(*choice, len(list(steps))) for choice, steps in groupby(taken)]

    def replay(self, choices: Iterable[Choice]) -> None:
        """Repeat these choices from the next step on, until they end or ``take_choices`` is called.

        Raises ConfigError: drafts that this engine does not choose among.
        """
        choices = list(choices)
        budgets = self.chooser.budgets
        for drafts, multiple, _ in choices:
            if drafts not in self._tables or multiple not in budgets:
                raise ConfigError(
                    f"cannot repeat {drafts} drafts that read {multiple} times their schedule: "
                    f"this engine chooses among {self.chooser.choices} and {budgets}; "
                    "start it as the one that chose them"
                )
        self._replayed = (
            DraftPlan(drafts, budgets.index(multiple))
            for drafts, multiple, steps in choices
            for _ in range(steps)
        )

    def _choose(self, rows: int) -> None:
        """Choose for the next step, and for some more if nothing is drafted."""
        length = sum([request.num_computed_tokens for request in self.running]) / rows
        self._plan = self.chooser.plan(rows, length, self._repeated)
        self._rows = rows
        self._repeated = 0

    def _repeat(self) -> None:
        """Take the next choice that is to be repeated, if there is one left."""
        assert self._replayed is not None
        choice = next(self._replayed, None)
        if choice is None:
            self._replayed = None
            self._logger.warning(
                "The drafts to repeat have ended: this run differs from the one that chose them"
            )
        else:
            self._plan = choice

    def _learn(self, scheduled: Any, sampled: Any) -> None:
        """Note a step's time if all its sequences had the same number of drafts and the step before
        had as many sequences.
        """
        last = self._last
        self._last = None
        now = time.perf_counter()
        rows = len(scheduled.num_scheduled_tokens)
        counts = set(scheduled.num_scheduled_tokens.values())
        if not rows or len(counts) != 1 or not sampled:
            return
        drafts = counts.pop() - 1
        drafted = scheduled.scheduled_spec_decode_tokens
        if drafts not in self._tables or set(map(len, drafted.values())) - {drafts}:
            return
        if drafts and len(drafted) != rows:
            return
        budget = plan.verified_by(scheduled, self._plan).budget
        self._last = (now, rows, drafts, budget)
        if last is None or last[1] != rows:
            return
        # Where steps wait for the host, a dense step seems short right after drafts, because they
        # let the host run ahead. It seems long right before drafts, because the host launches the
        # next step with its drafts before it sees the end of this one.
        if not drafts and (last[2] or self._plan.tokens):
            return
        emitted = list(map(len, sampled))
        if min(emitted) == 0:
            return
        # Under async scheduling a response may have ended since this step began; then its request
        # is gone.
        left = filter(None, map(self.requests.get, scheduled.num_scheduled_tokens))
        lengths = [request.num_computed_tokens for request in left]
        if not lengths:
            return
        length = sum(lengths) / len(lengths)
        tokens = sum(emitted)
        # Each token judges a draft, except the last one of a sequence that had all its drafts
        # accepted.
        judged = tokens - emitted.count(drafts + 1)
        is_first = (last[2], last[3] if drafts else budget) != (drafts, budget)
        self.chooser.observe(
            rows,
            length,
            drafts,
            now - last[0],
            tokens - rows,
            judged,
            first=is_first,
            budget=budget,
        )
        cycles = self.chooser.chosen.total()
        if cycles >= self._log_from and (in_use := self.chooser.in_use()):
            self._log_from = cycles + LOG_EVERY
            budgets = self.chooser.budgets_in_use()
            if self._logged != (in_use, budgets):
                self._logged = in_use, budgets
                read = (
                    f"; they read, in multiples of the draft schedule: {budgets}" if budgets else ""
                )
                self._logger.info("Sparrow drafts by sequences x tokens: %s%s", in_use, read)
