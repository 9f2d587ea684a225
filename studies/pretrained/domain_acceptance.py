"""Measure a pretrained model's acceptance by domain, length, budget and temperature.

    python studies/pretrained/domain_acceptance.py --texts runs/texts.npz \\
      --conversations runs/conversations.npz --out benchmarks/results/pretrained_acceptance.json

*Lossless* rows are for the drafts of whole cycles, which read a dense cache. *Lossy* rows are for
the same positions, but the actor reads the cache that its own sparse steps have written since the
prompt. As in ``studies/text/acceptance.py``, both are compared with the dense policy in float32,
pages have 16 tokens, and no layer is dense. In chat mathematics, cycles only cover tokens sampled
by the model. Every length bin has the same number of cycles. The file is written after every
domain, and running again with the same settings continues from it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from domains import at_temperature, domain_parser, earlier, load, load_model, write
from torch import Tensor

from sparrow.model import actor
from sparrow.schedule import SparsitySchedule

sys.path.append(str(Path(__file__).parents[1] / "text"))
import drafts
from acceptance import lossless, lossy, schedule, shape, summary

DRAFTS = 8


def rounded(x: Any) -> Any:
    """Round all floats in nested results to four digits."""
    if isinstance(x, dict):
        return {name: rounded(value) for name, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [rounded(value) for value in x]
    return round(x, 4) if isinstance(x, float) else x


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = domain_parser(__doc__, 40)
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024, 2048])
    parser.add_argument("--cycles", type=int, default=48, help="cycles per sequence")
    parser.add_argument(
        "--prompt",
        type=int,
        default=128,
        help="number of tokens at the start that a lossy actor prefills densely",
    )
    args = parser.parse_args(argv)

    result = earlier(args)
    began = time.monotonic() - result.get("seconds", 0)
    drafter = load_model(args.model, attn_implementation=drafts.NAME)
    history = load_model(args.model)
    actor.set_schedule(history, SparsitySchedule.dense(dense_layers=()))
    kept = [schedule(budget) for budget in args.budgets]

    def measure(ids: Tensor, start: Tensor) -> list[Tensor]:
        p, alphas = lossless(drafter, ids, start, DRAFTS, [(each, 1) for each in kept])
        for each in kept:
            options = {"implementation": args.implementation}
            alphas.append(lossy(history, ids, start, p, args.prompt, each, **options))
        return alphas

    every = [(mode, budget) for mode in ("lossless", "lossy") for budget in args.budgets]
    rows: list[dict[str, Any]] = result.get("rows", [])
    done = {(row["domain"], row["temperature"]) for row in rows}
    for domain in load(args, args.edges, args.cycles, DRAFTS):
        if (domain.name, domain.temperature) in done:
            continue
        with (
            at_temperature(drafter, domain.temperature),
            at_temperature(history, domain.temperature),
        ):
            values = domain.measured(measure, args.batch, str(drafter.device))
        what = {"domain": domain.name, "temperature": domain.temperature}
        position = domain.position(DRAFTS)
        for (mode, budget), alpha in zip(every, values, strict=True):
            ks = (DRAFTS,) if mode == "lossless" else ()
            measured = summary(alpha, position, args.edges, ks)
            del measured["by_step"]
            if mode == "lossy":
                measured |= rounded(shape(alpha, position))
            rows.append({**what, "mode": mode, "budget": budget, **measured})
            print(f"{what} {mode} {budget}: {measured['mean'][0]}, {measured['p5'][0]}", flush=True)
        result = write(args, began, rows=rows)
    return result


if __name__ == "__main__":
    main()
