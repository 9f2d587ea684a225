"""Triton kernels that update a paged cache. They store new tokens and the landmarks of the pages
that these tokens complete.

Shapes: K kv heads, D head dim (padded to DP), P page size, PER_BLOCK pages per cache block.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["count"], do_not_specialize_on_alignment=["slots"])
def landmark_kernel(
    k_cache,
    landmarks,
    scales,
    distances,
    slots,
    count,
    stride_block,
    stride_head,
    stride_token,
    stride_mark_block,
    stride_mark_page,
    stride_mark_head,
    stride_scale_block,
    stride_scale_head,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    SLOTS: tl.constexpr,
):
    """Recompute mean keys in one layer, for each page whose last slot is among this program's
    ``SLOTS`` slots.

    ``scales`` holds the scales of int8 keys. It is None for other dtypes.
    """
    head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2)
    k_cache += tl.multiple_of(tl.load(distances + 3 * layer), 16)
    landmarks += tl.multiple_of(tl.load(distances + 3 * layer + 1), 16)
    if scales is not None:
        scales += tl.multiple_of(tl.load(distances + 3 * layer + 2), 16)
    i = tl.program_id(0) * SLOTS + tl.arange(0, SLOTS)
    slot = tl.load(slots + i, mask=i < count, other=-1).to(tl.int64)
    pending = tl.where((slot >= 0) & (slot % P == P - 1), slot // P, -1)
    page = tl.max(pending, 0)
    while page >= 0:
        block = page // PER_BLOCK
        _write_mean(
            k_cache + block * stride_block + head * stride_head,
            landmarks
            + block * stride_mark_block
            + page % PER_BLOCK * stride_mark_page
            + head * stride_mark_head,
            scales,
            block * stride_scale_block + head * stride_scale_head,
            page % PER_BLOCK,
            stride_token,
            D,
            DP,
            P,
        )
        pending = tl.where(pending == page, -1, pending)
        page = tl.max(pending, 0)


@triton.jit
def store_kernel(
    key,
    value,
    k_cache,
    v_cache,
    k_scales,
    v_scales,
    clipped,
    slots,
    stride_key_row,
    stride_key_head,
    stride_value_row,
    stride_value_head,
    stride_block,
    stride_head,
    stride_token,
    stride_scale_block,
    stride_scale_head,
    K: tl.constexpr,
    KP: tl.constexpr,
    D: tl.constexpr,
    DP: tl.constexpr,
    TOKENS: tl.constexpr,
    PDL: tl.constexpr,
    LEAST: tl.constexpr,
    MOST: tl.constexpr,
):
    """Store one token's keys and values in its slot, if it has one.

    For an e4m3 cache, keys and values are divided by their scales, and ``clipped`` counts the
    tokens that are then out of range. For an int8 cache, the scales are computed and stored too.
    """
    if PDL:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    t = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + t).to(tl.int64)
    if slot >= 0:
        h = tl.arange(0, KP)[:, None]
        d = tl.arange(0, DP)[None, :]
        mask = (h < K) & (d < D)
        place = slot // TOKENS * stride_block + slot % TOKENS * stride_token + h * stride_head + d
        key_KD = tl.load(key + t * stride_key_row + h * stride_key_head + d, mask=mask)
        value_KD = tl.load(value + t * stride_value_row + h * stride_value_head + d, mask=mask)
        if k_cache.dtype.element_ty == tl.float8e4nv:
            key_KD = key_KD.to(tl.float32) / tl.load(k_scales + h, mask=h < K, other=1.0)
            value_KD = value_KD.to(tl.float32) / tl.load(v_scales + h, mask=h < K, other=1.0)
            largest = tl.max(
                tl.max(tl.where(mask, tl.maximum(tl.abs(key_KD), tl.abs(value_KD)), 0.0), 1), 0
            )
            if largest > 448.0:
                tl.atomic_add(clipped, 1, sem="relaxed")
            key_KD = round_to_e4m3(key_KD).to(tl.float8e4nv)
            value_KD = round_to_e4m3(value_KD).to(tl.float8e4nv)
        if k_cache.dtype.element_ty == tl.int8:
            at = (
                slot // TOKENS * stride_scale_block
                + slot % TOKENS
                + tl.arange(0, KP) * stride_scale_head
            )
            key_KD, exponent_K = _to_int8(tl.where(mask, key_KD.to(tl.float32), 0.0), LEAST, MOST)
            tl.store(k_scales + at, exponent_K, mask=tl.arange(0, KP) < K)
            value_KD, exponent_K = _to_int8(
                tl.where(mask, value_KD.to(tl.float32), 0.0), LEAST, MOST
            )
            tl.store(v_scales + at, exponent_K, mask=tl.arange(0, KP) < K)
        tl.store(k_cache + place, key_KD, mask=mask)
        tl.store(v_cache + place, value_KD, mask=mask)


@triton.jit
def complete_page(
    k,
    mark,
    scales,
    table,
    length,
    stride_block,
    stride_token,
    stride_mark_block,
    stride_mark_page,
    stride_scale_block,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
    PER_BLOCK: tl.constexpr,
):
    """Write the landmark of the row's last page if the newest token has just filled it. This step
    doesn't rank that page yet.
    """
    if (length > 0) & (length % P == 0):
        page = length // P - 1
        block = tl.load(table + page // PER_BLOCK).to(tl.int64)
        _write_mean(
            k + block * stride_block,
            mark + block * stride_mark_block + page % PER_BLOCK * stride_mark_page,
            scales,
            block * stride_scale_block,
            page % PER_BLOCK,
            stride_token,
            D,
            DP,
            P,
        )


@triton.jit
def _write_mean(
    k,
    mark,
    scales,
    first_scale,
    page,
    stride_token,
    D: tl.constexpr,
    DP: tl.constexpr,
    P: tl.constexpr,
):
    """Store the mean key of one page in a block. The block's scales, if any, start at
    ``first_scale``.
    """
    token = page * P + tl.arange(0, P)
    d = tl.arange(0, DP)
    k_PD = tl.load(k + token[:, None] * stride_token + d[None, :], mask=(d < D)[None, :], other=0.0)
    k_PD = k_PD.to(tl.float32)
    if scales is not None:
        k_PD *= scale_of(tl.load(scales + first_scale + token))[:, None]
    mean = tl.sum(k_PD, 0) / P
    if mark.dtype.element_ty == tl.float8e4nv:
        mean = round_to_e4m3(mean)
    tl.store(mark + d, mean.to(mark.dtype.element_ty), mask=d < D)


@triton.jit
def round_to_e4m3(x):
    """Round to the nearest e4m3 value, ties to even, clamped to 448. This is done in float32, to
    get the same result on all devices.
    """
    x = tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)
    # Values below 2^-6 are subnormal in e4m3, so don't go below that exponent.
    exponent = tl.maximum(x.to(tl.int32, bitcast=True) & 0x7F800000, 121 << 23)
    # The exponent of ``large`` is 20 higher than ``exponent``, so the last mantissa bit of
    # ``large`` is worth as much as x's last e4m3 bit. Adding ``large`` rounds x to that bit.
    large = ((exponent + (20 << 23)) | 0x400000).to(tl.float32, bitcast=True)
    return (x + large) - large


@triton.jit
def scale_of(exponent):
    """Convert exponent bytes to scales (see ``attention/int8.py``)."""
    return (exponent.to(tl.int32) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _to_int8(x_KD, LEAST: tl.constexpr, MOST: tl.constexpr):
    """Same as ``to_int8`` in ``attention/int8.py``. Return the codes and the exponent bytes.
    Exponent bytes are clamped to ``LEAST .. MOST``.
    """
    # Bit patterns of non-negative floats sort like the floats, with NaN last.
    bits = tl.max(x_KD.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    exponent = tl.minimum(tl.maximum(((bits + 0x1FFFF) >> 23) - 6, LEAST), MOST)
    x_KD *= ((254 - exponent) << 23).to(tl.float32, bitcast=True)[:, None]
    x_KD = tl.where((bits < 0x7F800000)[:, None], tl.minimum(tl.maximum(x_KD, -127.0), 127.0), 0.0)
    # Adding 1.5 * 2^23 leaves no fractional bits, so the sum is rounded to an integer, ties to
    # even.
    codes = ((x_KD + 12582912.0) - 12582912.0).to(tl.int8)
    return codes, tl.where(bits >= 0x7F800000, 255, exponent).to(tl.uint8)
