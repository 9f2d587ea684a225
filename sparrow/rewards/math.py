r"""Extract mathematical answers from responses, and compare them with reference answers.

Equivalence is decided by math-verify (Hugging Face, Apache-2.0). It runs in worker processes,
because sympy can hang on an adversarial answer such as ``9^{9^{9^9}}`` and the only way to stop it
is to kill its process. A worker (``math_worker``) is a fresh interpreter: it never imports torch,
shares nothing with a CUDA context, and does not run the caller's ``__main__`` again, as
``multiprocessing`` would. The worker does its comparisons in a forked process. If the kernel kills
that process at its limit, the worker forks again and doesn't need to import anything.
"""

from __future__ import annotations

import atexit
import logging
import os
import queue
import re
import signal
import sys
import threading
import time
from collections import deque
from contextlib import suppress
from fractions import Fraction
from functools import cache
from pathlib import Path
from typing import Any

from sparrow.errors import RewardError
from sparrow.rewards.sandbox.child import Child, ChildEndedError, ChildTimeoutError
from sparrow.rewards.thinking import conclusion

START_LIMIT_S = 120.0
"""How long a worker may take to import its libraries, in seconds. The limit is generous, because
imports are slow on a busy machine.
"""
# replace a worker after this many comparisons, since its libraries' caches grow without bound
RECYCLE = 5000
WORKER = Path(__file__).with_name("math_worker")
# search this many characters at the end of a response for a truncated box command
CUT_OFF_CHARS = 40
PATIENCE_S = 0.5  # seconds before a slow comparison stops holding up others
# The wall-clock limit of a comparison is this many times its CPU time limit. It also stops
# comparisons that get no CPU time.
WALL_LIMITS = 2.5
GRACE_S = 0.5  # extra seconds for a process to end on its own at its limit before we kill it
BUDGET_S = 20.0
"""CPU seconds that comparisons without a result may burn within ``WINDOW_S``. Beyond that, every
comparison only gets a quarter of its limit, so that a step with many hanging answers still makes
progress.
"""
WINDOW_S = 60.0
HUNG_PAIRS = 1000  # number of hanging comparisons to remember
MAX_ANSWER_CHARS = 2000
"""Longer answers count as wrong unless they are identical to the reference. The limit also keeps
requests smaller than a pipe's buffer.
"""

_log = logging.getLogger(__name__)

_TOKEN = re.compile(r"(\\(?:boxed|fbox)\s*\{)|\\(?:boxed|fbox) +([^\s{}$]+)|\\.|[{}]", re.DOTALL)
_GAP = r"(?:[\s$]|\\[()\[\],;! ]|\\q?quad)*"
_JOINT = re.compile(rf"(?:{_GAP}(?:[,;]|and|or|\\text\{{\s*(?:and|or)\s*\}}))+{_GAP}")
_CUT_OFF = re.compile(r"\\(?:b|bo|box|boxe|boxed|f|fb|fbo|fbox)\s*\Z")
_HASHES = re.compile(r"####[ \t]*(\S[^\n]*)")
_NUMBER = re.compile(r"(?:(?<![\w)])-)?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+)(?:/\d+)?")
_PLAIN = re.compile(r"[-+]?(?:(?:\d{1,3}(?:(?:,\d{3})+|(?: \d{3})+)|\d+)(?:\.\d*)?|\.\d+)")
_THIN = re.compile(r"\\[,;: ]|\\q?quad(?![a-z])|~")
_MARKS = re.compile(r"\\!\s*|\\?\$|\\left(?![a-z])|\\right(?![a-z])")
_SPACE = re.compile(r"(?<!\d)\s+|\s+(?!\d)")


def _boxes(text: str) -> list[tuple[int, int, str]] | None:
    """Find all outermost boxes, as (start, end, content). This takes one pass, even if braces are
    badly nested. Return None if the last box is incomplete.
    """
    boxes: list[tuple[int, int, int]] = []
    opened: list[tuple[int, int] | None] = []
    for token in _TOKEN.finditer(text):
        if token[1]:
            opened.append((token.start(), token.end()))
        elif token[2]:
            boxes.append((token.start(), token.start(2), token.end()))
        elif token[0] == "{":
            opened.append(None)
        elif token[0] == "}" and opened and (box := opened.pop()):
            while boxes and boxes[-1][0] > box[0]:
                boxes.pop()
            boxes.append((*box, token.end()))

    last = boxes[-1][0] if boxes else -1
    command_cut_off = _CUT_OFF.search(text, max(0, len(text) - CUT_OFF_CHARS))
    box_left_open = any(box and box[0] > last for box in opened)
    if command_cut_off or box_left_open:
        return None
    return [
        (start, end, text[content:end].removesuffix("}").strip()) for start, content, end in boxes
    ]


def _boxed(boxes: list[tuple[int, int, str]], text: str) -> str | None:
    """Join the last box with any boxes right before it, separated only by commas, "and" or "or"."""
    parts: list[str] = []
    after = len(text)
    for start, end, content in reversed(boxes):
        if parts and not _JOINT.fullmatch(text, end, after):
            break
        if content not in parts:
            parts.insert(0, content)
        after = start
    return ", ".join(parts) if parts else None


