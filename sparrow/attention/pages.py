"""The definitions of pages, landmarks, scores and page selection.

The transformers engine, the vLLM engine and the teacher-forced pass all share these definitions,
because any difference between the three would show up as actor-policy mismatch. Source: Sparrow,
arXiv 2606.08446, section 2.

Shapes: B sequences, T query tokens, H query heads, K kv heads, G = H / K, D head dim, P page size,
N pages. Page n of a sequence contains its tokens n*P .. n*P + P - 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

LandmarkDtype = Literal["auto", "fp8_e4m3"]
"""Landmark format: either the dtype of the keys, or 8 bits (1 sign, 4 exponent, 3 mantissa). With 8
bits, values are clamped to 448.
"""
FP8 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(FP8).max
ALL_PAGES = 2**30
"""A ``top_k`` that keeps every page of a sequence, regardless of head budgets."""
BUDGET_UNIT = 256
"""Head budgets are in units of 1 / 256. All implementations round the resulting page counts half
up.
"""


@dataclass(frozen=True)
class PageLayout:
    """The page size, and the pages that are always kept in addition to the top-k."""

    page_size: int = 16  # P, tokens per page
    sink_pages: int = 1  # always keep this many pages at the start
    # number of pages always kept at the end, including a partly filled one; at least 1
    recent_pages: int = 2
    landmark_dtype: LandmarkDtype = "auto"

    def __post_init__(self) -> None:
        if self.landmark_dtype not in get_args(LandmarkDtype):
            raise ValueError(
                f"landmark_dtype is {self.landmark_dtype!r}, expected one of "
                f"{get_args(LandmarkDtype)}"
            )
        if self.page_size < 1 or self.sink_pages < 0 or self.recent_pages < 1:
            raise ValueError(
                "page_size must be at least 1, sink_pages at least 0 and recent_pages at least 1, "
                f"got {self}"
            )

    def landmark_type(self, keys: torch.dtype) -> torch.dtype:
        """Return the dtype used to store landmarks, given the keys' dtype."""
        return keys if self.landmark_dtype == "auto" else FP8


def page_count(length: Tensor, page_size: int) -> Tensor:
    """Return the number of pages for ``length`` tokens, including a partly filled one."""
    return (length + page_size - 1) // page_size


def tokens_at(x_BKSD: Tensor, column_BKT: Tensor) -> Tensor:
    """Gather keys or values ``[B, K, T, D]`` from the given cache columns (int64).

    Indexing whole vectors is 4x faster than ``torch.gather`` on a CPU.
    """
    B, K, S, D = x_BKSD.shape
    first_BK1 = torch.arange(0, B * K * S, S, device=x_BKSD.device).view(B, K, 1)
    index = (first_BK1 + column_BKT).flatten()
    return x_BKSD.reshape(-1, D).index_select(0, index).view(B, K, -1, D)


def to_fp8(x: Tensor) -> Tensor:
    """Convert ``x`` to float8_e4m3fn, clamped to 448, since some devices turn larger values into
    NaN.
    """
    return x.clamp(-FP8_MAX, FP8_MAX).to(FP8)


def landmarks(k_BKNPD: Tensor, dtype: LandmarkDtype = "auto") -> Tensor:
    """Compute the landmarks used to rank pages: mean keys ``[B, K, N, D]``.

    The mean is computed in float32 and rounded once, to the storage dtype. A partly filled page has
    no meaningful landmark. It doesn't need one, because recent pages are never ranked.
    """
    mean = k_BKNPD.float().mean(-2)
    return mean.to(k_BKNPD.dtype) if dtype == "auto" else to_fp8(mean)


def page_scores(q_BHTD: Tensor, landmarks_BKND: Tensor) -> Tensor:
    """Compute page scores ``[B, K, T, N]`` in float32: the group's mean query dotted with the
    page's landmark.
    """
    q_BKGTD = q_BHTD.float().unflatten(1, (landmarks_BKND.shape[1], -1))
    return torch.einsum("bktd,bknd->bktn", q_BKGTD.mean(2), landmarks_BKND.float())


def head_top_k(top_k_BT: Tensor, head_budgets_K: Tensor) -> Tensor:
    """Return how many pages each kv head keeps by score, int64 ``[B, K, T]``. This is ``top_k``
    times the head budget, which is in units of 1 / 256.
    """
    top_k_B1T = top_k_BT[:, None].long()
    rounded_BKT = (top_k_B1T * head_budgets_K[:, None] + BUDGET_UNIT // 2) // BUDGET_UNIT
    return torch.where(top_k_B1T >= ALL_PAGES, top_k_B1T, rounded_BKT)


def select_pages(
    scores_BKTN: Tensor,
    length_BT: Tensor,
    top_k_BT: Tensor,
    layout: PageLayout,
    head_budgets_K: Tensor | None = None,
) -> Tensor:
    """Select the pages each query token reads, bool ``[B, K, T, N]``.

    The sink pages, the recent pages and the ``top_k`` best of the remaining pages are kept. Ties go
    to the earlier page. If a sequence is so short that nothing would be left out, all its pages are
    selected.

    ``length_BT`` is the number of tokens a query can see, including its own. ``top_k_BT`` is the
    number of pages kept by score, scaled by ``head_budgets_K`` (see ``head_top_k``).
    """
    N = scores_BKTN.shape[-1]
    n = torch.arange(N, device=scores_BKTN.device)
    pages_BT1 = page_count(length_BT, layout.page_size)[..., None]
    inside = n < pages_BT1
    always = inside & ((n < layout.sink_pages) | (n >= pages_BT1 - layout.recent_pages))
    ranked = (inside & ~always)[:, None]
    scores = scores_BKTN.masked_fill(~ranked, float("-inf"))

    top_k_BKT = top_k_BT[:, None]
    if head_budgets_K is not None:
        top_k_BKT = head_top_k(top_k_BT, head_budgets_K)
    k_BKT1 = torch.minimum(top_k_BKT, ranked.sum(-1))[..., None]
    most = int(k_BKT1.max()) if k_BKT1.numel() else 0
    if most == 0:
        return always[:, None].expand_as(scores_BKTN)

    # Fill up to ``top_k`` with the earliest of the pages tied at the threshold.
    best = scores.topk(most, dim=-1).values
    threshold = best.gather(-1, (k_BKT1 - 1).clamp(min=0).expand(*scores.shape[:-1], 1))
    above = scores > threshold
    level = (scores == threshold) & ranked
    first = level.cumsum(-1) <= k_BKT1 - above.sum(-1, keepdim=True)
    return always[:, None] | above | (level & first)


def reading_order(scores_BKTN: Tensor, length_BT: Tensor, layout: PageLayout) -> Tensor:
    """Return page numbers ``[B, K, T, N]`` in the order that a growing ``top_k`` would add the
    pages.

    Always-kept pages come first, and pages beyond the end of the sequence last. ``scores_BKTN`` and
    ``length_BT`` are the same as for ``select_pages``.
    """
    page = torch.arange(scores_BKTN.shape[-1], device=scores_BKTN.device)
    pages_BT1 = page_count(length_BT, layout.page_size)[..., None]
    always = (page < layout.sink_pages) | (page >= pages_BT1 - layout.recent_pages)
    ranking = scores_BKTN.masked_fill(always[:, None], float("inf"))
    ranking = ranking.masked_fill((page >= pages_BT1)[:, None], float("-inf"))
    return ranking.argsort(dim=-1, descending=True, stable=True)
