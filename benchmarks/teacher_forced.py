"""Time the forward and backward passes of the teacher-forced sparse kernels and of dense causal
attention on one GPU.

    python benchmarks/teacher_forced.py                 # writes benchmarks/results/teacher_forced.json

There is one sequence in bfloat16, with 8 kv heads, D 128 and pages of 16. A tile of positions reads
every page that any of them keeps, so the cost of the sparse kernel depends on how much neighbouring
positions differ in their pages. Random data doesn't show how much they differ in real models, so
three kinds of data are timed: "same" (one query for all positions, the best case), "drifting"
(queries that partly change slowly along the sequence) and "independent" (all queries and keys drawn
independently, the worst case). ``read`` is the number of pages that a tile reads, divided by the
number that a single position keeps.

Dense attention is torch's scaled_dot_product_attention with its flash kernel and with its cuDNN
kernel. Times are medians of CUDA event times.

Shapes: T tokens, G query heads per kv head, k pages kept by score.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import triton
from common import parser, save
from gpu_timing import milliseconds
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparrow.attention import PageLayout, teacher_forced
from sparrow.attention.triton.forced import Call

K, D, LAYOUT = 8, 128, PageLayout()
CASES = [(32_768, 2, 253), (32_768, 4, 253), (32_768, 2, 125), (65_536, 2, 253)]
KINDS = ("same", "drifting", "independent")
DENSE = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def drift(T: int, heads: int, scale: float = 512.0) -> Tensor:
    """Return Gaussian vectors that decorrelate over ``scale`` positions, ``[1, heads, T, D]``."""
    knots = torch.randn(1, heads, D, int(T / scale) + 2, device="cuda")
    line = F.interpolate(knots.flatten(0, 1), size=T, mode="linear", align_corners=True)
    line = line / line.std(dim=1, keepdim=True)
    return line.view(1, heads, D, T).transpose(2, 3)


def inputs(kind: str, T: int, G: int) -> list[Tensor]:
    """Return q, k, v and the output gradient in bfloat16."""
    torch.manual_seed(0)
    q, k, v, d_out = (torch.randn(1, heads, T, D, device="cuda") for heads in (K * G, K, K, K * G))
    if kind == "same":
        q = q[:, :, :1].expand_as(q).contiguous()
    elif kind == "drifting":
        q = 0.8**0.5 * drift(T, K * G) + 0.2**0.5 * q
        k = 0.5**0.5 * drift(T, K, 64.0) + 0.5**0.5 * k
    return [x.bfloat16().contiguous() for x in (q, k, v, d_out)]


def forward_backward(
    attention: Callable[..., Tensor], q: Tensor, k: Tensor, v: Tensor, d_out: Tensor
) -> dict:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    out = attention(*leaves)
    with torch.no_grad():
        forward = milliseconds(lambda: attention(*leaves))
    backward = milliseconds(lambda: torch.autograd.grad(out, leaves, d_out, retain_graph=True))
    return {"forward_ms": forward, "backward_ms": backward}


def dense(backend: SDPBackend, *tensors: Tensor) -> dict[str, Any]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return forward_backward(attention, *tensors)


def sparse(T: int, k: int, tensors: list[Tensor]) -> dict[str, Any]:
    q, key, v, d_out = tensors
    start, length, prompt = (torch.tensor([x], device="cuda") for x in (0, T, 256))
    top_k = torch.full((1, T), k, device="cuda")
    call = Call(q, key, v, start, length, LAYOUT, D**-0.5)
    selection = call.select(prompt, top_k)
    kept = sum(
        int(((selection.masks >> bit) & 1).sum()) for bit in range(32)
    )  # averaged over positions and kv heads
    out, lse = call.attend(selection)
    parts = {
        "select_ms": milliseconds(lambda: call.select(prompt, top_k)),
        "attend_ms": milliseconds(lambda: call.attend(selection)),
        "readers_ms": milliseconds(lambda: call.readers(selection)),
        "query_gradient_ms": milliseconds(lambda: call.query_gradient(out, lse, d_out, selection)),
    }
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    whole = forward_backward(
        lambda q, k, v: teacher_forced(
            q, k, v, start, length, prompt, top_k, layout=LAYOUT, implementation="triton"
        ),
        *tensors,
    )
    peak = torch.cuda.max_memory_allocated() - before
    read = int(selection.counts.sum()) * call.BT / kept
    return (
        whole
        | parts
        | {"read": read, "kept_share": kept * 16 / (T * T / 2 * K), "peak_mib": peak / 2**20}
    )


def main() -> None:
    out = parser(__doc__, "teacher_forced").parse_args().out
    result: dict[str, Any] = {"triton": triton.__version__, "cases": []}
    for T, G, k in CASES:
        case: dict[str, Any] = {"T": T, "G": G, "top_k": k, "dense": {}, "sparse": {}}
        tensors = inputs("independent", T, G)
        for name, backend in DENSE.items():
            try:
                case["dense"][name] = dense(backend, *tensors)
            except RuntimeError as error:
                case["dense"][name] = f"not available: {error}"
        for kind in KINDS:
            case["sparse"][kind] = sparse(T, k, inputs(kind, T, G))
        print(json.dumps(case), flush=True)
        result["cases"].append(case)
        save(out, result)


if __name__ == "__main__":
    main()
