"""Page scores in Triton (see ``pages.page_scores``), for decoding and for teacher forcing.

Shapes: G query heads of a group, D head dim, DP at least D, N pages; BT positions of a tile, GP (at
least G) rows for each position.
"""

import triton
import triton.language as tl


@triton.jit
def ranking_query(q, stride_head, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Load a group's queries, and return their mean ``[DP]`` in float32, by which pages are
    ranked.
    """
    d = tl.arange(0, DP)
    total = tl.zeros((DP,), tl.float32)
    for g in tl.static_range(G):
        total += tl.load(q + g * stride_head + d, mask=d < D, other=0.0).to(tl.float32)
    return tl.div_rn(total, tl.full((DP,), G, tl.float32))


@triton.jit
def page_scores(query, landmarks_ND):
    """Compute the scores ``[N]`` of pages for one group's ``ranking_query``."""
    return tl.sum(landmarks_ND.to(tl.float32) * query[None, :], 1)


@triton.jit
def tile_scores(
    q_MD,
    landmarks_ND,
    G: tl.constexpr,
    GP: tl.constexpr,
    BT: tl.constexpr,
    BN: tl.constexpr,
):
    """Compute the scores ``[BT, BN]`` of pages for a tile of positions, given the queries ``[BT *
    GP, D]`` of these positions. Scores are summed over the group, because the sum ranks pages in
    the same order as the mean.
    """
    score = tl.dot(q_MD, tl.trans(landmarks_ND), input_precision="ieee")
    if GP != G:
        score = tl.where((tl.arange(0, BT * GP) % GP < G)[:, None], score, 0.0)
    return tl.sum(tl.reshape(score, (BT, GP, BN)), 1)
