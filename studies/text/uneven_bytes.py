"""Measure draft acceptance at equal bytes when the bytes are spread unevenly over layers, kv heads
and pages.

    python studies/text/uneven_bytes.py CHECKPOINT --out benchmarks/results/text_uneven.json

As in ``fewer_bytes.py``, drafts are in float32, and bytes are counted in KV tokens. The even
schedule reads the same number of pages of 16 tokens in every layer and kv head, ranked by the mean
query. It is compared with these variants:

- *layers*, *kv heads*: the same total number of tokens, distributed by hand or by a calibration.
  The calibration uses other texts, halfway between the measured ones. It assigns 64 tokens at a
  time to a layer or kv head, so that the least of the dense policy's attention mass remains unread.
  If weighted, each layer's mass is multiplied by a weight. The weight is proportional to the
  acceptance lost if only this layer is sparse.
- *page scores*: the score of the group's best query head, or the sum of the heads' softmax over
  pages.
- *two levels*: groups of four pages are ranked by their mean key, then the pages of the best
  groups.
- *pairs of layers*: a layer reads the pages selected by the previous layer. Each kv head reuses the
  pages of the head with the same number. If matched, it reuses the pages of the head whose
  selection had most of its attention mass on the calibration texts.
- *together*: 8-bit landmarks, smaller pages, two levels, and weighted budgets by layer and kv head.

Shapes: as in ``drafts.py``; L layers, C cells (layers, or kv heads of layers), U budgets of 64,
128, ... tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import drafts
import numpy as np
import torch
from acceptance import Floats, Study, acceptance, study_parser
from fewer_bytes import rounded
from torch import Tensor
from train import windows
from transformers import PreTrainedModel
from uneven_budgets import DRAFTS, Calibration, Ints, Spread, calibrate

from sparrow.attention.pages import landmarks, page_scores, select_pages
from sparrow.mismatch import sequence_bootstrap, weighted_mean, weighted_percentile
from sparrow.schedule import SparsitySchedule

SINK, RECENT = 16, 32  # tokens that are always read
GROUP = 4  # pages per group in the first of two levels
TARGET = 0.86  # the p5 to compute the required bytes for

Score = Literal["mean query", "best head", "softmax"]


@dataclass(frozen=True)
class Variant:
    """What drafts read."""

    study: str
    how: str
    budget: int  # tokens per kv head, averaged over all heads
    spread: Spread = "even"
    score: Score = "mean query"
    page_size: int = 16
    precision: Literal["16 bit", "fp8"] = "16 bit"  # of landmarks
    candidates: int = 0  # pages ranked in the second level, relative to top-k; 0: one level
    first_follower: int = (
        0  # this layer and every second one after it reuse the previous layer's pages; 0: none
    )
    # if true, a head reuses the pages of the head that matches best; if false, those of the head
    # with the same number
    matched: bool = False

    @property
    def layout(self) -> SparsitySchedule:
        pages = dict(
            page_size=self.page_size,
            sink_pages=SINK // self.page_size,
            recent_pages=RECENT // self.page_size,
        )
        return SparsitySchedule.fixed(1, dense_layers=(), **pages)

    def top_k(self, tokens: Ints) -> Ints:
        """Return how many pages are read by score, given the total number of tokens read (a
        multiple of 16, at least 64).
        """
        return (tokens - SINK - RECENT) // self.page_size

    def groups(self, top_k: Ints) -> Ints:
        """Return how many groups have their pages ranked, not counting the newest group."""
        return -(-self.candidates * top_k // GROUP)

    def followers(self, layers: int) -> range:
        return range(self.first_follower, layers, 2) if self.first_follower else range(0)

    def tokens_read(self, tokens_LK: Ints, length: Ints) -> float:
        """Return the KV tokens a draft reads per layer, averaged over heads, layers and lengths."""
        mark = {"16 bit": 0.5, "fp8": 0.25}[self.precision]
        budget = tokens_LK[..., None]
        pages = length.ravel() / self.page_size
        ranked = np.broadcast_to(pages, (*tokens_LK.shape, length.size))
        if self.candidates:
            second = np.minimum((self.groups(self.top_k(budget)) + 1) * GROUP, pages)
            ranked = np.minimum(ranked, pages / GROUP + second)
        ranks = np.where(length.ravel() > budget, ranked, 0)
        ranks[list(self.followers(len(tokens_LK)))] = 0
        return float((np.minimum(budget, length.ravel()) + mark * ranks).mean())


def variants(even: Sequence[int], budgets: Sequence[int], together: Sequence[int]) -> list[Variant]:
    by_layer: dict[str, Spread] = {
        "last layer 3 times the others": "last 3",
        "last layer 8 times the others": "last 8",
        "first and last layer 3 times the others": "ends 3",
        "calibrated, weighted": "layers",
    }
    by_head: dict[str, Spread] = {
        "calibrated, layers alike": "heads of a layer",
        "calibrated, over all layers": "heads of all layers",
        "calibrated, over all layers, weighted": "weighted heads",
    }
    pairs = {
        "layers 1, 3, 5, ...": dict(first_follower=1),
        "layers 1, 3, 5, ..., heads matched": dict(first_follower=1, matched=True),
        "layers 2, 4, 6, ..., heads matched": dict(first_follower=2, matched=True),
    }
    combined: dict[str, dict[str, Any]] = {
        "pages of 8": dict(page_size=8),
        "pages of 8, weighted budgets": dict(page_size=8, spread="weighted heads"),
        "pages of 8, two levels": dict(page_size=8, candidates=4),
        "pages of 8, two levels, weighted budgets": dict(
            page_size=8, candidates=4, spread="weighted heads"
        ),
        "pages of 4, two levels": dict(page_size=4, candidates=4),
        "pages of 4, two levels, weighted budgets": dict(
            page_size=4, candidates=4, spread="weighted heads"
        ),
    }
    return [
        *(Variant("even", "even", b) for b in even),
        *(Variant("layers", how, b, spread) for how, spread in by_layer.items() for b in budgets),
        *(Variant("kv heads", how, b, spread) for how, spread in by_head.items() for b in budgets),
        *(Variant("page scores", "best head", b, score="best head") for b in budgets),
        *(Variant("page scores", "softmax by head, summed", b, score="softmax") for b in budgets),
        *(
            Variant("two levels", f"{n} candidates per page read", b, candidates=n)
            for n in (2, 4)
            for b in budgets
        ),
        *(
            Variant("pairs of layers", how, b, **options)
            for how, options in pairs.items()
            for b in budgets
        ),
        *(
            Variant("together", how, b, precision="fp8", **options)
            for how, options in combined.items()
            for b in together
        ),
    ]


# --- selecting pages ---


def scored(how: Score, q_BHRD: Tensor, marks_BKND: Tensor, known_BRN: Tensor) -> Tensor:
    """Return page scores ``[B, K, R, N]``. Incomplete pages, which are not ``known``, may have
    arbitrary landmarks.
    """
    if how == "mean query":
        return page_scores(q_BHRD, marks_BKND)
    q_BKGRD = q_BHRD.unflatten(1, (marks_BKND.shape[1], -1))
    by_head = torch.einsum("bkgrd,bknd->bkgrn", q_BKGRD, marks_BKND)
    if how == "best head":
        return by_head.amax(2)
    by_head = by_head * q_BHRD.shape[-1] ** -0.5
    return by_head.masked_fill(~known_BRN[:, None, None], float("-inf")).softmax(-1).sum(2)


@dataclass
class Uneven(drafts.Cycles):
    """Cycles in which every kv head has its own budget.

    Attributes:
        variant: how pages are ranked.
        top_k_LK: how many pages each head reads by score.
        groups: each layer's mean keys of page groups, ``[B, K, N / 4, D]``. Only variants with two
            levels use them.
        heads: for each layer that reuses pages, one number per head. The number names the head of
            the previous layer whose pages this head reads.
    """

    variant: Variant = field(kw_only=True)
    top_k_LK: Ints = field(kw_only=True)
    groups: Sequence[Tensor] = field(kw_only=True)
    heads: Mapping[int, Sequence[int]] = field(kw_only=True)

    def select(self, layer: int, q_BHRD: Tensor) -> Tensor:
        if layer in self.heads:
            return self.kept[layer - 1][:, list(self.heads[layer])]
        length_BR, marks = self.start_BR + self.step + 1, self.cache.landmarks[layer]
        full_BR1 = length_BR[..., None] // self.layout.page_size
        pages = torch.arange(marks.shape[2], device=marks.device)
        scores = scored(self.variant.score, q_BHRD, marks, pages < full_BR1)
        if self.variant.candidates:
            group = torch.arange(marks.shape[2] // GROUP, device=marks.device)
            full = full_BR1 // GROUP
            of_groups = scored(self.variant.score, q_BHRD, self.groups[layer], group < full)
            of_groups = of_groups.masked_fill((group > full)[:, None], float("-inf"))
            of_groups = of_groups.masked_fill((group == full)[:, None], float("inf"))
        kept = []
        for head, k in enumerate(self.top_k_LK[layer].tolist()):
            mine = scores[:, head, None]
            if self.variant.candidates:
                count = min(int(self.variant.groups(np.array(k))) + 1, len(group))
                best = of_groups[:, head, None].topk(count, dim=-1).indices
                inside = torch.zeros_like(of_groups[:, head, None], dtype=torch.bool).scatter(
                    -1, best, True
                )
                mine = mine.masked_fill(~inside.repeat_interleave(GROUP, dim=-1), float("-inf"))
            kept.append(select_pages(mine, length_BR, torch.full_like(length_BR, k), self.layout))
        return torch.cat(kept, dim=1)


def measure(
    model: PreTrainedModel,
    every: Sequence[Variant],
    calibration: Calibration,
    ids: Tensor,
    start: Tensor,
) -> list[Tensor]:
    """Return each variant's acceptance ``[B, R, W]``."""
    dense = SparsitySchedule.dense(dense_layers=())
    cache = drafts.DenseCache.of(model, ids, drafts.layout_of(dense))
    p = list(drafts.draft(model, ids, drafts.Cycles(cache, start, DRAFTS, dense)))
    stored = {(size, v.precision) for v in every for size in (v.page_size, GROUP * v.page_size)}
    marks = {
        (size, precision): [
            rounded(landmarks(k.unflatten(2, (-1, size))), precision) for k in cache.keys
        ]
        for size, precision in stored
    }
    alphas = []
    for v in every:
        followers = v.followers(len(cache.keys))
        same = range(cache.keys[0].shape[1])
        cycles = Uneven(
            replace(cache, landmarks=marks[v.page_size, v.precision]),
            start,
            DRAFTS,
            v.layout,
            variant=v,
            top_k_LK=v.top_k(calibration.tokens(v.spread, v.budget)),
            groups=marks[GROUP * v.page_size, v.precision],
            heads={
                layer: calibration.heads_LK[layer].tolist() if v.matched else same
                for layer in followers
            },
        )
        steps = drafts.draft(model, ids, cycles)
        alphas.append(torch.stack([acceptance(p[step], q) for step, q in enumerate(steps)], dim=-1))
    print(f"{len(every)} variants of {len(ids)} texts", flush=True)
    return alphas


