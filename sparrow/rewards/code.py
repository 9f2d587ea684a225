"""Generated programs judged by unit tests.

The tests of a problem are a plain mapping, so that datasets can carry them:

- ``{"inputs": [...], "outputs": [...]}``: standard input and expected standard output of each test;
- the same with ``"fn_name"``: each input is a list of arguments, each output the expected result, both JSON values;
- ``{"test": code, "setup": code, "entry_point": name}``: test code with assertions, as HumanEval and MBPP have it.
  ``setup`` runs before it; with an ``entry_point``, the test code's ``check`` is called with that function.

A ``"prelude"`` in any of them is code that runs before the program, such as imports.

A program in bubblewrap cannot fake its verdict. For the first two kinds this process compares outputs, and the
expected ones never enter the sandbox. For assertions the test code runs in a sandbox of its own and sees the program's
functions through calls that carry plain values; the price is that results of a program's own classes cannot be tested.
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from functools import cache
from reprlib import Repr
from typing import Any, Literal

from sparrow.rewards.sandbox import (
    ChildEndedError,
    ChildTimeoutError,
    Isolation,
    Limits,
    Sandbox,
    choose_isolation,
    pack,
    unpack,
)

Verdict = Literal["pass", "wrong", "error", "timeout", "memory"]
Tests = Mapping[str, Any]

FLOAT_TOLERANCE = 1e-6
"""Relative, and absolute below 1; only where the expected number is written with a point or an exponent."""

_show = Repr().repr
_FENCE = re.compile(r"[ \t]*```[ \t]*(\w*)")
_DECIMAL = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d{1,3})?")
_MARGIN_S = 5.0
"""Seconds beyond a test's limits before this side stops waiting for the sandbox, which enforces them itself."""


@dataclass(frozen=True)
class Judgement:
    """What the tests said."""

    verdicts: tuple[Verdict, ...]  # one per test that was run, in order
    tests: int  # how many there are
    detail: str  # what went wrong in the first test that was not passed; empty if none
    wall_s: float  # seconds it took

    @property
    def passed(self) -> bool:
        """Whether there are tests and every one was passed."""
        return self.tests > 0 and self.verdicts == ("pass",) * self.tests


def extract_code(response: str) -> str | None:
    """The last fenced block behind the reasoning, one marked as Python if there is any; None without a block."""
    blocks: dict[bool, str] = {}
    language: str | None = None
    lines: list[str] = []
    for line in response.rpartition("</think>")[2].split("\n"):
        fence = _FENCE.match(line)
        if language is None:
            if fence:
                language, lines = fence[1].lower(), []
        elif fence and line.strip() == "```":
            blocks[language in ("python", "python3", "py")] = "".join(line + "\n" for line in lines)
            language = None
        else:
            lines.append(line)
    return blocks.get(True, blocks.get(False))


def _same_token(actual: str, expected: str) -> bool:
    if actual == expected:
        return True
    if not (_DECIMAL.fullmatch(actual) and _DECIMAL.fullmatch(expected)):
        return False
    if expected.lstrip("+-").isdigit():
        return Decimal(actual) == Decimal(expected)
    return _close(float(actual), float(expected))


def _close(actual: float, expected: float) -> bool:
    try:
        return math.isclose(actual, expected, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    except OverflowError:  # an integer beyond all floats
        return False


def same_output(actual: str, expected: str) -> bool:
    """Whether two outputs agree: line by line and word by word, spaces aside, decimal numbers within tolerance."""
    ours, theirs = ([line.split() for line in side.rstrip().split("\n")] for side in (actual, expected))
    return len(ours) == len(theirs) and all(
        len(a) == len(b) and all(map(_same_token, a, b)) for a, b in zip(ours, theirs, strict=True)
    )


def same_value(actual: Any, expected: Any) -> bool:
    """Whether a result agrees with an expected JSON value: tuples as lists, keys as text, floats within tolerance."""
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping):
            return False
        ours, theirs = ({str(key): value for key, value in side.items()} for side in (actual, expected))
        return ours.keys() == theirs.keys() and all(same_value(ours[key], theirs[key]) for key in theirs)
    if isinstance(expected, (list, tuple)):
        alike = isinstance(actual, (list, tuple)) and len(actual) == len(expected)
        return alike and all(map(same_value, actual, expected))
    if isinstance(expected, float) and isinstance(actual, (int, float)) and not isinstance(actual, bool):
        return _close(actual, expected)
    return bool(actual == expected)  # as Python has it: 3.0 equals 3, and True equals 1