def extract_answer(response: str, *, last_number: bool = False) -> str | None:
    r"""Extract a response's final answer as text, or None if it doesn't give one.

    The answer is the last ``\boxed{...}``; several boxes joined by commas, "and" or "or" are one
    answer with several parts. If there is no box, the answer is the rest of the line after the last
    ``####``, as in GSM8K. If there is no ``####`` either and ``last_number`` is true, the answer is
    the last number in the response.

    A response cut off mid-thinking or mid-box has no answer. An answer after the thinking takes
    precedence over one inside it.
    """
    concluded = conclusion(response)
    if concluded is None:
        return None
    answer = _stated(concluded, last_number=last_number)
    if answer is None and concluded != response:
        answer = _stated(response, last_number=last_number)
    return answer


def _stated(response: str, *, last_number: bool) -> str | None:
    """Extract the answer from a text, ignoring thinking delimiters."""
    boxes = _boxes(response)
    if boxes is None:
        return None
    if (boxed := _boxed(boxes, response)) is not None:
        return boxed or None
    if hashes := _HASHES.findall(response):
        return hashes[-1].strip()
    numbers = _NUMBER.findall(response) if last_number else []
    return numbers[-1] if numbers else None


def _unmarked(answer: str) -> str:
    """Normalise spaces and strip whatever doesn't affect the meaning: dollar signs, bracket sizing
    and a trailing full stop.
    """
    text = answer.replace("{,}", ",")
    text = _THIN.sub(" ", text)
    text = _MARKS.sub("", text)
    return " ".join(text.split()).removesuffix(".")


def _squeezed(answer: str) -> str:
    """Strip spaces from an unmarked answer, except between digits, and unify the fraction commands."""
    return _SPACE.sub("", answer).replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")


def _number(plain: str) -> Fraction:
    return Fraction(plain.replace(",", "").replace(" ", "").removesuffix("."))


def _quick(answer: str, reference: str) -> bool | None:
    """Judge the easy cases that need no algebra: identical answers, overlong answers and pairs of
    plain numbers. Return None for anything else.
    """
    a = _unmarked(answer)
    b = _unmarked(reference)
    if _squeezed(a) == _squeezed(b):
        return a != ""
    if not a or not b or max(len(answer), len(reference)) > MAX_ANSWER_CHARS:
        return False
    if _PLAIN.fullmatch(a) and _PLAIN.fullmatch(b):
        return _number(a) == _number(b)
    return None


class _Worker(Child):
    asked = 0

    def __init__(self) -> None:
        # Import the worker straight from this folder, bypassing its parent packages. The folder
        # goes last on the path, or its math.py would shadow Python's own.
        start = (
            f"import sys; sys.path.append({str(WORKER.parent)!r}); "
            f"from {WORKER.name}.main import main; sys.exit(main())"
        )
        super().__init__([sys.executable, "-P", "-c", start])
        try:
            self.receive(time.monotonic() + START_LIMIT_S)
        except (ChildTimeoutError, ChildEndedError) as error:
            self.close()
            raise RewardError(
                f"the worker {WORKER.name} did not start: {error}; check that math-verify works here"
            ) from error

    def kill(self) -> None:
        """Kill the worker and its forked process."""
        if self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
        super().kill()


