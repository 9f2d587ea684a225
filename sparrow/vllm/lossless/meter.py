"""Measure the acceptance of every draft. No extra pass is needed, since verification already has
both sets of logits on the device.

Shapes: T rows of logits in a verification, grouped by sequence; B batch size; S the worker's
maximum number of sequences; k drafts; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

from sparrow.mismatch.drafts import BUCKETS, DraftAcceptance

if TYPE_CHECKING:
    from sparrow.schedule import SparsitySchedule


@triton.jit
def _overlap_kernel(
    target,
    draft,
    sequence_T,
    place_T,
    temperature_S,
    out_T,
    target_stride,
    draft_stride,
    draft_step,
    V,
    TEMPER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Normalise the distributions p and q for one draft, and sum min(p, q) over the vocabulary."""
    row = tl.program_id(0).to(tl.int64)
    sequence = tl.load(sequence_T + row).to(tl.int64)
    place = tl.load(place_T + row).to(tl.int64)
    temperature = tl.load(temperature_S + sequence)
    if (place < 0) | (temperature == 0.0):
        return
    p_row = target + row * target_stride
    q_row = draft + sequence * draft_stride + place * draft_step
    scale = 1.0 / temperature if TEMPER else 1.0
    block = tl.arange(0, BLOCK)
    p_max = tl.full([BLOCK], -float("inf"), tl.float32)
    q_max = tl.full([BLOCK], -float("inf"), tl.float32)
    p_sum = tl.zeros([BLOCK], tl.float32)
    q_sum = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        inside = start + block < V
        p = tl.load(p_row + start + block, mask=inside, other=-float("inf")).to(tl.float32)
        q = tl.load(q_row + start + block, mask=inside, other=-float("inf")).to(tl.float32) * scale
        p_new = tl.maximum(p_max, p)
        q_new = tl.maximum(q_max, q)
        p_sum = tl.where(
            p_new == -float("inf"), 0.0, p_sum * tl.exp(p_max - p_new) + tl.exp(p - p_new)
        )
        q_sum = tl.where(
            q_new == -float("inf"), 0.0, q_sum * tl.exp(q_max - q_new) + tl.exp(q - q_new)
        )
        p_max = p_new
        q_max = q_new
    p_top = tl.max(p_max, 0)
    q_top = tl.max(q_max, 0)
    p_all = tl.sum(tl.where(p_max == -float("inf"), 0.0, p_sum * tl.exp(p_max - p_top)), 0)
    q_all = tl.sum(tl.where(q_max == -float("inf"), 0.0, q_sum * tl.exp(q_max - q_top)), 0)
    shared = tl.zeros([BLOCK], tl.float32)
    for start in range(0, V, BLOCK):
        inside = start + block < V
        p = tl.load(p_row + start + block, mask=inside, other=-float("inf")).to(tl.float32)
        q = tl.load(q_row + start + block, mask=inside, other=-float("inf")).to(tl.float32) * scale
        shared += tl.minimum(tl.exp(p - p_top) / p_all, tl.exp(q - q_top) / q_all)
    tl.store(out_T + row, tl.minimum(tl.sum(shared, 0), 1.0))


def overlap(
    target_TV: Tensor,
    draft_SkV: Tensor,
    sequence_T: Tensor,
    place_T: Tensor,
    temperature_S: Tensor,
    temper: bool,
) -> Tensor:
    """Return the probability that each draft is accepted, float32 ``[T]``. The probability is the
    sum of min(p(v), q(v)) over the vocabulary.

    Args:
        target_TV: the policy's logits, already processed for sampling.
        draft_SkV: the logits the drafts were sampled from.
        sequence_T: for each row, the index of its sequence in ``draft_SkV``.
        place_T: for each row, the index of its draft within the sequence, or a negative number if
            it has no draft. Rows without a draft give NaN, as do rows at temperature 0.
        temper: whether the draft logits still need to be divided by ``temperature_S``.
    """
    T, V = target_TV.shape
    out_T = torch.full((T,), float("nan"), device=target_TV.device)
    if T:
        _overlap_kernel[(T,)](
            target_TV,
            draft_SkV,
            sequence_T,
            place_T,
            temperature_S,
            out_T,
            target_TV.stride(0),
            draft_SkV.stride(0),
            draft_SkV.stride(1),
            min(V, draft_SkV.shape[-1]),
            TEMPER=temper,
            BLOCK=2048,
            num_warps=8,
        )
    return out_T


