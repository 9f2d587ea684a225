"""A worker's counters: rows decoded at each length, and dense passes in lossless mode.

Shapes: B decode batch size, including CUDA graph padding rows, which have length 0.
"""

from __future__ import annotations

from collections import Counter

import numpy as np
import torch
from torch import Tensor

from sparrow.schedule import ALL_PAGES, SparsitySchedule

PLAIN_PASSES = 256
"""Passes without drafts are summed up in groups of this size. Short steps are host-bound, so
summing after each one would slow them down.
"""


class DecodedRows:
    """The number of rows decoded at each length.

    All other counts can be computed from these numbers and the schedule, so counting a decode step
    takes just one addition on the device, and no synchronisation.
    """

    def __init__(self, budgets: int, max_rows: int, max_length: int, device: torch.device) -> None:
        self.at_length = torch.zeros(max_length + 1, dtype=torch.int64, device=device)
        # rows decoded under each budget, not counting those still in ``at_length``
        self._before = self.at_length.repeat(budgets, 1)
        self._one_B = torch.ones(max_rows, dtype=torch.int64, device=device)
        self.in_prefill = (
            0  # number of rows with a one-token prompt chunk, which are not counted by length
        )

    def add(self, place_B: Tensor) -> None:
        """Count one decoded row for each of these lengths (int32)."""
        self.at_length.index_add_(0, place_B, self._one_B[: len(place_B)])

    def end_budget(self, budget: int) -> None:
        """Attribute the steps since the last call to this budget, and start over from zero."""
        self._before[budget] += self.at_length
        self.at_length.zero_()

    def take(
        self, schedules: list[SparsitySchedule], budget: int, sparse: int, dense: int
    ) -> Counter[str]:
        """Return the counts since the last call.

        Args:
            schedules: the schedule for each budget.
            budget: the budget of the steps since the last ``end_budget`` or ``take``.
            sparse: number of sparse layers.
            dense: number of dense layers.
        """
        self._before[budget] += self.at_length
        counts = Counter({"dense_rows_prefill": self.in_prefill})
        for schedule, decoded in zip(schedules, self._before.cpu().numpy(), strict=True):
            counts.update(_decode_counts(schedule, decoded.copy(), sparse, dense))
        self.at_length.zero_()
        self._before.zero_()
        self.in_prefill = 0
        return counts


