"""Run a list of jobs on the GPUs of one machine.

    python benchmarks/run_jobs.py benchmarks/jobs.toml --minutes 27 --logs runs/logs
    python benchmarks/run_jobs.py benchmarks/jobs.toml --minutes 9 --logs runs/logs --only longer

Every job is a table ``[[job]]`` in a TOML file:

- ``name``: also the name of its log;
- ``command``: runs in the repository's root folder, without a shell. ``{python}`` is the
  interpreter that runs this script, and ``{seconds}`` the time that the job may take;
- ``minutes``: the limit;
- ``least``: if this many minutes are left, the job starts with a lower limit (optional);
- ``gpus``: 1 by default; 0 for a job that only needs the CPU;
- ``after``: names of jobs that must have succeeded (optional);
- ``environment``: a table of environment variables (optional).

Jobs that run at the same time don't disturb each other's timings: a GPU runs one job at a time, and
each GPU has its own, equal share of the CPU cores. Jobs without GPUs run one at a time on another
share. A job starts as soon as its GPUs are free and the jobs before it have succeeded, in the order
of the file. Free GPUs are kept for a job that needs more of them than are free.

A job is skipped if the time left is shorter than its limit (or than ``least``), if the machine has
too few GPUs, or if a job that it comes after didn't succeed. With ``--only``, jobs don't wait for
those that are left out.

At its limit, a job gets SIGTERM, and all its processes are killed ten seconds later. The time that
a job may take (``{seconds}``, also the environment variable SPARROW_JOB_SECONDS) is ten seconds
shorter than the limit, so that it can end by itself. Time in which a job is stopped by a signal
doesn't count. Its GPUs are free once all processes that it started are gone. If a job ends by
itself, the processes that it leaves behind are ended the same way. So are all jobs after Ctrl-C or
SIGTERM.

LOGS/NAME.log is what a job printed. LOGS/jobs.json lists the jobs of the latest call, and is
rewritten at every event. Times are in seconds from the start. The exit status is 1 if a job failed
or timed out, 128 plus the signal's number after Ctrl-C or SIGTERM, and 0 otherwise. Skipped jobs
don't count.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Literal

from common import ROOT, compact, last_error, parser, rounded
from job_list import Job, read, select
from job_processes import JobProcesses, is_stopped, send

from sparrow.errors import ConfigError
from sparrow.files import check_folder, write_text

GRACE_S = 10.0
"""Time from SIGTERM to SIGKILL."""
MARGIN_S = 10.0
"""``{seconds}`` is this much shorter than a job's limit."""
POLL_S = 0.1
CPUS = Path("/sys/devices/system/cpu")

State = Literal["waiting", "running", "done", "failed", "timed out", "skipped"]
LOST = {"failed": "failed", "timed out": "timed out", "skipped": "was skipped"}


@dataclass(frozen=True)
class Slot:
    """Room for one job: a GPU, or none, and CPU cores."""

    gpu: str | None
    cores: tuple[int, ...]


@dataclass
class Run:
    """A job and its state."""

    job: Job
    state: State = "waiting"
    reason: str = ""
    slots: tuple[Slot, ...] = ()
    start_s: float | None = None
    end_s: float | None = None
    limit_s: float | None = None
    counted_s: float = 0.0  # time that counts towards the limit
    process: subprocess.Popen[bytes] | None = None
    ending: tuple[State, str] | None = None  # the state and reason to come, once it is ending
    killed_from_s: float = 0.0  # when processes that are left get killed

    @property
    def gpus(self) -> list[str]:
        return [slot.gpu for slot in self.slots if slot.gpu is not None]

    def record(self) -> dict[str, object]:
        return {
            "name": self.job.name,
            "state": self.state,
            "gpus": self.gpus,
            "start_s": self.start_s,
            "end_s": self.end_s,
            "limit_s": self.limit_s,
            "exit": self.process.returncode if self.process else None,
            "reason": self.reason,
        }


