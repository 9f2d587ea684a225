"""The interface between the speculator and a drafter, which need not be the sparse actor.

Shapes: B sequences of the batch, S maximum number of sequences in the worker, k drafts, V
vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from sparrow.vllm.lossless.plan import DraftPlan

if TYPE_CHECKING:
    from sparrow.vllm.runtime import Runtime


class Pass(NamedTuple):
    """vLLM's description of the forward pass that precedes the drafts."""

    batch: Any  # vLLM's input batch, whose lengths include rejected tokens
    is_prefilling_B: Tensor | None  # bool; None if no sequence is in prefill
    # number of tokens sampled per sequence; 0 for a sequence whose prompt is not complete
    sampled_B: Tensor
    rejected_B: Tensor  # number of rejected drafts per sequence
    newest_S: Tensor  # the newest token of each sequence, which is not in the cache yet
    temperature_S: Tensor
    seed_S: Tensor


class Drafter(Protocol):
    """A drafter, which proposes the tokens that the next dense pass verifies.

    Whatever the drafter proposes, samples follow the policy, as long as each proposed token was
    sampled from ``logits``.
    """

    logits: Tensor
    """The logits from which each draft was sampled, float ``[S, k, V]``, by the index of the
    sequence in the worker. The drafter never replaces this tensor with another one.
    """

    captured_over: dict[str, int]
    """The result of ``addresses`` when CUDA graphs were captured; empty if there are no graphs."""

    drawn_S: Tensor | None
    """How many of each sequence's latest drafts were drawn from the model; the others are guesses.
    None if all drafts are drawn.
    """

    def load(self, model: Any) -> None:
        """Store the policy's model, and allocate everything else that drafting needs."""

    def set_cache(self, runtime: Runtime, block_tables: Any) -> None:
        """Draft in this KV cache, discard everything that belongs to an earlier one, and fill in
        ``runtime.drafting``.
        """

    def addresses(self) -> dict[str, int]:
        """Return the addresses of the tensors that drafting reads and writes, by description."""
        ...

    def capture(self) -> None:
        """Capture CUDA graphs of the steps that ``propose`` runs."""

    def propose(self, plan: DraftPlan, after: Pass) -> Tensor:
        """Draft the planned number of tokens, which may be 0, and count the dense pass
        (``Runtime.count_pass``).

        Returns:
            int64 ``[B, k]``. Only the first ``plan.tokens`` columns are meaningful.
        """
        ...
