"""Drafting without a serving engine: many cycles at once, each a few sparse decode steps that read
a dense cache.

A cycle starts at some position in a text. All keys and values before it are the dense policy's. The
cycle decodes the text's next tokens one by one. As in real drafting, each token is decoded
sparsely. It also reads its own key and value, and the keys and values of earlier drafts in the
cycle. Pages, landmarks, scores and selection come from ``sparrow.attention.pages``.

Shapes: B texts, T tokens per text, R cycles per text, W drafts per cycle, H query heads, K kv
heads, G = H / K, D head dim, P page size, N pages, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from sparrow.attention import PageLayout
from sparrow.attention.pages import landmarks, page_scores, select_pages
from sparrow.model.actor import ScheduleTable
from sparrow.schedule import SparsitySchedule

NAME = "cycles"


@dataclass
class DenseCache:
    """Each layer's keys and values ``[B, K, T, D]`` and landmarks ``[B, K, N, D]``, from a dense
    forward pass.
    """

    keys: list[Tensor]
    values: list[Tensor]
    landmarks: list[Tensor]

    @classmethod
    @torch.no_grad()
    def of(cls, model: PreTrainedModel, ids_BT: Tensor, layout: PageLayout) -> DenseCache:
        """Compute the cache one text at a time, because float32 attention takes memory quadratic in
        the length.
        """
        texts = [
            model.get_decoder()(input_ids=row[None], use_cache=True).past_key_values.layers
            for row in ids_BT
        ]
        layers = list(zip(*texts, strict=True))
        keys = [torch.cat([cache.keys for cache in layer]) for layer in layers]
        values = [torch.cat([cache.values for cache in layer]) for layer in layers]
        pages = [k.unflatten(2, (-1, layout.page_size)) for k in keys]
        return cls(keys, values, [landmarks(page, layout.landmark_dtype) for page in pages])


@dataclass
class Cycles:
    """The state of a set of cycles, shared by all attention layers and passed to the forward pass
    as a keyword argument.

    Pages are selected at the first step of a cycle and then every ``reuse`` steps. Drafts of the
    cycle are always read.

    Raises ValueError if cycles are so long that pages written in a cycle would be ranked in the
    same cycle.
    """

    cache: DenseCache
    start_BR: Tensor  # first drafted position of each cycle
    drafts: int  # W
    schedule: SparsitySchedule
    reuse: int = 1
    scores: Callable[[Tensor, Tensor], Tensor] = page_scores
    step: int = 0
    own: dict[int, tuple[Tensor, Tensor]] = field(
        default_factory=dict
    )  # layer -> keys and values [B, K, R, W, D]
    kept: dict[int, Tensor] = field(
        default_factory=dict
    )  # layer -> pages to read, bool [B, K, R, N]

    def __post_init__(self) -> None:
        self.layout, self.table = layout_of(self.schedule), ScheduleTable(self.schedule)
        most = (self.layout.recent_pages - 1) * self.layout.page_size + 1
        if self.drafts > most:
            raise ValueError(
                f"cycles of {self.drafts} drafts do not fit in the recent pages "
                f"({self.layout}); use {most} drafts or fewer"
            )

    def attend(
        self, layer: int, q_BHRD: Tensor, k_BKRD: Tensor, v_BKRD: Tensor, scale: float
    ) -> Tensor:
        """Compute attention for the newest draft in every cycle, ``[B, H, R, D]``."""
        B, H, R, D = q_BHRD.shape
        keys, values = self.cache.keys[layer], self.cache.values[layer]
        K, T = keys.shape[1:3]
        if layer not in self.own:
            self.own[layer] = (
                keys.new_zeros(B, K, R, self.drafts, D),
                keys.new_zeros(B, K, R, self.drafts, D),
            )
        for own, new in zip(self.own[layer], (k_BKRD, v_BKRD), strict=True):
            own[:, :, :, self.step] = new
        read_BKRT = (torch.arange(T, device=keys.device) < self.start_BR[..., None])[
            :, None
        ].expand(B, K, R, T)
        if layer not in self.schedule.dense_layers:
            if self.step % self.reuse == 0:
                self.kept[layer] = self.select(layer, q_BHRD)
            read_BKRT = read_BKRT & self.kept[layer].repeat_interleave(
                self.layout.page_size, dim=-1
            )
        weights = self.weights(layer, q_BHRD * scale, read_BKRT)
        out = torch.einsum("bkgrt,bktd->bkgrd", weights[..., :T], values)
        own_v = self.own[layer][1][:, :, :, : self.step + 1]
        out = out + torch.einsum("bkgrw,bkrwd->bkgrd", weights[..., T:], own_v)
        return out.reshape(B, H, R, D)

    def weights(self, layer: int, q_BHRD: Tensor, read_BKRT: Tensor) -> Tensor:
        """Return the attention weights of scaled queries, first over the cached tokens they read,
        then over their cycle's drafts.

        The weights ``[B, K, G, R, T + W]`` sum to 1. Here, W is the number of drafts so far.
        """
        keys, own_k = self.cache.keys[layer], self.own[layer][0][:, :, :, : self.step + 1]
        q_BKGRD = q_BHRD.unflatten(1, (keys.shape[1], -1))
        before = torch.einsum("bkgrd,bktd->bkgrt", q_BKGRD, keys).masked_fill(
            ~read_BKRT[:, :, None], float("-inf")
        )
        since = torch.einsum("bkgrd,bkrwd->bkgrw", q_BKGRD, own_k)
        return torch.cat([before, since], dim=-1).softmax(-1)

    def select(self, layer: int, q_BHRD: Tensor) -> Tensor:
        """Return which pages the newest drafts read in a layer, bool ``[B, K, R, N]``."""
        length_BR = self.start_BR + self.step + 1
        scores = self.scores(q_BHRD, self.cache.landmarks[layer])
        budgets = self.table.head_budgets(layer, scores.device)
        return select_pages(scores, length_BR, self.table.top_k(length_BR), self.layout, budgets)


def layout_of(schedule: SparsitySchedule) -> PageLayout:
    return PageLayout(**schedule.page_layout)


def _attention(
    module: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    cycles: Cycles | None = kwargs.pop("cycles", None)
    if cycles is None:
        return sdpa_attention_forward(module, q, k, v, mask, **kwargs)
    return cycles.attend(module.layer_idx, q, k, v, module.scaling).transpose(
        1, 2
    ).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@torch.no_grad()
def draft(model: PreTrainedModel, ids_BT: Tensor, cycles: Cycles) -> Iterator[Tensor]:
    """Run cycles step by step, and yield each step's probabilities ``[B, R, V]``. The model must
    use the ``NAME`` attention.
    """
    for step in range(cycles.drafts):
        cycles.step = step
        position_BR = cycles.start_BR + step
        ids = ids_BT.gather(1, position_BR)
        hidden = model.get_decoder()(
            input_ids=ids, position_ids=position_BR, use_cache=False, cycles=cycles
        )
        yield model.get_output_embeddings()(hidden.last_hidden_state).float().softmax(-1)
