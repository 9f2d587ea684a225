"""Guesses from history where the latest tokens occurred before, and from a trained head elsewhere.

History guesses long repetitions better than a head does, and a head also guesses what has never
occurred.

Shapes: B batch size, R CUDA graph rows (B or more), S the worker's maximum number of sequences, G
guesses per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sparrow.vllm.lossless.drafter import Pass
from sparrow.vllm.lossless.guesses import GuessSource, SparsePass
from sparrow.vllm.lossless.head import HeadSource
from sparrow.vllm.lossless.history import HistorySource
from sparrow.vllm.runtime import Runtime


class MixedSource(GuessSource):
    """A source that takes each row's guesses from one of two sources.

    Samples stay exact: which source guesses depends only on the row's tokens and on its drafts so
    far in this cycle, never on rejected drafts.

    Args:
        history, head: the sources, with the same G.
        least: how many of a row's latest tokens must have occurred before for history to guess.
    """

    def __init__(self, history: HistorySource, head: HeadSource, least: int) -> None:
        self._history = history
        self._head = head
        self._least = least
        self.guesses_RG = torch.zeros_like(head.guesses_RG)

    def load(self, model: Any) -> None:
        """See ``GuessSource``."""
        self._history.load(model)
        self._head.load(model)

    def set_cache(self, runtime: Runtime, blocks_SM: Tensor, block_tokens: int) -> None:
        """See ``GuessSource``."""
        self._history.set_cache(runtime, blocks_SM, block_tokens)
        self._head.set_cache(runtime, blocks_SM, block_tokens)

    def addresses(self) -> dict[str, int]:
        """See ``GuessSource``."""
        return {
            **self._history.addresses(),
            **self._head.addresses(),
            "the mixed guesses": self.guesses_RG.data_ptr(),
        }

    def read(self, after: Pass, drafts: int) -> None:
        """See ``GuessSource``."""
        self._history.read(after, drafts)
        self._head.read(after, drafts)

    def begin(self, B: int) -> None:
        """See ``GuessSource``."""
        self._history.begin(B)
        self._head.begin(B)

    def guess(self, rows: int) -> None:
        """See ``GuessSource``."""
        self._history.guess(rows)
        self._head.guess(rows)
        self._mix(rows)

    def guess_alone(self, rows: int) -> None:
        """See ``GuessSource``."""
        self._history.guess_alone(rows)
        self._head.guess_alone(rows)
        self._mix(rows)

    def follow(self, rows: int, sparse: SparsePass) -> None:
        """See ``GuessSource``."""
        self._history.follow(rows, sparse)
        self._head.follow(rows, sparse)

    def fill(self, B: int) -> None:
        """See ``GuessSource``."""
        self._history.fill(B)
        self._head.fill(B)
        self._mix(B)

    def _mix(self, rows: int) -> None:
        """Choose each row's source."""
        repeats_R1 = self._history.matched_R[:rows, None] >= self._least
        torch.where(
            repeats_R1,
            self._history.guesses_RG[:rows],
            self._head.guesses_RG[:rows],
            out=self.guesses_RG[:rows],
        )
