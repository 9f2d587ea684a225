"""Test unread attention mass against the model's own eager attention."""

import pytest
import torch

from sparrow.attention import PageLayout
from sparrow.attention.pages import landmarks, page_scores, select_pages
from sparrow.model import unread
from sparrow.model.actor import set_schedule
from sparrow.schedule import SparsitySchedule
from tests.conftest import VOCAB, tiny_model


@pytest.mark.parametrize("layout", [PageLayout(4), PageLayout(8, sink_pages=2, recent_pages=1)])
def test_unread_mass_is_the_attention_outside_the_selection(layout, monkeypatch):
    monkeypatch.setattr(unread, "ROWS", 3)
    generator = torch.Generator().manual_seed(0)
    T, P, pages = 93, layout.page_size, (0, 1, 5, 100)
    q, k = (torch.randn(heads, T, 8, generator=generator) for heads in (4, 2))
    position = torch.tensor([2, 40, 41, 63, 92])
    found = unread.unread_mass(q, k, position, layout, 0.5, pages)
    N = -(-T // P)
    marks = landmarks(k[:, : T // P * P].unflatten(1, (-1, P)))
    marks = torch.nn.functional.pad(marks, (0, 0, 0, N - T // P))
    for top_k, mass in zip(pages, found.T, strict=True):
        expected = torch.zeros(2)
        for at in position.tolist():
            scores = page_scores(q[None, :, at : at + 1], marks[None])
            keep = select_pages(scores, torch.tensor([[at + 1]]), torch.tensor([[top_k]]), layout)[
                0, :, 0
            ]
            read = keep.repeat_interleave(P, 1)[:, : at + 1]
            weights = (0.5 * q[:, at].view(2, 2, 1, 8) @ k[:, None, : at + 1].mT)[:, :, 0].softmax(
                -1
            )
            expected += weights.mean(1).masked_fill(read, 0).sum(-1) / len(position)
        torch.testing.assert_close(mass, expected, atol=1e-6, rtol=1e-5)
    assert (
        found[:, -1].abs().max() < 1e-6
        and (found.diff(dim=1) <= 0).all()
        and found[:, 0].min() > 0.05
    )


def test_unread_mass_is_measured_for_each_layer_in_a_dense_pass():
    model = tiny_model()
    set_schedule(model, SparsitySchedule((1,)))
    ids = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(1))
    found = unread.unread(model, ids, torch.tensor([50, 59]), PageLayout(4), (2, 4, 20))
    model.set_attn_implementation("eager")
    attention = model(input_ids=ids[None], output_attentions=True).attentions
    assert found.shape == (4, 2, 3)
    for layer, weights in enumerate(
        attention
    ):  # at most the mass outside the pages that are always kept, and zero if all pages are read
        left = weights[0, :, [50, 59], 4:].unflatten(0, (2, 2)).mean(1)
        ends = torch.stack([left[:, 0, : 44 - 4].sum(-1), left[:, 1, : 52 - 4].sum(-1)]).mean(0)
        assert (found[layer, :, 0] < ends).all() and (found[layer, :, 0] > 0.2 * ends).all()
    assert found[..., 2].abs().max() < 1e-5 and (found.diff(dim=-1) < 0).all()
