"""A task of tracing a straight-line program, where each line needs values from positions that only
the content reveals.

The prompt is a program over single digits. The response goes through its lines in order, quotes the
operands' values and writes the result, with about ten tokens per line::

    program:            trace:
     7 -> ba             7 then ba 7
     5 -> ku             5 next ku 5
     ba - ku -> mi       ba - ku thus ba 7, ku 5, then mi 2
     mi + 9 -> go        mi + 9 thus mi 2, then go 1
                        answer: 1

Every value is used exactly once, so the program is an expression tree in random order, and a single
wrong value makes the answer wrong. Arithmetic is modulo 10.

Two kinds of tokens depend on the distant past. Quoted values must be found: reading too little
makes them wrong. Linking words are free, but each of their two places has its habits: a word is
drawn in proportion to how often it was used there before (a Polya urn). Reading less makes the
distribution of linking words drift gradually, without harm. Natural text has both kinds of tokens.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import partial
from typing import Annotated

from pydantic import Field

from sparrow.settings import Settings
from sparrow.tasks.base import Problem, register_task
from sparrow.tasks.vocabulary import LINKS, NAMES, check_answer, stated_answer


@dataclass(frozen=True)
class Trace(Settings):
    """Random programs of ``lines`` lines, in which up to a quarter as many values wait to be used
    at any time.

    Raises ConfigError: there are fewer than 2 lines, or ``slip`` is outside [0, 1).
    """

    # program length, which sets the difficulty; a response has about 10 tokens per line
    lines: Annotated[int, Field(ge=2)] = 24
    # probability that the reference solution miscalculates a line and continues with the wrong
    # digit. Demonstrations with slips teach the skill, and leave room for reinforcement learning to
    # improve
    slip: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def problem(self, index: int, seed: int = 0) -> Problem:
        """Return program ``index`` of the stream ``seed``, verified by the value of its last
        line.
        """
        rng = random.Random(f"trace/{self.lines}/{seed}/{index}")
        true: dict[str, int] = {}
        written: dict[str, int] = {}
        program = []
        trace = []
        waiting: list[str] = []
        names: list[str] = []
        quoting = _Habit(rng)
        concluding = _Habit(rng)
        width = max(2, self.lines // 4)

        for lines_left in range(self.lines, 0, -1):
            if not names:
                # Programs with more lines than names reuse names, but never one whose value is
                # still waiting.
                free = [name for name in NAMES if name not in waiting]
                names = rng.sample(free, len(free))
            name = names.pop()

            if len(waiting) < min(width, lines_left):
                true[name] = written[name] = rng.randrange(10)
                statement = str(true[name])
                quotes = ""
            else:
                sign = rng.choice((1, -1))
                a = waiting.pop(rng.randrange(len(waiting)))
                # Each binary line joins two waiting values; after the last line, a single one must
                # be left.
                if waiting and (len(waiting) + 1 > lines_left or rng.random() < 0.5):
                    b = waiting.pop(rng.randrange(len(waiting)))
                    true_b = true[b]
                    written_b = written[b]
                    quote_b = f" {b} {written[b]},"
                else:
                    true_b = written_b = rng.randrange(10)
                    b = str(true_b)
                    quote_b = ""
                true[name] = (true[a] + sign * true_b) % 10
                written[name] = (written[a] + sign * written_b) % 10
                if self.slip and rng.random() < self.slip:
                    written[name] = (written[name] + rng.randrange(1, 10)) % 10
                statement = f"{a} {'+' if sign > 0 else '-'} {b}"
                quotes = f" {quoting.word()} {a} {written[a]},{quote_b}"

            waiting.append(name)
            program.append(f" {statement} -> {name}\n")
            trace.append(f" {statement}{quotes} {concluding.word()} {name} {written[name]}\n")

        return Problem(
            id=f"trace-{self.lines}-{seed}-{index}",
            prompt="program:\n" + "".join(program) + "trace:\n",
            verify=partial(check_answer, expected=true[name]),
            extract=stated_answer,
            source="trace",
            solution="".join(trace) + f"answer: {written[name]}",
            answer=str(true[name]),
        )


class _Habit:
    """A Polya urn of linking words: each draw makes the drawn word likelier."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._weights = [0.5] * len(LINKS)

    def word(self) -> str:
        i = self._rng.choices(range(len(LINKS)), self._weights)[0]
        self._weights[i] += 1.0
        return LINKS[i]


register_task("trace", Trace)