class Tally:
    """Draft acceptance in each of a schedule's length bins, counted on the device until ``take``
    is called.

    Args:
        max_length: maximum sequence length, in tokens.
    """

    def __init__(self, schedule: SparsitySchedule, max_length: int, device: torch.device) -> None:
        self.bin_tokens = schedule.bin_tokens
        self._page_size = schedule.page_size
        bins = int(schedule.page_end(max_length)) // self.bin_tokens + 1
        self._counts = torch.zeros(bins, BUCKETS, dtype=torch.int64, device=device)
        self._sums = torch.zeros(bins, dtype=torch.float64, device=device)

    def add(self, value_T: Tensor, position_T: Tensor) -> None:
        """Count the acceptance of the drafts right after these positions, skipping NaNs."""
        is_known_T = ~value_T.isnan()
        value_T = value_T.nan_to_num(0.0)
        # The schedule's bins are those of the page ends, as in SparsitySchedule.page_end.
        page_end_T = (position_T // self._page_size + 1) * self._page_size
        bin_T = (page_end_T // self.bin_tokens).clamp(max=len(self._sums) - 1).long()
        bucket_T = (value_T * BUCKETS).long().clamp(max=BUCKETS - 1)
        self._counts.view(-1).index_add_(0, bin_T * BUCKETS + bucket_T, is_known_T.long())
        self._sums.index_add_(0, bin_T, value_T.double())

    def take(self) -> DraftAcceptance:
        """Return the counts since the last call."""
        counts, sums = (x.to("cpu", copy=True).numpy() for x in (self._counts, self._sums))
        self._counts.zero_()
        self._sums.zero_()
        bins = int(counts.sum(1).nonzero()[0].max(initial=-1)) + 1
        return DraftAcceptance(self.bin_tokens, counts[:bins], sums[:bins])


class Metered:
    """A second schedule. An occasional extra step measures the acceptance of drafts under this
    schedule.

    The extra step computes this schedule's distribution at the position of a cycle's first draft.
    Verification later computes the policy's distribution at the same position. The extra step
    leaves no trace, because the drafts overwrite its cache entries.

    Args:
        schedule: the schedule, with the same page layout as the drafts.
        every: run one extra step per this many cycles with drafts.
        table: the schedule's page counts by length (see ``PageTables.of``).
        logits_SV: a buffer for the extra steps' logits, with one row per sequence the worker can
            hold, plus a last row (index -1) for batch rows without drafts.
        tally: counts the acceptance under this schedule.
    """

    def __init__(
        self, schedule: SparsitySchedule, every: int, table: Tensor, logits_SV: Tensor, tally: Tally
    ) -> None:
        self.schedule = schedule
        self.table = table
        self.logits_SV = logits_SV
        self.tally = tally
        self._every = every
        self._cycles = 0
        # true for sequences whose stored logits belong to the drafts about to be verified
        self._is_fresh_S = torch.zeros(len(logits_SV), dtype=torch.bool, device=logits_SV.device)

    def begin_cycle(self, index_R: Tensor) -> bool:
        """Mark these sequences' stored logits as stale, because new drafts are coming. Return
        whether an extra step is due before these drafts. Rows without a sequence have index -1.
        """
        self._is_fresh_S[index_R.long()] = False
        self._cycles += 1
        return self._cycles % self._every == 0

    def take(self, logits_RV: Tensor, index_R: Tensor) -> None:
        """Store an extra step's logits until verification."""
        self.logits_SV[index_R.long()] = logits_RV.to(self.logits_SV.dtype)
        self._is_fresh_S[index_R.long()] = index_R >= 0

    def add(
        self,
        target_TV: Tensor,
        is_first_T: Tensor,
        position_T: Tensor,
        sequence_T: Tensor,
        temperature_S: Tensor,
    ) -> None:
        """Count the acceptance in one verification. ``is_first_T`` marks the rows that verify a
        sequence's first draft.
        """
        is_judged_T = is_first_T & self._is_fresh_S[sequence_T]
        place_T = is_judged_T.long() - 1
        value_T = overlap(
            target_TV, self.logits_SV[:, None], sequence_T, place_T, temperature_S, temper=True
        )
        self.tally.add(value_T, position_T)


class Meter:
    """Draft acceptance in each length bin.

    A draft counts only if all earlier drafts in its cycle were accepted, because a draft after a
    rejected one can't end up in the response. Greedy drafts don't count, because they aren't drawn
    from a distribution.

    Args:
        drafts: one tally for each of ``Runtime.budgets``.
        budget: the initial draft budget.
        temper: see ``overlap``.
        metered: a second schedule to measure, if any.
        drawn_S: how many of each sequence's drafts were drawn from a distribution. The rest are
            guesses and are not measured. None if there are no guesses.
    """

    def __init__(
        self,
        drafts: Sequence[Tally],
        budget: int,
        temper: bool,
        metered: Metered | None = None,
        drawn_S: Tensor | None = None,
    ) -> None:
        self._drafts = drafts
        self._drawn_S = drawn_S
        self.temper = temper
        self.metered = metered
        self.use(budget)

    def use(self, budget: int) -> None:
        """Count drafts under this budget from the next verification on."""
        self._in_use = self._drafts[budget]

    def take(self) -> list[DraftAcceptance]:
        """Return the counts since the last call for each budget."""
        return [tally.take() for tally in self._drafts]

    def add(
        self,
        target_TV: Tensor,
        draft_SkV: Tensor,
        first_B1: Tensor,
        position_T: Tensor,
        sequence_T: Tensor,
        place_T: Tensor,
        temperature_S: Tensor,
        sampled_B: Tensor,
    ) -> None:
        """Count the acceptance in one verification.

        Args:
            first_B1: index of each sequence's first row of logits, ``[B + 1]``.
            position_T: position of each row's input token. A draft's length is this plus one.
            sequence_T: for each row, the index of its sequence in the worker.
            place_T: each row's index within its sequence.
            sampled_B: number of tokens that each sequence gained, i.e. its accepted drafts plus
                one.
        """
        T = len(position_T)
        row_T = torch.searchsorted(
            first_B1[1:].contiguous(), torch.arange(T, device=first_B1.device), right=True
        )
        drafts_T = (first_B1[1:] - first_B1[:-1])[row_T] - 1
        is_judged_T = (place_T < drafts_T) & (place_T < sampled_B[row_T])
        if self._drawn_S is not None:
            is_judged_T &= place_T < self._drawn_S[sequence_T.long()]
        value_T = overlap(
            target_TV,
            draft_SkV,
            sequence_T,
            torch.where(is_judged_T, place_T, -1),
            temperature_S,
            self.temper,
        )
        self._in_use.add(value_T, position_T)
        if self.metered is not None:
            self.metered.add(
                target_TV, is_judged_T & (place_T == 0), position_T, sequence_T, temperature_S
            )
