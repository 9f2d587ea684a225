"""The interface between the cascade and its source of guesses: history, a trained head, or both.

Guesses never affect the distribution of samples, because the sparse actor or the policy judges each
one.

Shapes: B batch size, R CUDA graph rows (B or more), S the worker's maximum number of sequences, T
tokens per pass, G guesses per row, m = T - 1 or more, L hidden states, W their width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor

from sparrow.vllm.backend import Step
from sparrow.vllm.lossless.drafter import Pass

if TYPE_CHECKING:
    from sparrow.vllm.runtime import Runtime


class CycleProgress:
    """The progress of each row in a cycle. The tensors are updated in place, because CUDA graphs
    refer to them by address.

    Args:
        rows: S.
    """

    def __init__(self, rows: int, device: torch.device) -> None:
        # tokens in the row at the start of the cycle, including the newest; 0 if it drafts nothing
        self.length_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self.newest_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self.made_R = torch.zeros(rows, dtype=torch.int32, device=device)  # drafts made so far
        # drafts that the latest pass made; 0 if the row did not take part
        self.kept_R = torch.zeros(rows, dtype=torch.int32, device=device)
        self.drafts = torch.zeros((), dtype=torch.int32, device=device)  # drafts each row makes


class SparsePass(NamedTuple):
    """A sparse pass over the newest token and T - 1 guesses of each row. In tensors, the T tokens
    of a row are adjacent.
    """

    step: Step
    position_RT: Tensor  # int64
    slot_RT: Tensor  # int64
    # int64, the token drawn after each token; a row's first ``CycleProgress.kept_R`` drawn tokens
    # are drafts
    drawn_RT: Tensor
    states: list[Tensor]  # the model's auxiliary hidden states, L tensors ``[RT, W]``, or none


class GuessSource(Protocol):
    """Guesses the tokens that follow each row's newest token. By default, a source needs neither a
    model nor a cache, and learns nothing from dense passes.
    """

    guesses_RG: Tensor
    """The latest guesses, int64 ``[S, G]``. This is always the same tensor."""

    def load(self, model: Any) -> None:
        """Load what guessing needs in addition to the policy's model."""
        return

    def set_cache(self, runtime: Runtime, blocks_SM: Tensor, block_tokens: int) -> None:
        """Use this KV cache from now on."""
        return

    def addresses(self) -> dict[str, int]:
        """Return the addresses of the tensors that guessing reads or writes, keyed by description."""
        ...

    def read(self, after: Pass, drafts: int) -> None:
        """Read a dense pass that will be followed by ``drafts`` drafts. Called after every dense
        pass.
        """
        return

    def begin(self, B: int) -> None:
        """Begin a cycle of B rows."""
        return

    def guess(self, rows: int) -> None:
        """Write at least T - 1 guesses per row for the next pass. CUDA graphs capture this."""

    def guess_alone(self, rows: int) -> None:
        """Write the guesses that serve as drafts in a cycle without sparse passes. CUDA graphs
        capture this.
        """

    def follow(self, rows: int, sparse: SparsePass) -> None:
        """Read a sparse pass. CUDA graphs capture this."""

    def fill(self, B: int) -> None:
        """At the end of a cycle with sparse passes, fill in guesses for the drafts that no pass has
        made.
        """
