"""Triton kernels for the cascade's draft loop (``cascade.CascadeDrafter``) and its guesses
(``history``, ``head``). They store each row's drafts in the current cycle, look up guesses, and
advance rows at different rates.

A row's history is its tokens followed by the drafts made so far. Guesses are looked up in this
history as in ``sparrow.model.history``.

The draft length may change every cycle, so kernels in a CUDA graph read it from the device
(``wanted``).

Shapes: B batch size, R CUDA graph rows (B or more), S the worker's maximum number of sequences, T
tokens per pass, G guesses per row, K drafts per cycle, N tokens and M blocks of the longest
sequence, V vocabulary.
"""

from __future__ import annotations

from vllm.triton_utils import tl, triton

from sparrow.decoding import LONGEST_LOOKUP

AT_ONCE = 4096
"""How many logits of a row, or tokens of a history, a Triton program handles at a time."""
LONGEST = tl.constexpr(LONGEST_LOOKUP)
SHORTEST = tl.constexpr(1)
"""Longest and shortest suffix to look up, in tokens (see ``sparrow.model.history``)."""
RANK = tl.constexpr(1 << 32)
"""Larger than any sequence length. Ranking matches by ``agreeing * RANK + place`` therefore puts
longer matches first, and prefers the latest of equally long ones.
"""


@triton.jit(do_not_specialize=["K"])
def begin_kernel(
    length_R,
    made_R,
    blocks_SM,
    blocks_stride,
    M,
    K,
    wanted,
    TOKENS: tl.constexpr,
):
    """Store the number of drafts. In the row's block table, put the null block right after the
    block of the cycle's last draft. Later tokens are then written to the null block.
    """
    row = tl.program_id(0).to(tl.int64)
    length = tl.load(length_R + row).to(tl.int64)
    beyond = (length - 1 + K - 1) // TOKENS + 1  # the block after the last draft's block
    is_there = (length > 0) & (beyond < M)
    tl.store(blocks_SM + row * blocks_stride + beyond, 0, mask=is_there)
    tl.store(made_R + row, 0)
    tl.store(wanted, K, mask=row == 0)


@triton.jit
def begin_history_kernel(
    index_R,
    newest_R,
    length_R,
    tokens_SN,
    tokens_stride,
    history_RN,
    history_stride,
    BLOCK: tl.constexpr,
):
    """Copy a row's tokens, including the newest, to its history."""
    row = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    index = tl.load(index_R + row).to(tl.int64)
    length = tl.load(length_R + row).to(tl.int64)
    at = part * BLOCK + tl.arange(0, BLOCK)
    is_token = (at < length) & (index >= 0)
    token = tl.load(tokens_SN + index * tokens_stride + at, mask=is_token, other=0)
    token = tl.where(at == length - 1, tl.load(newest_R + row), token)
    tl.store(history_RN + row * history_stride + at, token, mask=is_token)


