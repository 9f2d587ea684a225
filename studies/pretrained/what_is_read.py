"""Compare page sizes, dense layers, landmarks and 8-bit caches on a pretrained model, at equal
bytes.

    python studies/pretrained/what_is_read.py --texts runs/texts.npz \\
      --conversations runs/conversations.npz --out benchmarks/results/pretrained_reading.json

Drafts read a dense cache, as in ``studies/text/fewer_bytes.py``, which also counts the bytes. Each
variant is compared with pages of 16 without dense layers, at equal bytes and on the same sequences.
As in ``studies/text/fewer_bits.py``, actors with 8-bit caches are lossy. Only these actors read a
rounded cache; the policy doesn't. Each is compared with an actor that has the same budget but
doesn't round.

All domains at temperature 1 are pooled, and intervals come from resampling sequences. After every
domain, acceptance rates are saved next to the JSON file with the suffix ``.npz``, and running again
with the same settings continues from them.
"""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from domains import Domain, domain_parser, load, load_model, settings_of, write
from torch import Tensor

from sparrow.model import actor
from sparrow.schedule import SparsitySchedule

sys.path.extend(
    str(Path(__file__).parents[2] / folder)
    for folder in ("benchmarks", "studies/text", "studies/cascade")
)
import drafts
from acceptance import Floats, distributions, gain, lossy, schedule, summary
from fewer_bytes import DRAFTS, Variant, measure
from rounding import int8_cache, rounded_cache, scales_of
from samples import save
from uneven_bytes import at_bytes

EVEN = (256, 512, 1024, 2048, 3072)


def variants(layers: int, budgets: Sequence[int]) -> list[Variant]:
    """Return the variants: first the ones with pages of 16, then everything compared with them."""
    dense = {"dense layers 0 and 1": (0, 1), "dense last layer": (layers - 1,)}
    return [
        *(Variant("page size", b, page_size=16) for b in EVEN),
        *(Variant("page size", b, page_size=p) for p in (8, 32, 64) for b in (*budgets, 2048)),
        *(Variant("quest", b, score="quest", page_size=p) for p in (16, 32) for b in budgets),
        *(Variant("landmarks", b, landmarks=x) for x in ("fp8", "int8") for b in budgets),
        *(Variant(name, b, dense_layers=of) for name, of in dense.items() for b in budgets),
    ]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = domain_parser(__doc__, 20)
    parser.add_argument("--budgets", type=int, nargs="+", default=[512, 1024])
    parser.add_argument("--cycles", type=int, default=32, help="cycles per sequence")
    parser.add_argument(
        "--prompt",
        type=int,
        default=128,
        help="number of tokens that a cache's scales are computed from",
    )
    parser.add_argument(
        "--cached",
        type=int,
        nargs="+",
        default=[1024],
        help="budgets for comparing 8-bit caches",
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=float("inf"),
        help="seconds after which no more domains are started",
    )
    args = parser.parse_args(argv)

    began = time.monotonic()
    drafter = load_model(args.model, attn_implementation=drafts.NAME)
    history = load_model(args.model)
    actor.set_schedule(history, SparsitySchedule.dense(dense_layers=()))
    domains = [d for d in load(args, args.edges, args.cycles, DRAFTS) if d.temperature == 1]
    device, layers = str(drafter.device), drafter.config.num_hidden_layers
    every = variants(layers, args.budgets)
    cases = [("nothing", b) for b in args.cached] + [
        (name, b) for name in ("int8", "fp8") for b in (*args.cached, None)
    ]
    scales = scales_of(history, domains[0].ids[:4, : args.prompt].to(device))

    def rounded(ids: Tensor, start: Tensor) -> list[Tensor]:
        p = distributions(history, ids, start, DRAFTS)
        alphas = []
        for name, budget in cases:
            kept = schedule(budget) if budget else SparsitySchedule.dense(dense_layers=())
            context = {
                "nothing": contextlib.nullcontext,
                "int8": partial(int8_cache, history),
                "fp8": partial(rounded_cache, history, scales),
            }[name]
            with context():
                options = {"implementation": args.implementation}
                alphas.append(lossy(history, ids, start, p, args.prompt, kept, **options))
        return alphas

    saved = args.out.with_suffix(".npz")
    settings = json.dumps(settings_of(args))
    measured: dict[str, Floats] = {}
    if saved.exists():
        with np.load(saved) as file:
            if (others := file["settings"].item()) != settings:
                raise ValueError(
                    f"{saved} was measured with different settings, {others}; use the same settings, "
                    "or a different --out"
                )
            measured = {name: file[name] for name in file.files if name != "settings"}
            measured = {name: alpha.astype(np.float64) for name, alpha in measured.items()}
    for stage, of in (("drafts", partial(measure, drafter, every)), ("caches", rounded)):
        for d in domains:
            name = f"{stage}/{d.name}"
            if name not in measured and time.monotonic() - began < args.seconds:
                measured[name] = np.stack(d.measured(of, args.batch, device))
                arrays = {key: value.astype(np.float32) for key, value in measured.items()}
                save(saved, {**arrays, "settings": np.array(settings)})
                print(f"{name} after {time.monotonic() - began:.0f} s", flush=True)
    of_drafts = [d for d in domains if f"drafts/{d.name}" in measured]
    of_caches = [d for d in domains if f"caches/{d.name}" in measured]
    rows = compared(every, layers, of_drafts, measured, args) if of_drafts else []
    caches = cached(cases, of_caches, measured, args) if of_caches else []
    return write(args, began, rows=rows, caches=caches)


