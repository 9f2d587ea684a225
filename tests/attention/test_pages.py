"""Test pages, landmarks, scores and selection against loops that follow the definition (Sparrow,
arXiv 2606.08446, section 2).

Shapes: B sequences, T query tokens, H query heads, K kv heads, G = H / K, D head dim, P page size,
N pages.
"""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.attention.pages import (
    PageLayout,
    landmarks,
    page_count,
    page_scores,
    reading_order,
    select_pages,
)
from sparrow.schedule import ALL_PAGES

NAN, INF = float("nan"), float("inf")
seeds = st.integers(0, 2**31)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def best_pages(scores: list[float], length: int, top_k: int, layout: PageLayout) -> set[int]:
    """Select pages for one query token and kv head as the definition says: the sink pages, the
    recent pages, and the ``top_k`` best of all others. If two scores tie, the earlier page wins.
    """
    pages = -(-length // layout.page_size)
    sink = set(range(min(layout.sink_pages, pages)))
    recent = set(range(max(pages - layout.recent_pages, 0), pages))
    rest = sorted(set(range(pages)) - sink - recent, key=lambda n: (-scores[n], n))
    return sink | recent | set(rest[:top_k])


def select(scores: list[float], length: int, top_k: int, layout: PageLayout) -> set[int]:
    kept = select_pages(
        torch.tensor(scores)[None, None, None],
        torch.tensor([[length]]),
        torch.tensor([[top_k]]),
        layout,
    )
    assert kept.shape == (1, 1, 1, len(scores)) and kept.dtype == torch.bool
    return set(kept[0, 0, 0].nonzero()[:, 0].tolist())


# --- layout and counting ---


@pytest.mark.parametrize("field", [dict(page_size=0), dict(sink_pages=-1), dict(recent_pages=0)])
def test_page_layout_rejects_counts_out_of_range(field):
    with pytest.raises(
        ValueError,
        match=r"at least 1, sink_pages at least 0 and recent_pages at least 1, got PageLayout\(",
    ):
        PageLayout(**field)


def test_page_count_includes_a_partly_filled_page():
    assert page_count(torch.tensor([0, 1, 15, 16, 17, 32, 33]), 16).tolist() == [
        0,
        1,
        1,
        1,
        2,
        2,
        3,
    ]


# --- landmarks and scores ---


def test_landmarks_match_a_hand_calculation():
    k_BKNPD = torch.tensor([[1.0, -2.0], [3.0, 6.0], [0.0, 0.0], [-4.0, 8.0]]).view(1, 1, 2, 2, 2)
    assert landmarks(k_BKNPD).tolist() == [[[[2.0, 2.0], [-2.0, 4.0]]]]


def test_mean_key_is_computed_in_float32_and_stored_in_the_key_dtype():
    # A sum in bfloat16 would be 258 / 4, because adding 1 to 256 has no effect.
    marks = landmarks(torch.tensor([256.0, 1.0, 1.0, 2.0]).bfloat16().view(1, 1, 1, 4, 1))
    assert marks.dtype == torch.bfloat16 and marks.item() == 65.0
    # The sum 16 x 8192 = 131072 overflows float16.
    assert landmarks(torch.full((1, 1, 1, 16, 1), 8192.0).half()).item() == 8192.0


def test_scores_match_a_hand_calculation():
    q_BHTD = torch.tensor([[1.0, 0.0], [3.0, -2.0]]).view(
        1, 2, 1, 2
    )  # one group of two; its mean is (2, -1)
    k_BKNPD = torch.tensor([[1.0, -2.0], [3.0, 6.0]]).view(1, 1, 1, 2, 2)  # mean (2, 2)
    assert page_scores(q_BHTD, landmarks(k_BKNPD)).tolist() == [[[[2 * 2 - 1 * 2]]]]


@settings(deadline=None, max_examples=25)
@given(shape=st.tuples(*(st.integers(1, n) for n in (2, 3, 3, 2, 3, 4, 4))), seed=seeds)
def test_scores_match_a_loop_over_heads_and_tokens(shape, seed):
    B, K, G, T, N, P, D = shape
    q_BHTD, k_BKNPD = normal(B, K * G, T, D, seed=seed), normal(B, K, N, P, D, seed=seed + 1)
    scores = page_scores(q_BHTD, landmarks(k_BKNPD))
    assert scores.shape == (B, K, T, N) and scores.dtype == torch.float32
    q, k = q_BHTD.double().tolist(), k_BKNPD.double().tolist()
    for b, h, t, n in itertools.product(range(B), range(K), range(T), range(N)):
        group = [q[b][h * G + g][t] for g in range(G)]
        page = k[b][h][n]
        mean_query = [sum(query[d] for query in group) / G for d in range(D)]
        landmark = [sum(key[d] for key in page) / P for d in range(D)]
        expected = sum(mean_query[d] * landmark[d] for d in range(D))
        assert abs(scores[b, h, t, n].item() - expected) < 1e-5


# --- selection ---

#        page  0  1  2  3  4  5  6  7
SCORES = [9.0, 1, 5, 3, 5, 2, 9, 9]


@pytest.mark.parametrize(
    ("length", "top_k", "layout", "kept"),
    [
        # 30 tokens take eight pages of 4, and the last one is half full. The sink page and the two
        # recent pages do not count toward top_k.
        (30, 0, {}, {0, 6, 7}),
        (30, 1, {}, {0, 2, 6, 7}),  # pages 2 and 4 tie, and the earlier one wins
        (30, 2, {}, {0, 2, 4, 6, 7}),
        (30, 3, {}, {0, 2, 3, 4, 6, 7}),
        (30, 4, {}, {0, 2, 3, 4, 5, 6, 7}),
        (30, 5, {}, set(range(8))),
        (30, 6, {}, set(range(8))),
        (30, ALL_PAGES, {}, set(range(8))),
        (32, 1, {}, {0, 2, 6, 7}),  # a full last page makes no difference
        (29, 1, {}, {0, 2, 6, 7}),  # a last page with one token is still recent
        (28, 1, {}, {0, 2, 5, 6}),  # page 7 does not exist, so page 5 is recent
        (28, ALL_PAGES, {}, set(range(7))),
        # Short sequences: every page is sink or recent.
        (1, 0, {}, {0}),
        (4, 3, {}, {0}),
        (5, 0, {}, {0, 1}),
        (12, 0, {}, {0, 1, 2}),
        (13, 0, {}, {0, 2, 3}),
        (13, 1, {}, {0, 1, 2, 3}),
        (0, 3, {}, set()),
        # Other layouts.
        (30, 1, dict(sink_pages=0), {0, 6, 7}),  # page 0 is selected only by its score
        (30, 2, dict(sink_pages=0), {0, 2, 6, 7}),
        (30, 0, dict(sink_pages=0, recent_pages=1), {7}),
        (30, 1, dict(sink_pages=0, recent_pages=1), {0, 7}),
        (30, 1, dict(sink_pages=3, recent_pages=1), {0, 1, 2, 6, 7}),
        (30, 0, dict(sink_pages=9), set(range(8))),
        (30, 0, dict(recent_pages=9), set(range(8))),
        (30, 1, dict(page_size=8), {0, 1, 2, 3}),
        (30, 2, dict(page_size=5), {0, 2, 3, 4, 5}),
    ],
)
def test_selected_pages_match_a_hand_calculation(length, top_k, layout, kept):
    assert select(SCORES, length, top_k, PageLayout(**{"page_size": 4, **layout})) == kept


def test_selection_handles_ties_infinities_and_nans():
    layout = PageLayout(page_size=4)
    assert select([0.0] * 8, 30, 3, layout) == {0, 1, 2, 3, 6, 7}
    assert select([5.0, -3, -1, -2, -9, -1, 5, 5], 30, 2, layout) == {0, 2, 5, 6, 7}
    assert select([0.0, -INF, -INF, 1, -INF, -INF, 0, 0], 30, 2, layout) == {0, 1, 3, 6, 7}
    assert select([0.0, 1, INF, 1, INF, INF, 0, 0], 30, 2, layout) == {0, 2, 4, 6, 7}
    # The sink, a partly filled page and pages that are not yet written are never ranked, whatever
    # their scores.
    assert select([NAN, 1, 5, 3, 4, NAN, NAN, NAN], 27, 2, layout) == {0, 2, 4, 5, 6}


def test_page_selection_is_independent_across_rows_heads_and_query_tokens():
    scores = normal(2, 3, 4, 8, seed=1)
    length = torch.tensor([[30, 5, 17, 28], [1, 32, 24, 0]])
    top_k = torch.tensor([[2, 1, 0, ALL_PAGES], [3, 1, 2, 1]], dtype=torch.int32)
    layout = PageLayout(page_size=4)
    kept = select_pages(scores, length, top_k, layout)
    for b, k, t in itertools.product(range(2), range(3), range(4)):
        expected = best_pages(scores[b, k, t].tolist(), int(length[b, t]), int(top_k[b, t]), layout)
        assert set(kept[b, k, t].nonzero()[:, 0].tolist()) == expected


@st.composite
def selections(draw):
    layout = PageLayout(draw(st.integers(1, 5)), draw(st.integers(0, 3)), draw(st.integers(1, 3)))
    pages = draw(st.integers(1, 10))
    rows = draw(st.integers(1, 3))
    # Few distinct values make ties common.
    score = st.sampled_from([-1e30, -1.0, 0.0, 0.5, 1.0, 3e38])
    scores = draw(
        st.lists(st.lists(score, min_size=pages, max_size=pages), min_size=rows, max_size=rows)
    )
    length = draw(st.lists(st.integers(1, pages * layout.page_size), min_size=rows, max_size=rows))
    top_k = draw(st.lists(st.integers(0, 12) | st.just(ALL_PAGES), min_size=rows, max_size=rows))
    return scores, length, top_k, layout


@settings(deadline=None, max_examples=200)
@given(selections())
def test_selection_keeps_sink_and_recent_pages_and_adds_the_best_others(case):
    scores, length, top_k, layout = case
    kept = select_pages(
        torch.tensor(scores)[:, None, None],
        torch.tensor(length)[:, None],
        torch.tensor(top_k)[:, None],
        layout,
    )
    for row in range(len(scores)):
        chosen = set(kept[row, 0, 0].nonzero()[:, 0].tolist())
        pages = -(-length[row] // layout.page_size)
        ends = set(range(layout.sink_pages)) | set(range(pages - layout.recent_pages, pages))
        ends &= set(range(pages))
        assert chosen <= set(range(pages)) and ends <= chosen
        assert len(chosen) == min(top_k[row] + layout.sink_pages + layout.recent_pages, pages)
        left_out = set(range(pages)) - chosen
        assert all(scores[row][n] >= scores[row][m] for n in chosen - ends for m in left_out)
        assert chosen == best_pages(scores[row], length[row], top_k[row], layout)


@pytest.mark.parametrize(
    "layout", [PageLayout(), PageLayout(page_size=4, sink_pages=0, recent_pages=1)]
)
def test_selected_pages_are_a_prefix_of_the_reading_order(layout):
    scores = normal(2, 3, 5, 12).round(decimals=1)  # rounding makes some scores equal
    length = torch.randint(
        1, 12 * layout.page_size + 1, (2, 5), generator=torch.Generator().manual_seed(1)
    )
    order = reading_order(scores, length, layout)
    pages = page_count(length, layout.page_size)[:, None, :, None]
    for top_k in range(13):
        kept = select_pages(scores, length, torch.full_like(length, top_k), layout)
        first = torch.zeros_like(kept).scatter(
            -1, order[..., : top_k + layout.sink_pages + layout.recent_pages], True
        )
        assert torch.equal(kept, first & (torch.arange(12) < pages))
