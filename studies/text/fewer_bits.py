"""Measure how much acceptance 8-bit keys and values, fp8 weights and sparse attention cost,
separately and together.

    python studies/text/fewer_bits.py CHECKPOINT --out benchmarks/results/text_bits.json
    python studies/text/fewer_bits.py CHECKPOINT --out benchmarks/results/text_bits_bf16.json \\
        --bfloat16 --texts 32 --cycles 24 --budgets 512 1024 \\
        --rounded nothing both "int8 cache" "int8 cache, matrices"

The policy is dense and in float32. Actors differ from it in what they round
(``benchmarks/rounding.py``, with products in float32) and in what they read. After the prompt, each
actor reads the cache it has written itself. One of the actors is the policy itself in bfloat16,
which shows how much noise any real actor adds. With ``--bfloat16``, all actors run in bfloat16.
Texts, positions and statistics are the same as in ``acceptance.py``. ``p5_change`` is how much
rounding changes p5 at the same budget, with an interval from resampling texts.

Shapes: as in ``acceptance.py``.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from acceptance import Study, distributions, gain, lossy, schedule, study_parser
from torch import Tensor

from sparrow.model import actor
from sparrow.schedule import SparsitySchedule

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from rounding import int8_cache, rounded_cache, rounded_matrices, scales_of

ROUNDED = {
    "nothing": (),
    "matrices": ("matrices",),
    "cache": ("cache",),
    "both": ("cache", "matrices"),
    "int8 cache": ("int8 cache",),
    "int8 cache, matrices": ("int8 cache", "matrices"),
}
DRAFTED = 12
"""Positions per group."""


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = study_parser(__doc__, 16, 96)
    parser.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=[1024, 2048],
        help="budgets in tokens, in addition to reading all tokens",
    )
    parser.add_argument("--dense-layers", type=int, nargs="*", default=[0, 1])
    parser.add_argument(
        "--context", type=int, help="tokens per text; by default, the model's context"
    )
    parser.add_argument(
        "--prompt",
        type=int,
        default=128,
        help="number of tokens at the start of each text that the cache's scales are computed from",
    )
    parser.add_argument(
        "--rounded",
        nargs="+",
        choices=ROUNDED,
        default=list(ROUNDED),
        help="what to round in the actors",
    )
    parser.add_argument("--bfloat16", action="store_true", help="run all actors in bfloat16")
    parser.add_argument(
        "--implementation",
        choices=("triton", "reference"),
        help="implementation of sparse attention",
    )
    args = parser.parse_args(argv)

    study = Study(args.checkpoint, args.texts, args.cycles, DRAFTED, args.context)
    policy, in_bf16 = study.load(), study.load(torch.bfloat16)
    history = in_bf16 if args.bfloat16 else study.load()
    for model in (history, in_bf16):
        actor.set_schedule(model, SparsitySchedule.dense(dense_layers=()))
    scales = scales_of(policy, study.ids[:, : args.prompt])

    everything = SparsitySchedule.dense(dense_layers=tuple(args.dense_layers))
    actors: list[tuple[dict[str, Any], Any, SparsitySchedule]] = [
        ({"rounded": "all to bfloat16", "budget": None}, in_bf16, everything)
    ]
    for budget, kept in (
        (None, everything),
        *((b, schedule(b, args.dense_layers)) for b in args.budgets),
    ):
        for name in (each for each in ROUNDED if each in args.rounded):  # baseline first
            if budget is not None or name != "nothing":  # the policy itself
                actors.append(({"rounded": name, "budget": budget}, history, kept))

    def measure(ids: Tensor, start: Tensor) -> list[Tensor]:
        p, alphas = distributions(policy, ids, start, DRAFTED), []
        for what, model, kept in actors:
            with contextlib.ExitStack() as stack:
                if "cache" in ROUNDED.get(what["rounded"], ()):
                    stack.enter_context(rounded_cache(model, scales))
                if "int8 cache" in ROUNDED.get(what["rounded"], ()):
                    stack.enter_context(int8_cache(model))
                if "matrices" in ROUNDED.get(what["rounded"], ()):
                    stack.enter_context(rounded_matrices(model))
                alphas.append(
                    lossy(
                        model, ids, start, p, args.prompt, kept, implementation=args.implementation
                    )
                )
        return alphas

    rows, unrounded = [], None
    for (what, _, kept), values in zip(actors, study.measured(measure, batch=1), strict=True):
        measured = study.summary(values)
        del measured["bins"]
        rows.append({**what, "dense_layers": list(kept.dense_layers), **measured})
        if what["rounded"] == "nothing":
            unrounded = values
        elif what["budget"] is not None and unrounded is not None:
            rows[-1]["p5_change"] = gain(unrounded, values)["p5"]
        print(f"{what}: mean {rows[-1]['mean'][0]}, p5 {rows[-1]['p5'][0]}", flush=True)
    return study.save(args, rows=rows)


if __name__ == "__main__":
    main()