def statistics(
    alpha: Floats, domains: Sequence[Domain], edges: Sequence[int], ks: Sequence[int]
) -> dict[str, Any]:
    """Compute statistics of acceptance ``[S, R, W]``: mean, p5 and tokens per cycle over all
    domains, plus mean and p5 for each domain.
    """
    position = np.concatenate([d.position(DRAFTS) for d in domains])
    measured = summary(alpha, position, edges, ks)
    names = ["n", "mean", "p5"]
    if ks:
        names += ["tokens_a_cycle", "tokens_a_cycle_interval"]
    parts = np.split(alpha, np.cumsum([len(d.ids) for d in domains])[:-1])
    by_domain = {
        d.name: [round(float(x), 4) for x in (part.mean(), np.percentile(part, 5))]
        for d, part in zip(domains, parts, strict=True)
    }
    return {**{name: measured[name] for name in names}, "domains": by_domain}


def compared(
    every: Sequence[Variant],
    layers: int,
    domains: Sequence[Domain],
    measured: dict[str, Floats],
    args: Any,
) -> list[dict[str, Any]]:
    """Return a row for each variant."""
    values = np.concatenate([measured[f"drafts/{d.name}"] for d in domains], axis=1)
    position = np.concatenate([d.position(DRAFTS) for d in domains])
    reads = [v.tokens_read(position + 1, layers) for v in every]
    even = list(zip(reads, values, strict=True))[: len(EVEN)]
    rows = []
    for number, (v, x, alpha) in enumerate(zip(every, reads, values, strict=True)):
        row = {
            "study": v.study,
            "budget": v.budget,
            "page_size": v.page_size,
            "landmarks": v.landmarks,
            "score": v.score,
            "tokens_read": round(x, 1),
            **statistics(alpha, domains, args.edges, (DRAFTS,)),
        }
        if number >= len(EVEN):
            row["minus_even"] = {
                name: at_bytes(x, [(x, alpha)], even, name == "p5") for name in ("mean", "p5")
            }
        rows.append(row)
        print(f"{v}: mean {row['mean'][0]}, p5 {row['p5'][0]} {row.get('minus_even')}", flush=True)
    return rows


def cached(
    cases: Sequence[tuple[str, int | None]],
    domains: Sequence[Domain],
    measured: dict[str, Floats],
    args: Any,
) -> list[dict[str, Any]]:
    """Return a row for each actor, with or without an 8-bit cache."""
    values = np.concatenate([measured[f"caches/{d.name}"] for d in domains], axis=1)
    unrounded = {
        budget: alpha
        for (name, budget), alpha in zip(cases, values, strict=True)
        if name == "nothing"
    }
    rows = []
    for (name, budget), alpha in zip(cases, values, strict=True):
        row = {"cache": name, "budget": budget, **statistics(alpha, domains, args.edges, ())}
        if name != "nothing" and budget in unrounded:
            row["change"] = gain(unrounded[budget], alpha)
        rows.append(row)
        print(f"{name} {budget}: mean {row['mean'][0]}, p5 {row['p5'][0]} {row.get('change')}")
    return rows


if __name__ == "__main__":
    main()
