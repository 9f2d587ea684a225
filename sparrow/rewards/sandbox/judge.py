"""Judge programs by running tests.

A problem's tests are a plain mapping, so that they can be stored in datasets. There are three
kinds:

- ``{"inputs": [...], "outputs": [...]}``: the standard input and the expected standard output of
  each test.
- The same with ``"fn_name"``, the name of the function to call. Each input is a list of arguments,
  and each output is the expected result. Both are JSON values. ``"alternatives"`` contains other
  acceptable lists of outputs. A program passes if its results match the same list in all tests.
- ``{"test": code, "setup": code, "entry_point": name}``: test code with assertions, as in HumanEval
  and MBPP. ``setup`` runs before the test code. If there is an ``entry_point``, the test code's
  function ``check`` is called with the program's function of that name.

All three kinds can have a ``"prelude"``: code to run before the program, such as imports.

A program in bubblewrap cannot fake its verdict. For the first two kinds, this process compares the
outputs, and the expected outputs never enter the sandbox. For assertions, the test code runs in
another sandbox and calls the program from there (see ``sandbox.inside.exchange``). Objects of a
program's own classes can therefore be used but not compared (see ``sandbox.inside.remote``). A
program passes only if it loads, and if a test has called it or read one of its names. Time limits
apply to the program's own time (see ``OwnTime``).
"""

from __future__ import annotations

import math
import os
import re
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from decimal import Decimal
from itertools import zip_longest
from reprlib import Repr
from typing import Any, Literal

from sparrow.rewards.sandbox.box import Isolation, Sandbox, choose_isolation
from sparrow.rewards.sandbox.child import ChildEndedError, ChildTimeoutError
from sparrow.rewards.sandbox.inside.clock import STARVED, OwnTime
from sparrow.rewards.sandbox.inside.wire import pack, unpack
from sparrow.rewards.sandbox.limits import Limits
from sparrow.rewards.sandbox.walls import Held

Verdict = Literal["pass", "wrong", "error", "timeout", "memory"]
Tests = Mapping[str, Any]

FLOAT_TOLERANCE = 1e-6
"""Tolerance for expected numbers that have a decimal point or an exponent. The tolerance is
absolute for numbers below 1, and relative for larger ones.
"""

_show = Repr().repr
_WORD = re.compile(r"\S+|\n")
_EXPONENT = r"[eE][-+]?\d{1,3}"
_DECIMAL = re.compile(rf"[-+]?(?:\d+\.?\d*|\.\d+)(?:{_EXPONENT})?", re.ASCII)
_WHOLE = re.compile(r"[-+]?\d+(?:\.0*)?", re.ASCII)
# Numbers the way programs print them. ``007``, ``+7`` and ``1e5`` may be names, codes or parts of
# words, so they're compared as text.
_PLAIN_WHOLE = re.compile(r"-?(?:0|[1-9]\d*)", re.ASCII)
_PLAIN_DECIMAL = re.compile(
    rf"-?(?:(?:0|[1-9]\d*)?\.\d+(?:{_EXPONENT})?|[1-9][eE][-+]\d{{1,3}})", re.ASCII
)
_DETAIL_CHARS = 400
_MARGIN_S = 5.0
"""Seconds to wait beyond a test's limits, which the sandbox itself enforces."""
_ROOM_BYTES = 1 << 16
_ROOM_TIMES = 16
"""Output is not read if it is longer than ``_ROOM_TIMES`` times the expected output, plus
``_ROOM_BYTES``.
"""
_SHARE = 8  # results sent to test code are limited to ``output_bytes / _SHARE`` bytes
_TESTS_BYTES = 64 << 20  # maximum size of a message from test code, which is trusted
_RELAYED = (
    "value",
    "raised",
    "kinds",
    "with",
    "printed",
    "changed",
    "refused",
    "call",
    "args",
    "kwargs",
    "look",
    "part",
    "set",
    "delete",
    "alter",
    "operation",
    "content",
    "next",
)
"""Keys of a program's reply that are passed on to the tests. Verdicts are deliberately left out."""


@dataclass(frozen=True)
class Judgement:
    """The verdicts on one program."""

    verdicts: tuple[Verdict, ...]  # one per test that was run, in order
    tests: int  # total number of tests, run or not
    detail: str  # what went wrong in the first failed test; empty if no test failed
    wall_s: float  # seconds taken

    @property
    def passed(self) -> bool:
        """Whether there was at least one test and the program passed them all."""
        return self.tests > 0 and self.verdicts == ("pass",) * self.tests


