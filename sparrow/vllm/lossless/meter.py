"""Measures the acceptance of every draft, from logits that verification has on the device anyway,
so that it takes no extra pass.

Shapes: T rows of logits in a verification, each sequence's rows adjacent; B sequences; S sequences
the worker can hold; k drafts; V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.triton_utils import tl, triton

if TYPE_CHECKING:
    from sparrow.mismatch.drafts import DraftAcceptance
    from sparrow.schedule import SparsitySchedule

BUCKETS = 1000  # as in ``sparrow.mismatch.drafts``, which is loaded only when needed


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
    """Each program sums min(p, q) over the vocabulary for one draft, and normalises both."""
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
    """Return the probability that each draft is accepted, sum_v min(p(v), q(v)), ``[T]`` float32.

    Args:
        target_TV: the policy's logits, processed as for sampling.
        draft_SkV: the logits that drafts were drawn from.
        sequence_T, place_T: the row of ``draft_SkV`` that each row is compared with. A place below
            0 means none and gives NaN, as does a temperature of 0.
        temper: whether the drafts' logits must still be divided by ``temperature_S``.
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
    """Acceptance by length, counted on the device until ``settle``.

    Args:
        bin_tokens: width of a length bin.
        max_length: tokens of the longest sequence.
    """

    def __init__(self, bin_tokens: int, max_length: int, device: torch.device) -> None:
        self.bin_tokens = bin_tokens
        bins = max_length // bin_tokens + 1
        self._counts = torch.zeros(bins, BUCKETS, dtype=torch.int64, device=device)
        self._sums = torch.zeros(bins, dtype=torch.float64, device=device)

    def add(self, value_T: Tensor, position_T: Tensor) -> None:
        """Count the acceptance (NaN: none) of the drafts that come after the tokens at these
        positions.
        """
        is_known_T = ~value_T.isnan()
        value_T = value_T.nan_to_num(0.0)
        bin_T = ((position_T + 1) // self.bin_tokens).clamp(max=len(self._sums) - 1).long()
        bucket_T = (value_T * BUCKETS).long().clamp(max=BUCKETS - 1)
        self._counts.view(-1).index_add_(0, bin_T * BUCKETS + bucket_T, is_known_T.long())
        self._sums.index_add_(0, bin_T, value_T.double())

    def settle(self) -> DraftAcceptance:
        """Return the counts since the last call."""
        from sparrow.mismatch.drafts import DraftAcceptance

        counts, sums = (x.to("cpu", copy=True).numpy() for x in (self._counts, self._sums))
        self._counts.zero_()
        self._sums.zero_()
        bins = int(counts.sum(1).nonzero()[0].max(initial=-1)) + 1
        return DraftAcceptance(self.bin_tokens, counts[:bins], sums[:bins])


class Metered:
    """Another schedule, under which an occasional step measures the acceptance that a lossy rollout
    would have.

    The step computes the distribution at the position of a cycle's first draft. It leaves no trace,
    since the drafts write to the same place of the cache again. Verification has the policy's
    distribution at that position.

    Args:
        schedule: the schedule, with the page layout of the drafts.
        every: cycles with drafts from one such step to the next.
        table: the schedule's pages by length, as ``PageTables.of`` makes them.
        logits_SV: buffer for the logits of these steps: one place for each sequence that the worker
            holds, and one more at the end (index -1) for rows without drafts.
        tally: counts their acceptance.
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
        # The sequences whose logits belong to the drafts that verification will see next.
        self._is_fresh_S = torch.zeros(len(logits_SV), dtype=torch.bool, device=logits_SV.device)

    def begin_cycle(self, index_R: Tensor) -> bool:
        """Note that these sequences (-1: none) get new drafts; returns whether a step of this
        schedule is due before them.
        """
        self._is_fresh_S[index_R.long()] = False
        self._cycles += 1
        return self._cycles % self._every == 0

    def take(self, logits_RV: Tensor, index_R: Tensor) -> None:
        """Keep the logits of a step until verification."""
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
        """Count one verification; ``is_first_T`` marks the rows of logits that a first draft was
        checked with.
        """
        is_judged_T = is_first_T & self._is_fresh_S[sequence_T]
        place_T = is_judged_T.long() - 1
        value_T = overlap(
            target_TV, self.logits_SV[:, None], sequence_T, place_T, temperature_S, temper=True
        )
        self.tally.add(value_T, position_T)


class Meter:
    """Counts the acceptance of drafts by length.

    A draft counts if all before it in its cycle were accepted; the others were never candidates for
    the response. Greedy drafts do not count, as they have no distribution.

    Args:
        drafts: the counts, one for each of ``Runtime.budgets``.
        budget: the budget that drafts read at first.
        temper: see ``overlap``.
        metered: another schedule to count for, if any.
    """

    def __init__(
        self, drafts: Sequence[Tally], budget: int, temper: bool, metered: Metered | None = None
    ) -> None:
        self._drafts = drafts
        self.temper = temper
        self.metered = metered
        self.use(budget)

    def use(self, budget: int) -> None:
        """Count drafts under this budget from the next verification on."""
        self._in_use = self._drafts[budget]

    def settle(self) -> list[DraftAcceptance]:
        """Return the counts since the last call, by budget."""
        return [tally.settle() for tally in self._drafts]

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
        """Count one verification.

        Args:
            first_B1: first row of logits of each sequence, ``[B + 1]``.
            position_T: position of the token before each row of logits; the length is one more.
            sequence_T, place_T: each row's sequence among all that the worker holds, and the row's
                number in it.
            sampled_B: tokens that each sequence got: its accepted drafts and one more.
        """
        T = len(position_T)
        row_T = torch.searchsorted(
            first_B1[1:].contiguous(), torch.arange(T, device=first_B1.device), right=True
        )
        drafts_T = (first_B1[1:] - first_B1[:-1])[row_T] - 1
        is_judged_T = (place_T < drafts_T) & (place_T < sampled_B[row_T])
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