class MathVerifier:
    """Compares responses with reference answers in worker processes, started on first use.

    Args:
        workers: number of processes to run at once, at about 100 MB each. If none is free, threads
            wait for one. A comparison that takes longer than half a second gives up its slot to
            another process. Threads therefore get stuck behind hanging answers only if there are
            more hanging answers than workers.
        limit_s: CPU time limit per comparison, in seconds; the wall-clock limit is 2.5 times that.
            A comparison that hits a limit counts as wrong, is logged and counted in ``lost``, and
            isn't retried. Once ``BUDGET_S`` seconds have been lost within a minute, both limits
            drop to a quarter. Then n hanging answers take at most ``BUDGET_S + n * limit_s / 4``
            CPU seconds, not counting comparisons that were already running.

    Thread-safe. Close the verifier, or use it in a ``with`` block, to stop its processes right
    away.
    """

    def __init__(self, workers: int = 2, limit_s: float = 2.0) -> None:
        if workers < 1 or limit_s <= 0:
            raise ValueError(
                f"need workers >= 1 and limit_s > 0, got workers={workers}, limit_s={limit_s}"
            )
        self.limit_s = limit_s
        self.lost = 0
        self._pid = os.getpid()
        # hanging pair -> the limit that stopped it
        self._hung: dict[tuple[str, str], float] = {}
        # (time, seconds lost) per comparison without a result
        self._losses: deque[tuple[float, float]] = deque()
        self._losing = threading.Lock()
        self._slow = threading.BoundedSemaphore(workers)
        self._slots: queue.LifoQueue[_Worker | None] = queue.LifoQueue()
        for _ in range(workers):
            self._slots.put(None)

    def equal(self, answer: str, reference: str) -> bool:
        r"""Return whether two answers are equivalent, like ``\frac12`` and ``0.5``.

        As in math-verify, units and percent signs are ignored: ``12 cm`` equals ``12``, and
        ``50\%`` equals both ``50`` and ``0.5``.

        Raises RewardError if math-verify cannot be started.
        """
        if (verdict := _quick(answer, reference)) is not None:
            return verdict
        try:
            return self._ask(answer, reference)
        except (ChildTimeoutError, ChildEndedError) as lost:
            _log.warning(
                "could not compare %.80r with %.80r (%s); the answer counts as wrong",
                answer,
                reference,
                lost,
            )
            return False

    def _limit(self) -> float:
        """Return the current CPU time limit per comparison, in seconds."""
        with self._losing:
            while self._losses and self._losses[0][0] < time.monotonic() - WINDOW_S:
                self._losses.popleft()
            lost_s = sum(seconds for _, seconds in self._losses)
        return self.limit_s if lost_s < BUDGET_S else self.limit_s / 4

    def _lose(self, pair: tuple[str, str], limit_s: float, hung: bool) -> None:
        """Record a comparison that returned no verdict."""
        with self._losing:
            self.lost += 1
            self._losses.append((time.monotonic(), limit_s))
            if len(self._hung) >= HUNG_PAIRS:
                self._hung.clear()
            if hung:
                self._hung[pair] = limit_s

    def _ask(self, answer: str, reference: str) -> bool:
        """Have a worker compare two answers, and wait for its reply."""
        worker = self._slots.get()
        pair = (answer, reference)
        limit_s = self._limit()
        if self._hung.get(pair, 0.0) >= limit_s:
            self._slots.put(worker)
            return False

        is_reusable = False
        gave_up_slot = False  # so that other threads don't wait for a slow comparison
        try:
            worker = worker or _Worker()
            start = time.monotonic()
            wall_s = WALL_LIMITS * limit_s
            request = {"answer": answer, "reference": reference}
            worker.send(request | {"limit_s": limit_s, "wall_s": wall_s}, start + limit_s)

            reply: dict[str, Any] | None = None
            while reply is None:
                patience = time.monotonic() + PATIENCE_S
                try:
                    reply = worker.receive(min(patience, start + wall_s + GRACE_S))
                except ChildTimeoutError:
                    if time.monotonic() >= start + wall_s + GRACE_S:
                        raise
                    if not gave_up_slot and self._slow.acquire(blocking=False):
                        gave_up_slot = True
                        self._slots.put(None)

            worker.asked += 1
            is_reusable = worker.asked < RECYCLE
            if reply.get("lost"):
                raise ChildTimeoutError("no reply in time")
            return bool(reply["equal"])
        except (ChildTimeoutError, ChildEndedError) as lost:
            self._lose(pair, limit_s, isinstance(lost, ChildTimeoutError))
            raise
        finally:
            # Close the worker even after an interrupt. Otherwise, its late reply would be read as
            # the reply to the next request.
            if worker is not None and not is_reusable:
                worker.close()
                worker = None
            if not gave_up_slot:
                self._slots.put(worker)
            else:
                self._slow.release()
                if worker is not None:
                    self._return(worker)

    def _return(self, worker: _Worker) -> None:
        """Put a worker that gave up its slot into an empty slot. If there is no empty slot, close
        the worker.
        """
        free = self._take_free_slots()
        has_room = None in free
        if has_room:
            free[free.index(None)] = worker
        for slot in reversed(free):
            self._slots.put(slot)
        if not has_room:
            worker.close()

    def _take_free_slots(self) -> list[_Worker | None]:
        """Take all slots that no thread holds, most recently used first."""
        free: list[_Worker | None] = []
        with suppress(queue.Empty):
            while True:
                free.append(self._slots.get_nowait())
        return free

    def __call__(self, response: str, answer: str, *, last_number: bool = False) -> float:
        """Return 1.0 if the response states an answer equivalent to ``answer``, otherwise 0.0."""
        stated = extract_answer(response, last_number=last_number)
        return float(stated is not None and self.equal(stated, answer))

    def close(self) -> None:
        """Kill the idle workers; later comparisons start new ones. No-op in a forked process."""
        if os.getpid() != self._pid:
            return
        # Take all slots before putting any back, because the next ``get`` would return the slot
        # that was put back last.
        for worker in self._take_free_slots():
            if worker is not None:
                worker.close()
            self._slots.put(None)

    def __enter__(self) -> MathVerifier:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_lock = threading.Lock()


@cache
def _shared(pid: int) -> MathVerifier:
    """Return the verifier for process ``pid``. Each process needs its own, because a fork must not
    use its parent's pipes.
    """
    verifier = MathVerifier()
    atexit.register(verifier.close)
    return verifier


def verify_math(response: str, answer: str, *, last_number: bool = False) -> float:
    """Return 1.0 if the response states an answer equivalent to ``answer``, otherwise 0.0. All
    calls in a process share two workers.

    See ``extract_answer`` for what counts as an answer. The reference is plain text or LaTeX,
    without a box.

    Raises RewardError if math-verify cannot be started.
    """
    with _lock:
        verifier = _shared(os.getpid())
    return verifier(response, answer, last_number=last_number)
