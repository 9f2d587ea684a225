"""The one definition of page, landmark, score and selection.

transformers, vLLM and the teacher-forced pass all take them from here: a difference between them
would be measured as actor-policy mismatch. Source: Sparrow, arXiv 2606.08446, section 2.

Shapes: B sequences, T query tokens, H query heads, K kv heads, G = H / K, D head dim, P page size,
N pages. Page n of a sequence holds its tokens n*P .. n*P + P - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

Score = Literal["mean_key", "quest"]


@dataclass(frozen=True)
class PageLayout:
    """What the sparse actor keeps besides the top-k pages, and how it ranks pages."""

    page_size: int = 16  # P, tokens in a page
    sink_pages: int = 1  # pages always kept at the start
    recent_pages: int = 2  # pages always kept at the end, the partly filled one included; at least 1
    # ``mean_key`` ranks a page by the group's mean query against the page's mean key; ``quest`` by Quest's upper bound
    # on any query-key product in the page (arXiv 2406.10774), maximum over the group
    score: Score = "mean_key"

    def __post_init__(self) -> None:
        if self.page_size < 1 or self.sink_pages < 0 or self.recent_pages < 1:
            raise ValueError(f"need page_size >= 1, sink_pages >= 0, recent_pages >= 1, got {self}")
        if self.score not in get_args(Score):
            raise ValueError(f"unknown page score {self.score!r}, expected one of {get_args(Score)}")


def page_count(length: Tensor, page_size: int) -> Tensor:
    """Pages that hold ``length`` tokens, the partly filled one included."""
    return (length + page_size - 1) // page_size


def landmarks(k_BKNPD: Tensor, layout: PageLayout) -> Tensor:
    """What a page is ranked by: ``[B, K, N, D]`` mean keys, or ``[B, K, N, 2, D]`` minima and maxima for Quest.

    The mean is taken in float32 and stored in the keys' dtype, as a KV cache holds it. A page that is
    not yet full has no meaningful landmark and is never ranked: it is among the recent pages.
    """
    if layout.score == "quest":
        return torch.stack([k_BKNPD.amin(-2), k_BKNPD.amax(-2)], dim=-2)
    return k_BKNPD.float().mean(-2).to(k_BKNPD.dtype)


def page_scores(q_BHTD: Tensor, landmarks_BKN: Tensor, layout: PageLayout) -> Tensor:
    """Scores ``[B, K, T, N]`` in float32 of every page for every query token and kv head."""
    B, H, T, D = q_BHTD.shape
    K = landmarks_BKN.shape[1]
    q_BKGTD = q_BHTD.float().view(B, K, H // K, T, D)
    if layout.score == "quest":
        low_BKND, high_BKND = landmarks_BKN.float().unbind(-2)
        upper = torch.einsum("bkgtd,bknd->bkgtn", q_BKGTD.clamp(min=0), high_BKND)
        upper = upper + torch.einsum("bkgtd,bknd->bkgtn", q_BKGTD.clamp(max=0), low_BKND)
        return upper.amax(2)
    return torch.einsum("bktd,bknd->bktn", q_BKGTD.mean(2), landmarks_BKN.float())


def select_pages(scores_BKTN: Tensor, length_BT: Tensor, top_k_BT: Tensor, layout: PageLayout) -> Tensor:
    """The pages each query token reads: bool ``[B, K, T, N]``.

    ``length_BT`` counts the tokens a query sees, itself included; ``top_k_BT`` the pages kept by score.
    Kept are the sink pages, the recent pages, and the ``top_k`` best of the rest; equal scores go to
    the earlier page. A sequence with no more pages than would be kept has all of them selected.
    """
    N = scores_BKTN.shape[-1]
    n = torch.arange(N, device=scores_BKTN.device)
    pages_BT1 = page_count(length_BT, layout.page_size)[..., None]
    inside = n < pages_BT1
    always = inside & ((n < layout.sink_pages) | (n >= pages_BT1 - layout.recent_pages))
    ranked = (inside & ~always)[:, None]
    scores = scores_BKTN.masked_fill(~ranked, float("-inf"))
    k_BKT1 = torch.minimum(top_k_BT, ranked[:, 0].sum(-1))[:, None, :, None]
    most = int(k_BKT1.max()) if k_BKT1.numel() else 0
    if most == 0:
        return always[:, None].expand_as(scores_BKTN)
    best = scores.topk(most, dim=-1).values
    threshold = best.gather(-1, (k_BKT1 - 1).clamp(min=0).expand(*scores.shape[:-1], 1))
    above = scores > threshold
    level = (scores == threshold) & ranked
    first = level.cumsum(-1) <= k_BKT1 - above.sum(-1, keepdim=True)
    return always[:, None] | above | (level & first)
