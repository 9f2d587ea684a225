"""The options that say how an engine decodes, shared by training and by the commands that sample.

The comment next to or above a field is also its command-line help. Out-of-range values raise
ConfigError.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sparrow.decoding import LOSSLESS_SETTINGS, Decoding, LosslessSettings, Mode
from sparrow.errors import ConfigError
from sparrow.schedule import SparsitySchedule, auto_start
from sparrow.settings import Settings, require


@dataclass(frozen=True, kw_only=True)
class ModeOptions(Settings):
    """The mode and the draft schedule. They have their own base class so that ``--help`` lists them
    before the other ``DecodingOptions``.
    """

    # dense: every step reads the whole cache. lossy: steps read only the pages that the schedule
    # selects, so samples follow the sparse actor. lossless: sparse steps draft tokens and a dense
    # step verifies them, so samples follow the dense policy; no schedule is needed. auto (only in
    # sparrow train with the engine hf): lossless up to a certain length, lossy beyond it. The run
    # finds the length beyond which p5 stays at tau and lossy is faster. Drafts use the same
    # schedule. Defaults to lossy with a schedule, and to dense without one.
    mode: Mode | None = None
    # Lossless: the schedule for drafts, in the same form as --schedule. Defaults to 64 pages in
    # every layer at any length.
    draft_schedule: str | None = None


AUTO_SETTINGS = ("draft_tokens", "guess_tokens")
"""The settings of mode lossless that mode auto has as well."""


@dataclass(frozen=True, kw_only=True)
class DecodingOptions(LosslessSettings, ModeOptions):
    """Options that say how an engine decodes."""

    # whether mode auto and schedules that begin with auto are allowed, as in training
    supports_auto = False

    # Lossless in vLLM: a second schedule to measure. One in every meter_every cycles measures its
    # acceptance on the first draft, without changing the samples. A lossy run under this schedule
    # would start with this acceptance.
    meter_schedule: str | None = None

    def decoding(self, schedule: str | None) -> Decoding:
        """Build the decoding from these options and the value of ``--schedule``. None or ``dense``
        means no schedule.

        Raises ConfigError if the options contradict each other, or a schedule cannot be read.
        """
        chosen = None if schedule == "dense" else schedule
        start = auto_start(schedule)
        if self.mode == "lossless":
            if start is not None:
                raise ConfigError(
                    f"schedule is {schedule!r}, but mode lossless has no p5 by which to "
                    "adjust the pages, because samples follow the dense policy; leave "
                    "schedule out"
                )
            if chosen:
                raise ConfigError(
                    f"schedule is {schedule!r}, but with mode lossless, samples follow the "
                    "dense policy under any schedule; leave schedule out, or set "
                    "draft_schedule to use it for drafts"
                )
            return Decoding.lossless(**{name: getattr(self, name) for name in LOSSLESS_SETTINGS})
        if self.mode == "auto":
            require(
                self,
                "mode",
                self.supports_auto,
                "dense, lossless or lossy, because only sparrow train supports auto",
            )
            require(
                self,
                "draft_schedule",
                self.draft_schedule is None,
                "left out with mode auto, because drafts then use schedule",
            )
            self._require_defaults(name for name in LOSSLESS_SETTINGS if name not in AUTO_SETTINGS)
            if not chosen or start is not None:
                raise ConfigError(
                    f"schedule is {schedule!r}, but mode auto needs a schedule for drafts and "
                    "unverified steps, such as qwen3-4b-0.86; set one, or use mode lossless"
                )
            schedule_of_both = SparsitySchedule.load(chosen)
            return Decoding(
                "auto",
                schedule_of_both,
                draft_tokens=self.draft_tokens,
                guess_tokens=self.guess_tokens,
            )
        if start is not None and not self.supports_auto:
            raise ConfigError(
                f"schedule is {schedule!r}, but only the command sparrow train can adjust "
                "schedules; set a fixed schedule"
            )
        self._require_defaults(LOSSLESS_SETTINGS)
        if self.mode == "dense" and chosen:
            raise ConfigError(
                f"schedule is {schedule!r}, but mode is 'dense', which reads everything; "
                "leave out one of them"
            )
        if self.mode == "lossy" and not chosen:
            raise ConfigError(
                "mode is 'lossy', which needs a schedule; set one, such as qwen3-4b-0.86, "
                "or use mode lossless"
            )
        return Decoding.lossy((chosen or "dense") if start is None else start)

    def _require_defaults(self, names: Iterable[str]) -> None:
        """Check that these settings, which only mode lossless has, are left out.

        Raises ConfigError if one is not.
        """
        defaults = DecodingOptions()
        for name in names:
            is_default = getattr(self, name) == getattr(defaults, name)
            require(self, name, is_default, "left out unless mode is lossless")
