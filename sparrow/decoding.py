"""Decoding modes (``dense``, ``lossless``, ``lossy`` and ``auto``) and their settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import Annotated, Any, Literal, NamedTuple, get_args

from sparrow.errors import ConfigError
from sparrow.schedule import SparsitySchedule, without_duplicates

Mode = Literal["dense", "lossless", "lossy", "auto"]
"""``dense``: every step reads the whole cache. ``lossless``: sparse steps draft, a dense step
verifies, and responses are samples from the dense policy. ``lossy``: decode steps read only the
pages selected by a schedule, and responses are samples from the sparse actor. ``auto``: lossless up
to a length that training adjusts, and lossy from there on (``sparrow.train.dial``).
"""

DraftWeights = Literal["auto", "fp8"]
"""``auto``: drafts use the model's weights. ``fp8``: in vLLM, drafts use an 8-bit copy of the
linear layers' weights.
"""

DRAFT_SCHEDULE = SparsitySchedule.fixed(61, dense_layers=())
"""The default draft schedule: 64 pages of 16 tokens, in every layer and at any length."""
DRAFT_BUDGETS = (0.5, 1.0, 2.0)
"""The draft budgets that an adaptive drafter can choose from, as multiples of the draft schedule's
page counts.
"""
BUDGET_POWER = 0.7
"""The draft rejection rate is assumed to be proportional to the draft budget raised to the power of
``-BUDGET_POWER``. This power law was published for p5.
"""
DRAFT_TOKENS = 12
"""The default maximum number of tokens drafted before each verification. This value is the fastest
at long contexts if 95 % of drafts are accepted.
"""
LONGEST_LOOKUP = 8
"""The longest suffix of a sequence that is looked up in its history, in tokens."""
GUESS_LOOKUP_MIN = 4
"""With a head, the default number of latest tokens that must repeat for history to guess in place
of the head.
"""
METER_EVERY = 16
"""The default interval, in cycles, between measurements of a second schedule. With this value, the
extra sparse steps take about half a percent of the time.
"""
AUTO_ELSEWHERE = (
    "mode 'auto' works only in sparrow train with engine hf: vLLM verifies either all of a "
    "response or none of it, and its prefix cache would share blocks with unverified tokens; "
    "use mode 'lossless' or 'lossy'"
)


@dataclass(frozen=True)
class AtLeast:
    """Annotates an integer with a lower bound, which pydantic enforces for command-line options."""

    least: int

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        return {**handler(source), "ge": self.least}


@dataclass(frozen=True, kw_only=True)
class LosslessSettings:
    """Lossless mode settings, with the same names as in vLLM's ``additional_config`` and on the
    command line. The comments double as help texts.
    """

    # Lossless in vLLM: let drafts read as many pages as the draft schedule sets, half as many, or
    # twice as many, whichever turns out to be fastest. On by default if draft_schedule is unset,
    # guess_tokens is 0 and adapt_draft_tokens is on.
    adapt_draft_budget: bool | None = None
    # Lossless and auto: the maximum number of tokens drafted before each verification.
    draft_tokens: Annotated[int, AtLeast(1)] = DRAFT_TOKENS
    # Lossless in vLLM: choose how many tokens to draft, from 0 to draft_tokens, by measured speed
    # and acceptance. If this is off, draft_tokens tokens are always drafted.
    adapt_draft_tokens: bool = True
    # Lossless and auto: the number of tokens to guess before each sparse pass. Guesses come from
    # history: they are the tokens that followed an earlier occurrence of the latest tokens in the
    # prompt, the response or, with transformers, other responses to the same prompt. One pass
    # checks all guesses. It drafts the guesses that the sparse actor agrees with, plus one more
    # token. In vLLM, guesses are used only where they are faster, unless adapt_draft_tokens is off.
    # With 0, each pass drafts one token.
    guess_tokens: Annotated[int, AtLeast(0)] = 0
    # Lossless in vLLM: an EAGLE-3 head for the model, as a folder or a name on the Hugging Face
    # Hub. The head then guesses where the latest tokens have not occurred before
    # (guess_lookup_min).
    guess_head: str | None = None
    # Lossless in vLLM, with guess_head: history guesses in place of the head wherever at least this
    # many of the latest tokens (at most 8) occurred earlier in the sequence. With 0, the head makes
    # all guesses. 4 by default.
    guess_lookup_min: Annotated[int, AtLeast(0)] | None = None
    # Lossless: draw drafts with the same random numbers as the final tokens. A seed then yields the
    # same tokens as dense decoding (up to rounding), no matter what is drafted, but fewer drafts
    # are accepted.
    drafter_invariant: bool = False
    # Lossless in vLLM: the weights that drafts use. auto: the model's weights. fp8: an 8-bit copy
    # of the linear layers' weights, which takes half as much memory as the weights themselves;
    # samples still follow the original weights.
    draft_weights: DraftWeights = "auto"
    # A second schedule, whose acceptance is also measured. Options take the schedule's name, and
    # ``Decoding`` takes the loaded schedule.
    meter_schedule: Any = None
    # Lossless in vLLM: the number of cycles between measurements of meter_schedule. 16 by default.
    meter_every: Annotated[int, AtLeast(1)] | None = None


OPTIONAL = ("adapt_draft_budget", "guess_lookup_min", "meter_every")
"""Numbers and switches that may be None. Their defaults then depend on other settings."""
ALWAYS_WRITTEN = ("draft_tokens", "adapt_draft_tokens")
"""Settings that ``Decoding.to_dict`` writes even at their defaults."""
LOSSLESS_SETTINGS = ("draft_schedule", *(setting.name for setting in fields(LosslessSettings)))
"""The names of the lossless mode settings, in ``Decoding.load`` and on the command line."""


@dataclass(frozen=True)
class Decoding(LosslessSettings):
    """A mode and its settings. Functions with a ``Decoding`` parameter also accept any value that
    ``load`` accepts.
    """

    mode: Mode
    # the schedule for decode steps in mode lossy, for drafts in mode lossless, and for both in mode
    # auto; in mode dense, this schedule reads everything
    schedule: SparsitySchedule
    meter_schedule: SparsitySchedule | None = field(default=None, kw_only=True)
    # in mode lossless, whether the draft schedule was left out; a running server then keeps its own
    has_default_schedule: bool = field(default=False, kw_only=True, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ConfigError(f"unknown mode {self.mode!r}, expected one of {get_args(Mode)}")
        for name, least in (
            ("draft_tokens", 1),
            ("guess_tokens", 0),
            ("guess_lookup_min", 0),
            ("meter_every", 1),
        ):
            count = getattr(self, name)
            if count is None and name in OPTIONAL:
                continue
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise ConfigError(f"{name} must be an integer of at least {least}, got {count!r}")
        for name in ("adapt_draft_tokens", "adapt_draft_budget", "drafter_invariant"):
            value = getattr(self, name)
            if not (isinstance(value, bool) or (value is None and name in OPTIONAL)):
                raise ConfigError(f"{name} must be true or false, got {value!r}")
        if self.adapt_draft_budget and not self.adapt_draft_tokens:
            raise ConfigError(
                "adapt_draft_budget is true, but adapt_draft_tokens is false; "
                "set both to true, or adapt_draft_budget to false"
            )
        head = self.guess_head
        if head is not None and not (isinstance(head, str) and head):
            raise ConfigError(f"guess_head must be the folder or name of a head, got {head!r}")
        if head is not None and not self.guess_tokens:
            raise ConfigError(
                f"guess_head is {head!r}, but guess_tokens is 0; set guess_tokens to 3, for "
                "example, or leave guess_head out"
            )
        if (self.guess_lookup_min or 0) > LONGEST_LOOKUP:
            raise ConfigError(
                f"guess_lookup_min is {self.guess_lookup_min}, but at most {LONGEST_LOOKUP} tokens "
                f"are looked up; choose a value from 0 to {LONGEST_LOOKUP}"
            )
        if self.guess_lookup_min and head is None:
            raise ConfigError(
                f"guess_lookup_min is {self.guess_lookup_min}, but without a guess_head, all "
                "guesses come from history; set guess_head, or leave guess_lookup_min out"
            )
        if self.meter_every is not None and self.meter_schedule is None:
            raise ConfigError(
                f"meter_every is {self.meter_every}, but without a meter_schedule, nothing is "
                "measured; set meter_schedule, or leave meter_every out"
            )
        if self.draft_weights not in get_args(DraftWeights):
            raise ConfigError(
                f"draft_weights must be one of {get_args(DraftWeights)}, got {self.draft_weights!r}"
            )

    @classmethod
    def lossless(
        cls, draft_schedule: Any = None, meter_schedule: Any = None, **options: Any
    ) -> Decoding:
        """Build lossless mode with this draft schedule. None stands for ``DRAFT_SCHEDULE``.

        Schedules can be anything that ``SparsitySchedule.load`` reads.
        """
        schedule = DRAFT_SCHEDULE if draft_schedule is None else _schedule(draft_schedule)
        metered = None if meter_schedule is None else _schedule(meter_schedule)
        return cls(
            "lossless",
            schedule,
            meter_schedule=metered,
            has_default_schedule=draft_schedule is None,
            **options,
        )

    @classmethod
    def lossy(cls, schedule: Any) -> Decoding:
        """Build lossy mode with this schedule, or dense mode if the schedule reads everything."""
        loaded = _schedule(schedule)
        return cls("dense" if loaded.is_dense else "lossy", loaded)

    @classmethod
    def load(cls, value: Any) -> Decoding:
        """Read a ``Decoding`` from a setting.

        Args:
            value: one of these:

                - the name of a mode that needs no settings: ``"lossless"`` or ``"dense"``;
                - a ``SparsitySchedule``, or anything that names one, for lossy mode. A schedule
                  that reads everything (such as ``"dense"``) gives dense mode;
                - a mapping, or its JSON, with ``mode`` and that mode's settings: ``schedule`` for
                  lossy, and those in ``LOSSLESS_SETTINGS`` for lossless;
                - a ``Decoding``.

        Raises ConfigError if the mode or a setting is unknown, the mode is auto, or a schedule
        can't be read.
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
                raise ConfigError(
                    f"the sparrow setting {value!r} is not valid JSON: {error}"
                ) from error
        if isinstance(value, str) and value in get_args(Mode):
            value = {"mode": value}
        if not isinstance(value, Mapping):
            return _named(value)
        if "mode" not in value:
            if named := [name for name in value if name in ("schedule", *LOSSLESS_SETTINGS)]:
                raise ConfigError(
                    f"{named[0]!r} needs a mode; set mode to one of {get_args(Mode)} too"
                )
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
                "mode 'lossy' needs a schedule; set one, such as 'qwen3-4b-0.86', "
                "or use mode 'lossless'"
            )
        return cls.lossy(settings.get("schedule", "dense"))

    @property
    def is_lossless(self) -> bool:
        return self.mode == "lossless"

    @property
    def verifies(self) -> bool:
        """True if sparse steps draft and dense steps verify. This is the case in mode lossless and,
        at the beginning of each response, in mode auto.
        """
        return self.mode in ("lossless", "auto")

    @property
    def draft_budgets(self) -> tuple[float, ...]:
        """Draft budgets that vLLM can choose from, as multiples of the draft schedule."""
        adapts = self.adapt_draft_budget
        if adapts is None:
            is_default = self.schedule == DRAFT_SCHEDULE
            adapts = self.adapt_draft_tokens and is_default and not self.guess_tokens
        return DRAFT_BUDGETS if self.is_lossless and adapts else (1.0,)

    @property
    def lookup_min(self) -> int:
        """The number of latest tokens that must repeat for history to guess in place of the head. 0
        if all guesses come from one source.
        """
        if self.guess_head is None:
            return 0
        return GUESS_LOOKUP_MIN if self.guess_lookup_min is None else self.guess_lookup_min

    @property
    def meter_cycles(self) -> int:
        """The number of cycles between measurements of ``meter_schedule``."""
        return METER_EVERY if self.meter_every is None else self.meter_every

    def to_dict(self) -> dict[str, Any]:
        """Convert to plain types that ``load`` can read back.

        Raises ConfigError for mode auto, which ``load`` refuses.
        """
        if self.mode == "auto":
            raise ConfigError(AUTO_ELSEWHERE)
        if not self.is_lossless:
            return {"mode": "dense"} if self == Decoding.lossy("dense") else self.schedule.to_dict()
        written: dict[str, Any] = {"mode": self.mode, "draft_schedule": self.schedule.to_dict()}
        for setting in fields(LosslessSettings):
            value = getattr(self, setting.name)
            if value != setting.default or setting.name in ALWAYS_WRITTEN:
                written[setting.name] = value
        if self.meter_schedule is not None:
            written["meter_schedule"] = self.meter_schedule.to_dict()
        return written

    def with_schedule(self, schedule: SparsitySchedule) -> Decoding:
        """Return these settings with another schedule. If the mode doesn't verify, the new mode is
        dense or lossy, depending on the schedule.
        """
        if not self.verifies:
            return Decoding.lossy(schedule)
        return replace(self, schedule=schedule, has_default_schedule=False)


