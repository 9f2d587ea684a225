"""Lists of the most likely tokens at each position in a response, stored as arrays.

vLLM stores each id, log-prob and rank as a Python object. With 20 entries per list, that's about
1.8 KB per token, or gigabytes for a rollout.

Shapes: T new tokens, N list entries per token: the sampled token, then the most likely tokens.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    FlatLogprobs = Any  # mypy would object that some of its fields are properties here
else:
    from vllm.logprobs import FlatLogprobs


class ArrayLogprobs(FlatLogprobs):
    """A compact ``FlatLogprobs`` for lists of equal length, without decoded tokens."""

    def __init__(self, ids: np.ndarray, logprobs: np.ndarray) -> None:
        """Create an empty object for lists of the same length and dtypes as these."""
        self.width = logprobs.shape[1]
        self.token_ids: array[int] = array(ids.dtype.char)
        self.logprobs: array[float] = array(logprobs.dtype.char)
        self.sampled_ranks: array[int] = array("q")

    def add(self, ids_TN: np.ndarray, logprobs_TN: np.ndarray, rank_T: np.ndarray) -> None:
        """Append T tokens' lists. ``rank_T`` holds the sampled tokens' ranks, starting from 1."""
        if logprobs_TN.shape[1] > self.width:  # another request in the batch has longer lists
            ids_TN = ids_TN[:, : self.width]
            logprobs_TN = logprobs_TN[:, : self.width]
        self.token_ids.frombytes(ids_TN.tobytes())
        self.logprobs.frombytes(logprobs_TN.tobytes())
        self.sampled_ranks.extend(rank_T.tolist())

    @property
    def start_indices(self) -> range:
        return range(0, len(self.logprobs), self.width)

    @property
    def end_indices(self) -> range:
        return range(self.width, len(self.logprobs) + 1, self.width)

    @property
    def ranks(self) -> list[int]:
        return [rank for sampled in self.sampled_ranks for rank in (sampled, *range(1, self.width))]

    @property
    def decoded_tokens(self) -> list[None]:
        return [None] * len(self.logprobs)


def update(processor: Any, lists: tuple[Any, ...]) -> None:
    """Add the new tokens' lists, as ``LogprobsProcessor`` does for flat lists without a tokenizer.

    This must be fast: it runs for every request at every step, and with many requests and short
    contexts, the GPU waits for it.
    """
    ids_TN, logprobs_TN, rank_T, _ = lists
    if not isinstance(processor.logprobs, ArrayLogprobs):
        wanted = processor.num_logprobs + 1 or None  # num_logprobs of -1 means the whole vocabulary
        processor.logprobs = ArrayLogprobs(ids_TN[:, :wanted], logprobs_TN[:, :wanted])
    processor.logprobs.add(ids_TN, logprobs_TN, rank_T)
    alone = len(rank_T) == 1
    processor.cumulative_logprob += (
        logprobs_TN.item(0) if alone else sum(logprobs_TN[:, 0].tolist())
    )
