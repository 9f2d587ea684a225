"""Test the runner of jobs with jobs that take no GPU: what it starts when, what it ends, and what
it leaves behind.
"""

import importlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from sparrow.errors import ConfigError

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PATIENCE_S = 30.0
CALL = """
import run_jobs
run_jobs.GRACE_S, run_jobs.POLL_S = 2.0, 0.02
run_jobs.main()
"""
PATIENT = "wait_for() { for i in $(seq 1500); do [ -e $1 ] && return; sleep 0.02; done; exit 9; }; "
"""A shell function that waits for a file, and fails if the file doesn't appear."""


@pytest.fixture
def modules(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield tuple(importlib.import_module(name) for name in ("job_list", "run_jobs"))
    for name in ("job_list", "job_processes", "run_jobs", "common"):
        sys.modules.pop(name, None)


def job(name: str, script: str = "true", **values: object) -> str:
    """Return a job of a TOML file. It runs a shell script."""
    table = {"name": name, "command": shlex.join(["sh", "-c", PATIENT + script]), "minutes": 1}
    lines = [f"{key} = {json.dumps(value)}" for key, value in (table | values).items()]
    return "\n".join(["[[job]]", *lines, ""])


class Jobs:
    """Runs ``run_jobs.py`` in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.logs = folder / "logs"

    def start(self, *jobs: str, gpus: int = 1, minutes: float = 5, more: tuple = ()):
        (self.folder / "jobs.toml").write_text("".join(jobs))
        command = [sys.executable, "-c", CALL, str(self.folder / "jobs.toml")]
        command += ["--minutes", str(minutes), "--logs", str(self.logs), *more]
        if gpus:
            command += ["--gpus", *map(str, range(gpus))]
        path = os.pathsep.join([str(BENCHMARKS), str(ROOT)])
        environment = {**os.environ, "PYTHONPATH": path, "D": str(self.folder)}
        return subprocess.Popen(
            command,
            env=environment | {"CUDA_VISIBLE_DEVICES": ""},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def run(self, *jobs: str, code: int = 0, **options):
        """Run jobs, check the exit status, and return their records and what was printed."""
        runner = self.start(*jobs, **options)
        printed, _ = runner.communicate(timeout=PATIENCE_S)
        assert runner.returncode == code, printed
        return self.records(), printed

    def records(self) -> dict:
        found = json.loads((self.logs / "jobs.json").read_text())
        return {record["name"]: record for record in found["jobs"]}

    def pid(self, name: str) -> int:
        """Return the process id that a job writes to a file."""
        path = self.folder / name
        wait_for(lambda: path.exists() and path.read_text().endswith("\n"))
        return int(path.read_text())


@pytest.fixture
def jobs(tmp_path):
    return Jobs(tmp_path)


def wait_for(condition) -> None:
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.02)


def is_gone(pid: int) -> bool:
    with suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    return True


# --- the list of jobs ---


def test_jobs_are_read_with_their_defaults(modules, tmp_path):
    job_list, _ = modules
    path = tmp_path / "jobs.toml"
    path.write_text(
        '[[job]]\nname = "a"\ncommand = "true"\nminutes = 2\n'
        '[[job]]\nname = "b"\ncommand = "true"\nminutes = 1.5\nleast = 1\ngpus = 0\n'
        'after = ["a"]\nenvironment = { X = "y" }\n'
    )
    first, second = job_list.read(path)
    assert first == job_list.Job("a", "true", minutes=2, gpus=1, least=None, after=())
    assert (first.needed_s, second.needed_s) == (120, 60)
    assert (second.gpus, second.after, second.environment) == (0, ("a",), {"X": "y"})


def test_placeholders_are_filled_in_and_other_braces_are_left_alone(modules):
    job_list, _ = modules
    command = "{python} a.py --options '{\"x\": 0.05}' --deadline {seconds} --name 'two words'"
    arguments = job_list.Job("a", command, 1).arguments("350")
    assert arguments == [
        *(sys.executable, "a.py", "--options", '{"x": 0.05}'),
        *("--deadline", "350", "--name", "two words"),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[job]", "not valid TOML.*; correct it"),
        ("jobs = 3", r"unknown key 'jobs'; write every job as a table \[\[job\]\]"),
        ("job = 3", r"no list of jobs; write every job as a table \[\[job\]\]"),
        (job("a", gpu=1), "job 'a' has the unknown key 'gpu'; use name, command, .*gpus"),
        ("[[job]]\nname = 'a'", "job 'a' has no command; add it"),
        (job("a/b"), "job 'a/b': name must be letters.*; got 'a/b'"),
        (job("a", command="it's"), "job 'a': command must be .* closed quotes; got \"it's\""),
        (job("a", command=" "), "job 'a': command must be"),
        (job("a", minutes="3"), "job 'a': minutes must be a number above zero; got '3'"),
        (job("a", minutes=0), "got 0"),
        (job("a", gpus=True), "job 'a': gpus must be a number of GPUs, .*; got True"),
        (job("a", least=2), "least must not exceed the limit of 1 minutes; got 2"),
        (job("a", after="b"), "job 'a': after must be a list of names of jobs; got 'b'"),
        (job("a") + "environment = { X = 1 }", "environment must be a table of strings; got"),
        (job("a") * 2, "2 jobs have the name 'a'; rename one"),
        (job("a", after=["b"]), "'a' comes after 'b', which is not a job; use one of a"),
        (
            job("a", after=["b"]) + job("b", after=["a"]),
            "wait for each other: (a -> b -> a|b -> a -> b); remove one 'after'",
        ),
    ],
)
def test_a_list_that_cannot_be_run_is_refused(modules, tmp_path, text, message):
    job_list, _ = modules
    path = tmp_path / "jobs.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message):
        job_list.read(path)


def test_a_missing_file_and_an_unknown_name_are_refused(modules, tmp_path):
    job_list, _ = modules
    with pytest.raises(ConfigError, match=r"cannot read .*: No such file"):
        job_list.read(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="no job 'b'; use one of a"):
        job_list.select([job_list.Job("a", "true", 1)], ["b"])


def sources(script: Path) -> str:
    """Return the text of a script, and of the modules in its folder that it imports."""
    text = script.read_text()
    names = re.findall(r"^(?:from|import) (\w+)", text, flags=re.MULTILINE)
    imported = (script.with_name(f"{name}.py") for name in names)
    return text + "".join(path.read_text() for path in imported if path.exists())


def test_the_committed_jobs_use_scripts_and_options_that_exist(modules):
    job_list, _ = modules
    listed = job_list.read(BENCHMARKS / "jobs.toml")
    for each in listed:
        python, script, *arguments = each.arguments("60")
        assert python == sys.executable
        text = sources(ROOT / script)
        for option in (word for word in arguments if word.startswith("--")):
            name = option.removeprefix("--")
            field = f"\n    {name.replace('-', '_')}: "
            # The option for choosing arms is named in a call of ``audits.command_line``.
            ways = (f'"{option}"', field, f', "{name}", ')
            assert any(way in text for way in ways), f"{each.name}: {option}"
    assert {each.gpus for each in listed} == {1, 2}


# --- the machine ---


def test_both_threads_of_a_core_belong_to_the_same_share(modules, monkeypatch, tmp_path):
    _, script = modules
    monkeypatch.setattr(script, "CPUS", tmp_path)
    monkeypatch.setattr(script.os, "sched_getaffinity", lambda pid: set(range(8)))
    for cpu in range(8):  # two sockets with two cores each, which have two threads each
        core = cpu % 4
        folder = tmp_path / f"cpu{cpu}" / "topology"
        folder.mkdir(parents=True)
        (folder / "physical_package_id").write_text(f"{core % 2}\n")
        (folder / "thread_siblings_list").write_text(f"{core},{core + 4}\n")
    cores = script.physical_cores()
    assert cores == [[0, 4], [2, 6], [1, 5], [3, 7]]
    assert script.shares(cores, 2) == [(0, 4, 2, 6), (1, 5, 3, 7)]
    assert script.shares(cores, 3) == [(0, 4), (2, 6), (1, 5)]
    assert script.shares(cores[:1], 2) == [(0, 4), (0, 4)]
    assert script.shares(cores, 0) == []


def test_cpus_of_unknown_topology_count_as_cores(modules, monkeypatch, tmp_path):
    _, script = modules
    monkeypatch.setattr(script, "CPUS", tmp_path)
    monkeypatch.setattr(script.os, "sched_getaffinity", lambda pid: {3, 5})
    assert script.physical_cores() == [[3], [5]]


def test_default_gpus_are_the_visible_ones(modules, monkeypatch):
    _, script = modules
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,GPU-ab")
    assert script.gpus_here() == ["2", "GPU-ab"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert script.gpus_here() == []


# --- when jobs run ---


def test_a_job_learns_its_gpus_and_its_time_and_has_cores_of_its_own(jobs, modules):
    _, script = modules
    found, _ = jobs.run(
        job("both", "echo $CUDA_VISIBLE_DEVICES $SPARROW_JOB_SECONDS {seconds} $X", gpus=2)
        + 'environment = { X = "y" }\n',
        job(
            "one",
            "echo $CUDA_VISIBLE_DEVICES; {python} -c 'import os; print(*os.sched_getaffinity(0))'",
        ),
        gpus=2,
    )
    assert (jobs.logs / "both.log").read_text() == "0,1 50 50 y\n"
    gpu, own = (jobs.logs / "one.log").read_text().splitlines()
    assert [gpu] == found["one"]["gpus"]
    assert {*map(int, own.split())} == {*script.shares(script.physical_cores(), 2)[int(gpu)]}
    assert {record["state"] for record in found.values()} == {"done"}
    assert found["both"]["gpus"] == ["0", "1"] and found["both"]["exit"] == 0


def test_a_job_without_gpus_sees_none(jobs):
    found, _ = jobs.run(job("cpu", 'echo "gpus: $CUDA_VISIBLE_DEVICES"', gpus=0))
    assert (jobs.logs / "cpu.log").read_text() == "gpus: \n" and found["cpu"]["gpus"] == []


def test_a_gpu_runs_one_job_at_a_time_and_the_cpu_another(jobs):
    alone = "mkdir $D/gpu && sleep 0.1 && rmdir $D/gpu"
    found, printed = jobs.run(
        job("a", "touch $D/a; wait_for $D/cpu; " + alone),
        job("b", alone),
        job("c", alone),
        job("cpu", "touch $D/cpu; wait_for $D/a", gpus=0),
    )
    assert {record["state"] for record in found.values()} == {"done"}, printed
    assert found["a"]["end_s"] <= found["b"]["start_s"] < found["b"]["end_s"]
    assert found["b"]["end_s"] <= found["c"]["start_s"]
    assert "a running: on GPU 0, limit 60 s" in printed and "a done" in printed


def test_a_later_job_starts_while_an_earlier_one_waits_for_another(jobs):
    found, _ = jobs.run(
        job("third", "test -e $D/first", after=["first"]),
        job("first", "wait_for $D/second; touch $D/first"),
        job("second", "touch $D/second"),
        gpus=2,
    )
    assert {record["state"] for record in found.values()} == {"done"}


def test_free_gpus_are_kept_for_a_job_that_needs_more(jobs):
    found, _ = jobs.run(
        job("one", "wait_for $D/cpu"),
        job("two", gpus=2),
        job("later"),
        job("cpu", "touch $D/cpu", gpus=0),
        gpus=2,
    )
    assert found["two"]["start_s"] >= found["one"]["end_s"]
    assert found["later"]["start_s"] >= found["two"]["end_s"]
    assert found["cpu"]["start_s"] < found["one"]["end_s"]


def test_jobs_after_a_failed_one_are_skipped_and_others_run(jobs):
    found, printed = jobs.run(
        job("bad", "echo 'ValueError: too long' >&2; exit 3"),
        job("next", after=["bad"]),
        job("last", after=["next"]),
        job("unknown", command="no-such-command"),
        job("good"),
        code=1,
    )
    states = {name: record["state"] for name, record in found.items()}
    assert states == {
        **{"bad": "failed", "next": "skipped", "last": "skipped"},
        **{"unknown": "failed", "good": "done"},
    }
    assert (found["bad"]["exit"], found["bad"]["reason"]) == (3, "ValueError: too long")
    assert "next skipped: it comes after bad, which failed" in printed
    assert "last skipped: it comes after next, which was skipped" in printed
    assert found["unknown"]["reason"].endswith("No such file or directory: 'no-such-command'")


def test_a_job_for_more_gpus_than_there_are_is_skipped(jobs):
    found, printed = jobs.run(job("two", gpus=2), job("one"), job("cpu", gpus=0))
    assert [found[name]["state"] for name in ("two", "one", "cpu")] == ["skipped", "done", "done"]
    assert "two skipped: more GPUs are needed (2) than there are (1)" in printed
    found, _ = jobs.run(job("one"), job("cpu", gpus=0), gpus=0)
    assert [found[name]["state"] for name in ("one", "cpu")] == ["skipped", "done"]


def test_a_job_starts_only_if_its_limit_or_its_least_time_fits(jobs):
    found, printed = jobs.run(
        job("whole", "sleep 0.1", minutes=0.5),
        job("long", minutes=0.5),
        job("cut", "echo {seconds}", minutes=2, least=0.1),
        minutes=0.5,
    )
    assert [found[name]["state"] for name in found] == ["done", "skipped", "done"]
    assert "long skipped: it needs 0.5 minutes, and 0.5 are left" in printed
    assert found["whole"]["limit_s"] == 30 and 0 < found["cut"]["limit_s"] < 30
    assert 0 < int((jobs.logs / "cut.log").read_text()) <= 20


def test_only_the_named_jobs_run_and_they_do_not_wait_for_others(jobs):
    given = job("a", "exit 1"), job("b", after=["a"]), job("c", after=["b"])
    found, _ = jobs.run(*given, more=("--only", "c", "b"))
    assert list(found) == ["b", "c"]
    assert found["b"]["end_s"] <= found["c"]["start_s"]
    _, printed = jobs.run(*given, more=("--only", "d"), code=2)
    assert "there is no job 'd'; use one of a, b, c" in printed


def test_a_gpu_cannot_be_named_twice(jobs):
    runner = jobs.start(job("a"), gpus=0, more=("--gpus", "1", "1"))
    printed, _ = runner.communicate(timeout=PATIENCE_S)
    assert runner.returncode == 2 and "named twice: 1 1; name each GPU once" in printed


# --- how jobs end ---

STUBBORN = (
    "trap '' TERM; echo $$ >$D/main; "
    "setsid sh -c 'echo $$ >$D/away; exec sleep 100' & "  # leaves the session
    "(setsid sh -c 'echo $$ >$D/orphan; exec sleep 100' &) ; "  # and loses its parent
    "wait_for $D/away; wait_for $D/orphan; "
)
"""Starts processes that ignore SIGTERM, and writes their process ids to files."""
GONE = "for p in main away orphan; do wait_for $D/$p; ! kill -0 $(cat $D/$p) || exit 1; done"
"""Fails if one of these processes still exists."""


def test_jobs_may_clean_up_at_their_limit_and_then_everything_they_started_is_gone(jobs):
    polite = "trap 'echo cleaned; exit 0' TERM; while true; do sleep 0.05; done"
    found, printed = jobs.run(
        job("long", STUBBORN + "sleep 100; sleep 100", minutes=5 / 60),
        job("polite", polite, minutes=5 / 60),
        job("next", GONE, gpus=2),
        gpus=2,
        code=1,
    )
    assert [found[name]["state"] for name in found] == ["timed out", "timed out", "done"]
    assert (found["long"]["exit"], found["polite"]["exit"]) == (-signal.SIGKILL, 0)
    assert "cleaned" in (jobs.logs / "polite.log").read_text()
    assert "long timed out: it took 5 s" in printed
    assert found["next"]["start_s"] >= found["long"]["end_s"] >= 5


def test_only_what_an_ended_job_left_behind_is_gone_before_the_next_one_starts(jobs):
    orphan = "(setsid sh -c 'echo $$ >$D/kept; exec sleep 100' &); wait_for $D/kept; "
    found, _ = jobs.run(
        job("short", STUBBORN + "wait_for $D/kept; (sleep 100; sleep 100) &"),
        job("next", f"{GONE}; touch $D/checked"),
        job("beside", orphan + "wait_for $D/checked; kill -0 $(cat $D/kept)", gpus=0),
    )
    assert {record["state"] for record in found.values()} == {"done"}
    assert found["next"]["start_s"] >= found["short"]["end_s"]
    assert is_gone(jobs.pid("kept"))


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_all_jobs_end_when_the_runner_is_told_to_stop(jobs, number):
    runner = jobs.start(job("long", STUBBORN + "sleep 100; sleep 100"), job("next"))
    pids = [jobs.pid(name) for name in ("main", "away", "orphan")]
    wait_for(lambda: jobs.records()["long"]["state"] == "running")
    runner.send_signal(number)
    printed, _ = runner.communicate(timeout=PATIENCE_S)
    assert runner.returncode == 128 + number
    assert all(map(is_gone, pids))
    assert f"next skipped: the runner got {number.name}" in printed
    assert f"long failed: the runner got {number.name}" in printed
    assert [record["state"] for record in jobs.records().values()] == ["failed", "skipped"]


def test_a_job_ends_when_the_runner_is_killed(jobs):
    runner = jobs.start(job("long", "echo $$ >$D/main; while true; do sleep 0.05; done"))
    pid = jobs.pid("main")
    runner.kill()
    runner.communicate(timeout=PATIENCE_S)
    wait_for(lambda: is_gone(pid))


def test_time_in_which_a_job_is_stopped_does_not_count(jobs):
    runner = jobs.start(
        job("paused", "echo $$ >$D/main; kill -STOP $$; echo again", minutes=4 / 60)
    )
    paused = psutil.Process(jobs.pid("main"))
    wait_for(lambda: paused.status() == psutil.STATUS_STOPPED)
    time.sleep(4.5)
    assert jobs.records()["paused"]["state"] == "running"
    paused.resume()
    runner.communicate(timeout=PATIENCE_S)
    assert jobs.records()["paused"]["state"] == "done"


def test_a_second_runner_with_the_same_folder_is_refused(jobs):
    first = jobs.start(job("a", "echo $$ >$D/a; wait_for $D/go"))
    jobs.pid("a")
    _, printed = jobs.run(job("a"), code=2)
    assert "another run_jobs.py writes to" in printed and "or give another folder" in printed
    (jobs.folder / "go").touch()
    first.communicate(timeout=PATIENCE_S)
    assert jobs.records()["a"]["state"] == "done"