def _same_token(actual: str, expected: str) -> bool:
    """Return whether two words are the same or, if the expected word is a number in plain form,
    have the same value.
    """
    if actual == expected:
        return True
    if _PLAIN_WHOLE.fullmatch(expected):
        return bool(_WHOLE.fullmatch(actual)) and Decimal(actual) == Decimal(expected)
    if _PLAIN_DECIMAL.fullmatch(expected) and _DECIMAL.fullmatch(actual):
        return _close(float(actual), float(expected))
    return False


def _close(actual: float, expected: float) -> bool:
    try:
        return math.isclose(actual, expected, rel_tol=FLOAT_TOLERANCE, abs_tol=FLOAT_TOLERANCE)
    except OverflowError:  # an integer that is too large for a float
        return False


def same_output(actual: str, expected: str) -> bool:
    """Compare two outputs line by line and word by word, ignoring spaces.

    Two words are compared as numbers if the expected word is a number in plain form (``11``, but
    not ``0011``). Whole numbers must be equal and must not have an exponent. Decimals are compared
    within a tolerance.
    """
    # Go one word at a time: for hostile output, a list of words could take a hundred times as much
    # memory as the output itself.
    words = (_WORD.finditer(side.rstrip()) for side in (actual, expected))
    return all(a and b and _same_token(a[0], b[0]) for a, b in zip_longest(*words))


def same_value(actual: Any, expected: Any) -> bool:
    """Compare a result with an expected JSON value. Tuples are compared as lists, keys as text, and
    floats within a tolerance.
    """
    if isinstance(expected, Mapping):
        if not isinstance(actual, Mapping):
            return False
        ours = {str(key): value for key, value in actual.items()}
        theirs = {str(key): value for key, value in expected.items()}
        if ours.keys() != theirs.keys():
            return False
        return all(same_value(ours[key], theirs[key]) for key in theirs)
    if isinstance(expected, (list, tuple)):
        alike = isinstance(actual, (list, tuple)) and len(actual) == len(expected)
        return alike and all(map(same_value, actual, expected))
    if (
        isinstance(expected, float)
        and isinstance(actual, (int, float))
        and not isinstance(actual, bool)
    ):
        return _close(actual, expected)
    return bool(actual == expected)  # as in Python, 3.0 equals 3 and True equals 1


class Judge:
    """Runs a limited number of programs at once; further callers wait.

    Args:
        limits: resource limits per program.
        isolation: ``auto`` and ``bwrap`` use bubblewrap, and raise an error without it. ``session``
            uses Landlock and a system-call filter, which is weaker. ``none`` leaves this user's
            files and memory unprotected from programs.
        workers: number of programs to run at once; defaults to the number of CPUs available to this
            process.

    Thread-safe. No process is kept around between programs.

    Raises ValueError if ``workers`` is less than 1.
    """

    def __init__(
        self,
        limits: Limits | None = None,
        isolation: Isolation = "auto",
        workers: int | None = None,
    ) -> None:
        if workers is not None and workers < 1:
            raise ValueError(
                f"need workers >= 1, got workers={workers}; leave it out for one per CPU"
            )
        self.limits = limits or Limits()
        self.isolation = isolation
        self.workers = len(os.sched_getaffinity(0)) if workers is None else workers
        self._free = threading.BoundedSemaphore(self.workers)

    def judge(self, code: str, tests: Tests, *, stop_early: bool = True) -> Judgement:
        """Run ``code`` against ``tests``. If ``stop_early`` is true, stop at the first failing
        test.

        Raises RewardError if programs cannot be run here with the requested isolation. Raises
        ValueError if the tests aren't one of the three kinds, or if a list of outputs has a
        different length from the inputs.
        """
        number = _count(tests)
        held = choose_isolation(self.isolation)
        with self._free:
            start = time.monotonic()
            run = _Run(tests.get("prelude") or "", code, self.limits, held)
            results = [run.assertions(tests)] if "test" in tests else run.each(tests, stop_early)
        verdicts = tuple(verdict for verdict, _ in results)
        detail = next((text for verdict, text in results if verdict != "pass"), "")
        return Judgement(verdicts, number, detail, time.monotonic() - start)


