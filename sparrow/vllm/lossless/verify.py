"""Verification for ``drafter_invariant``, with which the sampled tokens do not depend on the drafts.

The policy samples every token as dense decoding does, with noise from the request's seed and the
token's position. Drafts were sampled with the same noise, and are accepted up to the first that
differs (Daliri et al., arXiv 2408.07978). vLLM's own verification accepts a draft based on its
probabilities under both distributions, and therefore accepts somewhat more drafts.

Shapes: T rows of logits in a verification, with each sequence's rows adjacent; B sequences; S
sequences the worker can hold; k the most drafts of a sequence; V vocabulary.
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

# runtimes by the tensor of the drafts' logits, the only object that vLLM passes to verification
_runtimes: Any = WeakTensorKeyDictionary()


def register(draft_logits: Tensor, runtime: Runtime) -> None:
    """Associate drafts with these logits with the runtime, whose settings determine how they are
    verified.
    """
    _runtimes[draft_logits] = runtime


def runtime_of(draft_logits: Tensor | None) -> Runtime | None:
    """Return the runtime of the speculator whose drafts have these logits; None if the speculator
    is not Sparrow's.
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
    """Sample a token from each row of logits, and keep the tokens that dense decoding would have
    reached.

    Args:
        target_TV: the policy's logits, processed as for sampling.
        input_T: the token before each row of logits: the last sampled token, then the drafts.
        first_B1: index of the first row of each sequence, ``[B + 1]``.
        position_T: each row's position.
        sequence_T: each row's sequence, as an index among all sequences of the worker.

    Returns:
        Tokens ``[B, k + 1]``, and the number of valid ones, int32 ``[B]``: the accepted drafts and
        one more token.
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
