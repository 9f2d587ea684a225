"""Test how the meter assigns the acceptance of drafts to length bins."""

import numpy as np
import pytest
import torch

pytest.importorskip("vllm.triton_utils")

from sparrow.mismatch.drafts import DraftAcceptance
from sparrow.schedule import SparsitySchedule
from sparrow.vllm.lossless.meter import Tally


def test_drafts_are_counted_in_the_schedules_bins():
    schedule = SparsitySchedule(top_k=(1, 2, 3), bin_tokens=100, page_size=16)
    length = np.arange(1, 331)
    acceptance = np.linspace(0.2, 0.9, len(length))
    tally = Tally(schedule, 330, torch.device("cpu"))
    tally.add(torch.from_numpy(acceptance), torch.from_numpy(length - 1))
    expected = DraftAcceptance.of(acceptance, schedule.page_end(length), schedule.bin_tokens)
    found = tally.take()
    assert found.counts.sum(1).tolist() == expected.counts.sum(1).tolist() == [96, 96, 96, 42]
    np.testing.assert_allclose(found.sums, expected.sums)
