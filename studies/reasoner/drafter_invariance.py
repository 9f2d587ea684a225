"""Measure, by budget, the cost of making a seed's tokens independent of the drafts
(``drafter_invariant``).

    python studies/reasoner/drafter_invariance.py --out benchmarks/results/drafter_invariance.json

The transformers engine samples responses to unseen problems densely and losslessly, with the same
seeds. Teacher-forced passes over the dense responses give the probability that a draft is accepted,
for two ways of sharing random numbers: inverting both distribution functions at the same uniform
number, as the transformers engine does, and sharing Gumbel noise, as vLLM does.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from stability_study import LAYOUT
from torch import Tensor
from transformers import PreTrainedModel

from sparrow.cli.loading import HELD_OUT, model_path
from sparrow.decoding import Decoding
from sparrow.engines.hf import HFEngine
from sparrow.mismatch import plain
from sparrow.model.actor import teacher_forced
from sparrow.rollout import Rollout, Sampling
from sparrow.schedule import SparsitySchedule

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from common import device, save, tracing

DRAWS = 256  # Gumbel noise draws per token


@dataclass(frozen=True)
class Options:
    """What to measure."""

    out: Path  # The JSON file of results.
    model: str = "reasoner"
    lines: int = 24  # Lines per program.
    # Budgets to measure: top-k at every length, in pages of four tokens.
    pages: tuple[int, ...] = (8, 16, 24, 32)
    drafts: tuple[int, ...] = (4, 8)  # Drafts per cycle.
    problems: int = 128
    max_new_tokens: int = 400


def gumbel_match(p: Tensor, q: Tensor, generator: torch.Generator) -> float:
    """Estimate the probability that p and q, ``[T, V]``, draw the same token with shared Gumbel
    noise, averaged over T.
    """
    same = 0.0
    for _ in range(DRAWS):
        noise = torch.empty_like(p).exponential_(
            generator=generator
        )  # argmin of e / p is argmax of log p + Gumbel
        same += float(((noise / p).argmin(-1) == (noise / q).argmin(-1)).double().mean()) / DRAWS
    return same


def inverse_match(p: Tensor, q: Tensor) -> float:
    """Return the probability that p and q, ``[T, V]``, draw the same token by inverse-CDF sampling
    with a shared uniform number, averaged over T. It is the overlap of the tokens' intervals in the
    two distributions.
    """
    (p_end, q_end), (p_begin, q_begin) = zip(
        *((x.cumsum(-1), x.cumsum(-1) - x) for x in (p, q)), strict=True
    )
    return float(
        (torch.minimum(p_end, q_end) - torch.maximum(p_begin, q_begin)).clamp(min=0).sum(-1).mean()
    )


@torch.no_grad()
def kept(
    model: PreTrainedModel, responses: list[Rollout], schedule: SparsitySchedule
) -> dict[str, float]:
    """Return the mean probability that a draft is accepted along these responses, for each kind of
    verification.

    As in lossy decoding, the actor reads the cache its own sparse steps would have written. In
    lossless decoding, drafts agree slightly better with the policy.
    """
    sides: list[list[Tensor]] = [[], []]
    for response in responses:
        prompt, ids = (
            len(response.prompt_ids),
            torch.tensor([[*response.prompt_ids, *response.response_ids]]),
        )
        dense = model(ids, use_cache=False).logits[
            0, prompt:-1
        ]  # the first token is sampled after prefill, without a draft
        with teacher_forced(model, [prompt], schedule):
            sparse = model(ids, use_cache=False).logits[0, prompt:-1]
        for side, logits in zip(sides, (dense, sparse), strict=True):
            side.append(logits.double().softmax(-1))
    p, q = (torch.cat(side) for side in sides)
    gumbel = gumbel_match(p, q, torch.Generator().manual_seed(0))
    return {
        "rejection": float(torch.minimum(p, q).sum(-1).mean()),
        "gumbel": gumbel,
        "inverse": inverse_match(p, q),
    }


def main(options: Options) -> None:
    """Measure all budgets, and save the results."""
    model, ends, prompts = tracing(
        model_path(options.model), options.lines, options.problems, HELD_OUT, device()
    )
    sampling = Sampling(options.max_new_tokens)
    dense = HFEngine(model, SparsitySchedule.dense(**LAYOUT), ends).generate(prompts, sampling)
    rows: list[dict[str, Any]] = []
    for pages in options.pages:
        schedule = SparsitySchedule.fixed(pages, **LAYOUT)
        cycles = {}
        for k in options.drafts:
            for invariant in (False, True):
                decoding = Decoding.lossless(schedule, draft_tokens=k, drafter_invariant=invariant)
                engine = HFEngine(model, decoding, ends)
                found = engine.generate(prompts, sampling)
                same = [
                    np.array_equal(a.response_ids, b.response_ids)
                    for a, b in zip(found, dense, strict=True)
                ]
                name = "drafter invariant" if invariant else "rejection"
                cycles[f"{name}, k = {k}"] = {
                    "tokens": engine.counters().tokens_per_cycle,
                    "as_dense": sum(same),
                }
        row = {
            "pages": pages,
            "tokens": int(schedule.tokens_read(2**20)),
            "kept": kept(model, dense, schedule),
        }
        rows.append({**row, "cycles": cycles})
    save(options.out, plain({"problems": options.problems, "lines": options.lines, "rows": rows}))


if __name__ == "__main__":
    main(tyro.cli(Options))
