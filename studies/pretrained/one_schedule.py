"""Test whether a schedule calibrated on one domain meets its target on other sequences and other
domains.

    python studies/pretrained/one_schedule.py --texts runs/texts.npz \\
      --conversations runs/conversations.npz --out benchmarks/results/pretrained_schedules.json

``sparrow.calibrate.calibrate`` searches for a schedule on half of each domain's sequences, and on
an equal mixture of all domains. It measures the lossy actor's acceptance along the sequences. Every
schedule is then measured on the other half of all domains' sequences. At each length, the schedule
*largest* reads the largest number of pages that any domain's schedule reads there.

There are no on-policy rounds, because the texts are not the actor's samples. The file is written
after every schedule, and running again with the same settings continues from it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from domains import Domain, domain_parser, earlier, load, load_model, write
from torch import Tensor

from sparrow.calibrate import calibrate
from sparrow.calibrate.search import Acceptance
from sparrow.mismatch import (
    percentile_by_bin_interval,
    sequence_bootstrap,
    weighted_mean,
    weighted_percentile,
)
from sparrow.model import actor
from sparrow.schedule import ALL_PAGES, SparsitySchedule

sys.path.append(str(Path(__file__).parents[1] / "text"))
from acceptance import distributions, lossy

NEAR = 0.02
"""A bin meets the target if its p5 differs from the target by at most this much."""
MIXTURE, LARGEST = "mixture", "largest"


class Measured:
    """Measures schedules on the sequences of several domains, computing the dense policy's
    distributions only once.
    """

    def __init__(self, model: Any, domains: Sequence[Domain], args: Any) -> None:
        self.model, self.args = model, args
        self.ids = torch.cat([d.ids for d in domains])
        self.start = torch.cat([d.start for d in domains])
        self.dense = [distributions(model, *some, 1) for some in self._batches()]

    def _batches(self) -> list[tuple[Tensor, Tensor]]:
        size, device = self.args.batch, self.model.device
        both = zip(self.ids.split(size), self.start.split(size), strict=True)
        return [(ids.to(device), start.to(device)) for ids, start in both]

    def __call__(self, schedule: SparsitySchedule) -> Acceptance:
        """Return the lossy actor's acceptance at all chosen positions."""
        options = {"implementation": self.args.implementation}
        parts = [
            lossy(self.model, *some, p, self.args.prompt, schedule, **options)
            for some, p in zip(self._batches(), self.dense, strict=True)
        ]
        alpha = torch.cat(parts)[..., 0].double().clamp(0, 1).cpu().numpy()
        sequence = np.broadcast_to(np.arange(len(alpha))[:, None], alpha.shape)
        return Acceptance(alpha.ravel(), self.start.numpy().ravel(), sequence.ravel())


def halves(domain: Domain) -> tuple[Domain, Domain]:
    """Split a domain into two halves, taking every other sequence."""
    of = [(domain.ids[half::2], domain.start[half::2]) for half in (0, 1)]
    first, second = (Domain(domain.name, domain.temperature, *each) for each in of)
    return first, second


def judged(measured: Acceptance, schedule: SparsitySchedule, target: float) -> dict[str, Any]:
    """Return p5 overall and by bin, how many bins meet the target, and the mean number of tokens
    read.
    """
    alpha, position, sequence = measured
    bins = percentile_by_bin_interval(alpha, position, sequence, schedule.bin_tokens)
    over = np.array([b.estimate - target for b in bins])
    pages = np.array([schedule.pages(int(p) + 1) for p in np.unique(position)])
    kept = pages + schedule.sink_pages + schedule.recent_pages
    read = np.minimum(kept * schedule.page_size, np.unique(position) + 1)
    statistics = {"mean": weighted_mean, "p5": weighted_percentile}
    found = {
        name: [round(x, 4) for x in sequence_bootstrap(alpha, sequence, of)[:3]]
        for name, of in statistics.items()
    }
    return {
        **found,
        "tokens_read": round(float(read.mean()), 1),
        "bins": [[b.start, *(round(x, 4) for x in (b.estimate, b.lower, b.upper))] for b in bins],
        "above": int((over > NEAR).sum()),
        "within": int((np.abs(over) <= NEAR).sum()),
        "below": int((over < -NEAR).sum()),
    }


