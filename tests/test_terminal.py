"""What is shown while a command works: lines where nobody watches, a bar that fits where somebody does."""

import io
import re
import subprocess
import sys

import pytest
from rich.console import Console

from sparrow import __version__, terminal
from sparrow.cli import main
from sparrow.terminal import Progress, Status, brief

BIN = {"lower_bound": 0.91, "n_sequences": 4}
STEP = {
    "step": 3,
    "mismatch": {"bins": [BIN, {"lower_bound": 0.2, "n_sequences": 1}]},
    "reward": {"mean": 0.25},
    "kv": {"read_fraction": 0.5},
    "response": {"mean": 120.0, "tokens": 2400.0},
    "seconds": {"rollout": 2.0, "score": 0.5, "update": 1.0, "sync": 0.1},
}
LINE = "reward 0.250  lowest p5 0.910  length 120  1,200 tokens/s  KV read 50%  3.6 s"


@pytest.fixture
def screen(monkeypatch):
    """What is written to a terminal of so many columns."""

    def terminal_of(columns: int) -> io.StringIO:
        written = io.StringIO()
        console = Console(file=written, force_terminal=True, width=columns, color_system=None)
        monkeypatch.setattr(terminal, "Console", lambda **options: console)
        return written

    return terminal_of


def test_away_from_a_terminal_a_step_is_one_line_that_is_flushed(monkeypatch):
    class Pipe(io.StringIO):
        """Counts what has been written out."""

        flushed = ""

        def flush(self) -> None:
            self.flushed = self.getvalue()

    pipe = Pipe()
    monkeypatch.setattr(sys, "stderr", pipe)
    with Progress(12) as progress:
        progress("rollout", {})
        assert pipe.flushed == "step 1/12  rollout  0 s\n"  # nobody knows yet how long a step takes
        progress("step", STEP)
        assert pipe.flushed.splitlines()[1:] == [f"step 3/12  {LINE}"]
        progress("rollout", {})
        assert len(pipe.flushed.splitlines()) == 2  # a short step has no lines for its phases
        progress("step", {**STEP, "step": 4, "seconds": {**STEP["seconds"], "rollout": 100.0}})
        progress("score", {})
        assert pipe.flushed.splitlines()[3:] == ["step 5/12  score  0 s"]  # a long one has
        progress("progress", {"phase": "score", "done": 1, "of": 9})
        assert len(pipe.flushed.splitlines()) == 4  # but not for what goes on in them


def test_processes_other_than_the_first_show_nothing(capsys):
    with Progress(12, shown=False) as progress, Status("loading", shown=False):
        progress("rollout", {})
        progress("step", STEP)
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("columns", [40, 80])
def test_a_bar_fits_on_one_line_of_a_terminal(columns, screen):
    written = screen(columns)
    with Progress(12) as progress:
        progress("step", STEP)
        progress("rollout", {})
        progress._bar.refresh()
        table = progress._bar.make_tasks_table(progress._bar.tasks)
    console = Console(width=columns, file=io.StringIO(), color_system=None)
    console.print(table)
    (line,) = console.file.getvalue().splitlines()
    assert len(line) <= columns and "3/12" in line and "rollout" in line
    assert "reward 0.250" in " ".join(written.getvalue().split())


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize(
    ("told", "shown"),
    [
        ({"phase": "rollout", "done": 7, "of": 64, "tokens": 12_345}, "rollout 7/64, 12.3k tokens"),
        ({"phase": "verify", "done": 0, "of": 64}, "verify 64 responses"),
        ({"phase": "update", "done": 2, "of": 16}, "update 3/16"),
    ],
)
def test_the_bar_says_how_far_a_phase_is(columns, told, shown, screen):
    screen(columns)
    with Progress(12) as progress:
        progress("step", STEP)
        progress("progress", told)
        table = progress._bar.make_tasks_table(progress._bar.tasks)
    console = Console(width=columns, file=io.StringIO(), color_system=None)
    console.print(table)
    (line,) = console.file.getvalue().splitlines()
    assert f"3/12 {shown}" in line and len(line) <= columns