class DensePasses:
    """Counts of dense passes in lossless mode. Plain passes, which have no drafts before or after
    them, are counted separately.
    """

    def __init__(self, device: torch.device) -> None:
        # number of cycles for each number of drafts that followed
        self._cycles: Counter[int] = Counter()
        # tokens read, tokens that dense decoding would have read, emitted tokens, and rows
        self._verified = torch.zeros(4, dtype=torch.int64, device=device)
        # like ``_cycles``, for cycles with sparse passes over guesses, and for cycles with guesses
        # alone
        self._guessed_cycles: Counter[int] = Counter()
        self._alone_cycles: Counter[int] = Counter()
        # number of drafts, and number of drafts that are unchecked guesses; 0 in an engine without
        # guesses
        self._drafts = torch.zeros(2, dtype=torch.int64, device=device)
        # sequences in passes without drafts, and tokens read by these passes
        self._plain_rows = 0
        self._plain_tokens = 0
        self._plain: list[np.ndarray] = []  # passes not yet added to the two sums above

    def count(self, drafts: int) -> Tensor:
        """Count one dense pass, followed by ``drafts`` drafts.

        Returns:
            Running totals, int64 [4], which the caller must update. They count the tokens that the
            pass read, the tokens that ordinary decoding would have read instead, the emitted
            tokens, and the sequences. Sequences in prefill are not counted.
        """
        self._cycles[drafts] += 1
        return self._verified

    def count_drafts(self, drafts: int, with_guesses: bool, alone: bool = False) -> Tensor:
        """Count one cycle with ``drafts`` drafts per sequence, in an engine with guesses.

        Args:
            with_guesses: whether the cycle uses guesses.
            alone: whether the guesses themselves are the drafts.

        Returns:
            Running totals, int64 [2], which the caller must update. They count all drafts, and the
            drafts that are guesses not checked by a sparse pass.
        """
        if alone:
            self._alone_cycles[drafts] += 1
        elif with_guesses:
            self._guessed_cycles[drafts] += 1
        return self._drafts

    def count_plain(self, computed: np.ndarray) -> None:
        """Count one dense pass that has no drafts before or after it. Every sequence gets one
        token.

        Args:
            computed: number of tokens each sequence had in the cache before the pass. After a
                verification, this includes rejected drafts, because vLLM schedules the next pass
                before it knows which drafts were rejected.
        """
        self._plain.append(computed)
        if len(self._plain) >= PLAIN_PASSES:
            self._sum_plain()

    def _sum_plain(self) -> None:
        if self._plain:
            self._cycles[0] += len(self._plain)
            computed = np.concatenate(self._plain)
            self._plain_rows += len(computed)
            self._plain_tokens += int(computed.sum(dtype=np.int64)) + len(computed)
            self._plain.clear()

    def take_cycles(self) -> dict[int, int]:
        """Return the number of passes since the last call, keyed by the number of tokens drafted
        after the pass.
        """
        self._sum_plain()
        cycles = dict(sorted(self._cycles.items()))
        self._cycles = Counter()
        return cycles

    def take_guessed_cycles(self) -> dict[int, int]:
        """Like ``take_cycles``, but only for cycles with sparse passes over guesses."""
        cycles = dict(sorted(self._guessed_cycles.items()))
        self._guessed_cycles = Counter()
        return cycles

    def take_alone_cycles(self) -> dict[int, int]:
        """Like ``take_cycles``, but only for cycles whose drafts were guesses alone."""
        cycles = dict(sorted(self._alone_cycles.items()))
        self._alone_cycles = Counter()
        return cycles

    def add_to(self, counts: Counter[str], layers: int, guesses: bool) -> None:
        """Add to ``counts`` the counts of dense passes since the last call. ``counts`` already
        holds the counts of draft steps. ``guesses`` says whether draft steps may read guesses.
        """
        self._sum_plain()
        read, held, emitted, passes = self._verified.tolist()
        counts["tokens_read"] += layers * (read + self._plain_tokens)
        counts["tokens_held"] = layers * (held + self._plain_tokens)
        counts["drafted"] = counts["rows"]
        if guesses:
            counts["passes"] = counts["rows"]
            counts["drafted"], counts["guessed"] = self._drafts.tolist()
            self._drafts.zero_()
        counts["accepted"] = emitted - passes
        counts["emitted"] = emitted + self._plain_rows
        self._verified.zero_()
        self._plain_rows = 0
        self._plain_tokens = 0


def _decode_counts(
    schedule: SparsitySchedule, decoded: np.ndarray, sparse: int, dense: int
) -> dict[str, int]:
    """Compute the decode step counts under ``schedule``.

    Args:
        decoded: number of rows decoded at each length.
        sparse: number of sparse layers.
        dense: number of dense layers.
    """
    decoded[0] = 0  # padding rows and rows in prefill
    length = np.flatnonzero(decoded)
    rows = decoded[length]
    read = schedule.tokens_read(length)
    everything = (schedule.pages(length) >= ALL_PAGES) | (sparse == 0)
    counts = {
        "rows": rows.sum(),
        "tokens_read": (rows * (sparse * read + dense * length)).sum(),
        "tokens_held": (rows * (sparse + dense) * length).sum(),
        "pages_read": (rows * sparse * schedule.pages_read(length)).sum(),
        "dense_rows_schedule": rows[everything].sum(),
        "dense_rows_short": rows[~everything & (read == length)].sum(),
    }
    return {name: int(count) for name, count in counts.items()}