def _count(tests: Tests) -> int:
    """Return the number of tests. Test code counts as one test. Raises ValueError in the same cases
    as ``Judge.judge``.
    """
    if "test" in tests:
        return 1
    if not {"inputs", "outputs"} <= tests.keys():
        raise ValueError(f"tests need 'test', or both 'inputs' and 'outputs', got {list(tests)}")
    number = len(tests["inputs"])
    for outputs in (tests["outputs"], *tests.get("alternatives", ())):
        if len(outputs) != number:
            raise ValueError(
                f"tests need as many outputs as inputs in every list, got {len(outputs)} outputs "
                f"for {number} inputs; correct the tests, or remove them from the dataset"
            )
    return number


class _Readings:
    """The expected results of calls. Several lists may be acceptable, and each actual result rules
    out the lists that it doesn't match.
    """

    def __init__(self, tests: Tests) -> None:
        self._left = [tests["outputs"], *tests.get("alternatives", ())]
        self._at = -1

    def next(self) -> Any:
        """Return the expected result of the next test, from the first remaining list."""
        self._at += 1
        return self._left[0][self._at]

    def met_by(self, actual: Any) -> bool:
        """Return whether any remaining list expects ``actual``. If so, rule out the lists that
        don't.
        """
        met = [outputs for outputs in self._left if same_value(actual, outputs[self._at])]
        self._left = met or self._left
        return bool(met)


