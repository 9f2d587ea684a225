"""Page counts on the device: how many pages the schedule keeps at each length, and how many each
row reads in the current decode step.

Shapes: B decode batch size, including CUDA graph padding rows, which have length 0.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from sparrow.schedule import ALL_PAGES, SparsitySchedule


class PageTables:
    """A schedule's page counts at each length, and the page counts for the current step. The
    tensors are updated in place, because CUDA graphs refer to them by address.

    Args:
        schedule: the initial schedule.
        budgets: the available budgets, as multiples of the schedule; must include 1.
        max_rows: maximum decode batch size, including graph padding.
        max_length: maximum sequence length, in tokens.
        device: the model's device.
    """

    def __init__(
        self,
        schedule: SparsitySchedule,
        budgets: tuple[float, ...],
        max_rows: int,
        max_length: int,
        device: torch.device,
    ) -> None:
        self.budgets = budgets
        # indices of the current budget and the base budget
        self.budget = self.base_budget = budgets.index(1.0)
        self._everything_B = torch.full((max_rows,), ALL_PAGES, dtype=torch.int32, device=device)
        # One page count per length, so that bins can have any width. Rows in prefill use length 0,
        # where the count means all pages.
        self.at_length = torch.empty(max_length + 1, dtype=torch.int32, device=device)
        self._by_budget = self.at_length.repeat(len(budgets), 1)
        self.top_k = torch.zeros(max_rows, dtype=torch.int32, device=device)
        # 1 for rows that decode, 0 for rows in prefill
        self._decodes_B = torch.ones(max_rows, dtype=torch.int32, device=device)
        self._all_decode = True
        # rows up to this length read everything; -1 if no row does
        self.whole_up_to = -1
        self.fill(schedule)

    def fill(self, schedule: SparsitySchedule) -> None:
        """Use this schedule from the next step on."""
        for budget, multiple in enumerate(self.budgets):
            self._by_budget[budget].copy_(self.of(schedule.times(multiple)))
        self.at_length.copy_(self._by_budget[self.budget])
        self.whole_up_to = self._whole_up_to(schedule)
        self.schedule = schedule

    def of(self, schedule: SparsitySchedule) -> Tensor:
        """Return the number of pages kept by score at each length, as an int32 tensor on the host.
        The entry for length 0 is for rows in prefill.
        """
        table = torch.from_numpy(schedule.pages(np.arange(len(self.at_length))).astype(np.int32))
        table[0] = ALL_PAGES
        return table

    def _whole_up_to(self, schedule: SparsitySchedule) -> int:
        """Return the length up to which every head reads all tokens."""
        length = np.arange(len(self.at_length))
        leaves_out = schedule.tokens_read(length) < length
        return int(np.argmax(leaves_out)) - 1 if leaves_out.any() else len(length) - 1

    def use_budget(self, budget: int) -> None:
        """Switch to the budget with this index in ``budgets`` from the next step on."""
        self.at_length.copy_(self._by_budget[budget])
        self.budget = budget

    def mark_prefill(self, rows: int, is_prefilling: Tensor | None) -> int:
        """Record which of a step's decode rows are in prefill, and return how many; see
        ``Runtime.begin_step``.
        """
        flags = np.zeros(0, bool) if is_prefilling is None else is_prefilling.numpy()[:rows]
        prefilling = int(np.count_nonzero(flags))
        if prefilling:
            decodes = torch.ones(len(self._decodes_B), dtype=torch.int32)
            decodes[: len(flags)] -= torch.from_numpy(flags).int()
            self._decodes_B.copy_(decodes, non_blocking=True)
        elif not self._all_decode:
            self._decodes_B.fill_(1)
        self._all_decode = not prefilling
        return prefilling

    def look_up(self, length_B: Tensor) -> Tensor:
        """Write the page counts for rows of these lengths (int32) to ``top_k``. Return the lengths,
        int32 ``[B]``, zeroed for rows in prefill.
        """
        B = len(length_B)
        place_B = length_B * self._decodes_B[:B]
        torch.index_select(self.at_length, 0, place_B, out=self.top_k[:B])
        return place_B

    def everything(self, rows: int) -> Tensor:
        """Return page counts ``[rows]``, int32, that make every row read all its pages."""
        return self._everything_B[:rows]
