"""Measure how fast each draft budget is, and whether lossless mode in vLLM finds the fastest one.

    python benchmarks/lossless_budgets.py --shape qwen3-1.7b    # writes results/lossless_budgets_qwen3-1.7b.json
    python benchmarks/lossless_budgets.py --sequences 8 --out results/lossless_budgets_qwen3-1.7b_2.json

As in ``benchmarks/lossless.py``, states are set up without prefill, and acceptance is synthetic.
The given acceptance is for drafts that read 1,024 tokens; ``sparrow.decoding.acceptance_at``
predicts the acceptance for half or twice that budget. Each state is timed with every fixed budget,
and with Sparrow choosing the budget from scratch. Sparrow always chooses the draft length. The
draft length and the budget settle in rounds before the timed one, and every round starts from the
state's original length. Tokens per second are computed from the expected tokens per cycle. The
number of sampled tokens would be too noisy: over a few seconds, it varies by 2 %, about as much as
the budgets differ.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections import Counter
from typing import Any

from common import parse_states, parser, save
from lossless import abandon, accept, begin, generated, scheduler
from rollout import Bench

from sparrow import SparsitySchedule
from sparrow.decoding import DRAFT_BUDGETS, Decoding, acceptance_at
from sparrow.vllm.lossless.chooser import DraftChooser
from sparrow.vllm.lossless.measured import tokens_per_cycle
from sparrow.vllm.lossless.plan import Choice, drafts_of

STATES = {
    "qwen3-1.7b": [(64, 4096), (64, 15000), (32, 30000), (8, 30000)],
    "qwen3-8b": [(48, 4096), (24, 30000)],
}
"""The batch size, and the cached tokens of each sequence at the start."""
RATES = (0.9, 0.945, 0.98)
HELD, FOUND = (2.0,), (4.0, 4.0, 4.0, 4.0)
"""Seconds of each round before the timed round, with a fixed budget and with a chosen one."""
TIMED_S = 2.0


class Counted(DraftChooser):
    """A chooser that counts cycles by draft length and budget. ``held`` is a fixed budget, as a
    multiple of the draft schedule's budget. If it is None, the budget is chosen.
    """

    def __init__(self, choices: tuple[Choice, ...], held: float | None) -> None:
        super().__init__(choices, DRAFT_BUDGETS)
        self.held = held
        self.cycles: Counter[tuple[int, float]] = Counter()

    def choose(self, rows: int, length: float, repeated: int = 0) -> Choice:
        choice = super().choose(rows, length, repeated)
        self.cycles[0, 1.0] += repeated + (
            not choice
        )  # cycles without drafts don't choose a budget
        return choice

    def choose_budget(self, rows: int, length: float, choice: Choice) -> int:
        budget = (
            super().choose_budget(rows, length, choice)
            if self.held is None
            else self.budgets.index(1.0)
        )
        read = self.budgets[budget] if self.held is None else self.held
        self.cycles[drafts_of(choice), read] += 1
        return budget


def speed(
    bench: Bench, chooser: Counted, batch: int, length: int, rate: float, seconds: float
) -> dict[str, Any]:
    """Run requests for ``seconds``, and return their tokens per second, both as sampled and as
    expected from the acceptance.
    """
    begin(bench, [length] * batch)
    chooser.cycles.clear()
    before, began = generated(bench), time.perf_counter()
    while (took := time.perf_counter() - began) < seconds:
        bench.llm.llm_engine.step()
    drawn, tokens = generated(bench) - before, 0.0
    for (drafts, read), cycles in chooser.cycles.items():
        tokens += cycles * tokens_per_cycle(acceptance_at(rate, read), drafts)
    abandon(bench, batch)
    return {
        "tokens_per_s": batch * tokens / took,
        "drawn_tokens_per_s": drawn / took,
        "cycles": [[k, read, n] for (k, read), n in sorted(chooser.cycles.items())],
    }


def main() -> None:
    import vllm

    shape, states, out = parse_states(parser(__doc__ or ""), "lossless_budgets", STATES)
    drafts = SparsitySchedule.fixed(61, dense_layers=(), landmark_dtype="fp8_e4m3")
    decoding = Decoding.lossless(drafts, adapt_draft_budget=True)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(shape, "lossless", folder, lossless=decoding)
        choices = scheduler(bench).chooser.choices
        for batch, length in states:
            for rate in RATES:
                for held in (*DRAFT_BUDGETS, None):
                    multiple = held or 1.0
                    bench.llm.collective_rpc(
                        "sparrow_set_schedule", args=(drafts.times(multiple).to_dict(),)
                    )
                    accept(bench, acceptance_at(rate, multiple))
                    chooser = scheduler(bench).chooser = Counted(choices, held)
                    for seconds in FOUND if held is None else HELD:
                        speed(bench, chooser, batch, length, rate, seconds)
                    timed = speed(bench, chooser, batch, length, rate, TIMED_S)
                    rows.append(
                        {
                            "batch": batch,
                            "length": length,
                            "rate": rate,
                            "held": held,
                            **timed,
                            "in_use": chooser.in_use(),
                            "budgets": chooser.budgets_in_use(),
                        }
                    )
                    print(json.dumps(rows[-1]), flush=True)
                    save(
                        out,
                        {
                            "vllm": vllm.__version__,
                            "shape": shape,
                            "decoding": decoding.to_dict(),
                            "rows": rows,
                        },
                    )


if __name__ == "__main__":
    main()
