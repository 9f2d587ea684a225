"""Layer and kv head budgets for ``uneven_bytes.py``, set by hand or calibrated on texts.

Shapes: as in ``drafts.py``; L layers, U budgets of 64, 128, ... tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import drafts
import numpy as np
import torch
from acceptance import Floats, acceptance, schedule
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from sparrow.attention.pages import page_count, page_scores, reading_order
from sparrow.calibrate import head_budgets
from sparrow.schedule import SparsitySchedule

DRAFTS = 8
UNIT = 64  # how many tokens calibration assigns at a time, and the minimum per kv head

Ints = NDArray[np.int64]
Spread = Literal[
    "even",
    "last 3",
    "ends 3",
    "last 8",
    "layers",
    "heads of a layer",
    "heads of all layers",
    "weighted heads",
]
BY_HAND: dict[
    Spread, Callable[[int, int], int]
] = {  # a layer's share, given its number and the number of layers
    "even": lambda layer, layers: 1,
    "last 3": lambda layer, layers: 3 if layer == layers - 1 else 1,
    "last 8": lambda layer, layers: 8 if layer == layers - 1 else 1,
    "ends 3": lambda layer, layers: 3 if layer in (0, layers - 1) else 1,
}


@dataclass
class Masses(drafts.Cycles):
    """Dense cycles that measure how much attention mass sparse cycles would leave unread, summed
    over drafts. Pages are ranked by the mean query.

    Attributes:
        at: tokens per selection for ``caught``.
        missed: each layer's attention mass ``[K, U]`` on cached tokens outside the best 64, 128,
            ... tokens.
        caught: matrix ``[K, K]`` for each layer except the first. Entry (i, j) is the mass of head
            i on the pages that head j of the previous layer selected.
    """

    at: int = field(kw_only=True)
    missed: dict[int, Tensor] = field(default_factory=dict)
    caught: dict[int, Tensor] = field(default_factory=dict)
    order: dict[int, Tensor] = field(
        default_factory=dict
    )  # by layer, pages [B, K, R, N] in the order they would be read
    selected: dict[int, Tensor] = field(
        default_factory=dict
    )  # by layer, 1 for selected pages and 0 for others

    def select(self, layer: int, q_BHRD: Tensor) -> Tensor:
        length_BR = self.start_BR + self.step + 1
        scores = page_scores(q_BHRD, self.cache.landmarks[layer])
        self.order[layer] = reading_order(scores, length_BR, self.layout)
        page = torch.arange(scores.shape[-1], device=scores.device)
        return (page < page_count(length_BR, self.layout.page_size)[..., None])[:, None].expand_as(
            scores
        )

    def weights(self, layer: int, q_BHRD: Tensor, read_BKRT: Tensor) -> Tensor:
        weights, order = super().weights(layer, q_BHRD, read_BKRT), self.order[layer]
        mass_BKRN = (
            weights[..., : read_BKRT.shape[-1]]
            .mean(2)
            .unflatten(-1, (-1, self.layout.page_size))
            .sum(-1)
        )
        read = mass_BKRN.gather(-1, order).cumsum(-1)
        missed = (read[..., -1:] - read)[
            ..., UNIT // self.layout.page_size - 1 :: UNIT // self.layout.page_size
        ]
        self.missed[layer] = self.missed.get(layer, 0) + missed.sum((0, 2))
        chosen = order[..., : self.at // self.layout.page_size]
        self.selected[layer] = torch.zeros_like(mass_BKRN).scatter(-1, chosen, 1.0)
        if layer:
            both = torch.einsum("bkrn,bjrn->kj", mass_BKRN, self.selected[layer - 1])
            self.caught[layer] = self.caught.get(layer, 0) + both
        return weights


@dataclass(frozen=True)
class Calibration:
    """Measurements on calibration texts, averaged over drafts.

    Attributes:
        missed_LKU: attention mass each head leaves unread, by budget.
        lost_L: acceptance lost if only this layer is sparse, with ``at`` tokens.
        heads_LK: each head's best match in the previous layer. With ``at`` tokens, the match
            selects the pages that have most of the head's mass.
        at: tokens a sparse layer reads in these measurements.
    """

    missed_LKU: Floats
    lost_L: Floats
    heads_LK: Ints
    at: int

    @property
    def weights(self) -> Floats:
        """Return each layer's loss of acceptance per unit of mass that its heads leave unread."""
        return head_budgets.weights(self.missed_LKU, self.lost_L, self.at // UNIT)

    def tokens(self, spread: Spread, budget: int) -> Ints:
        """Return how many tokens ``[L, K]`` each head reads, with a mean of ``budget``."""
        L, K, _ = self.missed_LKU.shape
        if spread in BY_HAND:
            return by_shares([BY_HAND[spread](layer, L) for layer in range(L)], budget)[
                :, None
            ].repeat(K, 1)
        if spread == "heads of a layer":
            return (
                np.stack(
                    [head_budgets.greedy(missed, K * budget // UNIT) for missed in self.missed_LKU]
                )
                * UNIT
            )
        weights = np.ones(L) if spread == "heads of all layers" else self.weights
        by: head_budgets.By = "layers" if spread == "layers" else "heads"
        return head_budgets.divided(self.missed_LKU, weights, by, budget / UNIT) * UNIT


def by_shares(shares: Sequence[int], budget: int) -> Ints:
    """Return each layer's tokens, with a mean of ``budget``. Each layer gets 64 tokens, and the
    rest is divided in proportion to ``shares``, in steps of 16 tokens.
    """
    exact = (UNIT + np.array(shares) / sum(shares) * len(shares) * (budget - UNIT)) / 16
    whole = np.floor(exact + 1e-9).astype(np.int64)
    rest = len(shares) * budget // 16 - whole.sum()
    whole[np.argsort(whole - exact, kind="stable")[:rest]] += 1
    return whole * 16


def calibrate(model: PreTrainedModel, ids_ST: Tensor, start_SR: Tensor, at: int) -> Calibration:
    """Calibrate on texts, one at a time. ``start_SR`` contains the cycles' first positions."""
    layers, dense = model.config.num_hidden_layers, SparsitySchedule.dense(dense_layers=())
    missed, caught, lost = list[Tensor](), list[Tensor](), np.zeros(layers)
    for ids, start in zip(ids_ST.split(1), start_SR.split(1), strict=True):
        cache = drafts.DenseCache.of(model, ids, drafts.layout_of(dense))
        masses = Masses(cache, start, DRAFTS, dense, at=at)
        p = list(drafts.draft(model, ids, masses))
        missed.append(torch.stack([masses.missed[layer] for layer in range(layers)]))
        caught.append(torch.stack([masses.caught[layer] for layer in range(1, layers)]))
        for layer in range(layers):
            kept = schedule(at, [other for other in range(layers) if other != layer])
            steps = drafts.draft(model, ids, drafts.Cycles(cache, start, DRAFTS, kept))
            alpha = torch.stack([acceptance(p[step], q) for step, q in enumerate(steps)])
            lost[layer] += 1 - alpha.mean().item()
    best = torch.stack(caught).sum(0).argmax(-1).cpu().numpy()
    heads_LK = np.concatenate([np.arange(best.shape[1])[None], best])
    missed_LKU = torch.stack(missed).sum(0).double().cpu().numpy() / (start_SR.numel() * DRAFTS)
    return Calibration(missed_LKU, lost / len(ids_ST), heads_LK, at)
