"""The base class of all commands."""

from __future__ import annotations

from sparrow.settings import Settings


class Command(Settings):
    """A subcommand of ``sparrow``: a dataclass of its options."""

    failure = 1  # exit status where the command cannot run

    def run(self) -> None:
        """Run the command and print its result on stdout.

        Raises SparrowError: one sentence that says why it cannot run.
        """
        raise NotImplementedError

    def interrupted(self) -> str:
        """Return the message after Ctrl-C: what is left, and how to continue."""
        return "interrupted"
