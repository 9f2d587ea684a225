"""Measure draft acceptance by bytes read, for different page sizes, 8-bit landmarks, Quest's scores
and dense layers.

    python studies/text/fewer_bytes.py CHECKPOINT --out benchmarks/results/text_bytes.json

The setup is the same as for the lossless rows of ``acceptance.py``: drafts read a dense cache of
held-out text, in float32, by budget and length. Bytes are counted in KV tokens, the size of one
token's key and value in one layer, and averaged over layers and drafts. They cover the pages that
are read and the landmarks of all pages. A landmark counts as half a KV token (a mean key in 16
bits), a quarter (a mean key in 8 bits) or one (Quest's minimum and maximum). A dense layer reads
all tokens. ``fp8`` landmarks are rounded to e4m3. ``int8`` landmarks are scaled so that their
largest component is 127, then rounded to integers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import drafts
import numpy as np
import torch
from acceptance import Study, acceptance, study_parser
from torch import Tensor
from transformers import PreTrainedModel

from sparrow.attention.pages import landmarks, page_scores
from sparrow.schedule import SparsitySchedule

DRAFTS = 8
BUDGETS = (256, 512, 1024, 2048)
Precision = Literal["16 bit", "fp8", "int8"]
Score = Literal["mean_key", "quest"]


@dataclass(frozen=True)
class Variant:
    """What drafts read."""

    study: str
    budget: int  # tokens
    page_size: int = 16
    landmarks: Precision = "16 bit"
    score: Score = "mean_key"
    dense_layers: tuple[int, ...] = ()
    sink_pages: int = 1
    recent_pages: int = 2

    def schedule(self) -> SparsitySchedule:
        pages = self.budget // self.page_size - self.sink_pages - self.recent_pages
        layout = dict(
            sink_pages=self.sink_pages,
            recent_pages=self.recent_pages,
            dense_layers=self.dense_layers,
        )
        return SparsitySchedule.fixed(pages, page_size=self.page_size, **layout)

    def tokens_read(self, length: np.ndarray, layers: int) -> float:
        """Return the KV tokens a draft reads per layer, averaged over these sequence lengths."""
        landmark = {"16 bit": 0.5, "fp8": 0.25, "int8": 0.25}[self.landmarks] * (
            2 if self.score == "quest" else 1
        )
        sparse = np.minimum(self.budget, length) + np.where(
            length > self.budget, length / self.page_size * landmark, 0
        )
        dense = len(self.dense_layers) / layers
        return float(((1 - dense) * sparse + dense * length).mean())


def variants(layers: int) -> list[Variant]:
    return [
        *(
            Variant("page size", b, page_size=p)
            for p in (8, 16, 32, 64, 128)
            for b in BUDGETS
            if b >= 4 * p
        ),
        *(
            Variant("landmarks", b, landmarks=x, page_size=p)
            for p in (8, 16)
            for x in ("fp8", "int8")
            for b in BUDGETS
        ),
        *(Variant("quest", b, score="quest", page_size=p) for p in (16, 32) for b in BUDGETS),
        *(Variant("one dense layer", 512, dense_layers=(layer,)) for layer in range(layers)),
        *(Variant("sink pages", b, sink_pages=n) for b in (512, 1024) for n in (0, 2, 4)),
        *(Variant("recent pages", b, recent_pages=n) for b in (512, 1024) for n in (2, 4, 8, 16)),
    ]


def bounds(k_BKNPD: Tensor) -> Tensor:
    """Return Quest's landmarks (arXiv 2406.10774): the per-dimension minimum and maximum of a
    page's keys, ``[B, K, N, 2, D]``.
    """
    return torch.stack([k_BKNPD.amin(-2), k_BKNPD.amax(-2)], dim=-2)


def quest(q_BHTD: Tensor, bounds_BKN2D: Tensor) -> Tensor:
    """Return Quest's scores ``[B, K, T, N]``, an upper bound on the products of a page's keys with
    the group's queries.
    """
    q_BKGTD = q_BHTD.unflatten(1, (bounds_BKN2D.shape[1], -1))
    low, high = bounds_BKN2D.unbind(-2)
    upper = torch.einsum("bkgtd,bknd->bkgtn", q_BKGTD.clamp(min=0), high)
    return (upper + torch.einsum("bkgtd,bknd->bkgtn", q_BKGTD.clamp(max=0), low)).amax(2)


def rounded(marks: Tensor, precision: Precision) -> Tensor:
    """Return landmarks as read back from 8-bit storage, in their own dtype."""
    if precision == "fp8":
        return marks.to(torch.float8_e4m3fn).to(marks.dtype)
    if precision == "int8":
        scale = marks.abs().amax(-1, keepdim=True) / 127
        return (marks / scale).round() * scale
    return marks


def measure(
    model: PreTrainedModel, every: Sequence[Variant], ids: Tensor, start: Tensor
) -> list[Tensor]:
    """Return each variant's acceptance ``[B, R, W]``."""
    dense = SparsitySchedule.dense(dense_layers=())
    cache = drafts.DenseCache.of(model, ids, drafts.layout_of(dense))
    p = list(drafts.draft(model, ids, drafts.Cycles(cache, start, DRAFTS, dense)))
    alphas, rounded_marks = [], dict[Any, list[Tensor]]()
    for variant in every:
        kept = variant.schedule()
        layout, by_bounds = drafts.layout_of(kept), variant.score == "quest"
        key = layout.page_size, variant.score, variant.landmarks
        if key not in rounded_marks:
            pages = [k.unflatten(2, (-1, layout.page_size)) for k in cache.keys]
            marks = [bounds(k) if by_bounds else landmarks(k) for k in pages]
            rounded_marks[key] = [rounded(mark, variant.landmarks) for mark in marks]
        scores = quest if by_bounds else page_scores
        cycles = drafts.Cycles(
            replace(cache, landmarks=rounded_marks[key]), start, DRAFTS, kept, scores=scores
        )
        steps = drafts.draft(model, ids, cycles)
        alphas.append(torch.stack([acceptance(p[step], q) for step, q in enumerate(steps)], dim=-1))
    return alphas


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = study_parser(__doc__, 32, 24)
    parser.add_argument("--batch", type=int, default=4, help="number of texts to process at a time")
    parser.add_argument(
        "--studies", nargs="+", help="any of 'page size', landmarks, quest, ...; by default, all"
    )
    args = parser.parse_args(argv)

    study = Study(args.checkpoint, args.texts, args.cycles, DRAFTS)
    model, position = study.load(attn_implementation=drafts.NAME), study.position
    layers = model.config.num_hidden_layers
    every = [v for v in variants(layers) if not args.studies or v.study in args.studies]
    rows = []
    for variant, values in zip(
        every, study.measured(partial(measure, model, every), args.batch), strict=True
    ):
        measured = study.summary(values, (4, DRAFTS))
        del measured["bins"]
        read = round(variant.tokens_read(position + 1, layers), 1)
        rows.append({**vars(variant), "tokens_read": read, **measured})
        print(
            f"{variant}: reads {read}, mean {measured['mean'][0]}, p5 {measured['p5'][0]}",
            flush=True,
        )
    return study.save(args, rows=rows)


if __name__ == "__main__":
    main()
