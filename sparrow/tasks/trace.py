"""A task: trace a straight-line program. Each line needs earlier values, which can only be looked
up by content.

The prompt is a program over single digits. The response goes through the program line by line. For
each line, it quotes the operands' values and writes the result, in about ten tokens::

    program:            trace:
     7 -> ba             7 then ba 7
     5 -> ku             5 next ku 5
     ba - ku -> mi       ba - ku thus ba 7, ku 5, then mi 2
     mi + 9 -> go        mi + 9 thus mi 2, then go 1
                        answer: 1

Every value is used exactly once. The program is therefore an expression tree in random order, and
one wrong value makes the answer wrong. Arithmetic is modulo 10.

As in natural text, two kinds of tokens depend on distant context. Quoted values have to be looked
up, and come out wrong if the model reads too little. Linking words (such as *then* and *thus*) are
a matter of habit: in each of a line's two slots, a word is drawn in proportion to how often it was
used there before (a Polya urn). If the model reads less, the distribution of linking words drifts a
bit, which does no harm.
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
    """Random programs of ``lines`` lines. At any time, up to ``lines // 4`` values (at least 2) are
    waiting to be used.

    Raises ConfigError if there are fewer than 2 lines, or ``slip`` is outside [0, 1).
    """

    # program length, which sets the difficulty; responses take about 10 tokens per line
    lines: Annotated[int, Field(ge=2)] = 24
    # probability that the reference solution gets a line wrong and carries on with the wrong digit.
    # Demonstrations with such slips teach the skill but leave RL room to improve it.
    slip: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def problem(self, index: int, seed: int = 0) -> Problem:
        """Return program ``index`` of the stream ``seed``. The answer is the last line's value."""
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
                # A program with more lines than names uses names again, but never the name of a
                # value that is still waiting to be used.
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
                # A line with two names uses up two waiting values. After the last line, only one
                # may be left.
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
    """A Polya urn of linking words: each draw makes the drawn word more likely."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._weights = [0.5] * len(LINKS)

    def word(self) -> str:
        i = self._rng.choices(range(len(LINKS)), self._weights)[0]
        self._weights[i] += 1.0
        return LINKS[i]


register_task("trace", Trace)
