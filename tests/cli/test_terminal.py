"""Test the terminal output while a command runs, and how commands are started."""

import io
import subprocess
import sys

import pytest

from sparrow import __version__
from sparrow.cli import main, terminal
from sparrow.cli.entry import COMPLETED
from sparrow.cli.terminal import Progress
from tests.conftest import fails

BIN = {"end": 100, "lower_bound": 0.91, "upper_bound": 0.98, "n_sequences": 4}
SHORT = {"end": 200, "lower_bound": 0.2, "upper_bound": 0.3, "n_sequences": 1}
STEP = {
    "step": 3,
    "mismatch": {"bins": [BIN, SHORT]},
    "dense_up_to": 0,
    "reward": {"mean": 0.25},
    "kv": {"read_fraction": 0.5},
    "response": {"mean": 120.0, "tokens": 2400.0},
    "seconds": {"rollout": 2.0, "score": 0.5, "update": 1.0, "sync": 0.1},
}
P5 = "lowest p5 between 0.910 and 0.980  "
LINE = f"reward 0.250  {P5}length 120  1,200 tokens/s  KV read 50%  3.6 s"


def test_each_step_prints_one_flushed_line(monkeypatch):
    class Pipe(io.StringIO):
        """A pipe that counts what has been written to it."""

        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    pipe = Pipe()
    monkeypatch.setattr(sys, "stderr", pipe)
    progress = Progress(12)
    progress("rollout", {"step": 0})
    assert pipe.flushed == "step 1/12  rollout  0 s\n"  # the duration of a step is still unknown
    progress("step", STEP)
    assert pipe.flushed.splitlines()[1:] == [f"step 3/12  {LINE}"]
    progress("rollout", {"step": 3})
    assert len(pipe.flushed.splitlines()) == 2  # a short step prints no lines for its phases
    progress("step", {**STEP, "step": 4, "seconds": {**STEP["seconds"], "rollout": 100.0}})
    progress("score", {"step": 4})
    assert pipe.flushed.splitlines()[3:] == ["step 5/12  score  0 s"]  # a long step does


def test_phases_of_a_resumed_run_count_the_steps_before_it(capsys):
    Progress(12)("rollout", {"step": 4})
    assert capsys.readouterr().err == "step 5/12  rollout  0 s\n"


def test_p5_is_printed_only_for_steps_sampled_by_a_sparse_actor():
    dense = {**STEP, "dense_up_to": None}
    assert terminal.step_line(STEP) == LINE
    assert terminal.step_line(dense) == LINE.replace(P5, "")
    for known, said in (({"acceptance": 0.987}, "drafts accepted 0.987  "), ({}, "")):
        line = terminal.step_line({**dense, "drafts": known})
        assert line == LINE.replace(P5, said)


def test_printed_p5_omits_lengths_sampled_by_the_dense_policy():
    later = {"end": 200, "lower_bound": 0.5, "upper_bound": 0.5, "n_sequences": 4}
    step = {**STEP, "mismatch": {"bins": [{**BIN, "lower_bound": 0.1}, later]}, "dense_up_to": 100}
    assert terminal.step_line(step) == LINE.replace(P5, "lowest p5 0.500  ")
    drafts = {"acceptance": 0.987}  # from a run in mode auto, which verifies up to 100 tokens here
    assert terminal.step_line({**step, "drafts": drafts}) == terminal.step_line(step)
    read_in_full = {**step, "dense_up_to": 200}
    assert terminal.step_line(read_in_full) == LINE.replace(P5, "")


def test_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"sparrow {__version__}\n"


def test_python_m_sparrow_works_and_tolerates_a_closed_pipe():
    done = subprocess.run(
        [sys.executable, "-m", "sparrow", "--version"], capture_output=True, text=True
    )
    assert done.stdout == f"sparrow {__version__}\n" and done.returncode == 0
    code = f"{sys.executable} -m sparrow train --help | head -1"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("usage: sparrow train") and done.stderr == ""


def test_help_lists_the_config_and_version_options(capsys):
    for argv, named in ((["train", "--help"], "--config FILE"), (["--help"], "--version")):
        with pytest.raises(SystemExit):
            main(argv)
        assert named in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
@pytest.mark.parametrize("shell", COMPLETED)
def test_shell_completions_are_printed(shell, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--tyro-print-completion", shell])
    assert not stopped.value.code and "rollout.temperature" in capsys.readouterr().out


@pytest.mark.parametrize(
    "arguments",
    [
        ["--tyro-print-completion", "tcsh"],  # offered by tyro, but needs another package
        ["--tyro-print-completion=tcsh"],
        ["--tyro_print_completion", "tcsh"],
        ["--tyro-write-completion", "tcsh", "/nowhere/sparrow.csh"],
    ],
)
def test_unsupported_shell_is_reported_in_one_sentence(arguments, capsys):
    said = fails(capsys, *arguments)
    assert "completion is 'tcsh', but must be bash, zsh or fish" in said
    assert "'', but must be bash" in fails(capsys, "--tyro-print-completion")


def test_help_lists_only_shells_with_completions(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    said = " ".join(capsys.readouterr().out.split())
    assert "for bash, zsh or fish" in said and "tcsh" not in said


def test_modes_are_printed_as_rows_of_one_table(capsys):
    drafts = {"tokens_per_cycle": 4.5, "accepted": 9, "drafted": 10}
    rows = [
        ("dense", 3e-7, {"kv": {"read_fraction": 1.0}}),
        ("lossless", 2e-7, {"kv": {"read_fraction": 0.76}, "drafts": drafts}),
    ]
    terminal.print_modes("held-out problems", rows)
    cells = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert ["dense", "3e-07", "100%"] in cells and [
        "lossless",
        "2e-07",
        "76%",
        "4.50",
        "90%",
    ] in cells
