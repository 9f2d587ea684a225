"""Soak-test the code sandbox with thousands of mixed programs, checking verdicts, throughput and
leaked resources.

    python benchmarks/sandbox.py          # 2,000 programs, two at a time; writes JSON to benchmarks/results/
    python benchmarks/sandbox.py --programs 200 --workers 8

Most programs are honest: right or wrong, with known verdicts, for every kind of test. One in eight
is an attack. Half of the attacks come from a small set with known verdicts: they loop, fork, fill
memory, flood their output or exit early. The other half come from tests/rewards/sandbox and must
not pass. Before and after the test, the script records this process's memory, and counts its file
descriptors, threads and children. It also counts all processes on the machine that carry this run's
mark. Memory is sampled during the test, too. Throughput is then measured again for honest programs
alone, with ten tests each; half of them read stdin, and half define a function. There are several
rounds, because a short sample says little on a busy machine. The exit status is 0 if every verdict
is as expected, nothing is left behind, and memory doesn't grow.
"""

from __future__ import annotations

import collections
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from common import ROOT, parser, write

sys.path.insert(0, str(ROOT / "tests" / "rewards" / "sandbox"))
from attacks import ATTACKS, TESTS

from sparrow.rewards import CodeVerifier, Judgement, Limits
from sparrow.rewards.sandbox import choose_isolation, walls

LIMITS = Limits(cpu_s=1, wall_s=3.0, program_s=20, memory_bytes=256 << 20)
MARK = "SPARROW_SOAK"
HELD = "anything but pass"
FLAT_MB = 8.0
"""From the first to the second half of a soak test, this process's memory may grow by this much."""

STDIO = {
    "inputs": [f"{n} {n * n}\n" for n in range(10)],
    "outputs": [f"{n + n * n}\n" for n in range(10)],
}
CALL = {
    "fn_name": "add",
    "inputs": [[n, n * n] for n in range(10)],
    "outputs": [n + n * n for n in range(10)],
}
CHECK = {
    "test": "def check(f):\n" + "".join(f" assert f({n}, 1) == {n + 1}\n" for n in range(10)),
    "entry_point": "add",
}
SOLVE = "a, b = map(int, input().split())\n"
HONEST: list[tuple[str, dict[str, Any], str]] = [
    (SOLVE + "print(a + b)", STDIO, "pass"),
    (SOLVE + "print(sum(range(200_000)) * 0 + a + b)", STDIO, "pass"),
    ("import sys, collections, itertools\n" + SOLVE + "print(a + b)", STDIO, "pass"),
    (SOLVE + "print(a - b)", STDIO, "wrong"),
    (SOLVE + "print(a // 0)", STDIO, "error"),
    ("class Solution:\n def add(self, a, b): return a + b", CALL, "pass"),
    ("def add(a, b): return a * b", CALL, "wrong"),
    ("def add(a, b): return a + b", CHECK, "pass"),
    ("def add(a, b): return a", CHECK, "wrong"),
]
HOSTILE: list[tuple[str, dict[str, Any], str]] = [
    ("while True: pass", STDIO, "timeout"),
    ("import time; time.sleep(99)", STDIO, "timeout"),
    ("import os\nwhile True: os.fork()", STDIO, "error"),
    ("bytearray(1 << 40)", STDIO, "memory"),
    ("x = []\nwhile True: x.append(bytearray(1 << 20))", STDIO, "memory"),
    ("while True: print('x' * 10_000)", STDIO, "error"),
    ("import os; os._exit(0)", STDIO, "wrong"),
    ("import os; os.kill(-1, 9)", STDIO, "error"),
    ("import subprocess; subprocess.Popen(['sleep', '99'])", STDIO, "error"),
    (
        "import threading, time\nfor _ in range(9): threading.Thread(target=time.sleep, args=(99,)).start()",
        STDIO,
        "timeout",
    ),
    ("for i in range(99): open(f'/tmp/{i}', 'wb').write(b'x' * (1 << 20))", STDIO, "error"),
    ("import os\ndef add(a, b): os._exit(0)", CALL, "error"),
    ("def add(a, b):\n while True: pass", CALL, "timeout"),
    ("def add(a, b): return [0] * 10**12", CALL, "memory"),
    ("import os\ndef add(a, b): os.closerange(0, 99)", CHECK, "error"),
]


def mixture(count: int, seed: int = 0) -> list[tuple[str, dict[str, Any], str]]:
    """Draw random programs with their tests and expected verdicts. One in eight is hostile."""
    rng = random.Random(seed)
    missing = {
        "OUTSIDE": "/nonexistent",
        "SEGMENT": "0",
        "ABSTRACT": "sparrow-soak",
        "PARENT": str(os.getpid()),
    }
    held = []
    for attack in ATTACKS:
        program = attack.program
        for name, value in missing.items():
            program = program.replace(name, value)
        held.append((program, TESTS[attack.kind], HELD))
    return [
        rng.choice(rng.choice((HOSTILE, held)) if rng.random() < 1 / 8 else HONEST)
        for _ in range(count)
    ]