def largest(schedules: Mapping[str, SparsitySchedule]) -> SparsitySchedule:
    """Return a schedule that reads, at each length, the largest number of pages that any of
    ``schedules`` reads there.
    """
    tables = [schedule.top_k for schedule in schedules.values()]
    length = max(map(len, tables))
    padded = [(*table, *table[-1:] * (length - len(table))) for table in tables]
    first = next(iter(schedules.values()))
    return first.replace(top_k=tuple(map(max, zip(*padded, strict=True))), provenance={})


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = domain_parser(__doc__, 40)
    parser.add_argument("--target", type=float, default=0.86)
    parser.add_argument(
        "--trials", type=int, nargs="+", default=[13, 29, 61, 125], help="page counts to try first"
    )
    parser.add_argument("--refine", type=int, default=3)
    parser.add_argument(
        "--positions", type=int, default=1024, help="positions to measure per sequence"
    )
    parser.add_argument("--bin-tokens", type=int, default=1024, help="bin width of the schedule")
    parser.add_argument(
        "--prompt",
        type=int,
        default=128,
        help="number of tokens at the start of each sequence that are prefilled densely",
    )
    args = parser.parse_args(argv)

    result = earlier(args)
    began = time.monotonic() - result.get("seconds", 0)
    calibrations: list[dict[str, Any]] = result.get("calibrations", [])
    rows: list[dict[str, Any]] = result.get("rows", [])
    model = load_model(args.model)
    actor.set_schedule(model, SparsitySchedule.dense(dense_layers=()))
    edges = [args.prompt, *range(args.bin_tokens, args.edges[-1] + 1, args.bin_tokens)]
    domains = [d for d in load(args, edges, args.positions, 1) if d.temperature == 1]
    found, held_out = {}, {}
    for domain in domains:
        found[domain.name], held_out[domain.name] = halves(domain)
    share = len(domains)
    layout = SparsitySchedule.dense(page_size=16, bin_tokens=args.bin_tokens, dense_layers=())
    trials = [layout.replace(top_k=(k,)) for k in args.trials]
    schedules = {
        of["on"]: layout.replace(top_k=tuple(ALL_PAGES if k == "all" else k for k in of["pages"]))
        for of in calibrations
    }

    def search(name: str, group: Sequence[Domain]) -> None:
        if name in schedules:
            return
        measured = Measured(model, group, args)
        calibration = calibrate(measured, trials, args.target, min(args.trials), args.refine)
        schedules[name] = calibration.schedule.replace(provenance={})
        pages = ["all" if k >= ALL_PAGES else k for k in calibration.schedule.top_k]
        calibrations.append({"on": name, "pages": pages, "passes": len(calibration.curves)})
        print(f"{name}: {pages} after {len(calibration.curves)} passes", flush=True)
        write(args, began, calibrations=calibrations, rows=rows)

    def judge() -> None:
        for name, domain in held_out.items():
            done = {row["on"] for row in rows if row["domain"] == name}
            if left := {on: kept for on, kept in schedules.items() if on not in done}:
                measured = Measured(model, [domain], args)
                for on, kept in left.items():
                    row = {"on": on, "domain": name, **judged(measured(kept), kept, args.target)}
                    rows.append(row)
                    print(f"{on} on {name}: p5 {row['p5']}, reads {row['tokens_read']}", flush=True)
                    write(args, began, calibrations=calibrations, rows=rows)

    for name, domain in found.items():
        search(name, [domain])
    schedules[LARGEST] = largest({name: schedules[name] for name in found})
    judge()
    mixed = [Domain(d.name, 1, d.ids[::share], d.start[::share]) for d in found.values()]
    search(MIXTURE, mixed)
    judge()
    return write(args, began, calibrations=calibrations, rows=rows)


if __name__ == "__main__":
    main()