class CodeVerifier:
    """Judges programs, a bounded number at a time; callers beyond that wait.

    Args:
        limits: what a program may use.
        isolation: ``auto`` takes bubblewrap where it works and warns loudly where it does not; ``bwrap`` refuses to
            go on without it; ``session`` never uses it.
        workers: programs at a time; the processors this process may use, by default.

    Thread-safe; holds no process between programs.
    """

    def __init__(self, limits: Limits | None = None, isolation: Isolation = "auto", workers: int | None = None) -> None:
        self.limits, self.isolation = limits or Limits(), isolation
        self.workers = workers or len(os.sched_getaffinity(0))
        self._free = threading.BoundedSemaphore(self.workers)

    def judge(self, code: str, tests: Tests, *, stop_early: bool = True) -> Judgement:
        """Run ``code`` against ``tests``, to the first that is not passed unless told otherwise.

        Raises RewardError: no way to run programs here, or not the isolation asked for. ValueError: tests of none of
        the three kinds.
        """
        held = choose_isolation(self.isolation)
        with self._free:
            start = time.monotonic()
            run = _Run(tests.get("prelude") or "", code, self.limits, held, start + self.limits.program_s)
            if "test" in tests:
                number, results = 1, [run.assertions(tests)]
            elif "inputs" in tests and len(tests["inputs"]) == len(tests["outputs"]):
                number, results = len(tests["inputs"]), run.each(tests, stop_early)
            else:
                raise ValueError(f"tests need 'test', or as many 'inputs' as 'outputs'; got {list(tests)}")
        verdicts = tuple(verdict for verdict, _ in results)
        detail = next((text for verdict, text in results if verdict != "pass"), "")
        return Judgement(verdicts, number, detail, time.monotonic() - start)

    def __call__(self, response: str, answer: Tests) -> float:
        """1.0 if the response's program passes every test in ``answer``, otherwise 0.0."""
        code = extract_code(response)
        return float(code is not None and self.judge(code, answer).passed)


