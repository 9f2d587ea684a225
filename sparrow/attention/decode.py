"""Code shared by all implementations of a paged decode step: the batch, the workspace and the
limits.

``reference``, ``triton`` and ``cuda`` each provide ``check`` and ``run`` for a ``DecodeBatch``; see
``DecodeImplementation``.

Shapes: B sequences, T new tokens each, H query heads, K kv heads, G = H / K, D head dim, P page
size, N pages, M blocks in a block table row. An item is a (sequence, kv head) pair.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from sparrow.attention.pages import FP8, LandmarkDtype, PageLayout

HEAD_DIMS = (64, 80, 96, 128, 256)
PAGE_SIZES = (8, 16, 32, 64)
QUERY_DTYPES = (torch.float16, torch.bfloat16)
MAX_GROUP = 16
MAX_COLUMNS = 64  # maximum number of queries that read the same keys, G * T
MAX_PAGES = 16384  # the most pages that the kernels can rank
CACHES_IN_8_BITS = (FP8, torch.int8)
MOST_EXTRA = 5
"""Workspaces have room for this many attention programs per SM, in addition to one per item."""
FP8_CAPABILITY = (8, 9)  # minimum compute capability for e4m3 conversions
PLAN_ENTRY = 8  # int32s per plan entry; see ``division``


@dataclass(frozen=True)
class CacheScales:
    """Scales of an 8-bit cache, on the same device as the cache. To get a key or value, multiply
    the stored number by its scale.

    A float8_e4m3fn cache has one scale per kv head, float32 ``[K]``. If the scales are powers of 2,
    converting stored keys and values to 16 bits is exact. An int8 cache has one scale per token and
    kv head, a power of 2 stored as its exponent byte (see ``attention/int8.py``). These scales are
    uint8 ``[blocks, K, block tokens]``, contiguous along the tokens, with the same strides for keys
    and values.
    """

    k: Tensor
    v: Tensor

    @property
    def strides(self) -> tuple[int, int]:
        """Block and head strides of per-token scales; both 0 for per-head scales."""
        return (0, 0) if self.k.ndim == 1 else (self.k.stride(0), self.k.stride(1))


@dataclass(frozen=True)
class DecodeBatch:
    """The newest tokens of each sequence and the cache they attend to. For the fields, see
    ``paged_decode``.
    """

    q_BHD: Tensor
    k_cache: Tensor  # [blocks, K, block tokens, D]
    v_cache: Tensor  # [blocks, K, block tokens, D]
    landmark_cache: Tensor  # [blocks, block tokens / P, K, D], updated in place
    block_table_BM: Tensor  # int32
    length_B: Tensor  # int32
    top_k_B: Tensor  # int32
    out_BHD: Tensor
    layout: PageLayout
    scale: float
    cache_scales: CacheScales | None = None  # scales of an 8-bit cache; None for other caches
    # int32, in units of 1 / 256; None if all heads keep ``top_k_B`` pages
    head_budgets_K: Tensor | None = None
    tokens: int = 1  # T; ``q_BHD`` and ``out_BHD`` have B * T rows

    @property
    def kv_heads(self) -> int:
        return self.k_cache.shape[1]

    @property
    def group(self) -> int:
        return self.q_BHD.shape[1] // self.kv_heads

    @property
    def head_dim(self) -> int:
        return self.q_BHD.shape[2]

    @property
    def items(self) -> int:
        return len(self.length_B) * self.kv_heads

    @property
    def pages_per_block(self) -> int:
        return self.k_cache.shape[2] // self.layout.page_size

    @property
    def max_pages(self) -> int:
        """The most pages a block table row can hold."""
        return self.block_table_BM.shape[1] * self.pages_per_block


@dataclass(frozen=True)
class DeviceLimits:
    """Device limits for choosing launch configurations: the number of SMs, and a program's shared
    memory in bytes.
    """

    multiprocessors: int
    shared_memory: int


H200 = DeviceLimits(multiprocessors=132, shared_memory=227 * 1024)


@cache
def device_limits(device: torch.device) -> DeviceLimits:
    """Return the limits of ``device``. For the CPU, where kernels run in Triton's interpreter,
    return the limits of an H200.
    """
    if device.type != "cuda":
        return H200
    properties = torch.cuda.get_device_properties(device)
    # This attribute is missing from torch's stubs.
    shared_memory = properties.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return DeviceLimits(properties.multi_processor_count, shared_memory)


def fp8_lacking(
    device: torch.device, keys: torch.dtype, landmark_dtype: LandmarkDtype
) -> str | None:
    """Return a sentence that says why the kernels don't support keys and landmarks in these dtypes
    on ``device``, or None if they do.
    """
    if landmark_dtype == "fp8_e4m3":
        what = "landmarks"
        option = "landmark_dtype"
    elif keys == FP8:
        what = "keys and values"
        option = "kv_cache_dtype"
    else:
        return None
    if device.type != "cuda" or torch.cuda.get_device_capability(device) >= FP8_CAPABILITY:
        return None
    needed = ".".join(map(str, FP8_CAPABILITY))
    name = torch.cuda.get_device_name(device)
    return (
        f"{what} in fp8_e4m3 need a GPU with compute capability {needed} or higher, but that "
        f"of {name} is lower; set {option} to 'auto'"
    )


class DecodeWorkspace:
    """Scratch memory for decode steps, allocated once and shared by all layers. Don't use it from
    two streams at once.

    Args:
        max_batch: maximum number of sequences per call (B).
        kv_heads: number of kv heads (K).
        group: query heads per kv head (G).
        head_dim: head dim (D).
        max_pages: maximum number of pages per sequence, up to 16,384.
        device: device of the caches.
        tokens: maximum number of new tokens per sequence (T).

    Raises ValueError if ``max_pages`` is more than the kernels can rank.
    """

    def __init__(
        self,
        max_batch: int,
        kv_heads: int,
        group: int,
        head_dim: int,
        max_pages: int,
        device: torch.device | str,
        tokens: int = 1,
    ) -> None:
        if not 1 <= max_pages <= MAX_PAGES:
            raise ValueError(
                f"cannot rank sequences of up to {max_pages} pages; the maximum must be between 1 "
                f"and {MAX_PAGES}, so use larger pages or a shorter maximum length"
            )
        device = torch.empty(0, device=device).device
        self.max_batch = max_batch
        self.kv_heads = kv_heads
        self.group = group
        self.head_dim = head_dim
        self.max_pages = max_pages
        self.tokens = tokens

        columns = group * tokens
        items = max_batch * kv_heads
        extra = MOST_EXTRA * device_limits(device).multiprocessors // kv_heads * kv_heads
        parts = items + extra  # maximum number of parts in a launch
        # Page scores, later overwritten with the ids of the kept pages. Rows are padded to a
        # multiple of 16 to keep loads aligned.
        self.rows = torch.empty(items, -(-max_pages // 16) * 16, dtype=torch.float32, device=device)
        self.partial = torch.empty(parts, columns, head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(parts, 2, columns, dtype=torch.float32, device=device)
        self.plan = torch.empty(parts // kv_heads, PLAN_ENTRY, dtype=torch.int32, device=device)
        # How many programs have finished their part of each item. One row is for ranking, and one
        # for attention. Every launch resets its own counters to zero.
        self.counters = torch.zeros(2, items, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        """Device memory used by the workspace, in bytes."""
        return sum(
            x.nbytes for x in (self.rows, self.partial, self.stats, self.plan, self.counters)
        )


class DecodeImplementation(Protocol):
    """The interface of the modules ``reference``, ``triton`` and ``cuda``."""

    def check(self, batch: DecodeBatch, workspace: DecodeWorkspace | None) -> None:
        """Raise ValueError if the batch's shapes, strides or dtypes are not supported."""

    def run(
        self, batch: DecodeBatch, workspace: DecodeWorkspace | None, reuse_plan: bool = False
    ) -> Tensor:
        """Decode a batch that has passed ``check``, and return ``batch.out_BHD``."""


