"""Test that a program's limits can be configured, and that they count only its own time and output,
however busy the machine is.
"""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from sparrow.cli.loading import load_problems
from sparrow.errors import ConfigError
from sparrow.rewards import CodeVerifier, Limits
from sparrow.rewards.sandbox import (
    Child,
    ChildTimeoutError,
    OwnTime,
    Sandbox,
    choose_isolation,
    processes,
)
from sparrow.rewards.sandbox.inside import clock, programs
from sparrow.rewards.sandbox.processes import Process, family

DATA = Path(__file__).parents[1] / "data"
LIMITS = Limits(cpu_s=1, wall_s=1.0, program_s=20)
ROOMY = Limits(cpu_s=20, wall_s=60.0, program_s=120)  # for programs that must not be stopped
SLEEPS = {"fn_name": "f", "inputs": [[1.6]], "outputs": [1]}
SLEEPER = "import time\ndef f(s):\n time.sleep(s)\n return 1"


def pretend(monkeypatch, share, state="S"):
    """Make a sandbox look like a process that gets this share of a processor."""
    start = time.monotonic()
    seen = lambda pid: [Process(state, 1, share * (time.monotonic() - start))]  # noqa: E731
    monkeypatch.setattr(processes, "family", seen)


@pytest.mark.parametrize(
    ("share", "seconds", "verdict"), [(0.0, 60, "timeout"), (0.1, 1.6, "pass")]
)
def test_called_functions_get_more_time_if_they_wait_for_the_processor(
    monkeypatch, share, seconds, verdict
):
    """The limit is 1 s. A sleeping program is stopped then, but a program that gets a tenth of a
    processor may take longer.
    """
    pretend(monkeypatch, share)
    tests = {**SLEEPS, "inputs": [[seconds]]}
    assert CodeVerifier(LIMITS).judge(SLEEPER, tests).verdicts == (verdict,)


@pytest.mark.parametrize(("share", "seconds", "end"), [(0.0, 60, (-9, "")), (0.1, 1.6, (0, None))])
def test_programs_judged_by_output_get_more_time_if_they_wait_for_the_processor(
    monkeypatch, share, seconds, end
):
    start = time.monotonic()
    pid = os.fork()
    if pid == 0:
        time.sleep(seconds)
        os._exit(0)
    monkeypatch.setattr(time, "clock_gettime", lambda clock: share * (time.monotonic() - start))
    code, _, why = programs.reap(pid, SimpleNamespace(over=lambda pid: None), 1.0)
    assert (code, why) == end


def test_a_program_that_never_gets_the_processor_times_out(monkeypatch):
    """The call takes a minute, but only 0.3 s of the processor, so no other limit stops it."""
    monkeypatch.setattr(clock, "STARVED", 2)
    pretend(monkeypatch, 0.005, "R")
    tests = {**SLEEPS, "inputs": [[60]]}
    judgement = CodeVerifier(LIMITS).judge(SLEEPER, tests)
    assert judgement.verdicts == ("timeout",) and 2 <= judgement.wall_s < 6


def wait_until(holds):
    """Wait for a condition to hold. Fail after a minute."""
    deadline = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_processor_time_includes_child_processes():
    def states(process):
        return {one.state for one in family(process.pid)}

    burn = "import time\nwhile time.process_time() < 0.4: pass"
    script = f"import subprocess, sys, time\nsubprocess.run([sys.executable, '-c', {burn!r}])"
    script += "\nprint(1, flush=True)\ntime.sleep(600)"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"1\n"
        wait_until(lambda: states(process) == {"S"})
        first = family(process.pid)
        time.sleep(0.3)
        used = [sum(one.processor_s for one in seen) for seen in (first, family(process.pid))]
        assert 0.4 <= used[0] < 1.5 and used[1] - used[0] < 0.05
        process.kill()
    assert family(process.pid) == []
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        wait_until(lambda: states(process) == {"R"})
        process.kill()
    with subprocess.Popen(
        ["sh", "-c", "sleep 600 & sleep 600 & wait"], start_new_session=True
    ) as process:
        try:
            wait_until(lambda: len(family(process.pid)) == 3)
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def test_own_time_consists_of_processor_time_and_sleep(monkeypatch):
    time_limit = OwnTime(1.0)
    time_limit.count(0.5, 0.3)  # waited for the processor for 0.2 s
    time_limit.count(0.5, 0.01, runnable=True)  # waited for nearly all of it
    assert time_limit.spent_s == pytest.approx(0.31) and time_limit.left_s == pytest.approx(0.69)
    time_limit.count(0.5, 0.01)  # asleep
    time_limit.count(0.1, 0.2)  # no more than the elapsed time
    assert time_limit.spent_s == pytest.approx(0.91) and not time_limit.over
    monkeypatch.setattr(clock, "STARVED", 0)
    assert time_limit.over
    monkeypatch.undo()
    time_limit.count(0.1, 0.1)
    assert time_limit.over and time_limit.left_s == 0.0


