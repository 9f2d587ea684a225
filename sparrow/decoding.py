"""How responses are decoded: ``dense``, ``lossless``, ``lossy`` or ``auto``, and the settings of
each mode.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, Literal, get_args

from sparrow.errors import ConfigError
from sparrow.schedule import SparsitySchedule, without_duplicates

Mode = Literal["dense", "lossless", "lossy", "auto"]
"""``dense``: every step reads the whole cache. ``lossless``: sparse steps draft, a dense step
verifies, samples are the dense policy's. ``lossy``: decode steps read what a schedule says, samples
are the sparse actor's. ``auto``: lossless up to a length, which training moves, and lossy beyond it
(``sparrow.train.dial``)."""

DraftWeights = Literal["auto", "fp8"]
"""``auto``: drafts multiply with the model's weights. ``fp8``: with a copy of the linear layers' in
8 bits, in vLLM.
"""

DRAFT_SCHEDULE = SparsitySchedule.fixed(61, dense_layers=())
"""What drafts read by default: 64 pages of 16 tokens in every layer, at any length."""
DRAFT_BUDGETS = (0.5, 1.0, 2.0)
"""What drafts may read where that adapts, in multiples of the draft schedule."""
BUDGET_POWER = 0.7
"""The rejected share of drafts falls with what they read to the power of minus this, as published
for p5.
"""
DRAFT_TOKENS = 12
"""The most tokens drafted at a time; the default is the fastest at long context and 95 %
acceptance.
"""
METER_EVERY = 16
"""One in this many cycles measures another schedule; one sparse step in that many cycles costs
about half a percent.
"""
AUTO_ELSEWHERE = (
    "mode 'auto' needs sparrow train with its engine hf: vLLM verifies all of a response or "
    "nothing, and its prefix cache would share blocks that hold unverified tokens; "
    "use mode 'lossless' or 'lossy'"
)


@dataclass(frozen=True)
class AtLeast:
    """A bound in the annotation of a whole number, which pydantic enforces where the number is an
    option of a command.
    """

    least: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "ge": self.least}


@dataclass(frozen=True, kw_only=True)
class LosslessSettings:
    """Settings of lossless mode, under their names in vLLM's ``additional_config`` and on the
    command line, where the comments are help texts.
    """

    # Lossless in vLLM: choose by measured speed and acceptance whether drafts read half of that,
    # all of it, or twice as much; unset: if draft_schedule is unset and adapt_draft_tokens on.
    adapt_draft_budget: bool | None = None
    # Lossless and auto: the most tokens drafted before each verification.
    draft_tokens: Annotated[int, AtLeast(1)] = DRAFT_TOKENS
    # Lossless in vLLM: draft as many as measured speed and acceptance make worth it, 0 included;
    # else always as many.
    adapt_draft_tokens: bool = True
    # Lossless: draw drafts with the random numbers that draw the tokens. A seed then gives the
    # tokens of dense decoding, up to rounding, whatever was drafted; fewer drafts are accepted.
    drafter_invariant: bool = False
    # Lossless in vLLM: what drafts multiply with. auto: the model's weights. fp8: a copy of the
    # linear layers' weights in 8 bits, which takes half as much memory again; samples are those of
    # the weights proper all the same.
    draft_weights: DraftWeights = "auto"
    # A schedule whose acceptance is measured too: its name in the options, loaded in ``Decoding``.
    meter_schedule: Any = None
    # Lossless in vLLM: cycles from one measurement of meter_schedule to the next.
    meter_every: Annotated[int, AtLeast(1)] = METER_EVERY


ALWAYS_WRITTEN = ("draft_tokens", "adapt_draft_tokens")
"""Settings that ``Decoding.to_dict`` writes though they have their default."""
LOSSLESS_SETTINGS = ("draft_schedule", *(setting.name for setting in fields(LosslessSettings)))
"""What lossless mode has settings for, as ``Decoding.load`` and the command line name them."""


@dataclass(frozen=True)
class Decoding(LosslessSettings):
    """A mode and its settings; anything that takes one takes what ``load`` takes."""

    mode: Mode
    # lossy: what a step reads; lossless: what a draft reads; auto: both; dense: everything
    schedule: SparsitySchedule
    meter_schedule: SparsitySchedule | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"unknown mode {self.mode!r}, expected one of {get_args(Mode)}")
        for name in ("draft_tokens", "meter_every"):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise ConfigError(f"{name} must be a whole number from 1 on, got {count!r}")
        for name in ("adapt_draft_tokens", "adapt_draft_budget", "drafter_invariant"):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (value is None and name == "adapt_draft_budget")):
                raise ConfigError(f"{name} must be true or false, got {value!r}")
        if self.adapt_draft_budget and not self.adapt_draft_tokens:
            raise ConfigError(
                "adapt_draft_budget is true, but adapt_draft_tokens false; "
                "switch both on, or both off"
            )
        if self.draft_weights not in get_args(DraftWeights):
            raise ConfigError(
                f"draft_weights must be one of {get_args(DraftWeights)}, got {self.draft_weights!r}"
            )

    @classmethod
    def lossless(
        cls, draft_schedule: Any = None, meter_schedule: Any = None, **options: Any
    ) -> Decoding:
        """Decode losslessly with this draft schedule; None means ``DRAFT_SCHEDULE``.

        Schedules are given in any form that ``SparsitySchedule.load`` reads.
        """
        schedule = DRAFT_SCHEDULE if draft_schedule is None else _schedule(draft_schedule)
        metered = None if meter_schedule is None else _schedule(meter_schedule)
        return cls("lossless", schedule, meter_schedule=metered, **options)

    @classmethod
    def lossy(cls, schedule: Any) -> Decoding:
        """Decode lossily under a schedule, or densely if the schedule reads everything."""
        loaded = _schedule(schedule)
        return cls("dense" if loaded.is_dense else "lossy", loaded)

    @classmethod
    def load(cls, value: Any) -> Decoding:
        """Read a setting.

        Args:
            value: one of these:

                - ``"lossless"``;
                - a ``SparsitySchedule`` or anything that names one, which means lossy, or dense if
                  it reads everything (``"dense"``);
                - a mapping, or its JSON, with ``mode`` and the settings of that mode: ``schedule``
                  for lossy, those in ``LOSSLESS_SETTINGS`` for lossless;
                - a ``Decoding``.

        Raises ConfigError: an unknown mode or setting, mode auto, or a schedule that cannot be
        read.
        """
        if isinstance(value, cls):
            if value.mode == "auto":
                raise ConfigError(AUTO_ELSEWHERE)
            return value
        if isinstance(value, SparsitySchedule):
            return cls.lossy(value)
        if isinstance(value, str) and value.strip().startswith("{"):
            try:
                value = json.loads(value, object_pairs_hook=without_duplicates)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"the sparrow setting {value!r} is not JSON: {error}") from error
        if value == "lossless":
            return cls.lossless()
        if not isinstance(value, Mapping) or "mode" not in value:
            return cls.lossy(value)
        settings = dict(value)
        mode = settings.pop("mode")
        if mode == "auto":
            raise ConfigError(AUTO_ELSEWHERE)
        known = {"dense": [], "lossless": list(LOSSLESS_SETTINGS), "lossy": ["schedule"]}
        if not isinstance(mode, str) or mode not in known:
            raise ConfigError(f"unknown mode {mode!r}, expected one of {get_args(Mode)}")
        if unknown := sorted(settings.keys() - set(known[mode])):
            raise ConfigError(
                f"mode {mode!r} has no setting {unknown[0]!r}, expected {known[mode] or 'none'}"
            )
        if mode == "lossless":
            return cls.lossless(**settings)
        if mode == "lossy" and "schedule" not in settings:
            raise ConfigError(
                "mode 'lossy' needs a schedule, such as 'qwen3-4b-0.86'; or use mode 'lossless'"
            )
        return cls.lossy(settings.get("schedule", "dense"))

    @property
    def is_lossless(self) -> bool:
        return self.mode == "lossless"

    @property
    def verifies(self) -> bool:
        """True if sparse steps draft and dense ones verify, for whole responses or for the
        beginning of each.
        """
        return self.mode in ("lossless", "auto")

    @property
    def draft_budgets(self) -> tuple[float, ...]:
        """The budgets that vLLM's drafts may read, in multiples of their schedule."""
        adapts = self.adapt_draft_budget
        if adapts is None:
            adapts = self.adapt_draft_tokens and self.schedule == DRAFT_SCHEDULE
        return DRAFT_BUDGETS if self.is_lossless and adapts else (1.0,)

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain types, as ``load`` reads them."""
        if not self.is_lossless:
            return {"mode": "dense"} if self == Decoding.lossy("dense") else self.schedule.to_dict()
        written: dict[str, Any] = {"mode": self.mode, "draft_schedule": self.schedule.to_dict()}
        for setting in fields(LosslessSettings):
            value = getattr(self, setting.name)
            if value != setting.default or setting.name in ALWAYS_WRITTEN:
                written[setting.name] = value
        if self.meter_schedule is None:
            written.pop("meter_every", None)
        else:
            written["meter_schedule"] = self.meter_schedule.to_dict()
            written["meter_every"] = self.meter_every
        return written

    def with_schedule(self, schedule: SparsitySchedule) -> Decoding:
        """Return the same mode with another schedule, which decides between dense and lossy."""
        return replace(self, schedule=schedule) if self.verifies else Decoding.lossy(schedule)


def acceptance_at(acceptance: float, multiple: float) -> float:
    """Estimate the acceptance of drafts that read ``multiple`` times as much as those with this
    acceptance.
    """
    return 1 - min(1.0, (1 - acceptance) * multiple**-BUDGET_POWER)


def _schedule(value: Any) -> SparsitySchedule:
    return value if isinstance(value, SparsitySchedule) else SparsitySchedule.load(value)