def between(x: float, xs: Sequence[float], ys: Sequence[Floats]) -> Floats:
    """Interpolate the curve through ``(xs, ys)`` at x, linearly in log x, extrapolating beyond its
    ends.
    """
    above = min(max(int(np.searchsorted(xs, x)), 1), len(xs) - 1)
    share = np.log(x / xs[above - 1]) / np.log(xs[above] / xs[above - 1])
    return ys[above - 1] + share * (ys[above] - ys[above - 1])


def reaches(target: float, xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Return the x where the curve reaches ``target``, or None if the curve doesn't reach it."""
    if not ys[0] <= target <= ys[-1]:
        return None
    return float(np.exp(np.interp(target, ys, np.log(xs))))


Curve = Sequence[tuple[float, Floats]]  # (bytes, acceptance [S, R, W]) pairs, by increasing bytes


def at_bytes(read: float, curve: Curve, minus: Curve | None, percentile: bool) -> list[float]:
    """Return the difference in mean or p5 between two curves at the same bytes, with its 95 %
    interval from resampling whole texts.
    """
    shape = curve[0][1].shape
    text = np.broadcast_to(np.arange(shape[0])[:, None, None], shape).ravel()
    statistic = weighted_percentile if percentile else weighted_mean

    def of(_: Floats, owner: Ints, weights: Floats) -> Floats:
        def height(points: Curve) -> Floats:
            if len(points) == 1:
                return statistic(points[0][1].ravel(), owner, weights)
            xs = [x for x, _ in points]
            return between(
                read, xs, [statistic(alpha.ravel(), owner, weights) for _, alpha in points]
            )

        return height(curve) - (height(minus) if minus else 0)

    return [round(x, 4) for x in sequence_bootstrap(curve[0][1].ravel(), text, of)[:3]]


def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    parser = study_parser(__doc__, 24, 16)
    parser.add_argument(
        "--even",
        type=int,
        nargs="+",
        default=[256, 512, 768, 1024, 1536, 2048],
        help="budgets of the even schedule",
    )
    parser.add_argument(
        "--budgets",
        type=int,
        nargs="+",
        default=[512, 1024],
        help="budgets of the variants compared with the even schedule",
    )
    parser.add_argument(
        "--together",
        type=int,
        nargs="+",
        default=[512, 768, 1024],
        help="budgets of the combined variants",
    )
    parser.add_argument(
        "--calibration",
        type=int,
        default=8,
        help="number of texts to calibrate on, taken from between the measured texts",
    )
    args = parser.parse_args(argv)

    study = Study(args.checkpoint, args.texts, args.cycles, DRAFTS)
    model, position = study.load(attn_implementation=drafts.NAME), study.position
    between_them = windows(
        np.load(args.checkpoint / "held_out.npy"), 2 * args.texts - 1, study.context
    )[1::2]
    some = np.linspace(0, len(between_them) - 1, args.calibration).round().astype(int)
    calibration = calibrate(
        model, between_them[some].to(study.device), study.start[some], args.budgets[0]
    )
    print(
        f"acceptance lost by layer: {calibration.lost_L.round(4).tolist()}, and per unit of "
        f"mass: {calibration.weights}",
        flush=True,
    )

    every = variants(args.even, args.budgets, args.together)
    values = study.measured(partial(measure, model, every, calibration), batch=1)
    budgets = [calibration.tokens(v.spread, v.budget) for v in every]
    read = [v.tokens_read(tokens, position + 1) for v, tokens in zip(every, budgets, strict=True)]
    curves: dict[tuple[str, str], list[tuple[float, Floats]]] = {}
    for v, x, alpha in zip(every, read, values, strict=True):
        curves.setdefault((v.study, v.how), []).append((x, alpha))
    even = curves["even", "even"]
    rows = []
    for v, x, alpha, tokens in zip(every, read, values, budgets, strict=True):
        measured = study.summary(alpha, (4, DRAFTS))
        row = {
            **vars(v),
            "tokens_read": round(x, 1),
            **{k: measured[k] for k in ("n", "mean", "p5", "tokens_a_cycle")},
        }
        if v.study != "even":
            row["minus_even"] = {
                name: at_bytes(x, [(x, alpha)], even, name == "p5") for name in ("mean", "p5")
            }
        if v.spread != "even":
            row["tokens"] = tokens.tolist()
        rows.append(row)
        print(
            f"{v.study}: {v.how} {v.budget}: reads {x:.0f}, p5 {row['p5']} {row.get('minus_even')}",
            flush=True,
        )

    def p5s(curve: Curve) -> list[float]:
        return [float(np.percentile(alpha, 5)) for _, alpha in curve]

    whole = reaches(TARGET, [x for x, _ in even], p5s(even))
    targets = []
    for (name, how), curve in curves.items():
        reached = reaches(TARGET, [x for x, _ in curve], p5s(curve))
        at_half = whole and at_bytes(whole / 2, curve, None, True)
        targets.append({"study": name, "how": how, "reached": reached, "p5_at_half": at_half})
    lost, weights, heads = (
        calibration.lost_L.round(4),
        calibration.weights.round(4),
        calibration.heads_LK,
    )
    found = {"lost": lost.tolist(), "weights": weights.tolist(), "heads": heads.tolist()}
    return study.save(
        args, target=TARGET, even_at_target=whole, calibration=found, rows=rows, targets=targets
    )


if __name__ == "__main__":
    main()
