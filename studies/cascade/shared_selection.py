"""Measure how much less often drafts are accepted if several tokens share a selection of pages, as
in a sparse pass over guesses.

    python studies/cascade/shared_selection.py \\
        --out benchmarks/results/cascade_shared_selection.json

The texts are Python sources and manuals, not samples from the model. Cycles of drafts start at even
distances in the last ``--span`` tokens of each text. Drafts read a dense cache. Their distributions
and the policy's are divided by the temperature, and compared as in ``studies/text/acceptance.py``.
Intervals come from resampling texts.

Shapes: S texts, R cycles per text.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro
from torch import Tensor
from transformers import AutoTokenizer

from sparrow.cli.loading.models import model_path

sys.path.extend(
    str(Path(__file__).parents[2] / folder)
    for folder in ("benchmarks", "studies/common", "studies/text", "studies/pretrained")
)
import drafts
from acceptance import lossless, schedule, summary
from common import save
from domains import Domain, at_temperature, load_model
from samples import manuals, sources
from texts import cut


@dataclass(frozen=True)
class Options:
    """The texts and drafts to measure."""

    out: Path  # The JSON file of results.
    model: str = "smollm2"
    temperatures: tuple[float, ...] = (0.7, 1.0)
    texts: int = 12  # Texts of each kind.
    tokens: int = 4352  # Tokens per text.
    span: int = 512  # Cycles start in this many tokens at the end of each text.
    cycles: int = 8  # Cycles per text.
    drafts: int = 12  # Drafts per cycle.
    budget: int = 1024  # Tokens that a draft reads.
    shared: int = 4  # Tokens that share a selection.


def starts(options: Options) -> Tensor:
    """Return the first positions of cycles, ``[S, R]``. In each text, they are shifted a little
    further than in the one before, by less than the distance between two cycles.
    """
    distance = (options.span - options.drafts - 1) // options.cycles
    shift = torch.arange(options.texts) * distance // options.texts
    first = options.tokens - options.span
    return first + shift[:, None] + distance * torch.arange(options.cycles)


def main(options: Options) -> dict[str, Any]:
    """Measure, and write the results."""
    began = time.monotonic()
    tokenizer = AutoTokenizer.from_pretrained(model_path(options.model))
    model = load_model(options.model, attn_implementation=drafts.NAME)
    cases = [(schedule(options.budget), tokens) for tokens in (1, options.shared)]

    def measure(ids: Tensor, start: Tensor) -> list[Tensor]:
        return lossless(model, ids, start, options.drafts, cases)[1]

    rows = []
    for kind, documents in (("sources", sources()), ("manuals", manuals())):
        ids = cut(tokenizer, documents, options.texts, options.tokens).astype(np.int64)
        for temperature in options.temperatures:
            domain = Domain(kind, temperature, torch.from_numpy(ids), starts(options))
            with at_temperature(model, temperature):
                alphas = domain.measured(measure, 1, str(model.device))
            position = domain.position(options.drafts)
            for (_, tokens), alpha in zip(cases, alphas, strict=True):
                found = summary(alpha, position, (0, options.tokens), (options.drafts,))
                for name in ("by_step", "bins"):
                    del found[name]
                rows.append({"kind": kind, "temperature": temperature, "tokens": tokens, **found})
                print(f"{kind} at {temperature}, {tokens} tokens: {found['mean'][0]}", flush=True)
    settings = {name: value for name, value in asdict(options).items() if name != "out"}
    seconds = round(time.monotonic() - began)
    result: dict[str, Any] = {"settings": settings, "seconds": seconds, "rows": rows}
    save(options.out, result)
    return result


if __name__ == "__main__":
    main(tyro.cli(Options, description=__doc__))
