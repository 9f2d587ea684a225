"""The interface between the speculator and a drafter, which doesn't have to be the sparse actor.

Shapes: B batch size, S the worker's maximum number of sequences, k drafts, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from torch import Tensor

from sparrow.vllm.lossless.plan import DraftPlan

if TYPE_CHECKING:
    from sparrow.vllm.runtime import Runtime


class Pass(NamedTuple):
    """vLLM's data on the forward pass that precedes the drafts."""

    batch: Any  # vLLM's input batch; its lengths still include rejected tokens
    is_prefilling_B: Tensor | None  # bool; None if no sequence is in prefill
    # number of tokens sampled per sequence; 0 while the prompt isn't complete
    sampled_B: Tensor
    rejected_B: Tensor  # number of rejected drafts per sequence
    newest_S: Tensor  # each sequence's newest token, not in the cache yet
    next_prompt_S: Tensor  # the next token of each prompt that isn't complete
    temperature_S: Tensor
    seed_S: Tensor
    # For a head that guesses: the model's auxiliary hidden states, one tensor per layer, and each
    # attention layer's metadata and slots in vLLM. The metadata and slots are None in some dummy
    # runs.
    states: list[Tensor]
    metadata: Any
    slots: Any


class Drafter(Protocol):
    """A drafter proposes tokens for the next dense pass to verify.

    Samples follow the policy whatever is proposed, as long as each proposed token was sampled from
    ``logits``.
    """

    logits: Tensor
    """The logits that each draft was sampled from, float ``[S, k, V]``. The first index is the
    sequence's index in the worker. This is always the same tensor.
    """

    captured_over: dict[str, int]
    """The result of ``addresses`` when CUDA graphs were captured. Empty if there are no graphs."""

    drawn_S: Tensor | None
    """How many of each sequence's latest drafts were drawn from the model; the rest are guesses.
    None if all drafts are drawn.
    """

    def load(self, model: Any) -> None:
        """Store the policy's model, and allocate whatever else drafting needs."""

    def set_cache(self, runtime: Runtime, block_tables: Any) -> None:
        """Draft in this KV cache from now on, discard anything tied to an earlier cache, and fill
        in ``runtime.drafting``.
        """

    def addresses(self) -> dict[str, int]:
        """Return the addresses of the tensors that drafting reads or writes, keyed by description."""
        ...

    def capture(self) -> None:
        """Capture CUDA graphs of the steps that ``propose`` runs."""

    def read(self, after: Pass, drafts: int) -> None:
        """Read a dense pass that will be followed by ``drafts`` drafts. Called before ``propose``."""

    def propose(self, plan: DraftPlan, after: Pass) -> Tensor:
        """Draft the planned number of tokens, which may be 0, and count the dense pass
        (``DensePasses.count``).

        Returns:
            int64 ``[B, k]``. Only the first ``plan.tokens`` columns are meaningful.
        """
        ...