@dataclass
class _Run:
    """A program under test and the time it has used."""

    prelude: str
    code: str
    limits: Limits
    held: Held
    spent_s: float = 0.0  # the program's own time (``OwnTime``) across all tests so far

    def _sandbox(self, mode: Literal["stdio", "serve", "exchange"]) -> Sandbox:
        request = {"mode": mode, "prelude": self.prelude, "code": self.code}
        return Sandbox(request, self.limits, self.held)

    def _send(self, box: Sandbox, message: Mapping[str, Any]) -> None:
        """Send a message. The sandbox gets ``wall_s`` seconds of its own time to read it.

        Raises the same errors as ``Child.send_within``.
        """
        with self._time(self.limits.wall_s) as time_limit:
            box.send_within(message, time_limit)

    def _receive(self, box: Sandbox, most: int, limit_s: float | None = None) -> dict[str, Any]:
        """Receive a sandbox's next answer. The sandbox gets ``limit_s`` seconds of its own time to
        reply. The default is ``wall_s``.

        Raises the same errors as ``Child.receive_within``.
        """
        with self._time(limit_s or self.limits.wall_s) as time_limit:
            return box.receive_within(time_limit, most)

    @contextmanager
    def _time(self, limit_s: float) -> Iterator[OwnTime]:
        """Open a context with a time limit, and count the time spent in it. The limit is
        ``limit_s``, or the time left for all tests if that is shorter.
        """
        left_s = self.limits.program_s - self.spent_s
        time_limit = OwnTime(min(limit_s, left_s))
        try:
            yield time_limit
        except ChildTimeoutError:
            # A program that gets too little CPU is stopped before its own time is up. If its limit
            # was all the time left for the tests, count the whole limit as spent, or the next test
            # would still get the rest.
            if left_s <= limit_s:
                time_limit.spent_s = left_s
            raise
        finally:
            self.spent_s += time_limit.spent_s

    def each(self, tests: Tests, stop_early: bool) -> list[tuple[Verdict, str]]:
        """Return the verdicts for tests with inputs and outputs."""
        name = tests.get("fn_name")
        results: list[tuple[Verdict, str]] = []
        box: Sandbox | None = None
        readings = _Readings(tests)
        try:
            for given, expected in zip(tests["inputs"], tests["outputs"], strict=True):
                box = box or self._sandbox("serve" if name else "stdio")
                try:
                    result = self._test(box, name, given, expected, readings)
                except (ChildTimeoutError, ChildEndedError) as error:
                    result = _broken(error, box)
                    box.close()
                    box = None

                spent = self.spent_s >= self.limits.program_s
                if spent:
                    result = (
                        "timeout",
                        f"the first {len(results) + 1} tests took more than "
                        f"{self.limits.program_s:g} s",
                    )
                results.append(result)
                if result[0] != "pass" and (stop_early or spent):
                    break
        finally:
            if box is not None:
                box.close()
        return results

    def _test(
        self, box: Sandbox, name: str | None, given: Any, expected: Any, readings: _Readings
    ) -> tuple[Verdict, str]:
        """Run one test: call the function ``name`` if given, or run the program."""
        if name:
            return self._call(box, name, given, readings)
        return self._feed(box, given, expected)

    def _most(self, expected: str) -> int:
        """Return the largest size in bytes that a correct reply can have. Longer replies aren't
        read, because malloc wouldn't give the memory back.
        """
        return min(self.limits.output_bytes, _ROOM_BYTES + _ROOM_TIMES * len(expected))

    def _feed(self, box: Sandbox, given: str, expected: str) -> tuple[Verdict, str]:
        """Run the program on one test's standard input and compare its output."""
        self._send(box, {"stdin": given})
        reply = self._receive(box, self.limits.output_bytes, self.limits.wall_s + _MARGIN_S)
        outcome = reply.get("outcome")
        if outcome != "ok":
            verdict: Verdict = outcome if outcome in ("timeout", "memory") else "error"
            return verdict, str(reply.get("detail"))

        size = int(reply["stdout_bytes"])
        most = self._most(expected)
        deadline = time.monotonic() + STARVED * self.limits.wall_s
        if size > most:
            box.skip(size, deadline)
            return "wrong", f"for {_show(given)} expected {_show(expected)}, got {size} bytes"
        actual = box.receive_bytes(size, deadline).decode(errors="replace")
        if same_output(actual, expected):
            return "pass", ""
        return "wrong", f"for {_show(given)} expected {_show(expected)}, got {_show(actual)}"

    def _call(
        self, box: Sandbox, name: str, given: Sequence[Any], readings: _Readings
    ) -> tuple[Verdict, str]:
        """Call a function of the program, and compare its result."""
        expected = readings.next()
        call = {"call": name, "args": pack(list(given)), "kwargs": pack({})}
        self._send(box, call)
        reply = self._receive(box, self._most(repr(expected)))
        if "value" not in reply:
            return _raised(reply.get("raised"))
        try:
            actual = unpack(reply["value"])
            if readings.met_by(actual):
                return "pass", ""
            return (
                "wrong",
                f"{name}(*{_show(given)}) is {_show(actual)}, expected {_show(expected)}",
            )
        except Exception as error:
            # An unreadable result must not stop the run, whatever the program returned.
            detail = f"the result cannot be read: {type(error).__name__}: {error}"
            return "wrong", detail[:_DETAIL_CHARS]

    def assertions(self, tests: Tests) -> tuple[Verdict, str]:
        """Run test code and return its verdict."""
        judge_request = {
            "mode": "judge",
            "setup": tests.get("setup") or "",
            "test": tests["test"],
            "entry_point": tests.get("entry_point"),
        }
        # The tests are trusted, and may need more memory than the program is allowed, for example
        # to import numpy.
        roomy = replace(self.limits, memory_bytes=max(self.limits.memory_bytes, 1 << 30))
        with (
            Sandbox(judge_request, roomy, self.held) as judge,
            self._sandbox("exchange") as program,
        ):
            while True:
                try:
                    said = self._receive(judge, _TESTS_BYTES, self.limits.program_s)
                    if "verdict" in said:
                        return said["verdict"], said["detail"]
                except ChildTimeoutError:
                    return "timeout", f"the tests did not finish within {self.limits.program_s:g} s"
                except ChildEndedError as error:
                    return "error", f"in the tests: {error}"
                try:
                    self._send(program, said)
                    reply = self._receive(
                        program, max(_ROOM_BYTES, self.limits.output_bytes // _SHARE)
                    )
                except (ChildTimeoutError, ChildEndedError) as error:
                    return _broken(error, program)
                # The next ``receive`` reports these errors.
                with suppress(ChildTimeoutError, ChildEndedError):
                    self._send(judge, {key: reply[key] for key in _RELAYED if key in reply})


def _raised(said: object) -> tuple[Verdict, str]:
    """Return the verdict on a call that raised an exception."""
    if not isinstance(said, str):
        return "error", "the reply is neither a result nor an error"
    detail = said[:_DETAIL_CHARS]
    return ("memory" if detail.startswith("MemoryError") else "error"), detail


def _broken(error: Exception, box: Sandbox) -> tuple[Verdict, str]:
    """Return the verdict on a program that stopped answering."""
    if isinstance(error, ChildTimeoutError) or box.stopped_by_limit:
        return "timeout", "stopped at a time limit"
    return "error", str(error)
