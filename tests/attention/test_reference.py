"""Test the reference attention against a loop over rows, heads and tokens, and test decoding
against teacher forcing.

Queries and keys are small multiples of 1/2, and page and group sizes are powers of two, so page
scores are exact in float32. No selection depends on rounding, and ties are common.

Shapes: B sequences, T query tokens, S cached tokens, H query heads, K kv heads, G = H / K, D head
dim, P page size, N pages.
"""

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sparrow import attention
from sparrow.attention import PageLayout, decode, decode_several, reference
from sparrow.schedule import ALL_PAGES

teacher_forced = partial(attention.teacher_forced, implementation="reference")
HEADS = {"mha": (4, 4), "gqa": (4, 2), "mqa": (4, 1)}
LENGTHS = [1, 15, 16, 17, 47, 48, 49, 130]
POISON = 1e4


def halves(*shape: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-4, 5, shape, generator=generator).double() / 2


def cache(B, H, K, S, D, seed=0):
    """Return q ``[B, H, S, D]`` and k ``[B, K, S, D]`` in multiples of 1/2, and random v
    ``[B, K, S, D]``, all in float64.
    """
    generator = torch.Generator().manual_seed(seed)
    q_BHSD, k_BKSD = (
        halves(B, H, S, D, generator=generator),
        halves(B, K, S, D, generator=generator),
    )
    return q_BHSD, k_BKSD, torch.randn(B, K, S, D, generator=generator, dtype=torch.float64)


def poison(tensors, start_B, length_B, value=POISON):
    """Overwrite everything outside each row's sequence."""
    column_S = torch.arange(tensors[0].shape[2])
    outside_BS = (column_S < start_B[:, None]) | (column_S >= (start_B + length_B)[:, None])
    return [t.masked_fill(outside_BS[:, None, :, None], value) for t in tensors]


def dot(x, y):
    return math.fsum(a * b for a, b in zip(x, y, strict=True))