class Runner:
    """Runs jobs on GPUs until all have ended.

    Args:
        minutes: the limit for all jobs together.
        folder: where logs and ``jobs.json`` go.
    """

    def __init__(
        self, jobs: Sequence[Job], gpus: Sequence[str], minutes: float, folder: Path
    ) -> None:
        self._runs = {job.name: Run(job) for job in jobs}
        self._gpus = list(gpus)
        self._until_s = 60 * minutes
        self._folder = folder
        self._processes = JobProcesses()
        needs_cpu = any(job.gpus == 0 for job in jobs)
        places = [*gpus, None] if needs_cpu else list(gpus)
        cores = shares(physical_cores(), len(places))
        self._slots = [Slot(gpu, own) for gpu, own in zip(places, cores, strict=True)]
        self._now_s = 0.0
        self._signal: signal.Signals | None = None

    def run(self) -> int:
        """Run all jobs, and return the exit status."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._stop)
        self._write()
        began = time.monotonic()
        while True:
            self._skip()
            self._start()
            if not self._in("waiting", "running"):
                break
            time.sleep(POLL_S)
            before_s = self._now_s
            self._now_s = time.monotonic() - began
            for run in self._in("running"):
                self._look_after(run, self._now_s - before_s)
        if self._signal:
            return 128 + self._signal
        return 1 if self._in("failed", "timed out") else 0

    @property
    def _left_s(self) -> float:
        return self._until_s - self._now_s

    def _in(self, *states: State) -> list[Run]:
        return [run for run in self._runs.values() if run.state in states]

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self._signal = signal.Signals(number)

    def _skip(self) -> None:
        """Skip the waiting jobs that can no longer start."""
        for run in self._in("waiting"):
            job = run.job
            lost = [self._runs[name] for name in job.after if self._runs[name].state in LOST]
            if self._signal:
                self._change(run, "skipped", f"the runner got {self._signal.name}")
            elif lost:
                why = f"it comes after {lost[0].job.name}, which {LOST[lost[0].state]}"
                self._change(run, "skipped", why)
            elif job.gpus > len(self._gpus):
                why = f"more GPUs are needed ({job.gpus}) than there are ({len(self._gpus)})"
                self._change(run, "skipped", why)
            elif job.needed_s > self._left_s:
                left = max(0.0, self._left_s) / 60
                why = f"it needs {job.needed_s / 60:g} minutes, and {left:.1f} are left"
                self._change(run, "skipped", why)

    def _start(self) -> None:
        """Start the jobs whose turn it is."""
        taken = {slot for run in self._in("running") for slot in run.slots}
        free = [slot for slot in self._slots if slot not in taken]
        for run in self._in("waiting"):
            job = run.job
            if any(self._runs[name].state != "done" for name in job.after):
                continue
            fitting = [slot for slot in free if (slot.gpu is None) == (job.gpus == 0)]
            kept = fitting[: max(1, job.gpus)]
            if len(kept) == max(1, job.gpus):
                self._launch(run, tuple(kept))
            # Otherwise, later jobs must leave these slots to this one.
            free = [slot for slot in free if slot not in kept]

    def _launch(self, run: Run, slots: tuple[Slot, ...]) -> None:
        job = run.job
        run.slots = slots
        run.start_s = self._now_s
        run.limit_s = min(60 * job.minutes, self._left_s)
        seconds = f"{run.limit_s - min(MARGIN_S, run.limit_s / 2):.0f}"
        environment = {
            **os.environ,
            **job.environment,
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as in nvidia-smi
            "CUDA_VISIBLE_DEVICES": ",".join(run.gpus),
            "SPARROW_JOB_SECONDS": seconds,
        }
        cores = {core for slot in slots for core in slot.cores}
        try:
            run.process = self._processes.start(
                job.arguments(seconds), ROOT, self._log(run), environment, cores
            )
        except OSError as error:
            run.end_s = self._now_s
            self._change(run, "failed", str(error))
            return
        where = f"GPU {', '.join(run.gpus)}" if run.gpus else "the CPU"
        self._change(run, "running", f"on {where}, limit {run.limit_s:.0f} s")

    def _look_after(self, run: Run, passed_s: float) -> None:
        """End a running job if it must end, and free its slots once all its processes are gone."""
        assert run.process is not None
        is_first = run.ending is None
        if is_first:
            run.ending = self._ending(run, passed_s)
            run.killed_from_s = self._now_s + GRACE_S
        if run.ending is None:
            return

        left = self._processes.left(run.process)
        if not left:
            run.end_s = self._now_s
            self._change(run, *run.ending)
        elif is_first:
            send(signal.SIGTERM, left)
        elif self._now_s >= run.killed_from_s:
            send(signal.SIGKILL, left)

    def _ending(self, run: Run, passed_s: float) -> tuple[State, str] | None:
        """Return how and why a running job ends now, or nothing if it goes on."""
        assert run.process is not None and run.limit_s is not None
        code = run.process.poll()
        if code == 0:
            return "done", ""
        if code is not None:
            return "failed", last_error(self._log(run), code)
        if self._signal:
            return "failed", f"the runner got {self._signal.name}"
        if not is_stopped(run.process):
            run.counted_s += passed_s
        if run.counted_s >= run.limit_s:
            return "timed out", f"it took {run.limit_s:.0f} s"
        if self._left_s <= 0:
            return "timed out", "no time is left"
        return None

    def _log(self, run: Run) -> Path:
        return self._folder / f"{run.job.name}.log"

    def _change(self, run: Run, state: State, reason: str) -> None:
        """Set a job's state, and make it known."""
        run.state = state
        run.reason = reason
        because = f": {reason}" if reason else ""
        print(f"{self._now_s:8.1f} s  {run.job.name} {state}{because}", flush=True)
        self._write()

    def _write(self) -> None:
        record = {"gpus": self._gpus, "jobs": [run.record() for run in self._runs.values()]}
        write_text(self._folder / "jobs.json", compact(rounded(record)) + "\n")


