"""Page sizes, dense layers, landmarks and 8-bit caches of a pretrained model, by the bytes read.

    python studies/pretrained/what_is_read.py --texts runs/texts.npz \\
      --conversations runs/conversations.npz --out benchmarks/results/pretrained_reading.json

Drafts over a dense cache, as in ``studies/text/fewer_bytes.py``, which counts the bytes. Each
variant is compared with pages of 16 without dense layers at equal bytes, on the same sequences.
The actors with 8-bit caches are lossy, as in ``studies/text/fewer_bits.py``: they read a rounded
cache, the policy does not, and they are compared with the same budget without rounding.

Domains are those at temperature 1, pooled; intervals resample sequences.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from domains import Domain, domain_parser, load, load_model, write
from torch import Tensor

from sparrow.model import actor
from sparrow.schedule import SparsitySchedule

sys.path.extend(
    str(Path(__file__).parents[2] / folder) for folder in ("benchmarks", "studies/text")
)
import drafts
from acceptance import Floats, distributions, gain, lossy, schedule, summary
from fewer_bytes import DRAFTS, Variant, measure
from rounding import int8_cache, rounded_cache, scales_of
from uneven_bytes import at_bytes

EVEN = (256, 512, 1024, 2048, 3072)


def variants(layers: int, budgets: Sequence[int]) -> list[Variant]:
    """Return what drafts read: first pages of 16, then all that is compared with them."""
    dense = {"dense layers 0 and 1": (0, 1), "dense last layer": (layers - 1,)}
    return [
        *(Variant("page size", b, page_size=16) for b in EVEN),
        *(Variant("page size", b, page_size=p) for p in (8, 32, 64) for b in (*budgets, 2048)),
        *(Variant("quest", b, score="quest", page_size=p) for p in (16, 32) for b in budgets),
        *(Variant("landmarks", b, landmarks=x) for x in ("fp8", "int8") for b in budgets),
        *(Variant(name, b, dense_layers=of) for name, of in dense.items() for b in budgets),
    ]


def pooled(domains: Sequence[Domain], of: Sequence[Sequence[Floats]]) -> list[Floats]:
    """Return each variant's acceptance ``[S, R, W]`` on the sequences of all domains."""
    assert len(domains) == len(of)
    return [np.concatenate(each) for each in zip(*of, strict=True)]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = domain_parser(__doc__, 20)
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--cycles", type=int, default=32, help="of each sequence")
    parser.add_argument("--prompt", type=int, default=128, help="tokens that set a cache's scales")
    args = parser.parse_args(argv)

    began = time.monotonic()
    drafter = load_model(args.model, attn_implementation=drafts.NAME)
    history = load_model(args.model)
    actor.set_schedule(history, SparsitySchedule.dense(dense_layers=()))
    domains = [d for d in load(args, args.edges, args.cycles, DRAFTS) if d.temperature == 1]
    device, layers = str(drafter.device), drafter.config.num_hidden_layers
    every = variants(layers, args.budgets)
    values = pooled(
        domains,
        [d.measured(partial(measure, drafter, every), args.batch, device) for d in domains],
    )
    position = np.concatenate([d.position(DRAFTS) for d in domains])
    owner = np.concatenate([[d.name] * len(d.ids) for d in domains])
    reads = [v.tokens_read(position + 1, layers) for v in every]
    even = [(x, alpha) for v, x, alpha in zip(every, reads, values, strict=True)][: len(EVEN)]

    def statistics(alpha: Floats, ks: Sequence[int]) -> dict[str, Any]:
        measured = summary(alpha, position, args.edges, ks)
        names = ("n", "mean", "p5", *(["tokens_a_cycle"] if ks else []))
        by_domain = {
            d.name: [float(x) for x in np.round(_mean_and_p5(alpha[owner == d.name]), 4)]
            for d in domains
        }
        return {**{k: measured[k] for k in names}, "domains": by_domain}

    rows = []
    for number, (v, x, alpha) in enumerate(zip(every, reads, values, strict=True)):
        row = {
            "study": v.study,
            "budget": v.budget,
            "page_size": v.page_size,
            "landmarks": v.landmarks,
            "score": v.score,
            "tokens_read": round(x, 1),
            **statistics(alpha, (DRAFTS,)),
        }
        if number >= len(EVEN):
            row["minus_even"] = {
                name: at_bytes(x, [(x, alpha)], even, name == "p5") for name in ("mean", "p5")
            }
        rows.append(row)
        print(f"{v}: mean {row['mean'][0]}, p5 {row['p5'][0]} {row.get('minus_even')}", flush=True)

    cases = {
        "nothing": args.budgets,
        "int8": [None, *args.budgets],
        "fp8": [None, *args.budgets],
    }
    everything = SparsitySchedule.dense(dense_layers=())
    scales = scales_of(history, domains[0].ids[:4, : args.prompt].to(device))

    def rounded(ids: Tensor, start: Tensor) -> list[Tensor]:
        p = distributions(history, ids, start, DRAFTS)
        alphas = []
        for name, budgets in cases.items():
            for budget in budgets:
                kept = schedule(budget) if budget else everything
                context = {
                    "nothing": contextlib.nullcontext,
                    "int8": partial(int8_cache, history),
                    "fp8": partial(rounded_cache, history, scales),
                }[name]
                with context():
                    options = {"implementation": args.implementation}
                    alphas.append(lossy(history, ids, start, p, args.prompt, kept, **options))
        return alphas

    values = pooled(domains, [d.measured(rounded, args.batch, device) for d in domains])
    unrounded = dict(zip(args.budgets, values, strict=False))
    caches = []
    names = [(name, budget) for name, budgets in cases.items() for budget in budgets]
    for (name, budget), alpha in zip(names, values, strict=True):
        row = {"cache": name, "budget": budget, **statistics(alpha, ())}
        if name != "nothing" and budget in unrounded:
            row["change"] = gain(unrounded[budget], alpha)
        caches.append(row)
        print(f"{name} {budget}: mean {row['mean'][0]}, p5 {row['p5'][0]} {row.get('change')}")
    return write(args, began, rows=rows, caches=caches)


def _mean_and_p5(alpha: Floats) -> tuple[float, float]:
    return float(alpha.mean()), float(np.percentile(alpha, 5))


if __name__ == "__main__":
    main()