def left_behind() -> dict[str, Any]:
    """Count this process's resources, and all of this run's sandboxed processes on the machine."""
    me = psutil.Process()
    marked = 0
    for process in psutil.process_iter():
        try:
            marked += process.environ().get(MARK) == str(os.getpid())
        except psutil.Error:
            continue
    return {
        "rss_mb": round(me.memory_info().rss / 2**20, 1),
        "file_descriptors": me.num_fds(),
        "threads": threading.active_count(),
        "children": len(me.children(recursive=True)),
        "sandboxed_processes": marked,
        "temporary_files": len(list(Path(tempfile.gettempdir()).glob("sparrow-*"))),
    }


def soak(
    verifier: CodeVerifier, programs: Sequence[tuple[str, dict[str, Any], str]]
) -> dict[str, Any]:
    """Judge all programs, and return verdicts, times, and any unexpected verdicts."""
    began = time.monotonic()
    rss_mb, me = [], psutil.Process()

    def judge(numbered: tuple[int, tuple[str, dict[str, Any], str]]) -> Judgement:
        number, (program, tests, _) = numbered
        if number % max(1, len(programs) // 10) == 0:
            rss_mb.append(round(me.memory_info().rss / 2**20, 1))
        return verifier.judge(program, tests)

    with ThreadPoolExecutor(verifier.workers) as threads:
        judged = list(threads.map(judge, enumerate(programs)))
    wall_s = time.monotonic() - began
    last = [next((v for v in j.verdicts if v != "pass"), "pass") for j in judged]
    seconds = sorted(j.wall_s for j in judged)
    wrong = [
        {"program": program, "expected": expected, "verdict": verdict, "detail": j.detail}
        for (program, _, expected), verdict, j in zip(programs, last, judged, strict=True)
        if (verdict == "pass" if expected == HELD else verdict != expected)
    ]
    return {
        "programs": len(programs),
        "tests_run": sum(len(j.verdicts) for j in judged),
        "wall_s": round(wall_s, 1),
        "programs_per_minute": round(len(programs) / wall_s * 60),
        "tests_per_minute": round(sum(len(j.verdicts) for j in judged) / wall_s * 60),
        "seconds_per_program": {
            "median": round(statistics.median(seconds), 3),
            "p95": round(seconds[int(0.95 * len(seconds))], 3),
            "max": round(seconds[-1], 3),
        },
        "rss_mb": rss_mb,
        "grew_mb": round(max(rss_mb[len(rss_mb) // 2 :]) - max(rss_mb[: len(rss_mb) // 2]), 1),
        "verdicts": dict(collections.Counter(last)),
        "unexpected": wrong,
    }


def honest(verifier: CodeVerifier, programs: int, rounds: int) -> dict[str, Any]:
    """Judge several rounds of correct programs, and return the throughput's median and range."""
    sample = [HONEST[:6:5][number % 2] for number in range(programs)]
    soaked = [soak(verifier, sample) for _ in range(rounds)]
    rates = [round_["programs_per_minute"] for round_ in soaked]
    return {
        "programs": programs,
        "rounds": rounds,
        "programs_per_minute": {
            "median": statistics.median(rates),
            "least": min(rates),
            "most": max(rates),
        },
        "unexpected": [wrong for round_ in soaked for wrong in round_["unexpected"]],
    }


def machine() -> dict[str, Any]:
    """Describe this machine."""
    bwrap = shutil.which("bwrap")
    version = (
        subprocess.run([bwrap, "--version"], capture_output=True, text=True).stdout.strip()
        if bwrap
        else None
    )
    return {
        "processor": platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "bubblewrap": version,
        "load_before": os.getloadavg()[0],
    }


def main() -> int:
    command = parser(__doc__, "sandbox")
    command.add_argument("--programs", type=int, default=2000)
    command.add_argument("--workers", type=int, default=2)
    command.add_argument("--honest", type=int, default=200, help="honest programs per round")
    command.add_argument("--rounds", type=int, default=5, help="rounds of honest programs")
    options = command.parse_args()
    walls.ENVIRONMENT[MARK] = str(os.getpid())
    tempfile.tempdir = tempfile.mkdtemp(prefix="soak-")
    verifier = CodeVerifier(LIMITS, "auto", options.workers)
    result: dict[str, Any] = {"machine": machine(), "isolation": choose_isolation()}
    result["workers"] = options.workers
    soak(verifier, mixture(40, seed=1))  # warm up: imports, caches and thread stacks aren't leaks
    result["before"] = left_behind()
    result["mixed"] = soak(verifier, mixture(options.programs))
    result["after"] = left_behind()
    result["honest"] = honest(verifier, options.honest, options.rounds)
    shutil.rmtree(tempfile.tempdir)
    write(options.out, result)
    print(json.dumps(result, indent=1))
    kept = ("file_descriptors", "threads", "children", "sandboxed_processes", "temporary_files")
    clean = (
        all(result["after"][name] <= result["before"][name] for name in kept)
        and not result["mixed"]["unexpected"]
        and not result["honest"]["unexpected"]
    )
    return 0 if clean and result["mixed"]["grew_mb"] <= FLAT_MB else 1


if __name__ == "__main__":
    sys.exit(main())