def physical_cores() -> list[list[int]]:
    """Return the CPUs that this process may use, grouped by physical core. Cores of one socket
    follow one another.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for cpu in sorted(os.sched_getaffinity(0)):
        folder = CPUS / f"cpu{cpu}" / "topology"
        place = (0, cpu)
        with suppress(FileNotFoundError):  # some containers hide it
            socket = int((folder / "physical_package_id").read_text())
            first = int(re.split("[,-]", (folder / "thread_siblings_list").read_text())[0])
            place = (socket, first)
        found.setdefault(place, []).append(cpu)
    return [found[place] for place in sorted(found)]


def shares(cores: Sequence[Sequence[int]], count: int) -> list[tuple[int, ...]]:
    """Divide physical cores into equal shares of CPUs. If there are fewer cores than shares, each
    share has all of them.
    """
    each = len(cores) // count if count else 0
    parts = [cores[i * each : (i + 1) * each] or cores for i in range(count)]
    return [tuple(cpu for core in part for cpu in core) for part in parts]


def gpus_here() -> list[str]:
    """Return the GPUs in CUDA_VISIBLE_DEVICES or, if it isn't set, those that nvidia-smi lists."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is not None:
        return [gpu for gpu in given.split(",") if gpu]
    if shutil.which("nvidia-smi") is None:
        return []
    listed = subprocess.run(
        ["nvidia-smi", "--query-gpu=index", "--format=csv,noheader"],
        check=True,
        capture_output=True,
        text=True,
    )
    return listed.stdout.split()


@contextmanager
def used_alone(folder: Path) -> Iterator[None]:
    """Lock a folder.

    Raises ConfigError if another process has locked it.
    """
    opened = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"another run_jobs.py writes to {folder}; wait until it ends, or give another "
                "folder"
            ) from None
        yield
    finally:
        os.close(opened)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("jobs", type=Path, metavar="JOBS.toml", help="the list of jobs")
    options.add_argument(
        "--minutes",
        type=float,
        required=True,
        help="limit for all jobs together; they are gone ten seconds later at the latest",
    )
    options.add_argument("--only", nargs="+", metavar="NAME", help="run only these jobs")
    options.add_argument("--gpus", nargs="+", help="the GPUs to use; by default, all")
    options.add_argument(
        "--logs", type=Path, required=True, metavar="FOLDER", help="the folder for logs"
    )
    given = options.parse_args()
    gpus = gpus_here() if given.gpus is None else given.gpus
    if len(set(gpus)) < len(gpus):
        options.error(f"a GPU is named twice: {' '.join(gpus)}; name each GPU once")
    try:
        jobs = read(given.jobs)
        if given.only:
            jobs = select(jobs, given.only)
        with used_alone(check_folder(given.logs)):
            code = Runner(jobs, gpus, given.minutes, given.logs).run()
    except ConfigError as error:
        options.error(str(error))
    sys.exit(code)


if __name__ == "__main__":
    main()
