"""Entry point of the command line: parse the arguments into one of ``sparrow.cli.commands``, and
run that command.
"""

from __future__ import annotations

import itertools
import os
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import tyro

from sparrow import __version__
from sparrow.cli.commands.arguments import from_toml, recorded
from sparrow.cli.commands.audit import Audit
from sparrow.cli.commands.base import Command
from sparrow.cli.commands.calibrate import Calibrate
from sparrow.cli.commands.cost import Cost
from sparrow.cli.commands.demo import Demo
from sparrow.cli.commands.eval import Eval
from sparrow.cli.commands.measure import Measure
from sparrow.cli.commands.report import Report
from sparrow.cli.commands.train import Train
from sparrow.cli.commands.tune import Tune
from sparrow.errors import ConfigError, SparrowError

COMPLETED = ("bash", "zsh", "fish")  # shells with completions that need no other package
COMMANDS: Any = Demo | Train | Measure | Calibrate | Eval | Cost | Tune | Audit | Report


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line.

    On a SparrowError or OSError, print one sentence and exit with status 1 (2 for ``audit``, where
    1 is a verdict). An audit that crashes also exits with status 2. On Ctrl-C, exit with status
    130.
    """
    # Keep idle OpenMP threads from spinning. On a shared CPU, spinning costs several times as much
    # as the work itself.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    command: Command | None = None
    arguments = list(sys.argv[1:] if argv is None else argv)
    failure = Audit.failure if arguments[:1] == ["audit"] else Command.failure
    try:
        command = parse(arguments)
        command.run()
    except SparrowError as error:
        _stop(error, code=failure)
    except BrokenPipeError:
        # The program that read our output has closed the pipe. Redirect stdout, because otherwise
        # Python would report the error again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(failure)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        _stop(
            f"{where}{error.strerror or error}; free disk space, or choose another path",
            code=failure,
        )
    except Exception:
        if failure == Command.failure:
            raise
        traceback.print_exc()  # Python itself would exit with 1
        sys.exit(failure)
    except KeyboardInterrupt:
        _stop(command.interrupted() if command else "interrupted", code=130)


def _stop(reason: object, code: int) -> NoReturn:
    print(f"sparrow: {reason}", file=sys.stderr)
    sys.exit(code)


def parse(argv: list[str]) -> Command:
    """Parse arguments into a command. Each ``--config FILE`` is replaced by the options in that
    TOML file.
    """
    if argv[:1] == ["--version"]:
        print(f"sparrow {__version__}")
        sys.exit(0)
    argv = [
        part
        for arg in argv
        for part in (arg.split("=", 1) if arg.startswith("--config=") else [arg])
    ]
    configured: list[str] = []
    while "--config" in argv:
        at = argv.index("--config")
        if at + 1 == len(argv):
            raise ConfigError("--config needs a TOML file with settings for 'sparrow train'")
        configured += from_toml(Path(argv[at + 1]))
        del argv[at : at + 2]
    # Options from files come first, so that options on the command line override them. Later files
    # override earlier ones.
    argv = [*argv[:1], *configured, *argv[1:]]
    if argv[:1] == ["train"] and [a for a in argv if a in ("--resume", "--no-resume")][-1:] == [
        "--resume"
    ]:
        # Settings not given on the command line keep their recorded values, but a given ``tau``
        # replaces a recorded ``relative_tau``, and vice versa.
        given = {argument.partition("=")[0].replace("_", "-") for argument in argv}
        other = {"--tau": "--relative-tau", "--relative-tau": "--tau"}
        before = [
            a
            for a in recorded(_run_dir(argv), Train)
            if other.get(a.partition("=")[0]) not in given
        ]
        argv = ["train", *before, *argv[1:]]
    _check_shell(argv)
    _check_model(argv)
    try:
        return tyro.cli(
            COMMANDS,
            args=argv,
            prog="sparrow",
            description=(
                "Fast RL rollouts with sparse attention, without breaking the training. "
                "--version prints the version; --tyro-print-completion SHELL prints "
                "completions for bash, zsh or fish."
            ),
            config=(tyro.conf.ConsolidateSubcommandArgs,),
        )
    except ConfigError as error:  # an option's value is out of range
        _stop(error, code=2)


def _check_shell(argv: Sequence[str]) -> None:
    """Check that the given shell has completions. Raises ConfigError if it has none."""
    for argument, following in itertools.pairwise([*argv, ""]):
        name, equals, value = argument.replace("_", "-").partition("=")
        if name not in ("--tyro-print-completion", "--tyro-write-completion"):
            continue
        shell = value if equals else following
        if shell not in COMPLETED:
            shells = f"{', '.join(COMPLETED[:-1])} or {COMPLETED[-1]}"
            raise ConfigError(f"{name} is {shell!r}, but must be {shells}")


def _check_model(argv: Sequence[str]) -> None:
    """Check that ``--model`` is given if the command needs a model.

    Raises ConfigError if ``--model`` is missing.
    """
    flags = {argument.partition("=")[0] for argument in argv[1:]}
    if (
        argv[:1]
        and argv[0] in ("train", "measure", "calibrate", "eval", "audit")
        and not flags & {"--model", "-h", "--help"}
    ):
        raise ConfigError(
            f"sparrow {argv[0]} needs --model NAME or PATH; "
            "--model reasoner is the small model that comes with Sparrow"
        )


def _run_dir(argv: Sequence[str]) -> Path:
    """Find the run directory in ``train``'s arguments."""
    run_dir = Train.run_dir
    for argument, following in itertools.zip_longest(argv, argv[1:]):
        name, equals, value = argument.partition("=")
        if name in ("--run-dir", "--run_dir") and (equals or following):
            run_dir = value if equals else following
    return Path(run_dir)
