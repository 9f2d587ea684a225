"""Compare the paged reference, which defines what the kernels compute, with the contiguous reference
and with hand calculations.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow.attention import (
    CachedLayers,
    CacheScales,
    PageLayout,
    paged_decode,
    reference,
    update_landmarks,
)
from sparrow.attention.int8 import from_int8, to_int8
from sparrow.attention.pages import landmarks
from sparrow.schedule import ALL_PAGES


def paged(
    x_BKSD: torch.Tensor, table_BM: torch.Tensor, blocks: int, block_tokens: int
) -> torch.Tensor:
    """Return a NaN-filled cache ``[blocks, K, block_tokens, D]`` with ``x_BKSD`` in the blocks of
    ``table_BM``.
    """
    B, K, S, D = x_BKSD.shape
    cache = torch.full((blocks, K, block_tokens, D), float("nan"), dtype=x_BKSD.dtype)
    for b in range(B):
        for i, start in enumerate(range(0, S, block_tokens)):
            part = x_BKSD[b, :, start : start + block_tokens]
            cache[table_BM[b, i], :, : part.shape[1]] = part
    return cache


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 90), min_size=1, max_size=3),
    st.integers(0, 12),
    st.sampled_from([1, 3]),
    st.sampled_from([PageLayout(4), PageLayout(8, 2, 1)]),
    st.sampled_from([None, (0, 700), (300, 212)]),
    st.integers(0, 2**31),
)
def test_paging_does_not_change_the_result(lengths, top_k, per_block, layout, budgets, seed):
    torch.manual_seed(seed)
    B, K, G, D, P = len(lengths), 2, 2, 8, layout.page_size
    S = max(lengths)
    q, k, v = (
        torch.randn(B, h, *s, D, dtype=torch.float64)
        for h, s in ((K * G, ()), (K, (S,)), (K, (S,)))
    )
    length, budget = torch.tensor(lengths), torch.full((B,), top_k)
    budgets = budgets and torch.tensor(budgets, dtype=torch.int32)
    expected = reference.decode(q, k, v, None, length, budget, layout, 0.3, budgets)
    block_tokens = P * per_block
    M = -(-S // block_tokens)
    table = torch.randperm(B * M + 2)[: B * M].view(B, M)
    k_cache, v_cache = (paged(x, table, B * M + 2, block_tokens) for x in (k, v))
    # Everything past a row's length is NaN.
    for b, n in enumerate(lengths):
        for cache in (k_cache, v_cache):
            for i in range(M):
                cache[table[b, i], :, max(0, n - i * block_tokens) :] = float("nan")
    marks = torch.full((B * M + 2, per_block, K, D), float("nan"), dtype=torch.float64)
    slots = (table[..., None] * block_tokens + torch.arange(block_tokens)).flatten()
    update_landmarks(
        CachedLayers([(k_cache, marks)]), slots, layout=layout, implementation="reference"
    )
    out = paged_decode(
        q,
        k_cache,
        v_cache,
        marks,
        table.int(),
        length.int(),
        budget.int(),
        layout=layout,
        implementation="reference",
        scale=0.3,
        head_budgets_K=budgets,
    )
    torch.testing.assert_close(out, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("landmark_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_int8_cache_gives_the_same_results_as_its_dequantised_copy(dtype, landmark_dtype):
    """Compare an int8 cache with a cache that holds the dequantised values in the model's dtype.
    The stored tokens, the landmarks and the decoded outputs must be equal.
    """
    torch.manual_seed(0)
    layout = PageLayout(4, landmark_dtype=landmark_dtype)
    B, K, G, D, N, blocks, tokens = 2, 2, 2, 8, 8, 7, 24
    length, top_k = (
        torch.tensor([24, 13], dtype=torch.int32),
        torch.tensor([1, 1], dtype=torch.int32),
    )
    table = torch.tensor([[5, 0, 3], [1, 6, 2]], dtype=torch.int32)
    keys, values = (
        (torch.randn(B * tokens, K, D) * 2.0 ** torch.randint(-6, 6, (B * tokens, K, 1))).to(dtype)
        for _ in "kv"
    )
    at = torch.arange(tokens)
    slots = table[:, at // N].long() * N + at % N
    slots = torch.where(at < length[:, None], slots, -1).flatten()
    k_cache, v_cache = torch.zeros(2, blocks, K, N, D, dtype=torch.int8)
    scales = CacheScales(*torch.full((2, blocks, K, N), 255, dtype=torch.uint8))
    reference.store_tokens(keys, values, k_cache, v_cache, slots, scales)
    wide = [
        from_int8(cache, scale, dtype)
        for cache, scale in ((k_cache, scales.k), (v_cache, scales.v))
    ]
    stored = [from_int8(*to_int8(x), dtype) for x in (keys, values)]
    for cache, x, new in zip(wide, stored, (keys, values), strict=True):
        assert torch.equal(
            cache[slots[24:37] // N, :, slots[24:37] % N], x[24:37]
        ) and not torch.equal(x, new)
        assert cache.isnan().sum() == (blocks * N - 37) * K * D
    marks = torch.zeros(blocks, N // 4, K, D, dtype=layout.landmark_type(dtype))
    expected = marks.clone()
    update_landmarks(
        CachedLayers([(k_cache, marks, scales.k)]), slots, layout=layout, implementation="reference"
    )
    update_landmarks(
        CachedLayers([(wide[0], expected)]), slots, layout=layout, implementation="reference"
    )
    assert torch.equal(marks.float(), expected.float()) and marks.float().any()
    marks.view(torch.uint8)[3, 1] = (
        0  # The newest token of the first row completes a page, so decoding writes its landmark.
    )
    q = torch.randn(B, K * G, D, dtype=dtype)
    rest = dict(layout=layout, implementation="reference", scale=0.3)
    out = paged_decode(
        q, k_cache, v_cache, marks, table, length, top_k, cache_scales=scales, **rest
    )
    assert torch.equal(out, paged_decode(q, *wide, expected, table, length, top_k, **rest))
    assert torch.equal(marks.float(), expected.float())
    exact = [x.double() for x in (q, *wide, expected)]
    layout = PageLayout(4)
    exact = paged_decode(*exact, table, length, top_k, **rest | dict(layout=layout))
    assert (out.double() - exact).norm() <= 4 * torch.finfo(dtype).eps * exact.norm()


def test_rows_of_length_zero_yield_zeros():
    layout = PageLayout(2)
    k = torch.ones(1, 1, 4, 8)
    v = torch.arange(4.0).view(1, 1, 4, 1).expand(1, 1, 4, 8).contiguous()
    marks = torch.ones(1, 2, 1, 8)
    q, out = torch.ones(2, 1, 8), torch.full((2, 1, 8), float("nan"))
    result = paged_decode(
        q,
        k,
        v,
        marks,
        torch.zeros(2, 1, dtype=torch.int32),
        torch.tensor([3, 0], dtype=torch.int32),
        torch.full((2,), ALL_PAGES, dtype=torch.int32),
        layout=layout,
        implementation="reference",
        out=out,
    )
    assert result is out
    assert out[0].eq(1.0).all()  # equal keys: the mean of 0, 1 and 2
    assert out[1].eq(0.0).all()


def test_landmark_is_written_only_when_the_last_slot_of_its_page_is_filled():
    layout = PageLayout(4)
    k = torch.arange(2 * 8.0).view(2, 1, 8, 1).expand(2, 1, 8, 2).contiguous()
    marks = torch.full((2, 2, 1, 2), -1.0)
    update_landmarks(
        CachedLayers([(k, marks)]),
        torch.tensor([-1, 2, 7, 11, 12]),
        layout=layout,
        implementation="reference",
    )
    # Slot 7 completes page 1 of block 0 (tokens 4 .. 7). Slot 11 completes page 0 of block 1
    # (tokens 8 .. 11).
    assert marks[..., 0, 0].tolist() == [[-1.0, 5.5], [9.5, -1.0]]
    update_landmarks(
        CachedLayers([(k, marks)]),
        torch.tensor([], dtype=torch.int64),
        layout=layout,
        implementation="reference",
    )
    assert torch.equal(marks[0, 1], landmarks(k[:1, :, 4:].unflatten(2, (1, 4)))[0, :, 0])


def test_layers_with_different_cache_layouts_raise_an_error():
    memory = torch.zeros(64)
    layers = [
        (memory[at : at + 16].view(1, 1, 4, 4), memory[:4].view(1, 1, 1, 4)) for at in (0, 8, 16)
    ]
    with pytest.raises(ValueError, match="there are no layers, expected the cache of at least one"):
        CachedLayers([])
    with pytest.raises(ValueError, match="but the 2 layers have 2 different kinds"):
        CachedLayers([layers[0], (layers[0][0], layers[0][1].double())])
    with pytest.raises(ValueError, match=r"\[8, 0\]\] elements apart, expected multiples of 16"):
        CachedLayers(layers[:2])
    assert CachedLayers(layers[::2]).distance_L3.tolist() == [[0, 0, 0], [16, 0, 0]]


def test_unknown_implementation_raises_an_error():
    k = torch.zeros(1, 1, 4, 2)
    with pytest.raises(ValueError, match="unknown implementation 'flash'"):
        update_landmarks(
            CachedLayers([(k, torch.zeros(1, 1, 1, 2))]),
            torch.tensor([3]),
            layout=PageLayout(4),
            implementation="flash",
        )


def test_inconsistent_shapes_raise_an_error():
    k, marks, q = torch.ones(1, 2, 4, 2), torch.zeros(1, 1, 2, 2), torch.ones(1, 4, 2)
    rows = (torch.zeros(1, 1, dtype=torch.int32), *(torch.ones(1, dtype=torch.int32),) * 2)
    options = dict(layout=PageLayout(4), implementation="reference")
    with pytest.raises(
        ValueError,
        match=r"must be a multiple of the number of kv heads.*got q \(1, 3, 2\), k \(1, 2, 4, 2\)",
    ):
        paged_decode(torch.ones(1, 3, 2), k, k, marks, *rows, **options)
    with pytest.raises(ValueError, match=r"shapes must agree.*v \(1, 2, 4, 1\)"):
        paged_decode(q, k, k[..., :1], marks, *rows, **options)
    with pytest.raises(ValueError, match=r"shapes must agree.*out \(1, 4, 1\)"):
        paged_decode(q, k, k, marks, *rows, out=q[..., :1], **options)