def attend(q_HD, k_KSD, v_KSD, top_k, layout, scale):
    """Apply section 2 of the paper to the newest token of one sequence, in plain Python floats.

    Returns: ``out[H][D]``, ``weights[H]`` (token -> weight), and the smallest difference in score
    between a selected page and one that is not selected.
    """
    dtype, P = k_KSD.dtype, layout.page_size
    H, K, S, D = len(q_HD), *k_KSD.shape
    G, N = H // K, -(-S // P)
    q, k, v = q_HD.double().tolist(), k_KSD.double().tolist(), v_KSD.double().tolist()
    out, weights, gap = [], [], math.inf
    for h in range(H):
        group = [q[(h // G) * G + g] for g in range(G)]
        keys, values = k[h // G], v[h // G]
        score = []
        for n in range(S // P):
            page = keys[n * P : (n + 1) * P]
            mean = [math.fsum(key[d] for key in page) / P for d in range(D)]
            landmark = torch.tensor(mean, dtype=torch.float32).to(dtype).tolist()
            score.append(
                dot([math.fsum(query[d] for query in group) / G for d in range(D)], landmark)
            )
        ends = {n for n in range(N) if n < layout.sink_pages or n >= N - layout.recent_pages}
        ranked = sorted(set(range(N)) - ends, key=lambda n: (-score[n], n))
        best, rest = ranked[:top_k], ranked[top_k:]
        if best and rest:
            gap = min(gap, score[best[-1]] - score[rest[0]])
        tokens = [t for t in range(S) if t // P in ends | set(best)]
        logit = [scale * dot(q[h], keys[t]) for t in tokens]
        total = math.fsum(math.exp(x - max(logit)) for x in logit)
        weight = {t: math.exp(x - max(logit)) / total for t, x in zip(tokens, logit, strict=True)}
        out.append([math.fsum(w * values[t][d] for t, w in weight.items()) for d in range(D)])
        weights.append(weight)
    return torch.tensor(out, dtype=torch.float64), weights, gap


def attend_rows(q_BHD, k_BKSD, v_BKSD, start_B, length_B, top_k_B, layout, scale):
    """Apply ``attend`` to every row; return ``[B, H, D]``."""
    rows = []
    for b, (start, length) in enumerate(zip(start_B.tolist(), length_B.tolist(), strict=True)):
        own = slice(start, start + length)
        rows.append(
            attend(q_BHD[b], k_BKSD[b, :, own], v_BKSD[b, :, own], int(top_k_B[b]), layout, scale)[
                0
            ]
        )
    return torch.stack(rows)


# --- decode ---


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("top_k", [0, 1, 3, ALL_PAGES])
def test_decoding_ragged_rows_matches_a_naive_loop(heads, top_k):
    H, K = HEADS[heads]
    layout, D = PageLayout(), 8
    length = torch.tensor(LENGTHS)
    start = torch.tensor([0, 3, 16, 0, 20, 1, 7, 5])
    S = 150
    q, k, v = cache(len(LENGTHS), H, K, S, D)
    k, v = poison((k, v), start, length)
    q, top = q[:, :, 0], torch.full((len(LENGTHS),), top_k)
    out = decode(q, k, v, start, length, top, layout=layout)
    assert out.shape == (len(LENGTHS), H, D) and out.dtype == torch.float64
    expected = attend_rows(q, k, v, start, length, top, layout, D**-0.5)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    single = decode(q.float(), k.float(), v.float(), start, length, top, layout=layout)
    assert single.dtype == torch.float32
    torch.testing.assert_close(single.double(), expected, rtol=0, atol=1e-5)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_decoding_with_any_page_layout_matches_a_naive_loop(data):
    B, K, G = (
        data.draw(st.integers(1, 3)),
        data.draw(st.integers(1, 2)),
        data.draw(st.sampled_from([1, 2, 4])),
    )
    layout = PageLayout(
        page_size=data.draw(st.sampled_from([1, 2, 4, 8])),
        sink_pages=data.draw(st.integers(0, 2)),
        recent_pages=data.draw(st.integers(1, 3)),
    )
    rows = [(data.draw(st.integers(0, 6)), data.draw(st.integers(1, 40))) for _ in range(B)]
    start, length = (torch.tensor(x) for x in zip(*rows, strict=True))
    top_k = torch.tensor(
        [data.draw(st.integers(0, 8) | st.just(ALL_PAGES)) for _ in rows], dtype=torch.int32
    )
    S = int((start + length).max()) + data.draw(st.integers(0, 5))
    q, k, v = cache(B, K * G, K, S, 4, seed=data.draw(st.integers(0, 2**31)))
    k, v = poison((k, v), start, length)
    scale = data.draw(st.sampled_from([0.1, 0.5, 2.0]))
    out = decode(q[:, :, 0], k, v, start, length, top_k, layout=layout, scale=scale)
    expected = attend_rows(q[:, :, 0], k, v, start, length, top_k, layout, scale)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def attend_several(q_HTD, k_KSD, v_KSD, top_k, layout, scale):
    """Return the attention output of a sequence's T newest tokens, ``[H, T, D]``. The first of
    them reads the pages that ``attend`` selects. Each later token reads these pages and all new
    tokens up to itself.
    """
    H, T, D = q_HTD.shape
    G, first = H // len(k_KSD), k_KSD.shape[1] - T + 1
    own = k_KSD[:, :first], v_KSD[:, :first]
    _, weights, _ = attend(q_HTD[:, 0], *own, top_k, layout, scale)
    out = torch.zeros(H, T, D, dtype=torch.float64)
    for h in range(H):
        for t in range(T):
            tokens = [*weights[h], *range(first, first + t)]
            weight = (scale * (k_KSD[h // G, tokens] @ q_HTD[h, t])).softmax(0)
            out[h, t] = weight @ v_KSD[h // G, tokens]
    return out


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("top_k", [0, 2, ALL_PAGES])
@pytest.mark.parametrize("T", [2, 4, 9])
def test_all_new_tokens_read_the_pages_selected_for_the_first(heads, top_k, T):
    H, K = HEADS[heads]
    layout, D = PageLayout(page_size=8), 8
    length = torch.tensor([T, 15, 16, 17, 47, 48, 49, 130])
    start = torch.tensor([0, 3, 16, 0, 20, 1, 7, 5])
    q, k, v = cache(len(length), H, K, 150, D)
    k, v = poison((k, v), start, length)
    top = torch.full((len(length),), top_k)
    out = decode_several(q[:, :, :T], k, v, start, length, top, layout=layout)
    for b, (begin, tokens) in enumerate(zip(start.tolist(), length.tolist(), strict=True)):
        own = slice(begin, begin + tokens)
        expected = attend_several(q[b, :, :T], k[b, :, own], v[b, :, own], top_k, layout, D**-0.5)
        torch.testing.assert_close(out[b], expected, rtol=0, atol=1e-12)


BUDGETS = torch.tensor([0, 640], dtype=torch.int32)  # 0 and 2.5 times top_k, in 1/256


def by_kv_head(x, head):
    """Return only the query heads of kv head ``head``, which is 0 or 1."""
    return x.unflatten(1, (2, -1))[:, head]


@pytest.mark.parametrize("top_k", [0, 1, 3, 40, ALL_PAGES])
def test_each_kv_head_follows_its_own_budget(top_k):
    length, start = torch.tensor(LENGTHS), torch.tensor([0, 3, 16, 0, 20, 1, 7, 5])
    q, k, v = cache(len(LENGTHS), 4, 2, 150, 8)
    k, v = poison((k, v), start, length)
    layout, top = PageLayout(page_size=8), torch.full((len(LENGTHS),), top_k)
    out = decode(q[:, :, 0], k, v, start, length, top, layout=layout, head_budgets_K=BUDGETS)
    own = {0: (0, 0), 1: (0, 3), 3: (0, 8), 40: (0, 100), ALL_PAGES: (ALL_PAGES, ALL_PAGES)}[top_k]
    for head, pages in enumerate(own):
        of_head = (by_kv_head(q[:, :, 0], head), k[:, head : head + 1], v[:, head : head + 1])
        expected = attend_rows(
            *of_head, start, length, torch.full_like(top, pages), layout, 8**-0.5
        )
        torch.testing.assert_close(by_kv_head(out, head), expected, rtol=0, atol=1e-12)


def test_budgets_for_the_wrong_number_of_heads_raise_an_error():
    q, k, v = cache(1, 4, 2, 40, 8)
    one, options = torch.tensor([40]), dict(layout=PageLayout(), head_budgets_K=BUDGETS[:1])
    for refused in (
        lambda: decode(q[:, :, 0], k, v, None, one, one, **options),
        lambda: teacher_forced(
            q, k, v, one * 0, one, one, torch.zeros(1, 40, dtype=torch.long), **options
        ),
    ):
        with pytest.raises(
            ValueError,
            match=r"head_budgets_K must be contiguous int32 \[2\] on cpu, got torch.int32",
        ):
            refused()


def test_rows_start_at_column_zero_by_default():
    length = torch.tensor([49, 17])
    q, k, v = cache(2, 4, 2, 60, 8)
    arguments = dict(length_B=length, top_k_B=torch.tensor([1, 0]), layout=PageLayout())
    without = decode(q[:, :, 0], k, v, None, **arguments)
    assert torch.equal(
        without, decode(q[:, :, 0], k, v, torch.zeros(2, dtype=torch.long), **arguments)
    )


def test_unselected_pages_are_not_read():
    # 98 tokens take seven pages of 16. Four are kept: the sink, the best page by score, and the two
    # recent pages.
    q, k, v = cache(1, 2, 1, 112, 8)
    q, length, top_k, layout = q[:, :, 97], torch.tensor([98]), torch.tensor([1]), PageLayout()
    out = decode(q, k, v, None, length, top_k, layout=layout)
    read = {t // 16 for t in attend(q[0], k[0, :, :98], v[0, :, :98], 1, layout, 8**-0.5)[1][0]}
    assert len(read) == 4 and {0, 5, 6} < read
    for page in range(7):
        changed = v.clone()
        changed[:, :, page * 16 : page * 16 + 16] += 1.0
        assert torch.equal(decode(q, k, changed, None, length, top_k, layout=layout), out) == (
            page not in read
        )


def test_cache_contents_outside_the_sequence_have_no_effect():
    q, k, v = cache(1, 4, 2, 112, 8)
    start, length, top_k = torch.tensor([5]), torch.tensor([64]), torch.tensor([0])
    clean = decode(q[:, :, 0], k, v, start, length, top_k, layout=PageLayout())
    k, v = poison((k, v), start, length, value=float("nan"))
    assert torch.equal(decode(q[:, :, 0], k, v, start, length, top_k, layout=PageLayout()), clean)


def test_bfloat16_decoding_error_is_within_the_rounding_bound():
    """Rounding to bfloat16 has a relative error of at most u = 2**-8. q, k, each logit, each
    weight, the sum of the weights and the output are rounded at most once. So a logit is off by at
    most delta = 3 u scale sum_d |q_d k_d|, and a weight by a factor of at most exp(2 delta + 2 u).
    Rounding the output adds another u.
    """
    u, D, layout = 2**-8, 8, PageLayout(page_size=8)
    length = torch.tensor([1, 7, 8, 49, 130])
    start, top_k = torch.tensor([0, 4, 1, 0, 9]), torch.tensor([2, 2, 2, 2, 4])
    q, k, v = (x.bfloat16() for x in cache(5, 4, 2, 140, D))
    q = q[:, :, 0]
    out = decode(q, k, v, start, length, top_k, layout=layout)
    assert out.dtype == torch.bfloat16
    for b in range(5):
        own = slice(int(start[b]), int(start[b] + length[b]))
        expected, weights, _ = attend(
            q[b], k[b, :, own], v[b, :, own], int(top_k[b]), layout, D**-0.5
        )
        for h, weight in enumerate(weights):
            key, value, tokens = (
                k[b, h // 2, own].double(),
                v[b, h // 2, own].double(),
                list(weight),
            )
            delta = 3 * u * D**-0.5 * float((q[b, h].double() * key[tokens]).abs().sum(-1).max())
            spread = (
                torch.tensor(list(weight.values()), dtype=torch.float64)[:, None]
                * value[tokens].abs()
            ).sum(0)
            assert (
                (out[b, h].double() - expected[h]).abs() <= math.expm1(2 * delta + 3 * u) * spread
            ).all()
            assert delta < 0.1, "with a larger bound, a wrong page would go unnoticed"


def test_autocast_gives_the_same_output_as_casting_the_inputs_beforehand():
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(10, heads, 200, 8, generator=generator) for heads in (8, 4, 4))
    start, length, prompt = (torch.full((10,), n) for n in (0, 200, 0))
    top_k, layout = torch.full((10, 200), 15), PageLayout(page_size=4)

    def both(q, k, v):
        step = decode(q[:, :, -1], k, v, None, length, top_k[:, -1], layout=layout)
        return step, teacher_forced(q, k, v, start, length, prompt, top_k, layout=layout)

    with torch.autocast("cpu", torch.bfloat16):
        found = both(
            q, k, v.bfloat16()
        )  # as in a model that applies its rotary embedding in float32
    for out, expected in zip(found, both(*(x.bfloat16() for x in (q, k, v))), strict=True):
        assert torch.equal(out, expected)


# --- teacher forcing ---

T = 45
START, LENGTH, PROMPT = (
    torch.tensor([0, 5, 13]),
    torch.tensor([45, 39, 30]),
    torch.tensor([9, 1, 21]),
)


def step_by_step(q_BHTD, k_BKTD, v_BKTD, top_k_BT, layout, budgets=None):
    """Decode step by step; step t decodes token t of every row that is long enough. Prompt
    positions read everything.
    """
    out = torch.zeros_like(q_BHTD)
    for t in range(int(LENGTH.max())):
        row = (t < LENGTH).nonzero()[:, 0]
        column = START[row] + t
        length, pages = (
            torch.full_like(row, t + 1),
            torch.where(t < PROMPT[row], ALL_PAGES, top_k_BT[row, column]),
        )
        q_BHD, k_BKSD, v_BKSD = q_BHTD[row, :, column], k_BKTD[row], v_BKTD[row]
        out[row, :, column] = decode(
            q_BHD, k_BKSD, v_BKSD, START[row], length, pages, layout=layout, head_budgets_K=budgets
        )
    return out


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pages", [0, 2, ALL_PAGES])
def test_teacher_forcing_matches_decoding_position_by_position(heads, pages):
    H, K = HEADS[heads]
    layout = PageLayout(page_size=4)
    q, k, v = poison(cache(3, H, K, T, 8), START, LENGTH)
    top_k = torch.full((3, T), pages)
    out = teacher_forced(q, k, v, START, LENGTH, PROMPT, top_k, layout=layout)
    expected = step_by_step(q, k, v, top_k, layout)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    dense = teacher_forced(
        q, k, v, START, LENGTH, PROMPT, torch.full((3, T), ALL_PAGES), layout=layout
    )
    assert ((out - dense).abs().max() > 0.05) == (pages != ALL_PAGES)


def test_teacher_forcing_accepts_per_column_page_counts_and_any_chunk_size():
    layout = PageLayout(page_size=4)
    q, k, v = poison(cache(3, 4, 2, T, 8), START, LENGTH)
    top_k = torch.arange(T).expand(3, T) // 10 + torch.arange(3)[:, None]
    expected = step_by_step(q, k, v, top_k, layout)
    for query_chunk in (1, 13, T, 256):
        out = reference.teacher_forced(
            q, k, v, START, LENGTH, PROMPT, top_k, layout, 8**-0.5, query_chunk
        )
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


def test_teacher_forcing_follows_the_same_budgets_as_decoding():
    layout = PageLayout(page_size=4)
    q, k, v = poison(cache(3, 4, 2, T, 8), START, LENGTH)
    top_k = torch.arange(T).expand(3, T) // 10 + torch.arange(3)[:, None]
    out = teacher_forced(
        q, k, v, START, LENGTH, PROMPT, top_k, layout=layout, head_budgets_K=BUDGETS
    )
    torch.testing.assert_close(
        out, step_by_step(q, k, v, top_k, layout, BUDGETS), rtol=0, atol=1e-12
    )
    even = teacher_forced(q, k, v, START, LENGTH, PROMPT, top_k, layout=layout)
    assert all((by_kv_head(out - even, head).abs().amax() > 0.05) for head in range(2))


@pytest.mark.parametrize("tokens", [2, 3, 7])
def test_teacher_forcing_matches_multi_token_decoding(tokens):
    layout = PageLayout(page_size=4)
    q, k, v = poison(cache(3, 4, 2, T, 8), START, LENGTH)
    top_k = torch.arange(T).expand(3, T) // 10 + torch.arange(3)[:, None]
    out = teacher_forced(q, k, v, START, LENGTH, PROMPT, top_k, layout=layout, tokens=tokens)
    expected = step_by_step(q, k, v, top_k, layout)
    alone = expected.clone()
    for b, (start, length, prompt) in enumerate(
        zip(START.tolist(), LENGTH.tolist(), PROMPT.tolist(), strict=True)
    ):
        for first in range(prompt, length, tokens):
            end = min(first + tokens, length)
            step = slice(start + first, start + end)
            expected[b, :, step] = decode_several(
                q[b : b + 1, :, step],
                k[b : b + 1],
                v[b : b + 1],
                START[b : b + 1],
                torch.tensor([end]),
                top_k[b : b + 1, start + first],
                layout=layout,
            )
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
    assert (out - alone).abs().max() > 0.05
    with pytest.raises(ValueError, match="at least one token, got tokens=0"):
        teacher_forced(q, k, v, START, LENGTH, PROMPT, top_k, layout=layout, tokens=0)


def test_prompt_uses_dense_causal_attention():
    q, k, v = cache(2, 4, 2, 70, 8)
    start, length = torch.tensor([0, 0]), torch.tensor([70, 70])
    top_k = torch.zeros(2, 70, dtype=torch.long)
    out = teacher_forced(
        q, k, v, start, length, torch.tensor([70, 66]), top_k, layout=PageLayout(page_size=8)
    )
    logits = 8**-0.5 * q @ k.repeat_interleave(2, 1).mT
    logits = logits.masked_fill(torch.ones(70, 70, dtype=torch.bool).triu(1), -math.inf)
    dense = logits.softmax(-1) @ v.repeat_interleave(2, 1)
    torch.testing.assert_close(out[0], dense[0], rtol=0, atol=1e-12)
    torch.testing.assert_close(out[1, :, :66], dense[1, :, :66], rtol=0, atol=1e-12)
    assert (out[1, :, 66:] - dense[1, :, 66:]).abs().max() > 0.05


def test_padding_positions_have_zero_output_and_zero_gradient():
    q, k, v = (x.requires_grad_() for x in poison(cache(3, 4, 2, T, 8), START, LENGTH))
    top_k = torch.ones(3, T, dtype=torch.long)
    out = teacher_forced(q, k, v, START, LENGTH, PROMPT, top_k, layout=PageLayout(page_size=4))
    out.square().sum().backward()
    column = torch.arange(T)
    real = ((column >= START[:, None]) & (column < (START + LENGTH)[:, None]))[:, None, :, None]
    for x in (out, q.grad, k.grad, v.grad):
        assert x.masked_fill(real, 0.0).count_nonzero() == 0
        assert x.isfinite().all() and x.count_nonzero() > 0


def test_gradients_match_finite_differences():
    layout = PageLayout(page_size=2, sink_pages=0, recent_pages=1)
    start, length, prompt = torch.tensor([0, 2]), torch.tensor([9, 6]), torch.tensor([2, 1])
    generator = torch.Generator().manual_seed(3)
    q, k, v = (torch.randn(2, n, 9, 2, generator=generator, dtype=torch.float64) for n in (2, 1, 1))
    gaps = []
    for b in range(2):
        for t in range(int(prompt[b]), int(length[b])):
            own, column = slice(int(start[b]), int(start[b]) + t + 1), int(start[b]) + t
            gaps.append(attend(q[b, :, column], k[b, :, own], v[b, :, own], 1, layout, 1.0)[2])
    assert sum(math.isfinite(gap) for gap in gaps) == 7, "the test needs pages that are left out"
    assert min(gaps) > 1e-3, "finite differences of 1e-6 must not change the selection"
    top_k = torch.ones(2, 9, dtype=torch.long)
    inputs = [x.requires_grad_() for x in (q, k, v)]
    assert torch.autograd.gradcheck(
        lambda q, k, v: teacher_forced(q, k, v, start, length, prompt, top_k, layout=layout),
        inputs,
        atol=1e-7,
        rtol=1e-5,
    )


# --- invalid arguments of the public operations ---


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((2, 4, 8), (2, 3, 20, 8), (2, 3, 20, 8)),  # 4 query heads cannot be split into 3 groups
        ((2, 4, 8), (2, 2, 20, 8), (2, 2, 19, 8)),  # fewer values than keys
        ((3, 4, 8), (2, 2, 20, 8), (2, 2, 20, 8)),  # more queries than sequences
        ((2, 4, 4), (2, 2, 20, 8), (2, 2, 20, 8)),  # different head dims
    ],
)
def test_inconsistent_shapes_raise_an_error(q, k, v):
    q_BHD, k_BKSD, v_BKSD = torch.zeros(q), torch.zeros(k), torch.zeros(v)
    B, S = k[0], k[2]
    start, length = torch.zeros(B, dtype=torch.long), torch.full((B,), 19)
    message = r"must be a multiple of the number of kv heads, and shapes must agree; got q \(.*\), k \(.*\), v \(.*\)"
    with pytest.raises(ValueError, match=message):
        decode(q_BHD, k_BKSD, v_BKSD, start, length, length, layout=PageLayout())
    with pytest.raises(ValueError, match=message):
        q_BHTD = q_BHD[:, :, None].expand(-1, -1, S, -1)
        teacher_forced(
            q_BHTD,
            k_BKSD,
            v_BKSD,
            start,
            length,
            length,
            length[:, None].expand(B, S),
            layout=PageLayout(),
        )


@pytest.mark.parametrize(("B", "T"), [(0, 5), (2, 0)])
def test_teacher_forcing_of_an_empty_batch_can_be_differentiated(B, T):
    q = torch.zeros(B, 2, T, 4, requires_grad=True)
    k = torch.zeros(B, 1, T, 4)
    length = torch.zeros(B, dtype=torch.long)
    top_k = torch.zeros(B, T, dtype=torch.long)
    out = teacher_forced(q, k, k, length, length, length, top_k, layout=PageLayout())
    assert out.shape == q.shape
    out.sum().backward()


def test_decoding_an_empty_batch_gives_an_empty_result():
    k = torch.zeros(0, 1, 16, 4)
    length = torch.zeros(0, dtype=torch.long)
    for q, of in ((torch.zeros(0, 2, 4), decode), (torch.zeros(0, 2, 3, 4), decode_several)):
        assert of(q, k, k, None, length, length, layout=PageLayout()).shape == q.shape


def test_teacher_forcing_rejects_more_keys_than_queries():
    q, k, length = torch.zeros(1, 2, 5, 4), torch.zeros(1, 2, 9, 4), torch.tensor([5])
    with pytest.raises(ValueError, match="as many queries as keys, got 5 queries and 9 keys"):
        teacher_forced(
            q,
            k,
            k,
            length * 0,
            length,
            length,
            torch.zeros(1, 5, dtype=torch.long),
            layout=PageLayout(),
        )
