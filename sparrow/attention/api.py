"""Public API for page-sparse attention. Each function checks its arguments and runs the requested
implementation. There is no fallback. For an empty batch, the result is empty.

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

# There is no CUDA kernel for teacher forcing.
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
        length_B: each row's length in tokens, int64.
        top_k_B: number of pages kept by score, int64.
        layout: page size and always-kept pages.
        scale: softmax scale, ``D ** -0.5`` by default.
        head_budgets_K: as in ``paged_decode``.

    Returns:
        ``[B, H, D]`` in the dtype of ``q_BHD``.

    Raises ValueError if H is not a multiple of K, or the shapes don't match.
    """
    q_BHD, k_BKSD, v_BKSD, scale = _prepared(q_BHD, k_BKSD, v_BKSD, scale, head_budgets_K)
    if q_BHD.numel() == 0:
        return q_BHD.clone()
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

    The query of the first new token selects the pages, and all T tokens read these pages. The pages
    that a token reads therefore don't depend on later tokens. ``length_B`` includes all the new
    tokens, and ``top_k_B`` is the budget of the first new token. The other arguments are the same
    as for ``decode``.

    Returns:
        ``[B, H, T, D]`` in the dtype of ``q_BHTD``.

    Raises ValueError in the same cases as ``decode``.
    """
    q_BHTD, k_BKSD, v_BKSD, scale = _prepared(q_BHTD, k_BKSD, v_BKSD, scale, head_budgets_K)
    if q_BHTD.numel() == 0:
        return q_BHTD.clone()
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
    pages. If no page is left out, the row's attention is dense. Cache entries beyond a row's length
    have no effect, and a row of length 0 returns zeros. If a new token completes a page, this call
    also writes the page's landmark; for tokens that aren't decoded, such as prompt tokens, call
    ``update_landmarks``. The kernels are bitwise deterministic and never sync with the device. If
    ``out`` is given, they don't allocate memory either, so the call can be captured in a CUDA graph
    and replayed with different lengths and budgets.

    Args:
        q_BHD: queries of the newest tokens, whose keys and values are already in the cache. The
            tensor may be strided, but D must be contiguous. If ``tokens`` (T) is more than 1, the
            shape is ``[B * T, H, D]``.
        k_cache: cached keys, a strided view ``[blocks, K, block tokens, D]``; blocks hold a whole
            number of pages.
        v_cache: cached values, a strided view like ``k_cache``.
        landmark_cache: mean keys of full pages, ``[blocks, block tokens / P, K, D]``, updated in
            place. The dtype is that of the queries, or float8_e4m3fn if the layout specifies it.
            For float8_e4m3fn keys, the means are taken over the stored values, without the key
            scale.
        block_table_BM: block ids of each sequence, in order, int32; entries beyond the sequence's
            length are not read.
        length_B: length of each sequence in tokens, including all new tokens, int32; either 0 or at
            least T.
        top_k_B: number of pages kept by score, int32; ``ALL_PAGES`` keeps every page.
        layout: page size, always-kept pages, landmark dtype.
        implementation: one of the following. There is no fallback; use ``choose`` to get the
            fastest one.

            - ``reference``: eager torch, on any device.
            - ``triton``: float16 or bfloat16 queries, with a cache in the same dtype, float8_e4m3fn
              or int8. It needs ``workspace``, and compute capability 8.9 for float8.
            - ``cuda``: Hopper only. It supports pages of 16 tokens, head dims 64, 128 and 256,
              groups up to 16, and the same dtypes as ``triton``. It needs ``workspace``, and is
              compiled on the first call.
        scale: softmax scale, ``D ** -0.5`` by default.
        cache_scales: scales of a float8_e4m3fn or int8 cache, required for those dtypes. They are
            read on the device, so a captured graph picks up changes.
        head_budgets_K: per-head multiplier for ``top_k_B``, int32 in units of 1 / 256; the product
            is rounded half up. Always-kept pages and ``ALL_PAGES`` are not affected. ``None`` if
            all heads keep ``top_k_B`` pages.
        out: output tensor, ``[B, H, D]``; allocated if not given.
        workspace: scratch memory for the kernels, shared by all layers.
        reuse_plan: pass True if the last call with this workspace had the same lengths, ``top_k_B``
            and implementation, as in every layer of a step but the first. ``head_budgets_K`` may
            differ. If True, the kernels reuse the last call's work plan, and may rank pages while
            the previous launch is still storing the newest tokens.
        tokens: new tokens per sequence (T). The query of the first new token selects the pages for
            all T tokens, and each page is loaded once. Each token also reads itself and the new
            tokens before it (see ``decode_several``). Both kernels support up to one page of new
            tokens. ``triton`` supports up to 64 queries per kv head (G * T), and ``cuda`` up to 32,
            or 16 with head dim 256.

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
    if not len(length_B):
        return batch.out_BHD
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
    """The implementation to use for a batch, depending on the batch size."""

    implementation: Implementation
    few_rows: int = 0  # batches of up to this many rows are decoded with ``triton``
    is_tuned: bool = False  # whether ``triton`` uses a configuration from ``sparrow tune``

    def of(self, rows: int) -> Implementation:
        """Return the implementation to use for a batch of ``rows`` rows."""
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
    """Choose the implementation for a model of this shape on ``device``.

    This is the implementation that the user requested or, by default, the fastest one. ``tokens``
    is the number of new tokens per sequence in a step.

    The CUDA kernel is the default wherever it's supported, except for batches so small that it
    would leave most SMs idle. For such batches, the Triton kernels are faster, because they split
    the ranking of a row across several programs.

    Raises ConfigError if the requested implementation doesn't support the model or the device, or
    if the file saved by ``sparrow tune`` can't be read.
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
    """Update, in place, the landmarks (mean keys) of all pages that these slots complete.

    Slot s is token ``s % block tokens`` of block ``s // block tokens``; negative slots are padding.
    The mean is computed from the cached page, so repeated, chunked or shared prefills all give the
    same landmark.

    Args:
        layers: caches of one or more layers, with the keys already written.
        slot_mapping_T: the slots that have just been written, as integers.
        layout: page size and landmark dtype.
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
    """Compute attention over whole sequences at once. Every position reads the pages that it would
    have read during decoding (arXiv 2606.08446, section 7).

    Row b's sequence is columns ``start_B[b] .. start_B[b] + length_B[b] - 1``. Values outside these
    columns have no effect, but with ``reference`` they must be finite. Under autocast, q, k and v
    are cast as in dense attention. ``triton`` is bitwise deterministic, including its gradients.
    Its memory grows linearly with the length, except for a few bits per (position, page, kv head).

    Args:
        q_BHTD: queries after the rotary embedding.
        k_BKTD: keys after the rotary embedding.
        v_BKTD: values.
        start_B: each row's first column, int64.
        length_B: each row's length in tokens, int64.
        prompt_B: number of leading tokens in each row that attend densely, as in prefill, int64.
        top_k_BT: number of pages kept by score at each column, int64.
        layout: page size and always-kept pages.
        implementation: ``reference`` (eager torch, any device; as slow and memory-hungry as masked
            dense attention) or ``triton`` (time grows with the budget; D up to 256, groups up to
            16). There is no fallback.
        scale: softmax scale, ``D ** -0.5`` by default.
        head_budgets_K: as in ``paged_decode``.
        kept: pass an empty list if the call will be repeated, as in gradient checkpointing. The
            first call stores its result and the kept pages in the list. The second call takes both
            from the list instead of recomputing them. Only ``triton`` uses the list.
        tokens: number of tokens per decode step. Steps are counted from the end of the prompt. All
            tokens of a step read the pages selected by its first token, as in ``decode_several``.

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
    if implementation not in ("reference", "triton"):
        raise ValueError(
            f"unknown implementation {implementation!r}, expected 'reference' or 'triton'"
        )
    if q_BHTD.numel() == 0:
        return q_BHTD.clone()
    arguments = (q_BHTD, k_BKTD, v_BKTD, start_B, length_B, prompt_B, top_k_BT, layout, scale)
    with torch.autocast(q_BHTD.device.type, enabled=False):
        if implementation == "reference":
            return reference.teacher_forced(
                *arguments, head_budgets_K=head_budgets_K, tokens=tokens
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
    """Check q, k and v, and cast them if autocast is on. Return them and the softmax scale."""
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
