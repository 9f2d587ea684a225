"""Measure a reasoner's acceptance by budget, for drafts in lossless rollouts and for the lossy
actor under the same schedule.

    python studies/reasoner/draft_acceptance.py --models reasoner runs/deep --lines 24 20 \
        --out benchmarks/results/reasoner_acceptance.json

In both modes, the transformers engine samples responses to the same unseen problems. Acceptance is
computed over the full vocabulary. For drafts, this happens during verification; for the lossy
actor, it happens in a teacher-forced policy pass over its responses.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from stability_study import LAYOUT
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from sparrow.cli.loading import HELD_OUT, load_model
from sparrow.decoding import Decoding
from sparrow.engines.hf import HFEngine, eos_ids
from sparrow.engines.measure import measure
from sparrow.mismatch import plain, sequence_bootstrap, weighted_mean, weighted_percentile
from sparrow.mismatch.tokens import flatten
from sparrow.rollout import Sampling
from sparrow.schedule import SparsitySchedule
from sparrow.tasks import Trace

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from common import write


@dataclass(frozen=True)
class Options:
    """What to measure."""

    out: Path  # The JSON file of results.
    models: tuple[str, ...] = ("reasoner",)  # Names or checkpoints.
    lines: tuple[int, ...] = (24,)  # Lines per program, for each model.
    # Budgets to measure: top-k at every length, in pages of four tokens.
    pages: tuple[int, ...] = (8, 16, 24, 32)
    drafts: tuple[int, ...] = (4, 8)  # Drafts per cycle.
    problems: int = 128
    max_new_tokens: int = 400


def row(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    prompts: Sequence[Sequence[int]],
    pages: int,
    drafts: Sequence[int],
    max_new_tokens: int,
) -> dict[str, Any]:
    """Measure one budget: the lossy actor's mean and p5, with 95 % intervals from resampling
    responses, and draft acceptance.
    """
    schedule = SparsitySchedule.fixed(pages, **LAYOUT)
    sampling = Sampling(max_new_tokens, top_n=len(tokenizer))
    engine = HFEngine(model, Decoding.lossy(schedule), eos_ids(model, tokenizer))
    alpha, _, position, response = flatten(measure(engine, engine, prompts, sampling, schedule))
    lossy: dict[str, Any] = {"tokens": len(alpha), "read_fraction": engine.counters().read_fraction}
    for name, statistic in (("mean", weighted_mean), ("p5", weighted_percentile)):
        lossy[name] = list(sequence_bootstrap(alpha, response, statistic)[:3])
    lossy["bins"] = [
        {"start": int(low), "mean": float(inside.mean()), "p5": float(np.percentile(inside, 5))}
        for low in np.unique(position // schedule.bin_tokens) * schedule.bin_tokens
        if len(inside := alpha[position // schedule.bin_tokens == low // schedule.bin_tokens])
    ]
    lossless = {}
    for k in drafts:
        engine = HFEngine(
            model, Decoding.lossless(schedule, draft_tokens=k), eos_ids(model, tokenizer)
        )
        engine.generate(prompts, sampling)
        lossless[k] = engine.counters().to_dict()["drafts"]
    return {
        "pages": pages,
        "tokens": int(schedule.tokens_read(2**20)),
        "lossy": lossy,
        "lossless": lossless,
    }


def main(options: Options) -> None:
    """Measure all models and budgets, saving the results after every budget."""
    if len(options.models) != len(options.lines):
        raise SystemExit(
            f"got {len(options.lines)} program lengths for {len(options.models)} models; give one "
            "per model with --lines"
        )
    report: dict[str, Any] = {"problems": options.problems, "models": []}
    for name, lines in zip(options.models, options.lines, strict=True):
        model, tokenizer = load_model(name)
        texts = [Trace(lines).problem(i, seed=HELD_OUT).prompt for i in range(options.problems)]
        prompts = tokenizer(texts, add_special_tokens=False).input_ids
        rows: list[dict[str, Any]] = []
        config = model.config
        report["models"].append(
            {
                "name": Path(name).name,
                "layers": config.num_hidden_layers,
                "lines": lines,
                "rows": rows,
            }
        )
        for pages in options.pages:
            rows.append(
                row(model, tokenizer, prompts, pages, options.drafts, options.max_new_tokens)
            )
            write(options.out, plain(report))


if __name__ == "__main__":
    main(tyro.cli(Options))