class DraftChoice(NamedTuple):
    """Consecutive steps in which an engine with adaptive drafting drafted in the same way."""

    drafts: int  # number of tokens to draft, 0 for none
    budget: float  # what drafts read, as a multiple of the draft schedule; 0 for guesses alone
    guesses: int  # guesses per sparse pass, 0 for none
    steps: int = 1


def acceptance_at(acceptance: float, multiple: float) -> float:
    """Estimate the acceptance after the draft budget is multiplied by ``multiple``.

    ``acceptance`` is the acceptance with the original budget.
    """
    return 1 - min(1.0, (1 - acceptance) * multiple**-BUDGET_POWER)


def _named(schedule: Any) -> Decoding:
    """Build lossy or dense mode from the name or file of a schedule.

    Raises ConfigError if it can't be read. If it may be a misspelt mode, the message lists modes.
    """
    try:
        return Decoding.lossy(schedule)
    except ConfigError as error:
        if not get_close_matches(str(schedule), get_args(Mode)):
            raise
        raise ConfigError(
            f"no mode {schedule!r}, expected one of {get_args(Mode)}, and {error}"
        ) from error


def _schedule(value: Any) -> SparsitySchedule:
    return value if isinstance(value, SparsitySchedule) else SparsitySchedule.load(value)