def check_shapes(batch: DecodeBatch) -> None:
    """Raise ValueError if the shapes don't match. All implementations need this check."""
    q = batch.q_BHD
    k = batch.k_cache
    v = batch.v_cache
    out = batch.out_BHD
    agree = k.shape == v.shape and q.shape[2] == k.shape[3] and q.shape == out.shape
    if q.shape[1] % k.shape[1] or not agree:
        raise ValueError(
            "the number of query heads must be a multiple of the number of kv heads, and shapes must "
            "agree; got q "
            f"{tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}, out {tuple(out.shape)}"
        )

    if batch.tokens < 1 or len(q) != len(batch.length_B) * batch.tokens:
        sequences = len(batch.length_B)
        raise ValueError(
            f"expected one query per new token: {sequences * batch.tokens} queries for {sequences} "
            f"sequences with {batch.tokens} new tokens each, but got {len(q)}"
        )

    scales = batch.cache_scales
    if (scales is None) == (k.dtype in CACHES_IN_8_BITS) or k.dtype != v.dtype:
        raise ValueError(
            f"caches in {FP8} or torch.int8 require scales, and caches in other dtypes must "
            f"not have scales; got keys in {k.dtype}, values in {v.dtype} and "
            f"{'no scales' if scales is None else 'scales'}"
        )
    if scales is not None:
        check_scales(scales.k, k)
        check_scales(scales.v, k)
        if scales.k.stride() != scales.v.stride():
            raise ValueError(
                "scales of keys and values must have the same strides, got "
                f"{scales.k.stride()} and {scales.v.stride()}"
            )
    check_head_budgets(batch.head_budgets_K, k)


