"""Compare two sources of information about the tail: sampled tokens alone, and the top-20 lists of
actor and policy.

    python studies/reasoner/sampled_tail.py --out benchmarks/results/sampled_tail.json

The bundled reasoner traces programs of 24 lines under fixed budgets, on a CPU or GPU. The top-20
lists give a lower bound on each token's acceptance. For each budget, the script computes the mean
and 5th percentile of this bound. From the sampled tokens' log-probs alone, it computes the mean,
the floor under the 5th percentile (``sparrow.mismatch.sampled``) and, for comparison only, the 5th
percentile of min(1, p/q) itself.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from sparrow import SparsitySchedule
from sparrow.engines.hf import HFEngine
from sparrow.mismatch import percentile_by_bin_interval, sampled_acceptance, tail_floor_by_bin
from sparrow.mismatch.tokens import flatten, token_acceptance
from sparrow.rollout import Sampling

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from common import REASONER, declared, device, load, parser, save, tracing

LAYOUT = {"bin_tokens": 1024, "page_size": 8, "dense_layers": (0,)}
DENSE = SparsitySchedule.dense(**LAYOUT)


def sampled_tail() -> str:
    cells = {
        "pages of 8": "{pages}",
        "mean acceptance": "{mean:.4f}",
        "estimate from sampled tokens": "{mean_sampled:.4f}",
        "p5": "{p5[0]:.3f}",
        "floor under p5 (95 % interval)": "{p5_floor[0]:.3f} ({p5_floor[1]:.3f} to {p5_floor[2]:.3f})",
        "p5 of min(1, p/q)": "{p5_of_sampled:.3f}",
    }
    return declared(load("sampled_tail")["rows"], cells)


TABLES = {"sampled tail": sampled_tail}


def main() -> None:
    options = parser(__doc__, "sampled_tail")
    options.add_argument("--responses", type=int, default=128)
    options.add_argument("--pages", type=int, nargs="+", default=[4, 8, 12, 16, 24])
    arguments = options.parse_args()

    model, ends, prompts = tracing(REASONER, 24, arguments.responses, 2, device())
    engine = HFEngine(model, DENSE, ends)
    rows = []
    for pages in arguments.pages:
        schedule = SparsitySchedule.fixed(pages, **LAYOUT)
        engine.set_schedule(schedule)
        rollouts = engine.generate(prompts, Sampling(max_new_tokens=300, seed=pages))
        policy = engine.score(rollouts, DENSE, 1.0)
        exact = [
            token_acceptance(r, p.top_logprobs, schedule)
            for r, p in zip(rollouts, policy, strict=True)
        ]
        lower, _, position, sequence = flatten(exact)
        pairs = zip(rollouts, policy, strict=True)
        sampled = np.concatenate([sampled_acceptance(p.logprobs, r.logprobs) for r, p in pairs])
        (tail,) = percentile_by_bin_interval(lower, position, sequence, 1024)
        (floor,) = tail_floor_by_bin(sampled, position, sequence, 1024)
        rows.append(
            {
                "pages": pages,
                "tokens": len(lower),
                "mean": float(lower.mean()),
                "mean_sampled": float(sampled.mean()),
                "p5": [tail.estimate, tail.lower, tail.upper],
                "p5_floor": [floor.estimate, floor.lower, floor.upper],
                "p5_of_sampled": float(np.percentile(sampled, 5)),
            }
        )
        print(json.dumps(rows[-1]), flush=True)
    save(arguments.out, {"rows": rows})


if __name__ == "__main__":
    main()
