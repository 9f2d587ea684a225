"""For each layer and kv head, measure the attention mass that a dense model puts on pages that a
sparse actor wouldn't read.

Shapes: T tokens, R measured positions, H query heads, K kv heads, G = H / K, D head dim, P page
size, N pages, U page counts, L full-attention layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from sparrow.attention.pages import PageLayout, landmarks, page_scores, reading_order
from sparrow.model.actor import teacher_forced
from sparrow.model.state import attention_layers
from sparrow.schedule import SparsitySchedule

# number of positions to process at once; their attention weights must fit in memory
ROWS = 16


@torch.no_grad()
def unread(
    model: PreTrainedModel,
    ids_T: Tensor,
    position_R: Tensor,
    layout: PageLayout,
    pages_U: Sequence[int],
) -> Tensor:
    """Compute the ``unread_mass`` of every full-attention layer in one dense pass over a sequence.
    The result is ``[L, K, U]``.

    Args:
        model: a model that ``set_schedule`` was called on.
    """
    layers = sorted(attention_layers(model.config.get_text_config()))
    found: dict[int, Tensor] = {}

    def watch(layer: int, query: Tensor, key: Tensor, scaling: float | None) -> None:
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        found[layer] = unread_mass(query[0], key[0], position_R, layout, scale, pages_U)

    dense = SparsitySchedule.dense(dense_layers=tuple(layers))
    with teacher_forced(model, [len(ids_T)], dense) as forcing:
        forcing.watch = watch
        model.get_decoder()(input_ids=ids_T[None], use_cache=False)
    return torch.stack([found[layer] for layer in layers])


def unread_mass(
    q_HTD: Tensor,
    k_KTD: Tensor,
    position_R: Tensor,
    layout: PageLayout,
    scale: float,
    pages_U: Sequence[int],
) -> Tensor:
    """Compute the attention mass on pages that the actor doesn't read, for each number of pages
    kept by score. The result is ``[K, U]``, averaged over positions and over the heads of a group.
    """
    H, T, _ = q_HTD.shape
    K = len(k_KTD)
    P = layout.page_size
    N = -(-T // P)
    keys = F.pad(k_KTD, (0, 0, 0, N * P - T))
    marks_BKND = landmarks(keys.unflatten(1, (N, P)), layout.landmark_dtype)[None]
    token = torch.arange(T, device=keys.device)
    # the place of the last page that is read, in reading order
    last = torch.tensor(pages_U, device=keys.device) + layout.sink_pages + layout.recent_pages - 1

    parts = []
    for position in position_R.split(ROWS):
        q_HRD = q_HTD[:, position]
        q_KGRD = q_HRD.unflatten(0, (K, H // K)).float()
        logits = torch.einsum("kgrd,ktd->kgrt", q_KGRD, k_KTD.float()) * scale
        weights = logits.masked_fill(token > position[:, None], -torch.inf).softmax(-1).mean(1)
        mass_KRN = F.pad(weights, (0, N * P - T)).unflatten(-1, (N, P)).sum(-1)

        scores = page_scores(q_HRD[None], marks_BKND)
        order_KRN = reading_order(scores, position[None] + 1, layout)[0]
        read_KRN = mass_KRN.gather(-1, order_KRN).cumsum(-1)
        parts.append((1 - read_KRN[..., last.clamp(max=N - 1)]).clamp(min=0).sum(1))
    return torch.stack(parts).sum(0) / len(position_R)
