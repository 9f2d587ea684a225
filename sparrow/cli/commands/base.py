"""The base class of all commands."""

from __future__ import annotations

from sparrow.settings import Settings


class Command(Settings):
    """A subcommand of ``sparrow``: a dataclass of its options."""

    failure = 1  # exit status if the command cannot run

    def run(self) -> None:
        """Run the command and print its result on stdout.

        Raises SparrowError if the command cannot run; the message says why in one sentence.
        """
        raise NotImplementedError

    def interrupted(self) -> str:
        """Return the message to print after Ctrl-C: what was saved, and how to continue."""
        return "interrupted"