def check_scales(scales: Tensor, cache: Tensor) -> None:
    """Raise ValueError if the scales' shape, dtype or strides don't match ``cache``."""
    if cache.dtype == FP8:
        shape = cache.shape[1:2]
        dtype = torch.float32
    else:
        shape = cache.shape[:3]
        dtype = torch.uint8
    if scales.shape != shape or scales.dtype != dtype or scales.stride(-1) != 1:
        raise ValueError(
            f"scales must be contiguous {dtype} {list(shape)}, got {scales.dtype} "
            f"{tuple(scales.shape)}"
        )


def check_head_budgets(head_budgets_K: Tensor | None, k: Tensor) -> None:
    """Raise ValueError unless the head budgets are a contiguous int32 tensor on the keys' device,
    with one value per kv head. The keys have shape ``[B, K, ...]``.
    """
    x = head_budgets_K
    if x is None:
        return
    K = k.shape[1]
    if x.shape != (K,) or x.dtype != torch.int32 or x.stride(0) != 1 or x.device != k.device:
        got = f"{x.dtype} {tuple(x.shape)} on {x.device}"
        raise ValueError(f"head_budgets_K must be contiguous int32 [{K}] on {k.device}, got {got}")


def check_landmarks(k_cache: Tensor, landmark_cache: Tensor, layout: PageLayout) -> None:
    """Raise ValueError if the landmarks' shape or dtype doesn't match the keys and the layout.

    For 8-bit keys, landmarks may have any 16-bit or 32-bit float dtype.
    """
    blocks, K, block_tokens, D = k_cache.shape
    shape = (blocks, block_tokens // layout.page_size, K, D)
    dtype = layout.landmark_type(k_cache.dtype)
    if k_cache.dtype in CACHES_IN_8_BITS and layout.landmark_dtype == "auto":
        dtype = torch.bfloat16
        if landmark_cache.dtype in (*QUERY_DTYPES, torch.float32):
            dtype = landmark_cache.dtype
    if landmark_cache.shape != shape or landmark_cache.dtype != dtype:
        raise ValueError(
            f"landmarks must be {shape} in {dtype}, got {tuple(landmark_cache.shape)} in "
            f"{landmark_cache.dtype}"
        )


class CachedLayers:
    """Layers whose caches contain the same tokens in the same slots.

    Args:
        caches: for each layer, its keys (a strided view ``[blocks, K, block tokens, D]``), its
            landmarks (as in ``DecodeBatch``) and, for int8 keys, the key scales (as in
            ``CacheScales``). All layers must have the same shapes, strides and dtypes.

    Raises ValueError if there are no layers, if the layers differ, or if the spacing of the caches
    would make loads unaligned. Also raises ValueError if int8 keys have no scales, or if keys of
    another dtype have scales.
    """

    def __init__(self, caches: Sequence[tuple[Tensor, ...]]) -> None:

        def kind(layer: tuple[Tensor, ...]) -> tuple[object, ...]:
            return tuple((x.shape, x.stride(), x.dtype, x.device) for x in layer)

        if not caches:
            raise ValueError("there are no layers, expected the cache of at least one layer")
        kinds = {kind(layer) for layer in caches}
        if len(kinds) > 1:
            raise ValueError(
                f"all layers must have the same kind of cache, but the {len(caches)} layers "
                f"have {len(kinds)} different kinds"
            )
        self.caches = tuple(caches)
        self.keys, self.landmarks, *scales = caches[0]
        if len(scales) != (self.keys.dtype == torch.int8):
            raise ValueError(
                "int8 keys need one tensor of scales, and keys in other dtypes need none; got "
                f"{self.keys.dtype} keys with {len(scales)} tensors of scales"
            )
        self.scales = scales[0] if scales else None
        if self.scales is not None:
            check_scales(self.scales, self.keys)

        def distance(layer: tuple[Tensor, ...]) -> list[int]:
            """Return the offsets of this layer's keys, landmarks and scales from the first layer's,
            in elements.
            """
            return [
                (x.data_ptr() - first.data_ptr()) // x.itemsize
                for x, first in zip(layer, caches[0], strict=True)
            ]

        distances = [distance(layer) for layer in caches]
        if any(elements % 16 for layer in distances for elements in layer):
            raise ValueError(f"the caches are {distances} elements apart, expected multiples of 16")
        self.distance_L3 = torch.tensor(
            [[*layer, 0][:3] for layer in distances], device=self.keys.device
        )


def check_cache(k_cache: Tensor, landmark_cache: Tensor, layout: PageLayout) -> None:
    """Raise ValueError if the kernels don't support this cache."""
    block_tokens, D = k_cache.shape[2:]
    P = layout.page_size
    if P not in PAGE_SIZES or block_tokens % P:
        raise ValueError(
            f"pages of {P} tokens do not fit blocks of {block_tokens} tokens; choose a page size from "
            f"{PAGE_SIZES} that divides the block size"
        )
    if D not in HEAD_DIMS:
        raise ValueError(
            f"there is no kernel for head dim {D}, expected one of {HEAD_DIMS}; use "
            "implementation='reference'"
        )
    if k_cache.dtype not in (*QUERY_DTYPES, *CACHES_IN_8_BITS):
        raise ValueError(
            f"caches must be float16, bfloat16, float8_e4m3fn or int8, got {k_cache.dtype}"
        )
    check_landmarks(k_cache, landmark_cache, layout)
    if k_cache.stride(3) != 1 or landmark_cache.stride(3) != 1:
        raise ValueError(
            "keys and landmarks must be contiguous along the head dim, got strides "
            f"{k_cache.stride()} and {landmark_cache.stride()}"
        )


def check_for_kernels(batch: DecodeBatch, workspace: DecodeWorkspace | None) -> None:
    """Raise ValueError if no kernel supports this batch. The checks include ``check_shapes`` and
    ``check_cache``.
    """
    check_shapes(batch)
    check_cache(batch.k_cache, batch.landmark_cache, batch.layout)

    B = len(batch.length_B)
    T = batch.tokens
    K = batch.kv_heads
    G = batch.group
    D = batch.head_dim
    q = batch.q_BHD
    k = batch.k_cache
    v = batch.v_cache
    out = batch.out_BHD
    if q.dtype not in QUERY_DTYPES or k.dtype not in (q.dtype, *CACHES_IN_8_BITS):
        raise ValueError(
            "queries must be float16 or bfloat16, and the cache must have the same dtype unless it "
            f"is an 8-bit cache; got queries in {q.dtype} and keys in {k.dtype}"
        )
    if batch.landmark_cache.dtype not in (q.dtype, FP8):
        raise ValueError(
            f"landmarks must be in {q.dtype}, like the queries, or in {FP8}, got "
            f"{batch.landmark_cache.dtype}"
        )
    if v.stride() != k.stride():
        raise ValueError(
            f"keys and values must have the same strides, got {k.stride()} and {v.stride()}"
        )
    if not q.stride(2) == v.stride(3) == out.stride(2) == 1:
        raise ValueError(
            "q, v and out must be contiguous along the head dim, got strides "
            f"{q.stride()}, {v.stride()} and {out.stride()}"
        )

    rows = dict(block_table_BM=batch.block_table_BM, length_B=batch.length_B, top_k_B=batch.top_k_B)
    for name, x in rows.items():
        if x.dtype != torch.int32 or x.shape[0] != B or x.stride(-1) != 1:
            raise ValueError(
                f"{name} must be contiguous int32 with {B} rows, got {x.dtype} {tuple(x.shape)}"
            )

    if workspace is None:
        raise ValueError("the kernels need a workspace; create one DecodeWorkspace for all layers")
    if (workspace.kv_heads, workspace.group, workspace.head_dim) != (K, G, D) or G > MAX_GROUP:
        raise ValueError(
            f"the batch has {K} kv heads, group {G} and head dim {D}, but the workspace is for "
            f"{workspace.kv_heads} kv heads, group {workspace.group} and head dim "
            f"{workspace.head_dim}; groups may not exceed {MAX_GROUP}"
        )
    if min(workspace.tokens, batch.layout.page_size) < T or G * T > MAX_COLUMNS:
        raise ValueError(
            f"each sequence has {T} new tokens, but the workspace allows {workspace.tokens}, the "
            f"page size allows {batch.layout.page_size}, and a group of {G} allows "
            f"{MAX_COLUMNS // G}; decode fewer tokens at a time, or create a larger workspace"
        )
    if workspace.max_batch < B or workspace.max_pages < batch.max_pages:
        raise ValueError(
            f"{B} sequences of up to {batch.max_pages} pages do not fit in a workspace for "
            f"{workspace.max_batch} sequences of {workspace.max_pages} pages; create a larger workspace"
        )
