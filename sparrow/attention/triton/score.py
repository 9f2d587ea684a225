"""Page scores in Triton (see ``pages.page_scores``), for decoding and for teacher forcing.

Shapes: G query heads per group, D head dim, DP >= D, N pages, BT positions per tile, GP >= G rows
per position.
"""

import triton
import triton.language as tl


@triton.jit
def ranking_query(q, stride_head, G: tl.constexpr, D: tl.constexpr, DP: tl.constexpr):
    """Load a group's queries, and return their float32 mean ``[DP]``, which ranks the pages."""
    d = tl.arange(0, DP)
    total = tl.zeros((DP,), tl.float32)
    for g in tl.static_range(G):
        total += tl.load(q + g * stride_head + d, mask=d < D, other=0.0).to(tl.float32)
    return tl.div_rn(total, tl.full((DP,), G, tl.float32))


@triton.jit
def page_scores(query, landmarks_ND):
    """Compute page scores ``[N]`` for one group's ``ranking_query``."""
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
    """Compute page scores ``[BT, BN]`` for a tile of positions, given their queries
    ``[BT * GP, D]``. Scores are summed over the group, since the sum ranks pages the same way as
    the mean.
    """
    score = tl.dot(q_MD, tl.trans(landmarks_ND), input_precision="ieee")
    if GP != G:
        score = tl.where((tl.arange(0, BT * GP) % GP < G)[:, None], score, 0.0)
    return tl.sum(tl.reshape(score, (BT, GP, BN)), 1)
