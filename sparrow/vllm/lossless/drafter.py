"""The interface between the speculator and a drafter, so that others than the sparse actor can
draft.

Shapes: B sequences of the batch, S sequences the worker can hold, k drafts, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from sparrow.vllm.lossless.plan import DraftPlan

if TYPE_CHECKING:
    from sparrow.vllm.runtime import Runtime


class Pass(NamedTuple):
    """The pass over the model that comes before the drafts, as vLLM describes it."""

    batch: Any  # vLLM's, with lengths that count the rejected tokens too
    is_prefilling_B: Tensor | None  # bool; None: no sequence is in prefill
    sampled_B: Tensor  # tokens that each sequence got; none after a chunk of a prompt
    rejected_B: Tensor  # drafts of each sequence that were rejected
    newest_S: Tensor  # the newest token of each sequence, which is not in the cache yet
    temperature_S: Tensor
    seed_S: Tensor


class Drafter(Protocol):
    """Proposes the tokens that the next dense pass verifies.

    Samples follow the policy whatever it proposes, provided that each token was drawn from
    ``logits``.
    """

    logits: Tensor
    """float ``[S, k, V]``: the logits that each draft was drawn from, by the sequence's place in
    the worker. The tensor stays the same for the drafter's life.
    """

    captured_over: dict[str, int]
    """The ``addresses`` when CUDA graphs were captured; empty if there are none."""

    def load(self, model: Any) -> None:
        """Take the policy's model, and allocate whatever else drafting needs."""

    def set_cache(self, runtime: Runtime, block_tables: Any) -> None:
        """Draft over this KV cache from now on, forget what belongs to an earlier one, and fill in
        ``runtime.drafting``.
        """

    def addresses(self) -> dict[str, int]:
        """Return the addresses of the tensors that drafting reads and writes, by description."""
        ...

    def capture(self) -> None:
        """Record CUDA graphs of what ``propose`` runs."""

    def propose(self, plan: DraftPlan, after: Pass) -> Tensor:
        """Draft as planned, which may be nothing, and count the pass (``Runtime.count_pass``).

        Returns:
            int64 ``[B, k]``, meaningful in as many columns as the plan has tokens.
        """
        ...