def test_time_before_a_program_exits_counts_toward_its_limit(monkeypatch):
    """After the first test, each test sleeps for 1.5 s and then exits, so the limit of 4 s is
    reached in the fourth.
    """
    pretend(
        monkeypatch, 0.0
    )  # a real process might happen to be awake whenever it is checked, so that its sleep would not count
    program = "import os, time\ndef f(s):\n time.sleep(s)\n os._exit(1)"
    tests = {"fn_name": "f", "inputs": [[0.0], *[[1.5]] * 5], "outputs": [1] * 6}
    judgement = CodeVerifier(Limits(program_s=4)).judge(program, tests, stop_early=False)
    assert (
        judgement.verdicts[0] == "error"
        and judgement.verdicts[-1] == "timeout"
        and len(judgement.verdicts) <= 4
    )


def test_a_program_that_waits_for_the_processor_does_not_count_as_asleep(monkeypatch):
    """The program was runnable for all of the 1.6 s, but never got a processor."""
    pretend(monkeypatch, 0.0, "R")
    assert CodeVerifier(LIMITS).judge(SLEEPER, SLEEPS).passed


READS = [
    "print(sum(map(int, open('/dev/stdin'))))",
    "print(sum(map(int, open('/dev/stdin').read().split())))",
    "import pathlib; print(sum(map(int, pathlib.Path('/dev/stdin').read_text().split())))",
    "import os; print(sum(map(int, os.read(os.open('/dev/stdin', os.O_RDONLY), 99).split())))",
    "import io; print(sum(map(int, io.open('/dev/fd/0', 'rb').read().split())))",
    "with open('/proc/self/fd/0') as f: print(sum(map(int, f.readlines())))",
    "print(sum(map(int, open(0).read().split())))",
    "import fileinput; print(sum(map(int, fileinput.input('/dev/stdin'))))",
]


@pytest.mark.parametrize("program", READS)
def test_standard_input_can_be_opened_by_name(program):
    verdicts = (
        CodeVerifier(ROOMY)
        .judge(program, {"inputs": ["1\n2\n", "3\n4\n5\n"], "outputs": ["3", "12"]})
        .verdicts
    )
    assert verdicts == ("pass", "pass")


def test_regular_files_can_be_opened_as_usual():
    program = (
        "open('x', 'w').write('7')\nprint(open('x').read())\n"
        "try: open('/dev/none')\nexcept OSError: print('none')"
    )
    assert CodeVerifier(ROOMY).judge(program, {"inputs": [""], "outputs": ["7\nnone"]}).passed


@pytest.mark.parametrize(
    ("definition", "value"),
    [
        ("class E(str, enum.Enum): A = 'red'", "red"),
        ("class E(enum.StrEnum): A = 'red'", "red"),
        ("class E(enum.IntEnum): A = 3", 3),
        ("class E(float, enum.Enum): A = 1.5", 1.5),
    ],
)
def test_enum_members_that_are_numbers_or_strings_arrive_as_plain_values(definition, value):
    tests = {"fn_name": "f", "inputs": [[]], "outputs": [value]}
    for result in ("E.A", "[E.A][0]"):
        judgement = CodeVerifier(ROOMY).judge(
            f"import enum\n{definition}\ndef f(): return {result}", tests
        )
        assert judgement.passed, judgement.detail
    nested = {**tests, "outputs": [{"k": [value]}]}
    assert (
        CodeVerifier(ROOMY)
        .judge(f"import enum\n{definition}\ndef f(): return {{'k': (E.A,)}}", nested)
        .passed
    )


