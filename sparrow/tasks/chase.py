"""Follow pointers through a shuffled map, keeping a running total that later steps look up again.

Each map line leads from a node to the next and adds a digit, or the total written when another node was
last visited; at the end two of those totals are asked for::

    map:                walk:
     ku -> mi + ba       ba -> ku + 5: ba 0, ku 5
     ba -> ku + 5        ku -> mi + ba: ku 5, ba 0, mi 5
    ask: mi ku           mi 5, ku 5
    walk: ba            answer: 0

Totals start at 0 and are kept modulo 10; the answer is the sum of the two that were asked for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from sparrow.settings import Settings
from sparrow.tasks.base import Problem, register_task
from sparrow.tasks.vocabulary import NAMES, answered


@dataclass(frozen=True)
class Chase(Settings):
    """Walks of ``steps`` steps over distinct nodes; beyond 127 steps the map is a ring walked more than once.

    Raises ConfigError: fewer than 2 steps, or a slip outside [0, 1).
    """

    steps: Annotated[int, Field(ge=2)] = 24  # walk length, the difficulty; a response has about 16 tokens a step
    # as for ``Trace``: chance that the reference solution miscalculates a step and carries on
    slip: Annotated[float, Field(ge=0, lt=1)] = 0.0

    def problem(self, index: int, seed: int = 0) -> Problem:
        """Walk ``index`` of the stream ``seed``, verified by the sum of the two totals asked for."""
        rng = random.Random(f"chase/{self.steps}/{seed}/{index}")
        nodes = rng.sample(NAMES, min(self.steps + 1, len(NAMES)))
        edges = min(self.steps, len(nodes))
        # A step may only refer to a node that has been passed, or there is no total to look up.
        added = [nodes[rng.randrange(i)] if i and rng.random() < 0.5 else str(rng.randrange(10)) for i in range(edges)]
        arrows = [f" {nodes[i]} -> {nodes[(i + 1) % len(nodes)]} + {added[i]}" for i in range(edges)]
        true, written = {nodes[0]: 0}, {nodes[0]: 0}
        walk = []
        for step in range(self.steps):
            i = step % len(nodes)
            here, there, extra = nodes[i], nodes[(i + 1) % len(nodes)], added[i]
            quoted = f", {extra} {written[extra]}" if extra in written else ""
            for total in (true, written):
                total[there] = (total[here] + (total[extra] if extra in total else int(extra))) % 10
            if self.slip and rng.random() < self.slip:
                written[there] = (written[there] + rng.randrange(1, 10)) % 10
            walk.append(f"{arrows[i]}: {here} {written[here]}{quoted}, {there} {written[there]}\n")
        first, second = rng.sample(nodes, 2)
        stated, answer = ((total[first] + total[second]) % 10 for total in (written, true))
        return answered(
            id=f"chase-{self.steps}-{seed}-{index}",
            prompt="map:\n"
            + "".join(arrow + "\n" for arrow in rng.sample(arrows, edges))
            + f"ask: {first} {second}\nwalk: {nodes[0]}\n",
            solution="".join(walk) + f" {first} {written[first]}, {second} {written[second]}\nanswer: {stated}",
            answer=answer,
        )


register_task("chase", Chase)
