"""Verification with ``drafter_invariant``, where the sampled tokens do not depend on the drafts.

The policy samples every token as dense decoding would, with noise derived from the request's seed
and the token's position. Drafts are sampled with the same noise, and accepted up to the first one
that differs from the policy's token (Daliri et al., arXiv 2408.07978). vLLM's own verification
accepts somewhat more drafts, because it compares a draft's probabilities under both distributions.

Shapes: T rows of logits in a verification, grouped by sequence; B batch size; S the worker's
maximum number of sequences; k maximum number of drafts per sequence; V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary
from vllm.v1.worker.gpu.sample.gumbel import gumbel_sample

from sparrow.vllm import versions

if TYPE_CHECKING:
    from sparrow.vllm.runtime import Runtime

# Keyed by the draft logits, because verification gets nothing else from the speculator.
_runtimes: Any = WeakTensorKeyDictionary()


def register(draft_logits: Tensor, runtime: Runtime) -> None:
    """Remember which runtime these draft logits belong to. Verification looks up its settings in
    that runtime.
    """
    _runtimes[draft_logits] = runtime


def runtime_of(draft_logits: Tensor | None) -> Runtime | None:
    """Return the runtime registered for these draft logits, or None if the speculator is not
    Sparrow's.
    """
    return None if draft_logits is None else _runtimes.get(draft_logits)


def draw(
    target_TV: Tensor,
    input_T: Tensor,
    first_B1: Tensor,
    position_T: Tensor,
    sequence_T: Tensor,
    temperature_S: Tensor,
    seed_S: Tensor,
    k: int,
    use_fp64: bool,
) -> tuple[Tensor, Tensor]:
    """Sample a token from each row of logits, and keep the tokens that dense decoding would also
    have sampled.

    Args:
        target_TV: the policy's logits, already processed for sampling.
        input_T: the input token of each row. The rows of a sequence start with its last sampled
            token, followed by its drafts.
        first_B1: index of each sequence's first row, ``[B + 1]``.
        position_T: the position of each row.
        sequence_T: for each row, the index of its sequence in the worker.

    Returns:
        Tokens ``[B, k + 1]``, and the number of valid tokens in each row, int32 ``[B]``. A row has
        one more valid token than it has accepted drafts.
    """
    drafting: Any = {"is_drafting": False} if versions.drafts_have_own_noise() else {}
    drawn_T = gumbel_sample(
        target_TV,
        sequence_T,
        temperature_S,
        seed_S,
        position_T,
        apply_temperature=False,
        use_fp64=use_fp64,
        **drafting,
    )
    at_BT = first_B1[:-1, None] + torch.arange(k + 1, device=first_B1.device)
    is_row_BT = at_BT < first_B1[1:, None]
    at_BT = at_BT.clamp(max=len(drawn_T) - 1)
    drawn_BT = drawn_T[at_BT]
    is_kept_Bk = (drawn_BT[:, :-1] == input_T[at_BT[:, 1:]]) & is_row_BT[:, 1:]
    return drawn_BT.to(input_T.dtype), is_kept_Bk.int().cumprod(1, dtype=torch.int32).sum(
        1, dtype=torch.int32
    ) + 1