def test_the_output_limit_can_be_configured():
    size = 12_000_000
    program = f"print('x' * {size})"
    tests = {"inputs": [""], "outputs": ["x" * size]}
    assert CodeVerifier(Limits()).judge(program, tests).verdicts == ("error",)
    assert CodeVerifier(Limits(output_bytes=16 << 20)).judge(program, tests).passed
    call = {"fn_name": "f", "inputs": [[size]], "outputs": ["x" * size]}
    assert CodeVerifier(Limits()).judge("def f(n): return 'x' * n", call).verdicts == ("error",)
    assert (
        CodeVerifier(Limits(output_bytes=16 << 20)).judge("def f(n): return 'x' * n", call).passed
    )


@pytest.mark.parametrize(("spaces", "verdict"), [(0, "pass"), (60_000, "pass"), (70_000, "wrong")])
def test_output_is_read_only_up_to_a_multiple_of_the_expected_length(spaces, verdict, monkeypatch):
    """At most 16 times the length of the expected output, plus 64 KiB, is read. Unread output does
    not affect the next test.
    """
    choose_isolation()  # isolation is detected with a separate program, which must not be counted here
    read = []
    real = Sandbox.receive_bytes
    monkeypatch.setattr(
        Sandbox,
        "receive_bytes",
        lambda box, count, deadline: read.append(count) or real(box, count, deadline),
    )
    tests = {"inputs": [str(spaces), "0"], "outputs": ["7", "7"]}
    judgement = CodeVerifier().judge("print(' ' * int(input()) + '7')", tests, stop_early=False)
    assert judgement.verdicts == (verdict, "pass")
    assert read == ([2] if verdict == "wrong" else [spaces + 2, 2])
    assert judgement.detail == (
        "" if verdict == "pass" else "for '70000' expected '7', got 70002 bytes"
    )


def test_a_result_that_is_too_long_to_match_is_not_read():
    tests = {"fn_name": "f", "inputs": [[70_000], [60_000]], "outputs": ["x", "x" * 60_000]}
    judgement = CodeVerifier().judge("def f(n): return 'x' * n", tests, stop_early=False)
    assert (
        judgement.verdicts == ("error", "pass")
        and judgement.detail == "a reply is over the limit of 65584 bytes"
    )


@pytest.mark.parametrize(
    ("output_bytes", "most"), [(8 << 20, 1 << 20), (1 << 24, 2 << 20), (1000, 65536)]
)
def test_assertion_results_may_be_as_long_as_an_eighth_of_the_output_limit(output_bytes, most):
    verifier = CodeVerifier(Limits(output_bytes=output_bytes))
    judged = [
        verifier.judge("def f(n): return 'x' * n", {"test": f"assert len(f({n})) == {n}"})
        for n in (most - 99, most)
    ]
    assert judged[0].passed and judged[1].verdicts == ("error",)
    assert judged[1].detail == f"a reply is over the limit of {most} bytes"


def test_a_dataset_option_sets_the_output_limit(tmp_path):
    rows = tmp_path / "rows.jsonl"
    tests = {"inputs": ["1"], "outputs": ["x" * 2000]}
    rows.write_text(json.dumps({"question": "Print x.", "input_output": json.dumps(tests)}))
    tokenizer = SimpleNamespace(chat_template=None)
    response = "```python\nprint('x' * 2000)\n```"
    for options, reward in (("", 1.0), (",output_bytes=1000", 0.0), (",output_bytes=4000", 1.0)):
        (problem,) = load_problems(None, (f"taco:path={rows}{options}",), tokenizer)
        assert problem.verify(response) == reward, options
    with pytest.raises(ConfigError, match="output_bytes is 'much', but must be"):
        load_problems(None, (f"taco:path={rows},output_bytes=much",), tokenizer)


