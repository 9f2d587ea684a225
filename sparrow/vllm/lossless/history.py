"""Guesses from history: the tokens that followed an earlier occurrence of a row's latest tokens (see
``sparrow.model.history``).

A row's history is the sequence's own tokens: its prompt, its verified response, and the drafts made
so far in this cycle.

Shapes: B batch size, R CUDA graph rows (B or more), S the worker's maximum number of sequences, G
guesses per row, N tokens of the longest sequence.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from vllm.triton_utils import triton

from sparrow.vllm.lossless import cascade_kernels as kernels
from sparrow.vllm.lossless.guesses import CycleProgress, GuessSource, SparsePass


class HistorySource(GuessSource):
    """A source that looks guesses up.

    Args:
        speculator: vLLM's speculator, with the tokens of all sequences (``tokens_SN``).
        cycle: the state of the cycle's rows.
        guesses: G.
    """

    def __init__(self, speculator: Any, cycle: CycleProgress, guesses: int) -> None:
        self._vllm = speculator
        self._cycle = cycle
        S = speculator.max_num_reqs
        N = speculator.max_model_len + speculator.num_speculative_steps
        device = speculator.device
        self._history_RN = torch.zeros(S, N, dtype=torch.int32, device=device)
        self.guesses_RG = torch.zeros(S, guesses, dtype=torch.int64, device=device)
        # how many of a row's latest tokens occurred before its latest guesses; 0 without guesses
        self.matched_R = torch.zeros(S, dtype=torch.int32, device=device)

    def addresses(self) -> dict[str, int]:
        """See ``GuessSource``."""
        return {"the history of guesses": self._history_RN.data_ptr()}

    def begin(self, B: int) -> None:
        """See ``GuessSource``."""
        tokens_SN: Tensor = self._vllm.tokens_SN
        parts = triton.cdiv(self._vllm.max_model_len, kernels.AT_ONCE)
        kernels.begin_history_kernel[(B, parts)](
            self._vllm.idx_mapping,
            self._cycle.newest_R,
            self._cycle.length_R,
            tokens_SN,
            tokens_SN.stride(0),
            self._history_RN,
            self._history_RN.stride(0),
            BLOCK=kernels.AT_ONCE,
        )

    def guess(self, rows: int) -> None:
        """See ``GuessSource``."""
        G = self.guesses_RG.shape[1]
        kernels.look_up_kernel[(rows,)](
            self._cycle.length_R,
            self._cycle.made_R,
            self._cycle.drafts,
            self._history_RN,
            self._history_RN.stride(0),
            self.guesses_RG,
            self.matched_R,
            G,
            GP=triton.next_power_of_2(G),
            BLOCK=kernels.AT_ONCE,
            num_warps=8,
        )

    def guess_alone(self, rows: int) -> None:
        """See ``GuessSource``."""
        self.guess(rows)

    def follow(self, rows: int, sparse: SparsePass) -> None:
        """See ``GuessSource``."""
        T = sparse.step.tokens
        kernels.extend_history_kernel[(rows,)](
            sparse.drawn_RT,
            self._cycle.length_R,
            self._cycle.made_R,
            self._cycle.kept_R,
            self._history_RN,
            self._history_RN.stride(0),
            T=T,
            TP=triton.next_power_of_2(T),
            num_warps=1,
        )

    def fill(self, B: int) -> None:
        """See ``GuessSource``."""
        self.guess(B)