@triton.jit
def _continuation(history_N, known, BLOCK: tl.constexpr):
    """Find the longest suffix of the first ``known`` tokens that also occurs earlier. Return the
    position right after its latest earlier occurrence, or -1 if there is none, and its length.
    """
    best = tl.zeros((), tl.int64) - 1
    for start in range(0, known, BLOCK):
        place = start + tl.arange(0, BLOCK).to(tl.int64)
        is_same = place < known
        agreeing = tl.zeros([BLOCK], tl.int64)
        for back in tl.static_range(1, LONGEST + 1):
            wanted = tl.load(history_N + known - back, mask=known >= back, other=-1)
            is_same = is_same & (place >= back) & (known >= back)
            token = tl.load(history_N + place - back, mask=is_same, other=-2)
            is_same = is_same & (token == wanted)
            agreeing += is_same.to(tl.int64)
        rank = tl.where(agreeing >= SHORTEST, agreeing * RANK + place, -1)
        best = tl.maximum(best, tl.max(rank, 0))
    return tl.where(best >= 0, best % RANK, -1), tl.where(best >= 0, best // RANK, 0)


@triton.jit
def look_up_kernel(
    length_R,
    made_R,
    wanted,
    history_RN,
    history_stride,
    guesses_RG,
    matched_R,
    G,
    GP: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Look up guesses for the tokens after a row's newest token, unless the row already has all its
    drafts. If fewer tokens than guesses follow the match, the guesses repeat these tokens. Also
    store the number of matching tokens. Without a match, this number and all guesses are 0.
    """
    row = tl.program_id(0).to(tl.int64)
    begun = tl.load(length_R + row).to(tl.int64)
    made = tl.load(made_R + row).to(tl.int64)
    known = tl.where((begun > 0) & (made < tl.load(wanted)), begun + made, 0)
    history_N = history_RN + row * history_stride
    first, matched = _continuation(history_N, known, BLOCK)
    tl.store(matched_R + row, matched.to(tl.int32))
    g = tl.arange(0, GP)
    # Without a match, ``first`` is -1, so the period is never 0.
    period = known - first
    token = tl.load(history_N + first + g % period, mask=(g < G) & (first >= 0), other=0)
    tl.store(guesses_RG + row * G + g, token.to(tl.int64), mask=g < G)


@triton.jit
def extend_history_kernel(
    drawn_RT,
    length_R,
    made_R,
    kept_R,
    history_RN,
    history_stride,
    T: tl.constexpr,
    TP: tl.constexpr,
):
    """Append the drafts of the latest pass to a row's history."""
    row = tl.program_id(0).to(tl.int64)
    kept = tl.load(kept_R + row).to(tl.int64)
    before = tl.load(length_R + row).to(tl.int64) + tl.load(made_R + row).to(tl.int64) - kept
    t = tl.arange(0, TP)
    drawn = tl.load(drawn_RT + row * T + t, mask=t < T, other=0)
    tl.store(history_RN + row * history_stride + before + t, drawn.to(tl.int32), mask=t < kept)


@triton.jit
def head_step_kernel(
    length_R,
    made_R,
    wanted,
    guesses_RG,
    G,
    step,
    ids_R,
    positions_R,
    slots_R,
    lengths_R,
    blocks_SM,
    blocks_stride,
    limit,
    T: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Set up the head's step number ``step``, counting from 1. In this step, the head reads guess
    number ``step`` of each row and makes the next guess, up to T - 1 guesses. The head stores token
    n + 1 in the slot of token n. The same rows take part as in ``set_up_kernel``.
    """
    row = tl.program_id(0).to(tl.int64)
    begun = tl.load(length_R + row).to(tl.int64)
    made = tl.load(made_R + row).to(tl.int64)
    known = begun + made
    takes_part = (begun > 0) & (made < tl.load(wanted)) & (known - 1 + T <= limit)
    position = tl.where(takes_part, known - 2 + step, 0)
    block = tl.load(
        blocks_SM + row * blocks_stride + position // TOKENS, mask=takes_part, other=0
    ).to(tl.int64)
    slot = tl.where(takes_part, block * TOKENS + position % TOKENS, -1)
    guess = tl.load(guesses_RG + row * G + step - 1)
    tl.store(ids_R + row, tl.where(takes_part, guess, 0).to(tl.int32))
    tl.store(positions_R + row, position)
    tl.store(slots_R + row, slot)
    tl.store(lengths_R + row, tl.where(takes_part, position + 1, 0).to(tl.int32))


@triton.jit
def set_up_kernel(
    index_R,
    newest_R,
    length_R,
    made_R,
    drafts_SK,
    drafts_stride,
    guesses_RG,
    guesses_stride,
    ids_RT,
    positions_RT,
    slots_RT,
    index_RT,
    place_RT,
    lengths_R,
    top_k_R,
    top_k_at_length,
    blocks_SM,
    blocks_stride,
    limit,
    wanted,
    T: tl.constexpr,
    TP: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Set up a row's sparse pass over its newest token and the guesses for the tokens after it.

    A row sits out the pass if it does not draft, already has all its drafts, or would exceed the
    context length of ``limit`` tokens.
    """
    row = tl.program_id(0).to(tl.int64)
    K = tl.load(wanted)
    begun = tl.load(length_R + row).to(tl.int64)
    made = tl.load(made_R + row).to(tl.int64)
    known = begun + made
    takes_part = (begun > 0) & (made < K) & (known - 1 + T <= limit)
    index = tl.load(index_R + row).to(tl.int64)
    known = tl.where(takes_part, known, 0)

    t = tl.arange(0, TP)
    is_token = t < T
    newest = tl.load(newest_R + row).to(tl.int64)
    latest = tl.load(
        drafts_SK + row * drafts_stride + made - 1, mask=takes_part & (made > 0), other=0
    ).to(tl.int64)
    guess = tl.load(
        guesses_RG + row * guesses_stride + t - 1, mask=is_token & (t > 0) & takes_part, other=0
    )
    first = tl.where(made > 0, latest, tl.where(takes_part, newest, 0))
    token = tl.where(t == 0, first, guess)
    position = tl.maximum(known - 1, 0) + t
    block = tl.load(
        blocks_SM + row * blocks_stride + position // TOKENS, mask=is_token & takes_part, other=0
    ).to(tl.int64)
    slot = tl.where(takes_part, block * TOKENS + position % TOKENS, -1)
    is_place = takes_part & (made + t < K)

    out = row * T + t
    tl.store(ids_RT + out, token.to(tl.int32), mask=is_token)
    tl.store(positions_RT + out, tl.where(takes_part, position, 0), mask=is_token)
    tl.store(slots_RT + out, slot, mask=is_token)
    tl.store(index_RT + out, tl.where(is_place, index, -1), mask=is_token)
    tl.store(place_RT + out, tl.where(is_place, made + t, 0), mask=is_token)
    tl.store(lengths_R + row, tl.where(takes_part, known - 1 + T, 0))
    tl.store(top_k_R + row, tl.load(top_k_at_length + known))


@triton.jit
def advance_kernel(
    drawn_RT,
    ids_RT,
    lengths_R,
    length_R,
    made_R,
    kept_R,
    drafts_SK,
    drafts_stride,
    decoded,
    wanted,
    T: tl.constexpr,
    TP: tl.constexpr,
):
    """Keep the drawn tokens up to and including the first one that differs from its guess. Append
    them to the row's drafts, and count the pass.

    ``decoded`` counts rows by length (see ``DecodedRows``).
    """
    row = tl.program_id(0).to(tl.int64)
    K = tl.load(wanted)
    takes_part = tl.load(lengths_R + row) > 0
    made = tl.load(made_R + row).to(tl.int64)
    known = tl.load(length_R + row).to(tl.int64) + made
    t = tl.arange(0, TP)
    drawn = tl.load(drawn_RT + row * T + t, mask=t < T, other=0)
    guess = tl.load(ids_RT + row * T + t + 1, mask=t + 1 < T, other=-1)
    kept = tl.min(tl.where((t + 1 < T) & (drawn == guess), TP, t), 0)
    count = tl.where(takes_part, tl.minimum(kept + 1, K - made), 0)
    tl.store(drafts_SK + row * drafts_stride + made + t, drawn, mask=t < count)
    tl.store(made_R + row, (made + count).to(tl.int32))
    tl.store(kept_R + row, count.to(tl.int32))
    tl.atomic_add(decoded + known, 1, mask=takes_part, sem="relaxed")


@triton.jit(do_not_specialize=["K"])
def fill_kernel(
    index_R,
    made_R,
    guesses_RG,
    guesses_stride,
    drafts_SK,
    drafts_stride,
    drawn_S,
    counts,
    K,
    KP: tl.constexpr,
):
    """Top up a row's drafts with guesses if its passes made too few, and count its drafts and
    guesses (see ``DensePasses.count_drafts``).
    """
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(index_R + row).to(tl.int64)
    drafts = index >= 0
    made = tl.load(made_R + row).to(tl.int64)
    place = tl.arange(0, KP)
    is_empty = drafts & (place >= made) & (place < K)
    guess = tl.load(guesses_RG + row * guesses_stride + place - made, mask=is_empty, other=0)
    tl.store(drafts_SK + row * drafts_stride + place, guess, mask=is_empty)
    tl.store(drawn_S + index, made, mask=drafts)
    tl.atomic_add(counts, K, mask=drafts, sem="relaxed")
    tl.atomic_add(counts + 1, K - made, mask=drafts, sem="relaxed")


@triton.jit(do_not_specialize=["K"])
def count_drawn_kernel(index_R, drawn_S, counts, K):
    """Count a row's drafts in a cycle without guesses. All of them are drawn."""
    row = tl.program_id(0).to(tl.int64)
    index = tl.load(index_R + row).to(tl.int64)
    tl.store(drawn_S + index, tl.full((), K, tl.int64), mask=index >= 0)
    tl.atomic_add(counts, K, mask=index >= 0, sem="relaxed")


@triton.jit(do_not_specialize=["K"])
def one_hot_kernel(
    index_R,
    made_R,
    drafts_SK,
    drafts_stride,
    logits_SKV,
    stride_S,
    stride_K,
    K,
    V,
    BLOCK: tl.constexpr,
):
    """Write one-hot logits for drafts that are guesses, as if each were certain to be drawn."""
    row = (tl.program_id(0) // K).to(tl.int64)
    place = tl.program_id(0) % K
    index = tl.load(index_R + row).to(tl.int64)
    made = tl.load(made_R + row)
    if (index >= 0) & (place >= made):
        token = tl.load(drafts_SK + row * drafts_stride + place)
        word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        logit = tl.where(word == token, 0.0, -float("inf"))
        tl.store(
            logits_SKV + index * stride_S + place * stride_K + word,
            logit,
            mask=word < V,
        )
