"""Rank tokens in the distributions they should have been sampled from.

Shapes: N tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from sparrow.model.speculative import Shape


def standing(logits: Tensor, token: Tensor, shape: Shape, common: float) -> tuple[Tensor, ...]:
    """Compute the fields of a ``Standing``, each ``[N]``. ``token`` ``[N]`` has the token sampled
    from each row of ``logits`` ``[N, V]``. Ties are broken by token id.
    """
    p_NV = shape.distribution(logits)
    p_N1 = p_NV.gather(-1, token[:, None])
    ids = torch.arange(p_NV.shape[-1], device=token.device)
    likelier = (p_NV > p_N1) | ((p_NV == p_N1) & (ids < token[:, None]))
    before = p_NV.masked_fill(~likelier, 0).sum(-1)
    p = p_N1[:, 0]
    return (
        torch.where(p > 0, before, 1.0),
        p,
        torch.special.entr(p_NV).sum(-1),
        p_NV.masked_fill(p_NV < common, 0).sum(-1),
        p >= common,
        p.log(),
        logits.float().log_softmax(-1).gather(-1, token[:, None])[:, 0].double(),
    )
