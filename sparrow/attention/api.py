"""Public operations of page-sparse attention. Each one validates its arguments, then runs exactly
the requested implementation.

Shapes: B sequences, T query tokens, S cached tokens, H query heads, K kv heads, G = H / K, D head
dim, P page size, N pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from sparrow.attention import reference
from sparrow.attention.decode import (
    CachedLayers,
    CacheScales,
    DecodeBatch,
    DecodeImplementation,
    DecodeWorkspace,
    check_head_budgets,
    fp8_lacking,
)
from sparrow.attention.pages import LandmarkDtype, PageLayout
from sparrow.errors import ConfigError

if TYPE_CHECKING:
    from sparrow.attention.triton.forced import Kept

# there is no CUDA kernel for teacher forcing
Implementation = Literal["reference", "triton", "cuda"]


def decode(
    q_BHD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    start_B: Tensor | None,
    length_B: Tensor,
    top_k_B: Tensor,
    *,
    layout: PageLayout,
    scale: float | None = None,
    head_budgets_K: Tensor | None = None,
) -> Tensor:
    """Compute one sparse decode step over a contiguous cache; see ``reference.decode``.

    Under autocast, q, k and v are cast as in dense attention.

    Args:
        q_BHD: queries of the newest tokens.
        k_BKSD: cached keys, including those of the newest tokens.
        v_BKSD: cached values, including those of the newest tokens.
        start_B: each row's first column, int64; ``None`` means 0 for all rows.
        length_B: each row's number of tokens, int64.
        top_k_B: number of pages kept by score, int64.
        layout: page size and always-kept pages.
        scale: softmax scale, ``D ** -0.5`` by default.
        head_budgets_K: as in ``paged_decode``.

    Returns:
        ``[B, H, D]`` in the dtype of ``q_BHD``.

    Raises ValueError if the number of query heads is not a multiple of the number of kv heads, or
    the shapes do not match.
    """
    q_BHD, k_BKSD, v_BKSD, scale = _prepared(q_BHD, k_BKSD, v_BKSD, scale, head_budgets_K)
    with torch.autocast(q_BHD.device.type, enabled=False):  # autocast would round page scores
        return reference.decode(
            q_BHD, k_BKSD, v_BKSD, start_B, length_B, top_k_B, layout, scale, head_budgets_K
        )


def decode_several(
    q_BHTD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    start_B: Tensor | None,
    length_B: Tensor,
    top_k_B: Tensor,
    *,
    layout: PageLayout,
    scale: float | None = None,
    head_budgets_K: Tensor | None = None,
) -> Tensor:
    """Compute one sparse decode step over the T newest tokens of each row; see
    ``reference.decode_several``.

    Only the query of the first new token selects pages, and all T tokens read them, so what a token
    reads does not depend on the tokens after it. ``length_B`` counts all new tokens, and
    ``top_k_B`` is the budget of the first one. All other arguments are those of ``decode``.

    Returns:
        ``[B, H, T, D]`` in the dtype of ``q_BHTD``.

    Raises ValueError: as in ``decode``.
    """
    q_BHTD, k_BKSD, v_BKSD, scale = _prepared(q_BHTD, k_BKSD, v_BKSD, scale, head_budgets_K)
    with torch.autocast(q_BHTD.device.type, enabled=False):
        return reference.decode_several(
            q_BHTD, k_BKSD, v_BKSD, start_B, length_B, top_k_B, layout, scale, head_budgets_K
        )


def paged_decode(
    q_BHD: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    landmark_cache: Tensor,
    block_table_BM: Tensor,
    length_B: Tensor,
    top_k_B: Tensor,
    *,
    layout: PageLayout,
    implementation: Implementation,
    scale: float | None = None,
    cache_scales: CacheScales | None = None,
    head_budgets_K: Tensor | None = None,
    out: Tensor | None = None,
    workspace: DecodeWorkspace | None = None,
    reuse_plan: bool = False,
    tokens: int = 1,
) -> Tensor:
    """Compute one sparse decode step over a paged cache (Sparrow, arXiv 2606.08446, section 2).

    Row b attends to its sink pages, its recent pages and the ``top_k_B[b]`` best of the remaining
    pages. If this leaves no page out, the row is dense. Cache entries beyond a row's length have no
    effect, and a row of length 0 returns zeros. If a new token completes a page, this call also
    writes the page's landmark; ``update_landmarks`` does this for tokens that are not decoded, such
    as a prompt's. The kernels are bitwise deterministic, never wait for the device and, if ``out``
    is given, allocate no memory. The call can therefore be captured in a CUDA graph and replayed
    with different lengths and budgets.

    Args:
        q_BHD: queries of the newest tokens, whose keys and values are already in the cache. The
            tensor may be strided, but D must be contiguous. With T ``tokens`` per sequence, its
            shape is ``[B * T, H, D]``.
        k_cache: cached keys, a strided view ``[blocks, K, block tokens, D]``; a block contains a
            whole number of pages.
        v_cache: cached values, a strided view like ``k_cache``.
        landmark_cache: mean keys of full pages, ``[blocks, block tokens / P, K, D]``, updated in
            place. The dtype is that of the queries, or float8_e4m3fn if the layout specifies it.
            Landmarks of float8_e4m3fn keys do not include the keys' scale.
        block_table_BM: ids of each sequence's blocks, in order, int32; entries beyond the
            sequence's length are not read.
        length_B: number of tokens in each sequence, including all new tokens, int32; either 0 or at
            least T.
        top_k_B: number of pages kept by score, int32; ``ALL_PAGES`` keeps every page.
        layout: page size, always-kept pages, dtype of landmarks.
        implementation: ``reference`` (eager torch, any device), ``triton`` (float16 or bfloat16
            queries; a cache in the same dtype, float8_e4m3fn or int8; needs ``workspace``, and
            compute capability 8.9 for float8) or ``cuda`` (only on Hopper; pages of 16 tokens, head
            dims 64, 128 and 256, groups up to 16, the same dtypes as ``triton``; needs
            ``workspace``; compiled on the first call). There is no fallback; ``choose`` picks the
            fastest implementation.
        scale: softmax scale, ``D ** -0.5`` by default.
        cache_scales: scales of a float8_e4m3fn or int8 cache, required for those dtypes. They are
            read on the device, so a captured graph sees changes to them.
        head_budgets_K: for each kv head, the factor that ``top_k_B`` is multiplied by, int32 in
            units of 1 / 256; the product is rounded half up. Always-kept pages and ``ALL_PAGES``
            are not affected. ``None`` if all heads keep ``top_k_B`` pages.
        out: tensor that receives the result, ``[B, H, D]``; allocated if not given.
        workspace: scratch memory for the kernels, shared by all layers.
        reuse_plan: pass True if the last call with this workspace had the same lengths, ``top_k_B``
            and implementation, as is the case for the layers of one step; ``head_budgets_K`` may
            differ. The kernels then reuse that call's division of the work, and may rank pages
            while the preceding launch is still storing the newest tokens.
        tokens: number of new tokens of each sequence (T). The query of the first new token selects
            the pages that all T tokens read, and each page is loaded once. Each token also reads
            the new tokens up to itself (see ``decode_several``). Both kernels support up to one page
            of new tokens. ``triton`` supports up to 64 queries per kv head (G * T), and ``cuda`` up
            to 32, or 16 with head dim 256.

    Returns:
        ``out``, in the shape and dtype of ``q_BHD``.

    Raises ValueError if the implementation is unknown or does not support the shapes, strides or
    dtypes.
    """
    batch = DecodeBatch(
        q_BHD,
        k_cache,
        v_cache,
        landmark_cache,
        block_table_BM,
        length_B,
        top_k_B,
        out_BHD=torch.empty_like(q_BHD) if out is None else out,
        layout=layout,
        scale=q_BHD.shape[-1] ** -0.5 if scale is None else scale,
        cache_scales=cache_scales,
        head_budgets_K=head_budgets_K,
        tokens=tokens,
    )
    decoder = _decoder(implementation)
    decoder.check(batch, workspace)
    return decoder.run(batch, workspace, reuse_plan)


def _decoder(implementation: Implementation) -> DecodeImplementation:
    if implementation == "reference":
        return reference
    if implementation == "triton":
        from sparrow.attention import triton

        return triton
    if implementation == "cuda":
        from sparrow.attention import cuda

        return cuda
    raise ValueError(
        f"unknown implementation {implementation!r}, expected one of {get_args(Implementation)}"
    )


@dataclass(frozen=True)
class Choice:
    """The implementation to decode with, which depends on the number of rows in the batch."""

    implementation: Implementation
    few_rows: int = 0  # batches of up to this many rows are decoded with ``triton``
    is_tuned: bool = False  # whether ``triton`` uses choices of ``sparrow tune``

    def of(self, rows: int) -> Implementation:
        """Return the implementation that decodes a batch of ``rows`` rows."""
        return "triton" if rows <= self.few_rows else self.implementation

    def __str__(self) -> str:
        few = f", triton for up to {self.few_rows} rows" if self.few_rows else ""
        tuned = " as tuned by sparrow tune" if self.is_tuned else ""
        return f"{self.implementation}{few}{tuned}"


def choose(
    asked: Implementation | None,
    *,
    page_size: int,
    head_dim: int,
    kv_heads: int,
    group: int,
    dtype: torch.dtype,
    device: torch.device,
    landmark_dtype: LandmarkDtype = "auto",
    tokens: int = 1,
) -> Choice:
    """Choose the implementation that decodes a model of these sizes on ``device``, with ``tokens``
    new tokens per sequence and step: the one that the user requested or, by default, the fastest.

    Where the CUDA kernel is supported, it is the default, except for batches with so few rows that
    it would leave most multiprocessors idle. For such batches, the Triton kernels are faster,
    because they divide the ranking of a row among several programs.

    Raises ConfigError if the requested implementation does not support the model or the device, or
    the choices that ``sparrow tune`` saved for it cannot be read.
    """
    if asked not in (None, *get_args(Implementation)):
        raise ConfigError(
            f"unknown implementation {asked!r}, expected one of {get_args(Implementation)}"
        )
    if lacking := fp8_lacking(device, dtype, landmark_dtype):
        raise ConfigError(lacking)
    if device.type == "cpu":
        if asked not in (None, "reference"):
            raise ConfigError(f"there are no {asked} kernels for CPUs; leave sparrow_kernels out")
        return Choice("reference")

    from sparrow.attention import cuda

    reason = cuda.unsupported_reason(page_size, head_dim, group, dtype, device, tokens)
    if asked == "cuda" and reason:
        raise ConfigError(reason)
    implementation = asked or ("triton" if reason else "cuda")
    few_rows = 0 if asked or reason else cuda.few_rows(kv_heads, device)
    if implementation != "triton" and not few_rows:
        return Choice(implementation)

    from sparrow.attention.triton import saved

    choices = saved.read(device, kv_heads, group, head_dim, dtype, page_size)
    return Choice(implementation, few_rows, is_tuned=choices is not None)


def update_landmarks(
    layers: CachedLayers,
    slot_mapping_T: Tensor,
    *,
    layout: PageLayout,
    implementation: Implementation,
) -> None:
    """Recompute, in place, the mean key of every page that a write to these slots completed.

    Slot s is token ``s % block tokens`` of block ``s // block tokens``; negative slots are padding.
    The mean is computed from the cached page, so the landmark is the same if prefill is repeated,
    chunked or shared.

    Args:
        layers: caches of one or more layers, with the keys already written.
        slot_mapping_T: slots that have just been written, integers.
        layout: page size and dtype of landmarks.
        implementation: as in ``paged_decode``; ``cuda`` uses the Triton kernel.

    Raises ValueError if the implementation is unknown or does not support the shapes, strides or
    dtypes.
    """
    if implementation == "reference":
        return reference.update_landmarks(layers, slot_mapping_T, layout)
    if implementation not in get_args(Implementation):
        raise ValueError(
            f"unknown implementation {implementation!r}, expected one of {get_args(Implementation)}"
        )
    from sparrow.attention import triton

    return triton.update_landmarks(layers, slot_mapping_T, layout)


def teacher_forced(
    q_BHTD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    start_B: Tensor,
    length_B: Tensor,
    prompt_B: Tensor,
    top_k_BT: Tensor,
    *,
    layout: PageLayout,
    implementation: Implementation,
    scale: float | None = None,
    head_budgets_K: Tensor | None = None,
    kept: list[Kept] | None = None,
    tokens: int = 1,
) -> Tensor:
    """Compute attention for whole sequences at once, in which every position reads the pages that
    it would have read during decoding (arXiv 2606.08446, section 7).

    Row b's sequence is columns ``start_B[b] .. start_B[b] + length_B[b] - 1``. Values outside these
    columns have no effect, but with ``reference`` they must be finite. Under autocast, q, k and v
    are cast as in dense attention. ``triton`` is bitwise deterministic, including its gradients.
    Its memory grows linearly with the length, apart from a few bits per (position, page, kv head).

    Args:
        q_BHTD: queries after the rotary embedding.
        k_BKTD: keys after the rotary embedding.
        v_BKTD: values.
        start_B: each row's first column, int64.
        length_B: each row's number of tokens, int64.
        prompt_B: number of tokens at the start of each row that attend densely, as in prefill,
            int64.
        top_k_BT: number of pages kept by score at each column, int64.
        layout: page size and always-kept pages.
        implementation: ``reference`` (eager torch, any device; takes as much time and memory as
            dense attention with a mask) or ``triton`` (its time grows with the budget; D up to 256,
            groups up to 16). There is no fallback.
        scale: softmax scale, ``D ** -0.5`` by default.
        head_budgets_K: as in ``paged_decode``.
        kept: a list for a call that will be repeated, as in gradient checkpointing. If the list is
            empty, ``triton`` stores its result and the kept pages there. If it is filled,
            ``triton`` reads them from it instead of recomputing them.
        tokens: number of tokens per decode step; steps are counted from the end of the prompt. All
            tokens of a step read the pages that the step's first token selects, as in
            ``decode_several``.

    Returns:
        ``[B, H, T, D]``, differentiable in q, k and v; zeros in padded columns.

    Raises ValueError if the implementation is unknown or does not support the shapes, strides or
    dtypes.
    """
    q_BHTD, k_BKTD, v_BKTD, scale = _prepared(q_BHTD, k_BKTD, v_BKTD, scale, head_budgets_K)
    if q_BHTD.shape[2] != k_BKTD.shape[2]:
        raise ValueError(
            "teacher forcing runs without a cache and needs as many queries as keys, got "
            f"{q_BHTD.shape[2]} queries and {k_BKTD.shape[2]} keys"
        )
    if tokens < 1:
        raise ValueError(f"a decode step needs at least one token, got tokens={tokens}")
    arguments = (q_BHTD, k_BKTD, v_BKTD, start_B, length_B, prompt_B, top_k_BT, layout, scale)
    with torch.autocast(q_BHTD.device.type, enabled=False):
        if implementation == "reference":
            return reference.teacher_forced(
                *arguments, head_budgets_K=head_budgets_K, tokens=tokens
            )
        if implementation != "triton":
            raise ValueError(
                f"unknown implementation {implementation!r}, expected 'reference' or 'triton'"
            )
        try:
            from sparrow.attention import triton
        except ImportError as error:
            raise ConfigError(
                f"implementation 'triton' needs Triton ({error}); install it, or use 'reference'"
            ) from error

        return triton.teacher_forced(*arguments, head_budgets_K, kept, tokens)


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, scale: float | None, head_budgets_K: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, float]:
    """Check queries, keys and values, and cast them if autocast is enabled; return them with the
    softmax scale.
    """
    H = q.shape[1]
    K = k.shape[1]
    device = q.device.type
    if H % K or k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[-1] != k.shape[-1]:
        raise ValueError(
            "the number of query heads must be a multiple of the number of kv heads, and shapes must "
            "agree; got q "
            f"{tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
        )
    check_head_budgets(head_budgets_K, k)
    if torch.is_autocast_enabled(device):
        q, k, v = (x.to(torch.get_autocast_dtype(device)) for x in (q, k, v))
    return q, k, v, q.shape[-1] ** -0.5 if scale is None else scale