@pytest.mark.parametrize("columns", [40, 80])
def test_long_lines_are_broken_between_words(columns, screen):
    written = screen(columns)
    with Progress(12) as progress:
        progress("step", STEP)
    lines = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", written.getvalue()).splitlines()
    assert max(map(len, lines)) <= columns and " ".join(LINE.split()) in " ".join(" ".join(lines).split())


@pytest.mark.parametrize("columns", [40, 80])
def test_modes_stand_beside_each_other(columns, screen):
    written = screen(columns)
    drafts = {"tokens_per_cycle": 4.5, "accepted": 9, "drafted": 10}
    rows = [
        ("dense", 3e-7, {"kv": {"read_fraction": 1.0}}),
        ("lossless", 2e-7, {"kv": {"read_fraction": 0.76}, "drafts": drafts}),
    ]
    terminal.print_modes("held-out problems", rows)
    lines = written.getvalue().splitlines()
    cells = [line.split() for line in lines]
    assert max(map(len, lines)) <= columns
    assert ["dense", "3e-07", "100%"] in cells and ["lossless", "2e-07", "76%", "4.50", "90%"] in cells


RECORDS = [("aime24", "dense", "0.500 [0.400, 0.600]"), ("aime24", "qwen3-4b-0.86", "0.512 [0.410, 0.620]")]


@pytest.mark.parametrize("columns", [40, 80])
def test_records_stand_in_a_table_where_it_fits_and_below_each_other_elsewhere(columns, screen):
    written = screen(columns)
    terminal.print_records(("benchmark", "schedule", "mean@k"), RECORDS)
    text = written.getvalue()
    lines = text.splitlines()
    assert all(len(line) <= columns for line in lines) and "…" not in text
    assert all(cell in text for record in RECORDS for cell in record)
    assert any("qwen3-4b-0.86" in line and "0.512 [0.410, 0.620]" in line for line in lines) == (columns == 80)


def test_records_away_from_a_terminal_are_whole(capsys):
    terminal.print_records(("mean@k",) * 8, [(RECORDS[0][2],) * 8])
    assert capsys.readouterr().out.splitlines()[-1].count(RECORDS[0][2]) == 8


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1k"), (12_345, "12.3k"), (999_800, "1000k"), (1_234_567, "1.23M")],
)
def test_counts_in_few_digits(count, text):
    assert brief(count) == text


def test_something_is_shown_while_loading(screen, monkeypatch, capsys):
    written = screen(80)
    with Status("loading no/model") as status:
        status.update("starting the engine hf")
    assert "starting the engine hf" in written.getvalue()
    monkeypatch.undo()
    with Status("loading no/model"):
        assert capsys.readouterr().err == "loading no/model\n"


def test_a_long_path_is_not_broken_in_two(capsys):
    path = "/".join(["a-rather-long-folder"] * 10)
    terminal.say(f"wrote {path}")
    terminal.complain(f"no {path}")
    printed = capsys.readouterr()
    assert printed.out == f"wrote {path}\n" and printed.err == f"sparrow: no {path}\n"


def test_the_version_is_printed(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--version"])
    assert stopped.value.code == 0 and capsys.readouterr().out == f"sparrow {__version__}\n"


@pytest.mark.slow
def test_python_m_sparrow_and_a_reader_that_leaves_early():
    done = subprocess.run([sys.executable, "-m", "sparrow", "--version"], capture_output=True, text=True)
    assert done.stdout == f"sparrow {__version__}\n" and done.returncode == 0
    code = f"{sys.executable} -m sparrow train --help | head -1"
    done = subprocess.run(["bash", "-c", code], capture_output=True, text=True)
    assert done.stdout.startswith("usage: sparrow train") and done.stderr == ""


def test_help_names_config_and_the_version(capsys):
    for argv, named in ((["train", "--help"], "--config FILE"), (["--help"], "--version")):
        with pytest.raises(SystemExit):
            main(argv)
        assert named in " ".join(capsys.readouterr().out.split())


def test_completions_are_printed(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["--tyro-print-completion", "bash"])
    assert not stopped.value.code and "--rollout.temperature" in capsys.readouterr().out
