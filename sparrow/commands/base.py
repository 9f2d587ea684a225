"""What every command is."""

from __future__ import annotations

from sparrow.settings import Settings


class Command(Settings):
    """A subcommand of ``sparrow``: a dataclass of its options."""

    def run(self) -> None:
        """Do it, and say on stdout what came of it. Raises SparrowError: why it cannot be done, in one sentence."""
        raise NotImplementedError

    def interrupted(self) -> str:
        """What is left after Ctrl-C, and how to go on."""
        return "interrupted"