ECHO = "import sys, time\nfor line in sys.stdin:\n    time.sleep(0.03)\n    print(line, end='', flush=True)"


@pytest.mark.parametrize("kept_from", [True, False])
def test_waiting_for_the_processor_in_many_short_calls_does_not_count_toward_the_limit(
    monkeypatch, kept_from
):
    """Each call is answered before its time is checked. Together, the calls take 1.2 s, and the
    limit is 0.6 s.
    """
    monkeypatch.setattr(clock, "STARVED", 1000)
    start = time.monotonic()

    def seen(pid):
        waited = time.monotonic() - start if kept_from else 0.0
        return [Process("S", 1, 0.001 * (time.monotonic() - start), {pid: waited})]

    monkeypatch.setattr(processes, "family", seen)
    spent_s = 0.0
    with Child([sys.executable, "-c", ECHO]) as child:
        for number in range(40):
            time_limit = OwnTime(0.6 - spent_s)
            try:
                child.send_within({"n": number}, time_limit)
                assert child.receive_within(time_limit) == {"n": number}
            except ChildTimeoutError:
                break
            finally:
                spent_s += time_limit.spent_s
    assert (number, spent_s < 0.3) == (39, True) if kept_from else (number < 30 and spent_s >= 0.5)


def test_the_kernel_reports_how_long_threads_waited_for_a_processor():
    """Two processes share a processor, so each waits half of the time."""
    if processes.queued("self") is None:
        pytest.skip("this kernel does not report how long threads waited")
    cpu = min(os.sched_getaffinity(0))
    burn = f"import os, time\nos.sched_setaffinity(0, [{cpu}])\nwhile time.monotonic() < {time.monotonic() + 60}: pass"
    with (
        subprocess.Popen([sys.executable, "-c", burn]) as one,
        subprocess.Popen([sys.executable, "-c", burn]) as two,
    ):
        deadline = time.monotonic() + 30
        while max(processes.queued(one.pid).values(), default=0) < 0.2:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        one.kill()
        two.kill()


def test_own_time_excludes_waiting_for_the_processor():
    time_limit = OwnTime(9.0)
    time_limit.count(1.0, 0.1, queued_s=0.3)  # asleep for 0.6 s
    assert time_limit.spent_s == pytest.approx(0.7)
    time_limit.count(1.0, 0.4, queued_s=0.9)  # on two processors in turn
    assert time_limit.spent_s == pytest.approx(1.1)
    time_limit.count(1.0, 1.9, queued_s=5.0)
    assert time_limit.spent_s == pytest.approx(2.1)


DRIP = """
import time
def f(x):
    for _ in range(400):
        end = time.process_time() + 0.012
        while time.process_time() < end: pass
        time.sleep(0.088)
    return 1
"""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["called", "read", "asserted"])
def test_a_program_that_alternates_sleep_and_work_is_stopped_at_its_limit(kind):
    """The program runs for only an eighth of the time. A limit on processor time would stop it
    after half a minute, and a rule for sleeping programs would not stop it at all.
    """
    tests = {
        "called": {"fn_name": "f", "inputs": [[1]], "outputs": [1]},
        "read": {"inputs": [""], "outputs": ["1"]},
        "asserted": {"test": "assert f(1) == 1"},
    }[kind]
    program = DRIP + "\nprint(f(1))" * (kind == "read")
    judgement = CodeVerifier(Limits(wall_s=1.5, program_s=4)).judge(program, tests)
    assert judgement.verdicts == ("timeout",) and judgement.wall_s < 10, judgement


def test_sending_to_a_program_that_does_not_read_times_out():
    with Child([sys.executable, "-c", "import time\ntime.sleep(600)"]) as child:
        began = time.monotonic()
        with pytest.raises(ChildTimeoutError):
            child.send_within({"args": "x" * (1 << 20)}, OwnTime(1.0))
        assert time.monotonic() - began < 8
