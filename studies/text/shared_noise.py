"""Measure, on held-out text, the cost of making a seed's tokens independent of the drafts
(``drafter_invariant``).

    python studies/text/shared_noise.py CHECKPOINT --out benchmarks/results/text_shared_noise.json

Drafts are made as in ``acceptance.py`` and at the same positions, but without dense layers. Nothing
is sampled. Instead, the probability that a draft is accepted is computed from the two
distributions, for rejection sampling and for drafts that share their Gumbel noise with the policy's
tokens, as in vLLM. The texts' tokens were not sampled from the policy.

Shapes: as in ``acceptance.py``. ``kept``, the probability that a draft is accepted, is ``[2, S, R,
W]``, first with rejection sampling and then with shared noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import drafts
import numpy as np
import torch
from acceptance import Floats, Study, acceptance, lossless, schedule, study_parser
from numpy.typing import NDArray
from torch import Tensor

from sparrow.mismatch import sequence_bootstrap, weighted_mean

HOW = ("rejection", "shared noise")


def shared_noise(p: Tensor, q: Tensor) -> Tensor:
    """Compute the exact probability ``[...]`` that p and q ``[..., V]`` draw the same token with
    shared Gumbel noise.

    Each distribution draws the token with the smallest e / p, where the e are exponentially
    distributed. Both draw token i if e_j >= e_i max(p_j / p_i, q_j / q_i) for all j, which has the
    probability 1 / sum_j max(p_j / p_i, q_j / q_i). With tokens sorted by decreasing p / q, the
    first ratio is the larger one up to i, and the second after i.
    """
    p, q = p.double(), q.double()
    order = (p / q).argsort(
        -1, descending=True
    )  # tokens with 0 / 0 can go anywhere, since they add nothing
    p, q = p.gather(-1, order), q.gather(-1, order)
    after = (q.sum(-1, keepdim=True) - q.cumsum(-1)).clamp(min=0)
    sums = (p.cumsum(-1) * q + after * p).clamp(min=torch.finfo(p.dtype).tiny)
    return (p * q / sums).sum(-1)


def chances(p: Tensor, q: Tensor) -> Tensor:
    """Return the probabilities ``[2, ...]`` that the policy p accepts a draft from q ``[..., V]``,
    in the order of ``HOW``.
    """
    return torch.stack([acceptance(p, q).double(), shared_noise(p, q)])


def compared(kept: Floats, ks: Sequence[int]) -> dict[str, Any]:
    """Return the means and ratios of ``kept`` and of the tokens per cycle with k drafts. The 95 %
    intervals come from resampling whole texts.

    ``at least`` is the mean of a / (2 - a), where a is the probability with rejection sampling.
    The mean is a lower bound on the probability with shared noise.
    """
    text = np.arange(kept.shape[1])

    def means(values: Floats) -> dict[str, list[float]]:
        owner = np.broadcast_to(
            text.reshape(-1, *[1] * (values.ndim - 2)), values.shape[1:]
        ).ravel()
        rejection, shared = values.reshape(2, -1)

        def ratio(values: Floats, owner: NDArray[np.int64], weights: Floats) -> Floats:
            return weighted_mean(shared, owner, weights) / weighted_mean(values, owner, weights)

        which = {
            HOW[0]: (rejection, weighted_mean),
            HOW[1]: (shared, weighted_mean),
            "ratio": (rejection, ratio),
        }
        intervals = {
            name: sequence_bootstrap(of, owner, statistic)[:3]
            for name, (of, statistic) in which.items()
        }
        return {name: [round(x, 4) for x in interval] for name, interval in intervals.items()}

    bound = float((kept[0] / (2 - kept[0])).mean())
    cycles = {k: means(1 + kept[..., :k].cumprod(-1).sum(-1)) for k in ks}
    return {"kept": {**means(kept), "at least": round(bound, 4)}, "tokens_a_cycle": cycles}


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = study_parser(__doc__, 32, 24)
    parser.add_argument("--budgets", type=int, nargs="+", default=[256, 512, 1024, 2048])
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8, 12])
    args = parser.parse_args(argv)

    drafted = max(args.drafts)
    study = Study(args.checkpoint, args.texts, args.cycles, drafted)
    model = study.load(attn_implementation=drafts.NAME)
    cases = [(schedule(budget), 1) for budget in args.budgets]

    def measure(ids: Tensor, start: Tensor) -> list[Tensor]:
        _, kept = lossless(model, ids, start, drafted, cases, chances)
        return [values for case in kept for values in case]

    every = study.measured(measure, batch=1)
    rows = []
    for budget, kept in zip(args.budgets, zip(every[::2], every[1::2], strict=True), strict=True):
        rows.append({"budget": budget, **compared(np.stack(kept), args.drafts)})
        print(rows[-1], flush=True)
    return study.save(args, rows=rows)


if __name__ == "__main__":
    main()
