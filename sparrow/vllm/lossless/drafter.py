"""The interface between the speculator and a drafter, which lets drafters other than the sparse
actor be used.

Shapes: B sequences of the batch, S sequences the worker can hold, k drafts, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from sparrow.vllm.lossless.plan import DraftPlan

if TYPE_CHECKING:
    from sparrow.vllm.runtime import Runtime


class Pass(NamedTuple):
    """vLLM's description of the forward pass that precedes the drafts."""

    batch: Any  # vLLM's input batch; its lengths include the rejected tokens
    is_prefilling_B: Tensor | None  # bool; None if no sequence is in prefill
    sampled_B: Tensor  # number of tokens sampled per sequence; 0 after a chunk of a prompt
    rejected_B: Tensor  # number of rejected drafts per sequence
    newest_S: Tensor  # the newest token of each sequence, which is not in the cache yet
    temperature_S: Tensor
    seed_S: Tensor


class Drafter(Protocol):
    """A source of the tokens that the next dense pass verifies.

    Samples follow the policy whatever the drafter proposes, provided that each proposed token was
    sampled from ``logits``.
    """

    logits: Tensor
    """float ``[S, k, V]``: the logits from which each draft was sampled, by the sequence's index in
    the worker. The drafter uses the same tensor for its whole life.
    """

    captured_over: dict[str, int]
    """The ``addresses`` at the time when CUDA graphs were captured; empty without graphs."""

    drawn_S: Tensor | None
    """The number of each sequence's latest drafts that the drafter has drawn; all others are
    guesses. None if it draws every draft.
    """

    def load(self, model: Any) -> None:
        """Store the policy's model, and allocate whatever else drafting needs."""

    def set_cache(self, runtime: Runtime, block_tables: Any) -> None:
        """Draft with this KV cache from now on, discard everything that belongs to an earlier
        cache, and fill in ``runtime.drafting``.
        """

    def addresses(self) -> dict[str, int]:
        """Return the addresses of the tensors that drafting reads and writes, by description."""
        ...

    def capture(self) -> None:
        """Capture CUDA graphs of the steps that ``propose`` runs."""

    def propose(self, plan: DraftPlan, after: Pass) -> Tensor:
        """Draft the planned number of tokens, which may be 0, and count the pass
        (``Runtime.count_pass``).

        Returns:
            int64 ``[B, k]``, of which only the first ``plan.tokens`` columns are meaningful.
        """
        ...