@dataclass(frozen=True)
class _Run:
    """One program on its way through its tests."""

    prelude: str
    code: str
    limits: Limits
    held: Literal["bwrap", "session"]
    end: float

    def _deadline(self) -> float:
        return min(time.monotonic() + self.limits.wall_s, self.end)

    def _sandbox(self, mode: Literal["stdio", "serve"]) -> Sandbox:
        return Sandbox({"mode": mode, "prelude": self.prelude, "code": self.code}, self.limits, self.held)

    def each(self, tests: Tests, stop_early: bool) -> list[tuple[Verdict, str]]:
        """Verdicts of tests with inputs and outputs."""
        name = tests.get("fn_name")
        results: list[tuple[Verdict, str]] = []
        box: Sandbox | None = None
        try:
            for given, expected in zip(tests["inputs"], tests["outputs"], strict=True):
                box = box or self._sandbox("serve" if name else "stdio")
                try:
                    result = self._call(box, name, given, expected) if name else self._feed(box, given, expected)
                except (ChildTimeoutError, ChildEndedError) as error:
                    result = _broken(error, box)
                    box.close()
                    box = None
                if time.monotonic() > self.end:
                    result = "timeout", f"{self.limits.program_s:g} s were not enough for {len(results) + 1} tests"
                results.append(result)
                if result[0] != "pass" and (stop_early or time.monotonic() > self.end):
                    break
        finally:
            if box is not None:
                box.close()
        return results

    def _feed(self, box: Sandbox, given: str, expected: str) -> tuple[Verdict, str]:
        box.send({"stdin": given}, self._deadline() + _MARGIN_S)
        reply = box.receive(self._deadline() + _MARGIN_S, 8 * self.limits.output_bytes)  # JSON escapes take some
        outcome = reply.get("outcome")
        if outcome == "ok":
            actual = str(reply.get("stdout"))
            if same_output(actual, expected):
                return "pass", ""
            return "wrong", f"for {_show(given)} expected {_show(expected)}, got {_show(actual)}"
        verdict: Verdict = outcome if outcome in ("timeout", "memory") else "error"
        return verdict, str(reply.get("detail"))

    def _call(self, box: Sandbox, name: str, given: Sequence[Any], expected: Any) -> tuple[Verdict, str]:
        call = {"call": name, "args": pack(list(given)), "kwargs": pack({})}
        box.send(call, self._deadline())
        reply = box.receive(self._deadline(), self.limits.output_bytes)
        if "value" not in reply:
            return _raised(str(reply.get("raised")))
        try:
            actual = unpack(reply["value"])
            if same_value(actual, expected):
                return "pass", ""
            return "wrong", f"{name}(*{_show(given)}) is {_show(actual)}, expected {_show(expected)}"
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            return "wrong", f"the result cannot be read: {error}"

    def assertions(self, tests: Tests) -> tuple[Verdict, str]:
        """Verdict of test code."""
        judge_request = {
            "mode": "judge",
            "setup": tests.get("setup") or "",
            "test": tests["test"],
            "entry_point": tests.get("entry_point"),
        }
        # The tests are trusted and may need more memory than the program is given, e.g. to import numpy.
        roomy = replace(self.limits, memory_bytes=max(self.limits.memory_bytes, 1 << 30))
        with Sandbox(judge_request, roomy, self.held) as judge, self._sandbox("serve") as program:
            while True:
                try:
                    said = judge.receive(self.end)
                    if "verdict" in said:
                        return said["verdict"], said["detail"]
                except ChildTimeoutError:
                    return "timeout", f"{self.limits.program_s:g} s were not enough for the tests"
                except ChildEndedError as error:
                    return "error", f"in the tests: {error}"
                try:
                    program.send(said, self._deadline())
                    reply = program.receive(self._deadline(), self.limits.output_bytes)
                except (ChildTimeoutError, ChildEndedError) as error:
                    return _broken(error, program)
                with suppress(ChildTimeoutError, ChildEndedError):  # which the next receive reports
                    judge.send({key: reply[key] for key in ("value", "raised") if key in reply}, self.end)


def _raised(detail: str) -> tuple[Verdict, str]:
    return ("memory" if detail.startswith("MemoryError") else "error"), detail


def _broken(error: Exception, box: Sandbox) -> tuple[Verdict, str]:
    """The verdict on a program that stopped answering."""
    if isinstance(error, ChildTimeoutError) or box.stopped_by_limit:
        return "timeout", "stopped at a time limit"
    return "error", str(error)


_lock = threading.Lock()


@cache
def _shared(pid: int, limits: Limits, isolation: Isolation) -> CodeVerifier:
    return CodeVerifier(limits, isolation)


def verify_code(response: str, answer: Tests, *, limits: Limits | None = None, isolation: Isolation = "auto") -> float:
    """1.0 if the program in the response passes every test in ``answer``, otherwise 0.0.

    Calls with the same limits and isolation share one bound on programs at a time, the number of processors.

    Raises RewardError: no way to run programs here, or not the isolation asked for. ValueError: tests of none of the
    three kinds.
    """
    with _lock:
        verifier = _shared(os.getpid(), limits or Limits(), isolation)
    return verifier(response, answer)
